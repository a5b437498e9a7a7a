import math

import pytest
import torch

import mechanisms
from mechanisms.attention.coda import CodaAttentionConfig
from mechanisms.attention.multi_head import AttentionConfig
from mechanisms.attention.quasi import QuasiAttentionConfig
from mechanisms.attention.relative import RelativeAttentionConfig
from mechanisms.models.decomposable_attention import (
    DecomposableAttention,
    DecomposableAttentionConfig,
    Linear,
)

PAD = -1
VARIANTS = {
    "softmax": {},
    "coda": {"composition": QuasiAttentionConfig(alpha=0.8, beta=0.4)},
    "apart": {"composition": QuasiAttentionConfig(beta=0.4), "shared": False},
    "centred": {
        "composition": QuasiAttentionConfig(
            beta=0.4, affinity_centring="matrix", gate_centring="row", doubled=True
        )
    },
    "linear F": {
        "composition": QuasiAttentionConfig(beta=0.4),
        "projection": "linear",
        "shared": False,
    },
    "linear F, softmax": {"projection": "linear"},
}
MULTI_HEAD = {
    f"{name} heads": {"attention": AttentionConfig.named(name, n_heads=2, d_head=3)}
    for name in ("softmax", "linear", "hyla")
} | {
    "coda heads": {
        "attention": CodaAttentionConfig(
            n_heads=2, d_head=3, composition=QuasiAttentionConfig(gate_centring="row")
        )
    }
}


def build(**changes):
    sizes = {"d_input": 9, "d_output": 3, "d_model": 6, "padding": PAD}
    config = DecomposableAttentionConfig(**sizes | changes)
    model = DecomposableAttention(config, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    return model


def pairs():
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randint(9, (4, n), generator=generator) for n in (5, 4))
    a[0, 3:], b[0, 2:], b[1, 3:] = PAD, PAD, PAD
    return a, b


def projected(layers, x):
    """A `TwoLayers` or a `Linear`."""
    if isinstance(layers, Linear):
        return x @ layers.W + layers.b
    hidden = (x @ layers.W_in + layers.b_in).clamp(min=0)
    return (hidden @ layers.W_out + layers.b_out).clamp(min=0)


def literal(model, a, b):
    """Equations 1 to 10 for one pair: one token of a, one of b and one feature at a time."""
    c = model.config
    a, b = [int(t) for t in a if t != PAD], [int(t) for t in b if t != PAD]
    x_a, x_b = [model.W_E[t] for t in a], [model.W_E[t] for t in b]
    if c.attention is not None:
        tokens_a, tokens_b = torch.stack(x_a)[None], torch.stack(x_b)[None]
        align = c.attention.build(c.d_model).double()
        align.load_state_dict(model.align.state_dict())
        aligned_a, aligned_b = align(tokens_a, tokens_b)[0], align(tokens_b, tokens_a)[0]
    else:
        aligned_a, aligned_b = literal_alignment(model, x_a, x_b)
    sums = []
    for x, aligned in ((x_a, aligned_a), (x_b, aligned_b)):
        pairs = [torch.cat(pair) for pair in zip(x, aligned, strict=True)]
        sums.append(sum(projected(model.compare, pair) for pair in pairs))
    return projected(model.aggregate, torch.cat(sums)) @ model.W_U + model.b_U


def literal_alignment(model, x_a, x_b):
    c, n = model.config, model.config.d_model
    a, b = x_a, x_b
    F_E, F_N = model.attend, model.attend if c.shared else model.attend_distance
    E, N = ([[0.0] * len(b) for _ in a] for _ in range(2))
    for i in range(len(a)):
        for j in range(len(b)):
            f_a, f_b = projected(F_E, x_a[i]).tolist(), projected(F_E, x_b[j]).tolist()
            g_a, g_b = projected(F_N, x_a[i]).tolist(), projected(F_N, x_b[j]).tolist()
            for d in range(n):
                E[i][j] += (c.composition.alpha if c.composition else 1) * f_a[d] * f_b[d]
                if c.composition:
                    N[i][j] -= c.composition.beta * abs(g_a[d] - g_b[d])
    M_a = [[0.0] * len(b) for _ in a]
    M_b = [[0.0] * len(a) for _ in b]
    entries = [value for row in E for value in row]
    for i in range(len(a)):
        for j in range(len(b)):
            if c.composition is None:
                M_a[i][j] = math.exp(E[i][j]) / sum(math.exp(e) for e in E[i])
                M_b[j][i] = math.exp(E[i][j]) / sum(math.exp(row[j]) for row in E)
                continue
            affinity, dissimilarity = E[i][j], N[i][j]
            if c.composition.affinity_centring == "matrix":
                affinity -= sum(entries) / len(entries)
            if c.composition.gate_centring == "row":
                dissimilarity -= sum(N[i]) / len(N[i])
            M_a[i][j] = math.tanh(affinity) / (1 + math.exp(-dissimilarity))
            M_a[i][j] *= 2 if c.composition.doubled else 1
            M_b[j][i] = M_a[i][j]
    return tuple(
        [sum(w * token for w, token in zip(row, x, strict=True)) for row in M]
        for M, x in ((M_a, x_b), (M_b, x_a))
    )


ALL_VARIANTS = VARIANTS | MULTI_HEAD


