from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mechanisms import (
    AttentionConfig,
    CodaAttentionConfig,
    CompositionalAttentionConfig,
    FeedForwardConfig,
    MixtureOfExpertsConfig,
    QuasiAttentionConfig,
    Transformer,
    TransformerConfig,
    sinusoidal_embedding,
)
from tests.mechanisms.checks import check_seed_determines_weights
from tests.mechanisms.initial_weights import fairseq, is_drawn_as
from tests.mechanisms.torch_layers import encoder_layer, shake

GOLDEN = Path(__file__).parents[2] / "golden"

SMALL = TransformerConfig(
    d_input=5,
    d_output=3,
    d_model=8,
    n_layers=2,
    attention=AttentionConfig.named("hyla", n_heads=2, d_head=4),
    feed_forward=FeedForwardConfig(d_mlp=12),
    max_distance=6,
)
CONFIGS = {
    "plain": SMALL,
    "softmax": replace(SMALL, attention=AttentionConfig.named("softmax", n_heads=2, d_head=4)),
    "readout": replace(SMALL, n_readout=2),
    "causal": replace(SMALL, causal=True, positions="sinusoidal", max_distance=None),
    "shared": replace(SMALL, shared=True, n_layers=3),
    "experts": replace(SMALL, feed_forward=MixtureOfExpertsConfig(n_experts=4, top_k=2, d_mlp=6)),
    "shared experts, readout": replace(
        SMALL,
        shared=True,
        n_readout=1,
        feed_forward=MixtureOfExpertsConfig(n_experts=4, top_k=2, d_mlp=6),
    ),
    "tokens": replace(SMALL, inputs="tokens", positions="none", max_distance=None),
    "tied, shared, RMSNorm, SwiGLU": replace(
        SMALL,
        inputs="tokens",
        d_output=5,
        tied=True,
        shared=True,
        n_layers=3,
        causal=True,
        positions="relative_and_sinusoidal",
        max_distance=16,
        n_buckets=4,
        norm="rms_norm",
        attention=replace(SMALL.attention, normalize_qk=True, bias=False),
        feed_forward=FeedForwardConfig(d_mlp=12, activation="swiglu", bias=False),
    ),
}


def build(config, seed=0):
    model = Transformer(config, generator=torch.Generator().manual_seed(seed)).eval()
    return model.requires_grad_(False)


def inputs_for(config, n_positions=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    if config.inputs == "tokens":
        return torch.randint(config.d_input, (4, n_positions), generator=generator)
    return torch.randn(4, n_positions, config.d_input, generator=generator)


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def model(request):
    return build(request.param)


def golden_weights(data, dtype):
    weights = {
        "ln_final.weight": "ln_final.w",
        "ln_final.bias": "ln_final.b",
        "embed.W_E": "embed.W",
        "embed.b_E": "embed.b",
        "unembed.W_U": "unembed.W",
        "unembed.b_U": "unembed.b",
    }
    for layer in (0, 1):
        ours, theirs = f"blocks.{layer}", f"block{layer}"
        for norm in ("ln1", "ln2"):
            weights |= {
                f"{ours}.{norm}.weight": f"{theirs}.{norm}.w",
                f"{ours}.{norm}.bias": f"{theirs}.{norm}.b",
            }
        weights[f"{ours}.relative_bias.table"] = f"{theirs}.attn.rel_bias_table"
        names = [f"attn.{letter}_{matrix}" for letter in "Wb" for matrix in "QKVO"]
        names += [f"mlp.{letter}_{matrix}" for letter in "Wb" for matrix in ("in", "out")]
        weights |= {f"{ours}.{name}": f"{theirs}.{name}" for name in names}
    return {name: torch.tensor(data[key], dtype=dtype) for name, key in weights.items()}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str
)
@pytest.mark.parametrize(
    ("file", "variant"), [("softmax_attention", "softmax"), ("linear_hypatt", "hyla")]
)
def test_agrees_with_the_authors(file, variant, dtype, tolerance):
    data = np.load(GOLDEN / f"hyla_transformer_{file}.npz")
    model = Transformer(
        TransformerConfig(
            d_input=8,
            d_output=8,
            d_model=32,
            n_layers=2,
            attention=AttentionConfig.named(variant, n_heads=4, d_head=4),
            feed_forward=FeedForwardConfig(d_mlp=48),
            max_distance=36,
        )
    ).to(dtype)
    model.load_state_dict(golden_weights(data, dtype))
    logits, cache = model.run_with_cache(torch.tensor(data["input"], dtype=dtype))
    compared = {"logits": logits, "resid.embed": cache["hook_embed"]}
    for layer in (0, 1):
        compared |= {
            f"block{layer}.attn_out": cache[f"blocks.{layer}.hook_attn_out"],
            f"block{layer}.attn_pattern": cache[f"blocks.{layer}.attn.hook_pattern"],
            f"block{layer}.mlp_out": cache[f"blocks.{layer}.hook_mlp_out"],
            f"resid.block{layer}_out": cache[f"blocks.{layer}.hook_resid_post"],
        }
    for key, ours in compared.items():
        # Entries of HYLA's attention output are of order 100: the tolerance is relative.
        allowed = tolerance * max(1, np.abs(data[key]).max())
        assert np.abs(ours.detach().numpy() - data[key]).max() < allowed, key


