"""Hooks that fire several times in a pass, and batches of different lengths."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

import probes
from probes import Quantity, capture
from probes.interventions.sites import firings, hooks_that_fire


class Looped(HookedRootModule):
    """Adds 1 to its state [example, pos, 1], once for each step; `n_steps` is the last input."""

    def __init__(self):
        super().__init__()
        self.hook_state, self.hook_start = HookPoint(), HookPoint()
        self.core = nn.ModuleList([HookPoint() for _ in range(2)])
        self.setup()

    def forward(self, state, n_steps):
        state = self.hook_start(state)
        for _ in range(n_steps):
            for point in self.core:
                state = point(state)
            state = self.hook_state(state + 1)
        return state


def batch(n_examples, n_pos, n_steps, first=0):
    state = torch.zeros(n_examples, n_pos, 1) + torch.arange(n_examples)[:, None, None] + first
    inputs = {"state": state, "n_steps": n_steps}
    return SimpleNamespace(inputs=inputs, latents={"number": torch.arange(n_examples) + first})


STATE = Quantity("hook_state", ("example", "pos", "d"), fires="each", ragged=("pos",))
LAYERS = Quantity(
    "core.*", ("example",), lambda state: state[:, 0, 0].long(), fires="each", long_name="integer"
)


@pytest.mark.parametrize("to", [None, "capture.zarr", "capture.nc"])
def test_each_firing_is_a_step_and_what_is_missing_is_marked(to, tmp_path):
    batches = [batch(2, 3, 2), batch(3, 4, 3, first=2), batch(1, 2, 1, first=5)]
    data = capture(
        Looped(), batches, {"state": STATE, "integer": LAYERS}, to=to and str(tmp_path / to)
    ).load()
    assert data["state"].dims == ("example", "step", "pos", "d")
    assert data["integer"].dims == ("example", "layer", "step")
    assert data["n_step"].values.tolist() == [2, 2, 3, 3, 3, 1]
    assert data["n_pos"].values.tolist() == [3, 3, 4, 4, 4, 2]
    number = np.arange(6)
    for step in range(3):
        there = step < data["n_step"].values
        states = data["state"].isel(step=step, d=0).values
        assert (states[there][:, :2] == (number[there] + step + 1)[:, None]).all()
        assert np.isnan(states[~there]).all()
        integers = data["integer"].isel(step=step).values
        assert (integers[there] == (number[there] + step)[:, None]).all()
        assert (integers[~there] == -1).all()
    is_pos = np.arange(4) < data["n_pos"].values[:, None]
    assert (np.isnan(data["state"].isel(step=0, d=0).values) == ~is_pos).all()
    assert data["integer"].dtype.kind == "i"


def test_an_archive_of_ragged_batches_is_continued(tmp_path):
    batches = [batch(2, 3, 2), batch(2, 4, 4, first=2), batch(2, 1, 1, first=4)]
    whole = capture(Looped(), batches, {"state": STATE}, to=tmp_path / "whole.zarr").load()
    capture(Looped(), batches[:1], {"state": STATE}, to=tmp_path / "part.zarr")
    capture(Looped(), batches[:2], {"state": STATE}, to=tmp_path / "part.zarr")
    part = capture(Looped(), batches, {"state": STATE}, to=tmp_path / "part.zarr").load()
    np.testing.assert_array_equal(part["state"].values, whole["state"].values)
    # Of fewer batches there are no more steps and positions than in their own capture.
    first = capture(Looped(), batches[:1], {"state": STATE}, to=tmp_path / "part.zarr")
    assert first.equals(capture(Looped(), batches[:1], {"state": STATE}))


def test_an_archive_of_a_model_that_creates_hooks_is_continued(tmp_path):
    model, batches = Steps(), [batch(2, 1, 3), batch(2, 1, 3, first=2)]
    first = capture(model, batches[:1], {"state": FIRST}, to=tmp_path / "x.zarr")
    assert first["layer"].values.tolist() == [0, 1, 2]
    both = capture(model, batches, {"state": FIRST}, to=tmp_path / "x.zarr")
    assert both.equals(capture(Steps(), batches, {"state": FIRST}))


def test_a_second_firing_is_refused_unless_it_is_asked_for():
    once = Quantity("hook_state", ("example", "pos", "d"))
    with pytest.raises(RuntimeError, match="fired again; fires='each' keeps all"):
        capture(Looped(), [batch(1, 2, 2)], {"state": once})


def test_lengths_differ_only_where_this_was_said():
    fixed = Quantity("hook_start", ("example", "pos", "d"))
    with pytest.raises(ValueError, match=r"one shape .* name the dim in `ragged`"):
        capture(Looped(), [batch(1, 2, 1), batch(1, 3, 1)], {"start": fixed})
    ragged = Quantity("hook_start", ("example", "pos", "d"), ragged=("pos",))
    data = capture(Looped(), [batch(1, 2, 1), batch(1, 3, 1)], {"start": ragged})
    assert data["n_pos"].values.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fires": "twice"}, "fires must be one of once, each, got 'twice'"),
        ({"dims": ("example", "step"), "fires": "each"}, "dims must not name 'step'"),
        ({"ragged": ("example",)}, r"ragged must be dims after 'example', .* got \['example'\]"),
        ({"ragged": ("pos",)}, r"ragged must be dims after 'example'"),
    ],
)
def test_invalid_quantities_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Quantity("hook_state", **{"dims": ("example", "d"), **settings})


def test_reductions_may_see_the_batch():
    def last(state, given):
        return state[torch.arange(len(state)), given.inputs["n_steps"]]

    quantity = Quantity("hook_start", ("example", "d"), last)
    data = capture(Looped(), [batch(3, 4, 2)], {"state": quantity})
    assert data["state"].values[:, 0].tolist() == [0, 1, 2]
    # A default is no batch.
    quantity = Quantity("hook_start", ("example", "d"), lambda state, pos=1: state[:, pos])
    assert capture(Looped(), [batch(3, 4, 2)], {"state": quantity})["state"].shape == (3, 1)


class Steps(HookedRootModule):
    """Has a hook point for each step that it was ever called with."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList()
        self.setup()

    def forward(self, state, n_steps):
        for step in range(n_steps):
            if step == len(self.blocks):
                self.blocks.append(HookPoint())
                self.setup()
            state = self.blocks[step](state + 1)
        return state


