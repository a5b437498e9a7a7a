"""Compositional de-attention: a query adds, subtracts or deletes tokens.

Tay et al. 2019, "Compositional De-Attention Networks" (CoDA). A softmax only ever adds; here the
weight of a token is between -1 and 1, and need not sum to anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import linear
from transformer_lens.hook_points import HookPoint

from mechanisms.attention.masks import check_last, check_mask
from mechanisms.attention.multi_head import project_heads
from mechanisms.attention.positions import rotate
from mechanisms.attention.quasi import (
    Part,
    QuasiAttentionConfig,
    l1_distances,
    place,
    quasi_attention,
)
from mechanisms.hooking import observed
from mechanisms.initialization import lecun_normal, zeros


@dataclass(frozen=True, kw_only=True)
class CodaAttentionConfig:
    """Multi-head quasi-attention of a sequence with itself, or with another one.

    Args:
        n_heads: number of heads.
        d_head: width of a head's queries and keys.
        d_value: width of a head's values; None for `d_head`.
        composition: how affinity and dissimilarity become the pattern.
        scaled: whether both are divided by sqrt(d_head).
        shared: whether both are of the same queries and keys.
        dropout: as in `AttentionConfig`.
        rotary: whether queries and keys of the affinity are turned as in `AttentionConfig`.

    Raises:
        ValueError: for a value outside of these ranges, or an odd d_head with `rotary`.
    """

    n_heads: int
    d_head: int
    d_value: int | None = None
    composition: QuasiAttentionConfig = field(default_factory=QuasiAttentionConfig)
    scaled: bool = True
    shared: bool = True
    dropout: float = 0.0
    rotary: bool = False

    def __post_init__(self):
        for name in ("n_heads", "d_head", "d_value"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if self.rotary and self.d_head % 2:
            raise ValueError(f"d_head must be even with rotary=True, got {self.d_head}")

    @property
    def measures_distances(self) -> bool:
        """See `AttentionProtocol`."""
        return self.rotary

    @property
    def needs_all_queries(self) -> bool:
        """See `AttentionProtocol`."""
        return self.composition.centres_matrix

    def build(self, d_model: int, *, generator: torch.Generator | None = None) -> nn.Module:
        """The attention module for a residual stream of width `d_model`."""
        return CodaAttention(self, d_model, generator=generator)


class CodaAttention(nn.Module):
    """Attention whose weights are affinity(E) * gate(N), in -1..1 by default.

    Tay et al. 2019, equations 1 to 4 and their use in a Transformer. For each head, with q, k, v
    as in multi-head attention (and scale 1 / sqrt(d_head), or 1):

    - E = scale * alpha * q · k + position bias, and N = -scale * beta * ||q - k||_1;
    - M = tanh(E) * sigmoid(N), zero where masked, E and N centred first if the config says so;
    - z = M v, and out = sum over heads of z W_O + b_O.

    Centring by `matrix` takes a mean over all queries. Where one may not see what another does
    (causal masks), or not all are there (queries from elsewhere: a decoder's, or only those that
    are read out), that would leak or depend on who is asked, and is refused. Padding counts
    neither as key nor as query.

    With `rotary`, q and k are turned by their positions for E alone. A turn of both keeps their
    product but not their L1 distance: N of turned ones would depend on where in the text a pair
    is, beside how far apart.

    Where nobody listens between q, k, v and z, only the distances are kept for the gradient.

    Parameters as in `MultiHeadAttention`; with `shared=False` also `W_Q_apart`, `W_K_apart`
    [head, d_model, d_head] and their `b_`: queries and keys of N.

    Hook points: `hook_q`, `hook_k` (`hook_q_apart`, `hook_k_apart`) [batch, pos, head, d_head];
    with `rotary` also `hook_rot_q`, `hook_rot_k` [batch, pos, head, d_head]; `hook_v`, `hook_z`
    [batch, pos, head, d_value]; [batch, head, query_pos, key_pos]:
    `hook_attn_scores` (E with its bias), `hook_affinity` (E, centred), `hook_dissimilarity` (N,
    centred), `hook_gate` (sigmoid(N)), none of them masked, and `hook_pattern` (M).
    """

    def __init__(
        self,
        config: CodaAttentionConfig,
        d_model: int,
        *,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        self.config = config
        n_heads, d_head = config.n_heads, config.d_head
        d_value = d_head if config.d_value is None else config.d_value

        def weight(width: int) -> nn.Parameter:
            return lecun_normal(n_heads, d_model, width, fan_in=d_model, generator=generator)

        self.W_Q, self.W_K, self.W_V = weight(d_head), weight(d_head), weight(d_value)
        self.W_O = lecun_normal(
            n_heads, d_value, d_model, fan_in=n_heads * d_value, generator=generator
        )
        self.b_Q, self.b_K = zeros(n_heads, d_head), zeros(n_heads, d_head)
        self.b_V, self.b_O = zeros(n_heads, d_value), zeros(d_model)
        self.hook_q, self.hook_k, self.hook_v = HookPoint(), HookPoint(), HookPoint()
        if config.rotary:
            self.hook_rot_q, self.hook_rot_k = HookPoint(), HookPoint()
        if not config.shared:
            self.W_Q_apart, self.W_K_apart = weight(d_head), weight(d_head)
            self.b_Q_apart, self.b_K_apart = zeros(n_heads, d_head), zeros(n_heads, d_head)
            self.hook_q_apart, self.hook_k_apart = HookPoint(), HookPoint()
        self.hook_attn_scores = HookPoint()
        self.hook_affinity, self.hook_dissimilarity = HookPoint(), HookPoint()
        self.hook_gate, self.hook_pattern, self.hook_z = HookPoint(), HookPoint(), HookPoint()

    def forward(
        self,
        x_query: Float[Tensor, "batch query_pos d_model"],
        x_key: Float[Tensor, "batch key_pos d_model"],
        *,
        bias: Float[Tensor, "#batch #head query_pos key_pos"] | None = None,
        mask: Bool[Tensor, "#batch #head #query_pos key_pos"] | None = None,
        hooks: CodaAttention | None = None,
    ) -> Float[Tensor, "batch query_pos d_model"]:
        """What the queries receive; `mask` is True where a query may attend.

        `hooks` names the activations of one step where the weights are shared over depth.

        Raises:
            ValueError: centring by `matrix` with a mask that is not the same for all queries, or
                with fewer queries than keys; a mask of another shape; or more queries than
                keys with `rotary`.
            TypeError: the mask is not boolean.
        """
        points = self if hooks is None else hooks
        config = self.config
        check_mask(mask, x_query, x_key, n_heads=config.n_heads)
        if config.rotary:
            check_last(x_query, x_key)
        valid = self._valid(mask, whole=x_query.shape[1] == x_key.shape[1])
        asking, asking_biases = [self.W_Q], [self.b_Q]
        told, told_biases = [self.W_K, self.W_V], [self.b_K, self.b_V]
        if not config.shared:
            asking, asking_biases = [*asking, self.W_Q_apart], [*asking_biases, self.b_Q_apart]
            told, told_biases = [*told, self.W_K_apart], [*told_biases, self.b_K_apart]
        if x_query is x_key:
            projected = project_heads(x_key, asking + told, asking_biases + told_biases)
        else:
            projected = project_heads(x_query, asking, asking_biases)
            projected += project_heads(x_key, told, told_biases)
        queries, keys = projected[: len(asking)], projected[len(asking) :]
        q, k, v = points.hook_q(queries[0]), points.hook_k(keys[0]), points.hook_v(keys[1])
        x, y = q, k
        if not config.shared:
            x, y = points.hook_q_apart(queries[1]), points.hook_k_apart(keys[2])
        if config.rotary:
            q = points.hook_rot_q(rotate(q, first=k.shape[1] - q.shape[1]))
            k = points.hook_rot_k(rotate(k))

        scale = config.d_head**-0.5 if config.scaled else 1.0
        of_affinity, of_distance = scale * config.composition.alpha, scale * config.composition.beta
        q, k, v, x, y = (
            part.transpose(1, 2)
            for part in (q * of_affinity, k, v, x * of_distance, y * of_distance)
        )
        kept = None
        if self.training and config.dropout:
            shape = x_query.shape[1], x_key.shape[1]
            kept = torch.rand(shape, device=v.device) >= config.dropout
            kept = kept / (1 - config.dropout)

        def compose(affinity: Tensor, dissimilarity: Tensor, part: Part) -> Tensor:
            where = None if valid is None else valid[place(valid, part)]
            seen = None if mask is None else mask[place(mask, part)]
            composition = config.composition
            affinity = points.hook_attn_scores(affinity)
            affinity = points.hook_affinity(composition.centred_affinity(affinity, where))
            dissimilarity = composition.centred_dissimilarity(dissimilarity, where)
            dissimilarity = points.hook_dissimilarity(dissimilarity)
            gate = points.hook_gate(composition.gated(dissimilarity))
            pattern = composition.composed(affinity, gate, seen)
            return points.hook_pattern(pattern if kept is None else pattern * kept)

        if observed(
            points.hook_attn_scores,
            points.hook_affinity,
            points.hook_dissimilarity,
            points.hook_gate,
            points.hook_pattern,
        ):
            affinity = q @ k.mT
            affinity = affinity if bias is None else affinity + bias
            z = compose(affinity, -l1_distances(x, y), (slice(None), slice(None))) @ v
        else:
            z = quasi_attention(q, k, x, y, v, bias, compose)
        z = points.hook_z(z.transpose(1, 2))
        return linear(z.flatten(2), self.W_O.flatten(0, 1).T, self.b_O)

    def _valid(
        self, mask: Bool[Tensor, "#batch #head #query_pos key_pos"] | None, *, whole: bool
    ) -> Bool[Tensor, "#batch #head #query_pos key_pos"] | None:
        """The pairs that count where E and N are centred."""
        if not self.config.composition.centres_matrix:
            return mask
        if not whole:
            raise ValueError(
                "centring must not be 'matrix' with fewer queries than keys: the mean over pairs "
                "would depend on which ones ask; use 'row'"
            )
        if mask is None:
            return None
        if mask.shape[2] > 1 and not torch.equal(mask, mask[:, :, :1].expand_as(mask)):
            raise ValueError(
                "centring must not be 'matrix' with a mask that differs between queries (a causal "
                "one): the mean would show each query what it may not see; use 'row'"
            )
        keys = mask[:, :, :1]
        # In a sequence's attention to itself, a key that is padding is so as a query.
        return keys & keys.mT
