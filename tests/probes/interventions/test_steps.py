"""Interventions at one firing of a module that fires several times, or at all."""

import pytest
import torch
from torch import nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

import probes
from probes import At, erase, interchange, nudge_states

N_STEPS = 4


class Doubling(HookedRootModule):
    """state -> 2 state + 1, `n_steps` times; the answer is the last state [example, 1]."""

    def __init__(self):
        super().__init__()
        self.hook_start, self.hook_state = HookPoint(), HookPoint()
        self.setup()

    def forward(self, start, n_steps=N_STEPS):
        state = self.hook_start(start)
        for _ in range(n_steps):
            state = self.hook_state(2 * state + 1)
        return state


def run(start, n_steps=N_STEPS):
    for _ in range(n_steps):
        start = 2 * start + 1
    return start


BASE, SOURCE = torch.arange(5.0)[:, None], torch.arange(5.0)[:, None] + 10


def patched(place, base=BASE, source=SOURCE, model=None):
    """The answers with patches, found by asking for all that are possible."""
    found = []

    def answer(state):
        found.append(state[:, 0])
        return state.long()

    interchange(
        model or Doubling(), base, source, hooks={"site": place}, answer=answer,
        where=torch.ones(1, 1, dtype=torch.bool),
        outcomes={"none": torch.full_like(BASE, -1).long()},
    )  # fmt: skip
    return found[-1][:, None]


@pytest.mark.parametrize("step", range(N_STEPS))
def test_one_step_is_patched_from_the_same_step_of_the_source(step):
    # What comes before the patch does not matter.
    assert torch.equal(patched(At("hook_state", step)), run(SOURCE))


@pytest.mark.parametrize(("step", "source_step"), [(0, 3), (3, 0), (1, 2)])
def test_a_state_is_patched_into_another_step(step, source_step):
    expected = run(run(SOURCE, source_step + 1), N_STEPS - step - 1)
    assert torch.equal(patched(At("hook_state", step, source_step=source_step)), expected)


def test_a_state_is_patched_into_another_hook():
    expected = run(run(SOURCE, 2))
    place = At("hook_start", source="hook_state", source_step=1)
    assert torch.equal(patched(place), expected)


def test_without_a_step_all_are_patched():
    class Counted(Doubling):
        def forward(self, start):
            state = torch.zeros_like(start)
            for number in range(N_STEPS):
                state = state + 10**number * self.hook_state(start)
            return state

    every = patched("hook_state", BASE, SOURCE, Counted())
    assert torch.equal(every, 1111 * SOURCE)
    assert torch.equal(
        patched(At("hook_state", 2), BASE, SOURCE, Counted()), 1011 * BASE + 100 * SOURCE
    )
    several = [At("hook_state", 0), At("hook_state", 3, source_step=1)]
    assert torch.equal(patched(several, BASE, SOURCE, Counted()), 110 * BASE + 1001 * SOURCE)


def test_steps_that_are_not_taken_are_named():
    with pytest.raises(RuntimeError, match=r"base must reach the step of At\(hook="):
        patched(At("hook_state", 7, source_step=0))
    with pytest.raises(RuntimeError, match="source must reach step 9 at 'hook_state', it takes 4"):
        patched(At("hook_state", 0, source_step=9))
    with pytest.raises(ValueError, match="step must be at least 0, got -1"):
        At("hook_state", -1)


def test_a_model_may_be_called_with_more_steps():
    longer = probes.hooked(Doubling(), n_steps=6)
    expected = run(run(SOURCE, 6), 0)
    assert torch.equal(patched(At("hook_state", 5), model=longer), expected)


class Reader(HookedRootModule):
    """Reads a label from its state at step `used`; the state is the same at all steps."""

    def __init__(self, used):
        super().__init__()
        self.used, self.table = used, 4 * torch.eye(4)
        self.hook_state, self.hook_other = HookPoint(), HookPoint()
        self.points = nn.ModuleList()
        self.setup()

    def forward(self, codes):
        for step in range(3):
            state = self.hook_state(codes)
            state = state + 0 * self.hook_other(codes)
            if step == self.used:
                answer = (state @ self.table.T).argmax(-1)
        return answer


def data(seed, n=200):
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(4, (n,), generator=generator)
    return 4 * torch.eye(4)[label] + torch.randn(n, 4, generator=generator), label


