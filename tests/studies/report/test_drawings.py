"""`drawings.pictures`: panels of conditions, drawn by a given function."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from studies.report.drawings import matrices, pictures
from studies.report.panels import group, shown_conditions, values
from tests.studies.report.test_plots import RATES, legend_texts, measured


@pytest.fixture
def drawn():
    """The data and colours of all panels drawn so far."""
    return []


@pytest.fixture
def draw(drawn):
    """A function that draws a line and records the data and the colour."""

    def function(data, axis):
        (line,) = axis.plot([0, 1], [0, 1], label="drawn")
        drawn.append((data, to_rgb(line.get_color())))

    return function


def test_a_picture_shows_the_first_cell_in_the_colour_of_its_condition(draw, drawn):
    result = measured(RATES)
    figure = pictures(result, data=group("probed"), draw=draw, rows="split")
    assert [axis.get_title() for axis in figure.axes[:2]] == ["a", "b"]
    labels = [axis.get_ylabel() for axis in figure.axes[::2]]
    assert labels == ["in distribution", "out of distribution"]
    colours = [to_rgb(condition.colour) for condition in shown_conditions(result)] * 2
    panels = [(cell, split) for split in (0, 1) for cell in (0, 2)]
    for (data, colour), (cell, split), expected in zip(drawn, panels, colours, strict=True):
        np.testing.assert_array_equal(data["rate"], RATES[cell, split])
        assert colour == expected
    assert legend_texts(figure) == ["drawn"]


def test_the_bounds_of_a_mean_over_two_seeds_are_the_two_values(draw, drawn):
    rows = {"last": {"position": 2}, "first": {"position": 0}}
    arguments = {"data": values("probed", "rate", split="ood"), "rows": rows, "mean": "rate"}
    figure = pictures(measured(RATES, position=[0, 1, 2]), draw=draw, **arguments)
    assert [axis.get_ylabel() for axis in figure.axes[::2]] == ["last", "first"]
    panels = [(cells, position) for position in (2, 0) for cells in ([0, 1], [2, 3])]
    for (data, _), (cells, position) in zip(drawn, panels, strict=True):
        low, high = RATES[cells, 1, position]
        expected = ((low + high) / 2, low, high)
        for name, value in zip(("rate", "rate_low", "rate_high"), expected, strict=True):
            assert float(data[name]) == pytest.approx(float(value))


def test_there_is_no_picture_of_a_group_that_was_not_measured(draw):
    assert pictures(measured(RATES), data=group("other"), draw=draw, rows="split") is None


def test_numbers_of_matrices_can_be_read_on_the_colours_of_all_panels():
    rates = np.full((4, 2, 3), 0.9)
    rates[2:] = 0.05
    figure = matrices(
        measured(rates, position=[0, 1, 2]),
        data=values("probed", "rate"),
        y="split",
        x="position",
        title="rate",
        numbers="{:.2f}".format,
    )
    dark, light = figure.axes[:2]
    assert {image.get_clim() for axis in (dark, light) for image in axis.images} == {(0, 0.9)}
    colours = [{sum(to_rgb(text.get_color())) for text in axis.texts} for axis in (dark, light)]
    assert colours == [{3.0}, {0.0}]
