"""The figures of results that were made up, so that it is known what they must show."""

import io
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

import tasks
from studies.contextual_retrieval import assemble, presets
from studies.retrieval_figures import HELD_OUT, LOOKS, MOST, figures

MODELS = tuple(LOOKS)
STUDY = presets()["smoke"]
ALWAYS = {"errors", "training"}
WITH_PAIRING = {"pairing", "agreement", "forcing"}
FORCED = {"none": 1.0, "true": 0.1, "random": 3.0, "hardened": 0.8, "familiar": 0.9}


def constants_of(seed):
    """The errors of always answering 0, on id and ood."""
    return np.array([0.4, 0.5]) * (1 + seed)


def errors_of(cell):
    """Errors on id and ood: the same share of the constant's for all seeds and settings."""
    share = np.array([0.1, 0.2]) * (3 - MODELS.index(cell.mechanism))
    return share * constants_of(cell.seed)


def bounds(name, dims, value):
    parts = {"": 1.0, "_low": 0.9, "_high": 1.2}
    return {f"{name}{part}": (dims, factor * np.asarray(value)) for part, factor in parts.items()}


def made_up_tree(cell):
    """What `analyse` gives for a cell, with figures that are known."""
    searches, retrievals = cell.task.n_searches, cell.task.n_retrievals
    splits, error = ["id", "ood"], errors_of(cell)
    errors = xr.Dataset(
        {**bounds("error", "split", error), "constant": ("split", constants_of(cell.seed))},
        coords={"split": splits},
    )
    combinations = {}
    if cell.task.n_combinations <= 256:
        every = np.array(list(np.ndindex((retrievals,) * searches)))
        held = tasks.ContextualRetrieval(cell.task).combinations("ood")
        held_out = (every[:, None] == held).all(2).any(1)
        by_combination = xr.Dataset(
            {
                "error": ("combination", np.where(held_out, error[1], error[0])),
                "held_out": ("combination", held_out.astype(np.int8)),
            },
            coords={"combination": np.arange(len(every))},
        )
        combinations = {"combinations": by_combination}
    tree = combinations | {
        "errors": errors,
        "training": xr.Dataset(
            {"error": (("train_step", "split"), [4 * error, 2 * error, error])},
            coords={"split": splits, "train_step": [10, 20, 30]},
        ),
        "costs": xr.Dataset({"parameters": 100, "operations": 1000.0}),
    }
    if cell.mechanism != "compositional":
        return xr.DataTree.from_dict(tree)
    # True retrieval v is the model's v + 1, in turns; of searches, the order is reversed.
    parts = (np.arange(retrievals) + 1) % retrievals
    activation = np.zeros((2, searches + 1, retrievals, retrievals))
    activation[:, :, np.arange(retrievals), parts] = 1
    activation[1, 0, 0] = np.nan
    agreement = np.broadcast_to([[0.8, 0.7], [0.4, 0.6]], (searches + 1, 2, 2))
    agreement = np.stack([agreement, np.full_like(agreement, 0.1)])
    dims = ("control", "search", "fitted", "group")
    tree["pairing"] = xr.Dataset(
        bounds("agreement", dims, agreement)
        | {
            "search_assignment": (("fitted", "true_search"), [np.arange(searches)[::-1]] * 2),
            "retrieval_assignment": (("fitted", "true_retrieval"), [parts] * 2),
            "activation": (("group", "search", "true_retrieval", "model_retrieval"), activation),
            "pairing": (
                ("group", "model_search", "model_retrieval"),
                np.broadcast_to(np.arange(searches)[:, None] / 10, (2, searches, retrievals)),
            ),
            "chance": (dims[1:], np.full((searches + 1, 2, 2), 0.25)),
            "entropy": (("group", "model_search"), np.zeros((2, searches))),
        },
        coords={
            "control": ["observed", "shuffled"],
            "fitted": splits,
            "group": splits,
            "search": [*map(str, range(searches)), "pooled"],
            "true_search": np.arange(searches),
            "model_search": np.arange(searches),
            "true_retrieval": np.arange(retrievals),
            "model_retrieval": np.arange(retrievals),
        },
    )
    factors = np.array(list(FORCED.values()))
    tree["forcing"] = xr.Dataset(
        bounds("mean_error", "condition", factors * error[1])
        | bounds("removed", "condition", 1 - factors),
        coords={"condition": list(FORCED)},
    )
    return xr.DataTree.from_dict(tree)


def cells_of(**settings):
    changed = {"seeds": (0, 2), "d_models": (64,)} | settings
    return replace(STUDY, **changed).trained_models()


