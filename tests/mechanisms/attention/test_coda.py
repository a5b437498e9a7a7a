import cmath
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mechanisms.attention import quasi
from mechanisms.attention.coda import CodaAttention, CodaAttentionConfig
from mechanisms.attention.quasi import QuasiAttentionConfig
from mechanisms.layers.feed_forward import FeedForwardConfig
from mechanisms.models.transformer import Transformer, TransformerConfig

CONTRACT_EXAMPLES = {
    "": CodaAttentionConfig(n_heads=4, d_head=4),
    "centred by row": CodaAttentionConfig(
        n_heads=4, d_head=4, composition=QuasiAttentionConfig(gate_centring="row")
    ),
    "centred by matrix": CodaAttentionConfig(
        n_heads=4, d_head=4, composition=QuasiAttentionConfig(gate_centring="matrix")
    ),
    "rotary": CodaAttentionConfig(
        n_heads=4, d_head=4, composition=QuasiAttentionConfig(gate_centring="row"), rotary=True
    ),
    "no bias": CodaAttentionConfig(n_heads=4, d_head=4, bias=False, shared=False),
    "own dropout": CodaAttentionConfig(n_heads=4, d_head=4, dropout=0.5, dropout_shared=False),
}
FUNCTIONS = {
    "tanh": math.tanh,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "arctan": math.atan,
    "arctan_scaled": lambda x: math.atan(x) / (math.pi / 2),
    "algebraic": lambda x: x / math.sqrt(1 + x * x),
}
PAIRWISE = ("hook_attn_scores", "hook_affinity", "hook_dissimilarity", "hook_gate", "hook_pattern")


