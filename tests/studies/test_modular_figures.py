"""The figures of results that were made up, so that it is known what they must show."""

import io
import math
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr
from matplotlib.colors import to_hex

from studies.modular_claims import MODULAR
from studies.modular_figures import (
    LEAST,
    LOOKS,
    MOST,
    VARIANTS,
    Cells,
    figures,
    figures_by_operators,
    losses_and_specialization,
    losses_by_points,
    losses_by_task,
    losses_of_adapted_paths,
    losses_of_paths,
    modules_in_order,
    rows_of,
    variants_of_models,
)
from studies.modular_routing import MODELS, assemble, operations_of, presets, task_of

ALWAYS = {"losses", "training"}
WITH_MODULES = {
    "specialization",
    "activation",
    "regret",
    "adaptation",
    "by_task",
    "loss_against_specialization",
}
N_MODULES = 6
RATES = (1e-3, 1e-2)
STUDY = presets()["smoke"]


def ood_of(cell):
    """A loss that tells cells apart; the greater learning rate has the lower ones on `id`."""
    loss = 0.01 * (1 + MODELS.index(cell.router)) * (1 + 0.1 * cell.seed)
    loss *= 1 + (cell.objective == "all_paths") + 2 * cell.selection_bottleneck
    loss *= 10 / cell.task.n_operators * (1000 / cell.task.n_points) ** 0.5
    return loss * (1 if cell.sizes.training.learning_rate == RATES[-1] else 2)


def bounds(name, dims, value):
    value = np.asarray(value, dtype=float)
    parts = {"": 1.0, "_low": 0.8, "_high": 1.3}
    return {f"{name}{suffix}": (dims, factor * value) for suffix, factor in parts.items()}


def made_up_tree(cell):
    """What `analyse` gives for a cell, with figures that are known."""
    ood, splits = ood_of(cell), ["id", "ood"]
    loss = np.array([ood / 10, ood])
    steps = [10, 20]
    tree = {
        "losses": xr.Dataset(
            {**bounds("loss", "split", loss), "constant": ("split", [0.4, 0.5])},
            coords={"split": splits},
        ),
        "training": xr.Dataset(
            {"loss": (("train_step", "split"), [4 * loss, loss])},
            coords={"split": splits, "train_step": steps},
        ),
    }
    if cell.router == "monolithic":
        return xr.DataTree.from_dict(tree)
    task, operations = task_of(cell.task), operations_of(cell)
    n_operations, layers = len(operations), [*map(str, range(cell.n_layers)), "pooled"]
    # Operation i goes to module i + 1, in turns: so the order of modules is not their own.
    assignment = (np.arange(n_operations) + 1) % N_MODULES
    assignment[N_MODULES:] = -1
    activation = np.zeros((n_operations, N_MODULES))
    activation[np.arange(n_operations), (np.arange(n_operations) + 1) % N_MODULES] = 1
    score = MODELS.index(cell.router) / 10
    scores = np.array([[0.9 - score, 0.2], [0.5, 0.5]])  # specialization, collapse x control
    dims = ("split", "layer")
    tree["specialization"] = xr.Dataset(
        {
            name: (("split", "control", "layer"), value * np.ones((2, 2, len(layers))))
            for name, value in (
                ("specialization", scores[0][:, None]),
                ("collapse", scores[1][:, None]),
                ("collapse_attainable", 0.7),
            )
        }
        | {
            "activation": (
                (*dims, "operation", "module"),
                np.broadcast_to(activation, (2, len(layers), *activation.shape)),
            ),
            "seen": ((*dims, "operation"), np.full((2, len(layers), n_operations), 7)),
            "assignment": (
                (*dims, "operation"),
                np.broadcast_to(assignment, (2, len(layers), n_operations)),
            ),
            "utilisation": (
                (*dims, "module"),
                np.broadcast_to(activation.mean(0), (2, len(layers), N_MODULES)),
            ),
        },
        coords={
            "split": splits,
            "control": ["observed", "shuffled"],
            "layer": layers,
            "operation": list(operations),
            "module": range(N_MODULES),
        },
    )
    every = np.arange(len(task.combinations))
    losses = np.array([ood / 100, ood / 20, ood, 0.6])  # sample, task, routed, mean
    by_task = losses[:, None] * (1 + every)
    parts = []
    for split, held_out in (("id", False), ("ood", True)):
        mine = np.isin(every, task.held_out) == held_out
        per_control = np.array([1.0, 3.0])
        regret = ood * np.array([0.1, 0.6])[: cell.n_layers]
        parts.append(
            xr.Dataset(
                bounds("loss", ("control", "path"), per_control[:, None] * losses)
                | bounds("regret", ("control", "layer"), per_control[:, None] * regret)
                | {
                    "task_loss": (
                        ("control", "path", "task"),
                        per_control[:, None, None] * by_task[:, mine],
                    )
                },
                coords={
                    "control": ["trained", "untrained"],
                    "path": ["sample", "task", "routed", "mean"],
                    "task": every[mine],
                    "layer": range(cell.n_layers),
                },
            ).expand_dims(split=[split])
        )
    tree["oracle"] = xr.concat(parts, "split", join="outer")
    adapted = ood * np.array([2.0, 0.2])
    tree["adaptation"] = xr.Dataset(
        bounds("adapted", "examples", adapted)
        | bounds("routed", (), ood)
        | bounds("oracle", (), ood / 20),
        coords={"examples": [1, 4]},
    )
    return xr.DataTree.from_dict(tree)


