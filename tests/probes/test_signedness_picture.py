import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr
from matplotlib.colors import to_rgba

from probes import draw_distribution, draw_numbers, score_signedness


@pytest.fixture
def axis():
    figure = plt.figure()
    yield figure.gca()
    plt.close(figure)


def labelled(values, rows, columns):
    coords = {"query_pos": rows, "key_pos": columns}
    return xr.DataArray(np.array(values, dtype=float), coords, ("query_pos", "key_pos"))


def test_every_number_stands_in_its_cell(axis):
    matrix = labelled([[0.25, -1, 0], [np.nan, 0.5, 1]], ["a", "b"], ["x", "y", "x"])
    image = draw_numbers(axis, matrix)
    texts = {text.get_position(): text.get_text() for text in axis.texts}
    assert texts == {
        (0, 0): "0.25",
        (1, 0): "-1.00",
        (2, 0): "0.00",
        (1, 1): "0.50",
        (2, 1): "1.00",
    }
    np.testing.assert_array_equal(np.ma.filled(image.get_array(), np.nan), matrix)
    assert [tick.get_text() for tick in axis.get_yticklabels()] == ["a", "b"]
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["x", "y", "x"]
    # The first row is above the second one.
    assert axis.get_ylim()[0] > axis.get_ylim()[1]


def test_signs_have_colours_of_their_own_and_numbers_stand_out(axis):
    image = draw_numbers(axis, labelled([[-2, 0, 1]], [0], [0, 1, 2]))
    assert image.get_clim() == (-2, 2)
    minus, nothing, plus = (image.to_rgba(value)[:3] for value in (-2, 0, 2))
    assert minus[0] > minus[2]
    assert plus[2] > plus[0]
    assert min(nothing) > 0.9
    assert [text.get_color() for text in axis.texts] == ["white", "black", "black"]


def test_limits_and_style_are_those_asked_for(axis):
    image = draw_numbers(axis, labelled([[0.4, 0.61]], [0], [0, 1]), limits=(0, 1), style="{:.0%}")
    assert image.get_clim() == (0, 1)
    assert image.get_cmap().name == "viridis"
    assert [text.get_text() for text in axis.texts] == ["40%", "61%"]


def test_a_matrix_without_numbers_is_refused(axis):
    with pytest.raises(ValueError, match=r"matrix must have two dims and a number"):
        draw_numbers(axis, labelled([[np.nan]], [0], [0]))
    with pytest.raises(ValueError, match=r"matrix must have two dims .* got \{'query_pos': 1\}"):
        draw_numbers(axis, labelled([[1.0]], [0], [0])[:, 0])


def test_a_bin_is_as_high_as_its_share_and_as_wide_as_all(axis):
    pattern = xr.DataArray([[[-0.9, 0.1, 0.2, 7.0]]], dims=("example", "query_pos", "key_pos"))
    shares = score_signedness(pattern, bins=4, resamples=2)["distribution"]
    steps = draw_distribution(axis, shares, label="weights", color="red", fill=True)
    values, edges, _ = steps.get_data()
    np.testing.assert_allclose(values, [0.25, 0, 0.5, 0.25])
    np.testing.assert_allclose(edges, [-1, -0.5, 0, 0.5, 1])
    assert steps.get_label() == "weights"
    assert steps.get_facecolor() == to_rgba("red")


def test_a_distribution_has_bins_alone(axis):
    shares = xr.DataArray(np.ones((2, 3)), {"bin": [0, 1, 2]}, ("head", "bin"))
    with pytest.raises(ValueError, match="distribution must have the dim bin"):
        draw_distribution(axis, shares)
    with pytest.raises(ValueError, match="at least two of them"):
        draw_distribution(axis, shares[0, :1])
