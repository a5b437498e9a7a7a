from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformer_lens.hook_points import HookPoint

from mechanisms import ATTENTION_VARIANTS, AttentionConfig, MultiHeadAttention
from mechanisms.attention import multi_head
from mechanisms.hooking import hook_tree

GOLDEN = Path(__file__).parents[2] / "golden"
FILES = sorted(GOLDEN.glob("hyla_attn_*.npz"))
NETWORKS = {"default": "single", "mlp_relu": "relu", "mlp_linear": "linear"}
CONTRACT_EXAMPLES = {
    variant: AttentionConfig.named(variant, n_heads=4, d_head=4) for variant in ATTENTION_VARIANTS
} | {
    "rotary": AttentionConfig(n_heads=4, d_head=4, rotary=True),
    "normalized": AttentionConfig(n_heads=4, d_head=4, normalize_qk=True, bias=False),
    "own value": AttentionConfig(n_heads=4, d_head=4, d_value=3, own_value=True, nonlinear=True),
    "own dropout": AttentionConfig(n_heads=4, d_head=4, dropout=0.5, dropout_shared=False),
}
OWN_VALUE = {
    "own value": {"own_value": True, "d_value": 3},
    "own value, nonlinear": {"own_value": True, "d_value": 7, "nonlinear": True},
    "own value, no bias": {"own_value": True, "d_value": 1, "nonlinear": True, "bias": False},
}


def golden_variant(path):
    """The file's name is hyla_attn_{normalization}_{network}_{case}[_normqk].npz."""
    name = path.stem.removeprefix("hyla_attn_").removesuffix("_normqk").rsplit("_", 1)[0]
    normalization = next(n for n in ("softmax", "none", "rms_head") if name.startswith(n))
    return normalization, NETWORKS[name.removeprefix(normalization + "_")]


def golden_attention(data, variant, dtype):
    n_heads, d_model, d_head = data["W_Q"].shape
    config = AttentionConfig(
        n_heads=n_heads,
        d_head=d_head,
        d_value=data["W_V"].shape[2],
        normalization=variant[0],
        value_network=variant[1],
        normalize_qk="ln_q_w" in data,
    )
    attention = MultiHeadAttention(config, d_model).to(dtype)
    names = {name: f"{name[:4]}_w" if "ln_" in name else name for name in attention.state_dict()}
    attention.load_state_dict(
        {name: torch.tensor(data[key], dtype=dtype) for name, key in names.items()}
    )
    return attention


def hook_points(attention):
    return {
        name: module for name, module in attention.named_children() if isinstance(module, HookPoint)
    }


def record(attention):
    activations = {}
    for name, point in hook_points(attention).items():
        point.add_hook(lambda x, hook, name=name: activations.__setitem__(name, x.detach().clone()))
    return activations


def close(ours, theirs, dtype):
    """1e-5 of the largest entry in single precision, 1e-12 in double."""
    theirs = torch.as_tensor(theirs).double()
    tolerance = (1e-5 if dtype == torch.float32 else 1e-12) * max(1.0, theirs.abs().max().item())
    return (ours.double() - theirs).abs().max() <= tolerance


