"""Every model that `mechanisms` exports works with `probes.capture` and `probes.interchange`."""

import numpy as np
import pytest
import torch

import mechanisms
import probes
import tasks
from tests.contracts.examples import ATTENTIONS

TASK = tasks.Raven(tasks.RavenConfig(n_features=2))


def transformer(**changes):
    config = mechanisms.TransformerConfig(
        **{
            "d_input": 8,
            "d_output": 8,
            "d_model": 16,
            "n_layers": 2,
            "attention": mechanisms.AttentionConfig.named("hyla", n_heads=4, d_head=4),
            "feed_forward": mechanisms.FeedForwardConfig(d_mlp=16),
            "max_distance": 18,
            "n_readout": 2,
        }
        | changes
    )
    generator = torch.Generator().manual_seed(0)
    # Dropout would differ between two runs.
    model = mechanisms.Transformer(config, generator=generator).eval()
    # Biases start at 0, where the queries of empty tokens are 0.
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    return model


def with_attention(config):
    """A transformer that knows positions, by this attention itself or by T5's bias."""
    positions = "none" if config.measures_distances else "relative"
    return transformer(attention=config, positions=positions)


ATTENTION_MODELS = [
    pytest.param(with_attention(example.values[0]), id=example.id) for example in ATTENTIONS
]
MODELS = [
    *ATTENTION_MODELS,
    pytest.param(transformer(shared=True, n_layers=3), id="shared weights"),
    pytest.param(
        transformer(
            norm="rms_norm",
            positions="relative_and_sinusoidal",
            feed_forward=mechanisms.FeedForwardConfig(d_mlp=8, activation="swiglu", bias=False),
        ),
        id="RMSNorm, SwiGLU",
    ),
    pytest.param(
        transformer(feed_forward=mechanisms.MixtureOfExpertsConfig(n_experts=3, top_k=1, d_mlp=8)),
        id="experts",
    ),
]


def assert_capture_agrees_with_cache(model, batches, cache):
    """Check that all hooks, captured from batches, equal the cache of the last examples."""
    quantities = {
        name: probes.Quantity(
            name, dims=("example", *(f"{name}_{axis}" for axis in range(1, cache[name].ndim)))
        )
        for name in model.hook_dict
    }
    data = probes.capture(model, batches, quantities)
    for name in model.hook_dict:
        expected = cache[name].detach()
        captured = torch.from_numpy(data[name].to_numpy())[-len(expected) :]
        assert torch.allclose(captured, expected, atol=1e-6), name


def patch_all_positions(model, base, source, *, hooks, answer, answers):
    """How often the answer becomes that of the source when hooks are patched at all positions.

    Returns:
        [site]: the rate for each of `hooks`, and for `none`.
    """
    result = probes.interchange(
        model,
        base,
        source,
        hooks=hooks,
        where=torch.ones(1, 1, 1, dtype=torch.bool),
        answer=answer,
        outcomes={"source": answers},
    )
    return result["rate"].sel(outcome="source")


@pytest.mark.parametrize("model", MODELS)
def test_captured_patterns_agree_with_the_cache(model):
    quantity = probes.Quantity(
        "blocks.*.attn.hook_pattern", dims=("example", "head", "query_pos", "key_pos")
    )
    batches = [TASK.batch("id", index, 5) for index in range(3)]
    data = probes.capture(model, batches, {"pattern": quantity})
    assert data["pattern"].shape == (15, model.config.n_layers, 4, 18, 18)
    for number, batch in enumerate(batches):
        _, cache = model.run_with_cache(batch.inputs)
        for layer in range(model.config.n_layers):
            captured = data["pattern"].isel(example=slice(5 * number, 5 * number + 5), layer=layer)
            cached = cache[f"blocks.{layer}.attn.hook_pattern"].detach().numpy()
            assert np.allclose(captured, cached, atol=1e-6)
        rules = data["rule"].isel(example=slice(5 * number, 5 * number + 5))
        assert np.array_equal(rules, batch.latents["rule"])


def ranking(logits):
    """The order of all logits: the argmax of an untrained model is often the same everywhere."""
    return logits.argsort(-1)


@pytest.mark.parametrize("model", MODELS)
def test_patching_all_positions_gives_the_answers_of_the_source(model):
    base, source = (TASK.batch("id", index, 20) for index in (0, 1))
    with torch.no_grad():
        answers = ranking(model(source.inputs))
    last = model.config.n_layers - 1
    rate = patch_all_positions(
        model,
        base.inputs,
        source.inputs,
        hooks={"stream": f"blocks.{last}.hook_resid_post", "embedding": "hook_embed"},
        answer=ranking,
        answers=answers,
    )
    assert rate.sel(site=["stream", "embedding"]).min() == 1
    assert rate.sel(site="none") < 1


