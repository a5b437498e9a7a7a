from dataclasses import replace

import pytest
import torch

import mechanisms
from mechanisms import (
    AttentionConfig,
    CodaAttentionConfig,
    CompositionalAttentionConfig,
    EncoderDecoder,
    EncoderDecoderConfig,
    FeedForwardConfig,
    GeometricAttentionConfig,
    QuasiAttentionConfig,
    RelativeAttentionConfig,
    sinusoidal_embedding,
)
from tests.mechanisms.checks import (
    check_seed_determines_weights,
)
from tests.mechanisms.initial_weights import is_drawn_as, scan, tensor2tensor
from tests.mechanisms.torch_layers import decoder_layer, encoder_layer, shake

BEGIN, END, PADDING = 5, 6, -1
SOFTMAX = AttentionConfig(n_heads=2, d_head=4)
SMALL = EncoderDecoderConfig(
    d_input=4,
    d_output=7,
    d_model=8,
    n_layers=2,
    attention=SOFTMAX,
    feed_forward=FeedForwardConfig(d_mlp=12, activation="relu"),
    begin=BEGIN,
    end=END,
    padding=PADDING,
)
CONFIGS = {
    "shared": SMALL,
    "separate": replace(SMALL, shared=False),
    "tied": replace(SMALL, tied=True),
    "one embedding": replace(SMALL, d_input=7, one_embedding=True),
    "post-LN": replace(SMALL, post_norm=True, norm_epsilon=1e-5),
    "padding is an id": replace(SMALL, d_input=5, d_output=8, begin=6, end=7, padding=4),
    "geometric": replace(
        SMALL,
        attention=GeometricAttentionConfig(n_heads=2, d_head=4),
        cross_attention=AttentionConfig.named("hyla", n_heads=2, d_head=4),
    ),
    "rotary": replace(
        SMALL,
        attention=replace(SOFTMAX, rotary=True),
        cross_attention=SOFTMAX,
    ),
    "compositional": replace(
        SMALL, attention=CompositionalAttentionConfig(n_searches=2, n_retrievals=3, d_head=4)
    ),
}
SOURCE = torch.tensor([[0, 1, 2, 3], [3, 2, -1, -1], [1, -1, -1, -1]])
TARGET_IN = torch.tensor([[5, 0, 1, 2, 3], [5, 4, 4, -1, -1], [5, -1, -1, -1, -1]])
IS_TOKEN = TARGET_IN >= 0


def build(config, seed=0):
    return shake(EncoderDecoder(config, generator=torch.Generator().manual_seed(seed)))


def inputs_for(config):
    if config.padding == PADDING:
        return SOURCE, TARGET_IN
    target_in = torch.where(TARGET_IN == BEGIN, config.begin, TARGET_IN)
    return tuple(x.masked_fill(x < 0, config.padding) for x in (SOURCE, target_in))


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def model(request):
    return build(request.param)


@pytest.mark.parametrize("name", ["shared", "separate", "tied", "one embedding", "post-LN"])
def test_agrees_with_torchs_own_layers(name):
    model = build(CONFIGS[name])
    for row in range(3):
        # One sequence at a time, without any padding.
        source, target = SOURCE[row][SOURCE[row] >= 0], TARGET_IN[row][IS_TOKEN[row]]
        embed = embed_target = model.W_E * 8**0.5
        if name != "one embedding":
            embed, embed_target = model.W_E, model.W_E_target
        encoded = (embed[source] + sinusoidal_embedding(len(source), 8))[None]
        x = (embed_target[target] + sinusoidal_embedding(len(target), 8))[None]
        for layer in range(2):
            block = model.encoder_core or model.encoder_blocks[layer]
            encoded = encoder_layer(block)(encoded)
        encoded = model.ln_encoded(encoded)
        future = torch.ones(len(target), len(target), dtype=torch.bool).triu(1)
        for layer in range(2):
            block = model.decoder_core or model.decoder_blocks[layer]
            x = decoder_layer(block)(x, encoded, tgt_mask=future)
        assert (
            model.decoder_core is None
            or model.decoder_core.ln_cross.eps == model.config.norm_epsilon
        )
        readout = {"tied": model.W_E_target, "one embedding": model.W_E}.get(name)
        logits = model.ln_final(x) @ (model.W_U if readout is None else readout.T)
        logits = logits if model.b_U is None else logits + model.b_U
        ours = model(SOURCE, TARGET_IN)[row][IS_TOKEN[row]]
        assert torch.allclose(ours, logits[0], atol=1e-5)


