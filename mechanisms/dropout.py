"""Dropout whose masks are drawn from few random bits, which on a CPU is faster than torch's."""

from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from mechanisms.randomness import draw, draws_are_independent

_LEVELS = 2**16


def dropout(x: Float[Tensor, "..."], p: float, training: bool) -> Float[Tensor, "..."]:
    """Set entries to zero with probability p, and scale the others up (Srivastava et al. 2014).

    On a CPU torch draws a number of 53 bits for each entry. Here 16 bits decide, of which one
    random integer has four: p is rounded to a multiple of 2^-16, at least 2^-16 and less than 1.
    The others are divided by 1 - p, as rounded, so that means are kept exactly.

    Args:
        x: any shape.
        p: in [0, 1).
        training: if False, nothing is dropped.
    """
    if not training or not p:
        return x
    if _draws_as_torch(x):
        return functional.dropout(x, p)
    return x * dropout_mask(x.shape, p, x)


def dropout_mask(shape: tuple[int, ...], p: float, like: Tensor) -> Float[Tensor, "..."]:
    """A mask to multiply with: 0 with probability p, else 1 / (1 - p), see `dropout`."""
    if _draws_as_torch(like):
        return functional.dropout(torch.ones(shape, dtype=like.dtype, device=like.device), p)
    n = torch.Size(shape).numel()
    n_dropped = min(max(1, round(p * _LEVELS)), _LEVELS - 1)
    is_kept = draw(partial(_kept, n, n_dropped, like.device), like)
    scale = torch.tensor(_LEVELS / (_LEVELS - n_dropped), dtype=like.dtype, device=like.device)
    return (is_kept * scale).view(shape)


def _draws_as_torch(x: Tensor) -> bool:
    """Whether torch's own dropout is used, which is fast on other devices than a CPU."""
    return x.device.type != "cpu" and not draws_are_independent()


def _kept(
    n: int, n_dropped: int, device: torch.device, generator: torch.Generator | None
) -> Bool[Tensor, " n"]:
    low, high, size = -(2**63), 2**63 - 1, (n // 4 + 1,)
    if generator is None:  # which torch.compile does not take as an argument
        words = torch.randint(low, high, size, device=device)
    else:
        words = torch.randint(low, high, size, device=device, generator=generator)
    return words.view(torch.int16)[:n] >= n_dropped - _LEVELS // 2
