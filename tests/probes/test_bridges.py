"""Probes on bridges of TransformerLens around models of transformers: looped, and with experts."""

import warnings

import numpy as np
import pytest
import torch
import transformers
import xarray as xr

import probes
from probes import Quantity, capture
from tests.probes.conftest import SimpleBatch

SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 30}
EXPERTS = {"num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 16}
CONFIGS = {
    "HrmTextForCausalLM": transformers.HrmTextConfig(
        **SMALL, intermediate_size=32, H_cycles=2, L_cycles=3, max_position_embeddings=16
    ),
    "MixtralForCausalLM": transformers.MixtralConfig(
        **SMALL, **EXPERTS, intermediate_size=32, num_local_experts=4
    ),
    "Qwen3MoeForCausalLM": transformers.Qwen3MoeConfig(
        **SMALL, **EXPERTS, head_dim=8, intermediate_size=32, moe_intermediate_size=16,
        num_experts=4,
    ),
}  # fmt: skip
IDS = torch.randint(1, 30, (6, 5), generator=torch.Generator().manual_seed(0))


def bridge_of(architecture):
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    torch.manual_seed(0)
    config = CONFIGS[architecture]
    config._attn_implementation = "eager"
    model = getattr(transformers, architecture)(config).eval()
    with warnings.catch_warnings(action="ignore"):
        return build_bridge_from_module(model, architecture, hf_config=config)


def next_token(logits):
    return logits[:, -1].argmax(-1)


@pytest.fixture(scope="module")
def looped():
    return bridge_of("HrmTextForCausalLM")


# Names of TransformerLens, and those of which they are aliases.
STATES = {
    "aliases": ("L_blocks.0.hook_resid_pre", "L_blocks.1.hook_resid_post"),
    "names": ("L_blocks.0.hook_in", "L_blocks.1.hook_out"),
}


@pytest.fixture(scope="module")
def columns(looped):
    before, after = STATES["aliases"]
    return probes.capture_control_flow(
        looped,
        [SimpleBatch(IDS, {})],
        answer=next_token,
        gates=None,
        attention="L_blocks.0.attn.hook_pattern",
        before=before,
        after=after,
    )


def test_the_steps_of_a_looped_bridge_are_those_of_its_module(looped, columns):
    # Three passes of the lower module in each of two cycles.
    assert columns.sizes["step"] == 6
    np.testing.assert_allclose(columns["attention"].sum("key_pos"), 1, rtol=1e-5)
    state = Quantity(STATES["names"][1], ("example", "pos", "d_model"), fires="each")
    states = capture(looped, [SimpleBatch(IDS, {})], {"state": state})["state"]
    before = capture(
        looped,
        [SimpleBatch(IDS, {})],
        {"state": Quantity(STATES["names"][0], state.dims, fires="each")},
    )["state"]
    change = np.linalg.norm(states - before, axis=-1)
    total = np.linalg.norm(states, axis=-1) + np.linalg.norm(before, axis=-1)
    np.testing.assert_allclose(columns["change"], change / total, rtol=1e-4)


@pytest.mark.parametrize("names", STATES)
def test_a_looped_bridge_is_cut_by_step(looped, columns, names):
    valid = xr.DataArray(np.ones(IDS.shape, dtype=bool), dims=("example", "pos"))
    graphs = probes.extract_control_flow(
        columns["change"],
        columns["attention"],
        valid,
        gate_threshold=float(columns["change"].median()),
        attention_threshold=0.2,
    )
    result = probes.cut(
        looped,
        IDS,
        graphs,
        readout=xr.DataArray(np.full(6, 4), dims="example"),
        gates=STATES[names],
        attention="L_blocks.0.attn.hook_pattern",
        metrics={"logit": lambda logits, rows: logits[:, -1, 0]},
    )
    change = result["example_change"].sel(metric="logit")
    on_path = change.sel(condition="node on the path")
    assert (abs(on_path.dropna("example")) > 0).all()
    # The model is causal: what later columns do cannot reach an earlier one, but this is the last.
    step, pos = (
        result[name].sel(condition="node on the path")[0] for name in ("cut_step", "cut_pos")
    )
    example = int(np.flatnonzero(on_path.notnull())[0])

    def keep(activation, hook):
        counts[hook.name] = counts.get(hook.name, -1) + 1
        if counts[hook.name] == step[example]:
            if hook.name == STATES["names"][0]:
                counts["state"] = activation[:, int(pos[example])].clone()
            else:
                activation[:, int(pos[example])] = counts["state"]
        return activation

    counts = {}
    with torch.no_grad():
        expected = -looped(IDS)[example, -1, 0]
        expected += looped.run_with_hooks(IDS, fwd_hooks=[(n, keep) for n in STATES["names"]])[
            example, -1, 0
        ]
    np.testing.assert_allclose(on_path[example], expected, atol=1e-5)


def test_loop_probes_of_a_bridge(looped):
    hook = STATES["aliases"][1]
    kept = {"state": Quantity(hook, ("example", "pos", "d_model"), fires="each")}
    states = capture(looped, [SimpleBatch(IDS, {})], kept)["state"]
    moved = probes.score_states(states.isel(pos=-1))
    assert dict(moved.sizes)["step"] >= 5
    nudged = probes.nudge_states(looped, IDS, hook=hook)
    assert nudged["growth"].sizes["step"] == 6
    later = {"later": probes.At(hook, step=0, source_step=5), "all": hook}
    patched = probes.interchange(
        looped,
        IDS,
        IDS.roll(1, 0),
        hooks=later,
        where=torch.ones(1, 1, 1, dtype=torch.bool),
        metrics={"logit": lambda logits, rows: logits[:, -1, 0]},
    )
    assert (patched["change"].sel(site=["later", "all"]) != 0).all()


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_experts_of_a_bridge_specialize_in_planted_tokens(architecture):
    bridge = bridge_of(architecture)
    # The router reads whether a token is even off its embedding.
    even = torch.arange(30) % 2 == 0
    with torch.no_grad():
        bridge.embed.weight[even, 0], bridge.embed.weight[~even, 0] = 10.0, -10.0
        for block in bridge.blocks:
            gate = block.mlp.gate.original_component.weight
            gate.zero_()
            gate[:2, 0], gate[2:, 0] = 1.0, -1.0
    kept = {"routing": Quantity("blocks.*.mlp.hook_expert_weights", ("example", "pos", "module"))}
    data = capture(bridge, [SimpleBatch(IDS[:3], {}), SimpleBatch(IDS[3:], {})], kept)
    assert dict(data.sizes) == {"example": 6, "layer": 2, "pos": 5, "module": 4}
    operation = xr.DataArray(even[IDS].long().numpy(), dims=("example", "pos"))
    scores = probes.score_specialization(data["routing"], operation, operations=["odd", "even"])
    # Each of the two kinds has two of the four experts.
    specialization = scores["specialization"].sel(layer="pooled")
    assert specialization.sel(control="observed") == pytest.approx(0.5, abs=0.01)
    assert specialization.sel(control="shuffled") < 0.2
    activation = scores["activation"].sel(layer="0", operation="even")
    assert (activation[:2] > 0.3).all()
    assert (activation[2:] < 0.01).all()
