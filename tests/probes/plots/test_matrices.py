import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import xarray as xr
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import nn

from probes import Quantity, capture, hooked, plots, summarise_value_scores
from tests.probes.plots.conftest import batch, names


def labelled(values, rows, columns):
    coords = {"query_pos": rows, "key_pos": columns}
    return xr.DataArray(np.array(values, dtype=float), coords, ("query_pos", "key_pos"))


def test_every_number_is_in_its_cell(ax):
    matrix = labelled([[0.25, -1, 0], [np.nan, 0.5, 1]], ["a", "b"], ["x", "y", "x"])
    assert plots.matrix(matrix, ax, numbers="{:.2f}") is ax
    texts = {text.get_position(): text.get_text() for text in ax.texts}
    assert texts == {
        (0, 0): "0.25",
        (1, 0): "-1.00",
        (2, 0): "0.00",
        (1, 1): "0.50",
        (2, 1): "1.00",
    }
    (image,) = ax.images
    np.testing.assert_array_equal(np.ma.filled(image.get_array(), np.nan), matrix)
    # What is empty does not look like 0.
    empty = image.to_rgba(image.get_array())[1, 0]
    assert empty[3] == 0
    assert min(ax.get_facecolor()[:3]) < 0.92 < min(image.to_rgba(0.0)[:3])
    assert names(ax, "y") == ["a", "b"]
    assert names(ax, "x") == ["x", "y", "x"]
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("query pos", "key pos")
    # The first row is above the second one.
    assert ax.get_ylim()[0] > ax.get_ylim()[1]


def test_signed_values_are_red_and_blue_and_numbers_are_readable(ax):
    plots.matrix(labelled([[-2, 0, 1]], [0], [0, 1, 2]), ax, numbers="{:.1f}")
    (image,) = ax.images
    assert image.get_clim() == (-2, 2)
    minus, nothing, plus = (image.to_rgba(value)[:3] for value in (-2.0, 0.0, 2.0))
    assert minus[0] > minus[2]
    assert plus[2] > plus[0]
    assert min(nothing) > 0.9
    assert [text.get_color() for text in ax.texts] == ["white", "black", "black"]


def test_what_is_not_negative_goes_from_white_to_blue(ax):
    plots.matrix(labelled([[0, 3]], [0], [0, 1]), ax)
    (image,) = ax.images
    assert image.get_clim() == (0, 3)
    assert min(image.to_rgba(0.0)[:3]) > 0.9
    assert image.to_rgba(3.0)[2] > 2 * image.to_rgba(3.0)[0]
    assert not ax.texts


def test_limits_and_format_are_those_asked_for(ax):
    matrix = labelled([[0.4, 0.61]], [0], [0, 1])
    plots.matrix(matrix, ax, limits=(0.0, 1.0), numbers="{:.0%}", cmap="viridis")
    (image,) = ax.images
    assert image.get_clim() == (0, 1)
    assert image.get_cmap().name == "viridis"
    assert [text.get_text() for text in ax.texts] == ["40%", "61%"]
    ax.clear()
    plots.matrix(matrix, ax, numbers=lambda value: "" if value < 0.5 else "x")
    assert [text.get_text() for text in ax.texts] == ["x"]


def test_numbers_stay_readable_when_the_limits_change(ax):
    plots.matrix(labelled([[0.05, 0.01]], [0], [0, 1]), ax, numbers="{:.2f}")
    assert [text.get_color() for text in ax.texts] == ["white", "black"]
    ax.images[0].set_clim(0, 1)
    assert [text.get_color() for text in ax.texts] == ["black", "black"]


def test_numbers_that_do_not_fit_are_left_out():
    small, large = (Figure((side, side)).subplots() for side in (1, 20))
    for ax in (small, large):
        plots.matrix(labelled(np.eye(30), range(30), range(30)), ax, numbers="{:.2f}")
    assert (len(small.texts), len(large.texts)) == (0, 900)


def test_a_matrix_without_numbers_is_refused(ax):
    with pytest.raises(ValueError, match=r"values must have two dims and a number"):
        plots.matrix(labelled([[np.nan]], [0], [0]), ax)
    with pytest.raises(ValueError, match=r"two dims and a number, got \{'query_pos': 1\}"):
        plots.matrix(labelled([[1.0]], [0], [0])[:, 0], ax)