def test_the_decoder_may_have_an_attention_of_its_own():
    """Here CoDA centred by matrix, which a decoder cannot have."""
    matrix, row = (
        CodaAttentionConfig(
            n_heads=2, d_head=4, composition=QuasiAttentionConfig(gate_centring=centring)
        )
        for centring in ("matrix", "row")
    )
    model = build(replace(SMALL, attention=matrix, decoder_attention=row))
    assert model.encoder_core.attn.config == matrix
    assert model.decoder_core.attn.config == model.decoder_core.cross_attn.config == row
    assert model(SOURCE, TARGET_IN)[IS_TOKEN].isfinite().all()


def test_the_embedding_that_all_share_starts_with_the_scale_of_the_sinusoids():
    sizes = {"d_input": 200, "d_output": 200, "d_model": 64, "one_embedding": True}
    model = EncoderDecoder(replace(SMALL, **sizes), generator=torch.Generator().manual_seed(0))
    assert model.W_E.std().item() == pytest.approx(1 / 8, rel=0.02)
    assert {"W_E_target", "W_U", "b_U"}.isdisjoint(model.state_dict())


LARGE = replace(
    SMALL,
    d_input=300,
    d_output=300,
    d_model=64,
    attention=AttentionConfig(n_heads=4, d_head=24, bias=False),
    feed_forward=FeedForwardConfig(d_mlp=200, activation="relu"),
)
COMPOSITIONAL = CompositionalAttentionConfig(
    n_searches=4, n_retrievals=2, d_head=16, d_selection=32, biases="selection"
)


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        (tensor2tensor, {"one_embedding": True}),
        (
            tensor2tensor,
            {"one_embedding": True, "attention": CodaAttentionConfig(n_heads=4, d_head=24)},
        ),
        (scan, {"tied": True}),
        (scan, {"tied": False}),
        (scan, {"tied": True, "attention": COMPOSITIONAL}),
        (scan, {"tied": True, "attention": replace(COMPOSITIONAL, scorer="mlp")}),
    ],
)
def test_initial_weights_are_those_of_the_authors(rule, settings):
    name = {tensor2tensor: "xavier_uniform", scan: "mittal_2021"}[rule]
    for initialization in ("lecun_normal", "xavier_uniform", "mittal_2021"):
        config = replace(LARGE, **settings, initialization=initialization)
        model = EncoderDecoder(config, generator=torch.Generator().manual_seed(0))
        assert is_drawn_as(rule, model) == (initialization == name)
        check_seed_determines_weights(
            lambda generator, config=config: EncoderDecoder(config, generator=generator)
        )


def test_marks_are_two_more_tokens_around_each_source():
    model, plain = build(replace(SMALL, marks=True)), build(replace(SMALL, d_input=6))
    plain.load_state_dict(model.state_dict())
    marked = torch.tensor([[4, 0, 1, 2, 3, 5], [4, 3, 2, 5, -1, -1], [4, 1, 5, -1, -1, -1]])
    assert torch.equal(model(SOURCE, TARGET_IN), plain(marked, TARGET_IN))
    assert torch.equal(model.greedy(SOURCE, 4), plain.greedy(marked, 4))
    with pytest.raises(ValueError, match=r"padding must not be 4 or 5 with marks=True, got 4"):
        replace(SMALL, marks=True, padding=4, begin=5, end=6)


def test_padding_and_future_tokens_have_no_effect(model):
    source, target_in = inputs_for(model.config)
    unpadded = model(source[1:2, :2], target_in[1:2, :3])
    assert torch.allclose(model(source, target_in)[1:2, :3], unpadded, atol=1e-5)
    changed = target_in.clone()
    changed[0, 3:] = 0
    ours, theirs = model(source, target_in)[0], model(source, changed)[0]
    assert torch.equal(ours[:3], theirs[:3])
    assert not torch.allclose(ours[3:], theirs[3:])

    def corrupt_padding(x, hook):
        return x.masked_fill((source == model.config.padding)[..., None], 1e3)

    hooks = [("hook_embed", corrupt_padding), ("hook_encoded", corrupt_padding)]
    corrupted = model.run_with_hooks(source, target_in, fwd_hooks=hooks)
    assert torch.allclose(corrupted, model(source, target_in), atol=1e-6)


