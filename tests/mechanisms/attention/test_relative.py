import contextlib
import math

import pytest
import torch

from mechanisms.attention.positions import interleaved_sinusoids
from mechanisms.attention.relative import (
    RelativeAttention,
    RelativeAttentionConfig,
    distance_to_position,
)
from tests.mechanisms.ndr_golden import DTYPES, TOLERANCE, attention_weights, load, load_weights
from tests.mechanisms.ndr_literal import random_attention, relative_attention

CONTRACT_EXAMPLES = {
    "": RelativeAttentionConfig(n_heads=4, d_head=4),
    "gated": RelativeAttentionConfig(n_heads=4, d_head=4, gated=True),
}


SCORES = ("hook_content_scores", "hook_relative_scores", "hook_absolute_scores")


def build(**changes):
    config = RelativeAttentionConfig(**{"n_heads": 3, "d_head": 4} | changes)
    return RelativeAttention(config, 12, generator=torch.Generator().manual_seed(0))


def literal(attention, x):
    """The scores from the definition, one pair of positions at a time."""
    n = x.shape[1]

    def sinusoid(position):
        channels = [
            wave(position / 1e4 ** (2 * pair / 12))
            for pair in range(6)
            for wave in (math.sin, math.cos)
        ]
        return torch.tensor(channels, dtype=x.dtype)

    scores = torch.zeros(len(x), attention.config.n_heads, n, n, dtype=x.dtype)
    for head in range(attention.config.n_heads):
        q, k = x @ attention.W_Q[head], x @ attention.W_K[head]
        for i in range(n):
            gate = torch.ones(len(x), dtype=x.dtype)
            if attention.config.gated:
                gate = torch.sigmoid(x[:, i] @ attention.W_gate[head] + attention.b_gate[head])
            for j in range(n):
                content = ((q[:, i] + attention.content_bias[head]) * k[:, j]).sum(-1)
                query = q[:, i] + attention.pos_bias[head]
                relative = query @ (sinusoid(j - i) @ attention.W_pos[head])
                absolute = query @ (sinusoid(j) @ attention.W_pos[head])
                position = gate * relative + (1 - gate) * absolute
                scores[:, head, i, j] = attention.scale * (content + position)
    return scores


def scores_of(attention, x_query, x_key):
    recorded = []
    attention.hook_attn_scores.add_hook(lambda scores, hook: recorded.append(scores))
    attention(x_query, x_key)
    attention.hook_attn_scores.remove_hooks()
    return recorded[0]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7])
