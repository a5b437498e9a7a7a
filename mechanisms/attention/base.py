"""The base class of all attention modules, and the projections that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import linear

from mechanisms.attention.masks import check_bias, check_last, check_mask, check_tokens
from mechanisms.protocols import AttentionProtocol
from mechanisms.validation import check_dropout, check_sizes

Config = TypeVar("Config", bound=AttentionProtocol)


@dataclass(frozen=True, kw_only=True)
class DistanceAttentionConfig:
    """Settings of attentions that always measure the distance from a query to a key.

    Csordás et al. 2021 describe dropout of the queries' components (section B.2); their code drops
    those of the keys. Components are those that the bias vectors are added to, so a dropped one
    takes no part in its product; the others are scaled by 1 / (1 - rate).
    """

    n_heads: int
    d_head: int
    query_dropout: float = 0.0
    key_dropout: float = 0.0

    def __post_init__(self):
        check_sizes(self, "n_heads", "d_head")
        check_dropout(self, "query_dropout", "key_dropout")

    @property
    def measures_distances(self) -> bool:
        """True: distances between queries and keys are used."""
        return True

    @property
    def needs_all_queries(self) -> bool:
        """False: the output at a query does not depend on the others."""
        return False


class Attention(nn.Module, ABC, Generic[Config]):
    """Attention from query positions to key positions; a mechanism implements `_attend`.

    Example:
        >>> attention = RelativeAttentionConfig(n_heads=4, d_head=4).build(16)
        >>> isinstance(attention, Attention)
        True
        >>> attention(x[:, -2:], x).shape  # the last two of five tokens attend to all
        torch.Size([2, 2, 16])
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config

    def forward(
        self,
        x_query: Float[Tensor, "batch query_pos d_model"],
        x_key: Float[Tensor, "batch key_pos d_model"],
        *,
        bias: Float[Tensor, "#batch #head #query_pos #key_pos"] | None = None,
        mask: Bool[Tensor, "#batch #head #query_pos #key_pos"] | None = None,
        hooks: Self | None = None,
    ) -> Float[Tensor, "batch query_pos d_model"]:
        """The attention output at each query position.

        Args:
            x_query: tokens that attend. A mechanism that measures distances takes them to be at
                the last of the key positions.
            x_key: tokens that are attended to; the same tensor as `x_query` in self-attention.
            bias: added to the attention scores.
            mask: True where a query may attend to a key; None for all pairs.
            hooks: hook points of one step, if weights are shared over depth (see `hook_tree`).

        Raises:
            ValueError: tokens, `bias` or `mask` have the wrong shape, there are more queries than
                keys while distances are measured, or the mechanism does not allow this mask.
            TypeError: `mask` is not boolean.
        """
        points = self if hooks is None else hooks
        check_tokens(x_query, x_key)
        check_bias(bias, x_query, x_key, n_heads=self.config.n_heads)
        check_mask(mask, x_query, x_key, n_heads=self.config.n_heads)
        if self.config.measures_distances:
            check_last(x_query, x_key)
        return self._attend(x_query, x_key, bias, mask, points)

    @abstractmethod
    def _attend(
        self, x_query: Tensor, x_key: Tensor, bias: Tensor | None, mask: Tensor | None, points: Any
    ) -> Tensor:
        """Compute `forward` from checked arguments; activations pass the hook points `points`."""


def project_heads(
    x: Float[Tensor, "batch pos d_model"],
    weights: Sequence[Float[Tensor, "head d_model d_head"]],
    biases: Sequence[Float[Tensor, "head d_head"]] | None = None,
) -> list[Float[Tensor, "batch pos head d_head"]]:
    """Several projections of every token for every head, as one matrix product."""
    weight = torch.cat([weight.transpose(1, 2).flatten(0, 1) for weight in weights])
    flat = linear(x, weight, None if biases is None else torch.cat([b.flatten() for b in biases]))
    shapes = [(weight.shape[0], weight.shape[2]) for weight in weights]
    parts = flat.split([n_heads * width for n_heads, width in shapes], dim=-1)
    return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]


def join_heads(
    z: Float[Tensor, "batch pos head d_value"],
    W_O: Float[Tensor, "head d_value d_model"],
    b_O: Float[Tensor, " d_model"] | None = None,
) -> Float[Tensor, "batch pos d_model"]:
    """The sum over heads of what each has retrieved, mapped by its matrix."""
    # Under `vmap`, torch would differentiate a strided input one example at a time.
    return linear(z.flatten(2).contiguous(), W_O.flatten(0, 1).T, b_O)


def project_queries_and_keys(
    x_query: Float[Tensor, "batch query_pos d_model"],
    x_key: Float[Tensor, "batch key_pos d_model"],
    query_weights: Sequence[Float[Tensor, "head d_model d_head"]],
    key_weights: Sequence[Float[Tensor, "head d_model d_head"]],
    query_biases: Sequence[Float[Tensor, "head d_head"]] | None = None,
    key_biases: Sequence[Float[Tensor, "head d_head"]] | None = None,
) -> list[Float[Tensor, "batch _ head d_head"]]:
    """Projections of the query tokens, then of the key tokens; one product in self-attention."""
    if x_query is not x_key:
        projected = project_heads(x_query, query_weights, query_biases)
        return projected + project_heads(x_key, key_weights, key_biases)
    biases = None
    if query_biases is not None and key_biases is not None:
        biases = [*query_biases, *key_biases]
    return project_heads(x_key, [*query_weights, *key_weights], biases)
