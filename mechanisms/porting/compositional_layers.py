"""Attention and blocks of the published code of "Compositional Attention": what weights say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mechanisms.attention.compositional import CompositionalAttentionConfig
from mechanisms.attention.multi_head import AttentionConfig
from mechanisms.layers.feed_forward import FeedForwardConfig
from mechanisms.porting.weights import PublishedWeights, Weights, read_norm

Heads = CompositionalAttentionConfig | AttentionConfig

NORM_EPSILON = 1e-5

_NAMES = {
    "query": ("query_net", "q_proj"),
    "key": ("key_net", "k_proj"),
    "value": ("value_net", "v_proj"),
    "value_query": ("value_query", "query_value_net", "value_q"),
    "value_key": ("value_key", "key_value_net", "value_k"),
    "out": ("out_proj", "final", "multi_head_merge"),
}


def read_attention(source: PublishedWeights, n_heads: int | None) -> tuple[Heads, Weights, int]:
    """Config and weights of an attention, and the width of its input."""
    names = {part: _name(source, part) for part in _NAMES}
    d_queries, d_model = source.sizes(f"{names['query']}.weight", "head x d_head", "d_model")
    d_values, _ = source.sizes(f"{names['value']}.weight", "head x d_value", "d_model")
    nonlinear, own = "out_proj.2.weight" in source, "in_.weight" in source
    out = "out_proj.0" if nonlinear else names["out"]
    _, d_out = source.sizes(f"{out}.weight", "d_model", "value x d_value")
    is_compositional = source.has(f"{names['value_query']}.")
    if is_compositional:
        d_value, d_selection, n_heads = _selection_sizes(source, names, d_out, n_heads)
        n_values = d_values // d_value
    else:
        n_heads, d_value = _head_sizes(source, d_values, n_heads)
        d_selection, n_values = 0, n_heads
    d_head = d_queries // n_heads

    def heads(part: str, letters: str, n: int, width: int) -> Weights:
        weight = source.take(f"{names[part]}.weight", n * width, d_model)
        found = {f"W_{letters}": weight.unflatten(0, (n, width)).mT}
        if f"{names[part]}.bias" in source:
            bias = source.take(f"{names[part]}.bias", n * width)
            found[f"b_{letters}"] = bias.unflatten(0, (n, width))
        return found

    has_biases = f"{names['query']}.bias" in source
    settings: dict[str, Any] = {
        "d_head": d_head,
        "d_value": None if d_value == d_head else d_value,
        "own_value": own,
        "nonlinear": nonlinear,
    }
    weights = heads("query", "Q", n_heads, d_head) | heads("key", "K", n_heads, d_head)
    weights |= heads("value", "V", n_values, d_value)
    config: Heads = AttentionConfig(n_heads=n_heads, bias=has_biases, **settings)
    if is_compositional:
        has_selection_biases = f"{names['value_query']}.bias" in source
        biases = "all" if has_biases else "selection" if has_selection_biases else "none"
        weights |= heads("value_query", "value_query", n_heads, d_selection)
        scorer = _scorer(source, names, n_values, d_value, d_selection, has_biases=biases != "none")
        config = CompositionalAttentionConfig(
            n_searches=n_heads,
            n_retrievals=n_values,
            d_selection=None if d_selection == d_head else d_selection,
            scorer="mlp" if "W_score" in scorer else "dot",
            separate_value_keys="W_value_key" in scorer and scorer["W_value_key"].ndim == 3,
            biases=biases,
            **settings,
        )
        weights |= scorer
    maps = {"O": (out, d_model, (n_heads + own) * d_value)}
    maps |= {"own": ("in_", d_value, d_model)} if own else {}
    maps |= {"O2": ("out_proj.2", d_model, d_model)} if nonlinear else {}
    weights |= read_maps(source, maps)
    weights["W_O"] = weights["W_O"].unflatten(0, (-1, d_value))
    return config, weights, d_model


def _name(source: PublishedWeights, part: str) -> str:
    """What the folder at hand calls a part of attention."""
    names = _NAMES[part]
    return next((name for name in names if source.has(f"{name}.")), names[0])


def _selection_sizes(
    source: PublishedWeights, names: Mapping[str, str], d_out: int, n_searches: int | None
) -> tuple[int, int, int]:
    """Widths of values and of value queries, and the number of searches."""
    d_queries, _ = source.sizes(f"{names['value_query']}.weight", "search x d_selection", "d_model")
    if "value_key.w" in source:
        _, d_value, d_selection = source.sizes("value_key.w", "retrieval", "d_value", "d_selection")
    elif "score_network.weight" in source:
        _, width = source.sizes("score_network.weight", "1", "d_selection + d_value")
        inferred = max(1, (d_queries + d_out) // width)
        d_selection, d_value = d_queries // inferred, width - d_queries // inferred
    else:
        key = f"{names['value_key']}.weight"
        d_selection, d_value = source.sizes(key, "d_selection", "d_value")
    inferred = d_queries // d_selection
    if n_searches not in (None, inferred):
        raise ValueError(f"n_heads must be None or {inferred} as in the weights, got {n_searches}")
    return d_value, d_selection, inferred


def _head_sizes(source: PublishedWeights, d_values: int, n_heads: int | None) -> tuple[int, int]:
    """The number of heads of multi-head attention, and the width of its values."""
    if "in_.weight" in source:
        d_value, _ = source.sizes("in_.weight", "d_value", "d_model")
        if n_heads not in (None, d_values // d_value):
            raise ValueError(
                f"n_heads must be None or {d_values // d_value} as in the weights, got {n_heads}"
            )
        return d_values // d_value, d_value
    if n_heads is None or n_heads < 1 or d_values % n_heads:
        raise ValueError(
            f"n_heads must be that of the model, a divisor of {d_values}, got {n_heads}"
        )
    return n_heads, d_values // n_heads


def _scorer(
    source: PublishedWeights,
    names: Mapping[str, str],
    n_retrievals: int,
    d_value: int,
    d_selection: int,
    *,
    has_biases: bool,
) -> Weights:
    """The weights that score retrievals, besides those of the value queries."""
    if "value_key.w" in source:
        found = {"W_value_key": source.take("value_key.w", n_retrievals, d_value, d_selection)}
        bias = source.take("value_key.b", 1, n_retrievals, d_selection)[0]
        # Without biases theirs has this one nevertheless, and does not add it.
        return found | ({"b_value_key": bias} if has_biases else {})
    if "score_network.weight" not in source:
        return read_maps(source, {"value_key": (names["value_key"], d_selection, d_value)})
    weight = source.take("score_network.weight", 1, d_selection + d_value)[0]
    if names["query"] == "q_proj":
        weight = torch.cat([weight[d_value:], weight[:d_value]])
    found = {"W_score": weight}
    if "score_network.bias" in source:
        found["b_score"] = source.take("score_network.bias", 1)
    return found


def read_block(source: PublishedWeights, n_heads: int | None) -> tuple[dict[str, Any], Weights]:
    """The settings of a config that the weights of a block show, and the weights."""
    is_scan = source.has("self_attn.")
    first, second = ("linear1", "linear2") if is_scan else ("res.0", "res.3")
    attention, weights, d_model = read_attention(
        source.below("self_attn." if is_scan else ""), n_heads
    )
    weights = {f"attn.{name}": weight for name, weight in weights.items()}
    d_mlp, _ = source.sizes(f"{first}.weight", "d_mlp", "d_model")
    maps = {"in": (first, d_mlp, d_model), "out": (second, d_model, d_mlp)}
    weights |= {f"mlp.{name}": weight for name, weight in read_maps(source, maps).items()}
    weights |= read_norm(source, "norm1", "ln1", d_model) | read_norm(
        source, "norm2", "ln2", d_model
    )
    feed_forward = FeedForwardConfig(d_mlp=d_mlp, activation="relu")
    return {"d_model": d_model, "attention": attention, "feed_forward": feed_forward}, weights


def read_maps(source: PublishedWeights, maps: Mapping[str, tuple[str, int, int]]) -> Weights:
    """Weights and biases, where there are some, of linear maps with these names and sizes."""
    weights = {}
    for ours, (theirs, d_out, d_in) in maps.items():
        weights[f"W_{ours}"] = source.take(f"{theirs}.weight", d_out, d_in).T
        if f"{theirs}.bias" in source:
            weights[f"b_{ours}"] = source.take(f"{theirs}.bias", d_out)
    return weights