EXPRESSIONS = tasks.TableLookup(
    tasks.TableLookupConfig(n_tables=3, n_compositions=300, n_id=20, n_valid=30, n_ood=30)
)
SIZES = {"d_input": len(EXPRESSIONS.vocabulary), "d_output": len(EXPRESSIONS.answers)}
WIDTHS = {"d_embed": 12, "d_hidden": 12}


def router(variant):
    config = mechanisms.NeuralDataRouterConfig.named(
        variant, d_model=12, d_mlp=16, n_heads=3, n_steps=3, **SIZES
    )
    return mechanisms.NeuralDataRouter(config, generator=torch.Generator().manual_seed(0)).eval()


def lstm(**changes):
    config = mechanisms.LstmConfig(**SIZES, **WIDTHS, **changes)
    return mechanisms.Lstm(config, generator=torch.Generator().manual_seed(0))


SEQUENCE_MODELS = {name: router(name) for name in ("ndr", "abs_rel_gate", "transformer")} | {
    "lstm": lstm(n_layers=2),
    "bilstm": lstm(bidirectional=True),
    "dnc": mechanisms.Dnc(
        mechanisms.DncConfig(n_cells=4, d_cell=4, n_read_heads=2, **SIZES, **WIDTHS),
        generator=torch.Generator().manual_seed(0),
    ),
}


@pytest.mark.parametrize("model", SEQUENCE_MODELS.values(), ids=SEQUENCE_MODELS)
def test_capture_keeps_every_hook_of_a_sequence_model(model):
    batches = [EXPRESSIONS.batch("id", index, 5) for index in range(2)]
    model(batches[1].inputs)  # recurrent models create the hooks of a step when they first take it
    logits, cache = model.run_with_cache(batches[1].inputs)
    assert len(model.hook_dict) > 5
    assert_capture_agrees_with_cache(model, batches, cache)
    assert logits.shape == (5, 1, 8)


@pytest.mark.parametrize("model", SEQUENCE_MODELS.values(), ids=SEQUENCE_MODELS)
def test_patching_the_embedding_gives_the_answers_of_the_source(model):
    # Examples of the same length, since the read-out column is not in the embedding.
    batch = EXPRESSIONS.batch("valid", 0, 30)
    same_depth = (batch.latents["depth"] == 6).nonzero()[:, 0]
    base, source = batch.inputs[same_depth], batch.inputs[same_depth.flip(0)]
    with torch.no_grad():
        answers = model(source).argmax(-1)
    rate = patch_all_positions(
        model,
        base,
        source,
        hooks={"embedding": "hook_embed"},
        answer=lambda logits: logits.argmax(-1),
        answers=answers,
    )
    assert rate.sel(site="embedding") == 1


PARTS = {
    "attention": mechanisms.AttentionConfig(n_heads=2, d_head=4),
    "feed_forward": mechanisms.FeedForwardConfig(d_mlp=12),
    "d_output": 7,
    "d_model": 8,
    "n_layers": 2,
}
PATCHES = {"image_size": 8, "patch_size": 4, "n_channels": 1}


def random_inputs(*shape, below=None, seed=0):
    """Uniform numbers in [0, 1), or integers below a number."""
    generator = torch.Generator().manual_seed(seed)
    if below is None:
        return torch.rand(shape, generator=generator)
    return torch.randint(below, shape, generator=generator)


def seeded(model, **changes):
    config = getattr(mechanisms, f"{model.__name__}Config")(**PARTS | changes)
    return model(config, generator=torch.Generator().manual_seed(0)).eval()


