"""Models trained with the published code of "Attention as a Hypernetwork" (Schug et al. 2024).

The code (github.com/smonsays/hypernetwork-attention, folder `hyla/models`) is written with flax.
The functions here take its parameters, the collection `params` of flax's variables (in a saved
`ExperimentState` it is `state.params["params"]`): a nested mapping from names to numpy arrays, or
to what `numpy.asarray` takes, such as jax arrays. They return a module with the same function.
Weights keep their precision; models in float64 agree to 1e-9.

Names and layouts, theirs and ours (the same layout, unless both are given):

- `embedding/kernel`, `embedding/bias` of vectors, `embedding/embedding` of tokens: `embed.W_E`
  [d_input, d_model], `embed.b_E`
- `transformer_block_{i}`: `blocks.{i}`; `transformer_block`, shared by all steps: `core`
- `norm1`, `norm2`, `decoder_norm`, each with `scale` and, if LayerNorm, `bias`: `ln1`, `ln2`,
  `ln_final`, with `weight` and `bias`
- `relative_embedding/rel_embedding` [head, bucket]: `relative_bias.table`
- `sequence_mixer/query/kernel`, `key`, `value` [d_model, head, d_head]: `attn.W_Q`, `W_K`, `W_V`
  [head, d_model, d_head]; `bias` [head, d_head]: `b_Q`, `b_K`, `b_V`
- `sequence_mixer/out/kernel` [head, d_value, d_model]: `attn.W_O`; `bias` [d_model]: `b_O`
- `sequence_mixer/query_ln/scale`, `key_ln` [d_head]: `attn.ln_q.weight`, `ln_k.weight`
- `state_mixer/Dense_0`, `Dense_1`: `mlp.W_in`, `b_in`, `W_out`, `b_out`; of SwiGLU, without
  biases, `Dense_0`, `Dense_1`, `Dense_2`: `mlp.W_gate`, `W_in`, `W_out`
- `logitdense/kernel`, `logitdense/bias`: `unembed.W_U`, `b_U`; without them the read-out is tied

Conventions of their models, which ours share:

- Inputs are vectors [batch, pos, d_input] or token ids [batch, pos]. Symbolic Raven: one-hot
  integers, panels in reading order and one token per feature, the tokens of the last panel all
  zero (not a class of their own); logits at these last tokens count. Fuzzy logic: a point and its
  value, which is 0 at the last token; the output there counts.
- Distances have as many buckets as `max_distance`, the width of the table: a bucket for each
  distance below half of that, wider ones above. Every key to the right of its query is in bucket 0,
  like the query itself, also without a causal mask.
- Sinusoidal positions are float32, and so are the biases of relative positions in their code, even
  if all else is computed in float64.
- Masks are True where a query may attend. A query that may attend to nothing receives zeros here;
  their softmax gives it the mean of all keys.

Not covered: their block types `reversed` and `no_ffn`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from mechanisms.attention.multi_head import (
    ATTENTION_VARIANTS,
    AttentionConfig,
    MultiHeadAttention,
)
from mechanisms.layers.feed_forward import FeedForwardConfig
from mechanisms.models.transformer import Block, Transformer, TransformerConfig, build_block
from mechanisms.porting.weights import Module, PublishedWeights

SEQUENCE_MIXERS = {
    "softmax_attention": "softmax",
    "softmax_hypatt": "softmax_relu",
    "linear_attention": "linear",
    "linear_hypatt_no_rms_head": "linear_relu",
    "linear_hypatt_mlp_linear_no_rms_head": "linear_linear",
    "linear_attention_rms_head": "rms_head",
    "linear_hypatt_mlp_linear": "rms_head_linear",
    "linear_hypatt": "hyla",
}
"""From the setting `sequence_mixer` of Schug et al.'s code to `ATTENTION_VARIANTS`."""

_ATTENTION_PATHS = {
    f"{kind}_{letter}": f"{name}/{'kernel' if kind == 'W' else 'bias'}"
    for letter, name in (("Q", "query"), ("K", "key"), ("V", "value"), ("O", "out"))
    for kind in "Wb"
} | {"ln_q.weight": "query_ln/scale", "ln_k.weight": "key_ln/scale"}
_FEED_FORWARD_PATHS = {
    "W_in": "Dense_0/kernel",
    "b_in": "Dense_0/bias",
    "W_out": "Dense_1/kernel",
    "b_out": "Dense_1/bias",
}
_SWIGLU_PATHS = {
    "W_gate": "Dense_0/kernel",
    "W_in": "Dense_1/kernel",
    "W_out": "Dense_2/kernel",
}


