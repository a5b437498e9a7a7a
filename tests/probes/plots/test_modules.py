import math

import numpy as np
import pytest
import xarray as xr
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from probes import plots, score_specialization
from tests.probes.plots.conftest import legend, names

OPERATIONS = ("add", "sine", "square")


def scored(sent, *, modules=6, examples=60, layers=1):
    """Scores of networks that send each operation to a module, the same in all layers."""
    operation = np.arange(examples) % len(sent)
    routing = np.repeat(np.eye(modules)[np.array(sent)[operation]][:, None], layers, axis=1)
    return score_specialization(
        xr.DataArray(routing, dims=("example", "layer", "module")),
        xr.DataArray(operation, dims=("example",)),
        operations=OPERATIONS,
        resamples=2,
    )


def entropy(*shares):
    return -sum(share * math.log(share) for share in shares)


def hollow(ax):
    return [line for line in ax.lines if line.get_markerfacecolor() == "none"]


def lines_of(ax):
    return {str(line.get_label()): line for line in ax.lines}


def test_points_are_the_scores_filled_and_the_controls_hollow(ax):
    several = xr.concat([scored([0, 1, 2]), scored([3, 3, 5])], "network")
    plots.specialization(several, ax, label="right", color="#ff0000")
    plots.specialization(scored([4, 4, 4]), ax, label="collapsed", marker="s")
    lines = lines_of(ax)
    x, y = lines["right"].get_data()
    assert x == pytest.approx([math.log(3) / math.log(6), entropy(2 / 3, 1 / 3) / math.log(6)])
    assert list(y) == pytest.approx([1, 1])
    assert np.ravel(lines["collapsed"].get_data()).tolist() == pytest.approx([0, 1])
    assert to_hex(lines["right"].get_markerfacecolor()) == "#ff0000"
    assert (lines["right"].get_marker(), lines["collapsed"].get_marker()) == ("o", "s")
    # The star, and the controls of both labels, in their colours.
    star, first, second = hollow(ax)
    assert star.get_marker() == "*"
    control = several.sel(control="shuffled", layer="pooled")
    assert np.allclose(first.get_data(), [control["collapse"], control["specialization"]])
    assert to_hex(first.get_color()) == "#ff0000"
    assert to_hex(second.get_color()) == to_hex(lines["collapsed"].get_color()) != "#ff0000"


def test_a_layer_can_be_chosen(ax):
    both = scored([0, 1, 2], layers=2)
    both["collapse"][{"layer": 0}] = 0.123
    plots.specialization(both, ax, layer="0", label="first")
    assert lines_of(ax)["first"].get_xdata() == [0.123]


def test_the_line_is_what_operations_that_occur_can_attain():
    alike, different = Figure().subplots(1, 2)
    # The third operation does not occur.
    for sent in ([0, 1], [2, 3]):
        plots.specialization(scored(sent), alike)
    drawn = [line for line in alike.lines if line.get_label() == "attainable"]
    bound = math.log(2) / math.log(6)
    assert len(drawn) == 1
    assert np.allclose(drawn[0].get_data(), [[1, 1, bound], [0, bound, 1]])
    (star,) = [line for line in alike.lines if line.get_marker() == "*"]
    assert np.ravel(star.get_data()).tolist() == pytest.approx([bound, 1])
    # Other numbers of operations or modules have a line each.
    for sent in ([0, 1], [0, 1, 2]):
        plots.specialization(scored(sent), different)
    assert legend(different).count("attainable") == 2


def test_what_was_not_measured_is_not_drawn(ax):
    plots.specialization(xr.full_like(scored([0, 1, 2]).astype(float), np.nan), ax, label="absent")
    assert "absent" not in lines_of(ax)


def test_modules_are_in_the_order_of_their_operations(ax):
    found = scored([4, 3, 2], modules=5).sel(layer="pooled")
    plots.activation(found, ax)
    assert np.allclose(ax.images[0].get_array(), np.eye(3, 5))
    assert names(ax, "y") == list(OPERATIONS)
    written = {text.get_position(): text.get_text() for text in ax.texts}
    assert written == {(0, 0): "100", (1, 1): "100", (2, 2): "100"}


def test_results_of_other_probes_and_missing_selections_are_refused(ax):
    made = "made by score_specialization or measure_specialization"
    other = xr.Dataset({"specialization": 1.0})
    with pytest.raises(KeyError, match=f"'collapse', {made}, got specialization"):
        plots.specialization(other, ax)
    with pytest.raises(KeyError, match=f"'activation', {made}, got specialization"):
        plots.activation(other, ax)
    with pytest.raises(ValueError, match=r"select one label: result.isel\(layer=0\)"):
        plots.activation(scored([0, 1, 2]), ax)