def test_a_label_is_erased_at_one_step_or_at_all():
    (fit, label), (test, truth) = data(0), data(1)
    hooks = {f"step {step}": At("hook_state", step) for step in range(3)}
    result = erase(
        Reader(used=1), fit, label, test,
        hooks=hooks | {"all": "hook_state", "other": "hook_other"},
        answer=lambda output: output, outcomes={"right": truth}, draws=2,
    )  # fmt: skip
    rate = result["rate"].sel(condition="erased", outcome="right")
    assert (rate.sel(site=["step 0", "step 2", "other"]) > 0.95).all()
    assert (rate.sel(site=["step 1", "all"]) < 0.5).all()
    assert result["rank"].sel(site="all") == 3
    with pytest.raises(RuntimeError, match=r"At\(hook='hook_state', step=5.* does not"):
        erase(
            Reader(used=1), fit, label, test, hooks={"late": At("hook_state", 5)},
            answer=lambda output: output, outcomes={"right": truth},
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"hooks\['late'\] must name no source"):
        erase(
            Reader(used=1), fit, label, test, hooks={"late": At("hook_state", source_step=1)},
            answer=lambda output: output, outcomes={"right": truth},
        )  # fmt: skip


class AsLongAsNeeded(HookedRootModule):
    """Takes the steps that its batch needs, and answers with the state of the last one.

    The first entry of codes [example, 5] is the number of steps that the example needs. Hooks: one
    that all steps share, and one for each step.
    """

    def __init__(self):
        super().__init__()
        self.hook_state, self.steps = HookPoint(), nn.ModuleList(HookPoint() for _ in range(3))
        self.setup()

    def forward(self, codes):
        for step in range(int(codes[:, 0].max())):
            state = self.steps[step](self.hook_state(codes))
        return state[:, 1:].argmax(-1)


def needing(steps, codes):
    return torch.cat([steps[:, None], codes], dim=1)


@pytest.mark.parametrize("hook", ["hook_state", "steps.*"])
def test_steps_that_the_first_example_does_not_need_are_changed(hook):
    (fit, label), (test, truth) = data(0), data(1)
    needed = torch.full((200,), 3.0).index_fill(0, torch.tensor([0]), 1)
    fit, test = needing(needed, fit), needing(needed, test)
    settings = {
        "hooks": {"all": hook}, "answer": lambda output: output, "outcomes": {"right": truth}
    }  # fmt: skip
    entries = {"entries": (slice(None), slice(1, None)), "draws": 1}
    result = erase(AsLongAsNeeded(), fit, label, test, **settings, **entries)
    assert result["rate"].sel(condition="erased", outcome="right") < 0.5
    every = torch.ones(200, 1, dtype=torch.bool)
    patched = interchange(AsLongAsNeeded(), fit, test, where=every, **settings)
    assert patched["rate"].sel(site="all", outcome="right") > 0.95
    assert nudge_states(AsLongAsNeeded(), fit, hook=hook).sizes["step"] == 3


@pytest.mark.parametrize("hook", ["hook_state", "steps.*"])
def test_batches_with_other_numbers_of_steps_are_refused(hook):
    (fit, label), (test, truth) = data(0), data(1)
    two, three = torch.full((200,), 2.0), torch.full((200,), 3.0)
    settings = {
        "hooks": {"all": hook}, "answer": lambda output: output, "outcomes": {"right": truth},
        "entries": (slice(None), slice(1, None)), "draws": 1, "batch_size": 100,
    }  # fmt: skip
    with pytest.raises(RuntimeError, match=r"fit_inputs must reach the firings .* of inputs"):
        erase(AsLongAsNeeded(), needing(two, fit), label, needing(three, test), **settings)
    mixed = needing(torch.cat([two[:100], three[:100]]), fit)
    with pytest.raises(RuntimeError, match=r"must reach step 2 in all batches|silent"):
        erase(AsLongAsNeeded(), mixed, label, needing(two, test), **settings)
    with pytest.raises(RuntimeError, match=r"must fire 3 times in each batch, .* 2|silent"):
        nudge_states(AsLongAsNeeded(), mixed, hook=hook, batch_size=100)
    # A step that all have may be asked for.
    settings["hooks"] = {"first": At("hook_state", 0)}
    erase(AsLongAsNeeded(), mixed, label, needing(three, test), **settings)
