"""Compositional attention: searches and retrievals are separate and paired dynamically.

Mittal et al. 2021, "Compositional Attention: Disentangling Search and Retrieval". A head of
standard attention always retrieves the same values with its search. Here every search may use
every retrieval, and a second, soft attention selects the retrieval for each query.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from mechanisms.attention.base import project_queries_and_keys
from mechanisms.attention.multi_head import attention_scores, drop_pairs, normalize_scores
from mechanisms.attention.output import MappedAttention
from mechanisms.differentiation import widened
from mechanisms.hooking import observed
from mechanisms.initialization import lecun_normal, zeros
from mechanisms.randomness import gumbel_softmax
from mechanisms.validation import check_choice, check_dropout, check_sizes

Scorer = Literal["dot", "mlp"]
Selection = Literal["softmax", "gumbel", "hard", "top_k"]
Biases = Literal["all", "selection", "none"]


@dataclass(frozen=True, kw_only=True)
class CompositionalAttentionConfig:
    """Configuration of `CompositionalAttention`: numbers of searches and retrievals, selection.

    Args:
        n_searches: S, the number of attention patterns; also available as `n_heads`.
        n_retrievals: R, the number of value matrices, which all searches share.
        d_head: width of a search's queries and keys.
        d_value: width of a retrieval; None for `d_head`.
        d_selection: width of the value queries and value keys; None for `d_head`.
        scorer: `dot`, value query · value key / sqrt(d_selection); or `mlp`, a linear map of
            [value query; retrieval]. The query's term of the latter is the same for all
            retrievals, so it affects the value scores only through hooks.
        separate_value_keys: whether each retrieval has its own value-key matrix.
        selection: `softmax`; `gumbel`, a soft sample in training (temperature 1, Jang et al.
            2017) and the maximum in evaluation; `hard`, the maximum, with the gradient of the
            softmax; `top_k`, a softmax over the `n_selected` highest logits.
        n_selected: number of retrievals for `top_k`; else None.
        own_value, nonlinear: as in `AttentionConfig`.
        biases: which projections have one: `all`; `selection`, only value queries and keys; or
            `none`.
        dropout, dropout_shared: as in `AttentionConfig`, of the searches' patterns.

    Raises:
        ValueError: a setting is outside its range.

    Example:
        >>> config = CompositionalAttentionConfig(n_searches=2, n_retrievals=4, d_head=4)
        >>> config.build(16)(x, x).shape  # [batch, query_pos, d_model]
        torch.Size([2, 5, 16])
    """

    n_searches: int
    n_retrievals: int
    d_head: int
    d_value: int | None = None
    d_selection: int | None = None
    scorer: Scorer = "dot"
    separate_value_keys: bool = False
    selection: Selection = "softmax"
    n_selected: int | None = None
    own_value: bool = False
    nonlinear: bool = False
    biases: Biases = "all"
    dropout: float = 0.0
    dropout_shared: bool = True

    def __post_init__(self):
        check_sizes(
            self, "n_searches", "n_retrievals", "d_head", optional=("d_value", "d_selection")
        )
        check_choice(self, "scorer", Scorer)
        check_choice(self, "selection", Selection)
        check_choice(self, "biases", Biases)
        if self.scorer == "mlp" and self.separate_value_keys:
            raise ValueError(
                "separate_value_keys must be False with scorer='mlp', which has no keys, got True"
            )
        if self.selection == "top_k":
            if self.n_selected is None or not 1 <= self.n_selected <= self.n_retrievals:
                raise ValueError(
                    f"n_selected must be from 1 to n_retrievals={self.n_retrievals} with "
                    f"selection='top_k', got {self.n_selected}"
                )
        elif self.n_selected is not None:
            raise ValueError(
                f"n_selected must be None with selection={self.selection!r}, got {self.n_selected}"
            )
        check_dropout(self)

    @property
    def n_heads(self) -> int:
        """Number of searches; a position bias has one entry for each of them."""
        return self.n_searches

    @property
    def measures_distances(self) -> bool:
        """False: query-key distances are not used."""
        return False

    @property
    def needs_all_queries(self) -> bool:
        """False: the output at a query does not depend on the others."""
        return False

    def build(self, d_model: int, *, generator: torch.Generator | None = None) -> nn.Module:
        """The attention module for a residual stream of width `d_model`."""
        return CompositionalAttention(self, d_model, generator=generator)


class CompositionalAttention(MappedAttention[CompositionalAttentionConfig]):
    """S searches, each of which selects among R retrievals for every query.

    Mittal et al. 2021, section 3. With search i and retrieval j:

    - pattern_i = softmax(q_i · k_i / sqrt(d_head)), as in multi-head attention;
    - retrieval_ij = pattern_i v_j;
    - score_ij = softmax over j of (value query_i · (retrieval_ij W_value_key)) / sqrt(d_selection),
      where the value query is a linear map of the query's token;
    - z_i = sum_j score_ij retrieval_ij, and out = sum_i z_i W_O[i] + b_O; see `MappedAttention` for
      the own value and the nonlinear output.

    With S = R and score_ij = 1 for i = j, else 0, this is multi-head attention.

    For N positions the patterns cost S N^2 d_head and the retrievals S R N^2 d_value
    multiplications, S (1 + R) N^2 in all for each unit of width, against 2 S N^2; there are
    2 S + R matrices of d_model x d_head (queries, keys, values), against 3 S, and S more of
    d_model x d_selection for the value queries.

    Without hooks at `hook_value_key`, value keys are not computed: their matrix is applied to the
    value queries, which are fewer by a factor of R. The retrievals, S R N d_value numbers for each
    example, are kept for the gradient; computing them again would cost a tenth of the time.

    Parameters besides those of `MultiHeadAttention` (`W_Q`, `W_K`, `W_O` with S heads, `W_V` with
    R): `W_value_query` [search, d_model, d_selection] and `b_value_query`; `W_value_key`
    [d_value, d_selection], or [retrieval, d_value, d_selection], and `b_value_key`; or `W_score`
    [d_selection + d_value] and `b_score`.

    Hook points: `hook_q`, `hook_k` [batch, pos, search, d_head]; `hook_v` [batch, pos, retrieval,
    d_value]; `hook_attn_scores`, `hook_pattern` and, after it, the same under the paper's name,
    `hook_search` [batch, search, query_pos, key_pos]; `hook_value_query` [batch, pos, search,
    d_selection]; `hook_retrieval` [batch, pos, search, retrieval, d_value]; `hook_value_key`
    [batch, pos, search, retrieval, d_selection] (scorer `dot`); `hook_value_logits` and
    `hook_value_scores` [batch, pos, search, retrieval]; `hook_z` [batch, pos, search, d_value]; and
    with the own value `hook_own_value` [batch, pos, d_value].

    Example:
        >>> config = CompositionalAttentionConfig(n_searches=2, n_retrievals=4, d_head=4)
        >>> CompositionalAttention(config, 16)(x, x).shape  # [batch, query_pos, d_model]
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        config: CompositionalAttentionConfig,
        d_model: int,
        *,
        generator: torch.Generator | None = None,
    ):
        super().__init__(config)
        n_searches, n_retrievals, d_head = config.n_searches, config.n_retrievals, config.d_head
        d_value = d_head if config.d_value is None else config.d_value
        d_selection = d_head if config.d_selection is None else config.d_selection

        def weight(*shape: int, fan_in: int) -> nn.Parameter:
            return lecun_normal(*shape, fan_in=fan_in, generator=generator)

        def bias(*shape: int, selection: bool = False) -> nn.Parameter | None:
            has_bias = config.biases == "all" or (selection and config.biases == "selection")
            return zeros(*shape) if has_bias else None

        self.W_Q = weight(n_searches, d_model, d_head, fan_in=d_model)
        self.W_K = weight(n_searches, d_model, d_head, fan_in=d_model)
        self.W_V = weight(n_retrievals, d_model, d_value, fan_in=d_model)
        self.b_Q, self.b_K = bias(n_searches, d_head), bias(n_searches, d_head)
        self.b_V = bias(n_retrievals, d_value)
        self.W_value_query = weight(n_searches, d_model, d_selection, fan_in=d_model)
        self.b_value_query = bias(n_searches, d_selection, selection=True)
        if config.scorer == "dot":
            leading = (n_retrievals,) if config.separate_value_keys else ()
            self.W_value_key = weight(*leading, d_value, d_selection, fan_in=d_value)
            self.b_value_key = bias(*leading, d_selection, selection=True)
            self.hook_value_key = HookPoint()
        else:
            self.W_score = weight(d_selection + d_value, fan_in=d_selection + d_value)
            self.b_score = bias(1, selection=True)
        self._make_output(
            n_searches,
            d_value,
            d_model,
            own_value=config.own_value,
            nonlinear=config.nonlinear,
            bias=config.biases == "all",
            generator=generator,
        )
        self.hook_q, self.hook_k, self.hook_v = HookPoint(), HookPoint(), HookPoint()
        self.hook_attn_scores, self.hook_pattern = HookPoint(), HookPoint()
        self.hook_search = HookPoint()
        self.hook_value_query, self.hook_retrieval = HookPoint(), HookPoint()
        self.hook_value_logits, self.hook_value_scores = HookPoint(), HookPoint()
        self.hook_z = HookPoint()

    def _attend(
        self, x_query: Tensor, x_key: Tensor, bias: Tensor | None, mask: Tensor | None, points: Self
    ) -> Tensor:
        query_weights, key_weights = (self.W_Q, self.W_value_query), (self.W_K, self.W_V)
        query_biases = key_biases = None
        if self.config.biases != "none":
            query_biases = _zeros_if_none((self.b_Q, self.b_value_query), query_weights)
            key_biases = _zeros_if_none((self.b_K, self.b_V), key_weights)
        q, value_query, k, v = project_queries_and_keys(
            x_query, x_key, query_weights, key_weights, query_biases, key_biases
        )
        q, k, v = points.hook_q(q), points.hook_k(k), points.hook_v(v)
        value_query = points.hook_value_query(value_query)

        scores = attention_scores(q, k, bias)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        pattern = normalize_scores(points.hook_attn_scores(scores), "softmax", mask)
        if self.training:
            pattern = drop_pairs(pattern, self.config.dropout, shared=self.config.dropout_shared)
        pattern = points.hook_search(points.hook_pattern(pattern))

        z = points.hook_z(self._select_retrievals(pattern.transpose(1, 2), v, value_query, points))
        return self._output(z, x_query, points)

    def _select_retrievals(
        self,
        pattern: Float[Tensor, "batch query_pos search key_pos"],
        v: Float[Tensor, "batch key_pos retrieval d_value"],
        value_query: Float[Tensor, "batch query_pos search d_selection"],
        points: CompositionalAttention,
    ) -> Float[Tensor, "batch query_pos search d_value"]:
        """The retrievals of each search, mixed by its value scores."""
        # One matrix product per example.
        flat = pattern.flatten(1, 2) @ v.flatten(2)
        retrieval = flat.unflatten(1, pattern.shape[1:3]).unflatten(-1, v.shape[2:])
        retrieval = points.hook_retrieval(retrieval)
        if self.config.scorer == "dot" and observed(points.hook_value_key):
            keys = self._value_keys(retrieval)
            logits = (points.hook_value_key(keys) * self._scaled(value_query)[..., None, :]).sum(-1)
        else:
            direction, offset = self._retrieval_directions(value_query)
            if direction.ndim == 4:
                direction = direction[..., None, :]
            logits = (retrieval * direction).sum(-1) + offset
        scores = self._value_scores(points.hook_value_logits(logits))
        return (retrieval * points.hook_value_scores(scores)[..., None]).sum(-2)

    def _retrieval_directions(
        self, value_query: Float[Tensor, "batch query_pos search d_selection"]
    ) -> tuple[Tensor, Float[Tensor, "batch query_pos search #retrieval"]]:
        """Direction and offset of the value logits, which are retrieval · direction + offset.

        The direction is [batch, query_pos, search, d_value], or with separate value keys
        [batch, query_pos, search, retrieval, d_value].
        """
        if self.config.scorer == "mlp":
            query_weight, retrieval_weight = self.W_score.split(
                [value_query.shape[-1], len(self.W_score) - value_query.shape[-1]]
            )
            offset = (value_query @ query_weight)[..., None]
            if self.b_score is not None:
                offset = offset + self.b_score
            return retrieval_weight.expand(*value_query.shape[:3], -1), offset
        scaled = self._scaled(value_query)
        if self.config.separate_value_keys:
            direction = einsum(
                scaled,
                self.W_value_key,
                "b pos s d_selection, r d_value d_selection -> b pos s r d_value",
            )
        else:
            direction = scaled @ self.W_value_key.T
        if self.b_value_key is None:
            return direction, scaled.new_zeros(*scaled.shape[:3], 1)
        return direction, scaled @ self.b_value_key.reshape(-1, scaled.shape[-1]).T

    def _scaled(
        self, value_query: Float[Tensor, "batch query_pos search d_selection"]
    ) -> Float[Tensor, "batch query_pos search d_selection"]:
        return value_query * value_query.shape[-1] ** -0.5

    def _value_keys(
        self, retrieval: Float[Tensor, "batch query_pos search retrieval d_value"]
    ) -> Float[Tensor, "batch query_pos search retrieval d_selection"]:
        if self.config.separate_value_keys:
            keys = einsum(
                retrieval,
                self.W_value_key,
                "b pos s r d_value, r d_value d_selection -> b pos s r d_selection",
            )
        else:
            keys = retrieval @ self.W_value_key
        return keys if self.b_value_key is None else keys + self.b_value_key

    def _value_scores(
        self, logits: Float[Tensor, "batch query_pos search retrieval"]
    ) -> Float[Tensor, "batch query_pos search retrieval"]:
        """Value scores, which sum to 1 over the retrievals."""
        selection = self.config.selection
        if selection == "softmax":
            return logits.softmax(-1)
        if selection == "top_k":
            assert self.config.n_selected is not None
            indices = logits.topk(self.config.n_selected, dim=-1).indices
            selected = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, indices, True)
            return logits.masked_fill(~selected, -math.inf).softmax(-1)
        if selection == "gumbel" and self.training:
            # In float16, some of the sampled numbers would be infinite.
            return gumbel_softmax(widened(logits)).to(logits)
        hard = torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
        soft = logits.softmax(-1)
        return hard + (soft - soft.detach())


def _zeros_if_none(
    biases: Sequence[Float[Tensor, "head width"] | None],
    weights: Sequence[Float[Tensor, "head d_model width"]],
) -> list[Float[Tensor, "head width"]]:
    return [
        weight.new_zeros(weight.shape[0], weight.shape[2]) if bias is None else bias
        for weight, bias in zip(weights, biases, strict=True)
    ]