def build(d_model=8, composition=None, **changes):
    sizes = {"n_heads": 3, "d_head": 4, "d_value": 5}
    config = CodaAttentionConfig(
        **sizes | changes, composition=QuasiAttentionConfig(**composition or {})
    )
    attention = config.build(d_model, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            if not parameter.any():
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    return attention


def tokens(n_batch=2, n=4, d_model=8, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n_batch, n, d_model, generator=generator, dtype=torch.float64)


def centring_pairs(i, j, n, mask, centring):
    """The pairs over which E_ij or N_ij is centred."""
    row = [(i, t) for t in range(n) if mask[i][t]]
    if centring == "row":
        return row
    # A padding mask: the same keys for all queries, and padding does not count as a query.
    real = [t for t in range(n) if mask[0][t]]
    return [(s, t) for s in real for t in real]


def rotated(vector, position):
    """A query or key of the affinity with rotary positions, as rotated complex numbers."""
    half = len(vector) // 2
    numbers = [
        complex(vector[c], vector[c + half]) * cmath.exp(1j * position * 10_000 ** (-c / half))
        for c in range(half)
    ]
    return [number.real for number in numbers] + [number.imag for number in numbers]


def literal(attention, x, mask, bias):
    """One head, query, key and feature at a time."""
    config = attention.config
    c = config.composition
    scale = 1 / math.sqrt(config.d_head) if config.scaled else 1
    batch, n, _ = x.shape
    out = attention.b_O.repeat(batch, n, 1)
    patterns = torch.zeros(batch, config.n_heads, n, n, dtype=torch.float64)

    def project(name, h, token):
        weight, bias = getattr(attention, f"W_{name}")[h], getattr(attention, f"b_{name}")[h]
        return (weight.T @ token + bias).tolist()

    suffix = "" if config.shared else "_distance"
    for b in range(batch):
        for h in range(config.n_heads):
            q, k, v, x_, y_ = (
                [project(name, h, token) for token in x[b]]
                for name in ("Q", "K", "V", f"Q{suffix}", f"K{suffix}")
            )
            if config.rotary:
                q, k = ([rotated(row, i) for i, row in enumerate(rows)] for rows in (q, k))
            E = [[0.0] * n for _ in range(n)]
            N = [[0.0] * n for _ in range(n)]
            for i in range(n):
                for j in range(n):
                    for d in range(config.d_head):
                        E[i][j] += scale * c.alpha * q[i][d] * k[j][d]
                        N[i][j] -= scale * c.beta * abs(x_[i][d] - y_[j][d])
                    E[i][j] += bias[0, h, i, j].item()
            for i in range(n):
                for j in range(n):
                    if not mask[i][j]:
                        continue
                    both = []
                    for values, centring in ((E, c.affinity_centring), (N, c.gate_centring)):
                        mean = 0.0
                        if centring != "none":
                            pairs = centring_pairs(i, j, n, mask, centring)
                            mean = sum(values[s][t] for s, t in pairs) / len(pairs)
                        both.append(values[i][j] - mean)
                    weight = FUNCTIONS[c.affinity](both[0]) * FUNCTIONS[c.gate](both[1])
                    weight *= 2 if c.doubled else 1
                    patterns[b, h, i, j] = weight
                    value = torch.tensor(v[j], dtype=torch.float64)
                    out[b, i] = out[b, i] + weight * value @ attention.W_O[h]
    return out, patterns


VARIANTS = {
    "default": {},
    "unscaled": {"scaled": False},
    "apart": {"shared": False},
    "factors": {"composition": {"alpha": 0.7, "beta": 0.3}},
    "doubled": {"composition": {"doubled": True}},
    "rows": {"composition": {"affinity_centring": "row", "gate_centring": "row"}},
    "matrix": {"composition": {"affinity_centring": "matrix", "gate_centring": "row"}},
    "gate by matrix": {"composition": {"gate_centring": "matrix"}},
    "arctan, algebraic": {"composition": {"affinity": "arctan", "gate": "algebraic"}},
    "sigmoid, tanh": {"composition": {"affinity": "sigmoid", "gate": "tanh"}},
    "scaled arctan": {"composition": {"affinity": "arctan_scaled", "gate": "arctan_scaled"}},
    "rotary": {"rotary": True},
    "rotary, apart, rows": {
        "rotary": True,
        "shared": False,
        "composition": {"affinity_centring": "row", "gate_centring": "row"},
    },
}
MASKS = {
    "all": torch.ones(4, 4, dtype=torch.bool),
    "padding": torch.tensor([True, True, True, False]).repeat(4, 1),
    "causal": torch.ones(4, 4, dtype=torch.bool).tril(),
}


@pytest.mark.parametrize(
    ("variant", "masked"),
    [
        (variant, masked)
        for variant in VARIANTS
        for masked in MASKS
        # Refused, see below.
        if "matrix" not in variant or masked != "causal"
    ],
)
def test_every_variant_is_the_literal_formula(variant, masked):
    attention, x, mask = build(**VARIANTS[variant]).eval(), tokens(), MASKS[masked]
    bias = torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(4)).double()
    with torch.no_grad():
        out, pattern = literal(attention, x, mask.tolist(), bias)
        out_without_hooks = attention(x, x, bias=bias, mask=mask[None, None])
        kept = {}
        attention.hook_pattern.add_hook(lambda value, hook: kept.update(pattern=value))
        out_with_hooks = attention(x, x, bias=bias, mask=mask[None, None])
    # The output at padding is undefined, since it counts neither as key nor as query.
    real = slice(3) if masked == "padding" else slice(None)
    torch.testing.assert_close(out_without_hooks[:, real], out[:, real])
    torch.testing.assert_close(out_with_hooks, out_without_hooks)
    torch.testing.assert_close(kept["pattern"][:, :, real], pattern[:, :, real])


@pytest.mark.parametrize("pairs", [1, 50, 2**18])
@pytest.mark.parametrize("bias_shape", [None, (1, 3, 4, 6), (2, 1, 4, 6)])
def test_hooks_and_chunk_sizes_change_neither_outputs_nor_gradients(pairs, bias_shape, monkeypatch):
    monkeypatch.setattr("mechanisms.attention.quasi._CPU_PAIRS", pairs)
    attention = build(shared=False, composition={"gate_centring": "row"})
    x, keys = tokens().requires_grad_(), tokens(n=6, seed=3).requires_grad_()
    mask = torch.rand(2, 1, 4, 6, generator=torch.Generator().manual_seed(5)) < 0.7
    leaves = [x, keys, *attention.parameters()]
    bias = None
    if bias_shape is not None:
        bias = torch.ones(bias_shape, dtype=torch.float64, requires_grad=True)
        leaves.append(bias)
    weight = tokens(seed=7)
    outputs = [attention(x, keys, bias=bias, mask=mask)]
    attention.hook_gate.add_hook(lambda value, hook: value)
    outputs.append(attention(x, keys, bias=bias, mask=mask))
    torch.testing.assert_close(*outputs)
    gradients = [torch.autograd.grad((out * weight).sum(), leaves) for out in outputs]
    torch.testing.assert_close(*gradients)


