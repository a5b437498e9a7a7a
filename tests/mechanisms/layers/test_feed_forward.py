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


def literal(layer, x):
    """The layer's formula (Shazeer 2020, equation 6, for `swiglu`) with 0 for missing biases."""
    weights = {"b_in": 0, "b_out": 0, "b_gate": 0} | dict(layer.named_parameters())
    hidden = x @ weights["W_in"] + weights["b_in"]
    if layer.config.activation == "swiglu":
        gate = x @ weights["W_gate"] + weights["b_gate"]
        hidden = hidden * gate / (1 + (-gate).exp())
    elif layer.config.activation == "relu":
        hidden = hidden * (hidden > 0)
    else:
        cubic = (2 / torch.pi) ** 0.5 * (hidden + 0.044715 * hidden**3)
        hidden = hidden * (1 + cubic.tanh()) / 2
    return hidden @ weights["W_out"] + weights["b_out"]


def feed_forward(**settings):
    layer = FeedForwardConfig(d_mlp=7, **settings).build(
        5, generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            if name.startswith("b_"):
                weight.normal_(generator=torch.Generator().manual_seed(len(name)))
    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    return layer.double(), x.double()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "relu", "swiglu"])
def test_all_activations_with_and_without_biases(activation, bias):
    layer, x = feed_forward(activation=activation, bias=bias)
    names = {"W_in", "W_out"} | ({"b_in", "b_out"} if bias else set())
    if activation == "swiglu":
        names |= {"W_gate", "b_gate"} if bias else {"W_gate"}
    assert dict(layer.named_parameters()).keys() == names
    assert torch.allclose(layer(x), literal(layer, x), atol=1e-12)


def test_hook_points_of_swiglu_show_and_change_gate_and_hidden_layer():
    layer, x = feed_forward(activation="swiglu")
    # Where the gate's argument is large, silu is the identity.
    layer.hook_pre.add_hook(lambda pre, hook: torch.full_like(pre, 50))
    gated = layer(x)
    assert torch.allclose(gated, 50 * (x @ layer.W_in + layer.b_in) @ layer.W_out + layer.b_out)
    layer.hook_pre_linear.add_hook(lambda pre, hook: torch.ones_like(pre))
    posts = []
    layer.hook_post.add_hook(lambda post, hook: posts.append(post))
    assert torch.allclose(layer(x), 50 * layer.W_out.sum(0) + layer.b_out)
    assert torch.allclose(posts[0], torch.full((2, 3, 7), 50).double())
    layer.hook_post.add_hook(lambda post, hook: 0 * post)
    assert torch.allclose(layer(x), layer.b_out)


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


def test_experts_without_weight_give_zeros():
    layer, x = experts()
    with torch.no_grad():
        layer.b_out.fill_(1)
    layer.hook_expert_weights.add_hook(lambda weights, hook: weights * 0)
    assert not layer(x).any()


def test_one_expert_is_a_feed_forward_layer():
    layer, x = experts(n_experts=1, top_k=1)
    hidden = gelu(x @ layer.W_in[0] + layer.b_in[0], approximate="tanh")
    assert torch.allclose(layer(x), hidden @ layer.W_out[0] + layer.b_out[0], atol=1e-6)


def test_invalid_settings_are_refused():
    with pytest.raises(ValueError, match=r"top_k must be in \[1, n_experts = 2\], got 3"):
        MixtureOfExpertsConfig(n_experts=2, top_k=3, d_mlp=1)
    with pytest.raises(ValueError, match="n_experts must be at least 1, got 0"):
        MixtureOfExpertsConfig(n_experts=0, top_k=1, d_mlp=1)
    with pytest.raises(ValueError, match="d_mlp must be at least 1, got 0"):
        MixtureOfExpertsConfig(n_experts=2, top_k=1, d_mlp=0)
    with pytest.raises(ValueError, match="d_mlp must be at least 1, got -1"):
        FeedForwardConfig(d_mlp=-1)


def test_outputs_are_dropped_in_training_only():
    layer, x = feed_forward(output_dropout=0.5)
    expected = literal(layer, x)
    assert torch.allclose(layer.eval()(x), expected, atol=1e-12)
    torch.manual_seed(0)
    out = layer.train()(x)
    kept = out != 0
    assert 0 < kept.sum() < kept.numel()
    assert torch.allclose(out[kept], 2 * expected[kept], atol=1e-12)