def made_up(**settings):
    cells = replace(
        STUDY, **({"learning_rates": RATES, "seeds": (0, 2)} | settings)
    ).trained_models()
    return assemble(cells, [made_up_tree(cell) for cell in cells])


def lines(axis, label):
    """What is plotted under a label: [x, y] of every line."""
    return [np.array(line.get_data()) for line in axis.lines if line.get_label() == label]


def loss(router, **changes):
    """The OOD loss of the only cell that is like this, with the better learning rate."""
    fields = {"models": (router,), "learning_rates": RATES[-1:], "seeds": (0,)} | changes
    (cell,) = replace(STUDY, **fields).trained_models()
    return ood_of(cell)


def modular(cells):
    return Cells.of([row for row in cells.rows if row["model"] in MODULAR])


def names(axis):
    return [text.get_text() for text in axis.get_xticklabels()]


@pytest.fixture(scope="module")
def drawn():
    """All models, two learning rates of which the greater counts, seeds 0 and 2."""
    return figures(made_up())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"models": ("monolithic",)}, ALWAYS),
        ({"models": ("monolithic",), "n_points": (150, 500)}, ALWAYS | {"points"}),
        ({"models": ("monolithic",), "n_operators": (3, 5)}, ALWAYS | {"operators"}),
        (
            {"models": ("cross_attention",), "selection_bottlenecks": (False, True)},
            ALWAYS | WITH_MODULES | {"objectives"},
        ),
        (
            {"models": ("structural_oracle",), "functional_bottlenecks": ("oracle", "none")},
            ALWAYS | WITH_MODULES | {"functional"},
        ),
        (
            {"models": ("encoder",), "n_layers": (1, 2), "pools": ("mlp", "operations")},
            ALWAYS | WITH_MODULES | {"layers", "pools"},
        ),
    ],
)
def test_what_there_is_no_data_for_is_left_out(settings, expected):
    single = {"seeds": (0,), "learning_rates": RATES[:1]}
    assert set(figures(made_up(**single, **settings))) == expected


def test_all_can_be_saved():
    drawn = figures(made_up(models=("encoder",), seeds=(0,), learning_rates=RATES[:1]))
    assert set(drawn) == ALWAYS | WITH_MODULES
    for figure in drawn.values():
        figure.savefig(io.BytesIO(), dpi=30)