def attention_from_flax(
    parameters: Mapping[str, Any], *, sequence_mixer: str, dropout: float = 0.0
) -> MultiHeadAttention:
    """The attention with these parameters, in evaluation mode.

    Sizes, biases and the normalisation of queries and keys follow from the parameters.

    Args:
        parameters: those of a `MultiHeadDotProductAttention`: `query`, `key`, `value`, `out`, and
            with normalised queries and keys `query_ln`, `key_ln`.
        sequence_mixer: one of `SEQUENCE_MIXERS`, which says what the parameters do not.
        dropout: `attention_dropout_rate`, used in further training only.

    Raises:
        ValueError: a parameter is missing, unknown or has the wrong shape; or `sequence_mixer` is
            unknown.

    Example:
        >>> parameters = variables["params"]["transformer_block_0"]["sequence_mixer"]
        >>> attention = attention_from_flax(parameters, sequence_mixer="linear_hypatt")
        >>> attention.config.value_network, attention(x, x).shape
        ('relu', torch.Size([2, 5, 16]))
    """
    source = _parameters(parameters)
    config = _attention_config(source, "", sequence_mixer, dropout)
    d_model, _, _ = source.sizes("query/kernel", "d_model", "head", "d_head")
    attention = MultiHeadAttention(config, d_model)
    return _load(source, attention, _ATTENTION_PATHS)


def block_from_flax(
    parameters: Mapping[str, Any], *, sequence_mixer: str, dropout: float = 0.0
) -> Block:
    """The block with these parameters and its relative position bias, in evaluation mode.

    Args:
        parameters: those of a `TransformerBlock`: `norm1`, `norm2`, `sequence_mixer`,
            `state_mixer`, and with relative positions `relative_embedding`.
        sequence_mixer: as for `attention_from_flax`.
        dropout: as for `attention_from_flax`.

    Raises:
        ValueError: as for `attention_from_flax`.

    Example:
        >>> parameters = variables["params"]["transformer_block_0"]
        >>> block = block_from_flax(parameters, sequence_mixer="softmax_attention")
        >>> block.relative_bias.table.shape, block(x).shape
        (torch.Size([4, 8]), torch.Size([2, 5, 16]))
    """
    source = _parameters(parameters)
    settings = _block_settings(source, [""], sequence_mixer, dropout)
    # A block does not depend on the other sizes of a model.
    config = TransformerConfig(**settings, d_input=1, d_output=1, n_layers=1)
    paths = _block_paths("", "", settings["feed_forward"])
    return _load(source, build_block(config), paths)


def transformer_from_flax(
    parameters: Mapping[str, Any],
    *,
    sequence_mixer: str,
    causal: bool,
    sinusoidal: bool = False,
    n_layers: int | None = None,
    n_readout: int | None = None,
    dropout: float = 0.0,
) -> Transformer:
    """The transformer with these parameters, in evaluation mode.

    All other settings follow from the parameters: sizes, vectors or tokens as inputs, relative
    positions, shared blocks, kinds of norms and of feed-forward layers, and a tied read-out.

    Args:
        parameters: those of a `CausalTransformer`.
        sequence_mixer: as for `attention_from_flax`.
        causal: `use_causal_mask`; False in the experiments on Raven and fuzzy logic.
        sinusoidal: `use_absolute_position`.
        n_layers: `num_layers`, required if the parameters are shared by all steps.
        n_readout: number of last positions at which logits are computed; None for all positions,
            as in their code.
        dropout: as for `attention_from_flax`.

    Raises:
        ValueError: as for `attention_from_flax`; or `n_layers` is missing, or not the number of
            blocks.

    Example:
        >>> model = transformer_from_flax(
        ...     variables["params"], sequence_mixer="linear_hypatt", causal=False, n_readout=4
        ... )
        >>> model(torch.randn(2, 36, 8)).shape  # at the four last of 36 positions
        torch.Size([2, 4, 8])
        >>> mechanisms.save(model, "hyla.safetensors")
    """
    source = _parameters(parameters)
    shared = source.has("transformer_block/")
    blocks = ["transformer_block/"]
    if not shared:
        names = {path.split("/")[0] for path in source.unused}
        n_blocks = max(1, sum(name.startswith("transformer_block_") for name in names))
        blocks = [f"transformer_block_{layer}/" for layer in range(n_blocks)]
    if shared and n_layers is None:
        raise ValueError("n_layers must be the number of steps of the shared block, got None")
    if not shared and n_layers not in (None, len(blocks)):
        raise ValueError(
            f"n_layers must be None or the number of blocks = {len(blocks)}, got {n_layers}"
        )
    tokens = not (source.has("embedding/kernel") or source.has("embedding/bias"))
    tied = not source.has("logitdense/")
    embedding = "embedding/embedding" if tokens else "embedding/kernel"
    d_input, _ = source.sizes(embedding, "d_input", "d_model")
    d_output = d_input
    if not (tokens and tied):
        _, d_output = source.sizes("logitdense/kernel", "d_model", "d_output")

    settings = _block_settings(source, blocks, sequence_mixer, dropout)
    if sinusoidal:
        relative = settings["positions"] == "relative"
        settings["positions"] = "relative_and_sinusoidal" if relative else "sinusoidal"
    config = TransformerConfig(
        **settings,
        d_input=d_input,
        d_output=d_output,
        n_layers=len(blocks) if n_layers is None else n_layers,
        inputs="tokens" if tokens else "vectors",
        causal=causal,
        shared=shared,
        n_readout=n_readout,
        tied=tokens and tied,
    )
    paths = {
        "embed.W_E": embedding,
        "embed.b_E": "embedding/bias",
        "ln_final.weight": "decoder_norm/scale",
        "ln_final.bias": "decoder_norm/bias",
        "unembed.W_U": "logitdense/kernel",
        "unembed.b_U": "logitdense/bias",
    }
    for layer, block in enumerate(blocks):
        ours = "core." if shared else f"blocks.{layer}."
        paths |= _block_paths(ours, block, settings["feed_forward"])
    return _load(source, Transformer(config), paths)


