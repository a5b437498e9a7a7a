import pytest
import torch
from torch.nn.functional import gelu

from mechanisms import FeedForwardConfig, MixtureOfExpertsConfig


def test_feed_forward_is_two_layers():
    layer = FeedForwardConfig(d_mlp=7).build(5, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        layer.b_in.fill_(0.3)
        layer.b_out.fill_(-0.2)
    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    expected = gelu(x @ layer.W_in + 0.3, approximate="tanh") @ layer.W_out - 0.2
    assert torch.allclose(layer(x), expected, atol=1e-6)


def experts(n_experts=4, top_k=2):
    config = MixtureOfExpertsConfig(n_experts=n_experts, top_k=top_k, d_mlp=6)
    layer = config.build(5, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        layer.b_in.normal_(generator=torch.Generator().manual_seed(1))
        layer.b_out.normal_(generator=torch.Generator().manual_seed(2))
    return layer, torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(3))


def test_experts_agree_with_a_loop_over_tokens():
    layer, x = experts()
    for b in range(2):
        for t in range(3):
            token = x[b, t]
            probability = (token @ layer.W_gate).softmax(-1)
            chosen = probability.argsort(descending=True)[:2].tolist()
            total = sum(probability[e] for e in chosen)
            expected = sum(
                probability[e]
                / total
                * (
                    gelu(token @ layer.W_in[e] + layer.b_in[e], approximate="tanh") @ layer.W_out[e]
                    + layer.b_out[e]
                )
                for e in chosen
            )
            assert torch.allclose(layer(x)[b, t], expected, atol=1e-6)


def test_hooks_can_route_all_tokens_to_one_expert():
    layer, x = experts(top_k=1)
    layer.hook_expert_indices.add_hook(lambda chosen, hook: torch.full_like(chosen, 3))
    hidden = gelu(x @ layer.W_in[3] + layer.b_in[3], approximate="tanh")
    assert torch.allclose(layer(x), hidden @ layer.W_out[3] + layer.b_out[3], atol=1e-6)


def test_one_expert_is_a_feed_forward_layer():
    layer, x = experts(n_experts=1, top_k=1)
    hidden = gelu(x @ layer.W_in[0] + layer.b_in[0], approximate="tanh")
    assert torch.allclose(layer(x), hidden @ layer.W_out[0] + layer.b_out[0], atol=1e-6)


def test_invalid_settings_are_refused():
    with pytest.raises(ValueError, match=r"top_k must be in \[1, n_experts = 2\], got 3"):
        MixtureOfExpertsConfig(n_experts=2, top_k=3, d_mlp=1)
    with pytest.raises(ValueError, match="d_mlp must be at least 1, got 0"):
        MixtureOfExpertsConfig(n_experts=2, top_k=1, d_mlp=0)
    with pytest.raises(ValueError, match="d_mlp must be at least 1, got -1"):
        FeedForwardConfig(d_mlp=-1)