def test_every_variant_has_a_golden_file():
    assert {golden_variant(path) for path in FILES} == set(ATTENTION_VARIANTS.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_agrees_with_the_authors(path, dtype):
    data = np.load(path)
    attention = golden_attention(data, golden_variant(path), dtype)
    activations = record(attention)
    x_query, x_key = (torch.tensor(data[name], dtype=dtype) for name in ("x_q", "x_kv"))
    bias = torch.tensor(data["attention_bias"], dtype=dtype)
    cases = {
        "nobias_nomask": {},
        "bias_nomask": {"bias": bias},
        "bias_masked": {"bias": bias, "mask": torch.tensor(data["mask"])},
    }
    for tag, arguments in cases.items():
        out = attention(x_query, x_key, **arguments)
        assert close(out, data[f"{tag}.out"], dtype)
        for name, key in (("hook_v", "v"), ("hook_z", "z"), ("hook_pattern", "attn")):
            assert close(activations[name], data[f"{tag}.{key}"], dtype)
        if not attention.config.normalize_qk:
            assert close(activations["hook_q"], data[f"{tag}.q"], dtype)
            assert close(activations["hook_k"], data[f"{tag}.k"], dtype)
        assert close(activations["hook_raw_scores"], data[f"{tag}.scores_before_bias"], dtype)
        if tag != "bias_masked":
            assert close(activations["hook_attn_scores"], data[f"{tag}.scores_with_bias"], dtype)
        if "hook_value_hidden" in activations:
            assert close(activations["hook_value_hidden"], data[f"{tag}.hidden_post_act"], dtype)


def projection(attention, letter, head, token):
    """The query, key or value of one token and head."""
    vector = token @ getattr(attention, f"W_{letter}")[head]
    if attention.config.bias:
        vector = vector + getattr(attention, f"b_{letter}")[head]
    if attention.config.normalize_qk and letter != "V":
        centred = vector - vector.mean()
        scale = getattr(attention, f"ln_{letter.lower()}").weight
        vector = scale * centred / (centred.square().mean() + 1e-6).sqrt()
    return vector


def slow_attention(attention, x_query, x_key, mask):
    """The formulas, one query, key and head at a time."""
    config = attention.config
    heads = range(config.n_heads)
    out = torch.zeros(x_query.shape, dtype=x_query.dtype)
    for b in range(len(x_query)):
        for i, query in enumerate(x_query[b]):
            keys = range(len(x_key[b]))
            q = [projection(attention, "Q", h, query) for h in heads]
            code = torch.zeros(config.n_heads, len(keys), dtype=x_query.dtype)
            for h in heads:
                for j in keys:
                    k = projection(attention, "K", h, x_key[b, j])
                    code[h, j] = (q[h] @ k) / config.d_head**0.5
            allowed = [j for j in keys if mask[i, j]]
            if config.normalization == "softmax":
                weights = torch.zeros_like(code)
                if allowed:
                    e = code[:, allowed].exp()
                    weights[:, allowed] = e / e.sum(1, keepdim=True)
            else:
                weights = torch.zeros_like(code)
                weights[:, allowed] = code[:, allowed]
                if config.normalization == "rms_head":
                    weights = weights / (weights.square().mean(0) + 1e-6).sqrt()
            value = [[projection(attention, "V", h, x_key[b, j]) for h in heads] for j in keys]
            if config.value_network != "single":
                hidden = [sum(weights[h, j] * value[j][h] for h in heads) for j in keys]
                if config.value_network == "relu":
                    hidden = [h.clamp(min=0) for h in hidden]
                value = [[hidden[j]] * config.n_heads for j in keys]
            for h in heads:
                z = sum(weights[h, j] * value[j][h] for j in keys)
                out[b, i] += z @ attention.W_O[h]
            if config.own_value:
                own = query @ attention.W_own
                out[b, i] += (own + attention.b_own if config.bias else own) @ attention.W_O[-1]
            if config.bias:
                out[b, i] += attention.b_O
            if config.nonlinear:
                out[b, i] = out[b, i].clamp(min=0) @ attention.W_O2
                if config.bias:
                    out[b, i] += attention.b_O2
    return out


def small(variant, **settings):
    config = replace(AttentionConfig.named(variant, n_heads=3, d_head=2), **settings)
    attention = MultiHeadAttention(config, 5, generator=torch.Generator().manual_seed(1)).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in attention.named_parameters():
            if name.startswith(("b_", "ln_")):
                weight.copy_(torch.randn(weight.shape, generator=generator))
    x_query = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
    x_key = torch.randn(2, 6, 5, generator=generator, dtype=torch.float64)
    return attention, x_query, x_key


@pytest.mark.parametrize(
    "settings",
    [{}, {"normalize_qk": True, "d_head": 4}, {"bias": False}, *OWN_VALUE.values()],
    ids=["plain", "normalize_qk", "no bias", *OWN_VALUE],
)
@pytest.mark.parametrize("variant", ATTENTION_VARIANTS)
def test_agrees_with_a_loop_over_the_formulas(variant, settings):
    attention, x_query, x_key = small(variant, **settings)
    mask = torch.rand(4, 6, generator=torch.Generator().manual_seed(3)) < 0.6
    mask[1] = False
    expected = slow_attention(attention, x_query, x_key, mask)
    assert torch.allclose(attention(x_query, x_key, mask=mask[None, None]), expected, atol=1e-12)
    single = attention.float()(x_query.float(), x_key.float(), mask=mask[None, None])
    assert close(single, expected.detach(), torch.float32)


def test_the_own_value_reaches_the_output_past_the_mask():
    attention, x_query, x_key = small("softmax", **OWN_VALUE["own value"])
    assert attention.W_O.shape == (4, 3, 5)
    out = attention(x_query, x_key, mask=torch.zeros(1, 1, 4, 6, dtype=torch.bool))
    own = x_query @ attention.W_own + attention.b_own
    assert torch.allclose(out, own @ attention.W_O[3] + attention.b_O, atol=1e-12)
    attention.hook_own_value.add_hook(lambda value, hook: 0 * value)
    heads = replace(attention.config, own_value=False).build(5).double()
    weights = attention.state_dict()
    weights = {name: weights[name] for name in heads.state_dict()} | {"W_O": weights["W_O"][:3]}
    heads.load_state_dict(weights)
    assert torch.allclose(attention(x_query, x_key), heads(x_query, x_key), atol=1e-12)


@pytest.mark.parametrize("variant", ATTENTION_VARIANTS)
def test_a_query_with_all_keys_masked_gets_the_output_bias_and_finite_gradients(variant):
    attention, x_query, x_key = small(variant)
    out = attention(x_query, x_key, mask=torch.zeros(1, 1, 4, 6, dtype=torch.bool))
    assert torch.equal(out, attention.b_O.expand_as(out))
    out.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in attention.parameters())


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, set()),
        ({"rotary": True}, {"hook_rot_q", "hook_rot_k"}),
        ({"normalize_qk": True, "d_head": 4}, {"hook_norm_q", "hook_norm_k"}),
        (OWN_VALUE["own value"], {"hook_own_value"}),
    ],
    ids=["plain", "rotary", "normalize_qk", "own value"],
)
@pytest.mark.parametrize("variant", ATTENTION_VARIANTS)
def test_each_hook_point_changes_the_output(variant, settings, names):
    attention, x_query, x_key = small(variant, **settings)
    added = {"hook_rot_q", "hook_rot_k", "hook_norm_q", "hook_norm_k", "hook_own_value"}
    assert hook_points(attention).keys() & added == names
    plain = attention(x_query, x_key)
    generator = torch.Generator().manual_seed(4)
    for name, point in hook_points(attention).items():
        point.add_hook(lambda x, hook: x + torch.randn(x.shape, generator=generator, dtype=x.dtype))
        changed = attention(x_query, x_key)
        point.remove_hooks()
        assert not torch.allclose(changed, plain), name
    assert torch.equal(attention(x_query, x_key), plain)


