"""What is read off figures is what was drawn."""

import math

import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

import probes
from studies.report import figures


def panel_of(figure):
    (part,) = figures.read(figure)
    ((panel,),) = part.rows
    return panel


@pytest.fixture
def axis():
    return Figure().subplots()


def test_lines_have_their_points_bounds_and_styles(axis):
    data = xr.Dataset(
        {
            "score": ("layer", [0.2, np.nan, 0.6]),
            "score_low": ("layer", [0.1, np.nan, 0.3]),
            "score_high": ("layer", [0.4, np.nan, 0.7]),
        },
        {"layer": [0, 1, 2]},
    )
    style = {"label": "probe", "color": "#882255", "marker": "s", "linestyle": "--"}
    probes.plots.line(data, "score", axis, along="layer", **style)
    axis.axhline(0.5, label="chance")
    observed, chance = panel_of(axis.figure).lines
    assert (observed.label, observed.colour, observed.shape) == ("probe", "#882255", "square")
    assert observed.dash == figures.DASHES["--"]
    np.testing.assert_allclose(observed.x, [0, 2])
    np.testing.assert_allclose(observed.y, [0.2, 0.6])
    low, high, along = observed.bounds
    np.testing.assert_allclose([low, high], [[0.1, 0.3], [0.4, 0.7]])
    assert along == "y"
    # In coordinates of the data, although it was drawn in those of the axes.
    np.testing.assert_allclose(chance.x, axis.get_xlim())
    np.testing.assert_allclose(chance.y, 0.5)


def test_horizontal_bounds_and_marks_at_some_points(axis):
    axis.errorbar([1, 2], [3, 4], xerr=[[0.5, 1], [1, 2]], fmt="o")
    (line,) = axis.plot([1, 2, 3], [1, 4, 9], marker="D")
    line.set_markevery([-1])
    marked, bars = sorted(panel_of(axis.figure).lines, key=lambda one: one.dash is None)
    np.testing.assert_allclose(bars.bounds[0], [0.5, 1])
    np.testing.assert_allclose(bars.bounds[1], [2, 4])
    assert bars.bounds[2] == "x"
    assert list(marked.marked) == [2]


def test_matrices_have_their_values_names_and_colours(axis):
    values = xr.DataArray(
        [[1.0, -2.0, np.nan], [0.0, 0.5, 0.25]],
        {"query": ["a b", "c"], "key": ["x", "y", "z"]},
        ("query", "key"),
    )
    probes.plots.matrix(values, axis)
    panel = panel_of(axis.figure)
    (matrix,) = panel.matrices
    np.testing.assert_array_equal(matrix.values, values)
    assert matrix.domain == (-2, 2)
    assert [panel.y.names[at] for at in matrix.y.tolist()] == ["a b", "c"]
    assert [panel.x.names[at] for at in matrix.x.tolist()] == ["x", "y", "z"]
    rows = list(figures.rows(figures.read(axis.figure)))
    cell = next(row for row in rows if (row["y"], row["x"]) == ("c", "z"))
    assert cell["value"] == 0.25
    assert next(row for row in rows if row["x"] == "z")["value"] is None


def test_an_image_from_below_is_the_right_way_up(axis):
    axis.imshow([[1.0, 2.0], [3.0, 4.0]], origin="lower", extent=(0, 2, 0, 2))
    (matrix,) = panel_of(axis.figure).matrices
    assert matrix.values[0, 0] == 1
    assert (matrix.x[0], matrix.y[0]) == (0.5, 0.5)


