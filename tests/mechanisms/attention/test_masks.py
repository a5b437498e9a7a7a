"""Every attention refuses masks and positions that it would misinterpret."""

import pytest
import torch

import mechanisms

CONFIGS = {
    "multi_head": mechanisms.AttentionConfig(n_heads=2, d_head=4),
    "coda": mechanisms.CodaAttentionConfig(n_heads=2, d_head=4),
    "compositional": mechanisms.CompositionalAttentionConfig(
        n_searches=2, n_retrievals=3, d_head=4
    ),
    "geometric": mechanisms.GeometricAttentionConfig(n_heads=2, d_head=4),
    "relative": mechanisms.RelativeAttentionConfig(n_heads=2, d_head=4),
}
MEASURING_DISTANCES = {
    "rotary": mechanisms.AttentionConfig(n_heads=2, d_head=4, rotary=True),
    "rotary coda": mechanisms.CodaAttentionConfig(n_heads=2, d_head=4, rotary=True),
    "geometric": CONFIGS["geometric"],
    "relative": CONFIGS["relative"],
}


def tokens(n, seed=0):
    return torch.randn(3, n, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_mask_has_a_dim_for_batch_heads_queries_and_keys(config):
    attention, x = config.build(8).eval(), tokens(3)
    # With as many examples as positions, the shape does not tell keys from pairs.
    keys = torch.tensor([[True, True, False]] * 3)
    message = r"mask must be \[batch, head, query_pos, key_pos\] = \[3, 2, 3, 3\], .* got "
    for mask in (keys, keys[None], keys[:, None, None, :2], keys.expand(1, 4, 3, 3)):
        with pytest.raises(ValueError, match=message):
            attention(x, x, mask=mask)
    with pytest.raises(TypeError, match=r"mask must be boolean, .* got torch.int64"):
        attention(x, x, mask=keys[:, None, None].long())
    other = x.clone()
    other[:, 2] += 1.0
    for mask in (keys[:, None, None], keys[None, None]):
        outputs = (attention(inputs, inputs, mask=mask)[:, :2] for inputs in (x, other))
        torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("config", MEASURING_DISTANCES.values(), ids=MEASURING_DISTANCES)
def test_queries_are_at_the_last_of_the_keys_positions(config):
    attention = config.build(8).eval()
    assert attention(tokens(2), tokens(4, seed=1)).shape == (3, 2, 8)
    with pytest.raises(
        ValueError, match="number of queries must be at most the number of keys = 4, got 5"
    ):
        attention(tokens(5), tokens(4, seed=1))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_tokens_and_biases_have_all_their_dims(config):
    attention, x = config.build(8).eval(), tokens(3)
    message = r"x_query and x_key must be \[batch, query_pos, d_model\] and .*, got \["
    for pair in ((x[0], x[0]), (x[:1], x), (x[..., :4], x), (x[None], x[None])):
        with pytest.raises(ValueError, match=message):
            attention(*pair)
    # With as many examples as heads, the shape does not tell one from the other.
    pairs = torch.zeros(2, 3, 3)
    for bias in (pairs, pairs[0], pairs[None, :, :2], torch.zeros(3, 3, 3, 3)):
        with pytest.raises(ValueError, match=r"bias must be .* = \[2, 2, 3, 3\], .* got \["):
            attention(x[:2], x[:2], bias=bias)


def test_a_number_of_heads_is_a_number():
    with pytest.raises(TypeError, match="n_heads must be an integer, got '2'"):
        mechanisms.AttentionConfig(n_heads="2", d_head=4)
