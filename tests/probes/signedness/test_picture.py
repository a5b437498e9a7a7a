import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr
from matplotlib.colors import to_rgba

from probes import draw_distribution, draw_matrices, draw_numbers, score_signedness


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


def test_matrices_of_an_example_are_drawn_without_padding():
    matrix = labelled(
        [[1, -2, np.nan], [np.nan] * 3, [3, 4, np.nan]], ["a", "", "c"], ["x", "y", ""]
    )
    data = xr.Dataset({"pattern": matrix, "gate": abs(matrix).assign_attrs(long_name="gate of N")})
    figure = draw_matrices(data, title="an example")
    assert [axis.get_title() for axis in figure.axes] == ["pattern", "gate of N"]
    for axis, expected in zip(figure.axes, ([[1, -2], [3, 4]], [[1, 2], [3, 4]]), strict=True):
        np.testing.assert_array_equal(axis.get_images()[0].get_array(), expected)
        assert [tick.get_text() for tick in axis.get_yticklabels()] == ["a", "c"]
        assert [tick.get_text() for tick in axis.get_xticklabels()] == ["x", "y"]
    assert figure.get_suptitle() == "an example"
    first, second = (axis.get_subplotspec() for axis in figure.axes)
    assert (first.rowspan, first.colspan.start) == (second.rowspan, 0)
    with pytest.raises(ValueError, match="matrices must have the dim key_pos"):
        draw_matrices(data.isel(key_pos=0))


def test_wide_matrices_stand_below_one_another():
    wide = labelled(np.ones((2, 12)), range(2), range(12))
    figure = draw_matrices(xr.Dataset({"a": wide, "b": wide}))
    assert [axis.get_subplotspec().rowspan.start for axis in figure.axes] == [0, 1]


def test_a_bin_is_as_high_as_its_share_and_as_wide_as_all(axis):
    pattern = xr.DataArray([[[-0.9, 0.1, 0.2, 7.0]]], dims=("example", "query_pos", "key_pos"))
    axis.set_prop_cycle(color=["red"])
    (steps,) = draw_distribution(axis, score_signedness(pattern, bins=4, resamples=2))
    values, edges, _ = steps.get_data()
    np.testing.assert_allclose(values, [0.25, 0, 0.5, 0.25])
    np.testing.assert_allclose(edges, [-1, -0.5, 0, 0.5, 1])
    assert steps.get_facecolor()[:3] == to_rgba("red")[:3]
    assert axis.get_yscale() == "log"
    assert axis.get_xlabel() == "attention weight"
    assert axis.get_ylim()[1] > 1


def test_controls_are_outlined_and_named(axis):
    shares = xr.DataArray(
        [[0.5, 0.5], [0.1, 0.9], [1, 0]],
        {"weights": ["trained", "untrained", "none"], "bin": [-0.5, 0.5]},
        ("weights", "bin"),
    )
    steps = draw_distribution(axis, shares.to_dataset(name="distribution"))
    assert [one.get_label() for one in steps] == ["trained", "untrained", "none"]
    assert [one.get_fill() for one in steps] == [True, False, False]
    np.testing.assert_allclose([one.get_data().values for one in steps], shares)
    assert {one.get_edgecolor() for one in steps[1:]} == {to_rgba("black")}


def test_a_distribution_has_bins_and_one_dim_of_controls(axis):
    shares = xr.DataArray(np.ones((2, 2, 3)), {"bin": [0, 1, 2]}, ("head", "layer", "bin"))
    scores = shares.to_dataset(name="distribution")
    for bad in (scores, scores.isel(head=0, layer=0, bin=[1]), scores.isel(head=0, bin=0)):
        with pytest.raises(
            ValueError, match="distribution must have the dim bin, with at least two"
        ):
            draw_distribution(axis, bad)


def test_numbers_that_are_written_as_nothing_are_left_out_and_colours_can_be_chosen():
    axis = plt.figure().gca()
    shares = labelled([[0.05, 0.5]], ["row"], ["short", "a name of many letters"])
    image = draw_numbers(
        axis,
        shares,
        limits=(0, 1),
        style=lambda share: f"{share:.0%}" if share >= 0.1 else "",
        colours="Blues",
    )
    assert [text.get_text() for text in axis.texts] == ["50%"]
    assert image.get_cmap().name == "Blues"
    assert {label.get_rotation() for label in axis.get_xticklabels()} == {90}
    assert {label.get_rotation() for label in axis.get_yticklabels()} == {0}


def test_names_without_room_are_left_out():
    axis = plt.figure().gca()
    draw_numbers(axis, labelled(np.ones((40, 2)), [f"row {n}" for n in range(40)], ["a", "b"]))
    assert "row 0" not in [label.get_text() for label in axis.get_yticklabels()]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["a", "b"]
