from pathlib import Path

import numpy as np
import pytest
import torch

from mechanisms import ATTENTION_VARIANTS, AttentionConfig, MultiHeadAttention

GOLDEN = Path(__file__).parents[2] / "golden"
FILES = sorted(GOLDEN.glob("hyla_attn_*.npz"))
NETWORKS = {"default": "single", "mlp_relu": "relu", "mlp_linear": "linear"}
CONTRACT_EXAMPLES = {
    variant: AttentionConfig.named(variant, n_heads=4, d_head=4) for variant in ATTENTION_VARIANTS
} | {"rotary": AttentionConfig(n_heads=4, d_head=4, rotary=True)}


def golden_variant(path):
    """The file's name is hyla_attn_{normalization}_{network}_{case}.npz."""
    name = path.stem.removeprefix("hyla_attn_").rsplit("_", 1)[0]
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
    )
    attention = MultiHeadAttention(config, d_model).to(dtype)
    names = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")
    attention.load_state_dict({name: torch.tensor(data[name], dtype=dtype) for name in names})
    return attention


def record(attention):
    activations = {}
    for name, point in attention.named_children():
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
        for name, key in (("hook_q", "q"), ("hook_k", "k"), ("hook_v", "v"), ("hook_z", "z")):
            assert close(activations[name], data[f"{tag}.{key}"], dtype)
        assert close(activations["hook_pattern"], data[f"{tag}.attn"], dtype)
        if tag != "bias_masked":
            assert close(activations["hook_attn_scores"], data[f"{tag}.scores_with_bias"], dtype)
        if "hook_value_hidden" in activations:
            assert close(activations["hook_value_hidden"], data[f"{tag}.hidden_post_act"], dtype)


def slow_attention(attention, x_query, x_key, mask):
    """The formulas, one query, key and head at a time."""
    config = attention.config
    heads = range(config.n_heads)
    out = torch.zeros(x_query.shape, dtype=x_query.dtype)
    for b in range(len(x_query)):
        for i, query in enumerate(x_query[b]):
            keys = range(len(x_key[b]))
            q = [query @ attention.W_Q[h] + attention.b_Q[h] for h in heads]
            code = torch.zeros(config.n_heads, len(keys), dtype=x_query.dtype)
            for h in heads:
                for j in keys:
                    k = x_key[b, j] @ attention.W_K[h] + attention.b_K[h]
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
            value = [
                [x_key[b, j] @ attention.W_V[h] + attention.b_V[h] for h in heads] for j in keys
            ]
            if config.value_network != "single":
                hidden = [sum(weights[h, j] * value[j][h] for h in heads) for j in keys]
                if config.value_network == "relu":
                    hidden = [h.clamp(min=0) for h in hidden]
                value = [[hidden[j]] * config.n_heads for j in keys]
            for h in heads:
                z = sum(weights[h, j] * value[j][h] for j in keys)
                out[b, i] += z @ attention.W_O[h]
            out[b, i] += attention.b_O
    return out


def small(variant, **settings):
    config = AttentionConfig.named(variant, n_heads=3, d_head=2, **settings)
    attention = MultiHeadAttention(config, 5, generator=torch.Generator().manual_seed(1)).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for bias in (attention.b_Q, attention.b_K, attention.b_V, attention.b_O):
            bias.copy_(torch.randn(bias.shape, generator=generator))
    x_query = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
    x_key = torch.randn(2, 6, 5, generator=generator, dtype=torch.float64)
    return attention, x_query, x_key


@pytest.mark.parametrize("variant", ATTENTION_VARIANTS)
def test_agrees_with_a_loop_over_the_formulas(variant):
    attention, x_query, x_key = small(variant)
    mask = torch.rand(4, 6, generator=torch.Generator().manual_seed(3)) < 0.6
    mask[1] = False
    expected = slow_attention(attention, x_query, x_key, mask)
    assert torch.allclose(attention(x_query, x_key, mask=mask[None, None]), expected, atol=1e-12)


@pytest.mark.parametrize("variant", ATTENTION_VARIANTS)
def test_a_query_with_all_keys_masked_gets_the_output_bias_and_finite_gradients(variant):
    attention, x_query, x_key = small(variant)
    out = attention(x_query, x_key, mask=torch.zeros(1, 1, 4, 6, dtype=torch.bool))
    assert torch.equal(out, attention.b_O.expand_as(out))
    out.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in attention.parameters())


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("variant", ATTENTION_VARIANTS)
def test_each_hook_point_changes_the_output(variant, rotary):
    attention, x_query, x_key = small(variant, rotary=rotary)
    rotated = {"hook_rot_q", "hook_rot_k"} & dict(attention.named_children()).keys()
    assert len(rotated) == (2 if rotary else 0)
    plain = attention(x_query, x_key)
    for name, point in attention.named_children():
        point.add_hook(lambda x, hook: x * 1.5 + 0.1 * torch.arange(x.shape[1]).view(1, -1, 1, 1))
        changed = attention(x_query, x_key)
        point.remove_hooks()
        assert not torch.allclose(changed, plain), name
    assert torch.equal(attention(x_query, x_key), plain)


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
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**settings)


def test_an_unknown_variant_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"softmax.*hyla.*'hila'"):
        AttentionConfig.named("hila", n_heads=1, d_head=1)
