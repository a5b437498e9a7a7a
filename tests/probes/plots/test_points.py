import numpy as np
import pytest
import xarray as xr
from matplotlib.colors import to_hex

from probes import plots, project
from probes.plots import COLOURS
from tests.probes.plots.conftest import legend


@pytest.fixture
def projected():
    points = np.random.default_rng(0).standard_normal((5, 2, 3))
    rules = [[0, 2], [2, 0], [0, 0], [2, 2], [0, 2]]
    return xr.Dataset(
        {
            "projection": (("example", "feature", "component"), points),
            "rule": (("example", "feature"), rules),
            "size": ("example", [0.1, 0.4, 0.2, 0.5, 0.3]),
        }
    )


def drawn(ax):
    """Points by colour, without those of the legend."""
    return {
        to_hex(points.get_facecolor()[0]): points.get_offsets()
        for points in ax.collections
        if len(points.get_offsets())
    }


def test_points_have_the_colour_of_their_label_in_its_order(projected, ax):
    names = ("sum", "constant", "other")
    assert plots.projection(projected.transpose(), ax, label="rule", names=names) is ax
    found = drawn(ax)
    assert set(found) == {COLOURS[0], COLOURS[2]}
    for number in (0, 2):
        chosen = projected["rule"].to_numpy() == number
        expected = projected["projection"].to_numpy()[chosen][:, :2]
        assert sorted(map(tuple, found[COLOURS[number]])) == sorted(map(tuple, expected))
    handles, labels = ax.get_legend_handles_labels()
    assert labels == list(names)
    assert [to_hex(handle.get_facecolor()[0]) for handle in handles] == list(COLOURS[:3])
    assert len(ax.get_xticks()) == len(ax.get_yticks()) == 0


def test_codes_of_a_model_that_is_not_ours_are_coloured_by_the_labels_that_occur(codes, ax):
    found = project(codes[0].set_coords("rule")["code"].isel(layer=2))
    plots.projection(found, ax, label="rule")
    kinds = sorted(set(found["rule"].to_numpy()))
    assert legend(ax) == kinds
    for colour, kind in zip(COLOURS, kinds, strict=False):
        expected = found["projection"].to_numpy()[found["rule"].to_numpy() == kind]
        assert np.allclose(drawn(ax)[colour], expected)


def test_numbers_are_shades(projected, ax):
    plots.projection(projected, ax, label="size")
    (points,) = ax.collections
    expected = np.repeat(projected["size"].to_numpy(), 2)
    np.testing.assert_array_equal(points.get_array(), expected)
    points_of = projected["projection"].to_numpy()[..., :2].reshape(-1, 2)
    np.testing.assert_array_equal(points.get_offsets(), points_of)
    assert legend(ax) == []


def test_many_labels_differ_in_colour_or_marker_and_are_not_in_the_legend(ax):
    points = np.random.default_rng(0).standard_normal((20, 2))
    data = {"projection": (("example", "component"), points), "term": ("example", np.arange(20))}
    plots.projection(xr.Dataset(data), ax, label="term")
    drawn = ax.collections
    np.testing.assert_array_equal([one.get_offsets()[0] for one in drawn], points)
    looks = {(to_hex(c.get_facecolor()[0]), str(c.get_paths()[0].vertices)) for c in drawn}
    assert len(looks) == 20
    assert legend(ax) == []


def test_without_a_label_all_points_are_alike(projected, ax):
    plots.projection(projected, ax)
    (points,) = ax.collections
    assert len(points.get_offsets()) == 10
    assert len(points.get_facecolor()) == 1


def test_what_is_missing_is_named(projected, codes, ax):
    with pytest.raises(ValueError, match="more than 2 entries, got 2"):
        plots.projection(projected, ax, label="rule", names=("sum", "constant"))
    with pytest.raises(KeyError, match="must hold 'projection', made by project, got"):
        plots.projection(codes[0], ax)
    with pytest.raises(KeyError, match="must hold 'term', named by label, got"):
        plots.projection(projected, ax, label="term")
    both = project(codes[0]["code"].isel(layer=0, example=slice(40)), method=["pca", "tsne"])
    with pytest.raises(ValueError, match=r"select one: result.sel\(kind='pca'\)"):
        plots.projection(both, ax)