def test_losses_are_those_of_the_learning_rate_that_counts(drawn):
    (axis,) = drawn["losses"].axes
    assert axis.get_yscale() == "log"
    assert [name.replace("-\n", "-").replace("\n", " ") for name in names(axis)] == [
        "structural oracle",
        "cross-attention",
        "concatenation",
        "encoder",
        "monolithic",
    ]
    factors = {
        "router's path, id": 0.1,
        "router's path, ood": 1,
        "best of each task, ood": 1 / 20,
        "best of each sample, ood": 1 / 100,
        "best of each task, untrained, ood": 3 / 20,
        "best of each sample, untrained, ood": 3 / 100,
    }
    for label, factor in factors.items():
        found = lines(axis, label)
        models = MODELS if label.startswith("router") else MODULAR
        for place, (model, (x, y)) in enumerate(zip(models, found, strict=True)):
            assert np.all(np.round(x) == place)
            assert y == pytest.approx([factor * loss(model, seeds=(seed,)) for seed in (0, 2)])
        hollow = {line.get_mfc() for line in axis.lines if line.get_label() == label} == {"none"}
        assert hollow == ("untrained" in label)
    means = [y[0] for _, y in lines(axis, "_mean")]
    for model in MODELS:
        both = [loss(model, seeds=(seed,)) for seed in (0, 2)]
        assert any(mean == pytest.approx(np.mean(both)) for mean in means)
    assert lines(axis, "constant answer, id")[0][1].tolist() == [0.4, 0.4]
    assert lines(axis, "constant answer, ood")[0][1].tolist() == [0.5, 0.5]


def test_training_shows_every_rate_and_which_counts(drawn):
    axes = np.reshape(drawn["training"].axes, (2, 2))
    for rate, row, style in zip(RATES, axes, ("--", "-"), strict=True):
        for axis, factor in zip(row, (0.1, 1), strict=True):
            (line,) = [one for one in axis.lines if one.get_label() == "encoder"]
            seeds = [loss("encoder", learning_rates=(rate,), seeds=(seed,)) for seed in (0, 2)]
            assert line.get_xdata().tolist() == [10, 20]
            final = factor * np.mean(seeds)
            assert line.get_ydata() == pytest.approx([4 * final, final])
            assert line.get_linestyle() == style
            edges = [
                shade.get_paths()[0].vertices[:, 1]
                for shade in axis.collections
                if to_hex(shade.get_facecolor()[0]) == LOOKS["encoder"][0]
            ]
            assert edges[0].min() == pytest.approx(factor * min(seeds))
            assert edges[0].max() == pytest.approx(4 * factor * max(seeds))


def test_specialization_and_what_can_be_attained(drawn):
    axes = drawn["specialization"].axes
    assert [axis.get_title() for axis in axes] == ["all layers", "layer 0", "layer 1"]
    for axis in axes:
        for number, name in enumerate(("structural oracle", "cross-attention", "concatenation")):
            assert lines(axis, name)[0].T.tolist() == [[0.5, pytest.approx(0.9 - number / 10)]] * 2
            assert lines(axis, f"_shuffled, {name}")[0].T.tolist() == [[0.5, 0.2]] * 2
        hollow = [one for one in axis.lines if str(one.get_label()).startswith("_shuffled")]
        assert {line.get_mfc() for line in hollow} == {"none"}
        # Three operations, six modules.
        attainable = math.log(3) / math.log(6)
        (star,) = lines(axis, "one module for\neach operation")
        assert star[:, 0] == pytest.approx([attainable, 1])
        x, y = lines(axis, "attainable")[0]
        assert np.all(x <= 1)
        assert x + y == pytest.approx([1, 1 + attainable, 1 + attainable])


def test_a_specialized_network_shows_a_diagonal(drawn):
    panels = [axis for axis in drawn["activation"].axes if axis.get_label() != "<colorbar>"]
    assert len(panels) == 3 * len(MODULAR)
    for axis in panels:
        (image,) = axis.images
        assert image.get_array().tolist() == np.eye(3, N_MODULES).tolist()
        assert names(axis) == ["1", "2", "3", "0", "4", "5"]
    assert [text.get_text() for text in panels[0].get_yticklabels()] == [
        "add",
        "subtract",
        "multiply",
    ]
    assert "seed 0" in drawn["activation"].get_suptitle()


def test_modules_are_in_the_order_of_their_operations():
    utilisation = np.array([0.1, 0.2, 0.3, 0.4, np.nan])
    assert modules_in_order(np.array([2, -1, 0]), utilisation) == [2, 0, 3, 1]
    assert modules_in_order(np.array([np.nan, 1.0]), utilisation) == [1, 3, 2, 0]
    assert modules_in_order(np.array([-1, -1]), utilisation) == [3, 2, 1, 0]


