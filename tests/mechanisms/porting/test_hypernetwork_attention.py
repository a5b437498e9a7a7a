"""Ported models against golden files of the authors' code and against its formulas in numpy."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from mechanisms import (
    ATTENTION_VARIANTS,
    SEQUENCE_MIXERS,
    Block,
    FeedForwardConfig,
    MultiHeadAttention,
    attention_from_flax,
    block_from_flax,
    load,
    save,
    transformer_from_flax,
)

GOLDEN = Path(__file__).parents[2] / "golden"
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
both_precisions = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])
every_mixer = pytest.mark.parametrize("mixer", SEQUENCE_MIXERS)
FORMULAS = {
    "softmax_attention": ("softmax", "default"),
    "softmax_hypatt": ("softmax", "mlp_relu"),
    "linear_attention": ("none", "default"),
    "linear_hypatt_no_rms_head": ("none", "mlp_relu"),
    "linear_hypatt_mlp_linear_no_rms_head": ("none", "mlp_linear"),
    "linear_attention_rms_head": ("rms_head", "default"),
    "linear_hypatt_mlp_linear": ("rms_head", "mlp_linear"),
    "linear_hypatt": ("rms_head", "mlp_relu"),
}


# Their modules in numpy. Parameters have their names and layouts.


def layer_norm(p, x):
    """Without `bias` in p: scale only."""
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    return centred / np.sqrt(variance + 1e-6) * p["scale"] + p.get("bias", 0)


def block_norm(p, x):
    """LayerNorm or, without a bias, RMSNorm."""
    if "bias" in p:
        return layer_norm(p, x)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"]


def dense(p, x):
    return x @ p["kernel"] + p.get("bias", 0)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention(p, mixer, x_q, x_kv, bias=0.0, mask=None):
    """Output and pattern."""
    normalization, target = FORMULAS[mixer]
    q, k, v = (
        np.einsum("bld,dhe->blhe", x, p[name]["kernel"]) + p[name].get("bias", 0)
        for name, x in (("query", x_q), ("key", x_kv), ("value", x_kv))
    )
    if "query_ln" in p:
        q, k = layer_norm(p["query_ln"], q), layer_norm(p["key_ln"], k)
    scores = np.einsum("bqhe,bkhe->bhqk", q / np.sqrt(q.shape[-1]), k) + bias
    mask = np.ones_like(scores, dtype=bool) if mask is None else mask
    if normalization == "softmax":
        pattern = softmax(np.where(mask, scores, np.finfo(scores.dtype).min))
    else:
        pattern = np.where(mask, scores, 0)
        if normalization == "rms_head":
            pattern = pattern / np.sqrt((pattern**2).mean(1, keepdims=True) + 1e-6)
    if target == "default":
        z = np.einsum("bhqk,bkhd->bqhd", pattern, v)
    else:
        hidden = np.einsum("bhqk,bkhd->bqkd", pattern, v)
        hidden = np.maximum(hidden, 0) if target == "mlp_relu" else hidden
        z = np.einsum("bhqk,bqkd->bqhd", pattern, hidden)
    out = np.einsum("bqhd,hdm->bqm", z, p["out"]["kernel"]) + p["out"].get("bias", 0)
    return out, pattern


def feed_forward(p, x):
    if "Dense_2" in p:
        gate = dense(p["Dense_0"], x)
        return dense(p["Dense_2"], dense(p["Dense_1"], x) * gate / (1 + np.exp(-gate)))
    x = dense(p["Dense_0"], x)
    gelu = x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2
    return dense(p["Dense_1"], gelu)


def relative_bias(p, length):
    """[head, query, key]; computed in float32, as theirs is."""
    table = p["rel_embedding"].astype(np.float32)
    n_buckets = table.shape[1]
    exact = n_buckets // 2
    bias = np.zeros((len(table), length, length), np.float32)
    for query in range(length):
        for key in range(length):
            n = max(query - key, 0)
            if n >= exact:
                wide = np.log(np.float32(n) / exact + np.finfo(np.float32).eps)
                wide = exact + int(wide / np.log(n_buckets / exact) * (n_buckets - exact))
                n = min(wide, n_buckets - 1)
            bias[:, query, key] = table[:, n]
    return bias


def sinusoids(length, width):
    pe = np.zeros((length, width), np.float32)
    half = width // 2
    rate = np.exp(np.arange(half) * -np.log(1e4) / (half - 1))
    angle = np.arange(length)[:, None] * rate
    pe[:, :half], pe[:, half : 2 * half] = np.sin(angle), np.cos(angle)
    return pe


def block(p, mixer, x, mask):
    """The residual stream after the block, and the pattern."""
    bias = 0.0
    if "relative_embedding" in p:
        bias = relative_bias(p["relative_embedding"], x.shape[1])
    normed = block_norm(p["norm1"], x)
    attended, pattern = attention(p["sequence_mixer"], mixer, normed, normed, bias, mask)
    x = x + attended
    return x + feed_forward(p["state_mixer"], block_norm(p["norm2"], x)), pattern


def transformer(params, inputs, *, mixer, n_layers, causal, sinusoidal):
    """Logits, residual streams after embedding and blocks, and patterns."""
    embedding = params["embedding"]
    tokens = "embedding" in embedding
    x = embedding["embedding"][inputs] if tokens else dense(embedding, inputs)
    length, width = x.shape[1:]
    if sinusoidal:
        x = x + sinusoids(length, width)
    mask = np.tril(np.ones((length, length), bool)) if causal else None
    streams, patterns = [x], []
    for layer in range(n_layers):
        shared = params.get("transformer_block")
        p = params[f"transformer_block_{layer}"] if shared is None else shared
        x, pattern = block(p, mixer, x, mask)
        streams.append(x)
        patterns.append(pattern)
    x = layer_norm(params["decoder_norm"], x)
    if "logitdense" in params:
        return dense(params["logitdense"], x), streams, patterns
    return x @ embedding["embedding"].T / np.sqrt(width), streams, patterns


# Trees of random parameters, with the shapes that their modules have.


class Draw:
    """Random parameters; float32 values as float64, so that both precisions have the same."""

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)

    def __call__(self, *shape, mean=0.0, scale=0.4):
        drawn = mean + scale * self.rng.standard_normal(shape)
        return drawn.astype(np.float32).astype(np.float64)

    def dense(self, *shape, features, bias=True):
        """`features`: the last axes of the kernel, which the bias has too."""
        tree = {"kernel": self(*shape)}
        return tree | ({"bias": self(*shape[-features:])} if bias else {})

    def norm(self, width, bias):
        tree = {"scale": self(width, mean=1)}
        return tree | ({"bias": self(width)} if bias else {})

    def attention(self, *, d_model=10, heads=3, d_head=5, d_value=4, normalize_qk=False, bias=True):
        tree = {
            "query": self.dense(d_model, heads, d_head, features=2, bias=bias),
            "key": self.dense(d_model, heads, d_head, features=2, bias=bias),
            "value": self.dense(d_model, heads, d_value, features=2, bias=bias),
            "out": self.dense(heads, d_value, d_model, features=1, bias=bias),
        }
        if normalize_qk:
            tree |= {name: self.norm(d_head, bias=False) for name in ("query_ln", "key_ln")}
        return tree

    def block(self, *, norm="layer", state_mixer="gelu_mlp", max_distance=12, **sizes):
        swiglu = state_mixer == "swiglu"
        names = ("Dense_0", "Dense_1", "Dense_2") if swiglu else ("Dense_0", "Dense_1")
        mlp = {name: self.dense(10, 14, features=1, bias=not swiglu) for name in names[:-1]}
        mlp[names[-1]] = self.dense(14, 10, features=1, bias=not swiglu)
        tree = {
            "norm1": self.norm(10, norm == "layer"),
            "norm2": self.norm(10, norm == "layer"),
            "sequence_mixer": self.attention(**sizes),
            "state_mixer": mlp,
        }
        if max_distance:
            tree["relative_embedding"] = {"rel_embedding": self(3, max_distance)}
        return tree

    def transformer(self, *, tokens=False, output=6, shared=False, **settings):
        embedding = {"embedding": self(7, 10)} if tokens else self.dense(7, 10, features=1)
        tree = {"embedding": embedding, "decoder_norm": self.norm(10, bias=True)}
        names = [""] if shared else ["_0", "_1"]
        tree |= {f"transformer_block{name}": self.block(**settings) for name in names}
        if output:
            tree["logitdense"] = self.dense(10, output, features=1)
        return tree


def cast(tree, dtype):
    """A copy of a tree as float32 or float64."""
    if isinstance(tree, dict):
        return {name: cast(value, dtype) for name, value in tree.items()}
    return tree.astype(str(dtype).removeprefix("torch."))


def assert_close(ours, theirs, dtype, factor=1):
    """The tolerance is relative to the largest entry; entries of HYLA are of order 100."""
    ours = ours.detach()
    assert ours.dtype == dtype
    assert ours.shape == theirs.shape
    allowed = factor * TOLERANCE[dtype] * max(1, np.abs(theirs).max())
    assert np.abs(ours.double().numpy() - theirs).max() < allowed


# Attention.


def test_all_mixers_of_their_code_are_known():
    networks = {"default": "single", "mlp_relu": "relu", "mlp_linear": "linear"}
    for mixer, (normalization, target) in FORMULAS.items():
        assert ATTENTION_VARIANTS[SEQUENCE_MIXERS[mixer]] == (normalization, networks[target])
    assert SEQUENCE_MIXERS.keys() == FORMULAS.keys()


@both_precisions
@pytest.mark.parametrize("normalize_qk", [False, True], ids=["plain", "normalize_qk"])
@every_mixer
def test_attention_between_two_sequences_with_random_masks(mixer, normalize_qk, dtype):
    draw = Draw()
    tree = draw.attention(normalize_qk=normalize_qk)
    x_q, x_kv = draw(2, 5, 10, scale=1), draw(2, 8, 10, scale=1)
    bias, mask = draw(1, 3, 5, 8), draw.rng.random((2, 1, 5, 8)) < 0.6
    mask[..., 0] = True  # a query without keys has no defined softmax
    expected, pattern = attention(tree, mixer, x_q, x_kv, bias, mask)
    ported = attention_from_flax(cast(tree, dtype), sequence_mixer=mixer)
    assert isinstance(ported, MultiHeadAttention)
    if normalize_qk:
        # Exchanged scales would give the same scores.
        assert np.array_equal(ported.ln_q.weight.detach(), tree["query_ln"]["scale"])
    seen = []
    ported.hook_pattern.add_hook(lambda x, hook: seen.append(x))
    x_q, x_kv, bias = (torch.tensor(x, dtype=dtype) for x in (x_q, x_kv, bias))
    out = ported(x_q, x_kv, bias=bias, mask=torch.tensor(mask))
    assert_close(out, expected, dtype)
    assert_close(seen[0], pattern, dtype)


@both_precisions
@every_mixer
def test_self_attention_without_biases(mixer, dtype):
    draw = Draw(1)
    tree, x = draw.attention(bias=False, d_value=5), draw(2, 6, 10, scale=1)
    ported = attention_from_flax(cast(tree, dtype), sequence_mixer=mixer)
    assert not ported.config.bias
    assert ported.config.d_value is None
    tokens = torch.tensor(x, dtype=dtype)
    assert_close(ported(tokens, tokens), attention(tree, mixer, x, x)[0], dtype)


def golden_attention(data, prefix=""):
    tree = {}
    for letter, name in (("Q", "query"), ("K", "key"), ("V", "value"), ("O", "out")):
        kernel, bias = data[f"{prefix}W_{letter}"], data[f"{prefix}b_{letter}"]
        tree[name] = {"kernel": kernel if letter == "O" else kernel.swapaxes(0, 1), "bias": bias}
    if f"{prefix}ln_q_w" in data:
        tree |= {f"{n}_ln": {"scale": data[f"{prefix}ln_{n[0]}_w"]} for n in ("query", "key")}
    return tree


def mixer_of(path):
    """The name of a file is hyla_attn_{normalization}_{network}_{case}[_normqk].npz."""
    name = path.stem.removeprefix("hyla_attn_").removesuffix("_normqk").rsplit("_", 1)[0]
    return next(mixer for mixer, formula in FORMULAS.items() if "_".join(formula) == name)


@both_precisions
@pytest.mark.parametrize("path", sorted(GOLDEN.glob("hyla_attn_*.npz")), ids=lambda p: p.stem)
def test_attention_agrees_with_golden_files(path, dtype):
    data, mixer = np.load(path), mixer_of(path)
    tree = golden_attention(data)
    ported = attention_from_flax(cast(tree, dtype), sequence_mixer=mixer)
    x_q, x_kv, bias = (
        torch.tensor(data[name], dtype=dtype) for name in ("x_q", "x_kv", "attention_bias")
    )
    out = ported(x_q, x_kv, bias=bias, mask=torch.tensor(data["mask"]))
    assert_close(out, data["bias_masked.out"], dtype)
    assert_close(ported(x_q, x_kv), data["nobias_nomask.out"], dtype)
    # The formulas above, which stand in where there is no file.
    literal, pattern = attention(
        tree, mixer, data["x_q"], data["x_kv"], data["attention_bias"], data["mask"]
    )
    assert np.allclose(literal, data["bias_masked.out"], rtol=1e-10, atol=1e-10)
    assert np.allclose(pattern, data["bias_masked.attn"], rtol=1e-10, atol=1e-10)


# Blocks and models.


@both_precisions
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_distance": None},
        {"norm": "rms", "state_mixer": "swiglu", "normalize_qk": True, "max_distance": 7},
    ],
    ids=["default", "no positions", "rms, swiglu, normalize_qk"],
)
@every_mixer
def test_a_block(mixer, settings, dtype):
    draw = Draw(2)
    tree, x = draw.block(**settings), draw(2, 9, 10, scale=1)
    ported = block_from_flax(cast(tree, dtype), sequence_mixer=mixer)
    assert isinstance(ported, Block)
    assert (ported.relative_bias is None) == ("relative_embedding" not in tree)
    mask = draw.rng.random((2, 1, 9, 9)) < 0.6
    mask[..., 0] = True
    out = ported(torch.tensor(x, dtype=dtype), mask=torch.tensor(mask))
    assert_close(out, block(tree, mixer, x, mask)[0], dtype)


MODELS = {
    "default": {},
    "causal": {"causal": True},
    "sinusoidal": {"sinusoidal": True, "max_distance": None},
    "no positions": {"max_distance": None},
    "shared": {"shared": True, "n_layers": 3},
    "tokens with a read-out": {"tokens": True, "output": 4, "causal": True},
    "tied tokens": {"tokens": True, "output": None, "causal": True},
    "vocab_causal_shared": {
        "tokens": True,
        "output": None,
        "causal": True,
        "sinusoidal": True,
        "shared": True,
        "n_layers": 3,
        "norm": "rms",
        "state_mixer": "swiglu",
        "normalize_qk": True,
    },
}
ARGUMENTS = ("causal", "sinusoidal", "n_layers")


def example(settings):
    """A tree, inputs, and the arguments that the tree does not imply."""
    draw = Draw(3)
    arguments = {"causal": False} | {k: v for k, v in settings.items() if k in ARGUMENTS}
    tree = draw.transformer(**{k: v for k, v in settings.items() if k not in ARGUMENTS})
    inputs = draw.rng.integers(7, size=(2, 17)) if settings.get("tokens") else draw(2, 17, 7)
    return tree, inputs, arguments


@both_precisions
@pytest.mark.parametrize("mixer", ["softmax_attention", "linear_attention", "linear_hypatt"])
@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS)
def test_a_transformer(settings, mixer, dtype):
    tree, inputs, arguments = example(settings)
    given = {"n_layers": 2, "sinusoidal": False} | arguments
    logits, streams, patterns = transformer(tree, inputs, mixer=mixer, **given)
    model = transformer_from_flax(cast(tree, dtype), sequence_mixer=mixer, **arguments)
    assert not model.training
    ours = torch.tensor(inputs, dtype=torch.int64 if settings.get("tokens") else dtype)
    our_logits, cache = model.run_with_cache(ours)
    assert_close(our_logits, logits, dtype)
    assert_close(cache["hook_embed"], streams[0], dtype)
    for layer, (stream, pattern) in enumerate(zip(streams[1:], patterns, strict=True)):
        assert_close(cache[f"blocks.{layer}.hook_resid_post"], stream, dtype)
        # Where the scores of all heads are near 0, normalising them amplifies rounding.
        factor = 5 if mixer == "linear_hypatt" else 1
        assert_close(cache[f"blocks.{layer}.attn.hook_pattern"], pattern, dtype, factor)


def golden_tree(data):
    tree = {
        "embedding": {"kernel": data["embed.W"], "bias": data["embed.b"]},
        "decoder_norm": {"scale": data["ln_final.w"], "bias": data["ln_final.b"]},
        "logitdense": {"kernel": data["unembed.W"], "bias": data["unembed.b"]},
    }
    for layer in (0, 1):
        p = f"block{layer}."
        tree[f"transformer_block_{layer}"] = {
            "norm1": {"scale": data[f"{p}ln1.w"], "bias": data[f"{p}ln1.b"]},
            "norm2": {"scale": data[f"{p}ln2.w"], "bias": data[f"{p}ln2.b"]},
            "relative_embedding": {"rel_embedding": data[f"{p}attn.rel_bias_table"]},
            "sequence_mixer": golden_attention(data, f"{p}attn."),
            "state_mixer": {
                f"Dense_{i}": {"kernel": data[f"{p}mlp.W_{n}"], "bias": data[f"{p}mlp.b_{n}"]}
                for i, n in enumerate(("in", "out"))
            },
        }
    return tree


@both_precisions
@pytest.mark.parametrize("mixer", ["softmax_attention", "linear_hypatt"])
def test_transformers_agree_with_golden_files(mixer, dtype):
    data = np.load(GOLDEN / f"hyla_transformer_{mixer}.npz")
    tree = golden_tree(data)
    model = transformer_from_flax(cast(tree, dtype), sequence_mixer=mixer, causal=False)
    logits, cache = model.run_with_cache(torch.tensor(data["input"], dtype=dtype))
    assert_close(logits, data["logits"], dtype)
    assert_close(cache["hook_embed"], data["resid.embed"], dtype)
    for layer in (0, 1):
        ours, theirs = f"blocks.{layer}.", f"block{layer}"
        assert_close(cache[f"{ours}hook_resid_post"], data[f"resid.{theirs}_out"], dtype)
        assert_close(cache[f"{ours}attn.hook_pattern"], data[f"{theirs}.attn_pattern"], dtype)
        bias = model.blocks[layer].relative_bias(36, 36)
        assert_close(bias, data[f"{theirs}.attn_bias"].astype(np.float64), dtype)
    # The formulas above, which stand in where there is no file.
    literal, _, _ = transformer(
        tree, data["input"], mixer=mixer, n_layers=2, causal=False, sinusoidal=False
    )
    assert np.allclose(literal, data["logits"], rtol=1e-10, atol=1e-10)


def test_settings_that_parameters_imply():
    tree, _, arguments = example(MODELS["vocab_causal_shared"])
    config = transformer_from_flax(tree, sequence_mixer="linear_hypatt", **arguments).config
    assert config.attention.normalize_qk
    assert config.attention.d_value == 4
    assert config.feed_forward == FeedForwardConfig(d_mlp=14, activation="swiglu", bias=False)
    assert (config.norm, config.positions) == ("rms_norm", "relative_and_sinusoidal")
    assert (config.max_distance, config.n_buckets) == (12, None)
    assert (config.d_input, config.d_output, config.inputs) == (7, 7, "tokens")
    assert config.tied
    assert config.shared
    assert config.n_layers == 3


def test_a_ported_model_is_saved_reads_out_fewer_positions_and_owns_its_weights(tmp_path):
    tree, inputs, _ = example({})
    arguments = {"sequence_mixer": "linear_hypatt", "causal": False}
    model = transformer_from_flax(tree, **arguments, n_readout=4, dropout=0.1)
    logits = model(torch.tensor(inputs))
    full = transformer_from_flax(tree, **arguments)
    assert torch.allclose(logits, full(torch.tensor(inputs))[:, -4:], atol=1e-9)
    save(model, tmp_path / "model.safetensors")
    tree["embedding"]["kernel"][:] = 0
    loaded = load(tmp_path / "model.safetensors")
    assert loaded.config == model.config
    assert loaded.config.attention.dropout == 0.1
    for each in (model, loaded):
        assert torch.equal(each(torch.tensor(inputs)), logits)
    assert all(weight.requires_grad for weight in model.parameters())


# Errors.


def paths_of(tree, prefix=()):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from paths_of(value, (*prefix, name))
        else:
            yield (*prefix, name)


def parent(tree, path):
    for name in path[:-1]:
        tree = tree[name]
    return tree


@pytest.mark.parametrize("name", ["default", "vocab_causal_shared", "tokens with a read-out"])
def test_missing_unknown_and_wrongly_shaped_parameters_are_named(name):
    tree, _, arguments = example(MODELS[name])
    arguments |= {"sequence_mixer": "linear_hypatt"}
    for path in paths_of(tree):
        changed = copy.deepcopy(tree)
        array = parent(changed, path).pop(path[-1])
        # The table of a shared block implies by itself whether and how far distances count.
        only_table = name == "vocab_causal_shared" and path[-1] == "rel_embedding"
        if not only_table:
            with pytest.raises(
                ValueError, match=rf"parameters must have {'/'.join(path)} \[.*got none"
            ):
                transformer_from_flax(changed, **arguments)
        for wrong in (array[None], np.concatenate([array, array], -1))[: 1 if only_table else 2]:
            parent(changed, path)[path[-1]] = wrong
            with pytest.raises(ValueError, match=f"{'/'.join(path)} "):
                transformer_from_flax(changed, **arguments)
        parent(changed, path)[path[-1]] = array
        parent(changed, path)["extra"] = array
        with pytest.raises(ValueError, match=f"without .*, got {'/'.join((*path[:-1], 'extra'))}"):
            transformer_from_flax(changed, **arguments)


def test_a_wrong_shape_names_the_parameters_that_imply_another():
    tree = Draw().attention()
    tree["key"]["kernel"] = tree["key"]["kernel"][:, :2]
    message = (
        r"key/kernel must be \[10, 3, 5\], got \[10, 2, 5\]; sizes follow from query/kernel "
        r"\[10, 3, 5\], value/kernel \[10, 3, 4\]"
    )
    with pytest.raises(ValueError, match=message):
        attention_from_flax(tree, sequence_mixer="softmax_attention")


def test_wrong_arguments_are_refused():
    tree, _, _ = example({})
    shared, _, _ = example(MODELS["shared"])
    mixer = {"sequence_mixer": "linear_hypatt", "causal": False}
    with pytest.raises(ValueError, match=r"one of softmax_attention.* got 'swiglu_hypatt'"):
        transformer_from_flax(tree, sequence_mixer="swiglu_hypatt", causal=False)
    with pytest.raises(ValueError, match=r"n_layers must be the number of steps .* got None"):
        transformer_from_flax(shared, **mixer)
    with pytest.raises(ValueError, match=r"n_layers must be None or .* = 2, got 3"):
        transformer_from_flax(tree, **mixer, n_layers=3)
    with pytest.raises(ValueError, match=r"variables\['params'\], got all collections: params, p"):
        transformer_from_flax({"params": tree, "params_axes": {}}, **mixer)
    del tree["transformer_block_0"]
    with pytest.raises(ValueError, match="must have transformer_block_0/sequence_mixer/query"):
        transformer_from_flax(tree, **mixer)
