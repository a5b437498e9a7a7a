import numpy as np
import pytest
import xarray as xr

from probes import plots
from tests.probes.plots.conftest import legend, names


@pytest.fixture
def result():
    accuracy = np.array([[0.9, 0.2, 0.5], [0.1, 0.15, 0.05]])
    parts = {
        "accuracy": accuracy,
        "accuracy_low": accuracy - 0.04,
        "accuracy_high": accuracy + 0.02,
    }
    return xr.Dataset(
        {name: (("control", "site"), values) for name, values in parts.items()},
        {"control": ["learned", "another variable"], "site": ["embedding", "layer_0", "layer_1"]},
    )


def test_points_of_a_site_stand_beside_each_other(result, ax):
    assert plots.alignment(result.transpose("site", "control"), ax) is ax
    assert legend(ax) == ["learned", "another variable"]
    assert names(ax, "x") == ["embedding", "layer 0", "layer 1"]
    x = np.array([container.lines[0].get_xdata() for container in ax.containers])
    y = np.array([container.lines[0].get_ydata() for container in ax.containers])
    np.testing.assert_allclose(y, result["accuracy"])
    np.testing.assert_allclose(x.mean(axis=0), [0, 1, 2])
    assert (x[1] - x[0] > 0.2).all()
    assert (x[1] - x[0] < 0.5).all()
    for row, container in enumerate(ax.containers):
        ends = [segment[:, 1] for segment in container.lines[2][0].get_segments()]
        np.testing.assert_allclose(ends, [[v - 0.04, v + 0.02] for v in result["accuracy"][row]])
    learned, control = (container.lines[0] for container in ax.containers)
    assert learned.get_markerfacecolor() == learned.get_color()
    assert control.get_markerfacecolor() == "white"
    assert learned.get_marker() != control.get_marker()


def test_one_variable_at_a_time_of_the_right_probe(result, ax):
    both = result.expand_dims(variable=["a", "b"])
    with pytest.raises(ValueError, match="variable"):
        plots.alignment(both, ax)
    with pytest.raises(KeyError, match="align"):
        plots.alignment(result.rename(accuracy="score"), ax)
