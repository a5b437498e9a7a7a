"""Distances of states on sequences with a known limit."""

import numpy as np
import pytest
import xarray as xr

from probes import score_states

N, STEPS, D = 50, 8, 5


def states(values):
    return xr.DataArray(values, dims=("example", "step", "d"))


def start(seed=0):
    return np.random.default_rng(seed).normal(size=(N, 1, D))


def test_a_contraction_comes_to_a_fixed_point():
    power = 0.2 ** np.arange(STEPS)[:, None]
    goal = start(1)
    found = score_states(states(goal + power * start()))
    distance = found["distance"].sel(control="observed")
    assert (np.diff(distance) < 0).all()
    assert found["fixed"].isel(step=0) == 0
    assert found["fixed"].isel(step=-1) == 1
    assert (found["period"] == 1).all()
    # Other examples have other fixed points.
    assert (found["distance_low"].sel(control="shuffled").isel(step=-1) > 0.5).all()
    expected = np.linalg.norm(0.8 * start(), axis=-1)[:, 0]
    expected = expected / np.linalg.norm(goal + 0.2 * start(), axis=-1)[:, 0]
    assert distance.isel(step=0) == pytest.approx(expected.mean())


@pytest.mark.parametrize("period", [2, 3])
def test_a_cycle_is_found_with_its_period(period):
    points = np.random.default_rng(0).normal(size=(N, period, D))
    found = score_states(states(points[:, np.arange(STEPS) % period]))
    assert (found["period"] == period).all()
    assert (found["fixed"].isel(step=slice(-1)) == 0).all()
    returned = found["return_distance"].sel(control="observed")
    assert returned.sel(lag=period) < 1e-9 < returned.sel(lag=1)


def test_a_walk_has_no_period_and_examples_may_end_early():
    walk = np.random.default_rng(0).normal(size=(N, STEPS, D)).cumsum(1)
    walk[: N // 2, 3:] = np.nan
    found = score_states(states(walk))
    assert (found["period"] == 0).all()
    whole = score_states(states(walk[N // 2 :]))
    # Late steps are those of the other half.
    np.testing.assert_allclose(
        found["distance"].sel(control="observed").isel(step=-1),
        whole["distance"].sel(control="observed").isel(step=-1),
    )
    assert found["return_distance"].sel(control="observed").notnull().all()


def test_states_that_vanish_have_moved_and_then_stay():
    values = np.ones((3, STEPS, 2))
    values[:, 0] = 2
    values[0, 2:] = 0
    values[1, 5:] = np.nan
    found = score_states(states(values))
    np.testing.assert_allclose(found["fixed"][:3], [0, 2 / 3, 1])
    assert (found["period"] == 1).all()
    # From 2 to 1; 0 where nothing moves; the way to zero has no length relative to it.
    expected = [1, 0, *[0] * (STEPS - 3)]
    np.testing.assert_allclose(found["distance"].sel(control="observed"), expected)
    returned = found["return_distance"].sel(control="observed")
    np.testing.assert_allclose(returned.sel(lag=[1, STEPS - 1]), [0, 1])
    alternating = np.resize([1.0, 0.0], STEPS)[:, None] * np.ones((3, STEPS, 2))
    assert (score_states(states(alternating))["period"] == 2).all()


def test_invalid_input_is_refused():
    walk = np.zeros((3, 4, 2)) + 1
    with pytest.raises(ValueError, match="states must have the dims example, step and features"):
        score_states(xr.DataArray(walk[:, :, 0], dims=("example", "step")))
    with pytest.raises(ValueError, match="two steps and examples"):
        score_states(states(walk[:1]))
    with pytest.raises(ValueError, match="tolerance must be positive, got 0"):
        score_states(states(walk), tolerance=0)
    walk[0, 1] = np.nan
    with pytest.raises(ValueError, match="NaN only after the last step of each example"):
        score_states(states(walk))


@pytest.mark.parametrize("start", [1, 3])
def test_states_that_diverge_are_no_fixed_points_but_refused(start):
    walk = np.random.default_rng(0).normal(size=(N, STEPS, D)).cumsum(1)
    walk[:30, start:] = np.inf
    walk[:30, start:, 0] = np.nan  # infinity minus infinity
    with pytest.raises(
        ValueError, match=r"states must be finite, got infinity in 30 of 50 examples"
    ):
        score_states(states(walk))
