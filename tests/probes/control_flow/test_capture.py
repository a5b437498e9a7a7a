import re

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from probes import capture_control_flow, extract_control_flow, match_control_flow
from tests.probes.conftest import SimpleBatch, ToyAttention
from tests.probes.control_flow.programs import (
    HEADS,
    STEPS,
    WIDTH,
    ProgramModel,
    answer_of,
    make_programs,
)

STATE, N_STEPS = 8, 3


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = ToyAttention(STATE, 2)
        self.gate = nn.Linear(STATE, STATE)
        self.hook_resid_pre, self.hook_resid_post = HookPoint(), HookPoint()
        self.hook_gate = HookPoint()

    def forward(self, h):
        h = self.hook_resid_pre(h)
        gate = self.hook_gate(torch.sigmoid(self.gate(h)))
        return self.hook_resid_post(gate * self.attn(h) + (1 - gate) * h)


class GatedModel(HookedRootModule):
    """Columns with gates; the last column is read out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Step() for _ in range(N_STEPS))
        self.setup()

    def forward(self, h):
        for block in self.blocks:
            h = block(h)
        return h[:, -1]


def largest(output):
    return output.argmax(-1)


@pytest.fixture(scope="module")
def inputs():
    return torch.randn(10, 5, STATE, generator=torch.Generator().manual_seed(1))


def test_gates_changes_attention_and_answers_are_those_of_the_cache(inputs):
    model = GatedModel()
    batches = [SimpleBatch(part, {}) for part in inputs.split(4)]
    columns = capture_control_flow(model, batches, answer=largest)
    assert dict(columns.sizes) == {
        "example": 10,
        "step": N_STEPS,
        "pos": 5,
        "head": 2,
        "query_pos": 5,
        "key_pos": 5,
    }
    assert set(columns.data_vars) == {"gate", "change", "attention", "answer"}
    with torch.no_grad():
        output, cache = model.run_with_cache(inputs)
    for step in range(N_STEPS):
        before, after = (cache[f"blocks.{step}.hook_resid_{one}"] for one in ("pre", "post"))
        change = (after - before).norm(dim=-1) / (after.norm(dim=-1) + before.norm(dim=-1))
        here = columns.isel(step=step)
        np.testing.assert_allclose(here["change"], change, atol=1e-6)
        gate = cache[f"blocks.{step}.hook_gate"].mean(-1)
        np.testing.assert_allclose(here["gate"], gate, atol=1e-6)
        pattern = cache[f"blocks.{step}.attn.hook_pattern"]
        np.testing.assert_allclose(here["attention"], pattern, atol=1e-6)
    assert columns["answer"].to_numpy().tolist() == output.argmax(-1).tolist()


def test_a_state_that_a_step_changes_in_place_has_changed(inputs):
    class InPlace(Step):
        def forward(self, h):
            h = self.hook_resid_pre(h)
            gate = self.hook_gate(torch.sigmoid(self.gate(h)))
            update = gate * self.attn(h)
            return self.hook_resid_post(h.mul_(1 - gate).add_(update))

    model, in_place = GatedModel(), GatedModel()
    in_place.blocks = nn.ModuleList(InPlace() for _ in range(N_STEPS))
    in_place.load_state_dict(model.state_dict())
    in_place.setup()
    change, expected = (
        capture_control_flow(each, [SimpleBatch(inputs.clone(), {})], answer=largest)["change"]
        for each in (in_place, model)
    )
    np.testing.assert_allclose(change, expected, atol=1e-5)
    assert (change > 0).all()


def test_a_column_whose_gates_are_closed_does_not_change(inputs):
    model = GatedModel()
    for block in model.blocks:
        nn.init.zeros_(block.gate.weight)
        nn.init.constant_(block.gate.bias, -50.0)
    columns = capture_control_flow(model, [SimpleBatch(inputs, {})], answer=largest)
    np.testing.assert_allclose(columns["change"], 0, atol=1e-6)
    empty = SimpleBatch(torch.zeros_like(inputs), {})
    # A column that is zero before and after has not changed either, and is no 0 / 0.
    assert np.isfinite(capture_control_flow(model, [empty], answer=largest)["change"]).all()


def test_an_unknown_hook_is_refused(inputs):
    with pytest.raises(KeyError, match=r"blocks\.\*\.hook_gates"):
        capture_control_flow(
            GatedModel(),
            [SimpleBatch(inputs, {})],
            answer=largest,
            gates="blocks.*.hook_gates",
        )


# Graphs that are as dense


def noise(power):
    rng = np.random.default_rng(0)
    programs = make_programs(60)
    gates, attention = programs.gates(rng), programs.attention(rng)
    return (
        gates.copy(data=rng.random(gates.shape) ** power),
        attention.copy(data=rng.random(attention.shape) ** power),
    )


@pytest.mark.parametrize("power", [1, 8])
def test_matched_graphs_have_as_many_nodes_and_reads(power):
    programs, rng = make_programs(60), np.random.default_rng(1)
    graphs = extract_control_flow(programs.gates(rng), programs.attention(rng), programs.valid)
    gates, attention = noise(power)
    matched = match_control_flow(graphs, gates, attention, programs.valid)
    plain = extract_control_flow(gates, attention, programs.valid)

    def counts(some):
        return np.array([int(some["update"].sum()), int((some["head"] >= 0).sum())])

    nodes, reads = counts(graphs)
    assert nodes > 100
    assert counts(matched)[0] == pytest.approx(nodes, rel=0.02)
    assert counts(matched)[1] == pytest.approx(reads, rel=0.02)
    # At the usual thresholds they are of another density.
    assert not np.allclose(counts(plain), counts(matched), rtol=0.5)
    # Its nodes are the largest gates there are.
    update, real = matched["update"].to_numpy(), programs.valid.to_numpy()
    values = np.where(real[:, None], gates, -1)
    assert values[update].min() >= values[~update].max()
    assert matched.attrs["gate_threshold_low"] == pytest.approx(values[update].min(), abs=0.01)


def test_graphs_matched_with_themselves_keep_their_nodes():
    programs, rng = make_programs(60), np.random.default_rng(1)
    gates, attention = programs.gates(rng), programs.attention(rng)
    graphs = extract_control_flow(gates, attention, programs.valid)
    matched = match_control_flow(graphs, gates, attention, programs.valid)
    np.testing.assert_array_equal(matched["update"], graphs["update"])


def uneven(steps=3, heads=2, width=10):
    """Gates that are open in long examples alone, and attention of all valid columns to all."""
    rng, length = np.random.default_rng(0), np.repeat([2, width], 10)
    valid = np.arange(width) < length[:, None]
    gates = np.where(length == width, 0.9, 0.1)[:, None, None] * np.ones((1, steps, width))
    weights = rng.random((20, steps, heads, width, width)) * valid[:, None, None, None]
    dims = ("example", "step", "head", "query_pos", "key_pos")
    return (
        xr.DataArray(gates, dims=("example", "step", "pos")),
        xr.DataArray(weights / weights.sum(-1, keepdims=True), dims=dims),
        xr.DataArray(valid, dims=("example", "pos")),
    )


@pytest.mark.parametrize("threshold", [0.01, 0.1, 0.15])
def test_lengths_that_differ_leave_numbers_of_nodes_and_reads_alike(threshold):
    gates, attention, valid = uneven()
    graphs = extract_control_flow(gates, attention, valid, attention_threshold=threshold)
    other = attention.isel(step=slice(None, None, -1))
    matched = match_control_flow(graphs, gates, other, valid)
    np.testing.assert_array_equal(matched["update"], graphs["update"])
    n_reads = int((graphs["head"] >= 0).sum())
    assert int((matched["head"] >= 0).sum()) == pytest.approx(n_reads, rel=0.01)


def test_a_control_with_closed_gates_or_without_attention_has_empty_graphs():
    gates, attention, valid = uneven()
    graphs = extract_control_flow(gates, attention, valid)
    closed = match_control_flow(graphs, 0 * gates, attention, valid)
    assert closed.sizes["edge"] == 0
    assert not closed["update"].any()
    blind = match_control_flow(graphs, gates, 0 * attention, valid)
    np.testing.assert_array_equal(blind["update"], graphs["update"])
    assert (blind["kind"] == "copy").all()


def test_a_control_of_other_sizes_is_refused():
    programs, rng = make_programs(10), np.random.default_rng(1)
    gates, attention = programs.gates(rng), programs.attention(rng)
    graphs = extract_control_flow(gates, attention, programs.valid)
    with pytest.raises(ValueError, match=rf"gates must have the shape \(10, {STEPS}, {WIDTH}\)"):
        match_control_flow(graphs, gates.isel(step=[0]), attention, programs.valid)


def test_a_model_without_states_to_compare_is_refused():
    programs = make_programs(4)
    assert HEADS > 1
    with pytest.raises(KeyError, match="hook_resid_pre"):
        capture_control_flow(ProgramModel(), [SimpleBatch(programs.inputs, {})], answer=answer_of)


def test_states_before_and_after_are_not_swapped_or_the_same(inputs):
    batches, (pre, post) = (
        [SimpleBatch(inputs, {})],
        ("blocks.*.hook_resid_pre", "blocks.*.hook_resid_post"),
    )
    with pytest.raises(
        ValueError, match=rf"a state before each state after, got before='{re.escape(post)}'"
    ):
        capture_control_flow(GatedModel(), batches, answer=largest, before=post, after=pre)
    with pytest.raises(
        ValueError,
        match=rf"before and after must be different hooks, got '{re.escape(post)}' twice",
    ):
        capture_control_flow(GatedModel(), batches, answer=largest, before=post, after=post)


def test_gates_and_attention_can_be_left_out(inputs):
    class Ungated(Step):
        def __init__(self):
            super().__init__()
            del self.hook_gate

        def forward(self, h):
            return self.hook_resid_post(self.attn(self.hook_resid_pre(h)))

    model = GatedModel()
    model.blocks = nn.ModuleList(Ungated() for _ in range(N_STEPS))
    model.setup()
    batches = [SimpleBatch(inputs, {})]
    columns = capture_control_flow(model, batches, answer=largest, gates=None)
    assert set(columns.data_vars) == {"change", "attention", "answer"}
    alone = capture_control_flow(model, batches, answer=largest, gates=None, attention=None)
    assert set(alone.data_vars) == {"change", "answer"}
    np.testing.assert_array_equal(alone["change"], columns["change"])
    with pytest.raises(KeyError, match="hook_gate"):
        capture_control_flow(model, batches, answer=largest)
