"""Operations with a gradient of their own, for every way in which torch differentiates.

And what operations need to know to do without half precision, or inside transforms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

HALF_PRECISIONS = (torch.float16, torch.bfloat16)


def with_own_gradient(
    definition: Callable[..., Tensor],
    forward: Callable[..., tuple[Tensor, ...]],
    gradient: Callable[..., tuple[Tensor | None, ...]],
    *tensors: Tensor | None,
) -> Tensor:
    """`definition(*tensors)`, where possible computed by `forward` and `gradient`.

    These take less memory or time than the definition, but give first derivatives in reverse mode
    alone. Second derivatives, the transforms of `torch.func`, forward-mode differentiation and
    `torch.compile` use the definition.

    Half precision has too few digits for sums over many chunks or products of many factors: all is
    computed in float32. The result is float32 under autocast, as that of a softmax, else it has the
    precision of the first tensor.

    Args:
        definition: computes the result from `tensors` by differentiable operations.
        forward: computes from `tensors` the result, and what else its gradient needs.
        gradient: computes the gradient of each of `tensors` from a tuple that says which of them
            are needed (the others are ignored), the gradient of the result, `tensors`, and what
            `forward` kept.
        tensors: on one device. Those that are None stay None.
    """
    first = next(tensor for tensor in tensors if tensor is not None)
    device = first.device.type
    is_autocast = torch.is_autocast_enabled(device)
    wide = [None if tensor is None else widened(tensor) for tensor in tensors]
    with torch.autocast(device, enabled=False):
        if torch.compiler.is_compiling() or _is_transformed(wide):
            result = definition(*wide)
        else:
            result = _OwnGradient.apply(definition, forward, gradient, *wide)
    return result if is_autocast else result.to(first.dtype)  # pyright: ignore[reportOptionalMemberAccess, reportReturnType]


def widened(tensor: Tensor) -> Tensor:
    """The tensor, in float32 if it has half precision."""
    return tensor.float() if tensor.dtype in HALF_PRECISIONS else tensor


def is_in_transform() -> bool:
    """Whether a transform of `torch.func` is under way: `vmap` does not let us look at values."""
    # torch has no public name for this.
    return torch._C._are_functorch_transforms_active()


def _is_transformed(tensors: list[Tensor | None]) -> bool:
    """Whether a transform of `torch.func` or forward-mode differentiation is under way."""
    return is_in_transform() or any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
    )


class _OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        definition: Callable[..., Tensor],
        forward: Callable[..., tuple[Tensor, ...]],
        gradient: Callable[..., tuple[Tensor | None, ...]],
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.definition, ctx.gradient = definition, gradient
        result, *kept = forward(*tensors)
        ctx.save_for_backward(*tensors, *kept)
        return result

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad_output,) = grad_outputs
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[3:]
        with torch.autocast(grad_output.device.type, enabled=False):
            # Gradients are enabled here for a second derivative. Many gradients are computed at
            # once by a transform, or by a `vmap` of torch.autograd's own.
            if torch.is_grad_enabled() or is_in_transform() or is_legacy_batchedtensor(grad_output):
                tensors = saved[: len(needed)]
                gradients = _gradient_of(ctx.definition, tensors, needed, grad_output)
            else:
                gradients = ctx.gradient(needed, grad_output, *saved)
        return None, None, None, *gradients


def _gradient_of(
    definition: Callable[..., Tensor],
    tensors: tuple[Tensor | None, ...],
    needed: tuple[bool, ...],
    grad_output: Tensor,
) -> tuple[Tensor | None, ...]:
    """The gradient of each of the needed `tensors` by torch, differentiable again."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases, since one of the tensors may have been computed from another.
        aliases = [None if tensor is None else tensor.view_as(tensor) for tensor in tensors]
        result = definition(*aliases)
    sources = [
        alias
        for alias, is_needed in zip(aliases, needed, strict=True)
        if alias is not None and is_needed
    ]
    gradients = iter(
        torch.autograd.grad(
            result, sources, grad_output, create_graph=create_graph, allow_unused=True
        )
    )
    return tuple(next(gradients) if is_needed else None for is_needed in needed)