def test_hooks_leave_outputs_unchanged(model):
    inputs = inputs_for(model.config)
    logits, cache = model.run_with_cache(inputs)
    assert torch.allclose(model(inputs), logits, atol=1e-5)
    assert set(cache) == set(model.hook_dict)


def test_hook_names_and_shapes(model):
    config = model.config
    _, cache = model.run_with_cache(inputs_for(config))
    attention = config.attention
    stream, heads = (4, 6, config.d_model), (4, 6, attention.n_heads, attention.d_head)
    square = (4, attention.n_heads, 6, 6)
    assert cache["hook_embed"].shape == stream
    for layer in range(config.n_layers):
        shapes = {
            name: stream
            for name in (
                "hook_resid_pre",
                "hook_attn_out",
                "hook_resid_mid",
                "hook_mlp_out",
                "hook_resid_post",
            )
        }
        shapes |= {f"attn.hook_{name}": heads for name in "qkvz"}
        shapes |= {"attn.hook_attn_scores": square, "attn.hook_pattern": square}
        for name, shape in shapes.items():
            assert cache[f"blocks.{layer}.{name}"].shape == shape, name


def test_each_hook_point_changes_the_output(model):
    inputs = inputs_for(model.config)
    plain = model(inputs)
    generator = torch.Generator().manual_seed(0)

    def change(activation, hook):
        if activation.dtype == torch.int64:
            # Indices of other experts.
            return (activation + 1) % 4
        return activation + torch.randn(activation.shape, generator=generator)

    for name in model.hook_dict:
        changed = model.run_with_hooks(inputs, fwd_hooks=[(name, change)])
        assert not torch.allclose(changed, plain, atol=1e-6), name
    assert torch.equal(model(inputs), plain)


def test_reading_out_fewer_positions_gives_the_last_logits():
    inputs = inputs_for(SMALL)
    model, readout = build(SMALL), build(CONFIGS["readout"])
    assert torch.allclose(readout(inputs), model(inputs)[:, -2:], atol=1e-6)


def test_a_plain_torch_hook_on_the_last_block_receives_all_positions():
    for config in (CONFIGS["readout"], replace(CONFIGS["readout"], shared=True)):
        model = build(config)
        outputs = []
        mlp = model.core.mlp if config.shared else model.blocks[-1].mlp
        mlp.register_forward_hook(lambda module, args, out, outputs=outputs: outputs.append(out))
        model(inputs_for(config))
        assert outputs[-1].shape[1] == 6


