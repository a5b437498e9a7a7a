"""Token sequences of different lengths: padding, and marks at the boundaries (BOS, EOS)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mechanisms.differentiation import is_in_transform


class Sequences(NamedTuple):
    """Token sequences of different lengths.

    Attributes:
        ids: [batch, pos], the sequences, then padding (id 0).
        mask: [batch, pos], False for padding.
        end: [batch], the position of the last id of each sequence.
    """

    ids: Int[Tensor, "batch pos"]
    mask: Bool[Tensor, "batch pos"]
    end: Int[Tensor, " batch"]


def check_shape(name: str, value: Tensor, *sizes: str | int) -> None:
    """Raise unless a tensor has these sizes; a name stands for any.

    Raises:
        ValueError: it has others.

    Example:
        >>> check_shape("inputs", torch.zeros(3, 10), "batch", "pos", 14)
        Traceback (most recent call last):
        ValueError: inputs must be [batch, pos, 14], got [3, 10]
    """
    fits = value.ndim == len(sizes) and all(
        isinstance(size, str) or size == actual
        for size, actual in zip(sizes, value.shape, strict=True)
    )
    if not fits:
        expected = ", ".join(map(str, sizes))
        raise ValueError(f"{name} must be [{expected}], got {list(value.shape)}")


def _check_dtype(name: str, ids: Tensor) -> None:
    # Others are no indices, or masks.
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be int64 or int32, got {ids.dtype}")


def mask_padding(tokens: Int[Tensor, "batch pos"], n_tokens: int) -> Sequences:
    """The sequences as they are, without marks.

    Args:
        tokens: ids in [0, n_tokens); negative ids are padding, which must be at the end.
        n_tokens: number of token ids.

    Raises:
        TypeError: ids are not int64 or int32.
        ValueError: tokens are not [batch, pos]; an id is n_tokens or greater, a token follows
            padding, or a sequence has no token. Ids are only checked on the CPU, since on other
            devices the check would force a synchronisation, and outside of `torch.compile` and the
            transforms of `torch.func`.
    """
    mask = _are_tokens(tokens, n_tokens)
    if _can_be_checked(tokens) and not mask.any(1).all():
        raise ValueError("sequences must have at least one token, got padding only")
    return Sequences(tokens.clamp(min=0), mask, mask.sum(1) - 1)


def enclose(tokens: Int[Tensor, "batch pos"], n_tokens: int) -> Sequences:
    """Insert BOS before the first and EOS directly after the last token of every sequence.

    The results have two positions more than `tokens`; `end` is the position of EOS.

    Args:
        tokens: ids in [0, n_tokens); negative ids are padding, which must be at the end.
        n_tokens: number of token ids; EOS gets the id n_tokens, BOS n_tokens + 1.

    Raises:
        TypeError: ids are not int64 or int32.
        ValueError: tokens are not [batch, pos]; an id is n_tokens or greater, or a token follows
            padding. Only checked as `mask_padding` says.

    Example:
        >>> ids, length, end = enclose(torch.tensor([[3, 1, -1]]), 10)
        >>> ids.tolist(), end.tolist()
        ([[11, 3, 1, 10, 0]], [3])
    """
    end = _are_tokens(tokens, n_tokens).sum(1) + 1
    batch, n_positions = tokens.shape
    ids = tokens.new_zeros(batch, n_positions + 2)
    ids[:, 1:-1] = tokens.clamp(min=0)
    ids[:, 0] = n_tokens + 1
    ids = ids.scatter(1, end[:, None], n_tokens)
    mask = torch.arange(n_positions + 2, device=tokens.device) <= end[:, None]
    return Sequences(ids, mask, end)


def rows_of_table(
    ids: Int[Tensor, "*dims"], n_rows: int, *, padding: int | None = None, name: str = "token ids"
) -> Int[Tensor, "*dims"]:
    """The rows of a table of embeddings that ids name; row 0 for padding, which need not be one.

    Args:
        ids: ids in [0, n_rows), or padding.
        n_rows: number of rows of the table.
        padding: the id of padding; None if there is none.
        name: what the ids are, for the error.

    Raises:
        TypeError: ids are not int64 or int32.
        ValueError: an id is neither. (A negative one would be counted from the end of the table.)
            Only checked as `mask_padding` says.

    Example:
        >>> rows_of_table(torch.tensor([[3, 1, -1]]), 10, padding=-1).tolist()
        [[3, 1, 0]]
    """
    _check_dtype(name, ids)
    rows = ids if padding is None else ids.masked_fill(ids == padding, 0)
    if _can_be_checked(rows) and rows.numel():
        for extreme in map(int, rows.aminmax()):
            if not 0 <= extreme < n_rows:
                or_padding = "" if padding is None else f", or {padding} for padding"
                raise ValueError(f"{name} must be in [0, {n_rows}){or_padding}, got {extreme}")
    return rows


def _are_tokens(tokens: Int[Tensor, "batch pos"], n_tokens: int) -> Bool[Tensor, "batch pos"]:
    """Where there are tokens, not padding; checked as `mask_padding` says."""
    check_shape("tokens", tokens, "batch", "pos")
    _check_dtype("tokens", tokens)
    is_token = tokens >= 0
    if _can_be_checked(tokens) and tokens.numel():
        if (largest := int(tokens.max())) >= n_tokens:
            raise ValueError(f"token ids must be less than {n_tokens}, got {largest}")
        if (is_token[:, 1:] & ~is_token[:, :-1]).any():
            raise ValueError(
                "padding (negative ids) must be at the end of a sequence, got a token after it"
            )
    return is_token


def _can_be_checked(tokens: Tensor) -> bool:
    is_traced = torch.compiler.is_compiling() or is_in_transform()
    return tokens.device.type == "cpu" and not is_traced