# Attention


class Attending(nn.Module):
    """Attention of torch, whose weights [example, head, query, key] pass a module of their own."""

    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)
        self.weights = nn.Identity()

    def forward(self, x):
        x = x[:, None] * torch.arange(1.0, 5.0)[:, None]
        z, weights = self.attend(x, x, x, average_attn_weights=False)
        self.weights(weights)
        return z[:, -1]


@pytest.fixture(scope="module")
def pattern():
    torch.manual_seed(0)
    dims = ("example", "head", "query_pos", "key_pos")
    quantity = {"pattern": Quantity("weights.hook_out", dims)}
    return capture(hooked(Attending()), [batch(3, 0)], quantity)["pattern"].isel(example=1)


def test_attention_is_the_maximum_over_heads_with_tokens_and_without_padding(pattern, ax):
    plots.attention(pattern, ax, labels=["BOS", "a", "b"], framed=[2])
    (image,) = ax.images
    np.testing.assert_array_equal(image.get_array(), pattern.to_numpy().max(0)[:3, :3])
    assert image.get_clim() == (0, 1)
    assert names(ax, "x") == names(ax, "y") == ["BOS", "a", "b"]
    (frame,) = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    assert (frame.get_xy(), frame.get_width(), frame.get_height()) == ((-0.5, 1.5), 3, 1)
    assert frame.get_edgecolor() == to_rgba("#cc3311")


def test_a_head_is_drawn_as_it_is_and_signed_attention_around_0(pattern):
    plain, signed = Figure().subplots(1, 2)
    plots.attention(pattern.isel(head=1).transpose(), plain)
    np.testing.assert_array_equal(plain.images[0].get_array(), pattern.to_numpy()[1])
    plots.attention(pattern.isel(head=1) - 0.5, signed)
    low, high = signed.images[0].get_clim()
    assert low == -high < 0
    with pytest.raises(ValueError, match=r"select one label: result.isel\(example=0\)"):
        plots.attention(pattern.expand_dims(example=2), plain)


def test_gates_have_a_row_for_each_channel(ax):
    gates = xr.DataArray(np.random.default_rng(0).random((4, 6)), dims=("pos", "channel"))
    plots.gates(gates, ax, labels=["BOS", "a", "b"])
    np.testing.assert_array_equal(ax.images[0].get_array(), gates.to_numpy()[:3].T)
    assert ax.images[0].get_clim() == (0, 1)
    assert (names(ax, "x"), names(ax, "y")) == (["BOS", "a", "b"], [])


# Value scores


def test_value_scores_are_drawn_with_their_numbers(ax):
    shares = np.array([[0.9, 0.1], [0.25, 0.75], [1.0, 0.0]])
    scores = xr.DataArray(np.stack([shares] * 3), dims=("example", "search", "retrieval"))
    members = xr.DataArray(np.ones((1, 3), bool), {"group": ["all"]}, ("group", "example"))
    plots.value_scores(summarise_value_scores(scores, members), ax, highest=0.9)
    assert np.allclose(ax.images[0].get_array(), shares)
    assert ax.images[0].get_clim() == (0, 0.9)
    written = {text.get_position(): text.get_text() for text in ax.texts}
    assert written == {
        (0, 0): ".90",
        (1, 0): ".10",
        (0, 1): ".25",
        (1, 1): ".75",
        (0, 2): "1.00",
        (1, 2): ".00",
    }
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("search", "retrieval")


def test_value_scores_of_several_groups_and_other_results_are_refused(ax):
    scores = xr.DataArray(np.full((2, 3, 2), 0.5), dims=("group", "search", "retrieval"))
    with pytest.raises(ValueError, match=r"select one label: result.isel\(group=0\)"):
        plots.value_scores(scores.to_dataset(name="value_scores"), ax)
    message = "'value_scores', made by measure_value_scores or summarise_value_scores, got score"
    with pytest.raises(KeyError, match=message):
        plots.value_scores(scores.to_dataset(name="score"), ax)
    plt.close("all")
