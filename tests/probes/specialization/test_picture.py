import math

import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr
from matplotlib.colors import to_rgba

from probes import draw_specialization, ordered_activation, score_specialization

OPERATIONS = ["add", "subtract", "multiply"]


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


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


def lines_of(axis):
    return {str(line.get_label()): line for line in axis.lines}


# Specialization against collapse


def test_points_are_the_scores_filled_and_the_controls_hollow():
    several = xr.concat([scored([0, 1, 2]), scored([3, 3, 5])], "network")
    networks = {"right": several, "collapsed": scored([4, 4, 4])}
    _, axes = plt.subplots(1, 2)
    draw_specialization(axes, networks, colours=["red", "blue"])
    assert [axis.get_title() for axis in axes] == ["layer 0", "all layers"]
    lines = lines_of(axes[1])
    x, y = lines["right"].get_data()
    assert x == pytest.approx([math.log(3) / math.log(6), _entropy(2 / 3, 1 / 3) / math.log(6)])
    assert list(y) == pytest.approx([1, 1])
    assert np.array(lines["collapsed"].get_data()).ravel().tolist() == pytest.approx([0, 1])
    assert lines["right"].get_markerfacecolor() == "red"
    hollow = [line for line in axes[1].lines if line.get_markerfacecolor() == "none"]
    # The star, and the controls of both labels.
    assert len(hollow) == 3
    control = several.sel(control="shuffled", layer="pooled")
    mine = next(line for line in hollow if to_rgba(line.get_color()) == to_rgba("red"))
    assert np.allclose(mine.get_data(), [control["collapse"], control["specialization"]])
    assert lines["right"].get_marker() != lines["collapsed"].get_marker()


def _entropy(*shares):
    return -sum(share * math.log(share) for share in shares)


def test_the_line_is_what_operations_that_occur_can_attain():
    _, axes = plt.subplots(1, 2)
    # The third operation does not occur.
    draw_specialization(axes, {"one": scored([0, 1]), "another": scored([2, 3])})
    drawn = [line for line in axes[0].lines if line.get_label() == "attainable"]
    assert len(drawn) == 1
    bound = math.log(2) / math.log(6)
    assert np.allclose(drawn[0].get_data(), [[1, 1, bound], [0, bound, 1]])
    (star,) = [line for line in axes[0].lines if line.get_marker() == "*"]
    assert np.ravel(star.get_data()).tolist() == pytest.approx([bound, 1])
    # Of other numbers of operations or modules there is a line each.
    _, axes = plt.subplots(1, 2)
    draw_specialization(axes, {"two": scored([0, 1]), "three": scored([0, 1, 2])})
    assert [line.get_label() for line in axes[0].lines].count("attainable") == 2


def test_what_was_not_measured_is_not_drawn():
    absent = xr.full_like(scored([0, 1, 2]).astype(float), np.nan)
    _, axes = plt.subplots(1, 2)
    draw_specialization(axes, {"encoder": scored([0, 1, 2]), "monolithic": absent})
    assert "encoder" in lines_of(axes[0])
    assert "monolithic" not in lines_of(axes[0])


def test_axes_and_colours_must_fit():
    _, axes = plt.subplots(1, 3)
    with pytest.raises(ValueError, match="2 and 1, got 3 and 1"):
        draw_specialization(axes, {"one": scored([0, 1, 2])})
    with pytest.raises(ValueError, match="2 and 1, got 2 and 0"):
        draw_specialization(axes[:2], {"one": scored([0, 1, 2])}, colours=[])


# Modules in order


def test_a_specialized_network_shows_a_diagonal_whatever_its_modules_numbers():
    """Operations go to modules 1, 2, 0 in one network, 4, 3, 2 in another."""
    networks = [scored([1, 2, 0], modules=5, layers=2), scored([4, 3, 2], modules=5, layers=2)]
    both = xr.concat(networks, "network")
    ordered = ordered_activation(both)
    assert ordered.sizes["layer"] == 3
    for one in ordered.stack(matrix=("network", "layer")).transpose("matrix", ...):
        assert np.allclose(one.transpose("operation", "module"), np.eye(3, 5))
    # What it was made of is as it was.
    assert both["activation"].sel(operation="add").isel(network=0, layer=0).argmax("module") == 1


def test_modules_without_an_operation_come_last_the_busiest_first():
    shares = [[0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]]
    scores = xr.Dataset(
        {
            "activation": (("operation", "module"), shares),
            "assignment": ("operation", [2, -1]),
            "utilisation": ("module", shares[0]),
        },
        coords={"module": range(4), "operation": ["add", "sine"]},
    )
    ordered = ordered_activation(scores).transpose("operation", "module")
    assert ordered[0].to_numpy().tolist() == pytest.approx([0.3, 0.4, 0.2, 0.1])


def test_a_network_that_collapsed_shows_no_diagonal():
    ordered = ordered_activation(scored([4, 4, 4])).sel(layer="0").transpose("operation", "module")
    assert np.allclose(ordered, np.eye(1, 6))


def test_scores_of_something_else_are_refused():
    with pytest.raises(KeyError, match="assignment"):
        ordered_activation(scored([0, 1, 2]).drop_vars("assignment"))
