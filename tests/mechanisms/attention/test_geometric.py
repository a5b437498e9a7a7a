import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mechanisms.attention.geometric import (
    GeometricAttention,
    GeometricAttentionConfig,
    geometric_weights,
)
from tests.mechanisms.ndr_golden import DTYPES, TOLERANCE, attention_weights, load, load_weights

CONFIG = GeometricAttentionConfig(n_heads=3, d_head=4)
CONTRACT_EXAMPLES = {"": GeometricAttentionConfig(n_heads=4, d_head=4)}


def literal(logits):
    """A[i, j] from the definition, one entry and one factor at a time; queries are all keys."""
    n = logits.shape[-1]
    p, missed = torch.sigmoid(logits), torch.sigmoid(-logits)
    weights = torch.zeros_like(logits)
    for i in range(n):
        for j in range(n):
            if i == j:
                continue
            weight = p[..., i, j]
            for k in range(n):
                nearer = abs(i - k) < abs(i - j) or (abs(i - k) == abs(i - j) and k > i)
                if nearer and k not in (i, j):
                    weight = weight * missed[..., i, k]
            weights[..., i, j] = weight
    return weights


def random_logits(*shape, scale=1.0, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(*shape, generator=generator, dtype=dtype)
    return logits.masked_fill(torch.eye(shape[-1], dtype=torch.bool), -math.inf)


@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0, 1e4])
@pytest.mark.parametrize("length", [1, 2, 3, 8, 15])
def test_weights_are_those_of_the_literal_double_loop(length, scale):
    logits = random_logits(2, 3, length, length, scale=scale)
    assert torch.allclose(geometric_weights(logits), literal(logits), rtol=1e-12, atol=1e-15)
    narrow = geometric_weights(logits.float())
    assert torch.allclose(narrow.double(), literal(logits.float().double()), rtol=1e-5, atol=1e-37)


@given(
    st.integers(1, 7).flatmap(
        lambda n: st.lists(
            st.sampled_from([-1e4, -30.0, -1.0, 0.0, 2.0, 30.0, 1e4, -math.inf]),
            min_size=n * n,
            max_size=n * n,
        )
    )
)
def test_extreme_logits_and_hidden_keys(values):
    n = math.isqrt(len(values))
    logits = torch.tensor(values, dtype=torch.float64).view(1, n, n)
    logits = logits.masked_fill(torch.eye(n, dtype=torch.bool), -math.inf).requires_grad_()
    weights = geometric_weights(logits)
    assert torch.allclose(weights, literal(logits.detach()), rtol=1e-12, atol=0)
    assert (weights.sum(-1) <= 1 + 1e-12).all()
    (weights * torch.arange(1.0, n + 1)).sum().backward()
    assert logits.grad.isfinite().all()


def test_the_gradient_is_that_of_the_literal_formula():
    logits = random_logits(2, 6, 6, scale=2.0)
    factor = random_logits(2, 6, 6, seed=1).nan_to_num(neginf=0.5)
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    (geometric_weights(ours) * factor).sum().backward()
    (literal(theirs) * factor).sum().backward()
    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-10, atol=1e-14)


