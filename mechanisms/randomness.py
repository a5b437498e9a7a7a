"""Random numbers of training that `torch.func.vmap` can draw for each of several models."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

_GENERATORS: ContextVar[list[torch.Generator] | None] = ContextVar("generators", default=None)


def draw(function: Callable[[torch.Generator | None], Tensor], like: Tensor) -> Tensor:
    """Random numbers from torch's global state; in `independent_draws`, from the model's generator.

    Args:
        function: draws the numbers, with the generator that it gets; None for the global state.
        like: any tensor that depends on the model's weights or inputs.

    Example:
        >>> x = torch.zeros(3)
        >>> noise = draw(lambda generator: torch.rand(x.shape, generator=generator), like=x)
    """
    return _Draw.apply(like, function) if draws_are_independent() else function(None)


def draws_are_independent() -> bool:
    """Whether `independent_draws` is active; never in a compiled function, which cannot do it."""
    # First, since a compiled function would be split where it looks a context variable up.
    return not torch.compiler.is_compiling() and _GENERATORS.get() is not None


def gumbel_softmax(
    scores: Float[Tensor, "*batch option"], *, temperature: float = 1.0, hard: bool = False
) -> Float[Tensor, "*batch option"]:
    """A soft sample of an option, or a hard one with the soft one's gradient (Jang et al. 2017).

    As torch's function of that name, whose random numbers `torch.func.vmap` cannot draw.

    Args:
        scores: logits, in a precision in which the sampled numbers are finite.
        temperature: the lower, the closer to one-hot.
        hard: whether the sample is one-hot.
    """

    def exponential(generator: torch.Generator | None) -> Tensor:
        empty = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
        return empty.exponential_(generator=generator)

    soft = ((scores - draw(exponential, scores).log()) / temperature).softmax(-1)
    if not hard:
        return soft
    chosen = torch.zeros_like(soft).scatter(-1, soft.argmax(-1, keepdim=True), 1.0)
    return chosen - soft.detach() + soft


@contextmanager
def independent_draws(seeds: Sequence[int], device: torch.device | str) -> Iterator[None]:
    """Give each model of a `torch.func.vmap` random numbers of its own.

    Inside of the context, what model i draws by `draw` is what it draws alone, on the same device,
    after `torch.manual_seed(seeds[i])`.

    Args:
        seeds: a seed for each model along the only vmapped dimension.
        device: the device of the models.

    Example:
        >>> with independent_draws([0, 1], "cpu"):
        ...     x = torch.vmap(lambda x: dropout(x, 0.5, True))(torch.ones(2, 8))
    """
    token = _GENERATORS.set([torch.Generator(device).manual_seed(seed) for seed in seeds])
    try:
        yield
    finally:
        _GENERATORS.reset(token)


class _Draw(torch.autograd.Function):
    """Draws for each model of a vmapped computation, which `like` belongs to."""

    @staticmethod
    def forward(like: Tensor, function: Callable[[torch.Generator | None], Tensor]) -> Tensor:
        raise RuntimeError(
            "random numbers of several models were asked for where all models are the same: "
            "`like` must depend on the vmapped weights or inputs"
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Tensor, int]:
        _, function = inputs
        return torch.stack([function(generator) for generator in _GENERATORS.get() or ()]), 0