def test_hooks_of_further_steps_are_left_out():
    model = Steps()
    model(torch.zeros(1, 1, 1), 5)
    quantity = Quantity("blocks.*", ("example",), lambda state: state[:, 0, 0])
    data = capture(model, [batch(2, 1, 3), batch(2, 1, 3)], {"state": quantity})
    assert data["layer"].values.tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="must have the number of steps of the first, 3"):
        capture(model, [batch(2, 1, 3), batch(2, 1, 4)], {"state": quantity})
    with pytest.raises(RuntimeError, match="must fire in the forward pass, silent"):
        capture(model, [batch(2, 1, 3), batch(2, 1, 2)], {"state": quantity})


FIRST = Quantity("blocks.*", ("example",), lambda state: state[:, 0, 0])


@pytest.mark.parametrize("hook", ["blocks.*", "blocks.[0-2]", "blocks.2"])
def test_hooks_that_a_pass_creates_are_there_in_the_first_call(hook):
    inputs = torch.zeros(2, 1, 1)
    states = SimpleNamespace(inputs=inputs, latents={})
    kept = {"state": Quantity(hook, FIRST.dims, FIRST.reduce)}
    model = probes.hooked(Steps(), n_steps=3)
    first, second = (capture(model, [states], kept) for _ in range(2))
    assert first.identical(second)
    assert first["state"].values[0].tolist() == (3 if hook == "blocks.2" else [1, 2, 3])
    fresh = probes.hooked(Steps(), n_steps=3)
    assert hooks_that_fire(fresh, inputs, hook, 2) == hooks_that_fire(model, inputs, hook, 2)
    fresh = probes.hooked(Steps(), n_steps=3)
    assert firings(fresh, inputs, [hook]) == firings(model, inputs, [hook])
    with pytest.raises(KeyError, match=r"nearest: blocks\.2"):
        capture(model, [states], {"state": Quantity("blocks.3", FIRST.dims, FIRST.reduce)})