def test_a_gradient_is_the_difference_quotient():
    attention = build(n_heads=1, d_head=2, d_value=2)
    x = tokens(n_batch=1, n=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: attention(x, x), (x,))


def test_hooks_change_nothing_in_single_precision():
    attention, x = build().float(), tokens().float()
    without_hooks = attention(x, x)
    attention.hook_affinity.add_hook(lambda value, hook: value)
    torch.testing.assert_close(without_hooks, attention(x, x), rtol=1e-5, atol=1e-5)


def test_tokens_are_added_subtracted_or_deleted():
    """A query adds, subtracts or deletes a token, with q and k chosen for each case."""
    attention = build(
        d_model=2,
        n_heads=1,
        d_head=2,
        d_value=2,
        scaled=False,
        shared=False,
        composition={"doubled": True},
    )
    with torch.no_grad():
        for name, parameter in attention.named_parameters():
            parameter.zero_()
            if name in ("W_V", "W_O"):
                parameter[0].copy_(torch.eye(2))
            elif name in ("W_Q", "W_K"):
                parameter[0].copy_(10 * torch.eye(2))
            elif name == "W_K_distance":
                # The second feature of a key is its distance from every query.
                parameter[0, 1, 1] = 100
    query = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    keys = torch.tensor([[[1.0, 0.0], [-1.0, 0.0], [1.0, 1.0]]], dtype=torch.float64)
    kept = {}
    attention.hook_pattern.add_hook(lambda value, hook: kept.update(pattern=value))
    out = attention(query, keys)
    torch.testing.assert_close(
        kept["pattern"].flatten(), torch.tensor([1, -1, 0], dtype=torch.float64)
    )
    # Both the added and the subtracted token move the query the same way.
    torch.testing.assert_close(out, torch.tensor([[[2.0, 0.0]]], dtype=torch.float64))


def test_a_query_with_all_keys_masked_gets_the_output_bias():
    for centring in ("none", "row"):
        composition = {"affinity_centring": centring, "gate_centring": centring}
        attention, x = build(composition=composition), tokens().requires_grad_()
        mask = torch.ones(4, 4, dtype=torch.bool)
        mask[2] = False
        out = attention(x, x, mask=mask[None, None])
        torch.testing.assert_close(out[:, 2], attention.b_O.expand(2, -1))
        out.sum().backward()
        assert x.grad.isfinite().all()


def test_masked_tokens_have_no_effect():
    for composition in (
        {},
        {"affinity_centring": "row", "gate_centring": "row"},
        {"affinity_centring": "matrix", "gate_centring": "matrix"},
    ):
        attention, x = build(composition=composition), tokens()
        padding = torch.tensor([True, True, True, False])[None, None, None]
        other = x.clone()
        other[:, 3] = 17
        real = x[:, :3]
        short = attention(real, real)
        for padded in (x, other):
            torch.testing.assert_close(attention(padded, padded, mask=padding)[:, :3], short)
        if not attention.config.composition.centres_matrix:
            causal = MASKS["causal"][None, None]
            now, then = attention(x, x, mask=causal), attention(other, other, mask=causal)
            torch.testing.assert_close(now[:, :3], then[:, :3])


