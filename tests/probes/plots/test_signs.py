import numpy as np
import pytest
import xarray as xr
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from probes import plots, score_saturation, score_signedness
from tests.probes.plots.conftest import names
from tests.probes.plots.test_rates import bars_of


@pytest.fixture
def pattern():
    weights = np.random.default_rng(0).normal(0, 0.6, (30, 2, 4, 4))
    return xr.DataArray(weights, dims=("example", "head", "query_pos", "key_pos"))


def test_shares_of_kinds_of_tokens_are_bars_with_intervals(pattern, ax):
    scores = score_signedness(pattern, resamples=20).isel(head=1)
    assert plots.signedness(scores, ax) is ax
    ((bars, ends, _),) = bars_of(ax).values()
    assert np.allclose([height for _, height in bars], scores["share"])
    assert np.allclose(ends, np.stack([scores["share_low"], scores["share_high"]], 1))
    kinds = ["subtracted", "partly subtracted", "deleted", "partly added", "added"]
    assert names(ax, "x") == kinds
    deleted = (np.abs(pattern.isel(head=1)) <= 0.1).mean()
    assert bars[2] == (2, pytest.approx(float(deleted)))


def test_distributions_are_steps_over_the_edges_of_bins(pattern, ax):
    scores = score_signedness(pattern, bins=4, resamples=2).isel(head=0)
    plots.distribution(scores, ax, xlabel="M")
    (steps,) = ax.patches
    values, edges, _ = steps.get_data()
    assert np.allclose(values, scores["distribution"])
    assert np.allclose(edges, [-1, -0.5, 0, 0.5, 1])
    inside = pattern.isel(head=0).clip(-1, 1).to_numpy().ravel()
    assert np.allclose(values, np.histogram(inside, edges)[0] / inside.size)
    assert steps.get_fill()
    assert (ax.get_yscale(), ax.get_xlabel()) == ("log", "M")


def test_controls_are_black_lines_beside_the_filled_first(ax):
    shares = xr.DataArray(
        [[0.5, 0.5], [0.9, 0.1]],
        {"model": ["trained", "untrained"], "bin": [-0.5, 0.5]},
        ("model", "bin"),
    )
    ax.set_prop_cycle(color=["#ff0000"])
    plots.distribution(shares.to_dataset(name="distribution"), ax)
    trained, untrained = ax.patches
    assert to_hex(trained.get_facecolor()) == "#ff0000"
    assert to_rgb(untrained.get_edgecolor()) == (0, 0, 0)
    assert not untrained.get_fill()
    assert untrained.get_data().values.tolist() == [0.9, 0.1]
    assert ax.get_legend_handles_labels()[1] == ["trained", "untrained"]


def test_saturation_has_a_distribution_too(pattern, ax):
    scores = score_saturation(pattern.isel(head=[0]), low=-1, high=1, bins=6, resamples=2)
    plots.distribution(scores.isel(head=0), ax)
    assert np.allclose(ax.patches[0].get_data().values, scores["distribution"][0])


def test_results_of_other_probes_and_missing_selections_are_refused(pattern):
    ax = Figure().subplots()
    other = xr.Dataset({"rate": ("site", [1.0])})
    with pytest.raises(KeyError, match="'share', made by score_signedness or measure_signedness"):
        plots.signedness(other, ax)
    with pytest.raises(KeyError, match="'distribution', made by score_signedness or score_sat"):
        plots.distribution(other, ax)
    scores = score_signedness(pattern.expand_dims(layer=2), resamples=2)
    with pytest.raises(ValueError, match=r"select one label: result.isel\((layer|head)=0\)"):
        plots.signedness(scores, ax)
    with pytest.raises(ValueError, match="distribution must have the dim bin"):
        plots.distribution(scores, ax)