def test_probes_give_the_same_when_they_are_called_again():
    inputs, sources = torch.rand(2, 3, 1, 1, generator=torch.Generator().manual_seed(0))
    model = probes.hooked(Steps(), n_steps=5)

    def patched(model):
        return probes.interchange(
            model,
            inputs,
            sources,
            hooks={"all": "blocks.*"},
            where=torch.ones(3, 1, 1, dtype=torch.bool),
            metrics={"state": lambda output, rows: output[:, 0, 0]},
        )

    assert patched(model).identical(patched(model))
    model = probes.hooked(Steps(), n_steps=5)
    first, second = (probes.nudge_states(model, inputs, hook="blocks.*") for _ in range(2))
    assert first.sizes["step"] == 5
    assert first.identical(second)


def test_a_batch_that_creates_hooks_of_further_steps_is_refused():
    with pytest.raises(RuntimeError, match=r"steps of the first, 3, got .* 'blocks\.3' fires"):
        capture(Steps(), [batch(2, 1, 3), batch(2, 1, 4)], {"state": FIRST})


class Doubling(nn.Module):
    """Adds its states to themselves until they are large."""

    def __init__(self):
        super().__init__()
        self.state = nn.Identity()

    def forward(self, state):
        while (state < 1).any():
            state = self.state(2 * state)
        return state


@pytest.mark.parametrize("order", [1, -1])
def test_a_further_firing_in_another_batch_is_seen(order):
    once = {"state": Quantity("hook_state", ("example", "pos", "d"))}
    with pytest.raises(RuntimeError, match="fired again"):
        capture(Looped(), [batch(2, 1, 1), batch(2, 1, 5)][::order], once)
    once = {"state": Quantity("state.hook_out", ("example", "d"))}
    batches = [SimpleNamespace(inputs=torch.full((2, 1), x), latents={}) for x in (0.5, 0.1)]
    with pytest.raises(RuntimeError, match="fired again"):
        capture(probes.hooked(Doubling()), batches[::order], once)


@pytest.mark.parametrize(
    "count",
    [
        lambda x: int(x[0, 0]),
        lambda x: len(x[x >= 0]),
        lambda x: len(x[(x >= 0).squeeze(1)]),
        lambda x: len(x.masked_select(x >= 0)),
        lambda x: len(x.where(x >= 0, -1).unique()) - 1,
        lambda x: len(x.repeat_interleave((x[:, 0] >= 0).long(), 0)),
    ],
)
def test_a_further_firing_that_depends_on_values_is_seen(count):
    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.state = nn.Identity()

        def forward(self, x):
            for _ in range(count(x)):
                x = self.state(x)
            return x

    once = {"state": Quantity("state.hook_out", ("example", "d"))}
    batches = [
        SimpleNamespace(inputs=torch.tensor([[1.0], [-1], [-1]]), latents={}),
        SimpleNamespace(inputs=torch.tensor([[2.0], [1], [-1]]), latents={}),
    ]
    with pytest.raises(RuntimeError, match="fired again"):
        capture(probes.hooked(Counted()), batches, once)


def test_arguments_can_be_bound():
    model = probes.hooked(Looped(), n_steps=4)
    states = SimpleNamespace(inputs=torch.zeros(2, 1, 1), latents={})
    data = capture(model, [states], {"state": STATE})
    assert data["n_step"].values.tolist() == [4, 4]
