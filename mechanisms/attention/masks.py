"""Who may attend to whom: masks and positions that would be misread are refused."""

from __future__ import annotations

import torch
from torch import Tensor


def check_mask(mask: Tensor | None, x_query: Tensor, x_key: Tensor, *, n_heads: int) -> None:
    """Raise unless `mask` is [batch, head, query_pos, key_pos], each of these or 1, and boolean.

    Fewer dims would be read from the right: a mask of keys [batch, key_pos] as [query_pos, key_pos]
    wherever there are as many examples as positions.

    Args:
        mask: what an attention is given; None: all may attend to all.
        x_query: [batch, query_pos, d_model].
        x_key: [batch, key_pos, d_model].
        n_heads: heads, or searches.

    Raises:
        ValueError: another shape.
        TypeError: another dtype; 0 and 1 would be inverted bit by bit.
    """
    if mask is None:
        return
    wanted = (x_key.shape[0], n_heads, x_query.shape[1], x_key.shape[1])
    fits = mask.ndim == 4 and all(
        size in (1, most) for size, most in zip(mask.shape, wanted, strict=True)
    )
    if not fits:
        raise ValueError(
            f"mask must be [batch, head, query_pos, key_pos] = {list(wanted)}, with 1 for what is "
            "the same for all (of keys [batch, key_pos] it is mask[:, None, None], of pairs "
            f"[query_pos, key_pos] mask[None, None]), got {list(mask.shape)}"
        )
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be boolean, True where a query may attend, got {mask.dtype}")


def check_last(x_query: Tensor, x_key: Tensor) -> None:
    """Raise a ValueError unless queries can stand at the last of the keys' positions."""
    n_query, n_key = x_query.shape[1], x_key.shape[1]
    if n_query > n_key:
        raise ValueError(
            f"queries stand at the last of the keys' positions: there must be at most {n_key}, "
            f"got {n_query}"
        )
