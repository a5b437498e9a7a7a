"""Models trained with the published code of "The Neural Data Router" (Csordás et al. 2021).

The code (github.com/RobertCsordas/ndr, folders `layers/transformer` and `models`) is written with
torch. The functions here take a state dict of one of its modules and return a module with the same
function, in evaluation mode. Weights keep their precision; models in float64 agree to 1e-9.

Names and layouts, theirs and ours. Their linear maps are [out, in]:

- `embedding.weight` [d_input + 2, d_model]: `W_E`; the last two rows are EOS, id d_input, and BOS
- `output_map.weight`, `output_map.bias`: `W_U`, `b_U`
- `trafo.layer`, shared by all steps: `core`
- `att`, in layers without copy gate `self_attn`: `attn`
- `data_to_q.weight`, rows [head, d_head]: `W_Q` [head, d_model, d_head]
- `data_to_kv.weight`, rows [head, key then value, d_head]: `W_K`, `W_V`
- `multi_head_merge.weight`, columns [head, d_head]: `W_O` [head, d_head, d_model]
- `data_to_qp.weight`, `data_to_qp.bias`, rows [head, back then front]: `W_dir`, `b_dir`
- `pos_to_pq.weight`, rows [head, d_head]: `W_pos` of relative attention
- `data_to_absgate.weight`, `data_to_absgate.bias`: `W_gate`, `b_gate` of the abs/rel gate
- `global_content_bias`, `global_pos_bias`: `content_bias`, `pos_bias`; without them 0
- `scale`, `scale_pos`, `s_bias`: the same
- `p1`, `p2`, in layers without copy gate `linear1`, `linear2`: `mlp.W_in`, `b_in`, `W_out`, `b_out`
- `g1`, `g2`: `gate.W_in`, `b_in`, `W_out`, `b_out`
- `nmerge`, `no`, in layers without copy gate `norm1`, `norm2`: `ln_merge`, `ln_out`

What their modules have but do not use is passed over: `pos_to_pq` of geometric attention, `s_bias`
of relative attention, `n1`, and the buffers `pos_encoding`, `pos.pe` and `int_seq`.

Conventions of their models, which ours share:

- Token ids are in [0, d_input); EOS is put after the last token, BOS before the first. The logits
  are read at BOS (`first`, the default of their code) or at EOS (`last`).
- Their masks are True where a key is hidden, ours where it may be attended to. With `pos_offset`,
  queries are at the positions from there on; ours are at the last ones, which is the same.
- Sinusoids are float32, also if all else is computed in float64.

Not covered: adaptive computation time (`trafo.p_map`), weights that are not shared over depth
(`trafo.layers`), read-outs other than the linear one, and models without BOS or EOS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mechanisms.attention.geometric import GeometricAttention, GeometricAttentionConfig
from mechanisms.attention.multi_head import AttentionConfig, MultiHeadAttention
from mechanisms.attention.relative import RelativeAttention, RelativeAttentionConfig
from mechanisms.layers.copy_gate import CopyGate, CopyGateConfig
from mechanisms.layers.feed_forward import FeedForwardConfig
from mechanisms.models.neural_data_router import (
    NeuralDataRouter,
    NeuralDataRouterConfig,
    Readout,
    RouterBlock,
)
from mechanisms.porting.weights import PublishedWeights, Weights, read_norm

Heads = GeometricAttentionConfig | RelativeAttentionConfig | AttentionConfig


def router_attention_from_torch(
    state: Mapping[str, Tensor], *, n_heads: int | None = None, normalize: bool | None = None
) -> GeometricAttention | RelativeAttention | MultiHeadAttention:
    """The attention with these weights.

    Args:
        state: the state dict of a `DirectionSensitiveGeometricAttention` (with `data_to_qp`), a
            `FixedRelativeMultiheadAttention` (with `pos_to_pq`) or a `MultiHeadAttention`.
        n_heads: number of heads; None if the state dict has a bias with an entry for each.
        normalize: whether geometric attention divides the weights of a query by their sum
            (`normalize_score` there); unused by the others.

    Raises:
        ValueError: a weight is missing, unknown or has the wrong shape; `n_heads` is missing or
            not that of the weights; or `normalize` is missing for geometric attention.

    Example:
        >>> attention = router_attention_from_torch(their_attention.state_dict(), normalize=False)
        >>> hidden = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        >>> attention(x, x, mask=~hidden[:, None, None]).shape
        torch.Size([2, 5, 16])
    """
    source = PublishedWeights(state)
    config, weights, d_model = _attention(source, n_heads, normalize)
    return source.load_into(config.build(d_model, generator=torch.Generator()), weights)  # pyright: ignore[reportReturnType]


def copy_gate_from_torch(state: Mapping[str, Tensor]) -> CopyGate:
    """The copy gate with the weights `g1.weight`, `g1.bias`, `g2.weight` and `g2.bias`.

    Args:
        state: these four entries of the state dict of a layer.

    Raises:
        ValueError: a weight is missing, unknown or has the wrong shape.

    Example:
        >>> state = their_layer.state_dict()
        >>> gate = copy_gate_from_torch({name: w for name, w in state.items() if name[0] == "g"})
        >>> gate(x).shape
        torch.Size([2, 5, 16])
    """
    source = PublishedWeights(state)
    _, d_model = source.sizes("g1.weight", "d_hidden", "d_model")
    config, weights = _copy_gate(source, d_model)
    return source.load_into(CopyGate(config, d_model, generator=torch.Generator()), weights)


def router_block_from_torch(
    state: Mapping[str, Tensor], *, n_heads: int | None = None, normalize: bool | None = None
) -> RouterBlock:
    """The block with these weights.

    Args:
        state: the state dict of an `NDRGeometric`, an `NDRResidual` (with copy gate), a
            `GeometricTransformerEncoderLayer`, a `RelativeTransformerEncoderLayer` or a
            `TransformerEncoderLayer`.
        n_heads: as for `router_attention_from_torch`.
        normalize: as for `router_attention_from_torch`; None for the paper's: in layers without
            copy gate.

    Raises:
        ValueError: as for `router_attention_from_torch`.

    Example:
        >>> block = router_block_from_torch(their_layer.state_dict())
        >>> block.gate.config.width, block(x).shape
        ('vector', torch.Size([2, 5, 16]))
    """
    source = PublishedWeights(state)
    settings, weights = _block(source, n_heads, normalize)
    # A block does not depend on the other sizes of a model.
    config = NeuralDataRouterConfig(**settings, d_input=1, d_output=1, n_steps=1)
    return source.load_into(RouterBlock(config, generator=torch.Generator()), weights)


def router_from_torch(
    state: Mapping[str, Tensor],
    *,
    n_steps: int,
    readout: Readout,
    n_heads: int | None = None,
    normalize: bool | None = None,
) -> NeuralDataRouter:
    """The model with these weights, without dropout rates.

    Sizes, the kind of attention and the form of the gate follow from the weights.

    Args:
        state: the state dict of a `TransformerClassifierModel`.
        n_steps: number of steps (`transformer.encoder_n_layers` or `n_test_layers` there).
        readout: the column that is read (`transformer_classifier.result_column` there).
        n_heads: as for `router_attention_from_torch`.
        normalize: as for `router_block_from_torch` (`trafo_classifier.norm_att` there).

    Raises:
        ValueError: as for `router_attention_from_torch`, or as for `NeuralDataRouterConfig`.

    Example:
        >>> model = router_from_torch(their_model.state_dict(), n_steps=6, readout="last")
        >>> model(torch.tensor([[1, 2, 3, 4], [5, 0, -1, -1]])).shape  # padded with negative ids
        torch.Size([2, 1, 3])
    """
    source = PublishedWeights(state)
    n_embeddings, d_model = source.sizes("embedding.weight", "d_input + 2", "d_model")
    d_output, _ = source.sizes("output_map.weight", "d_output", "d_model")
    settings, block = _block(source.below("trafo.layer."), n_heads, normalize)
    config = NeuralDataRouterConfig(
        **settings,
        d_input=n_embeddings - 2,
        d_output=d_output,
        n_steps=n_steps,
        readout=readout,
        sinusoidal=isinstance(settings["attention"], AttentionConfig),
    )
    weights = {f"core.{name}": weight for name, weight in block.items()}
    weights["W_E"] = source.take("embedding.weight", n_embeddings, d_model)
    weights["W_U"] = source.take("output_map.weight", d_output, d_model).T
    weights["b_U"] = source.take("output_map.bias", d_output)
    source.skip("int_seq", "pos.pe")
    return source.load_into(NeuralDataRouter(config, generator=torch.Generator()), weights)


def _attention(
    source: PublishedWeights, n_heads: int | None, normalize: bool | None
) -> tuple[Heads, Weights, int]:
    d_heads, d_model = source.sizes("data_to_q.weight", "n_heads x d_head", "d_model")
    n_heads = _number_of_heads(source, n_heads)
    if d_heads % n_heads:
        raise ValueError(f"n_heads must divide {d_heads}, the rows of data_to_q, got {n_heads}")
    d_head = d_heads // n_heads

    def of_heads(name: str) -> Tensor:
        return source.take(name, d_heads, d_model).unflatten(0, (n_heads, d_head)).mT

    def bias(name: str) -> Tensor:
        if name in source:
            return source.take(name, n_heads, d_head)
        return weights["W_Q"].new_zeros(n_heads, d_head)

    keys_and_values = source.take("data_to_kv.weight", 2 * d_heads, d_model)
    W_K, W_V = keys_and_values.unflatten(0, (n_heads, 2, d_head)).mT.unbind(1)
    W_O = source.take("multi_head_merge.weight", d_model, d_heads).T.unflatten(0, (n_heads, d_head))
    weights = {"W_Q": of_heads("data_to_q.weight"), "W_K": W_K, "W_V": W_V, "W_O": W_O}
    heads: dict[str, Any] = {"n_heads": n_heads, "d_head": d_head}
    is_geometric, is_relative = "data_to_qp.weight" in source, "pos_to_pq.weight" in source
    if not (is_geometric or is_relative):
        return AttentionConfig(**heads, bias=False), weights, d_model
    weights["content_bias"] = bias("global_content_bias")
    weights["scale"] = source.take("scale", 1)
    if is_geometric:
        if normalize is None:
            raise ValueError("normalize must be True or False for geometric attention, got None")
        direction = source.take("data_to_qp.weight", 2 * n_heads, d_model)
        weights["W_dir"] = direction.unflatten(0, (n_heads, 2)).mT
        weights["b_dir"] = source.take("data_to_qp.bias", 2 * n_heads).unflatten(0, (n_heads, 2))
        weights |= {name: source.take(name, 1) for name in ("scale_pos", "s_bias")}
        source.skip("pos_to_pq.weight", "pos_encoding")
        return GeometricAttentionConfig(**heads, normalize=normalize), weights, d_model
    gated = "data_to_absgate.weight" in source
    weights |= {"W_pos": of_heads("pos_to_pq.weight"), "pos_bias": bias("global_pos_bias")}
    if gated:
        weights["W_gate"] = source.take("data_to_absgate.weight", n_heads, d_model)
        weights["b_gate"] = source.take("data_to_absgate.bias", n_heads)
    source.skip("s_bias", "pos_encoding")
    return RelativeAttentionConfig(**heads, gated=gated), weights, d_model


def _number_of_heads(source: PublishedWeights, n_heads: int | None) -> int:
    """The number of heads of the weights that have an entry for each; else `n_heads`."""
    entries = {"global_content_bias": 1, "global_pos_bias": 1}
    entries |= {"data_to_qp.weight": 2, "data_to_absgate.weight": 1}
    for name, per_head in entries.items():
        if name in source:
            inferred = source.sizes(name, "n_heads", "d")[0] // per_head
            if n_heads not in (None, inferred):
                raise ValueError(f"n_heads must be {inferred} as in {name}, got {n_heads}")
            return inferred
    if n_heads is None or n_heads < 1:
        raise ValueError(f"n_heads must be that of the model, at least 1, got {n_heads}")
    return n_heads


def _copy_gate(source: PublishedWeights, d_model: int) -> tuple[CopyGateConfig, Weights]:
    d_hidden, _ = source.sizes("g1.weight", "d_hidden", "d_model")
    n_gates, _ = source.sizes("g2.weight", "n_gates", "d_hidden")
    width = "scalar" if n_gates == 1 else "vector"
    config = CopyGateConfig(width=width, d_hidden=None if d_hidden == d_model else d_hidden)
    n_gates = 1 if n_gates == 1 else d_model
    return config, _two_layers(source, "g1", "g2", d_model, d_hidden, n_gates)


def _two_layers(
    source: PublishedWeights, first: str, second: str, d_in: int, d_hidden: int, d_out: int
) -> Weights:
    return {
        "W_in": source.take(f"{first}.weight", d_hidden, d_in).T,
        "b_in": source.take(f"{first}.bias", d_hidden),
        "W_out": source.take(f"{second}.weight", d_out, d_hidden).T,
        "b_out": source.take(f"{second}.bias", d_out),
    }


def _block(
    source: PublishedWeights, n_heads: int | None, normalize: bool | None
) -> tuple[dict[str, Any], Weights]:
    """The settings of a config that the weights of a block show, and the weights."""
    is_gated = "p1.weight" in source
    names = ("att.", "p1", "p2") if is_gated else ("self_attn.", "linear1", "linear2")
    normalize = not is_gated if normalize is None else normalize
    attention, of_attention, d_model = _attention(source.below(names[0]), n_heads, normalize)
    d_mlp, _ = source.sizes(f"{names[1]}.weight", "d_mlp", "d_model")
    parts = {"attn": of_attention}
    parts["mlp"] = _two_layers(source, names[1], names[2], d_model, d_mlp, d_model)
    gate = None
    norms = {"ln_merge": "norm1", "ln_out": "norm2"}
    if is_gated:
        gate, parts["gate"] = _copy_gate(source, d_model)
        has_norm = "no.weight" in source
        gate = replace(gate, update="layer_norm" if has_norm else "tanh")
        norms = {"ln_merge": "nmerge"} | ({"ln_out": "no"} if has_norm else {})
        source.skip("n1.weight", "n1.bias")
    weights = {f"{part}.{name}": w for part, some in parts.items() for name, w in some.items()}
    for ours, theirs in norms.items():
        weights |= read_norm(source, theirs, ours, d_model)
    feed_forward = FeedForwardConfig(d_mlp=d_mlp, activation="relu")
    settings = {"d_model": d_model, "attention": attention, "feed_forward": feed_forward}
    return settings | {"gate": gate}, weights
