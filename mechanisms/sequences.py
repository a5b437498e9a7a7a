"""Token sequences of different lengths: padding, and boundary tokens (BOS, EOS)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class Enclosed(NamedTuple):
    """Token sequences between BOS and EOS.

    Attributes:
        ids: [batch, pos + 2], BOS, the sequence, EOS, padding (id 0).
        mask: [batch, pos + 2], False for padding.
        end: [batch], the position of EOS.
    """

    ids: Int[Tensor, "batch pos_and_2"]
    mask: Bool[Tensor, "batch pos_and_2"]
    end: Int[Tensor, " batch"]


def enclose(tokens: Int[Tensor, "batch pos"], n_tokens: int) -> Enclosed:
    """Insert BOS before the first and EOS directly after the last token of every sequence.

    Args:
        tokens: ids in [0, n_tokens); negative ids are padding, which must be at the end.
        n_tokens: number of token ids; EOS gets the id n_tokens, BOS n_tokens + 1.

    Raises:
        ValueError: an id is n_tokens or greater, or a token follows padding. Only checked on the
            CPU, since on other devices the check would force a synchronisation.
    """
    batch, n_positions = tokens.shape
    is_token = tokens >= 0
    if tokens.device.type == "cpu" and tokens.numel():
        if (largest := int(tokens.max())) >= n_tokens:
            raise ValueError(f"token ids must be less than {n_tokens}, got {largest}")
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
