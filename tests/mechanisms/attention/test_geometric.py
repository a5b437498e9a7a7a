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
from tests.mechanisms.ndr_literal import geometric_attention as literal_attention
from tests.mechanisms.ndr_literal import random_attention

CONFIG = GeometricAttentionConfig(n_heads=3, d_head=4)
CONTRACT_EXAMPLES = {
    "": GeometricAttentionConfig(n_heads=4, d_head=4),
    "normalised": GeometricAttentionConfig(n_heads=4, d_head=4, normalize=True),
}


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


def test_more_queries_than_keys_are_refused():
    with pytest.raises(ValueError, match="at most the number of keys = 3, got 4"):
        geometric_weights(torch.zeros(4, 3))


def test_a_finite_logit_of_the_own_position_is_that_of_the_farthest_key():
    logits = random_logits(2, 5, 5)
    full = geometric_weights(logits.masked_fill(torch.eye(5, dtype=torch.bool), 1.0))
    others = geometric_weights(logits)
    own = torch.sigmoid(torch.tensor(1.0).double()) * (1 - logits.sigmoid()).prod(-1)
    torch.testing.assert_close(full, others + torch.diag_embed(own))


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


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("offset", [0, 2, 5])
def test_fewer_queries_and_masks_are_those_of_the_literal_formula(normalize, offset):
    weights = random_attention(n_heads=3, d_model=12, d_head=4, kind="geometric")
    attention = load_weights(build(normalize=normalize), attention_weights(weights), torch.float64)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 6, 12, generator=generator, dtype=torch.float64)
    pad_mask = torch.tensor([[False] * 6, [False] * 3 + [True] * 3])
    position_mask = torch.rand(6 - offset, 6, generator=generator) < 0.3
    mask = ~(pad_mask[:, None, None] | position_mask)
    factor = torch.randn(2, 6 - offset, 12, generator=generator, dtype=torch.float64)

    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    out = attention(ours[:, offset:], ours, mask=mask)
    learned = [weights[name].requires_grad_() for name in ("W_dir", "s_bias")]
    expected, _ = literal_attention(
        weights,
        theirs,
        normalize=normalize,
        offset=offset,
        pad_mask=pad_mask,
        position_mask=position_mask,
    )
    assert torch.allclose(out, expected, atol=1e-11)
    (out * factor).sum().backward()
    (expected * factor).sum().backward()
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-10)
    for weight, reference in zip((attention.W_dir, attention.s_bias), learned, strict=True):
        assert torch.allclose(weight.grad, reference.grad, atol=1e-10)


def with_one_hot_keys(attention, x):
    """Scores of content when key j is the unit vector j: components of the queries; and logits."""
    recorded = []
    keys = torch.eye(4).expand(len(x), 3, 4, 4).transpose(1, 2)
    attention.hook_k.add_hook(lambda k, hook: keys)
    for point in (attention.hook_content_scores, attention.hook_attn_scores):
        point.add_hook(lambda scores, hook: recorded.append(scores))
    attention(x, x)
    for point in attention.children():
        point.remove_hooks()
    return recorded


@pytest.mark.parametrize("dropped", ["query_dropout", "key_dropout"])
def test_components_of_queries_or_keys_are_dropped(dropped):
    attention = build(**{dropped: 0.3}).train()
    torch.nn.init.ones_(attention.content_bias)
    x = torch.randn(500, 4, 12, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    content, logits = with_one_hot_keys(attention, x)
    torch.manual_seed(0)
    assert torch.equal(with_one_hot_keys(attention, x)[0], content)
    assert not torch.equal(with_one_hot_keys(attention, x)[0], content)
    attention.eval()
    undropped, undropped_logits = with_one_hot_keys(attention, x)

    factors = content / undropped
    kept = factors.abs() > 1e-3
    assert torch.allclose(factors[kept], torch.tensor(1 / 0.7))
    # Each component of each query by itself; those of a key for all queries at once.
    assert torch.allclose(kept.float().mean(0), torch.tensor(0.7), atol=0.08)
    shared = (kept == kept[:, :, :1]).all()
    assert shared == (dropped == "key_dropout")
    # Directions and biases are not dropped.
    off_diagonal = ~torch.eye(4, dtype=torch.bool)
    rest, undropped_rest = logits - content, undropped_logits - undropped
    assert torch.allclose(rest[..., off_diagonal], undropped_rest[..., off_diagonal], atol=1e-5)


def test_without_dropout_rates_training_is_as_evaluation():
    attention = build()
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))
    before = torch.get_rng_state()
    assert torch.equal(attention.train()(x, x), attention.eval()(x, x))
    assert torch.equal(torch.get_rng_state(), before)
    dropping = build(query_dropout=0.5, key_dropout=0.5)
    assert torch.equal(dropping.eval()(x, x), attention(x, x))
    assert not torch.allclose(dropping.train()(x, x), attention(x, x))


def test_content_scores_can_be_changed():
    attention = build()
    x = torch.randn(1, 4, 12, generator=torch.Generator().manual_seed(1))
    activations = {}
    for name, point in attention.named_children():
        point.add_hook(lambda value, hook, name=name: activations.__setitem__(name, value))
    before = attention(x, x)
    q, k = activations["hook_q"] + attention.content_bias, activations["hook_k"]
    content = attention.scale * torch.einsum("bihd,bjhd->bhij", q, k)
    assert torch.allclose(activations["hook_content_scores"], content, atol=1e-6)
    logits = activations["hook_attn_scores"]
    attention.hook_content_scores.add_hook(lambda scores, hook: scores + 2)
    assert not torch.allclose(attention(x, x), before)
    assert torch.allclose(activations["hook_attn_scores"], logits + 2)


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
    "changes", [{"n_heads": 0}, {"d_head": 0}, {"query_dropout": 1.0}, {"key_dropout": -0.1}]
)
def test_invalid_settings_are_refused(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=name):
        build(**changes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_query_without_keys_gets_zeros_when_normalised(dtype):
    x = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    attention = GeometricAttentionConfig(n_heads=1, d_head=4, normalize=True).build(4).to(dtype)
    x.requires_grad_()
    out = attention(x, x, mask=torch.tensor([False, False, True])[None, None, None])
    assert not out[:, 2].any()
    assert out[:, :2].all()
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert not attention(x[:, :1], x[:, :1]).any()


def test_half_precision_is_computed_in_float32():
    logits = random_logits(2, 8, 8, dtype=torch.float32)
    half = geometric_weights(logits.bfloat16())
    assert half.dtype == torch.bfloat16
    single = geometric_weights(logits.bfloat16().float())
    assert torch.equal(half, single.bfloat16())