def test_shared_steps_have_separate_hook_points_and_activations():
    model = build(CONFIGS["shared"])
    assert not any(name.startswith("core") for name in model.hook_dict)
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {
        "core",
        "embed",
        "ln_final",
        "unembed",
    }
    inputs = inputs_for(model.config)
    _, cache = model.run_with_cache(inputs)
    posts = [cache[f"blocks.{step}.hook_resid_post"] for step in range(3)]
    assert not torch.allclose(posts[0], posts[1])
    # A change at one step does not affect earlier steps.
    with model.hooks([("blocks.1.hook_resid_pre", lambda x, hook: x * 0)]):
        _, changed = model.run_with_cache(inputs, reset_hooks_end=False)
    assert torch.equal(changed["blocks.0.hook_resid_post"], posts[0])
    assert not torch.allclose(changed["blocks.1.hook_resid_post"], posts[1])


def test_shared_weights_equal_a_stack_of_copies():
    shared = build(CONFIGS["shared"])
    stack = build(replace(shared.config, shared=False))
    weights = {
        name: shared.state_dict()["core." + name.split(".", 2)[2]]
        if name.startswith("blocks.")
        else shared.state_dict()[name]
        for name in stack.state_dict()
    }
    stack.load_state_dict(weights)
    inputs = inputs_for(shared.config)
    assert torch.allclose(stack(inputs), shared(inputs), atol=1e-6)


def test_shared_weights_allow_other_numbers_of_steps():
    model = build(CONFIGS["shared"])
    inputs = inputs_for(model.config)
    _, cache = model.run_with_cache(inputs)
    after_one_step = model.read_out(cache["blocks.0.hook_resid_post"])
    assert torch.allclose(model(inputs, n_steps=1), after_one_step, atol=1e-6)
    model.set_steps(5)
    _, longer = model.run_with_cache(inputs, n_steps=5)
    assert "blocks.4.attn.hook_pattern" in longer
    assert torch.equal(longer["blocks.2.hook_resid_post"], cache["blocks.2.hook_resid_post"])
    assert torch.allclose(model(inputs), model.run_with_cache(inputs)[0], atol=1e-6)


def test_steps_of_unshared_weights_are_fixed():
    with pytest.raises(ValueError, match="n_steps must be 2 with shared=False, got 3"):
        build(SMALL)(inputs_for(SMALL), n_steps=3)
    with pytest.raises(ValueError, match="at least 1 with shared=True, got 0"):
        build(CONFIGS["shared"])(inputs_for(SMALL), n_steps=0)


def test_causal_outputs_do_not_depend_on_the_future():
    model = build(CONFIGS["causal"])
    inputs = inputs_for(model.config)
    changed = inputs.clone()
    changed[:, 4:] += 1
    assert torch.equal(model(inputs)[:, :4], model(changed)[:, :4])
    assert not torch.allclose(model(inputs)[:, 4:], model(changed)[:, 4:])


def test_ids_of_padding_may_be_any():
    config = replace(SMALL, inputs="tokens", d_output=5)
    model = Transformer(config, generator=torch.Generator().manual_seed(0)).eval()
    ids, mask = torch.tensor([[1, 4, 0, 2]]), torch.tensor([[True, True, True, False]])
    outputs = [model(ids.masked_fill(~mask, pad), mask=mask)[:, :3] for pad in (0, -1, 5)]
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(outputs[2], outputs[0])


@pytest.mark.parametrize("kind", ["tokens", "vectors"])
def test_masks_of_other_shapes_or_types_are_refused(kind):
    config = replace(SMALL, inputs=kind, d_output=5)
    model = Transformer(config, generator=torch.Generator().manual_seed(0)).eval()
    inputs = torch.ones(4, 6).long() if kind == "tokens" else inputs_for(SMALL)
    for shape in ((4, 5), (3, 6), (6,), (4, 6, 1)):
        message = rf"mask must be \[batch, pos\] = \[4, 6\], got \[{', '.join(map(str, shape))}\]"
        with pytest.raises(ValueError, match=message):
            model(inputs, mask=torch.ones(shape, dtype=torch.bool))
    for dtype in (torch.float32, torch.int64, torch.uint8):
        with pytest.raises(TypeError, match=f"mask must be boolean, True for tokens, got {dtype}"):
            model(inputs, mask=torch.ones(4, 6, dtype=dtype))
    whole = model(inputs)
    assert torch.equal(model(inputs, mask=torch.ones(1, 6, dtype=torch.bool)), whole)


