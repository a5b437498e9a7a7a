"""Nudges of linear maps, whose growth is known."""

import numpy as np
import pytest
import torch
from torch import nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from probes import nudge_states

STEPS = 5


class Linear(HookedRootModule):
    """state -> factor * state + start: differences grow by the factor."""

    def __init__(self, factor, own_hooks=False):
        super().__init__()
        self.factor = factor
        point = HookPoint()
        points = [HookPoint() if own_hooks else point for _ in range(STEPS)]
        self.steps = nn.ModuleList(points)
        self.setup()

    def forward(self, start):
        state = start
        for point in self.steps:
            state = point(self.factor * state + start)
        return state


START = torch.randn(20, 3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("own_hooks", [False, True])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_growth_is_that_of_the_map(factor, own_hooks):
    hook = "steps.*" if own_hooks else "steps.0"
    found = nudge_states(Linear(factor, own_hooks), START, hook=hook)
    assert found["growth"].dims == ("control", "direction", "nudged", "step")
    size = np.cumsum(factor ** np.arange(STEPS + 1))[1:]  # of the states, in units of the start
    for nudged in range(STEPS - 1):
        for step in range(STEPS):
            growth = found["growth"].sel(nudged=nudged, step=step)
            if step < nudged:
                assert growth.isnull().all()
            else:
                expected = factor ** (step - nudged) * size[nudged] / size[step]
                np.testing.assert_allclose(growth, expected, rtol=1e-4)
    np.testing.assert_allclose(found["growth"].sel(nudged=2, step=2), 1, rtol=1e-4)
    last = factor ** (STEPS - 1) * size[0] / size[-1]
    np.testing.assert_allclose(found["rate"].sel(nudged=0), np.log(last) / (STEPS - 1), rtol=1e-3)


def test_the_untrained_model_is_a_control():
    found = nudge_states(
        Linear(0.5), START, hook="steps.0", steps=[1], untrained=Linear(1.5), batch_size=7
    )
    assert found["nudged"].values.tolist() == [1]
    last = found["growth"].sel(nudged=1, step=STEPS - 1)
    assert (last.sel(control="trained") < last.sel(control="untrained")).all()


def test_the_last_example_alone_in_a_batch_is_nudged_towards_the_one_before():
    model = Linear(0.5)
    whole = nudge_states(model, START, hook="steps.0")
    split = nudge_states(model, START, hook="steps.0", batch_size=len(START) - 1)
    for name in ("growth", "rate"):
        np.testing.assert_allclose(split[name], whole[name], rtol=1e-4)


def test_examples_that_no_nudge_changes_are_left_out():
    model, same = Linear(2.0), START.clone()
    same[1] = same[0]
    expected, without = (nudge_states(model, each, hook="steps.0") for each in (START, same))
    for name in ("growth", "growth_low", "rate"):
        np.testing.assert_allclose(without[name], expected[name], rtol=1e-4)
    # The state of an example of zeros has no length of which a nudge could be a share.
    empty = nudge_states(model, START * (torch.arange(20) > 0)[:, None, None], hook="steps.0")
    np.testing.assert_allclose(empty["growth"], expected["growth"], rtol=1e-4)
    nothing = nudge_states(model, torch.zeros_like(START), hook="steps.0")
    assert nothing[["growth", "growth_low", "rate"]].isnull().all().to_array().all()


class Rectified(Linear):
    """Examples whose start is negative lose their state, and all changes of it."""

    def forward(self, start):
        state = start.abs()
        for point in self.steps:
            state = point(self.factor * torch.where(start[:, :1, :1] < 0, 1.0, state))
        return state


def test_changes_that_vanish_have_no_rate_and_are_counted():
    found = nudge_states(Rectified(0.5), START, hook="steps.0")
    share = (START[:, 0, 0] < 0).double().mean().item()
    assert 0.2 < share < 0.8
    np.testing.assert_allclose(found["vanished"].sel(direction="random"), share)
    # Shares of the state's length are the same, as the states shrink alike.
    np.testing.assert_allclose(found["rate"], 0, atol=1e-3)
    none = nudge_states(Linear(0.5), START, hook="steps.0")
    assert (none["vanished"] == 0).all()
    every = nudge_states(Rectified(0.5), -START.abs(), hook="steps.0")
    assert (every["vanished"].sel(direction="random") == 1).all()
    assert every["rate"].isnull().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_in_which_a_nudge_is_lost_are_refused(dtype):
    with pytest.raises(TypeError, match=f"states at 'steps.0' must be float32 or .* got {dtype}"):
        nudge_states(Linear(0.5), START.to(dtype), hook="steps.0")
    assert nudge_states(Linear(0.5), START.double(), hook="steps.0")["growth"].notnull().any()


def test_invalid_input_is_refused():
    with pytest.raises(ValueError, match=r"steps must be in 0..4, .* got \[7\]"):
        nudge_states(Linear(1.0), START, hook="steps.0", steps=[7])
    with pytest.raises(ValueError, match="at least 2 examples"):
        nudge_states(Linear(1.0), START[:1], hook="steps.0")
    with pytest.raises(KeyError, match="steps"):
        nudge_states(Linear(1.0), START, hook="step")