def test_bars_frames_and_spans(axis):
    axis.bar([1, 2], [3, 4], yerr=0.5, width=0.8, color="#4477aa", alpha=0.5, label="share")
    axis.axvspan(0, 1.5, color="#eeeeee")
    axis.add_patch(plt.Rectangle((0, 1), 2, 3, fill=False, ec="red"))
    panel = panel_of(axis.figure)
    first, second, span, frame = sorted(panel.boxes, key=lambda box: not box.is_bar)
    np.testing.assert_allclose(first.corners, (0.6, 0, 1.4, 3))
    assert first.label == second.label == "share"
    # Half transparent on white.
    assert first.fill == "#a2bbd4"
    np.testing.assert_allclose(span.corners, (0, axis.get_ylim()[0], 1.5, axis.get_ylim()[1]))
    assert not span.is_bar
    np.testing.assert_allclose(frame.corners, (0, 1, 2, 4))
    assert frame.fill is None
    (bars,) = panel.lines
    np.testing.assert_allclose(bars.bounds[:2], [[2.5, 3.5], [3.5, 4.5]])
    shown = [row for row in figures.rows(figures.read(axis.figure)) if row["series"] == "share"]
    assert [row["y2"] for row in shown] == [3, 4]


def test_points_have_the_label_of_those_that_look_alike(axis):
    style = {"color": "#cc3311", "marker": "^"}
    axis.scatter([1, 2], [3, 4], s=4, **style)
    axis.scatter([5], [6], color="#4477aa")
    axis.scatter([], [], label="rule", **style)
    lines = panel_of(axis.figure).lines
    assert [one.shape for one in lines] == ["triangle-up", "circle", "triangle-up"]
    assert figures.owners(lines) == ["rule", "", "rule"]


def test_scales(axis):
    axis.plot([1, 8], [10, 1000])
    axis.set_xscale("log", base=2)
    axis.set(xlim=(1, 16), ylim=(1000, 0), xlabel="steps")
    panel = panel_of(axis.figure)
    assert (panel.x.title, panel.x.limits, panel.x.base) == ("steps", (1, 16), 2)
    assert (panel.y.limits, panel.y.base) == ((1000, 0), None)


def test_panels_are_in_rows_without_colour_bars():
    figure = Figure()
    axes = figure.subplots(2, 2)
    for number, axis in enumerate(axes.flat[:3]):
        image = axis.imshow([[0.0, 1.0]])
        axis.set_title(str(number))
    axes[1, 1].axis("off")
    figure.colorbar(image, ax=axes, label="share")
    (part,) = figures.read(figure)
    assert [[panel.title for panel in row] for row in part.rows] == [["0", "1"], ["2"]]
    # One bar for all that have the same colours.
    titles = [panel.matrices[0].title for row in part.rows for panel in row]
    assert titles == [None, "share", None]


def test_subfigures_are_parts():
    figure = Figure()
    for number, part in enumerate(figure.subfigures(2, 1)):
        part.suptitle(f"part {number}")
        part.subplots().plot([1, 2])
    assert [part.title for part in figures.read(figure)] == ["part 0", "part 1"]


@pytest.mark.parametrize(
    "draw",
    [
        lambda axis: axis.imshow(np.zeros((2, 2, 3))),
        lambda axis: axis.annotate("", (0, 0), (1, 1), arrowprops={}),
        lambda axis: axis.fill_between([0, 1], [0, 1]),
        lambda axis: axis.set_yscale("symlog"),
    ],
    ids=["photograph", "arrow", "area", "scale"],
)
def test_what_no_chart_can_show_is_not_read(axis, draw):
    axis.plot([1, 2])
    draw(axis)
    assert figures.read(axis.figure) is None


def test_an_empty_figure_is_not_read():
    assert figures.read(Figure()) is None


def test_words_for_a_figure():
    figure = Figure()
    for axis, title in zip(figure.subplots(1, 2), ("softmax", "HYLA"), strict=True):
        axis.plot([1, 2], label="probe")
        axis.set(title=title, xlabel="layer", ylabel="rule\ndecoded")
    text = figures.described(figure)
    assert (
        text == "2 panels. panels: softmax; HYLA. axes: rule decoded against layer. series: probe."
    )


def test_numbers_are_short_and_finite():
    assert figures.numbers([1 / 3, math.nan, 2e9]) == [0.333333, None, 2e9]