def test_an_empty_source_gives_finite_logits_and_gradients():
    model = EncoderDecoder(SMALL)
    logits = model(torch.full((2, 3), PADDING), TARGET_IN[:2])
    logits.square().sum().backward()
    assert torch.isfinite(logits).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_hook_names_and_shapes(model):
    inputs = inputs_for(model.config)
    logits, cache = model.run_with_cache(*inputs)
    assert torch.allclose(model(*inputs), logits, atol=1e-6)
    assert set(cache) == set(model.hook_dict)
    assert cache["hook_embed"].shape == cache["hook_encoded"].shape == (3, 4, 8)
    assert cache["hook_embed_target"].shape == (3, 5, 8)
    names = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
    for layer in range(2):
        for name in names:
            assert cache[f"encoder_blocks.{layer}.hook_{name}"].shape == (3, 4, 8)
        for name in (*names, "cross_attn_out", "resid_mid_cross"):
            assert cache[f"decoder_blocks.{layer}.hook_{name}"].shape == (3, 5, 8)
        decoder = f"decoder_blocks.{layer}"
        assert cache[f"encoder_blocks.{layer}.attn.hook_pattern"].shape == (3, 2, 4, 4)
        assert cache[f"{decoder}.attn.hook_pattern"].shape == (3, 2, 5, 5)
        assert cache[f"{decoder}.cross_attn.hook_pattern"].shape == (3, 2, 5, 4)
        assert cache[f"{decoder}.cross_attn.hook_q"].shape == (3, 5, 2, 4)
        assert cache[f"{decoder}.cross_attn.hook_k"].shape == (3, 4, 2, 4)


def test_the_residual_stream_is_the_sum_of_the_outputs_of_all_parts():
    _, cache = build(SMALL).run_with_cache(SOURCE, TARGET_IN)
    for step in range(2):
        outputs = {
            name: cache[f"decoder_blocks.{step}.hook_{name}"]
            for name in ("resid_pre", "attn_out", "cross_attn_out", "mlp_out", "resid_post")
        }
        total = sum(value for name, value in outputs.items() if name != "resid_post")
        assert torch.allclose(outputs["resid_post"], total, atol=1e-5)
    first, second = (cache[f"decoder_blocks.{step}.hook_resid_post"] for step in range(2))
    assert torch.equal(cache["decoder_blocks.1.hook_resid_pre"], first)
    assert not torch.allclose(first, second)


@pytest.mark.slow
def test_it_keeps_the_rules_of_a_mechanism(model):
    mechanisms.check(model, inputs_for(model.config))


def test_greedy_equals_one_sequence_at_a_time(model):
    source, _ = inputs_for(model.config)
    config = model.config
    decoded = model.greedy(source, 6)
    assert decoded.shape == (3, 6)
    for row in range(3):
        ids = source[row][source[row] != config.padding][None]
        prefix = [config.begin]
        while len(prefix) <= 6 and prefix[-1] != config.end:
            prefix.append(int(model(ids, torch.tensor([prefix]))[0, -1].argmax()))
        expected = prefix[1:] + [config.padding] * (7 - len(prefix))
        assert decoded[row].tolist() == expected


def test_greedy_stops_at_the_end_and_encodes_once():
    model = build(SMALL)
    calls = {"hook_encoded": 0, "hook_embed_target": 0}

    def count(x, hook):
        calls[hook.name] += 1

    def force(x, hook):
        """Make `end` most probable after two tokens, in the first row after one."""
        x = torch.zeros_like(x)
        x[:, 2:] = x[0, 1:] = 1
        return x

    model.ln_final = torch.nn.Identity()
    model.W_U.zero_()[:, END] = 1
    model.b_U.zero_()[3] = 1
    hooks = [(name, count) for name in calls]
    with model.hooks([*hooks, ("decoder_blocks.1.hook_resid_post", force)]):
        decoded = model.greedy(SOURCE, 10)
    padding = [PADDING] * 7
    assert decoded.tolist() == [
        [3, END, PADDING, *padding],
        [3, 3, END, *padding],
        [3, 3, END, *padding],
    ]
    assert calls == {"hook_encoded": 1, "hook_embed_target": 3}


def test_greedy_decodes_the_target_with_the_highest_logits_everywhere():
    model = build(SMALL)
    decoded = model.greedy(SOURCE, 5)
    forced = torch.cat([torch.full((3, 1), BEGIN), decoded[:, :-1]], 1)
    assert torch.equal(model(SOURCE, forced).argmax(-1)[decoded >= 0], decoded[decoded >= 0])