def test_centring_by_matrix_is_refused_if_it_would_leak():
    x = tokens()
    for name in ("affinity_centring", "gate_centring"):
        attention = build(composition={name: "matrix"})
        with pytest.raises(ValueError, match=r"'matrix' with a mask that differs between queries"):
            attention(x, x, mask=MASKS["causal"][None, None])
        for n_queries, n_keys in ((2, 4), (4, 2)):
            with pytest.raises(
                ValueError, match=rf"'matrix' with {n_queries} queries and {n_keys} k"
            ):
                attention(x[:, -n_queries:], x[:, -n_keys:])
        assert attention(x, x, mask=MASKS["padding"][None, None]).isfinite().all()


def test_centring_by_matrix_between_two_sequences_is_refused_with_a_mask():
    """The mask of the keys says nothing about which queries are padding."""
    attention, a, b = build(composition={"gate_centring": "matrix"}), tokens(), tokens(seed=3)
    with pytest.raises(ValueError, match=r"'matrix' with a mask where x_query is not x_key"):
        attention(a, b, mask=MASKS["padding"][None, None])
    kept = {}
    attention.hook_dissimilarity.add_hook(lambda value, hook: kept.update(value=value))
    assert attention(a, b).isfinite().all()
    torch.testing.assert_close(kept["value"].mean((2, 3)), torch.zeros(2, 3).double())


def test_rotary_queries_are_the_last_of_the_keys_positions():
    attention, x = build(rotary=True), tokens()
    torch.testing.assert_close(attention(x[:, -2:], x), attention(x, x)[:, -2:])


def test_rotary_patterns_depend_on_distances_only():
    """With the same token at all positions, pairs at the same distance have the same weight."""
    attention, x = build(rotary=True), tokens(n=1).expand(-1, 5, -1)
    kept = {}
    for name in ("hook_pattern", "hook_dissimilarity"):
        getattr(attention, name).add_hook(
            lambda value, hook, name=name: kept.__setitem__(name, value.detach())
        )
    attention(x, x)
    pattern = kept["hook_pattern"]
    torch.testing.assert_close(pattern[..., 1:, 1:], pattern[..., :-1, :-1])
    assert not torch.allclose(pattern[..., 4, 3], pattern[..., 4, 2], atol=1e-3)
    gates = kept["hook_dissimilarity"]
    torch.testing.assert_close(gates, gates[..., :1, :1].expand_as(gates))


@pytest.mark.parametrize(
    "changes",
    [{}, {"shared": False}, {"rotary": True}],
    ids=["shared", "apart", "rotary"],
)
def test_each_hook_point_changes_the_output(changes):
    attention, x = build(**changes), tokens()
    before = attention(x, x)
    names = [name for name, _ in attention.named_children() if name.startswith("hook_")]
    assert set(PAIRWISE) < set(names)
    assert ({"hook_rot_q", "hook_rot_k"} <= set(names)) == attention.config.rotary
    for name in names:
        point = getattr(attention, name)
        point.add_hook(lambda value, hook: value.flip(-1) * 1.5 + value.roll(1, dims=0))
        assert not torch.allclose(attention(x, x), before, atol=1e-3), name
        point.remove_hooks()


def test_hook_points_show_the_factors_of_the_pattern():
    attention, x = build(), tokens()
    kept = {}
    for name in PAIRWISE:
        getattr(attention, name).add_hook(
            lambda value, hook, name=name: kept.__setitem__(name, value.detach().clone())
        )
    mask = MASKS["causal"]
    attention(x, x, mask=mask[None, None])
    expected = torch.tanh(kept["hook_affinity"]) * torch.sigmoid(kept["hook_dissimilarity"]) * mask
    torch.testing.assert_close(kept["hook_pattern"], expected)
    torch.testing.assert_close(kept["hook_gate"], torch.sigmoid(kept["hook_dissimilarity"]))
    torch.testing.assert_close(kept["hook_attn_scores"], kept["hook_affinity"])
    assert (kept["hook_dissimilarity"] <= 0).all()


@pytest.mark.parametrize("shared", [True, False])
def test_without_biases_it_is_as_with_biases_of_0(shared):
    without, x = build(bias=False, shared=shared), tokens()
    assert not any(name.startswith("b_") for name in without.state_dict())
    with_biases = build(shared=shared)
    missing, unexpected = with_biases.load_state_dict(without.state_dict(), strict=False)
    assert len(missing) == (4 if shared else 6)
    assert not unexpected
    with torch.no_grad():
        for name in missing:
            with_biases.get_parameter(name).zero_()
    torch.testing.assert_close(without(x, x), with_biases(x, x))
    # Two sequences.
    torch.testing.assert_close(without(x[:, :2], x), with_biases(x[:, :2], x))