def test_queries_at_the_last_positions_are_the_last_rows():
    logits = random_logits(2, 7, 7)
    full = geometric_weights(logits)
    for n_query in (1, 3, 7):
        last = geometric_weights(logits[:, -n_query:])
        # Fewer rows are vectorised differently by the kernel, so the last digit may differ.
        assert torch.allclose(last, full[:, -n_query:], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("logits", ["moderate", "large", "zero"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity_of_the_activation(logits, dtype):
    golden = load("ndr_geometric_activation", dtype)
    weights = geometric_weights(golden[f"{logits}.logits"])
    error = (weights - golden[f"{logits}.nonorm.attn"]).abs().max()
    assert error < TOLERANCE[dtype]
    normalized = weights / weights.sum(-1, keepdim=True).clamp(min=1e-12)
    assert (normalized - golden[f"{logits}.norm.attn"]).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity_with_the_authors_attention(normalize, dtype):
    golden = load(f"ndr_geometric_attn_{'' if normalize else 'no'}norm_A", dtype)
    config = GeometricAttentionConfig(n_heads=3, d_head=4, normalize=normalize)
    attention = load_weights(GeometricAttention(config, 12), attention_weights(golden), dtype)
    x = golden["x_kv"].clone().requires_grad_()
    activations = {}
    for name, point in attention.named_children():
        point.add_hook(lambda value, hook, name=name: activations.__setitem__(name, value))
    out = attention(x, x, mask=~golden["pad_mask"][:, None, None])
    (out * golden["grad_weight"]).sum().backward()

    def close(ours, theirs):
        scale = max(1.0, theirs.abs().nan_to_num(posinf=0).max().item())
        difference = (ours - theirs).nan_to_num(nan=0.0)
        assert difference.abs().max() < TOLERANCE[dtype] * scale
        assert torch.equal(ours.isinf(), theirs.isinf())

    close(out, golden["out"])
    close(activations["hook_attn_scores"], golden["logits"])
    close(activations["hook_pattern"], golden["attn"])
    close(activations["hook_z"].transpose(1, 2), golden["z"])
    close((activations["hook_q"] + golden["content_bias"]).transpose(1, 2), golden["q"])
    close(activations["hook_k"].transpose(1, 2), golden["k"])
    close(activations["hook_v"].transpose(1, 2), golden["v"])
    close(x.grad, golden["grad_x_kv"])
    close(attention.W_dir.grad, golden["grad_W_dir"])
    close(attention.s_bias.grad, golden["grad_s_bias"])


def build(**changes):
    config = GeometricAttentionConfig(**{"n_heads": 3, "d_head": 4} | changes)
    return GeometricAttention(config, 12, generator=torch.Generator().manual_seed(0))


def test_a_query_with_all_keys_masked_gets_zeros():
    attention = build()
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1)).requires_grad_()
    mask = torch.tensor([True, False])[:, None, None, None]
    out = attention(x, x, mask=mask)
    assert torch.equal(out[1], torch.zeros(5, 12))
    assert torch.equal(attention(x[:, :1], x[:, :1]), torch.zeros(2, 1, 12))
    out.sum().backward()
    assert x.grad.isfinite().all()


def test_keys_that_are_masked_change_nothing():
    attention = build().eval()
    x = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(6) < 4)[None, None, None]
    changed = x.clone()
    changed[:, 4:] = 7.0
    masked = attention(x, x, mask=mask)[:, :4]
    assert torch.equal(masked, attention(changed, changed, mask=mask)[:, :4])
    short = x[:, :4]
    assert torch.allclose(masked, attention(short, short), atol=1e-6)


def test_dropout_hides_keys_and_queries_attend_beyond_them():
    attention = build(dropout=0.5).train()
    x = torch.randn(64, 6, 12, generator=torch.Generator().manual_seed(1))
    patterns = []
    attention.hook_pattern.add_hook(lambda pattern, hook: patterns.append(pattern))
    torch.manual_seed(0)
    attention(x, x)
    hidden = (patterns[0] == 0).all(2)
    assert 0.4 < hidden.float().mean() < 0.6
    attention.eval()
    attention(x, x)
    assert not (patterns[1] == 0).all(2).any()


def test_a_bias_is_added_to_the_logits():
    attention = build()
    x = torch.randn(1, 4, 12, generator=torch.Generator().manual_seed(1))
    patterns = []
    attention.hook_pattern.add_hook(lambda pattern, hook: patterns.append(pattern))
    attention(x, x, bias=torch.full((1, 1, 4, 4), 1e4))
    nearest = torch.tensor([1, 2, 3, 2])
    assert torch.equal(patterns[0].argmax(-1), nearest.expand(1, 3, 4))
    assert torch.allclose(patterns[0].amax(-1), torch.ones(1, 3, 4))


@pytest.mark.parametrize(
    "changes", [{"n_heads": 0}, {"d_head": 0}, {"dropout": 1.0}, {"dropout": -0.1}]
)
def test_invalid_settings_are_refused(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=name):
        build(**changes)


def test_half_precision_is_computed_in_float32():
    logits = random_logits(2, 8, 8, dtype=torch.float32)
    half = geometric_weights(logits.bfloat16())
    assert half.dtype == torch.bfloat16
    single = geometric_weights(logits.bfloat16().float())
    assert torch.equal(half, single.bfloat16())
