import numpy as np
import pytest
import torch

from probes import adapt_paths, score_paths
from tests.probes.oracle.path_models import ADD, OPERATIONS, Operations


def noisy_tasks(noise, examples=640, seed=0):
    """The 4 tasks of one operation each, answered with noise; the router takes the next one's."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(examples, 2, generator=generator) * 2 - 1
    task = torch.arange(examples) % 4
    model = Operations(OPERATIONS, n_layers=1)
    answers = model.advance(inputs, 0, model.begin(inputs))[torch.arange(examples), 0, task]
    targets = answers + noise * torch.randn(examples, 1, generator=generator)
    return model, inputs, targets, task, ((task + 1) % 4)[:, None]


def adapt(noise, **options):
    model, inputs, targets, task, routed = noisy_tasks(noise)
    options = {"resamples": 200, "routed": routed, "task": task} | options
    return adapt_paths(model, inputs, targets, **options)


def test_one_example_is_enough_without_noise():
    result = adapt(0.0)
    # The sine of a number is not the same to the last digit in tensors of all shapes.
    assert result["oracle"] < 1e-12
    assert (result["adapted"] < 1e-12).all()
    assert result["routed"] > 0.05
    for name in ("gap_closed", "gap_closed_low", "gap_closed_high"):
        np.testing.assert_allclose(result[name], 1, rtol=1e-9)


def test_with_noise_more_examples_close_more_of_the_gap():
    result = adapt(0.5)
    closed = result["gap_closed"].to_numpy()
    assert (np.diff(closed) > 0).all()
    assert closed[0] < 0.5
    assert closed[-1] > 0.9
    # Every repeat with 64 examples finds the oracle's paths: all three are 1 up to rounding.
    assert (result["gap_closed_low"] <= result["gap_closed"] + 1e-12).all()
    assert (result["gap_closed"] <= result["gap_closed_high"] + 1e-12).all()
    assert (result["gap_closed_low"] < result["gap_closed_high"]).any()
    gap = (result["routed"] - result["adapted"]) / (result["routed"] - result["oracle"])
    np.testing.assert_allclose(gap, closed)
    np.testing.assert_allclose(result["adapted_repeat"].mean("repeat"), result["adapted"])
    assert result["adapted_repeat"].sizes == {"examples": 4, "repeat": 20}


def test_all_examples_of_the_half_are_the_oracle_that_is_scored():
    model, inputs, targets, task, routed = noisy_tasks(0.5)
    result = adapt(0.5, examples=(2, 80), repeats=3)
    np.testing.assert_allclose(result["adapted"].sel(examples=80), result["oracle"])
    np.testing.assert_allclose(result["gap_closed"].sel(examples=80), 1)
    scores = score_paths(
        model, inputs, targets, routed=routed, task=task, untrained=model, resamples=1
    )["loss"].sel(control="trained")
    # Losses are those of answers in float32.
    np.testing.assert_allclose(result["oracle"], scores.sel(path="task"), rtol=1e-5)
    np.testing.assert_allclose(result["routed"], scores.sel(path="routed"), rtol=1e-5)


def test_one_repeat_tells_nothing_of_the_spread_of_repeats():
    result = adapt(0.5, repeats=1)
    for name in ("adapted", "gap_closed"):
        assert result[[f"{name}_low", f"{name}_high"]].to_array().isnull().all()
        assert result[name].notnull().all()
    assert result["routed_low"] < result["routed"] < result["routed_high"]


def test_there_is_no_gap_to_close_where_the_router_is_right_or_modules_are_the_same():
    _, _, _, task, _ = noisy_tasks(0.0)
    right = adapt(0.0, routed=task[:, None])
    assert right["gap_closed"].isnull().all()
    assert right["gap_closed_low"].isnull().all()
    _, inputs, targets, task, routed = noisy_tasks(0.0)
    alike = adapt_paths(
        Operations((ADD,) * 4, n_layers=1), inputs, targets, routed=routed, task=task
    )
    assert alike["gap_closed"].isnull().all()
    np.testing.assert_allclose(alike["adapted"], alike["routed"])


def test_answers_that_have_nothing_to_do_with_the_inputs_are_not_adapted_to():
    _, inputs, targets, task, _ = noisy_tasks(0.0)
    generator = torch.Generator().manual_seed(3)
    modules = [lambda r, x, w=w: torch.sin(w * (r + 3 * x)) for w in range(900, 904)]
    result = adapt_paths(
        Operations(modules, n_layers=1),
        inputs,
        torch.randn(targets.shape, generator=generator),
        routed=torch.randint(4, (640, 1), generator=generator),
        task=task,
    )
    # Paths are as good as one another: what is chosen does not matter, and is not below the router.
    np.testing.assert_allclose(result["adapted"], result["routed"], rtol=0.2)
    assert not (result["gap_closed_low"] > 0).any()


def test_repeats_and_limits_change_nothing():
    first, second = adapt(0.5), adapt(0.5)
    assert first.identical(second)
    limited = adapt(0.5, memory_limit=8_000)
    np.testing.assert_allclose(limited["adapted_repeat"], first["adapted_repeat"], rtol=1e-5)


def test_invalid_input_is_refused():
    for examples in ((), (0, 1), (4, 1), (1, 1)):
        with pytest.raises(ValueError, match=r"examples must be ascending numbers of at least 1"):
            adapt(0.5, examples=examples)
    with pytest.raises(ValueError, match=r"at most half .* 80 for task 0, got 81"):
        adapt(0.5, examples=(1, 81))
    with pytest.raises(ValueError, match=r"repeats must be at least 1, got 0"):
        adapt(0.5, repeats=0)
    with pytest.raises(ValueError, match=r"resamples must be at least 1, got 0"):
        adapt(0.5, resamples=0)
    with pytest.raises(ValueError, match=r"memory_limit must be at least 2592 bytes .* got 2000"):
        adapt(0.5, memory_limit=2000)
