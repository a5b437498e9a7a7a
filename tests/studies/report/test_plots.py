import matplotlib.pyplot as plt
import numpy as np
import xarray as xr

from studies.engine import metric
from studies.report import comparisons, plots
from studies.report.panels import shown_conditions
from tests.studies.engine.synthetic import result_of, two_models

ID, OOD = metric("accuracy", "id"), metric("accuracy", "ood")


def measured(values, **coords):
    """Two seeds of models `a` and `b` with a variable `rate` [cell, split, place] in `probed`."""
    result = two_models([0.5, 0.7], [0.6, 0.8])
    coords = {"split": ["id", "ood"]} | coords
    rate = (("cell", "split", "place"), np.asarray(values, dtype=float))
    chance = ("cell", np.full(4, 0.25))
    result["probed"] = xr.DataTree(xr.Dataset({"rate": rate, "chance": chance}, coords))
    return result


PROBED = {"group": "probed", "variable": "rate", "along": "place", "ylabel": "rate"}
RATES = np.arange(24).reshape(4, 2, 3) / 24


def curve(axis, label):
    """Points of the line that has a label."""
    (found,) = (bars for bars in axis.containers if bars.get_label() == label)
    return np.array(found.lines[0].get_data()).T


def test_profiles_are_means_over_seeds_by_condition_and_row():
    result = measured(RATES, place=[1, 2, 4])
    figure = plots.profiles(result, **PROBED, rows="split", lines=None, reference="chance")
    assert [axis.get_title() for axis in figure.axes] == ["a", "b", "", ""]
    assert figure.axes[2].get_ylabel() == "rate\nout of distribution"
    for axis, cells, split in zip(figure.axes, [[0, 1], [2, 3]] * 2, [0, 0, 1, 1], strict=True):
        (line,) = (bars.lines[0] for bars in axis.containers)
        np.testing.assert_allclose(line.get_xdata(), [1, 2, 4])
        np.testing.assert_allclose(line.get_ydata(), RATES[cells, split].mean(0))
        assert axis.lines[-1].get_ydata()[0] == 0.25
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["chance"]


def test_profiles_leave_out_conditions_that_were_not_measured():
    values = RATES.copy()
    values[:2] = np.nan
    figure = plots.profiles(measured(values), **PROBED, lines="split")
    assert [axis.get_title() for axis in figure.axes] == ["b"]
    assert curve(figure.axes[0], "in distribution").shape == (3, 2)
    assert plots.profiles(measured(values * np.nan), **PROBED, lines="split") is None
    assert plots.profiles(measured(values), **PROBED | {"variable": "other"}) is None


def test_names_along_an_axis_have_their_places_whether_measured_or_not():
    values = RATES.copy()
    values[:, :, 2] = np.nan
    result = measured(values, place=["first", "second_one", "third"])
    figure = plots.profiles(result, **PROBED, select={"split": "id"})
    for axis in figure.axes:
        assert [label.get_text() for label in axis.get_xticklabels()] == [
            "first", "second one", "third",
        ]  # fmt: skip
        assert axis.get_xlim() == (-0.5, 2.5)


def test_matrices_show_shares_of_their_row_with_numbers():
    counts = np.zeros((4, 2, 3))
    counts[:2] = [[1, 0, 3], [0, 2, 0]]
    result = measured(counts, place=["x", "y", "z"])
    figure = plots.matrices(
        result, group="probed", variable="rate", y="split", x="place", title="share", shares=True
    )
    first, second = (axis.images[0].get_array() for axis in figure.axes[:2])
    np.testing.assert_allclose(first, [[0.25, 0, 0.75], [0, 1, 0]])
    np.testing.assert_allclose(second, 0)
    assert [text.get_text() for text in figure.axes[0].texts] == ["25", "75", "100"]


def test_lines_of_all_conditions_share_panels_that_are_selected():
    values = RATES.copy()
    values[0, 1, 1] = values[1, 1, 1] = np.nan
    more = {"panels": "split", "select": {"split": ("ood", "test")}}
    figure = comparisons.lines(measured(values, place=[1, 2, 4]), **PROBED, **more)
    (axis,) = figure.axes
    assert axis.get_title() == "out of distribution"
    np.testing.assert_allclose(curve(axis, "a")[:, 0], [1, 4])
    np.testing.assert_allclose(curve(axis, "b")[:, 1], RATES[2:, 1].mean(0))


def cells_of_sizes():
    """A model at three sizes, in no order, and one that has no size."""
    own = {"id": 0.5}
    sized = [{"model": "a", "size": n, "seed": s, "ood": n / 10 + s / 100} for n in (4, 1, 2)
             for s in (0, 1)]  # fmt: skip
    return result_of([*(own | one for one in sized), own | {"model": "b", "seed": 0, "ood": 0.3}])


def test_readings_against_a_setting_are_in_its_order_with_a_dot_for_each_seed():
    figure = plots.against(cells_of_sizes(), readings={"ood": OOD}, setting="size", ylabel="right")
    line, dots = figure.axes[0].lines
    np.testing.assert_allclose(line.get_xdata(), [1, 2, 4])
    np.testing.assert_allclose(line.get_ydata(), [0.105, 0.205, 0.405])
    np.testing.assert_allclose(dots.get_ydata(), [0.1, 0.11, 0.2, 0.21, 0.4, 0.41])
    # What has no size is no line, not even in the legend.
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a"]
    one_value = two_models([0.5], [0.6])
    assert plots.against(one_value, readings={"ood": OOD}, setting="seed", ylabel="right") is None


def test_bars_are_means_with_a_dot_for_each_seed():
    result = two_models([0.5, 0.7], [0.6, 0.8])
    figure = plots.bars(result, readings={"id": ID, "ood": OOD}, ylabel="right")
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    np.testing.assert_allclose(heights, [0.9, 0.9, 0.6, 0.7])
    np.testing.assert_allclose(figure.axes[0].lines[1].get_ydata(), [0.5, 0.7, 0.6, 0.8])
    nothing = {"test": metric("accuracy", "test")}
    assert plots.bars(result, readings=nothing, ylabel="right") is None


def test_conditions_that_no_table_names_have_different_colours():
    a, b = shown_conditions(two_models([0.5], [0.6]))
    assert (a.label, b.label) == ("a", "b")
    assert a.colour != b.colour
    assert a.marker != b.marker


def test_figures_need_not_be_closed():
    before = plt.get_fignums()
    plots.scatter(two_models([0.5], [0.6]), x=ID, y=OOD, xlabel="id", ylabel="ood")
    assert plt.get_fignums() == before
