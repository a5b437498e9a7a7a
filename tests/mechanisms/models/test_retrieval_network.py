from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear

import mechanisms
from mechanisms.attention.compositional import CompositionalAttentionConfig
from mechanisms.attention.multi_head import AttentionConfig
from mechanisms.models.retrieval_network import RetrievalNetwork, RetrievalNetworkConfig
from tests.mechanisms.checks import (
    check_seed_determines_weights,
)

ATTENTIONS = {
    "multi-head": AttentionConfig(n_heads=2, d_head=8),
    "compositional": CompositionalAttentionConfig(n_searches=2, n_retrievals=3, d_head=8),
    "multi-head, own value": AttentionConfig(n_heads=2, d_head=8, own_value=True),
    "compositional, own value": CompositionalAttentionConfig(
        n_searches=2, n_retrievals=3, d_head=8, d_value=5, own_value=True
    ),
}
WITHOUT_OWN = [name for name in ATTENTIONS if "own value" not in name]


def build(attention="compositional", **changes):
    sizes = {"d_input": 7, "d_output": 1, "d_model": 16, "d_mlp": 20} | changes
    config = RetrievalNetworkConfig(**sizes, attention=ATTENTIONS[attention])
    return RetrievalNetwork(config, generator=torch.Generator().manual_seed(0))


def objects(n=6, seed=1):
    return torch.randn(4, n, 7, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_order_of_objects_has_no_effect(attention):
    model, x = build(attention), objects()
    order = torch.randperm(6, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(model(x)[:, order], model(x[:, order]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", WITHOUT_OWN)
def test_an_object_receives_nothing_from_itself(attention):
    model, x = build(attention), objects()
    pattern = model.run_with_cache(x)[1]["blocks.0.attn.hook_pattern"]
    assert not pattern.diagonal(dim1=-2, dim2=-1).any()
    # With a fixed pattern its own features have no effect on its output.
    other = x.clone()
    other[:, 0] += 1

    def fix_pattern(value, hook):
        return torch.full_like(value, 0.2) * (1 - torch.eye(6))

    hooks = [("blocks.0.attn.hook_pattern", fix_pattern)]
    if attention == "compositional":
        hooks.append(
            ("blocks.0.attn.hook_value_scores", lambda value, hook: torch.full_like(value, 1 / 3))
        )
    answers = [model.run_with_hooks(inputs, fwd_hooks=hooks) for inputs in (x, other)]
    torch.testing.assert_close(answers[0][:, 0], answers[1][:, 0])
    assert not torch.allclose(answers[0][:, 1:], answers[1][:, 1:], atol=1e-3)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_its_own_value_tells_an_object_its_preferences(attention):
    """With an own value the output depends on the object's features past its fixed searches."""
    model, x = build(attention), objects()
    others = 0.2 * (1 - torch.eye(6))
    hooks = [("blocks.0.attn.hook_pattern", lambda pattern, hook: others.expand_as(pattern))]
    if attention.startswith("compositional"):
        hooks.append(
            ("blocks.0.attn.hook_value_scores", lambda value, hook: torch.full_like(value, 1 / 3))
        )
    changed = x.clone()
    changed[:, 0, -1] += 1
    first, second = (model.run_with_hooks(inputs, fwd_hooks=hooks)[:, 0] for inputs in (x, changed))
    assert torch.allclose(first, second, atol=1e-6) == (attention in WITHOUT_OWN)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_uniform_weights_are_those_of_torchs_linear_layers(attention):
    """Each parameter is spread over the whole range of a linear layer with as many inputs."""
    model = build(attention, d_model=64, d_mlp=48, initialization="uniform")
    config = ATTENTIONS[attention]
    d_value = config.d_value or config.d_head
    n_values = config.n_heads + config.own_value
    inputs = {"W_in": 7, "W_E": 48, "W_hidden": 64, "W_U": 48, "W_value_key": d_value}
    inputs |= {"W_O": n_values * d_value}
    drawn = dict(model.named_parameters())
    for name, weight in drawn.items():
        last = name.rpartition(".")[2]
        fan_in = inputs.get(last.replace("b_", "W_"), 64)
        layer = torch.nn.Linear(fan_in, 1)
        bound = fan_in**-0.5
        assert layer.weight.abs().max() <= bound
        assert weight.abs().max() <= bound, name
        if weight.numel() >= 60:
            assert weight.abs().max() > 0.9 * bound, name
            assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.2), name
        assert weight.any(), name


def test_uniform_weights_follow_the_generator_alone():
    check_seed_determines_weights(
        lambda generator: RetrievalNetwork(
            replace(build().config, initialization="uniform"), generator=generator
        )
    )


def test_it_is_encoder_attention_and_read_out():
    model, x = build(), objects()
    others = ~torch.eye(6, dtype=torch.bool)
    encoded = linear(linear(x, model.W_in.T, model.b_in).relu(), model.W_E.T, model.b_E)
    attended = model.blocks[0].attn(encoded, encoded, mask=others[None, None])
    expected = linear(attended, model.W_hidden.T, model.b_hidden).relu() @ model.W_U + model.b_U
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_it_keeps_the_rules_of_a_mechanism(attention):
    mechanisms.check(build(attention), objects())


def test_invalid_widths_are_refused():
    with pytest.raises(ValueError, match="d_mlp must be at least 1, got 0"):
        build(d_mlp=0)
    with pytest.raises(ValueError, match="initialization must be one of lecun_normal, uniform"):
        build(initialization="normal")