def test_scores_are_those_of_the_literal_formula(gated, length):
    attention = build(gated=gated).double()
    generator = torch.Generator().manual_seed(1)
    for name in ("content_bias", "pos_bias"):
        torch.nn.init.normal_(getattr(attention, name), generator=generator)
    x = torch.randn(2, length, 12, generator=generator, dtype=torch.float64)
    ours = scores_of(attention, x, x)
    # The sinusoids are float32.
    assert torch.allclose(ours, literal(attention, x), atol=1e-5)
    for n_query in (1, length):
        last = scores_of(attention, x[:, -n_query:], x)
        assert torch.allclose(last, ours[:, :, -n_query:], atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity_with_the_authors(dtype):
    golden = load("ndr_relative_attn_absgate", dtype)
    attention = load_weights(build(gated=True), attention_weights(golden), dtype)
    activations = {}
    for name, point in attention.named_children():
        point.add_hook(lambda value, hook, name=name: activations.__setitem__(name, value))
    x = golden["x"]
    table = interleaved_sinusoids(-8, 9, 12).to(dtype)
    assert (table - golden["pos_table"]).abs().max() < 1e-6
    with pytest.MonkeyPatch.context() as patch:
        # The authors' float32 sinusoids, which were computed differently, bit by bit.
        patch.setattr(
            "mechanisms.attention.relative.interleaved_sinusoids",
            lambda first, stop, d_model: golden["pos_table"],
        )
        no_mask = attention(x, x)
        pattern_without_mask = activations["hook_pattern"]
        out = attention(x, x, mask=~golden["pad_mask"][:, None, None])
    tolerance = TOLERANCE[dtype]
    assert (no_mask - golden["out_nomask"]).abs().max() < tolerance
    assert (pattern_without_mask - golden["attn_nomask"]).abs().max() < tolerance
    assert (out - golden["out"]).abs().max() < tolerance
    assert (activations["hook_pattern"] - golden["attn"]).abs().max() < tolerance
    assert (
        activations["hook_position_gate"].transpose(1, 2) - golden["absgate"]
    ).abs().max() < tolerance
    for point, theirs in zip(SCORES, ("content", "rel", "abs"), strict=True):
        scores = golden["scale"] * golden[f"{theirs}_scores"]
        assert (activations[point] - scores).abs().max() < tolerance


def activations_of(attention, x, *points):
    """What these hook points get, in this order."""
    recorded = {}
    with contextlib.ExitStack() as stack:
        for name in points:
            handle = getattr(attention, name).register_forward_hook(
                lambda point, inputs, value, name=name: recorded.__setitem__(name, value.clone())
            )
            stack.callback(handle.remove)
        attention(x, x)
    for point in attention.children():
        point.remove_hooks()
    return [recorded[name].detach() for name in points]


@pytest.mark.parametrize("gated", [False, True])
def test_each_part_of_the_scores_can_be_changed_by_itself(gated):
    attention = build(gated=gated).eval()
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))
    parts = SCORES[: 2 + gated]
    plain, before = attention(x, x), activations_of(attention, x, *parts, "hook_attn_scores")
    gate = activations_of(attention, x, "hook_position_gate")[0] if gated else torch.ones(2, 5, 3)
    gate = gate.transpose(1, 2)[..., None]
    weights = dict(zip(SCORES, (torch.ones(1), gate, 1 - gate), strict=True))

    def write_in_place(scores, hook):
        scores[..., 0] += 3.0
        return scores

    change = torch.zeros(5).index_fill(0, torch.tensor(0), 3.0)
    for name in parts:
        getattr(attention, name).add_hook(write_in_place)
        assert not torch.allclose(attention(x, x), plain), name
        others = [other for other in parts if other != name]
        *unchanged, scores = activations_of(attention, x, *others, "hook_attn_scores")
        for other, ours in zip(others, unchanged, strict=True):
            assert torch.equal(ours, before[parts.index(other)]), (name, other)
        assert torch.allclose(scores, before[-1] + change * weights[name], atol=1e-5), name


def test_the_logit_of_the_position_gate_is_that_before_the_sigmoid():
    attention = build(gated=True).eval()
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))
    logit, gate = activations_of(attention, x, "hook_position_gate_logit", "hook_position_gate")
    assert torch.equal(logit.sigmoid(), gate)
    assert logit.shape == (2, 5, 3)
    attention.hook_position_gate_logit.add_hook(lambda logit, hook: logit + 50)
    open_gate = attention(x, x)
    attention.hook_position_gate_logit.remove_hooks()
    assert not torch.allclose(attention(x, x), open_gate)
    attention.hook_position_gate.add_hook(lambda gate, hook: torch.ones_like(gate))
    assert torch.allclose(attention(x, x), open_gate, atol=1e-6)


@pytest.mark.parametrize("kind", ["noabsgate", "absgate"])
def test_the_output_is_that_of_the_literal_formula(kind):
    weights = random_attention(n_heads=3, d_model=12, d_head=4, kind=kind)
    attention = build(gated=kind == "absgate")
    attention = load_weights(attention, attention_weights(weights), torch.float64)
    x = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pad_mask = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    out = attention(x, x, mask=~pad_mask[:, None, None])
    expected, _ = relative_attention(weights, x, pad_mask=pad_mask)
    # The sinusoids are float32.
    assert torch.allclose(out, expected, atol=1e-4)


