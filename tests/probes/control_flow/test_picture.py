import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle

from probes import (
    DrawnExample,
    draw_control_flow,
    extract_control_flow,
    plot_control_flow,
)

DIMS = ("example", "step", "head", "query_pos", "key_pos")


@pytest.fixture
def graphs():
    """Worked out by hand: column 1 updates twice, and reads first 2, then 0 and 2.

    A second example, of two valid columns, does nothing.
    """
    gate = np.full((2, 3, 3), 0.1)
    gate[0, [0, 2], 1] = 0.9
    attention = np.zeros((2, 3, 2, 3, 3))
    attention[0, 0, 0, 1, 2] = 0.9
    attention[0, 2, 0, 1, [0, 2]] = 0.6
    attention[0, 2, 1, 1, 2] = 0.7  # another head reads the same
    valid = np.array([[True, True, True], [True, True, False]])
    return extract_control_flow(
        xr.DataArray(gate, dims=(*DIMS[:2], "pos")),
        xr.DataArray(attention, dims=DIMS),
        xr.DataArray(valid, dims=("example", "pos")),
    )


@pytest.fixture
def axis():
    figure, axis = plt.subplots()
    yield axis
    plt.close(figure)


def framed(axis, colour):
    return sorted(
        (round(one.get_x() + one.get_width() / 2), round(one.get_y() + one.get_height() / 2))
        for one in axis.patches
        if isinstance(one, Rectangle) and one.get_edgecolor() == to_rgba(colour)
    )


def test_a_graph_is_drawn_with_its_nodes_reads_and_kept_states(graphs, axis):
    image = draw_control_flow(axis, graphs, labels=["BOS", "a", "b"])
    assert framed(axis, "black") == [(1, 0), (1, 2)]
    assert framed(axis, "#888888") == [(0, -1), (1, -1), (2, -1)]
    arrows = [(one.xyann, one.xy) for one in axis.texts]
    assert sorted(arrows) == [((0, -1), (1, 2)), ((2, -1), (1, 0)), ((2, -1), (1, 2))]
    # Steps go down; what is kept goes straight down in its column.
    assert axis.get_ylim() == (2.5, -1.5)
    kept = [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axis.lines]
    assert [columns for columns, _ in kept] == [[1, 1], [1, 1]]
    assert all(above < below for _, (above, below) in kept)
    # Below and above.
    assert [one.get_text() for one in axis.get_xticklabels()] == ["BOS", "a", "b"] * 2
    assert [one.get_text() for one in axis.get_yticklabels()] == ["input", "0", "1", "2"]
    np.testing.assert_array_equal(image.get_array(), graphs["gate"][0])


def test_a_stronger_read_is_more_visible(graphs, axis):
    draw_control_flow(axis, graphs)
    looks = {one.xyann: one.arrow_patch for one in axis.texts if one.xy == (1, 2)}
    weak, strong = looks[0, -1], looks[2, -1]  # 0.6, and the larger of two heads, 0.7
    assert weak.get_alpha() < strong.get_alpha() < 1
    assert weak.get_linewidth() < strong.get_linewidth()


def test_an_example_without_updates_has_its_inputs_alone(graphs, axis):
    draw_control_flow(axis, graphs, 1, darkest=0.5)
    assert framed(axis, "black") == []
    assert framed(axis, "#888888") == [(0, -1), (1, -1)]
    assert not axis.texts
    assert axis.get_xlim() == (-0.5, 1.5)
    assert axis.images[0].get_clim() == (0, 0.5)


def test_labels_must_be_of_the_valid_columns(graphs, axis):
    with pytest.raises(ValueError, match="labels must name the 2 valid columns, got 3"):
        draw_control_flow(axis, graphs, 1, labels=["BOS", "a", "b"])
    with pytest.raises(IndexError, match=r"example must be in 0\.\.1, got 2"):
        draw_control_flow(axis, graphs, 2)


def test_several_graphs_stand_beside_one_another_where_there_is_room(graphs):
    labels = ["BOS", "a", "b"]
    short = [DrawnExample("one", graphs, 0, labels), DrawnExample("two", graphs, 1, labels[:2])]
    figure = plot_control_flow(short, darkest=0.5, shade="share")
    one, two, bar = figure.axes
    assert (one.get_title(loc="left"), two.get_title(loc="left")) == ("one", "two")
    assert (framed(one, "black"), framed(two, "black")) == ([(1, 0), (1, 2)], [])
    assert one.images[0].get_clim() == (0, 0.5)
    assert bar.get_ylabel() == "share"
    assert one.get_position().y0 == pytest.approx(two.get_position().y0, abs=0.02)
    wide = extract_control_flow(
        xr.DataArray(np.full((1, 2, 20), 0.9), dims=(*DIMS[:2], "pos")),
        xr.DataArray(np.zeros((1, 2, 1, 20, 20)), dims=DIMS),
        xr.DataArray(np.full((1, 20), True), dims=("example", "pos")),
    )
    figure = plot_control_flow([DrawnExample("wide", wide, 0, [str(i) for i in range(20)])] * 2)
    above, below, _ = figure.axes
    assert above.get_position().y0 > below.get_position().y1
    with pytest.raises(ValueError, match="examples must be at least one"):
        plot_control_flow([])
    plt.close("all")