@pytest.mark.parametrize("changes", ALL_VARIANTS.values(), ids=ALL_VARIANTS)
def test_every_variant_is_the_literal_formula(changes):
    model, (a, b) = build(**changes), pairs()
    with torch.no_grad():
        logits = model(a, b)
        assert logits.shape == (4, 1, 3)
        for pair in range(4):
            torch.testing.assert_close(logits[pair, 0], literal(model, a[pair], b[pair]))


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_hooks_show_the_alignment_and_change_it(changes):
    model, (a, b) = build(**changes), pairs()
    logits, cache = model.run_with_cache(a, b)
    pattern = cache["hook_pattern"]
    assert pattern.shape == (4, 1, 5, 4)
    assert not pattern[0, 0, :, 2:].any()
    aligned = pattern[:, 0] @ cache["hook_embed_b"]
    torch.testing.assert_close(cache["hook_aligned_a"], aligned)
    pattern_b = cache["hook_pattern_b"][:, 0] if "hook_pattern_b" in cache else pattern[:, 0].mT
    torch.testing.assert_close(cache["hook_aligned_b"], pattern_b @ cache["hook_embed_a"])
    if "composition" in changes:
        expected = torch.tanh(cache["hook_affinity"]) * cache["hook_gate"]
        torch.testing.assert_close(pattern[2:], expected[2:])
    else:
        # Only for token queries: the rows of padding queries are 0.
        torch.testing.assert_close(pattern[1:].sum(-1), torch.ones(3, 1, 5).double())
    for name in model.hook_dict:
        hooks = [(name, lambda value, hook: 0.5 * value.roll(1, dims=0) + value.roll(1, dims=-1))]
        changed = model.run_with_hooks(a, b, fwd_hooks=hooks)
        assert not torch.allclose(changed, logits, atol=1e-4), name


@pytest.mark.parametrize("changes", MULTI_HEAD.values(), ids=MULTI_HEAD)
def test_multi_head_attention_has_hook_points_for_each_direction(changes):
    model, (a, b) = build(**changes), pairs()
    logits, cache = model.run_with_cache(a, b)
    assert cache["align_a.hook_pattern"].shape == (4, 2, 5, 4)
    assert cache["align_b.hook_pattern"].shape == (4, 2, 4, 5)
    assert not cache["align_a.hook_pattern"][0, :, :, 2:].any()
    assert "align.hook_pattern" not in cache
    for name in model.hook_dict:
        hooks = [(name, lambda value, hook: 0.5 * value.roll(1, dims=0) + value.roll(1, dims=-1))]
        changed = model.run_with_hooks(a, b, fwd_hooks=hooks)
        assert not torch.allclose(changed, logits, atol=1e-5), name


@pytest.mark.parametrize("changes", ALL_VARIANTS.values(), ids=ALL_VARIANTS)
def test_padding_has_no_effect_and_empty_sequences_are_allowed(changes):
    model, (a, b) = build(**changes), pairs()
    longer = torch.cat([a, torch.full((4, 2), PAD)], 1)
    torch.testing.assert_close(model(longer, b), model(a, b))
    model(a, torch.full_like(b, PAD)).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()


@pytest.mark.parametrize(
    ("projection", "low", "high"), [("two_layers", 0, 0), ("linear", 0.4, 0.6)]
)
def test_only_a_linear_projection_lets_coda_subtract(projection, low, high):
    """F of Parikh et al. ends in a relu: no product of two outputs is negative, and so no M."""
    composition = QuasiAttentionConfig(beta=0.1)
    config = DecomposableAttentionConfig(
        d_input=100, d_output=2, padding=PAD, composition=composition, projection=projection
    )
    model = DecomposableAttention(config, generator=torch.Generator().manual_seed(0))
    a, b = torch.arange(100).view(2, 10, 5).unbind()
    with torch.no_grad():
        pattern = model.run_with_cache(a, b)[1]["hook_pattern"]
    assert low <= (pattern < 0).double().mean() <= high
    assert pattern.abs().mean() > 0.01


def test_padding_may_be_an_id():
    model, (a, b) = build(padding=0), pairs()
    a, b = a.clamp(min=1), b.clamp(min=1)
    other = torch.cat([b, torch.zeros(4, 3, dtype=torch.int64)], 1)
    torch.testing.assert_close(model(a, other), model(a, b))


def test_dropout_is_applied_in_training_only():
    model, (a, b) = build(dropout=0.5), pairs()
    assert not torch.equal(model(a, b), model(a, b))
    model.eval()
    assert torch.equal(model(a, b), model(a, b))


@pytest.mark.parametrize("changes", ALL_VARIANTS.values(), ids=ALL_VARIANTS)
def test_it_keeps_the_rules_of_a_mechanism(changes):
    mechanisms.check(build(**changes).float(), pairs())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 0}, r"d_model must be at least 1, got 0"),
        ({"shared": False}, r"shared must be True without a composition"),
        (
            {**MULTI_HEAD["hyla heads"], "composition": QuasiAttentionConfig()},
            r"attention must be None with a composition",
        ),
        (
            {"attention": RelativeAttentionConfig(n_heads=2, d_head=4)},
            r"attention must not measure distances",
        ),
        ({"projection": "relu"}, r"projection must be one of two_layers, linear, got 'relu'"),
        ({"dropout": -0.1}, r"dropout must be in \[0, 1\), got -0\.1"),
    ],
)
def test_invalid_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes)
