"""What models ask of the configs of their components: an attention of one's own has this."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn


class ComponentConfig(Protocol):
    """A frozen config that builds its module: a feed-forward layer, say."""

    def build(self, d_model: int, *, generator: torch.Generator | None = None) -> nn.Module:
        """The module for a residual stream of width `d_model`."""
        ...


class AttentionProtocol(ComponentConfig, Protocol):
    """The config of an attention.

    Its module is called as `MultiHeadAttention` is: with `x_query` [batch, query_pos, d_model] and
    `x_key` [batch, key_pos, d_model], `bias`, `mask` and `hooks`.
    """

    @property
    def n_heads(self) -> int:
        """Number of heads, which may each have a bias by position."""
        ...

    @property
    def measures_distances(self) -> bool:
        """Whether it measures how far a key is from its query, which then are of one sequence."""
        ...

    @property
    def needs_all_queries(self) -> bool:
        """Whether what one query receives depends on which others ask."""
        ...
