import numpy as np
import pytest
import xarray as xr
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from probes import draw_projection


@pytest.fixture
def projection():
    points = np.random.default_rng(0).standard_normal((5, 2, 3))
    rules = [[0, 2], [2, 0], [0, 0], [2, 2], [0, 2]]
    return xr.Dataset(
        {
            "projection": (("example", "feature", "component"), points),
            "rule": (("example", "feature"), rules),
        }
    )


def test_points_have_the_colour_of_their_label(projection):
    axes = Figure().subplots()
    draw_projection(axes, projection.transpose(), label="rule", names=("sum", "constant", "other"))
    drawn = {
        to_rgb(points.get_facecolor()[0]): points.get_offsets() for points in axes.collections[::2]
    }
    assert [len(points) for points in drawn.values()] == [5, 0, 5]
    for number, colour in ((0, "C0"), (2, "C2")):
        chosen = projection["rule"].to_numpy() == number
        expected = projection["projection"].to_numpy()[chosen][:, :2]
        assert sorted(map(tuple, drawn[to_rgb(colour)])) == sorted(map(tuple, expected))
    handles, labels = axes.get_legend_handles_labels()
    assert labels == ["sum", "constant", "other"]
    assert [to_rgb(handle.get_facecolor()[0]) for handle in handles] == [
        *map(to_rgb, ("C0", "C1", "C2"))
    ]
    assert len(axes.get_xticks()) == len(axes.get_yticks()) == 0


def test_a_label_without_a_name_is_refused(projection):
    with pytest.raises(ValueError, match="more than 2 entries, got 2"):
        draw_projection(Figure().subplots(), projection, label="rule", names=("sum", "constant"))
