"""Geometric attention: each query attends to the nearest matching key (Neural Data Router)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad
from transformer_lens.hook_points import HookPoint

from mechanisms.attention.base import Attention, DistanceAttentionConfig, join_heads, project_heads
from mechanisms.differentiation import with_own_gradient
from mechanisms.dropout import dropout
from mechanisms.initialization import lecun_normal, zeros

NORMALIZE_EPSILON = 1e-12


@dataclass(frozen=True, kw_only=True)
class GeometricAttentionConfig(DistanceAttentionConfig):
    """Configuration of `GeometricAttention`: heads, normalisation and dropout.

    Args:
        n_heads: number of heads.
        d_head: width of a head.
        normalize: whether a query's weights are divided by their sum; off in the paper's runs.
        query_dropout: probability of dropping a component of a query in training, with its
            content bias. The paper's (section B.2).
        key_dropout: the same for a component of a key, for all queries. The authors' code has
            this instead.

    Raises:
        ValueError: a size is less than 1, or a dropout rate is outside [0, 1).

    Example:
        >>> config = GeometricAttentionConfig(n_heads=4, d_head=4)
        >>> config.build(16)(x, x).shape  # [batch, query_pos, d_model]
        torch.Size([2, 5, 16])
    """

    normalize: bool = False

    def build(self, d_model: int, *, generator: torch.Generator | None = None) -> nn.Module:
        """The attention module for a residual stream of width `d_model`."""
        return GeometricAttention(self, d_model, generator=generator)


class GeometricAttention(Attention[GeometricAttentionConfig]):
    """Attention in which each query visits the keys by distance and stops at a match.

    Csordás, Irie and Schmidhuber 2021, "The Neural Data Router", section 3.2. For each head

    - logit[i, j] = scale (q_i + content_bias).k_j + scale_pos dir_i + s_bias, where dir_i is one
      of two numbers W_dir x_i + b_dir: `back` for keys to the left of i, `front` to its right;
    - p = sigmoid(logit), the probability that key j matches, 0 on the diagonal and where masked;
    - A[i, j] = p[i, j] prod (1 - p[i, k]) over all keys k that are nearer to i than j. Of two keys
      at the same distance the right one is the nearer.

    The weights of a query sum to at most 1; `normalize` divides them by max(sum, 1e-12). Queries
    are at the last of the key positions.

    The learned scalars start at 1 / sqrt(d_head), 1 and 0. All projections, including that of the
    direction, start from N(0, 1 / d_model), biases at 0. (The authors' code intends a special
    initialisation of the direction projection, but applies it to an unused matrix.)

    Hook points: `hook_q`, `hook_k`, `hook_v`, `hook_z` [batch, pos, head, d_head];
    `hook_direction` [batch, pos, head, 2], back and front; `hook_content_scores` (the first term
    of the logits), `hook_attn_scores` (the logits) and `hook_pattern` (A)
    [batch, head, query_pos, key_pos].

    Example:
        >>> attention = GeometricAttention(GeometricAttentionConfig(n_heads=4, d_head=4), 16)
        >>> attention(x, x).shape  # [batch, query_pos, d_model]
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        config: GeometricAttentionConfig,
        d_model: int,
        *,
        generator: torch.Generator | None = None,
    ):
        super().__init__(config)
        n_heads, d_head = config.n_heads, config.d_head
        shape = (n_heads, d_model, d_head)
        self.W_Q = lecun_normal(*shape, fan_in=d_model, generator=generator)
        self.W_K = lecun_normal(*shape, fan_in=d_model, generator=generator)
        self.W_V = lecun_normal(*shape, fan_in=d_model, generator=generator)
        self.W_O = lecun_normal(
            n_heads, d_head, d_model, fan_in=n_heads * d_head, generator=generator
        )
        self.W_dir = lecun_normal(n_heads, d_model, 2, fan_in=d_model, generator=generator)
        self.b_dir = zeros(n_heads, 2)
        self.content_bias = zeros(n_heads, d_head)
        self.scale = nn.Parameter(torch.tensor([d_head**-0.5]))
        self.scale_pos = nn.Parameter(torch.ones(1))
        self.s_bias = zeros(1)
        self.hook_q, self.hook_k, self.hook_v = HookPoint(), HookPoint(), HookPoint()
        self.hook_direction, self.hook_content_scores = HookPoint(), HookPoint()
        self.hook_attn_scores, self.hook_pattern = HookPoint(), HookPoint()
        self.hook_z = HookPoint()

    def _attend(
        self, x_query: Tensor, x_key: Tensor, bias: Tensor | None, mask: Tensor | None, points: Self
    ) -> Tensor:
        if x_query is x_key:
            q, k, v, direction = project_heads(x_key, (self.W_Q, self.W_K, self.W_V, self.W_dir))
        else:
            q, direction = project_heads(x_query, (self.W_Q, self.W_dir))
            k, v = project_heads(x_key, (self.W_K, self.W_V))
        q, k, v = points.hook_q(q), points.hook_k(k), points.hook_v(v)
        direction = points.hook_direction(direction + self.b_dir)

        n_query, n_key = q.shape[1], k.shape[1]
        q = ((q + self.content_bias) * self.scale).transpose(1, 2)
        q = dropout(q, self.config.query_dropout, self.training)
        k = dropout(k.permute(0, 2, 3, 1), self.config.key_dropout, self.training)
        scores = points.hook_content_scores(q @ k)
        back, front = (direction * self.scale_pos + self.s_bias).transpose(1, 2).split(1, dim=-1)
        layout = _layout(n_query, n_key, scores.device)
        scores = scores + torch.where(layout.is_right, front, back)
        if bias is not None:
            scores = scores + bias
        hidden = layout.is_self if mask is None else layout.is_self | ~mask
        scores = points.hook_attn_scores(scores.masked_fill(hidden, -math.inf))
        pattern = geometric_weights(scores)
        if self.config.normalize:
            total = pattern.sum(-1, keepdim=True)
            # The least divisor is itself 0 in float16.
            pattern = pattern / total.clamp(min=NORMALIZE_EPSILON).masked_fill(total == 0, 1)
        pattern = points.hook_pattern(pattern)

        z = points.hook_z((pattern @ v.transpose(1, 2)).transpose(1, 2))
        return join_heads(z, self.W_O)