# The model, the inputs of 12 examples, and the hook that is patched. Inputs that the patch does not
# replace are the same for all examples.
MODELS_OF_SEVERAL_INPUTS = {
    "patches": (
        seeded(mechanisms.PatchTransformer, **PATCHES),
        (random_inputs(12, 1, 8, 8),),
        "hook_embed",
    ),
    "patches and a vector": (
        seeded(mechanisms.PatchTransformer, **PATCHES, d_condition=5),
        (random_inputs(12, 1, 8, 8), random_inputs(12, 5)),
        "hook_embed",
    ),
    "patches and tasks": (
        seeded(mechanisms.PatchTransformer, **PATCHES | {"d_output": (3, 7)}),
        (random_inputs(12, 1, 8, 8), torch.ones(12, dtype=torch.int64)),
        "hook_embed",
    ),
    "images": (
        seeded(mechanisms.RelationClassifier, image_size=8),
        (random_inputs(12, 4, 1, 8, 8),),
        "hook_embed",
    ),
    "encoder-decoder": (
        seeded(mechanisms.EncoderDecoder, d_input=5, begin=5, end=6, padding=-1),
        (random_inputs(12, 6, below=5), torch.tensor([[5, 1, 0]]).repeat(12, 1)),
        "hook_encoded",
    ),
    "pairs": (
        mechanisms.DecomposableAttention(
            mechanisms.DecomposableAttentionConfig(
                d_input=5,
                d_output=7,
                padding=-1,
                d_model=8,
                composition=mechanisms.QuasiAttentionConfig(gate_centring="row"),
            ),
            generator=torch.Generator().manual_seed(0),
        ),
        (random_inputs(12, 6, below=5), random_inputs(12, 4, below=5, seed=1)),
        "hook_aggregated",
    ),
}


@pytest.mark.parametrize(
    ("model", "inputs", "_"), MODELS_OF_SEVERAL_INPUTS.values(), ids=MODELS_OF_SEVERAL_INPUTS
)
def test_capture_keeps_every_hook_of_a_model_of_several_inputs(model, inputs, _):
    batch = tasks.Batch(
        inputs=inputs,
        targets=torch.zeros(12, 1, dtype=torch.int64),
        mask=torch.ones(12, 1, dtype=torch.bool),
        latents={"number": torch.arange(12)},
    )
    _, cache = model.run_with_cache(*inputs)
    assert len(model.hook_dict) > 10
    assert_capture_agrees_with_cache(model, batch.parts(5), cache)


@pytest.mark.parametrize(
    ("model", "inputs", "site"), MODELS_OF_SEVERAL_INPUTS.values(), ids=MODELS_OF_SEVERAL_INPUTS
)
def test_patching_a_model_of_several_inputs_gives_the_answers_of_the_source(model, inputs, site):
    source = tuple(each.flip(0) for each in inputs)
    with torch.no_grad():
        answers = ranking(model(*source)).flatten(1)
    rate = patch_all_positions(
        model,
        inputs,
        source,
        hooks={"stream": site},
        answer=lambda logits: ranking(logits).flatten(1),
        answers=answers,
    )
    assert rate.sel(site="stream") == 1
    assert rate.sel(site="none") < 1


def test_a_compiled_transformer_is_refused():
    compiled = torch.compile(transformer())
    quantity = probes.Quantity("hook_embed", dims=("example", "pos", "d_model"))
    with pytest.raises(ValueError, match="Pass the eager model"):
        probes.capture(compiled, [TASK.batch("id", 0, 2)], {"x": quantity})


def test_probes_work_after_a_call_with_more_steps():
    """A model with shared weights keeps the hook points of all steps that it ever took."""
    model = transformer(shared=True, n_layers=3)
    base, source = (TASK.batch("id", index, 20).inputs for index in (0, 1))
    hooks = {"all": "blocks.*.hook_resid_post"}
    quantity = probes.Quantity("blocks.*.hook_resid_post", ("example", "pos", "d"))
    batches = [TASK.batch("id", 0, 20)]
    before = probes.capture(model, batches, {"state": quantity})
    with torch.no_grad():
        answers = ranking(model(source))
        longer = ranking(model(source, n_steps=7))
    assert len(probes.resolve_hooks(model, hooks["all"])) == 7
    assert before.identical(probes.capture(model, batches, {"state": quantity}))
    rate = patch_all_positions(model, base, source, hooks=hooks, answer=ranking, answers=answers)
    assert rate.sel(site="all") == 1
    more = probes.hooked(model, n_steps=7)
    assert probes.capture(more, batches, {"state": quantity}).sizes["layer"] == 7
    rate = patch_all_positions(more, base, source, hooks=hooks, answer=ranking, answers=longer)
    assert rate.sel(site="all") == 1


def test_a_recurrent_network_can_be_captured_after_a_longer_batch():
    config = mechanisms.LstmConfig(d_input=8, d_output=8, d_embed=8, d_hidden=8)
    model = mechanisms.Lstm(config).eval()
    long, short = torch.randint(8, (2, 9)), torch.randint(8, (2, 4))
    model(long)
    quantity = probes.Quantity("layers.0.steps.*.hook_hidden", ("example", "d"))
    batch = tasks.Batch(short, short, torch.ones_like(short).bool(), {})
    assert probes.capture(model, [batch], {"h": quantity}).sizes["layer"] == 4