def _parameters(tree: Mapping[str, Any]) -> PublishedWeights:
    """Parameters by their paths, such as `norm1/scale`."""
    if "params" in tree:
        raise ValueError(
            "parameters must be the collection variables['params'], got all collections: "
            f"{', '.join(tree)}"
        )
    # Copies: jax arrays are read-only.
    arrays = {path: torch.from_numpy(np.array(array)) for path, array in _flatten(tree)}
    return PublishedWeights(arrays, "parameters")


def _load(source: PublishedWeights, module: Module, paths: dict[str, str]) -> Module:
    """Replace all parameters of `module`; `paths` are from our names to theirs."""
    weights = {}
    for name, weight in module.state_dict().items():
        shape = list(weight.shape)
        if name.endswith(("W_Q", "W_K", "W_V")):
            weights[name] = source.take(paths[name], shape[1], shape[0], *shape[2:]).swapaxes(0, 1)
        else:
            weights[name] = source.take(paths[name], *shape)
    return source.load_into(module, weights)


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", np.asarray(value)


def _attention_config(
    source: PublishedWeights, prefix: str, sequence_mixer: str, dropout: float
) -> AttentionConfig:
    if sequence_mixer not in SEQUENCE_MIXERS:
        allowed = ", ".join(SEQUENCE_MIXERS)
        raise ValueError(f"sequence_mixer must be one of {allowed}, got {sequence_mixer!r}")
    normalization, value_network = ATTENTION_VARIANTS[SEQUENCE_MIXERS[sequence_mixer]]
    _, n_heads, d_head = source.sizes(f"{prefix}query/kernel", "d_model", "head", "d_head")
    _, _, d_value = source.sizes(f"{prefix}value/kernel", "d_model", "head", "d_value")
    return AttentionConfig(
        n_heads=n_heads,
        d_head=d_head,
        d_value=None if d_value == d_head else d_value,
        normalization=normalization,
        value_network=value_network,
        dropout=dropout,
        normalize_qk=source.has(f"{prefix}query_ln/") or source.has(f"{prefix}key_ln/"),
        bias=any(source.has(f"{prefix}{m}/bias") for m in ("query", "key", "value", "out")),
    )


def _block_settings(
    source: PublishedWeights, blocks: list[str], sequence_mixer: str, dropout: float
) -> dict[str, Any]:
    """Settings of `TransformerConfig` that follow from the parameters of all blocks."""
    first = blocks[0]
    attention = _attention_config(source, f"{first}sequence_mixer/", sequence_mixer, dropout)
    mlp = f"{first}state_mixer/"
    swiglu = source.has(f"{mlp}Dense_2/") or not (
        source.has(f"{mlp}Dense_0/bias") or source.has(f"{mlp}Dense_1/bias")
    )
    d_model, d_mlp = source.sizes(f"{mlp}Dense_0/kernel", "d_model", "d_mlp")
    settings: dict[str, Any] = {
        "d_model": d_model,
        "attention": attention,
        "feed_forward": FeedForwardConfig(
            d_mlp=d_mlp, activation="swiglu" if swiglu else "gelu", bias=not swiglu
        ),
        "norm": "layer_norm" if _any(source, blocks, "norm1/bias", "norm2/bias") else "rms_norm",
        "positions": "none",
    }
    if _any(source, blocks, "relative_embedding/"):
        table = f"{first}relative_embedding/rel_embedding"
        _, n_buckets = source.sizes(table, "head", "bucket")
        settings |= {"positions": "relative", "max_distance": n_buckets}
    return settings


def _any(source: PublishedWeights, blocks: list[str], *names: str) -> bool:
    """Whether any block has one of these parameters."""
    return any(source.has(block + name) for block in blocks for name in names)


def _block_paths(ours: str, theirs: str, feed_forward: FeedForwardConfig) -> dict[str, str]:
    """From our names of the parameters of a block to theirs."""
    mlp = _SWIGLU_PATHS if feed_forward.activation == "swiglu" else _FEED_FORWARD_PATHS
    paths = {
        "ln1.weight": "norm1/scale",
        "ln1.bias": "norm1/bias",
        "ln2.weight": "norm2/scale",
        "ln2.bias": "norm2/bias",
        "relative_bias.table": "relative_embedding/rel_embedding",
        **{f"attn.{name}": f"sequence_mixer/{path}" for name, path in _ATTENTION_PATHS.items()},
        **{f"mlp.{name}": f"state_mixer/{path}" for name, path in mlp.items()},
    }
    return {ours + name: theirs + path for name, path in paths.items()}