def test_padding_is_not_attended_to():
    model = build(SMALL)
    inputs = inputs_for(SMALL)
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[:, 4:] = False
    changed = inputs.clone()
    changed[:, 4:] += 1
    assert torch.equal(model(inputs, mask=mask)[:, :4], model(changed, mask=mask)[:, :4])


def test_the_seed_determines_the_weights():
    check_seed_determines_weights(lambda generator: Transformer(SMALL, generator=generator))


def rms_norm(x, weight):
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def test_the_norm_of_the_blocks_can_be_an_rms_norm_and_the_final_one_is_a_layer_norm():
    model = build(replace(SMALL, norm="rms_norm"))
    assert {name for name, _ in model.named_parameters() if ".ln" in f".{name}"} == {
        *(f"blocks.{layer}.{norm}.weight" for layer in (0, 1) for norm in ("ln1", "ln2")),
        "ln_final.weight",
        "ln_final.bias",
    }
    block = model.blocks[1]
    block.ln1.weight.normal_(generator=torch.Generator().manual_seed(2))
    block.ln2.weight.normal_(generator=torch.Generator().manual_seed(3))
    _, cache = model.run_with_cache(inputs_for(SMALL))
    x = cache["blocks.1.hook_resid_pre"]
    normed = rms_norm(x, block.ln1.weight)
    attended = block.attn(normed, normed, bias=block.relative_bias(6, 6))
    assert torch.allclose(cache["blocks.1.hook_attn_out"], attended, atol=1e-6)
    mlp_out = block.mlp(rms_norm(x + attended, block.ln2.weight))
    assert torch.allclose(cache["blocks.1.hook_mlp_out"], mlp_out, atol=1e-5)


def test_a_tied_read_out_is_the_transposed_embedding():
    config = replace(CONFIGS["tokens"], d_output=5, tied=True)
    model, tokens = build(config), inputs_for(config)
    assert not any(name.startswith("unembed") for name, _ in model.named_parameters())
    logits, cache = model.run_with_cache(tokens)
    x = cache["blocks.1.hook_resid_post"]
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    assert torch.allclose(logits, x @ model.embed.W_E.T / 8**0.5, atol=1e-6)
    # The gradient of the read-out reaches embeddings of tokens that are not in the input.
    model.requires_grad_(True)
    model(torch.zeros_like(tokens)).square().sum().backward()
    assert (model.embed.W_E.grad[1:] != 0).all()


def test_relative_and_sinusoidal_positions_add_up():
    config = replace(SMALL, positions="relative_and_sinusoidal")
    model, relative = build(config), build(SMALL)
    inputs = inputs_for(SMALL)
    sinusoids = sinusoidal_embedding(6, 8)
    _, cache = model.run_with_cache(inputs)
    assert torch.allclose(cache["hook_embed"], model.embed(inputs) + sinusoids)
    relative.load_state_dict(model.state_dict())
    added = [("hook_embed", lambda x, hook: x + sinusoids)]
    assert torch.allclose(relative.run_with_hooks(inputs, fwd_hooks=added), model(inputs))


def test_buckets_are_as_many_as_distances_or_as_stated():
    assert build(SMALL).blocks[0].relative_bias.table.shape == (2, 6)
    bias = build(replace(SMALL, n_buckets=32, max_distance=128)).blocks[0].relative_bias
    assert bias.table.shape == (2, 32)
    # T5: sixteen exact distances, the last bucket from 113 to beyond 128.
    row = bias.table.detach()[:, [0, 15, 16, 31, 31, 31]]
    assert torch.equal(bias(1, 300)[0, :, 0, [299, 284, 283, 299 - 113, 299 - 128, 0]], row)
    assert bias(1, 300)[0, 0, 0, 299 - 112] == bias.table[0, 30]


