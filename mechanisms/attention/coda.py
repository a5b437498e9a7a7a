"""Compositional de-attention: a query adds, subtracts or deletes tokens.

Tay et al. 2019, "Compositional De-Attention Networks" (CoDA). Softmax attention only adds tokens;
here each weight is between -1 and 1, and their sum is not constrained.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from mechanisms.attention.base import Attention, join_heads, project_queries_and_keys
from mechanisms.attention.positions import rotate
from mechanisms.attention.quasi import (
    Chunk,
    QuasiAttentionConfig,
    broadcast_chunk,
    l1_distances,
    quasi_attention,
)
from mechanisms.dropout import dropout_mask
from mechanisms.hooking import observed
from mechanisms.initialization import lecun_normal, zeros
from mechanisms.validation import check_dropout, check_sizes


@dataclass(frozen=True, kw_only=True)
class CodaAttentionConfig:
    """Configuration of `CodaAttention`, for self-attention or cross-attention.

    Args:
        n_heads: number of heads.
        d_head: width of a head's queries and keys.
        d_value: width of a head's values; None for `d_head`.
        composition: how affinity and dissimilarity are composed into the pattern.
        scaled: whether both are divided by sqrt(d_head).
        shared: whether both use the same queries and keys.
        dropout, dropout_shared, bias: as in `AttentionConfig`.
        rotary: whether queries and keys of the affinity are rotated as in `AttentionConfig`.

    Raises:
        ValueError: a setting is outside its range, or d_head is odd with `rotary`.

    Example:
        >>> config = CodaAttentionConfig(n_heads=4, d_head=4)
        >>> config.build(16)(x, x).shape  # [batch, query_pos, d_model]
        torch.Size([2, 5, 16])
    """

    n_heads: int
    d_head: int
    d_value: int | None = None
    composition: QuasiAttentionConfig = field(default_factory=QuasiAttentionConfig)
    scaled: bool = True
    shared: bool = True
    dropout: float = 0.0
    dropout_shared: bool = True
    rotary: bool = False
    bias: bool = True

    def __post_init__(self):
        check_sizes(self, "n_heads", "d_head", optional=("d_value",))
        check_dropout(self)
        if self.rotary and self.d_head % 2:
            raise ValueError(f"d_head must be even with rotary=True, got {self.d_head}")

    @property
    def measures_distances(self) -> bool:
        """Whether query-key distances are used, as by rotary positions."""
        return self.rotary

    @property
    def needs_all_queries(self) -> bool:
        """Whether E or N is centred over all queries."""
        return self.composition.centres_matrix

    def build(self, d_model: int, *, generator: torch.Generator | None = None) -> nn.Module:
        """The attention module for a residual stream of width `d_model`."""
        return CodaAttention(self, d_model, generator=generator)


class CodaAttention(Attention[CodaAttentionConfig]):
    """Attention with weights affinity(E) * gate(N), in [-1, 1] by default.

    Tay et al. 2019, equations 1 to 4 and their use in a Transformer. For each head, with q, k, v
    as in multi-head attention (and scale 1 / sqrt(d_head), or 1):

    - E = scale * alpha * q · k + position bias, and N = -scale * beta * ||q - k||_1;
    - M = tanh(E) * sigmoid(N), zero where masked; the config may centre E and N first;
    - z = M v, and out = sum over heads of z W_O + b_O.

    Centring by `matrix` averages over all queries. This is refused (ValueError) with a mask that
    differs between queries, such as a causal one, where the mean would leak masked tokens; with
    other numbers of queries than of keys (a decoder's, or only those that are read out), where it
    would depend on which queries are passed; and with any mask where `x_query` is not the same
    tensor as `x_key`, since a mask of keys does not say which queries are padding. In
    self-attention, padding counts neither as key nor as query.

    With `rotary`, q and k are rotated for E only. Rotating both preserves their product but not
    their L1 distance: N of rotated vectors would depend on the absolute positions of a pair, not
    only on the distance between them.

    Without hooks between q, k, v and z, only the distances are kept for the gradient.

    Parameters as in `MultiHeadAttention`; with `shared=False` also `W_Q_distance`, `W_K_distance`
    [head, d_model, d_head] and their `b_`: queries and keys of N.

    Hook points: `hook_q`, `hook_k`, with `shared=False` also `hook_q_distance`, `hook_k_distance`,
    with `rotary` also `hook_rot_q`, `hook_rot_k` [batch, pos, head, d_head]; `hook_v`, `hook_z`
    [batch, pos, head, d_value]; [batch, head, query_pos, key_pos]:
    `hook_attn_scores` (E with its bias), `hook_affinity` (E, centred), `hook_dissimilarity` (N,
    centred), `hook_gate` (sigmoid(N)), none of them masked, and `hook_pattern` (M).

    Example:
        >>> attention = CodaAttention(CodaAttentionConfig(n_heads=4, d_head=4), 16)
        >>> attention(x, x).shape  # [batch, query_pos, d_model]
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        config: CodaAttentionConfig,
        d_model: int,
        *,
        generator: torch.Generator | None = None,
    ):
        super().__init__(config)
        n_heads, d_head = config.n_heads, config.d_head
        d_value = d_head if config.d_value is None else config.d_value

        def weight(width: int) -> nn.Parameter:
            return lecun_normal(n_heads, d_model, width, fan_in=d_model, generator=generator)

        def bias(*shape: int) -> nn.Parameter | None:
            return zeros(*shape) if config.bias else None

        self.W_Q, self.W_K, self.W_V = weight(d_head), weight(d_head), weight(d_value)
        self.W_O = lecun_normal(
            n_heads, d_value, d_model, fan_in=n_heads * d_value, generator=generator
        )
        self.b_Q, self.b_K = bias(n_heads, d_head), bias(n_heads, d_head)
        self.b_V, self.b_O = bias(n_heads, d_value), bias(d_model)
        self.hook_q, self.hook_k, self.hook_v = HookPoint(), HookPoint(), HookPoint()
        if config.rotary:
            self.hook_rot_q, self.hook_rot_k = HookPoint(), HookPoint()
        if not config.shared:
            self.W_Q_distance, self.W_K_distance = weight(d_head), weight(d_head)
            self.b_Q_distance, self.b_K_distance = bias(n_heads, d_head), bias(n_heads, d_head)
            self.hook_q_distance, self.hook_k_distance = HookPoint(), HookPoint()
        self.hook_attn_scores = HookPoint()
        self.hook_affinity, self.hook_dissimilarity = HookPoint(), HookPoint()
        self.hook_gate, self.hook_pattern, self.hook_z = HookPoint(), HookPoint(), HookPoint()

    def _attend(
        self, x_query: Tensor, x_key: Tensor, bias: Tensor | None, mask: Tensor | None, points: Self
    ) -> Tensor:
        config = self.config
        n_query, n_key = x_query.shape[1], x_key.shape[1]
        valid = self._valid_pairs(x_query, x_key, mask)
        query_weights, query_biases = [self.W_Q], [self.b_Q]
        key_weights, key_biases = [self.W_K, self.W_V], [self.b_K, self.b_V]
        if not config.shared:
            query_weights.append(self.W_Q_distance)
            query_biases.append(self.b_Q_distance)
            key_weights.append(self.W_K_distance)
            key_biases.append(self.b_K_distance)
        projected = project_queries_and_keys(
            x_query,
            x_key,
            query_weights,
            key_weights,
            [b for b in query_biases if b is not None] or None,
            [b for b in key_biases if b is not None] or None,
        )
        queries, keys = projected[: len(query_weights)], projected[len(query_weights) :]
        q, k, v = points.hook_q(queries[0]), points.hook_k(keys[0]), points.hook_v(keys[1])
        distance_q, distance_k = q, k
        if not config.shared:
            distance_q, distance_k = (
                points.hook_q_distance(queries[1]),
                points.hook_k_distance(keys[2]),
            )
        if config.rotary:
            q = points.hook_rot_q(rotate(q, first=n_key - n_query))
            k = points.hook_rot_k(rotate(k))

        scale = config.d_head**-0.5 if config.scaled else 1.0
        alpha, beta = scale * config.composition.alpha, scale * config.composition.beta
        q, k, v, distance_q, distance_k = (
            tensor.transpose(1, 2)
            for tensor in (q * alpha, k, v, distance_q * beta, distance_k * beta)
        )
        kept = None
        if self.training and config.dropout:
            leading = (1, 1) if config.dropout_shared else q.shape[:2]
            kept = dropout_mask((*leading, n_query, n_key), config.dropout, v)

        def compose(affinity: Tensor, dissimilarity: Tensor, chunk: Chunk) -> Tensor:
            chunk_valid = None if valid is None else valid[broadcast_chunk(valid, chunk)]
            chunk_mask = None if mask is None else mask[broadcast_chunk(mask, chunk)]
            composition = config.composition
            affinity = points.hook_attn_scores(affinity)
            affinity = points.hook_affinity(composition.centred_affinity(affinity, chunk_valid))
            dissimilarity = composition.centred_dissimilarity(dissimilarity, chunk_valid)
            dissimilarity = points.hook_dissimilarity(dissimilarity)
            gate = points.hook_gate(composition.gated(dissimilarity))
            pattern = composition.composed(affinity, gate, chunk_mask)
            if kept is not None:
                pattern = pattern * kept[broadcast_chunk(kept, chunk)]
            return points.hook_pattern(pattern)

        if observed(
            points.hook_attn_scores,
            points.hook_affinity,
            points.hook_dissimilarity,
            points.hook_gate,
            points.hook_pattern,
        ):
            affinity = q @ k.mT
            affinity = affinity if bias is None else affinity + bias
            dissimilarity = -l1_distances(distance_q, distance_k)
            z = compose(affinity, dissimilarity, (slice(None), slice(None))) @ v
        else:
            z = quasi_attention(q, k, distance_q, distance_k, v, bias, compose)
        z = points.hook_z(z.transpose(1, 2))
        return join_heads(z, self.W_O, self.b_O)

    def _valid_pairs(
        self,
        x_query: Float[Tensor, "batch query_pos d_model"],
        x_key: Float[Tensor, "batch key_pos d_model"],
        mask: Bool[Tensor, "#batch #head #query_pos key_pos"] | None,
    ) -> Bool[Tensor, "#batch #head #query_pos key_pos"] | None:
        """The pairs over which E and N are centred; None for all."""
        if not self.config.composition.centres_matrix:
            return mask
        n_query, n_key = x_query.shape[1], x_key.shape[1]
        if n_query != n_key:
            raise ValueError(
                f"centring must not be 'matrix' with {n_query} queries and {n_key} keys, got "
                "'matrix': the mean over pairs would depend on which queries are passed; use 'row'"
            )
        if mask is None:
            return None
        if x_query is not x_key:
            raise ValueError(
                "centring must not be 'matrix' with a mask where x_query is not x_key, got "
                "'matrix': the mask does not say which queries are padding; use 'row'"
            )
        if mask.shape[2] > 1 and not torch.equal(mask, mask[:, :, :1].expand_as(mask)):
            raise ValueError(
                "centring must not be 'matrix' with a mask that differs between queries (a causal "
                "one), got 'matrix': the mean would leak masked tokens; use 'row'"
            )
        keys = mask[:, :, :1]
        # In self-attention, a key that is padding is padding as a query too.
        return keys & keys.mT