@pytest.mark.parametrize("shared", [False, True])
def test_raw_scores_are_products_that_the_bias_leaves_as_they_were(shared):
    """Hooks may keep or return the tensor itself: the bias must not be added to it."""
    attention, x_query, x_key = small("linear")
    bias = torch.randn(1, 3, 4, 6, generator=torch.Generator().manual_seed(5)).double()
    points = hook_tree(attention) if shared else attention
    seen = {}
    for name in ("hook_q", "hook_k", "hook_raw_scores", "hook_attn_scores"):
        getattr(points, name).add_hook(lambda x, hook, name=name: seen.__setitem__(name, x))
    plain = attention(x_query, x_key, bias=bias, hooks=points)
    products = torch.einsum("bqhd,bkhd->bhqk", seen["hook_q"], seen["hook_k"]) / 2**0.5
    assert torch.allclose(seen["hook_raw_scores"], products, atol=1e-12)
    assert torch.allclose(seen["hook_attn_scores"], products + bias, atol=1e-12)

    forced = torch.zeros(2, 3, 4, 6, dtype=torch.float64)
    points.hook_raw_scores.add_hook(lambda x, hook: forced)
    changed = attention(x_query, x_key, bias=bias, hooks=points)
    assert not forced.any()
    assert torch.allclose(seen["hook_attn_scores"], bias.expand(forced.shape))
    assert not torch.allclose(changed, plain)