def test_weights_start_as_in_the_authors_code():
    """Schug et al. 2024: LeCun normal (truncated), tables normal, biases 0, scales 1."""
    config = TransformerConfig(
        d_input=100,
        d_output=90,
        d_model=120,
        n_layers=1,
        attention=AttentionConfig(n_heads=10, d_head=20, d_value=15),
        feed_forward=FeedForwardConfig(d_mlp=80),
        max_distance=50,
    )
    vectors, tokens = build(config), build(replace(config, inputs="tokens"))
    block = vectors.blocks[0]
    fan_in = {
        vectors.embed.W_E: 100,
        block.attn.W_Q: 120,
        block.attn.W_K: 120,
        block.attn.W_V: 120,
        block.attn.W_O: 150,
        block.mlp.W_in: 120,
        block.mlp.W_out: 80,
        vectors.unembed.W_U: 120,
    }
    for weight, expected in fan_in.items():
        # At least 9,600 draws: 0.7% is the standard error of the deviation of a normal.
        assert weight.std() == pytest.approx(expected**-0.5, rel=0.025)
        # Truncated at 2 / 0.8796 = 2.27 standard deviations.
        assert 2.2 < weight.abs().max() * expected**0.5 <= 2.275
    assert tokens.embed.W_E.std() == pytest.approx(120**-0.5, rel=0.025)
    assert tokens.embed.W_E.abs().max() > 3 * 120**-0.5
    assert block.relative_bias.table.std() == pytest.approx(50**-0.5, rel=0.13)
    for name, weight in vectors.named_parameters():
        if name.endswith("bias") or name.split(".")[-1].startswith("b_"):
            assert not weight.any(), name
        elif ".ln" in f".{name}":
            assert (weight == 1).all(), name


@pytest.mark.parametrize("scorer", ["none", "dot", "mlp"])
def test_weights_of_a_language_model_start_as_in_the_authors_code(scorer):
    """Mittal et al. 2021, section 4.7."""
    attention = AttentionConfig(n_heads=4, d_head=24)
    if scorer != "none":
        attention = CompositionalAttentionConfig(
            n_searches=4, n_retrievals=2, d_head=16, d_selection=32, scorer=scorer
        )
    config = replace(
        SMALL,
        attention=attention,
        feed_forward=FeedForwardConfig(d_mlp=200, activation="relu"),
        inputs="tokens",
        d_input=300,
        d_output=300,
        d_model=64,
        positions="sinusoidal",
        max_distance=None,
        tied=True,
        initialization="mittal_2021",
    )
    assert is_drawn_as(fairseq, build(config))
    assert not is_drawn_as(fairseq, build(replace(config, initialization="lecun_normal")))
    check_seed_determines_weights(lambda generator: Transformer(config, generator=generator))


@pytest.mark.parametrize(
    ("n_parameters", "settings"),
    [
        (
            402_824,
            {
                "d_input": 8,
                "d_output": 8,
                "n_layers": 4,
                "max_distance": 36,
                "attention": AttentionConfig.named("hyla", n_heads=16, d_head=4),
            },
        ),
        (
            151_265,
            {
                "d_input": 5,
                "d_output": 1,
                "n_layers": 2,
                "max_distance": 32,
                "attention": AttentionConfig.named("hyla", n_heads=8, d_head=2),
            },
        ),
        (
            2_121_984,
            {
                "d_input": 6144,
                "d_output": 6144,
                "n_layers": 8,
                "max_distance": 128,
                "attention": AttentionConfig.named("hyla", n_heads=16, d_head=8),
                "feed_forward": FeedForwardConfig(d_mlp=256, activation="swiglu", bias=False),
                "inputs": "tokens",
                "tied": True,
            },
        ),
    ],
    ids=["Raven", "fuzzy logic", "language"],
)
def test_models_of_the_authors_have_their_number_of_parameters(n_parameters, settings):
    """Schug et al. 2024, configs of their code; the numbers follow from its shapes."""
    settings = {"d_model": 128, "feed_forward": FeedForwardConfig(d_mlp=256)} | settings
    model = Transformer(TransformerConfig(**settings))
    assert sum(weight.numel() for weight in model.parameters()) == n_parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", ["readout", "tied, shared, RMSNorm, SwiGLU"])
