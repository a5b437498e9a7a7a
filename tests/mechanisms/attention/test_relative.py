import math

import pytest
import torch

from mechanisms.attention.relative import (
    RelativeAttention,
    RelativeAttentionConfig,
    distance_to_position,
    interleaved_sinusoids,
)
from tests.mechanisms.ndr_golden import DTYPES, TOLERANCE, attention_weights, load, load_weights

CONTRACT_EXAMPLES = {
    "": RelativeAttentionConfig(n_heads=4, d_head=4),
    "gated": RelativeAttentionConfig(n_heads=4, d_head=4, gated=True),
}


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
    for changes in ({"n_heads": 0}, {"d_head": 0}, {"dropout": 1.0}):
        (name,) = changes
        with pytest.raises(ValueError, match=name):
            build(**changes)
    with pytest.raises(ValueError, match="even"):
        RelativeAttentionConfig(n_heads=1, d_head=2).build(7)