def kept_scores(attention, x, *points):
    """Where the scores of the hook points are not dropped, of heads of width 1."""
    torch.manual_seed(0)
    dropped = activations_of(attention.train(), x, *points)
    torch.manual_seed(0)
    again = activations_of(attention, x, *points)
    assert all(map(torch.equal, dropped, again))
    undropped = activations_of(attention.eval(), x, *points)
    factors = [some / all_ for some, all_ in zip(dropped, undropped, strict=True)]
    kept = [factor.abs() > 1e-3 for factor in factors]
    for factor, each in zip(factors, kept, strict=True):
        assert torch.allclose(factor[each], torch.tensor(1 / 0.7), rtol=1e-4)
    return kept


def test_components_of_queries_are_dropped_separately_for_keys_and_positions():
    attention = build(d_head=1, gated=True, query_dropout=0.3)
    torch.nn.init.ones_(attention.content_bias)
    torch.nn.init.ones_(attention.pos_bias)
    x = torch.randn(500, 5, 12, generator=torch.Generator().manual_seed(1))
    content, relative, absolute = kept_scores(attention, x, *SCORES)
    for kept in (content, relative, absolute):
        assert torch.allclose(kept.float().mean((0, 3)), torch.tensor(0.7), atol=0.08)
        assert (kept == kept[..., :1]).all()
    assert torch.equal(relative, absolute)
    assert abs((content & relative).float().mean() - 0.49) < 0.03


def test_components_of_keys_and_of_distances_are_dropped():
    attention = build(n_heads=300, d_head=1, gated=True, key_dropout=0.3)
    x = torch.randn(8, 5, 12, generator=torch.Generator().manual_seed(1))
    content, relative, absolute = kept_scores(attention, x, *SCORES)
    assert torch.allclose(content.float().mean((0, 1, 2)), torch.tensor(0.7), atol=0.08)
    assert (content == content[:, :, :1]).all()
    assert (relative == relative[:1]).all()
    assert abs(relative.float().mean() - 0.7) < 0.05
    for i in range(4):
        assert torch.equal(relative[..., i, :-1], relative[..., i + 1, 1:])
    # Distance j from the first position is position j.
    assert torch.equal(relative[..., :1, :], absolute[..., :1, :])


@pytest.mark.parametrize("gated", [False, True])
def test_without_dropout_rates_training_is_as_evaluation(gated):
    attention = build(gated=gated)
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))
    assert torch.equal(attention.train()(x, x), attention.eval()(x, x))
    dropping = build(gated=gated, query_dropout=0.5, key_dropout=0.5)
    assert torch.equal(dropping.eval()(x, x), attention(x, x))
    assert not torch.allclose(dropping.train()(x, x), attention(x, x))


def test_a_query_with_all_keys_masked_gets_zeros():
    attention = build(gated=True)
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1)).requires_grad_()
    mask = torch.tensor([True, False])[:, None, None, None]
    out = attention(x, x, mask=mask)
    assert torch.equal(out[1], torch.zeros(5, 12))
    out.sum().backward()
    assert x.grad.isfinite().all()


def test_distance_to_position_selects_the_distances_of_each_query():
    distances = torch.arange(-4, 5.0).expand(1, 1, 3, 9)
    expected = torch.arange(5.0) - torch.tensor([2.0, 3.0, 4.0])[:, None]
    assert torch.equal(distance_to_position(distances, 5)[0, 0], expected)


def test_invalid_settings_are_refused():
    for changes in ({"n_heads": 0}, {"d_head": 0}, {"query_dropout": 1.0}, {"key_dropout": -0.1}):
        (name,) = changes
        with pytest.raises(ValueError, match=name):
            build(**changes)
    with pytest.raises(ValueError, match="even"):
        RelativeAttentionConfig(n_heads=1, d_head=2).build(7)
