"""Views of the modular routing study, of results with chosen values."""

import json
import math

import numpy as np
import pytest
import xarray as xr

from studies.engine.papers import read_paper
from studies.modular_routing import STUDY
from studies.views.modular_routing import specialization
from tests.studies.claims.modular_results import all_models, cell, made_up


def test_a_specialized_network_shows_a_diagonal():
    """Operations go to modules 1, 2, 0 in one seed, 4, 3, 2 in another: each a diagonal."""
    tree = made_up([cell("encoder")], n_seeds=2)
    scores = tree["specialization"].to_dataset()
    sent = np.array([[1, 2, 0], [4, 3, 2]])
    one_hot = np.eye(5)[sent]
    dims = ("cell", "split", "layer")
    wide = [np.repeat(a[:, None, None], 3, axis=2) for a in (one_hot, sent, one_hot.mean(1))]
    tree["specialization"] = xr.DataTree(
        scores.assign(
            activation=((*dims, "operation", "module"), wide[0]),
            assignment=((*dims, "operation"), wide[1]),
            utilisation=((*dims, "module"), wide[2]),
        ).assign_coords(operation=["add", "subtract", "multiply"], module=range(5))
    )
    panels = [axis for axis in STUDY.views["activation"](tree).axes if axis.images]
    assert len(panels) >= 3
    for axis in panels[:3]:
        assert np.allclose(axis.images[0].get_array(), np.eye(3, 5))
    assert "activation" in tree["specialization"].data_vars


def test_modules_without_an_operation_come_last_the_busiest_first():
    tree = made_up([cell("encoder")], n_seeds=1)
    dims = ("cell", "split", "layer")
    shares = np.array([[0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]])
    scores = (
        tree["specialization"]
        .to_dataset()
        .assign(
            activation=((*dims, "operation", "module"), np.tile(shares, (1, 1, 3, 1, 1))),
            assignment=((*dims, "operation"), np.tile([2, -1], (1, 1, 3, 1))),
            utilisation=((*dims, "module"), np.tile([0.1, 0.2, 0.3, 0.4], (1, 1, 3, 1))),
        )
    )
    tree["specialization"] = xr.DataTree(scores.assign_coords(operation=["add", "sine"]))
    image = next(axis.images[0] for axis in STUDY.views["activation"](tree).axes if axis.images)
    assert image.get_array()[0].tolist() == pytest.approx([0.3, 0.4, 0.2, 0.1])


def test_specialization_stands_against_collapse_and_what_is_attainable():
    tree = made_up([cell("encoder"), cell("monolithic")], n_seeds=2)
    both = xr.concat([tree["specialization"].to_dataset()] * 2, "control")
    scores = both.assign_coords(control=["observed", "shuffled"]).assign(
        seen=("operation", [7, 7, 7, 0]), utilisation=("module", np.full(6, 1 / 6))
    )
    counts = {name: scores[name].expand_dims(cell=scores["cell"], layer=scores["layer"])
              for name in ("seen", "utilisation")}  # fmt: skip
    tree["specialization"] = xr.DataTree(scores.assign(counts))
    axes = specialization(tree).axes
    assert [axis.get_title() for axis in axes] == ["layer 0", "layer 1", "all layers"]
    lines = {str(line.get_label()): line.get_data() for line in axes[2].lines}
    # Three operations that occur, six modules.
    attainable = math.log(3) / math.log(6)
    assert lines["attainable"][0] + lines["attainable"][1] == pytest.approx(
        [1, 1 + attainable, 1 + attainable]
    )
    assert [value[0] for value in lines["a module for\neach operation"]] == [attainable, 1.0]
    (x, y) = next(line for label, line in lines.items() if label.startswith("encoder"))
    assert list(x) == pytest.approx([0.8, 0.8])
    assert list(y) == pytest.approx([0.3, 0.3])
    assert not any(label.startswith("monolithic") for label in lines)


# Figures of the paper


def test_every_figure_of_the_paper_is_drawn_or_has_a_reason():
    paper = read_paper("ostapenko_2022")
    views = [view for study, *views in paper.figures.values() for view in views]
    assert set(views) <= set(STUDY.views)
    assert len(paper.figures) + len(paper.undrawn) == 17


def lines_of(figure):
    """The points of each line of a figure, by panel and label."""
    return {
        (axis.get_title(), container.get_label()): container.lines[0].get_xydata().tolist()
        for axis in figure.axes
        for container in axis.containers
    }


@pytest.mark.parametrize(
    ("view", "changes"),
    [
        ("true_modules", {"pool": "operations"}),
        ("end_to_end", {}),
        ("best_paths", {}),
        ("one_layer", {"n_layers": 1}),
    ],
)
def test_methods_are_drawn_for_their_settings_only(view, changes):
    rows = [cell("encoder", **changes, n_points=points) for points in (1000, 5000)]
    rows += [cell("cross_attention", **changes)]
    others = [
        cell("encoder", **other)
        for other in ({}, {"pool": "operations"}, {"n_layers": 1}, {"module_keys": "projected"})
        if other != changes
    ]
    assert STUDY.views[view](made_up(others)) is None
    figure = STUDY.views[view](made_up(rows + others))
    # Sizes are pooled: a row for each method.
    names = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert names == ["encoder", "cross-attention"]
    titles = [axis.get_title() for axis in figure.axes]
    if view == "best_paths":
        labels = {container.get_label() for container in figure.axes[0].containers}
        assert labels == {"router's path", "best path of each sample"}
    else:
        assert titles == ["OOD loss", "ID loss", "specialization"]


