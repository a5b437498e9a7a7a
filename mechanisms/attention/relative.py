"""Softmax attention with the relative positions of Transformer-XL and optional absolute ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear
from transformer_lens.hook_points import HookPoint

from mechanisms.attention.base import (
    Attention,
    DistanceAttentionConfig,
    join_heads,
    project_queries_and_keys,
)
from mechanisms.attention.multi_head import normalize_scores
from mechanisms.attention.positions import interleaved_sinusoids
from mechanisms.dropout import dropout
from mechanisms.hooking import observed
from mechanisms.initialization import lecun_normal, zeros


@dataclass(frozen=True, kw_only=True)
class RelativeAttentionConfig(DistanceAttentionConfig):
    """Configuration of `RelativeAttention`: heads, position gate and dropout.

    Args:
        n_heads: number of heads.
        d_head: width of a head.
        gated: whether a gate mixes relative and absolute positions for each query (the abs/rel
            gate of the Neural Data Router).
        query_dropout: probability of dropping a component of a query in training, separately
            for its product with keys and with positions, with their biases. The paper's
            (section B.2).
        key_dropout: the same for a component of a key, or of a distance (for the whole batch).
            The authors' code has this instead.

    Raises:
        ValueError: a size is less than 1, or a dropout rate is outside [0, 1).

    Example:
        >>> config = RelativeAttentionConfig(n_heads=4, d_head=4)
        >>> config.build(16)(x, x).shape  # [batch, query_pos, d_model]
        torch.Size([2, 5, 16])
    """

    gated: bool = False

    def build(self, d_model: int, *, generator: torch.Generator | None = None) -> nn.Module:
        """The attention module for a residual stream of width `d_model`, which must be even.

        Raises:
            ValueError: d_model is odd.
        """
        return RelativeAttention(self, d_model, generator=generator)


class RelativeAttention(Attention[RelativeAttentionConfig]):
    """Self-attention whose scores depend on the distance to a key, or on its position.

    Dai et al. 2019 (Transformer-XL), section 3.3, with fixed sinusoids s_r for the distance r:
    score[i, j] = scale ((q_i + content_bias).k_j + position[i, j]), softmax over j, where

    - position[i, j] = (q_i + pos_bias).(W_pos s_(j - i));
    - with `gated` (Csordás et al. 2021, section 3.3) each query of each head has
      g_i = sigmoid(W_gate x_i + b_gate), and position[i, j] =
      (q_i + pos_bias).(g_i W_pos s_(j - i) + (1 - g_i) W_pos s_j).

    Queries are at the last of the key positions. `scale` is learned and starts at
    1 / sqrt(d_head), weights start from N(0, 1 / d_model), biases at 0.

    Hook points: `hook_q`, `hook_k`, `hook_v`, `hook_z` [batch, pos, head, d_head];
    `hook_content_scores`, `hook_relative_scores` (the terms of the scores), `hook_attn_scores` and
    `hook_pattern` [batch, head, query_pos, key_pos]; with `gated` also `hook_absolute_scores`,
    which like the relative ones are those before the gate weights them, and
    `hook_position_gate_logit`, `hook_position_gate` (g) [batch, pos, head].

    Example:
        >>> attention = RelativeAttention(RelativeAttentionConfig(n_heads=4, d_head=4), 16)
        >>> attention(x, x).shape  # [batch, query_pos, d_model]
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        config: RelativeAttentionConfig,
        d_model: int,
        *,
        generator: torch.Generator | None = None,
    ):
        super().__init__(config)
        if d_model % 2:
            raise ValueError(f"d_model must be even for the sinusoids, got {d_model}")
        n_heads, d_head = config.n_heads, config.d_head
        shape = (n_heads, d_model, d_head)
        self.W_Q = lecun_normal(*shape, fan_in=d_model, generator=generator)
        self.W_K = lecun_normal(*shape, fan_in=d_model, generator=generator)
        self.W_V = lecun_normal(*shape, fan_in=d_model, generator=generator)
        self.W_pos = lecun_normal(*shape, fan_in=d_model, generator=generator)
        self.W_O = lecun_normal(
            n_heads, d_head, d_model, fan_in=n_heads * d_head, generator=generator
        )
        self.content_bias, self.pos_bias = zeros(n_heads, d_head), zeros(n_heads, d_head)
        self.scale = nn.Parameter(torch.tensor([d_head**-0.5]))
        self.hook_q, self.hook_k, self.hook_v = HookPoint(), HookPoint(), HookPoint()
        if config.gated:
            self.W_gate = lecun_normal(n_heads, d_model, fan_in=d_model, generator=generator)
            self.b_gate = zeros(n_heads)
            self.hook_absolute_scores = HookPoint()
            self.hook_position_gate_logit, self.hook_position_gate = HookPoint(), HookPoint()
        self.hook_content_scores, self.hook_relative_scores = HookPoint(), HookPoint()
        self.hook_attn_scores, self.hook_pattern = HookPoint(), HookPoint()
        self.hook_z = HookPoint()

    def _attend(
        self, x_query: Tensor, x_key: Tensor, bias: Tensor | None, mask: Tensor | None, points: Self
    ) -> Tensor:
        q, k, v = project_queries_and_keys(x_query, x_key, (self.W_Q,), (self.W_K, self.W_V))
        q, k, v = points.hook_q(q), points.hook_k(k), points.hook_v(v)

        k = self._dropped_keys(k.permute(0, 2, 3, 1))
        scores = points.hook_content_scores(self._dropped_queries(q, self.content_bias) @ k)
        scores = scores + self._position_scores(x_query, q, x_key.shape[1], points)
        if bias is not None:
            scores = scores + bias
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        scores = points.hook_attn_scores(scores)
        pattern = points.hook_pattern(normalize_scores(scores, "softmax", mask))

        z = points.hook_z((pattern @ v.transpose(1, 2)).transpose(1, 2))
        return join_heads(z, self.W_O)

    def _position_scores(
        self,
        x_query: Float[Tensor, "batch query_pos d_model"],
        q: Float[Tensor, "batch query_pos head d_head"],
        n_key: int,
        points: RelativeAttention,
    ) -> Float[Tensor, "batch head query_pos key_pos"]:
        """The positional part of the scores: relative, or gated between relative and absolute."""
        n_query = q.shape[1]
        table = interleaved_sinusoids(min(1 - n_key, 0), n_key, x_query.shape[-1]).to(q)
        key = self._dropped_keys(torch.einsum("rd,hde->her", table, self.W_pos))
        by_distance = self._dropped_queries(q, self.pos_bias) @ key
        relative = distance_to_position(by_distance, n_key)
        if not self.config.gated:
            return points.hook_relative_scores(relative)
        gate = points.hook_position_gate_logit(linear(x_query, self.W_gate, self.b_gate))
        gate = points.hook_position_gate(gate.sigmoid()).transpose(1, 2)[..., None]
        # Position j is at distance j from the first position.
        absolute = by_distance[..., n_key - 1 :]
        if observed(points.hook_relative_scores, points.hook_absolute_scores):
            # They share memory, and a hook may write to what it gets.
            relative, absolute = relative.clone(), absolute.clone()
        relative = points.hook_relative_scores(relative)
        absolute = points.hook_absolute_scores(absolute)
        return torch.lerp(absolute, relative, gate.expand(-1, -1, n_query, n_key))

    def _dropped_queries(
        self, q: Float[Tensor, "batch query_pos head d_head"], bias: Float[Tensor, "head d_head"]
    ) -> Float[Tensor, "batch head query_pos d_head"]:
        q = ((q + bias) * self.scale).transpose(1, 2)
        return dropout(q, self.config.query_dropout, self.training)

    def _dropped_keys(
        self, k: Float[Tensor, "*batch head d_head key"]
    ) -> Float[Tensor, "*batch head d_head key"]:
        return dropout(k, self.config.key_dropout, self.training)


def distance_to_position(
    by_distance: Float[Tensor, "batch head query_pos distance"], n_key: int
) -> Float[Tensor, "batch head query_pos key_pos"]:
    """Select, for each query and key, the entry of the distance between them.

    `by_distance` has an entry for every distance from 1 - n_key to n_key - 1. Queries are at the
    last key positions. Each row starts one distance earlier than the row above it, so the flattened
    rows form a matrix whose rows are one entry shorter.
    """
    if n_key <= 1:
        return by_distance
    n_query, n_distances = by_distance.shape[-2:]
    flat = by_distance.flatten(-2)[..., n_query - 1 : -1]
    return flat.unflatten(-1, (n_query, n_distances - 1))[..., :n_key]
