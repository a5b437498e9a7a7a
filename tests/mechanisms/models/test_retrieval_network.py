import pytest
import torch
from torch.nn.functional import linear

from mechanisms.attention.compositional import CompositionalAttentionConfig
from mechanisms.attention.multi_head import AttentionConfig
from mechanisms.models.retrieval_network import RetrievalNetwork, RetrievalNetworkConfig
from mechanisms.serialization import load, save

ATTENTIONS = {
    "multi-head": AttentionConfig(n_heads=2, d_head=8),
    "compositional": CompositionalAttentionConfig(n_searches=2, n_retrievals=3, d_head=8),
}


def build(attention="compositional", **changes):
    sizes = {"d_input": 7, "d_output": 1, "d_model": 16, "d_mlp": 20} | changes
    config = RetrievalNetworkConfig(**sizes, attention=ATTENTIONS[attention])
    return RetrievalNetwork(config, generator=torch.Generator().manual_seed(0))


def objects(n=6, seed=1):
    return torch.randn(4, n, 7, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_objects_have_no_order(attention):
    model, x = build(attention), objects()
    order = torch.randperm(6, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(model(x)[:, order], model(x[:, order]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_an_object_receives_nothing_from_itself(attention):
    model, x = build(attention), objects()
    pattern = model.run_with_cache(x)[1]["blocks.0.attn.hook_pattern"]
    assert not pattern.diagonal(dim1=-2, dim2=-1).any()
    # Nor past the attention: with a pattern that is fixed, what it holds itself does not matter.
    other = x.clone()
    other[:, 0] += 1

    def fixed(value, hook):
        return torch.full_like(value, 0.2) * (1 - torch.eye(6))

    hooks = [("blocks.0.attn.hook_pattern", fixed)]
    if attention == "compositional":
        hooks.append(
            ("blocks.0.attn.hook_value_scores", lambda value, hook: torch.full_like(value, 1 / 3))
        )
    answers = [model.run_with_hooks(one, fwd_hooks=hooks) for one in (x, other)]
    torch.testing.assert_close(answers[0][:, 0], answers[1][:, 0])
    assert not torch.allclose(answers[0][:, 1:], answers[1][:, 1:], atol=1e-3)


def test_it_is_encoder_attention_and_read_out():
    model, x = build(), objects()
    others = ~torch.eye(6, dtype=torch.bool)
    encoded = linear(linear(x, model.W_in.T, model.b_in).relu(), model.W_E.T, model.b_E)
    received = model.blocks[0].attn(encoded, encoded, mask=others[None, None])
    expected = linear(received, model.W_hidden.T, model.b_hidden).relu() @ model.W_U + model.b_U
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_hook_point_fires_and_can_be_changed(attention):
    model, x = build(attention), objects()
    before = model(x)
    for name in model.hook_dict:
        hooks = [(name, lambda value, hook: value.roll(1, dims=0) * 1.3)]
        after = model.run_with_hooks(x, fwd_hooks=hooks)
        assert not torch.allclose(before, after, atol=1e-4), name


def test_it_comes_back_from_its_file(tmp_path):
    model, x = build(), objects()
    save(model, tmp_path / "model")
    assert torch.equal(load(tmp_path / "model")(x), model(x))


def test_wrong_widths_are_told():
    with pytest.raises(ValueError, match="d_mlp must be at least 1, got 0"):
        build(d_mlp=0)
