"""The attention patterns of two sequences from one matrix: softmax, or CoDA's composition."""

from __future__ import annotations

from typing import Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from mechanisms.attention.multi_head import normalize_scores
from mechanisms.attention.quasi import QuasiAttentionConfig


class QuasiPoints(Protocol):
    """The hook points of CoDA's composition, all [batch, head, query_pos, key_pos]."""

    hook_attn_scores: HookPoint
    hook_affinity: HookPoint
    hook_dissimilarity: HookPoint
    hook_gate: HookPoint
    hook_pattern: HookPoint


def softmax_pattern(
    scores: Float[Tensor, "batch head query_pos key_pos"],
    valid: Bool[Tensor, "batch head query_pos key_pos"],
) -> Float[Tensor, "batch head query_pos key_pos"]:
    """The softmax over valid keys; zeros for a query that has none."""
    return normalize_scores(scores.masked_fill(~valid, -torch.inf), "softmax", valid)


def quasi_pattern(
    affinity: Float[Tensor, "batch head query_pos key_pos"],
    dissimilarity: Float[Tensor, "batch head query_pos key_pos"],
    valid: Bool[Tensor, "batch head query_pos key_pos"],
    composition: QuasiAttentionConfig,
    points: QuasiPoints,
) -> Float[Tensor, "batch head query_pos key_pos"]:
    """M = affinity(E) * gate(N), 0 where a pair is not valid.

    Tay et al. 2019, "Compositional De-Attention Networks", equations 3 to 6.

    Args:
        affinity: E, with its factor.
        dissimilarity: N, the negative distances with their factor.
        valid: the pairs of which neither token is padding; centring takes their mean.
        composition: centrings and functions.
        points: what has the hook points, such as the module that calls.
    """
    affinity = points.hook_attn_scores(affinity)
    affinity = points.hook_affinity(composition.centred_affinity(affinity, valid))
    dissimilarity = composition.centred_dissimilarity(dissimilarity, valid)
    dissimilarity = points.hook_dissimilarity(dissimilarity)
    gate = points.hook_gate(composition.gated(dissimilarity))
    return points.hook_pattern(composition.composed(affinity, gate, valid))
