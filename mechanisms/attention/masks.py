"""Checks of attention masks and of query positions."""

from __future__ import annotations

import torch
from torch import Tensor


def check_mask(mask: Tensor | None, x_query: Tensor, x_key: Tensor, *, n_heads: int) -> None:
    """Raise unless `mask` is boolean and [batch, head, query_pos, key_pos], each of these or 1.

    Fewer dims are refused because broadcasting would align them from the right: a mask of keys
    [batch, key_pos] would be read as [query_pos, key_pos] if the batch size equals `query_pos`.

    Args:
        mask: the mask passed to an attention module; None: every query may attend to every key.
        x_query: [batch, query_pos, d_model].
        x_key: [batch, key_pos, d_model].
        n_heads: number of heads, or of searches.

    Raises:
        ValueError: the shape is wrong.
        TypeError: the dtype is not bool; integers would be inverted bit by bit.
    """
    if mask is None:
        return
    full = (x_key.shape[0], n_heads, x_query.shape[1], x_key.shape[1])
    fits = mask.ndim == 4 and all(
        size in (1, full_size) for size, full_size in zip(mask.shape, full, strict=True)
    )
    if not fits:
        raise ValueError(
            f"mask must be [batch, head, query_pos, key_pos] = {list(full)}, where each size may "
            "also be 1 (pass mask[:, None, None] for keys [batch, key_pos], mask[None, None] for "
            f"pairs [query_pos, key_pos]), got {list(mask.shape)}"
        )
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be boolean, True where a query may attend, got {mask.dtype}")


def check_last(x_query: Tensor, x_key: Tensor) -> None:
    """Raise a ValueError if there are more queries than keys, whose last positions they take."""
    n_query, n_key = x_query.shape[1], x_key.shape[1]
    if n_query > n_key:
        raise ValueError(
            f"number of queries must be at most the number of keys = {n_key}, got {n_query}: "
            "queries are at the last key positions"
        )
