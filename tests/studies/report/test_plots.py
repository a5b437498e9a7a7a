import itertools

import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr

import probes
from studies.engine import metric
from studies.report import drawings, plots
from studies.report.panels import CONDITIONS, over_cells, shown_conditions, values, values_of
from tests.studies.engine.synthetic import result_of, two_models

ID, OOD = metric("accuracy", "id"), metric("accuracy", "ood")


def measured(rates, **coords):
    """Two seeds of models `a` and `b`, with `rate` [cell, split, position] in `probed`."""
    result = two_models([0.5, 0.7], [0.6, 0.8])
    coords = {"split": ["id", "ood"]} | coords
    rate = (("cell", "split", "position"), np.asarray(rates, dtype=float))
    chance = ("cell", np.full(4, 0.25))
    result["probed"] = xr.DataTree(xr.Dataset({"rate": rate, "chance": chance}, coords))
    return result


PROBED = {"data": values("probed", "rate"), "along": "position", "ylabel": "rate"}
RATES = np.arange(24).reshape(4, 2, 3) / 24


def curve(axis, label):
    """The points [point, (x, y)] of the line with a label."""
    (container,) = (bars for bars in axis.containers if bars.get_label() == label)
    return np.array(container.lines[0].get_data()).T


def legend_texts(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_lines_are_means_over_seeds_by_condition_and_row():
    result = measured(RATES, position=[1, 2, 4])
    known = {"chance": values("probed", "chance")}
    figure = plots.lines(result, **PROBED, rows="split", references=known)
    assert [axis.get_title() for axis in figure.axes] == ["a", "b", "", ""]
    assert figure.axes[2].get_ylabel() == "rate\nout of distribution"
    for axis, cells, split in zip(figure.axes, [[0, 1], [2, 3]] * 2, [0, 0, 1, 1], strict=True):
        (line,) = (bars.lines[0] for bars in axis.containers)
        np.testing.assert_allclose(line.get_xdata(), [1, 2, 4])
        np.testing.assert_allclose(line.get_ydata(), RATES[cells, split].mean(0))
        assert axis.lines[-1].get_ydata()[0] == 0.25
    assert legend_texts(figure) == ["chance"]


def test_lines_leave_out_conditions_that_were_not_measured():
    rates = RATES.copy()
    rates[:2] = np.nan
    figure = plots.lines(measured(rates), **PROBED, lines="split")
    assert [axis.get_title() for axis in figure.axes] == ["b"]
    assert curve(figure.axes[0], "in distribution").shape == (3, 2)
    assert plots.lines(measured(rates * np.nan), **PROBED, lines="split") is None
    other = {"data": values("probed", "other")}
    assert plots.lines(measured(rates), **PROBED | other) is None


def test_names_along_an_axis_have_positions_even_if_they_were_not_measured():
    rates = RATES.copy()
    rates[:, :, 2] = np.nan
    result = measured(rates, position=["first", "second_name", "third"])
    figure = plots.lines(result, **PROBED | {"data": values("probed", "rate", split="id")})
    for axis in figure.axes:
        labels = [label.get_text() for label in axis.get_xticklabels()]
        assert labels == ["first", "second name", "third"]
        assert axis.get_xlim() == (-0.5, 2.5)


def test_names_of_panels_without_curves_are_turned_as_others_are():
    rates = RATES.copy()
    rates[:2, 1] = np.nan
    names = [f"a long name that must be turned {number}" for number in range(3)]
    figure = plots.lines(measured(rates, position=names), **PROBED, rows="split")
    below = figure.axes[2:]
    assert [label.get_rotation() for axis in below for label in axis.get_xticklabels()] == [90] * 6


def test_matrices_are_means_over_seeds_with_common_colours_and_numbers():
    counts = np.zeros((4, 2, 3))
    counts[:2] = [[1, 0, 3], [0, 2, 0]], [[3, 0, 5], [0, 2, 0]]
    counts[2:, 0, 0] = 8
    result = measured(counts, position=["x", "y", "z"])
    figure = drawings.matrices(
        result,
        data=values("probed", "rate"),
        y="split",
        x="position",
        title="count",
        numbers=lambda count: f"{count:.0f}" if count else "",
    )
    first, second = (axis.images[0] for axis in figure.axes[:2])
    np.testing.assert_allclose(first.get_array(), [[2, 0, 4], [0, 2, 0]])
    np.testing.assert_allclose(second.get_array(), [[8, 0, 0], [0, 0, 0]])
    assert first.get_clim() == second.get_clim() == (0, 8)
    assert [text.get_text() for text in figure.axes[0].texts] == ["2", "4", "2"]
    # The labels are those of the figure, not of the matrix.
    assert [axis.get_ylabel() for axis in figure.axes[:2]] == ["split", ""]
    assert [axis.get_title() for axis in figure.axes[:2]] == ["a", "b"]


def test_a_long_row_of_panels_is_wrapped():
    names = [f"model {number}" for number in range(7)]
    cells = [{"model": name, "seed": 0, "id": 0.9, "ood": 0.5} for name in names]
    result = result_of(cells)
    data = values("scores", "accuracy", group="all")
    figure = plots.lines(result, data=data, along="split", ylabel="right")
    shown = [axis for axis in figure.axes if axis.axison]
    assert [axis.get_title() for axis in shown] == names
    first = [axis.get_subplotspec().colspan.start == 0 for axis in shown]
    assert [axis.get_ylabel() == "right" for axis in shown] == first
    assert sum(first) == 2


def test_long_rows_of_panels_are_wrapped_together():
    names = [f"model {number}" for number in range(11)]
    cells = [{"model": name, "seed": 0, "id": 0.9, "ood": 0.5} for name in names]
    rows = {"in": {"split": "id"}, "out": {"split": "ood"}}
    figure = drawings.pictures(
        result_of(cells),
        data=values("scores", "accuracy", group="all"),
        draw=lambda data, axis: axis.plot([float(data["value"])]),
        rows=rows,
    )
    shown = [axis for axis in figure.axes if axis.axison]
    assert [axis.get_title() for axis in shown if axis.get_title()] == names
    places = [axis.get_subplotspec() for axis in shown]
    assert {place.rowspan.start for place in places} == {0, 1, 2, 3}
    assert {place.colspan.start for place in places} == set(range(6))
    for axis, place in zip(shown, places, strict=True):
        is_first, is_in = place.colspan.start == 0, place.rowspan.start % 2 == 0
        assert axis.get_ylabel() == (("in" if is_in else "out") if is_first else "")
        assert axis.lines[0].get_ydata()[0] == (0.9 if is_in else 0.5)
        assert bool(axis.get_title()) == is_in


def test_the_legend_of_panels_in_different_colours_is_black():
    rates = np.stack([RATES, RATES / 2], axis=1)
    dims = ("cell", "control", "split", "position")
    coords = {"control": ["observed", "shuffled"], "split": ["id", "ood"]}
    result = two_models([0.5, 0.7], [0.6, 0.8])
    result["probed"] = xr.DataTree(xr.Dataset({"rate": (dims, rates)}, coords))
    figure = plots.lines(result, **PROBED, rows="split", lines="control")
    observed, control = (line.get_color() for line in figure.legends[0].get_lines())
    assert observed == "black"
    assert control == figure.axes[0].containers[1].lines[0].get_color() != "black"
    # In the same colour everywhere, it has this colour.
    figure = plots.lines(result, **PROBED, columns="split", lines=CONDITIONS, rows="control")
    drawn = [bars.lines[0].get_color() for bars in figure.axes[0].containers]
    assert [line.get_color() for line in figure.legends[0].get_lines()] == drawn


def test_lines_of_a_dim_that_is_no_control_have_the_colour_of_the_condition():
    rates = np.stack([RATES, RATES / 2], axis=1)
    result = two_models([0.5, 0.7], [0.6, 0.8])
    dims = ("cell", "kind", "split", "position")
    for kind, is_control in (("side", False), ("control", True)):
        data = xr.Dataset(
            {"rate": (dims, rates)}, {"kind": ["low", "high"], "split": ["id", "ood"]}
        )
        result["probed"] = xr.DataTree(data.rename(kind=kind))
        figure = plots.lines(result, **PROBED, rows="split", lines=kind)
        one, other = (bars.lines[0] for bars in figure.axes[0].containers)
        assert (one.get_color() != other.get_color()) == is_control
        assert one.get_linestyle() != other.get_linestyle()


def test_conditions_can_be_lines_of_the_same_panel():
    rates = RATES.copy()
    rates[0, 1, 1] = rates[1, 1, 1] = np.nan
    arguments = {"columns": "split", "lines": CONDITIONS}
    arguments["data"] = values("probed", "rate", split=["ood", "test"])
    figure = plots.lines(measured(rates, position=[1, 2, 4]), **PROBED | arguments)
    (axis,) = figure.axes
    assert axis.get_title() == "out of distribution"
    np.testing.assert_allclose(curve(axis, "a")[:, 0], [1, 4])
    np.testing.assert_allclose(curve(axis, "b")[:, 1], RATES[2:, 1].mean(0))


def test_panels_and_lines_are_in_the_requested_order():
    selected = {"data": values("probed", "rate", split=["ood", "id"])}
    figure = plots.lines(measured(RATES), **PROBED | selected, rows="split", lines=None)
    labels = [figure.axes[number].get_ylabel() for number in (0, 2)]
    assert labels == ["rate\nout of distribution", "rate\nin distribution"]
    by = {"second": {"split": "ood"}, "first": {"split": "id"}, "none": {"split": "test"}}
    figure = plots.lines(measured(RATES), **PROBED, lines=by)
    assert legend_texts(figure) == ["second", "first"]
    np.testing.assert_allclose(curve(figure.axes[0], "first")[:, 1], RATES[:2, 0].mean(0))


def test_the_interval_is_the_range_of_two_seeds_and_students_t_for_more():
    rates = np.concatenate([RATES[:, :1], RATES[[1, 0, 3, 2], :1] + 0.1], axis=1)
    table = values("probed", "rate")(measured(rates))
    two = over_cells(table.isel(cell=[0, 1]))
    np.testing.assert_allclose(two["low"], rates[:2].min(0))
    np.testing.assert_allclose(two["high"], rates[:2].max(0))
    four = over_cells(table)
    for name, expected in zip(("value", "low", "high"), probes.over_seeds(rates.T), strict=True):
        np.testing.assert_allclose(four[name].T, expected)
    one = table.isel(cell=[0])
    one = one.assign(low=one["value"] - 0.1, high=one["value"] + 0.2)
    np.testing.assert_allclose(over_cells(one)["low"], rates[0] - 0.1)
    np.testing.assert_allclose(over_cells(one)["high"], rates[0] + 0.2)


def test_a_line_has_the_same_style_in_all_panels():
    rates = RATES.copy()
    rates[:2, 0] = np.nan
    figure = plots.lines(measured(rates), **PROBED, lines="split")
    first, second = figure.axes
    colours = {bars.lines[0].get_color() for axis in figure.axes for bars in axis.containers}
    assert len(colours) == 2
    assert [bars.get_label() for bars in first.containers] == ["out of distribution"]
    last_lines = [axis.containers[-1].lines[0] for axis in (first, second)]
    styles = {(line.get_linestyle(), line.get_marker()) for line in last_lines}
    assert len(styles) == 1


def test_training_curves_have_a_line_for_each_seed_and_no_mean():
    result = measured(RATES, position=[1, 2, 4])
    result["training"] = xr.DataTree(
        xr.Dataset(
            {"accuracy": (("cell", "split", "group", "train_step"), RATES[:, :, None])},
            {"split": ["id", "ood"], "group": ["all"], "train_step": [10, 20, 30]},
        )
    )
    known = {"chance": values("scores", "accuracy_chance", group="all")}
    figure = plots.training(result, metric="accuracy", references=known)
    for split, axis in enumerate(figure.axes):
        *seeds, chance = axis.lines
        for line, expected in zip(seeds, RATES[:, split], strict=True):
            np.testing.assert_allclose(line.get_ydata(), expected)
        assert chance.get_ydata()[0] == 0.1
    assert figure.axes[0].get_xlabel() == "training step"


def test_labels_of_training_steps_do_not_overlap():
    splits = ["id", "valid", "ood"]
    rates = np.broadcast_to(RATES[:, :1], (4, 3, 3))
    result = measured(RATES, position=[1, 2, 4])
    result["training"] = xr.DataTree(
        xr.Dataset(
            {"accuracy": (("cell", "split", "group", "train_step"), rates[:, :, None])},
            {"split": splits, "group": ["all"], "train_step": [500, 50_000, 100_000]},
        )
    )
    figure = plots.training(result, metric="accuracy")
    figure.canvas.draw()
    for axis in figure.axes:
        labels = axis.get_xticklabels()
        boxes = [label.get_window_extent() for label in labels]
        assert len(boxes) > 2
        # Two numbers that are less than a digit apart read as one.
        digit = boxes[-1].width / len(labels[-1].get_text())
        assert all(after.x0 - one.x1 > digit for one, after in itertools.pairwise(boxes))


def result_of_sizes():
    """A result of a model at three sizes, not sorted, and of a model without a size."""
    cells = [
        {"model": "a", "size": size, "seed": seed, "id": 0.5, "ood": size / 10 + seed / 100}
        for size in (4, 1, 2)
        for seed in (0, 1)
    ]
    return result_of([*cells, {"model": "b", "seed": 0, "id": 0.5, "ood": 0.3}])


TRIED = {(0.1, 3): (0.2, 0.4), (0.3, 3): (0.5, 0.7), (0.1, 30): (0.3, 0.3)}
"""Validation scores of two seeds, by rate and temperature."""


def tuned_result():
    """A model with two tuned settings, and one that was tried at two rates and has no other."""
    cells = [
        {"model": "a", "rate": rate, "heat": heat, "seed": seed, "id": score, "ood": 0.5}
        for (rate, heat), scores in TRIED.items()
        for seed, score in enumerate(scores)
    ]
    # A further seed of the best.
    cells.append(cells[2] | {"seed": 2, "id": 0.1})
    cells += [
        {"model": "b", "rate": rate, "heat": None, "seed": 0, "id": rate, "ood": 0.5}
        for rate in (0.3, 0.1)
    ]
    result = result_of(cells, tuned=("rate", "heat"))
    result.attrs["selection"] = "id/accuracy"
    return result


def test_tuning_shows_what_was_tried_and_rings_what_was_chosen():
    figure = plots.tuning(tuned_result())
    first, second = figure.axes
    assert [axis.get_title() for axis in figure.axes] == ["a", "b"]
    assert first.get_ylabel() == "id/accuracy, validation"
    np.testing.assert_allclose(curve(first, "heat=3"), [[0.1, 0.3], [0.3, 0.6]])
    np.testing.assert_allclose(curve(first, "heat=30"), [[0.1, 0.3]])
    np.testing.assert_allclose(second.lines[1].get_xydata(), [[0.1, 0.1], [0.3, 0.3]])
    for axis, chosen in ((first, [np.nan, 0.6]), (second, [np.nan, 0.3])):
        (ring,) = (line for line in axis.lines if line.get_label() == "chosen")
        np.testing.assert_allclose(ring.get_ydata(), chosen)
    dots = [line.get_ydata() for line in first.lines if line.get_marker() == "."]
    np.testing.assert_allclose(dots[0], [0.2, 0.4, 0.5, 0.7])
    further = next(line for line in first.lines if line.get_label() == "seeds not at all values")
    np.testing.assert_allclose(further.get_ydata(), [0.1])
    assert further.get_markerfacecolor() == "none"
    assert [text.get_text() for text in first.get_xticklabels()] == ["0.1", "0.3"]
    assert legend_texts(figure) == ["chosen", "seeds not at all values", "heat=3", "heat=30"]


@pytest.mark.parametrize(
    ("tried", "ticks"),
    [
        ((1e-4, 2e-4, 1e-3, 5e-3, 7e-3, 1e-2), ["0.0001", "0.0002", "0.001", "0.005", "0.01"]),
        ((0.0, 0.01, 0.02), ["0", "0.01", "0.02"]),
        (("muon", "adam"), ["adam", "muon"]),
    ],
)
def test_ticks_of_tuning_are_the_values_that_have_room(tried, ticks):
    cells = [
        {"model": "a", "rate": rate, "seed": 0, "id": score, "ood": 0.5}
        for rate, score in zip(tried, np.linspace(0, 1, len(tried)), strict=True)
    ]
    result = result_of(cells, tuned=("rate",))
    result.attrs["selection"] = "id/accuracy"
    figure = plots.tuning(result)
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ticks
    ring, line = figure.axes[0].lines[:2]
    assert np.isfinite(ring.get_ydata()).sum() == 1
    assert sorted(line.get_ydata()) == pytest.approx(np.linspace(0, 1, len(tried)))


def test_nothing_was_chosen_where_each_model_has_a_rate_of_its_own():
    cells = [
        {"model": model, "rate": rate, "seed": 0, "id": 0.5, "ood": 0.5}
        for model, rate in (("a", 0.1), ("b", 0.3))
    ]
    assert plots.tuning(result_of(cells, tuned=("rate",))) is None
    assert plots.tuning(result_of(cells)) is None


def test_readings_against_a_setting_are_sorted_by_it_with_a_dot_for_each_seed():
    figure = plots.against(result_of_sizes(), readings={"ood": OOD}, setting="size", ylabel="right")
    line, dots = figure.axes[0].lines
    np.testing.assert_allclose(line.get_xdata(), [1, 2, 4])
    np.testing.assert_allclose(line.get_ydata(), [0.105, 0.205, 0.405])
    np.testing.assert_allclose(dots.get_ydata(), [0.1, 0.11, 0.2, 0.21, 0.4, 0.41])
    # The model without a size has no line, not even in the legend.
    assert legend_texts(figure) == ["a"]
    one_seed = two_models([0.5], [0.6])
    assert plots.against(one_seed, readings={"ood": OOD}, setting="seed", ylabel="right") is None


NOT_MEASURED = {"test": metric("accuracy", "test")}


def drawn_points(axis):
    """The dots of each condition and reading, and the positions of the lines at their means."""
    dots = [bars.lines[0] for bars in axis.containers]
    means = [line.get_xdata()[0] for line in axis.lines if line.get_marker() == "None"]
    return [line.get_xdata() for line in dots], means


def test_points_show_all_seeds_of_each_reading_with_their_mean():
    result = two_models([0.5, 0.7], [0.6, 0.8])
    figure = plots.points(result, readings={"id": ID, "ood": OOD} | NOT_MEASURED, xlabel="right")
    (axis,) = figure.axes
    assert [text.get_text() for text in axis.get_yticklabels()] == ["a", "b"]
    dots, means = drawn_points(axis)
    np.testing.assert_allclose(dots, [[0.9, 0.9], [0.9, 0.9], [0.5, 0.7], [0.6, 0.8]])
    np.testing.assert_allclose(means, [0.9, 0.9, 0.6, 0.7])
    colours = [bars.lines[0].get_color() for bars in axis.containers]
    assert colours[0] == colours[1] != colours[2] == colours[3]
    assert plots.points(result, readings=NOT_MEASURED, xlabel="right") is None


def test_readings_apart_have_their_own_panels_with_references_and_intervals():
    result = two_models([0.5], [0.6])
    scores = result["scores"].to_dataset()
    bounds = {"accuracy_low": scores["accuracy"] - 0.1, "accuracy_high": scores["accuracy"] + 0.2}
    result["scores"] = xr.DataTree(scores.assign(bounds))
    known = {"chance": values_of({"ood": metric("accuracy_chance", "ood")})}
    readings = {"id": ID, "ood": OOD}
    figure = plots.points(result, readings=readings, separate=True, references=known)
    assert [axis.get_title() for axis in figure.axes] == ["in distribution", "out of distribution"]
    dots, chance = zip(*(drawn_points(axis) for axis in figure.axes), strict=True)
    np.testing.assert_allclose(dots, [[[0.9], [0.9]], [[0.5], [0.6]]])
    assert chance == ([], [pytest.approx(0.1)] * 2)
    (interval,) = figure.axes[1].containers[0].lines[2]
    np.testing.assert_allclose(interval.get_segments()[0][:, 0], [0.4, 0.7])


def test_conditions_without_a_value_have_no_row():
    result = two_models([0.5], [np.nan])
    figure = plots.points(result, readings={"ood": OOD})
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["a"]


def test_conditions_without_fixed_colours_have_different_styles():
    a, b = shown_conditions(two_models([0.5], [0.6]))
    assert (a.label, b.label) == ("a", "b")
    assert a.colour != b.colour
    assert a.marker != b.marker


def test_mechanisms_have_fixed_colours_in_any_order():
    cells = [{"model": model, "seed": 0, "id": 0.9, "ood": 0.5} for model in ("hyla", "softmax")]
    for ordered in (cells, cells[::-1]):
        conditions = shown_conditions(result_of(ordered))
        colours = {condition.label: condition.colour for condition in conditions}
        assert colours == {"HYLA": "#cc3311", "softmax attention": "#4477aa"}


def test_figures_are_not_registered_with_pyplot():
    before = plt.get_fignums()
    plots.scatter(two_models([0.5], [0.6]), x=ID, y=OOD, xlabel="id", ylabel="ood")
    assert plt.get_fignums() == before
