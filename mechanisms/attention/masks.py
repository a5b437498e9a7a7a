"""Checks of what attention gets: tokens, masks, biases and query positions."""

from __future__ import annotations

import torch
from torch import Tensor


def check_tokens(x_query: Tensor, x_key: Tensor) -> None:
    """Raise a ValueError unless both are [batch, pos, d_model], with the same batch and width."""
    shapes = list(x_query.shape), list(x_key.shape)
    same = len(shapes[0]) == len(shapes[1]) == 3 and shapes[0][::2] == shapes[1][::2]
    if not same:
        raise ValueError(
            "x_query and x_key must be [batch, query_pos, d_model] and [batch, key_pos, d_model], "
            f"got {shapes[0]} and {shapes[1]}"
        )


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
    _check_pairs(mask, "mask", x_query, x_key, n_heads)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be boolean, True where a query may attend, got {mask.dtype}")


def check_token_mask(mask: Tensor | None, inputs: Tensor) -> None:
    """Raise unless a mask of the tokens of a model is boolean and [batch, pos], each of these or 1.

    Args:
        mask: True for tokens; None: all are.
        inputs: [batch, pos, ...].

    Raises:
        ValueError: the shape is wrong.
        TypeError: the dtype is not bool.
    """
    if mask is None:
        return
    sizes = inputs.shape[:2]
    if mask.ndim != 2 or any(n not in (1, size) for n, size in zip(mask.shape, sizes, strict=True)):
        raise ValueError(f"mask must be [batch, pos] = {list(sizes)}, got {list(mask.shape)}")
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be boolean, True for tokens, got {mask.dtype}")


def check_bias(bias: Tensor | None, x_query: Tensor, x_key: Tensor, *, n_heads: int) -> None:
    """Raise a ValueError unless `bias` is [batch, head, query_pos, key_pos], each of these or 1.

    Fewer dims are refused for the reason of `check_mask`: [batch, query_pos, key_pos] would be read
    as [head, query_pos, key_pos] if there are as many heads as examples.
    """
    if bias is not None:
        _check_pairs(bias, "bias", x_query, x_key, n_heads)


def _check_pairs(x: Tensor, name: str, x_query: Tensor, x_key: Tensor, n_heads: int) -> None:
    full = (x_key.shape[0], n_heads, x_query.shape[1], x_key.shape[1])
    fits = x.ndim == 4 and all(
        size in (1, full_size) for size, full_size in zip(x.shape, full, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name} must be [batch, head, query_pos, key_pos] = {list(full)}, where each size may "
            f"also be 1 (pass {name}[:, None, None] for keys [batch, key_pos], {name}[None, None] "
            f"for pairs [query_pos, key_pos]), got {list(x.shape)}"
        )


def check_last(x_query: Tensor, x_key: Tensor) -> None:
    """Raise a ValueError if there are more queries than keys, whose last positions they take."""
    n_query, n_key = x_query.shape[1], x_key.shape[1]
    if n_query > n_key:
        raise ValueError(
            f"number of queries must be at most the number of keys = {n_key}, got {n_query}: "
            "queries are at the last key positions"
        )
