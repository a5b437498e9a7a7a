"""Dropout whose masks are drawn from few random bits, which on a CPU is faster than torch's."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

_LEVELS = 2**16

_GENERATORS: ContextVar[list[torch.Generator] | None] = ContextVar("generators", default=None)


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
    if x.device.type != "cpu" and _GENERATORS.get() is None:
        return functional.dropout(x, p)
    return x * dropout_mask(x.shape, p, x)


def dropout_mask(shape: tuple[int, ...], p: float, like: Tensor) -> Float[Tensor, "..."]:
    """A mask to multiply with: 0 with probability p, else 1 / (1 - p), see `dropout`."""
    n = torch.Size(shape).numel()
    n_dropped = min(max(1, round(p * _LEVELS)), _LEVELS - 1)
    if _GENERATORS.get() is None:
        words = _random_words(n // 4 + 1, like.device)
    else:
        words = _WordsOfModels.apply(like, n // 4 + 1)
    is_kept = words.view(torch.int16)[:n] >= n_dropped - _LEVELS // 2
    scale = torch.tensor(_LEVELS / (_LEVELS - n_dropped), dtype=like.dtype, device=like.device)
    return (is_kept * scale).view(shape)


@contextmanager
def independent_masks(seeds: Sequence[int], device: torch.device | str) -> Iterator[None]:
    """Give each model of a `torch.func.vmap` dropout masks of its own.

    Inside of the context the masks of model i are those that it draws alone, on the same device,
    after `torch.manual_seed(seeds[i])`; on CUDA this holds for `dropout_mask` only.

    Args:
        seeds: a seed for each model of the first and only vmapped dimension.
        device: the device of the models.

    Example:
        >>> with independent_masks([0, 1], "cpu"):
        ...     x = torch.vmap(lambda x: dropout(x, 0.5, True))(torch.ones(2, 8))
    """
    generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
    token = _GENERATORS.set(generators)
    try:
        yield
    finally:
        _GENERATORS.reset(token)


def _random_words(
    n: int, device: torch.device, generator: torch.Generator | None = None
) -> Int[Tensor, " n"]:
    return torch.randint(-(2**63), 2**63 - 1, (n,), device=device, generator=generator)


class _WordsOfModels(torch.autograd.Function):
    """Random words for each model of a vmapped computation; `like` only says that it is vmapped."""

    @staticmethod
    def forward(like: Tensor, n: int) -> Tensor:
        raise RuntimeError(
            "the tensor that dropout is applied to must be of the vmapped models, got one that is "
            "the same for all of them"
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Tensor, int]:
        like, n = inputs
        generators = _GENERATORS.get() or []
        words = [_random_words(n, like.device, generator) for generator in generators]
        return torch.stack(words), 0