def geometric_weights(
    logits: Float[Tensor, "*batch query_pos key_pos"],
) -> Float[Tensor, "*batch query_pos key_pos"]:
    """Geometric attention weights: p[i, j] times prod (1 - p[i, k]) over keys k nearer than j.

    p = sigmoid(logits). Queries are at the last `query_pos` of the key positions. A logit of -inf
    removes its key. A query's own position counts as the farthest key, not as the nearest;
    geometric attention always removes it.

    With the keys sorted by distance the product is a cumulative product of sigmoid(-logit). No
    factor is a difference of similar numbers, so the relative error stays within `key_pos`
    roundings for logits of any size, without logarithms. With w = A dL/dA the gradient is w - p
    times the sum of w over the key itself and all keys behind it, so nothing is divided by a
    product that may be 0.

    Raises:
        ValueError: there are more queries than keys.

    Example:
        >>> weights = geometric_weights(torch.tensor([[1.0, 1.0, 1.0, -torch.inf]]))
        >>> bool(weights[0, 0] < weights[0, 1] < weights[0, 2])  # the nearest key comes first
        True
    """
    n_query, n_key = logits.shape[-2:]
    if n_query > n_key:
        raise ValueError(
            f"number of queries must be at most the number of keys = {n_key}, got {n_query}"
        )
    return with_own_gradient(_definition, _forward, _gradient, logits)


def _definition(logits: Tensor) -> Tensor:
    layout = _layout(*logits.shape[-2:], logits.device)
    sorted_logits = _take(logits, layout.by_distance)
    missed = (-sorted_logits).sigmoid().cumprod(-1)
    weights = sorted_logits.sigmoid() * pad(missed[..., :-1], (1, 0), value=1.0)
    return _take(weights, layout.by_position)


def _forward(logits: Tensor) -> tuple[Tensor, ...]:
    layout = _layout(*logits.shape[-2:], logits.device)
    sorted_logits = _take(logits, layout.by_distance)
    weights = sorted_logits.sigmoid()
    missed = sorted_logits.neg_().sigmoid_().cumprod(-1)
    weights[..., 1:] *= missed[..., :-1]
    weights = _take(weights, layout.by_position)
    return weights, weights


def _gradient(
    _needed: tuple[bool, ...], gradient: Tensor, logits: Tensor, weights: Tensor
) -> tuple[Tensor]:
    layout = _layout(*logits.shape[-2:], logits.device)
    w = gradient * weights
    sum_from_key_on = _take(w, layout.by_distance).flip(-1).cumsum(-1).flip(-1)
    sums = _take(sum_from_key_on, layout.by_position)
    return (w.addcmul_(logits.sigmoid(), sums, value=-1),)


class _KeyLayout:
    """Positions of the keys relative to each query.

    Attributes:
        is_right: [query_pos, key_pos], whether the key is to the right of the query.
        is_self: [query_pos, key_pos], whether the key is at the query's own position.
        by_distance: flat indices that sort each row of [query_pos, key_pos] by distance, with the
            query's own position last.
        by_position: flat indices that undo this.
    """

    def __init__(self, n_query: int, n_key: int, device: torch.device):
        query = torch.arange(n_key - n_query, n_key, device=device)[:, None]
        key = torch.arange(n_key, device=device)
        offset = key - query
        self.is_right = offset > 0
        self.is_self = offset == 0
        rank = 2 * offset.abs() - self.is_right.int()
        order = rank.masked_fill(self.is_self, 2 * n_key).argsort(1)
        row = n_key * torch.arange(n_query, device=device)[:, None]
        self.by_distance: Int[Tensor, " flat"] = (row + order).flatten()
        self.by_position: Int[Tensor, " flat"] = (row + order.argsort(1)).flatten()


# Cached for later calls, which may need gradients.
@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _layout(n_query: int, n_key: int, device: torch.device) -> _KeyLayout:
    return _KeyLayout(n_query, n_key, device)


def _take(x: Float[Tensor, "*batch row column"], flat: Int[Tensor, " flat"]) -> Tensor:
    """A copy of `x` with the entries of each matrix rearranged."""
    rows = x.flatten(-2).flatten(0, -2) if x.ndim > 2 else x.reshape(1, -1)
    return rows.index_select(1, flat).view(x.shape)
