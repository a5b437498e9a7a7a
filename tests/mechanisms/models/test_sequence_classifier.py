import pytest
import torch
from torch.nn.functional import pad

import mechanisms
from mechanisms.models.sequence_classifier import SequenceClassifier, SequenceClassifierConfig
from tests.mechanisms.checks import check_seed_determines_weights

HEADS = {"n_heads": 2, "d_head": 8}
ATTENTIONS = {
    **{name: mechanisms.AttentionConfig.named(name, **HEADS) for name in ("softmax", "linear")},
    "hyla": mechanisms.AttentionConfig.named("hyla", **HEADS),
    "compositional": mechanisms.CompositionalAttentionConfig(
        n_searches=2, n_retrievals=2, d_head=8
    ),
    "coda": mechanisms.CodaAttentionConfig(**HEADS),
    "coda, centred": mechanisms.CodaAttentionConfig(
        **HEADS,
        composition=mechanisms.QuasiAttentionConfig(
            affinity_centring="matrix", gate_centring="matrix"
        ),
    ),
}
PADDING = 0


def build(attention="softmax", **changes):
    settings = {
        **{"d_input": 11, "d_output": 3, "padding": PADDING, "d_model": 16, "n_layers": 2},
        "feed_forward": mechanisms.FeedForwardConfig(d_mlp=16),
    } | changes
    settings["attention"] = ATTENTIONS.get(attention, attention)
    config = SequenceClassifierConfig(**settings)
    return SequenceClassifier(config, generator=torch.Generator().manual_seed(0))


def tokens(*shape, seed=1):
    return torch.randint(1, 11, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("n_sequences", [1, 2])
def test_padding_has_no_effect(attention, n_sequences):
    model = build(attention, n_sequences=n_sequences)
    inputs = [tokens(4, n, seed=n) for n in (5, 7)[:n_sequences]]
    padded = [pad(one, (0, n), value=PADDING) for n, one in enumerate(inputs, 1)]
    torch.testing.assert_close(model(*padded), model(*inputs), rtol=1e-4, atol=1e-5)
    # Of another id they would be words.
    other = [pad(one, (0, n), value=1) for n, one in enumerate(inputs, 1)]
    assert not torch.allclose(model(*other), model(*inputs), atol=1e-3)


def test_padding_need_not_be_an_id():
    inputs = pad(tokens(2, 5), (0, 2))
    expected = build()(inputs)
    actual = build(padding=-1)(inputs.masked_fill(inputs == 0, -1))
    torch.testing.assert_close(actual, expected)


def test_logits_are_those_of_the_mean_over_tokens():
    model, inputs = build(), pad(tokens(2, 5), (0, 2))
    logits, cache = model.run_with_cache(inputs)
    state = model.ln_final(cache["blocks.1.hook_resid_post"])[:, :5].mean(1, keepdim=True)
    torch.testing.assert_close(cache["hook_pooled"], state)
    torch.testing.assert_close(logits, state @ model.W_U + model.b_U)


def test_an_example_without_tokens_has_the_logits_of_the_bias():
    model = build()
    with torch.no_grad():
        model.b_U.copy_(torch.tensor([1.0, 2, 3]))
    logits = model(torch.zeros(1, 4, dtype=torch.long))
    torch.testing.assert_close(logits, model.b_U.expand(1, 1, 3))


def test_each_sequence_has_positions_and_a_vector_of_its_own():
    model, a, b = build(n_sequences=2), tokens(3, 5), tokens(3, 4, seed=2)
    embedded = model.run_with_cache(a, b)[1]["hook_embed"]
    one = build().run_with_cache(b)[1]["hook_embed"]
    # The weights of tokens are drawn first, so that both models have the same.
    torch.testing.assert_close(embedded[:, 5:], one + model.W_sequence[1])
    assert not torch.allclose(model(a, b), model(b, a), atol=1e-3)


def test_without_positions_the_order_of_tokens_has_no_effect():
    order = torch.tensor([2, 0, 4, 1, 3])
    inputs = tokens(3, 5)
    for positions, same in (("none", True), ("sinusoidal", False)):
        model = build(positions=positions)
        assert torch.allclose(model(inputs), model(inputs[:, order]), atol=1e-5) == same


def test_embeddings_have_unit_scale():
    model = build(d_input=2000, positions="none")
    embedded = model.run_with_cache(torch.arange(1, 2000)[None])[1]["hook_embed"]
    assert embedded.std() == pytest.approx(1, rel=0.02)


def test_weights_as_in_tensor2tensor():
    model = build(d_input=500, initialization="xavier_uniform")
    bound = (6 / (16 + 16)) ** 0.5
    weights = model.blocks[0].mlp.W_in.detach()
    assert bound * 0.95 < weights.abs().max() <= bound
    assert model.W_E.detach().std() == pytest.approx(16**-0.5, rel=0.05)


def test_seed_determines_weights():
    check_seed_determines_weights(lambda g: SequenceClassifier(build().config, generator=g))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_sequences": 3}, "n_sequences must be 1 or 2, got 3"),
        ({"positions": "relative"}, "positions must be one of .*, got 'relative'"),
        (
            {"n_sequences": 2, "attention": mechanisms.RelativeAttentionConfig(**HEADS)},
            "attention must not measure distances",
        ),
    ],
)
def test_wrong_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes)


def test_wrong_number_of_sequences():
    with pytest.raises(ValueError, match="sequences must be 2, as n_sequences says, got 1"):
        build(n_sequences=2)(tokens(2, 3))
