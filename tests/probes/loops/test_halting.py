"""Halting against planted rules."""

import numpy as np
import pytest
import xarray as xr
from scipy.stats import spearmanr

from probes import score_halting

N, STEPS = 400, 8


def example(values):
    return xr.DataArray(values, dims="example")


def planted(seed=0):
    generator = np.random.default_rng(seed)
    depth = generator.integers(1, STEPS, size=N)
    settled = np.minimum(STEPS - 1, depth + generator.integers(0, 4, size=N))
    answers = (np.arange(STEPS) >= settled[:, None]).astype(int)
    return depth, answers, generator


def test_a_gate_that_knows_the_depth_beats_the_rule():
    depth, answers, generator = planted()
    steps = depth + (generator.random(N) < 0.1)
    found = score_halting(
        example(steps), example(depth), answers=xr.DataArray(answers, dims=("example", "step"))
    )
    observed = found.sel(control="observed")
    halting = observed["correlation"].sel(rule="halting")
    assert halting == pytest.approx(spearmanr(steps, depth).statistic)
    assert halting > 0.95
    assert 0.5 < observed["correlation"].sel(rule="answer stays") < 0.95
    assert found["advantage_low"] > 0
    shuffled = found.sel(control="shuffled")
    assert (shuffled["correlation_low"] < 0.05).all()
    assert (shuffled["correlation_high"] > -0.05).all()
    assert (found["mean_steps"].sel(rule="halting").diff("needed") > 0).all()
    assert found["examples"].sum() == N


def test_a_gate_that_is_the_rule_has_no_advantage_and_a_constant_gate_no_correlation():
    depth, answers, _ = planted()
    table = xr.DataArray(answers, dims=("example", "step"))
    same = score_halting(example(answers.argmax(1) + 1), example(depth), answers=table)
    assert same["advantage"] == pytest.approx(0, abs=1e-9)
    # Both take the same number of steps, whatever the steps are called.
    halting, stays = same["mean_steps"]
    np.testing.assert_allclose(halting, stays)
    named = table.assign_coords(step=np.arange(1, STEPS + 1))
    again = score_halting(example(answers.argmax(1) + 1), example(depth), answers=named)
    assert again["mean_steps"].equals(same["mean_steps"])
    constant = score_halting(example(np.full(N, 5)), example(depth))
    assert constant["correlation"].isnull().all()
    assert "advantage" not in constant


def test_invalid_input_is_refused():
    depth, answers, _ = planted()
    with pytest.raises(ValueError, match="needed must have the dim example of size 400"):
        score_halting(example(depth), example(depth[:5]))
    with pytest.raises(ValueError, match="steps must be finite"):
        score_halting(example(np.full(N, np.nan)), example(depth))
    table = xr.DataArray(answers[:5], dims=("example", "step"))
    with pytest.raises(ValueError, match="answers must have 400 examples, got 5"):
        score_halting(example(depth), example(depth), answers=table)


def test_labels_of_examples_must_be_those_of_the_steps():
    depth, answers, _ = planted()
    table = xr.DataArray(answers, dims=("example", "step"))
    labelled = example(depth).assign_coords(example=np.arange(N))
    again = score_halting(labelled, labelled, answers=table.assign_coords(example=np.arange(N)))
    assert again.equals(score_halting(example(depth), example(depth), answers=table))
    with pytest.raises(ValueError, match="needed must have the coordinate 'example' of steps"):
        score_halting(labelled, labelled[::-1])
    with pytest.raises(ValueError, match="answers must have the coordinate 'example' of steps"):
        score_halting(labelled, labelled, answers=table.assign_coords(example=np.arange(N)[::-1]))