def test_regret_stands_within_the_routers_loss(drawn):
    (axis,) = drawn["regret"].axes
    heights = {
        label: [
            bar.get_height()
            for box in axis.containers
            if box.get_label() == label
            for bar in box.patches
        ]
        for label in ("router's loss", "regret, layer 0", "regret, layer 1")
    }
    means = [np.mean([loss(model, seeds=(seed,)) for seed in (0, 2)]) for model in MODULAR]
    for (label, found), share in zip(heights.items(), (1, 0.1, 0.6), strict=True):
        assert found == pytest.approx([share * mean for mean in means]), label


def test_adaptation_goes_from_the_router_to_the_oracle(drawn):
    axes = drawn["adaptation"].axes
    for axis, model in zip(axes, MODULAR, strict=True):
        seeds = [loss(model, seeds=(seed,)) for seed in (0, 2)]
        mean = np.mean(seeds)
        (bars,) = axis.containers
        x, y = bars.lines[0].get_data()
        assert list(x) == [1, 4]
        assert y == pytest.approx([2 * mean, 0.2 * mean])
        low, high = bars.lines[2][0].get_segments()[0][:, 1]
        assert (low, high) == pytest.approx((0.8 * 2 * min(seeds), 1.3 * 2 * max(seeds)))
        assert lines(axis, "router's path")[0][1] == pytest.approx([mean] * 2)
        assert lines(axis, "best of each task")[0][1] == pytest.approx([mean / 20] * 2)


@pytest.mark.parametrize("layers", [1, 2])
def test_tasks_have_the_names_of_their_operations(layers):
    """Also where the operations of several |S| were joined into one result."""
    settings = {"models": ("encoder",), "n_operators": (3, 5), "n_layers": (layers,)}
    settings |= {"seeds": (0,), "n_points": (150,), "learning_rates": RATES[-1:]}
    result = made_up(**settings)
    (axis,) = losses_by_task(result, Cells.of(rows_of(result))).axes
    task = task_of(replace(STUDY.task, n_operators=5, n_points=150))
    assert names(axis) == [
        ",\n".join(task.operations[one] for one in task.combinations[number])
        for number in task.held_out
    ]
    ood = loss("encoder", n_operators=(5,), n_points=(150,))
    found = [y[0] for _, y in lines(axis, "router's path")]
    assert found == pytest.approx([ood * (1 + number) for number in task.held_out])


def test_losses_against_points_and_operators():
    settings = {"models": ("encoder", "monolithic"), "n_operators": (3, 5)}
    result = made_up(n_points=(150, 500), learning_rates=RATES[-1:], **settings)
    cells = Cells.of(rows_of(result))
    for number, axis in enumerate(losses_by_points(cells).axes):
        row, column = divmod(number, 2)
        expected = [
            np.mean(
                [
                    (0.1, 1)[row]
                    * loss(
                        "encoder", n_operators=((3, 5)[column],), n_points=(points,), seeds=(seed,)
                    )
                    for seed in (0, 2)
                ]
            )
            for points in (150, 500)
        ]
        x, y = lines(axis, "encoder")[0]
        assert list(x) == [150, 500]
        assert y == pytest.approx(expected)
        assert lines(axis, "_seeds of encoder")[0].shape == (2, 4)
    ood, specialization, collapse = figures_by_operators(cells).axes[:3]
    assert ood.get_title() == "C=150"
    x, y = lines(ood, "encoder")[0]
    assert list(x) == [3, 5]
    assert y[0] / y[1] == pytest.approx(5 / 3)
    assert lines(specialization, "encoder")[0][1] == pytest.approx([0.6, 0.6])
    assert lines(collapse, "encoder")[0][1] == pytest.approx([0.7, 0.7])
    assert lines(ood, "monolithic")
    assert not lines(collapse, "monolithic")