def test_a_setting_that_is_no_axis_is_that_of_the_run():
    result = made_up([cell("encoder"), cell("concatenation")])
    axes = json.loads(result.attrs["axes"])
    del axes["coordinates"]["pool"]
    result.attrs["axes"] = json.dumps(axes)
    for pool, drawn in (("mlp", "end_to_end"), ("operations", "true_modules")):
        result.attrs["config"] = json.dumps({"setup": {"pool": pool}})
        views = {name for name in ("end_to_end", "true_modules") if STUDY.views[name](result)}
        assert views == {drawn}


def test_readings_are_drawn_against_sizes_pooled_over_the_other_one():
    ood = {3: 0.5, 5: 0.3, 15: 0.4}
    rows = [
        cell("encoder", n_operators=n, n_points=points, ood=ood[n] * scale, specialization=1 / n)
        for n in ood
        for points, scale in ((1000, 1.0), (20_000, 0.5))
    ]
    result = made_up(rows, n_seeds=1)
    pooled = {n: 0.75 * loss for n, loss in ood.items()}

    def points(view, title):
        return lines_of(STUDY.views[view](result))[title, "encoder"]

    mean = sum(ood.values()) / 3
    expected = [[1000, mean], [20_000, mean / 2]]
    assert np.allclose(points("ood_by_n_points", "all |S|"), expected)
    assert np.allclose(points("ood_few_operators", "all C"), [[n, pooled[n]] for n in (3, 5)])
    assert np.allclose(points("ood_many_operators", "all C"), [[n, pooled[n]] for n in (5, 15)])
    by_n = points("specialization_by_n_operators", "specialization")
    assert np.allclose(by_n, [[n, 1 / n] for n in ood])
    few = lines_of(STUDY.views["id_few_operators"](result))
    assert set(few) == {("|S| = 3", "encoder"), ("|S| = 5", "encoder")}
    # A row of panels for each |S|, a line for each method.
    for view in ("detailed_losses", "detailed_routing"):
        assert len(STUDY.views[view](result).axes) == 6
    detailed = lines_of(STUDY.views["specialization_by_n_points"](result))
    assert set(detailed) == {("specialization", "encoder")}


def test_outliers_are_left_out_of_figure_4_but_not_of_the_detailed_ones():
    rows = [cell("encoder", n_points=points) for points in (1000, 20_000)]
    result = made_up(rows, n_seeds=5)
    result["scores"]["loss"].values[4, 1, 0] = 9.0
    kept = 0.3 * (1 + 0.01 * np.arange(4)).mean()
    (line,) = lines_of(STUDY.views["ood_by_n_points"](result)).values()
    assert line[0][1] == pytest.approx(kept)
    of_all = lines_of(STUDY.views["by_n_points"](result))
    (with_outlier,) = (line[0][1] for key, line in of_all.items() if "out of" in key[0])
    assert with_outlier == pytest.approx((4 * kept + 9) / 5)


@pytest.mark.parametrize(
    ("view", "pool"), [("keys_end_to_end", "mlp"), ("keys_of_true_modules", "operations")]
)
def test_keys_are_drawn_for_learned_and_for_true_modules(view, pool):
    rows = [
        cell("encoder", module_keys=keys, pool=each, ood=0.1 * number)
        for number, (each, keys) in enumerate(
            [(each, keys) for each in ("mlp", "operations") for keys in ("direct", "projected")], 1
        )
    ]
    drawn = lines_of(STUDY.views[view](made_up(rows, n_seeds=1)))
    y = [value for _, value in next(v for k, v in drawn.items() if k[0] == "out of distribution")]
    assert y == pytest.approx([0.1, 0.2] if pool == "mlp" else [0.3, 0.4])


def test_collapse_is_drawn_by_functional_bottleneck():
    rows = [
        cell("encoder", functional_bottleneck=name, collapse=value)
        for name, value in {"oracle": 0.76, "attention": 0.74, "none": 0.5}.items()
    ]
    (line,) = lines_of(STUDY.views["collapse_by_functional_bottleneck"](made_up(rows))).values()
    assert [y for _, y in line] == pytest.approx([0.76, 0.74, 0.5])


def test_combinations_are_drawn_with_their_names():
    result = made_up(all_models(), n_seeds=1)
    dims = ("cell", "split", "combination", "layer", "module")
    shares = np.full((5, 1, 3, 2, 4), np.nan)
    shares[:4, :, :2] = np.eye(4)[[2, 0]][None, None, :, None]
    names = np.array([["add, add", "add, subtract", ""]] * 4 + [["", "", ""]])[:, None]
    data = (
        result["combinations"]
        .to_dataset()
        .assign(activation=(dims, shares), name=(dims[:3], names))
    )
    result["combinations"] = xr.DataTree(data.assign_coords(module=range(4)))
    figure = STUDY.views["combinations"](result)
    panels = [axis for axis in figure.axes if axis.images]
    # Four networks with modules, of two layers; the last name is that of no combination.
    assert len(panels) == 8
    for panel in panels:
        assert np.array_equal(panel.images[0].get_array(), np.eye(4)[[2, 0]])
        assert [text.get_text() for text in panel.get_yticklabels()] == [
            "add, add",
            "add, subtract",
        ]