def made_up(cells):
    return assemble(cells, [made_up_tree(cell) for cell in cells])


def panels(figure):
    return [axis for axis in figure.axes if axis.get_label() != "<colorbar>" and axis.axison]


def lines(axis, label):
    """What is plotted under a label: [x, y] of every line."""
    return [np.array(line.get_data()) for line in axis.lines if line.get_label() == label]


def bars(axis):
    """Heights of the bars from the left to the right."""
    ordered = sorted(axis.patches, key=lambda bar: bar.get_x())
    return [bar.get_height() for bar in ordered]


@pytest.fixture(scope="module")
def drawn():
    """All models of the paper's smallest setting, seeds 0 and 2."""
    return figures(made_up(cells_of()))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"mechanisms": ("multi_head",)}, ALWAYS | {"combinations"}),
        ({"mechanisms": ("multi_head_pairs",), "sizes": ("4x8",)}, ALWAYS),
        ({"mechanisms": ("multi_head",), "sizes": ("1x5",)}, ALWAYS),
        ({"mechanisms": ("compositional",), "sizes": ("4x8",)}, ALWAYS | WITH_PAIRING),
        ({"sizes": ("2x4", "1x5")}, ALWAYS | WITH_PAIRING | {"combinations"}),
    ],
)
def test_what_there_is_no_data_for_is_left_out(settings, expected):
    assert set(figures(made_up(cells_of(seeds=(0,), **settings)))) == expected


def test_a_grid_that_is_not_full_can_be_drawn():
    """As that of networks that were trained elsewhere."""
    cells = [
        *cells_of(mechanisms=("multi_head",), sizes=("2x3",), seeds=(1,)),
        *cells_of(mechanisms=("compositional",), seeds=(0,)),
    ]
    found = figures(made_up(cells))
    assert set(found) == ALWAYS | WITH_PAIRING | {"combinations"}
    for figure in found.values():
        figure.savefig(io.BytesIO(), dpi=20)
    frames = [
        sum(isinstance(patch, Rectangle) for patch in axis.patches)
        for axis in panels(found["combinations"])
    ]
    assert frames == [2, 0, 0, 4]


def test_errors_are_means_over_seeds_beside_constant_and_paper(drawn):
    left, right = panels(drawn["errors"])
    assert left.get_ylabel() == "mean absolute error"
    assert right.get_ylabel() == "error / that of always answering 0"
    assert [text.get_text() for text in left.get_xticklabels()] == [
        name for _, name in LOOKS.values()
    ]
    shares = [0.3, 0.6, 0.2, 0.4, 0.1, 0.2]
    assert bars(right) == pytest.approx(shares)
    assert bars(left) == pytest.approx(np.array(shares) * np.tile([0.8, 1.0], 3))
    stars = [y.tolist() for _, y in lines(left, "the paper's figures")]
    assert stars == [[0.28, 1.0], [0.1, 0.28]]
    assert not lines(right, "the paper's figures")
    for axis, constants in ((left, [0.8, 1.0]), (right, [1.0, 1.0])):
        dashed = [
            segment[0, 1]
            for drawn_lines in axis.collections
            if drawn_lines.get_label() == "always answering 0"
            for segment in drawn_lines.get_segments()
        ]
        assert dashed == pytest.approx(constants * 3)


def test_several_widths_stand_beside_one_another():
    result = made_up(cells_of(mechanisms=("multi_head", "compositional"), d_models=(32, 64)))
    left, _ = panels(figures(result)["errors"])
    assert [text.get_text() for text in left.get_xticklabels()] == ["d=32", "d=64"]
    assert len(bars(left)) == 8
    # The paper tells of one width.
    assert all(np.all(x > 2) for x, _ in lines(left, "the paper's figures"))


def test_training_shows_seeds_and_their_mean(drawn):
    axes = panels(drawn["training"])
    assert axes[0].get_yscale() == "log"
    assert axes[0].get_ylabel() == "S=2, R=4, d=64\nmean absolute error"
    for axis, model in zip(axes, MODELS, strict=True):
        assert axis.get_xlabel() == "training step"
        cells = cells_of(mechanisms=(model,))
        finals = np.array([errors_of(cell) for cell in cells])
        for number, (split, style) in enumerate((("id", "-"), ("ood", "--"))):
            (mean,) = lines(axis, f"_{split}")
            assert mean[0].tolist() == [10, 20, 30]
            assert mean[1] == pytest.approx(finals[:, number].mean() * np.array([4, 2, 1]))
            seeds = [
                line.get_ydata()[-1]
                for line in axis.lines
                if line.get_label() == "_seeds" and line.get_linestyle() == style
            ]
            assert seeds == pytest.approx(finals[:, number])