def test_variants_stand_beside_one_another():
    """The structural oracle has no bottleneck, and is drawn once for each objective."""
    settings = {
        "models": ("structural_oracle", "encoder"),
        "objectives": ("sampled", "all_paths"),
        "selection_bottlenecks": (False, True),
    }
    result = made_up(seeds=(0,), learning_rates=RATES[-1:], **settings)
    figure = variants_of_models(Cells.of(rows_of(result)), *VARIANTS["objectives"])
    _, ood, specialization = figure.axes
    oracle, encoder = loss("structural_oracle"), loss("encoder")
    for label, expected in {
        "sampled path, -Sbtl": [oracle, encoder],
        "sampled path, +Sbtl": [3 * encoder],
        "all paths, -Sbtl": [2 * oracle, 2 * encoder],
        "all paths, +Sbtl": [4 * encoder],
    }.items():
        assert [y[0] for _, y in lines(ood, label)] == pytest.approx(expected)
        shown = [y[0] for _, y in lines(specialization, label)]
        assert shown == pytest.approx([0.9, 0.6][-len(expected) :])


def test_loss_against_specialization(drawn):
    pooled, by_layer = drawn["loss_against_specialization"].axes
    for axis in (pooled, by_layer):
        x, y = lines(axis, "encoder")[0]
        assert x == pytest.approx([0.6, 0.6])
        assert y == pytest.approx([loss("encoder", seeds=(seed,)) for seed in (0, 2)])


def test_what_a_model_has_no_variants_of_counts_under_every_setting():
    grid = {"selection_bottlenecks": (False, True), "keys": ("direct", "shared")}
    rows = rows_of(made_up(learning_rates=RATES[:1], seeds=(0,), **grid))
    cells = Cells.of(rows)
    assert len(cells.settings) == 4
    assert cells.varied == ["selection_bottleneck", "module_keys"]
    for setting in cells.settings:
        under = cells.under(setting)
        assert list(under) == list(MODELS)
        assert {len(found) for found in under.values()} == {1}
        assert {row["module_keys"] for row in under["structural_oracle"]} == {
            setting["module_keys"]
        }
    assert Cells.of([row for row in rows if row["model"] == "monolithic"]).varied == []


def test_of_a_big_grid_those_near_the_reference_are_shown():
    grid = {
        "models": ("encoder", "monolithic"),
        "objectives": ("sampled", "all_paths"),
        "selection_bottlenecks": (False, True),
        "n_operators": (3, 5, 7),
        "n_points": (150, 5000),
        "learning_rates": RATES[:1],
        "seeds": (0,),
    }
    result = made_up(**grid)
    cells = Cells.of(rows_of(result))
    assert len(cells.settings) == 24
    assert cells.told(cells.reference) == "sampled path, -Sbtl, |S|=5, C=5000"
    shown = cells.shown(MOST)
    assert shown[0] == cells.reference
    assert sorted(cells.told(setting) for setting in shown[1:]) == [
        "all paths, -Sbtl, |S|=5, C=5000",
        "sampled path, +Sbtl, |S|=5, C=5000",
        "sampled path, -Sbtl, |S|=3, C=5000",
        "sampled path, -Sbtl, |S|=5, C=150",
        "sampled path, -Sbtl, |S|=7, C=5000",
    ]
    losses, adapted = losses_of_paths(cells), losses_of_adapted_paths(result, modular(cells))
    assert [axis.get_title() for axis in losses.axes] == [cells.told(one) for one in shown]
    assert "6 of 24 settings" in losses.get_suptitle()
    assert len(adapted.axes) <= MOST
    one = losses_by_task(result, modular(cells))
    assert "sampled path, -Sbtl, |S|=5, C=5000" in one.get_suptitle()
    assert "all 24 settings" in losses_and_specialization(modular(cells)).get_suptitle()


def test_losses_of_nothing_are_drawn_at_the_bottom():
    result = made_up(models=("encoder",), seeds=(0,), learning_rates=RATES[:1])
    result["losses"]["loss"] = result["losses"]["loss"] * 0
    (axis,) = losses_of_paths(Cells.of(rows_of(result))).axes
    assert lines(axis, "router's path, ood")[0][1] == [LEAST]
    assert "1e-8 or less" in axis.get_ylabel()