def test_a_compiled_model_computes_the_same(name):
    model = build(CONFIGS[name])
    inputs = inputs_for(model.config)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(inputs), model(inputs), atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_layers": 0}, "n_layers must be at least 1, got 0"),
        ({"positions": "rotary"}, "positions must be one of relative, .*sinusoidal, none"),
        ({"norm": "batch"}, "norm must be one of layer_norm, rms_norm, got 'batch'"),
        ({"n_buckets": 1}, "n_buckets must be at least 2 .* got 1"),
        ({"n_buckets": 3, "bidirectional": True}, "n_buckets must be at least 4 .* got 3"),
        ({"n_buckets": 12}, "max_distance must be greater than 6, .* got 6"),
        ({"tied": True}, "inputs must be 'tokens' with tied=True, got 'vectors'"),
        ({"tied": True, "inputs": "tokens"}, "d_output must be d_input = 5 with tied=True, got 3"),
        ({"inputs": "pixels"}, "inputs must be one of vectors, tokens"),
        ({"max_distance": None}, "max_distance must be at least 2 .* got None"),
        ({"initialization": "normal"}, "initialization must be one of lecun_normal, mittal_2021"),
        ({"initialization": "mittal_2021"}, "tied must be True with initialization='mittal_2021'"),
        ({"n_readout": 0}, "n_readout must be None or at least 1, got 0"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **settings)


def test_an_unknown_setting_is_refused():
    with pytest.raises(TypeError, match="width"):
        TransformerConfig(width=3)  # pyright: ignore


def test_an_attention_that_needs_all_queries_gets_them_with_and_without_hooks():
    composition = QuasiAttentionConfig(gate_centring="matrix")
    attention = CodaAttentionConfig(n_heads=2, d_head=4, composition=composition)
    model = build(replace(SMALL, attention=attention, n_readout=1)).eval()
    inputs = inputs_for(model.config)
    logits, cache = model.run_with_cache(inputs)
    torch.testing.assert_close(model(inputs), logits)
    assert cache["blocks.1.attn.hook_pattern"].shape[2] > 1


def test_scaled_embeddings_and_a_tied_read_out_agree_with_torchs_own_layers():
    config = replace(
        SMALL,
        attention=AttentionConfig(n_heads=2, d_head=4),
        feed_forward=FeedForwardConfig(d_mlp=12, activation="relu"),
        inputs="tokens",
        d_output=5,
        positions="sinusoidal",
        max_distance=None,
        tied=True,
        scaled=True,
        norm_epsilon=0.1,
    )
    model = shake(Transformer(config, generator=torch.Generator().manual_seed(0)))
    tokens = inputs_for(config)
    x = model.embed.W_E[tokens] * 8**0.5 + sinusoidal_embedding(6, 8)
    for block in model.blocks:
        x = encoder_layer(block)(x)
    x = torch.nn.functional.layer_norm(x, (8,), model.ln_final.weight, model.ln_final.bias, 0.1)
    assert torch.allclose(model(tokens), x @ model.embed.W_E.T, atol=1e-4)


def test_dropout_is_applied_to_the_embedding_and_to_both_parts_of_a_block():
    model = build(replace(SMALL, dropout=0.5))
    inputs = inputs_for(SMALL)
    assert torch.equal(model(inputs), build(SMALL)(inputs))
    torch.manual_seed(0)
    _, cache = model.train().run_with_cache(inputs)
    assert 0.3 < (cache["hook_embed"] == 0).float().mean() < 0.7
    for before, part, after in (
        ("resid_pre", "attn_out", "resid_mid"),
        ("resid_mid", "mlp_out", "resid_post"),
    ):
        before, part, after = (cache[f"blocks.0.hook_{name}"] for name in (before, part, after))
        added = after - before
        kept = added.abs() > 1e-6
        assert 0.3 < kept.float().mean() < 0.7
        assert torch.allclose(added[kept], 2 * part[kept], atol=1e-5)