def test_scores_of_a_search_are_those_of_the_forward_pass():
    model = build(SMALL)
    found, scores = model.search(SOURCE, 5, width=3, length_penalty=0.0)
    assert torch.equal(model.search(SOURCE, 5, width=1)[0][:, 0], model.greedy(SOURCE, 5))
    for rank in range(3):
        target = found[:, rank]
        given = torch.cat([torch.full((3, 1), BEGIN), target[:, :-1]], 1)
        log_probs = model(SOURCE, given).log_softmax(-1)
        is_token = target != PADDING
        of_target = log_probs.gather(-1, target.clamp_min(0)[..., None])[..., 0]
        assert torch.allclose((of_target * is_token).sum(1), scores[:, rank], atol=1e-5)
    assert (scores.diff(dim=1) <= 0).all()


def test_shared_weights_equal_a_stack_of_copies():
    shared, stack = build(SMALL), build(CONFIGS["separate"])
    weights = shared.state_dict()

    def source_of(name):
        stack, _, path = name.partition("_blocks.")
        return f"{stack}_core.{path.split('.', 1)[1]}" if path else name

    stack.load_state_dict({name: weights[source_of(name)] for name in stack.state_dict()})
    assert torch.allclose(stack(SOURCE, TARGET_IN), shared(SOURCE, TARGET_IN), atol=1e-6)


def test_shared_weights_allow_other_numbers_of_steps():
    model = build(SMALL)
    longer = EncoderDecoder(replace(SMALL, n_layers=4)).eval()
    longer.load_state_dict(model.state_dict())
    ours, theirs = model(SOURCE, TARGET_IN, n_steps=4), longer(SOURCE, TARGET_IN)
    assert torch.allclose(ours, theirs, atol=1e-6)
    assert torch.equal(model.greedy(SOURCE, 5, n_steps=4), longer.greedy(SOURCE, 5))
    for stack in ("encoder", "decoder"):
        assert f"{stack}_blocks.3.attn.hook_pattern" in model.hook_dict
    assert not torch.allclose(model(SOURCE, TARGET_IN, n_steps=1), model(SOURCE, TARGET_IN))
    with pytest.raises(ValueError, match="n_steps must be 2 with shared=False, got 1"):
        build(CONFIGS["separate"])(SOURCE, TARGET_IN, n_steps=1)


def test_dropout_is_applied_in_training_only():
    model = build(replace(SMALL, dropout=0.5))
    assert torch.equal(model(SOURCE, TARGET_IN), build(SMALL)(SOURCE, TARGET_IN))
    model.train()
    torch.manual_seed(0)
    outputs = torch.stack([model(SOURCE, TARGET_IN) for _ in range(2)])
    assert not torch.allclose(outputs[0], outputs[1])


def test_the_seed_determines_the_weights():
    check_seed_determines_weights(lambda generator: EncoderDecoder(SMALL, generator=generator))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_layers": 0}, r"n_layers must be at least 1, got 0"),
        ({"end": 7}, r"end must be in \[0, d_output = 7\), got 7"),
        ({"padding": BEGIN}, r"padding must not be begin, got 5 for both"),
        ({"dropout": -0.1}, r"dropout must be in \[0, 1\), got -0.1"),
        ({"initialization": "xavier"}, r"initialization must be one of lecun_normal, xavier_unif"),
        ({"one_embedding": True}, r"d_output must be the number of source ids .* got 7 and 4"),
        (
            {"one_embedding": True, "d_input": 5, "marks": True},
            r"marks and tied must be False with one_embedding=True, got True and False",
        ),
        (
            {"attention": RelativeAttentionConfig(n_heads=2, d_head=4)},
            r"cross_attention must not measure distances",
        ),
        (
            {"attention": replace(SOFTMAX, rotary=True)},
            r"cross_attention must not measure distances, .*rotary=True",
        ),
        (
            {"cross_attention": CodaAttentionConfig(n_heads=2, d_head=4, rotary=True)},
            r"cross_attention must not measure distances, .*rotary=True",
        ),
        (
            {
                "cross_attention": CodaAttentionConfig(
                    n_heads=2,
                    d_head=4,
                    composition=QuasiAttentionConfig(affinity_centring="matrix"),
                )
            },
            r"cross_attention must not depend on all queries, .*affinity_centring='matrix'",
        ),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **settings)


def test_a_wrong_length_is_refused():
    with pytest.raises(ValueError, match="max_length must be at least 1, got 0"):
        build(SMALL).greedy(SOURCE, 0)
