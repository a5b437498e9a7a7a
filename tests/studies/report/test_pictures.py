"""Pictures of conditions, by a function that draws one."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from studies.report.panels import group, shown_conditions, values
from studies.report.plots import pictures
from tests.studies.report.test_plots import RATES, measured


@pytest.fixture
def seen():
    """What was drawn so far."""
    return []


@pytest.fixture
def draw(seen):
    """Draws a line, and notes the data."""

    def function(axis, data):
        (line,) = axis.plot([0, 1], [0, 1], label="drawn")
        seen.append((data, to_rgb(line.get_color())))

    return function


def test_a_picture_is_of_the_first_cell_in_the_colour_of_its_condition(draw, seen):
    result = measured(RATES)
    figure = pictures(result, data=group("probed"), draw=draw, rows="split")
    assert [axis.get_title() for axis in figure.axes[:2]] == ["a", "b"]
    labels = [axis.get_ylabel() for axis in figure.axes[::2]]
    assert labels == ["in distribution", "out of distribution"]
    colours = [to_rgb(one.colour) for one in shown_conditions(result)] * 2
    panels = [(cell, split) for split in (0, 1) for cell in (0, 2)]
    for (data, colour), place, expected in zip(seen, panels, colours, strict=True):
        np.testing.assert_array_equal(data["rate"], RATES[place])
        assert colour == expected
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["drawn"]


def test_a_picture_of_the_mean_of_two_seeds_has_both_as_ends(draw, seen):
    rows = {"last": {"place": 2}, "first": {"place": 0}}
    chosen = {"data": values("probed", "rate", split="ood"), "rows": rows, "mean": "rate"}
    figure = pictures(measured(RATES, place=[0, 1, 2]), draw=draw, **chosen)
    assert [axis.get_ylabel() for axis in figure.axes[::2]] == ["last", "first"]
    panels = [(cells, place) for place in (2, 0) for cells in ([0, 1], [2, 3])]
    for (data, _), (cells, place) in zip(seen, panels, strict=True):
        low, high = RATES[cells, 1, place]
        expected = ((low + high) / 2, low, high)
        for name, value in zip(("rate", "rate_low", "rate_high"), expected, strict=True):
            assert float(data[name]) == pytest.approx(float(value))


def test_there_is_no_picture_of_what_was_not_measured(draw):
    assert pictures(measured(RATES), data=group("other"), draw=draw, rows="split") is None