def test_without_hooks_the_bias_is_added_in_place(monkeypatch):
    """The scores are the largest tensor of a block: no copy of them unless a hook needs it."""
    in_place = []
    add_bias = multi_head.add_bias

    def record_in_place(scores, bias, *, in_place_calls=in_place, **arguments):
        in_place_calls.append(arguments["in_place"])
        return add_bias(scores, bias, **arguments)

    monkeypatch.setattr(multi_head, "add_bias", record_in_place)
    attention, x_query, x_key = small("softmax")
    bias = torch.randn(1, 3, 4, 6, dtype=torch.float64)
    plain = attention(x_query, x_key, bias=bias)
    attention.hook_raw_scores.add_hook(lambda x, hook: None)
    assert torch.equal(attention(x_query, x_key, bias=bias), plain)
    assert in_place == [True, False]


def test_normalized_queries_and_keys_have_unit_variance_in_every_head():
    attention, x_query, x_key = small("softmax", normalize_qk=True, d_head=4, rotary=True)
    with torch.no_grad():
        attention.ln_q.weight.fill_(1)
    activations = record(attention)
    # LayerNorm removes the scale and the mean of the projections, but for its epsilon.
    attention(100 * x_query, x_key)
    q = activations["hook_norm_q"]
    assert torch.allclose(q.mean(-1), torch.zeros(2, 4, 3).double(), atol=1e-12)
    assert torch.allclose(q.square().mean(-1), torch.ones(2, 4, 3).double(), atol=1e-6)
    assert not torch.allclose(activations["hook_q"], q)
    # The rotation comes after the norm.
    norms = activations["hook_rot_q"].norm(dim=-1)
    assert torch.allclose(norms, q.norm(dim=-1), atol=1e-12)


@pytest.mark.parametrize("variant", ATTENTION_VARIANTS)
def test_rotary_scores_are_those_of_rotated_queries_and_keys(variant):
    attention, _, x = small(variant, rotary=True)
    activations = record(attention)
    attention(x, x)
    rotation = torch.exp(1j * torch.arange(6))[:, None]  # one pair of channels
    rotated = {}
    for name in ("q", "k"):
        plain = torch.view_as_complex(activations[f"hook_{name}"])
        rotated[name] = torch.view_as_real(plain * rotation)
        assert torch.allclose(activations[f"hook_rot_{name}"], rotated[name], atol=1e-6)
    scores = (
        torch.einsum("bqhd,bkhd->bhqk", activations["hook_rot_q"], activations["hook_rot_k"])
        / 2**0.5
    )
    assert torch.allclose(activations["hook_attn_scores"], scores, atol=1e-12)


@pytest.mark.parametrize("variant", ATTENTION_VARIANTS)
def test_rotary_attention_depends_on_distances_and_not_on_positions(variant):
    attention, _, x = small(variant, rotary=True)
    near = torch.ones(6, 6, dtype=torch.bool).tril() & ~torch.ones(6, 6, dtype=torch.bool).tril(-3)
    moved = x.roll(2, dims=1)
    out = attention(x, x, mask=near[None, None])
    moved_out = attention(moved, moved, mask=near[None, None])
    # From the third token on, all keys in the window have moved along.
    assert torch.allclose(out[:, 2:4], moved_out[:, 4:], atol=1e-12)
    swapped = x[:, [1, 0, 2, 3, 4, 5]]
    assert not torch.allclose(attention(swapped, swapped)[:, 5], attention(x, x)[:, 5], atol=1e-4)