@pytest.mark.parametrize("shared", [True, False])
def test_dropout_drops_the_same_pairs_of_all_examples_and_heads_or_other_ones(shared, monkeypatch):
    # Several chunks of examples and heads, as for large inputs.
    monkeypatch.setattr(quasi, "_CPU_PAIRS", 36 * 2)
    attention, x = build(dropout=0.5, dropout_shared=shared), tokens(n=6)
    torch.manual_seed(0)
    without_hooks = attention(x, x)
    patterns = []
    attention.hook_pattern.add_hook(lambda value, hook: patterns.append(value))
    torch.manual_seed(0)
    with_hooks = attention(x, x)
    dropped = (patterns[0] == 0).flatten(0, 1).flatten(1)
    assert len({tuple(row.tolist()) for row in dropped}) == (1 if shared else 2 * 3)
    # Without hooks, in chunks, the same pairs are dropped.
    torch.testing.assert_close(without_hooks, with_hooks)


@pytest.mark.parametrize("shared", [True, False])
def test_dropout_is_applied_in_training_only(shared):
    attention, x = build(dropout=0.5, dropout_shared=shared), tokens()
    assert not torch.equal(attention(x, x), attention(x, x))
    # The backward pass uses the dropout mask of the forward pass.
    torch.manual_seed(0)
    without_hooks = torch.autograd.grad(attention(x, x).square().sum(), attention.W_V)[0]
    attention.hook_pattern.add_hook(lambda value, hook: value)
    torch.manual_seed(0)
    with_hooks = torch.autograd.grad(attention(x, x).square().sum(), attention.W_V)[0]
    torch.testing.assert_close(without_hooks, with_hooks)
    attention.eval()
    assert torch.equal(attention(x, x), attention(x, x))


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // 8)
        return result


@pytest.mark.parametrize("hooked", [False, True])
def test_no_tensor_has_all_pairs_and_features(hooked):
    attention, x = build(d_head=16), tokens(n=32)
    if hooked:
        attention.hook_pattern.add_hook(lambda value, hook: value)
    with LargestTensor() as largest:
        attention(x, x).sum().backward()
    assert 2 * 3 * 32 * 32 <= largest.elements < 2 * 2 * 3 * 32 * 32


@pytest.mark.parametrize("shared", [False, True])
def test_the_transformer_runs_with_coda_attention(shared):
    config = TransformerConfig(
        d_input=7,
        d_output=7,
        d_model=8,
        n_layers=2,
        attention=CodaAttentionConfig(n_heads=2, d_head=4),
        feed_forward=FeedForwardConfig(d_mlp=8),
        inputs="tokens",
        max_distance=6,
        causal=True,
        shared=shared,
    )
    model = Transformer(config, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(7, (3, 5), generator=torch.Generator().manual_seed(1))
    logits, cache = model.run_with_cache(ids)
    for step in range(2):
        pattern = cache[f"blocks.{step}.attn.hook_pattern"]
        assert pattern.shape == (3, 2, 5, 5)
        assert not pattern.triu(1).any()
        assert pattern.abs().max() <= 1
    torch.testing.assert_close(model(ids), logits, rtol=1e-5, atol=1e-5)


def test_parameters_are_those_of_multi_head_attention():
    assert set(dict(build().named_parameters())) == {
        *("W_Q", "W_K", "W_V", "W_O"),
        *("b_Q", "b_K", "b_V", "b_O"),
    }
    assert isinstance(build(), CodaAttention)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 0}, r"n_heads must be at least 1, got 0"),
        ({"d_value": 0}, r"d_value must be at least 1, got 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1\.0"),
        ({"d_head": 3, "rotary": True}, r"d_head must be even with rotary=True, got 3"),
    ],
)
def test_invalid_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes)
