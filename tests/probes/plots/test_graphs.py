import numpy as np
import pytest
import xarray as xr
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from probes import extract_control_flow, plots
from tests.probes.plots.conftest import names

DIMS = ("example", "step", "head", "query_pos", "key_pos")


def make(padding=0):
    """Worked out by hand: column 1 updates twice, and reads first 2, then 0 and 2.

    A second example, of two valid columns, does nothing. Padding on the left comes first.
    """
    gate = np.full((2, 3, 3), 0.1)
    gate[0, [0, 2], 1] = 0.9
    attention = np.zeros((2, 3, 2, 3, 3))
    attention[0, 0, 0, 1, 2] = 0.9
    attention[0, 2, 0, 1, [0, 2]] = 0.6
    attention[0, 2, 1, 1, 2] = 0.7  # another head reads the same
    valid = np.array([[True, True, True], [True, True, False]])
    left = (padding, 0)
    return extract_control_flow(
        xr.DataArray(gate, dims=(*DIMS[:2], "pos")).pad(pos=left, constant_values=0.9),
        xr.DataArray(attention, dims=DIMS).pad(query_pos=left, key_pos=left, constant_values=0.9),
        xr.DataArray(valid, dims=("example", "pos")).pad(pos=left, constant_values=False),
    )


@pytest.fixture
def graphs():
    return make()


def framed(ax, colour):
    return sorted(
        (round(one.get_x() + one.get_width() / 2), round(one.get_y() + one.get_height() / 2))
        for one in ax.patches
        if isinstance(one, Rectangle) and one.get_edgecolor() == to_rgba(colour)
    )


def test_a_graph_is_drawn_with_its_nodes_reads_and_kept_states(graphs, ax):
    assert plots.control_flow(graphs, ax, labels=["BOS", "a", "b"]) is ax
    assert framed(ax, "black") == [(1, 0), (1, 2)]
    assert framed(ax, "#888888") == [(0, -1), (1, -1), (2, -1)]
    arrows = [(one.xyann, one.xy) for one in ax.texts]
    assert sorted(arrows) == [((0, -1), (1, 2)), ((2, -1), (1, 0)), ((2, -1), (1, 2))]
    # Steps go down; what is kept goes straight down in its column.
    assert ax.get_ylim() == (2.5, -1.5)
    kept = [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in ax.lines]
    assert [columns for columns, _ in kept] == [[1, 1], [1, 1]]
    assert all(above < below for _, (above, below) in kept)
    assert names(ax, "x") == ["BOS", "a", "b"]
    assert names(ax, "y") == ["input", "0", "1", "2"]
    np.testing.assert_array_equal(ax.images[0].get_array(), graphs["gate"][0])


def test_padding_on_the_left_is_not_drawn(graphs):
    axes = [plots.control_flow(each, Figure().subplots()) for each in (make(2), graphs)]
    padded, plain = (
        (
            framed(ax, "black"),
            framed(ax, "#888888"),
            sorted((one.xyann, one.xy) for one in ax.texts),
        )
        for ax in axes
    )
    assert padded == plain
    np.testing.assert_array_equal(*(ax.images[0].get_array() for ax in axes))
    assert axes[0].get_xlim() == axes[1].get_xlim()
    # Columns have their own numbers.
    assert [names(ax, "x") for ax in axes] == [["2", "3", "4"], ["0", "1", "2"]]


def test_a_stronger_read_is_more_visible(graphs, ax):
    plots.control_flow(graphs, ax)
    looks = {one.xyann: one.arrow_patch for one in ax.texts if one.xy == (1, 2)}
    weak, strong = looks[0, -1], looks[2, -1]  # 0.6, and the larger of two heads, 0.7
    assert weak.get_alpha() < strong.get_alpha() < 1
    assert weak.get_linewidth() < strong.get_linewidth()


def test_an_example_without_updates_has_its_inputs_alone(graphs, ax):
    plots.control_flow(graphs, ax, example=1, darkest=0.5)
    assert framed(ax, "black") == []
    assert framed(ax, "#888888") == [(0, -1), (1, -1)]
    assert not ax.texts
    assert ax.get_xlim() == (-0.5, 1.5)
    assert ax.images[0].get_clim() == (0, 0.5)


def test_labels_must_be_of_the_valid_columns(graphs, ax):
    with pytest.raises(ValueError, match="labels must name the 2 valid columns, got 3"):
        plots.control_flow(graphs, ax, example=1, labels=["BOS", "a", "b"])
    with pytest.raises(IndexError, match=r"example must be in 0\.\.1, got 2"):
        plots.control_flow(graphs, ax, example=2)


def test_results_of_other_probes_are_refused(graphs, ax):
    message = "must hold gate, update, made by extract_control_flow, got valid"
    with pytest.raises(KeyError, match=message):
        plots.control_flow(graphs.drop_vars(["gate", "update"]), ax)