def test_held_out_combinations_are_framed(drawn):
    axes = panels(drawn["combinations"])
    assert axes[0].get_ylabel().endswith("preference in search 0")
    for axis, model in zip(axes, MODELS, strict=True):
        assert axis.get_xlabel() == "preference in search 1"
        familiar, held_out = np.mean(
            [errors_of(cell) for cell in cells_of(mechanisms=(model,))], axis=0
        )
        expected = np.full((4, 4), familiar)
        expected[[2, 2, 3, 3], [1, 3, 1, 3]] = held_out
        assert axis.images[0].get_array().data == pytest.approx(expected)
        frames = [patch for patch in axis.patches if to_hex(patch.get_edgecolor()) == HELD_OUT]
        middles = [tuple(np.round(frame.get_center()).astype(int)) for frame in frames]
        assert middles == [(1, 2), (3, 2), (1, 3), (3, 3)]


def test_right_pairing_shows_diagonals(drawn):
    axes = panels(drawn["pairing"])
    assert len(axes) == 2 * 6
    first, other, *_, whole, _ = axes[:6]
    for axis in axes[:4]:
        assert [text.get_text() for text in axis.get_xticklabels()] == ["1", "2", "3", "0"]
    assert first.images[0].get_array().tolist() == np.eye(4).tolist()
    assert first.get_title() == "search 0, id:\nagrees 80%"
    assert first.get_ylabel() == "S=2, R=4, d=64\nseed 0\npreference"
    assert axes[6].get_ylabel() == "S=2, R=4, d=64\nseed 2\npreference"
    # Fitted on id, scored on ood; search 0 lacks a preference there.
    assert other.get_title() == "search 0, ood:\nagrees 70%"
    assert np.isnan(other.images[0].get_array().filled(np.nan)[0]).all()
    # The model's searches in the order of the true ones.
    assert [text.get_text() for text in whole.get_yticklabels()] == ["1", "0"]
    assert whole.images[0].get_array().tolist() == [[0.1] * 4, [0.0] * 4]
    assert {axis.get_xlabel() for axis in axes[6:]} == {"model's retrieval"}


def test_of_many_networks_the_first_seeds_are_shown():
    cells = cells_of(mechanisms=("compositional",), d_models=(8, 16, 24, 32, 40, 48, 56))
    found = figures(made_up(cells))
    assert len(panels(found["pairing"])) == 6 * MOST
    assert f"({MOST} of 14 networks)" in found["pairing"].get_suptitle()
    assert all("seed 2" not in axis.get_ylabel() for axis in panels(found["pairing"]))
    for name in ("training", "combinations", "agreement", "forcing"):
        assert f"({MOST} of 7 settings)" in found[name].get_suptitle()


def test_agreement_on_each_split_of_what_was_fitted_on_each(drawn):
    (axis,) = panels(drawn["agreement"])
    assert axis.get_xlabel() == "fitted on \u2192 scored on"
    assert [text.get_text().replace("\n", " ") for text in axis.get_xticklabels()] == [
        "id \u2192 id",
        "id \u2192 ood",
        "ood \u2192 id",
        "ood \u2192 ood",
    ]
    for label, expected in (
        ("true preferences", [0.8, 0.7, 0.4, 0.6]),
        ("preferences shuffled", [0.1] * 4),
    ):
        found = [box.lines[0].get_data() for box in axis.containers if box.get_label() == label]
        for place, ((x, y), value) in enumerate(zip(found, expected, strict=True)):
            assert np.round(x).tolist() == [place] * 2
            assert y == pytest.approx([value] * 2)
    chances = [one for one in axis.collections if one.get_label() == "independent choices"]
    assert {y for one in chances for y in np.ravel([s[:, 1] for s in one.get_segments()])} == {0.25}


def test_forcing_stands_beside_what_the_model_does_itself(drawn):
    (axis,) = panels(drawn["forcing"])
    assert axis.get_ylabel() == "mean absolute error, ood"
    assert [text.get_text() for text in axis.get_xticklabels()] == ["seed 0", "seed 2"]
    order = ("none", "hardened", "familiar", "true", "random")
    own = [errors_of(cell)[1] for cell in cells_of(mechanisms=("compositional",))]
    assert bars(axis) == pytest.approx([FORCED[name] * one for one in own for name in order])
    ends = [
        segment[:, 1]
        for box in axis.containers
        if getattr(box, "errorbar", None) is not None
        for segment in box.errorbar.lines[2][0].get_segments()
    ]
    assert ends[0] == pytest.approx([0.9 * own[0], 1.2 * own[0]])
