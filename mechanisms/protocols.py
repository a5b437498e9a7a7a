"""Interfaces of component configs; implement them to use your own components in the models."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn


class ComponentConfig(Protocol):
    """A frozen config that builds its module, such as a feed-forward layer.

    Example:
        >>> class FourTimesAsWide:
        ...     def build(self, d_model, *, generator=None):
        ...         return FeedForwardConfig(d_mlp=4 * d_model).build(d_model, generator=generator)
        >>> FourTimesAsWide().build(16).W_in.shape
        torch.Size([16, 64])
    """

    def build(self, d_model: int, *, generator: torch.Generator | None = None) -> nn.Module:
        """The module for a residual stream of width `d_model`."""
        ...


class AttentionProtocol(ComponentConfig, Protocol):
    """The config of an attention module.

    The module has the call signature of `MultiHeadAttention`: `x_query`
    [batch, query_pos, d_model], `x_key` [batch, key_pos, d_model], `bias`, `mask` and `hooks`.

    Example:
        >>> config: AttentionProtocol = GeometricAttentionConfig(n_heads=4, d_head=4)
        >>> config.n_heads, config.measures_distances, config.needs_all_queries
        (4, True, False)
    """

    @property
    def n_heads(self) -> int:
        """Number of heads; a position bias has one entry for each of them."""
        ...

    @property
    def measures_distances(self) -> bool:
        """Whether it uses query-key distances, so that both must come from the same sequence."""
        ...

    @property
    def needs_all_queries(self) -> bool:
        """Whether the output at one query depends on which other queries are passed."""
        ...
