"""Token sequences of different lengths: padding, and the marks at both ends."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class Enclosed(NamedTuple):
    """Sequences with a mark at both ends.

    Attributes:
        ids: [batch, pos + 2], the first mark, the sequence, the last mark, padding (id 0).
        mask: [batch, pos + 2], True for the sequence and its marks.
        end: [batch], the position of the last mark.
    """

    ids: Int[Tensor, "batch pos_and_2"]
    mask: Bool[Tensor, "batch pos_and_2"]
    end: Int[Tensor, " batch"]


def enclose(tokens: Int[Tensor, "batch pos"], n_tokens: int) -> Enclosed:
    """Put a mark before the first and directly after the last token of every sequence.

    Args:
        tokens: ids in [0, n_tokens); what is negative is padding, all of it at the end.
        n_tokens: the id of the last mark (EOS); that of the first (BOS) is n_tokens + 1.

    Raises:
        ValueError: an id is n_tokens or greater, or padding is followed by a token; this is looked
            at on the CPU alone, as other devices would have to be waited for.
    """
    batch, n_positions = tokens.shape
    is_token = tokens >= 0
    if tokens.device.type == "cpu" and tokens.numel():
        if (greatest := int(tokens.max())) >= n_tokens:
            raise ValueError(f"token ids must be less than {n_tokens}, got {greatest}")
        if (is_token[:, 1:] & ~is_token[:, :-1]).any():
            raise ValueError(
                "padding (negative ids) must be at the end of a sequence, got a token after it"
            )
    end = is_token.sum(1) + 1
    ids = tokens.new_zeros(batch, n_positions + 2)
    ids[:, 1:-1] = tokens.clamp(min=0)
    ids[:, 0] = n_tokens + 1
    ids.scatter_(1, end[:, None], n_tokens)
    mask = torch.arange(n_positions + 2, device=tokens.device) <= end[:, None]
    return Enclosed(ids, mask, end)