@pytest.mark.parametrize("variant", ATTENTION_VARIANTS)
def test_rotary_queries_are_the_last_of_the_keys_positions(variant):
    attention, _, x = small(variant, rotary=True)
    assert torch.allclose(attention(x[:, -2:], x), attention(x, x)[:, -2:], atol=1e-12)


def test_dropout_drops_the_same_pairs_for_all_examples_and_heads():
    attention, x_query, x_key = small("softmax", dropout=0.5)
    activations = record(attention)
    torch.manual_seed(0)
    attention.train()(x_query, x_key)
    dropped = activations["hook_pattern"] == 0
    assert torch.equal(dropped, dropped[:1, :1].expand_as(dropped))
    assert 0 < dropped.double().mean() < 1
    kept = activations["hook_pattern"][~dropped]
    attention.eval()(x_query, x_key)
    assert torch.allclose(kept, 2 * activations["hook_pattern"][~dropped])


def test_dropout_can_drop_other_pairs_in_each_example_and_head():
    attention, x_query, x_key = small("softmax", dropout=0.5, dropout_shared=False)
    activations = record(attention)
    torch.manual_seed(0)
    attention.train()(x_query, x_key)
    pattern = activations["hook_pattern"]
    dropped = (pattern == 0).flatten(0, 1).flatten(1)
    assert len({tuple(row.tolist()) for row in dropped}) == pattern.shape[0] * pattern.shape[1]
    attention.eval()(x_query, x_key)
    kept = pattern != 0
    assert torch.allclose(pattern[kept], 2 * activations["hook_pattern"][kept])


@pytest.mark.parametrize("shared", [True, False])
def test_each_pair_is_dropped_with_the_same_probability(shared):
    pattern = torch.ones(6, 5, 100, 100)
    dropped = (multi_head.drop_pairs(pattern, 0.3, shared=shared) == 0).double()
    means = dropped.mean((2, 3))
    # Five standard errors of the share of 10,000 pairs.
    assert ((means - 0.3).abs() < 5 * (0.21 / 1e4) ** 0.5).all()
    flat = dropped.flatten(0, 1).flatten(1)
    correlations = torch.corrcoef(flat)[0, 1:]
    assert (correlations > 0.99).all() if shared else (correlations.abs() < 0.05).all()


def test_dropout_keeps_the_mean_in_double_precision():
    pattern = torch.ones(2, 3, 400, 500, dtype=torch.float64)
    dropped = multi_head.drop_pairs(pattern, 0.1, shared=True)
    assert dropped.dtype == torch.float64
    assert dropped.unique().tolist() == pytest.approx([0, 1 / 0.9], rel=1e-5)
    # Five standard errors of the share of 200,000 pairs.
    assert (dropped == 0)[0, 0].double().mean() == pytest.approx(0.1, abs=5 * (0.09 / 2e5) ** 0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_heads": 0, "d_head": 2}, "n_heads must be at least 1, got 0"),
        ({"n_heads": 1, "d_head": 2, "normalization": "max"}, "normalization must be one of"),
        ({"n_heads": 1, "d_head": 2, "value_network": "tanh"}, "value_network must be one of"),
        ({"n_heads": 1, "d_head": 2, "d_value": 0}, "d_value"),
        ({"n_heads": 1, "d_head": 2, "dropout": 1.0}, r"dropout must be in \[0, 1\)"),
        (
            {"n_heads": 1, "d_head": 3, "rotary": True},
            "d_head must be even with rotary=True, got 3",
        ),
        (
            {"n_heads": 1, "d_head": 1, "normalize_qk": True},
            "d_head must be at least 2 with normalize_qk=True, got 1",
        ),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**settings)


def test_an_unknown_variant_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"softmax.*hyla.*'hila'"):
        AttentionConfig.named("hila", n_heads=1, d_head=1)
