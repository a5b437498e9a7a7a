"""Many perceptrons with one hidden layer on the same operands, without keeping that layer."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

# Hidden units that are computed at once: on a CPU they should stay in its cache.
_AT_ONCE_ON_CPU = 2**18
_AT_ONCE = 2**26


def perceptrons(
    x: Float[Tensor, "row operand"],
    W_in: Float[Tensor, "module operand mlp"],
    b_in: Float[Tensor, "module mlp"],
    W_out: Float[Tensor, "module mlp"],
) -> Float[Tensor, "row module"]:
    """relu(x W_in + b_in) · W_out for every module.

    The hidden units, rows x modules x mlp of them, are by far the largest tensor here. They are
    made some rows at a time, and once more for the gradient, so that they never fill the memory.
    """
    return _Perceptrons.apply(x, W_in, b_in, W_out)  # pyright: ignore[reportReturnType]


class _Perceptrons(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, W_in: Tensor, b_in: Tensor, W_out: Tensor) -> Tensor:
        rows, weights = _with_bias(x, W_in, b_in)
        ctx.save_for_backward(rows, weights, W_out)
        out = x.new_empty(len(x), len(W_out))
        for part in _parts(rows, W_out):
            hidden = (rows[part] @ weights).relu_().unflatten(1, W_out.shape)
            torch.sum(hidden.mul_(W_out), dim=-1, out=out[part])
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (gradient,) = grad_outputs
        rows, weights, W_out = ctx.saved_tensors
        # What is behind an active unit, sum over rows of x times the gradient of its module, gives
        # the gradients of all weights: of W_in after W_out, and of W_out after W_in.
        behind = torch.zeros_like(weights)
        through = weights * W_out.flatten()
        of_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        for part in _parts(rows, W_out):
            hidden = (rows[part] @ weights).unflatten(1, W_out.shape)
            active = torch.ops.aten.threshold_backward(gradient[part, :, None], hidden, 0)
            active = active.flatten(1)
            behind.addmm_(rows[part].T, active)
            if of_rows is not None:
                torch.mm(active, through.T, out=of_rows[part])
        of_W_out = (behind * weights).sum(0).view_as(W_out)
        behind = (behind * W_out.flatten()).unflatten(1, W_out.shape)
        of_x = None if of_rows is None else of_rows[:, :-1]
        return of_x, behind[:-1].transpose(0, 1), behind[-1], of_W_out


def _with_bias(
    x: Float[Tensor, "row operand"],
    W_in: Float[Tensor, "module operand mlp"],
    b_in: Float[Tensor, "module mlp"],
) -> tuple[Float[Tensor, "row operand_and_1"], Float[Tensor, "operand_and_1 module_mlp"]]:
    """All modules' weights beside one another, the biases as those of one more operand of 1."""
    weights = torch.cat([W_in.transpose(0, 1).flatten(1), b_in.flatten()[None]])
    return torch.cat([x, x.new_ones(len(x), 1)], dim=1), weights


def _parts(rows: Tensor, W_out: Tensor) -> list[slice]:
    """The rows that are computed together."""
    at_once = _AT_ONCE_ON_CPU if rows.device.type == "cpu" else _AT_ONCE
    size = max(1, at_once // W_out.numel())
    return [slice(start, start + size) for start in range(0, len(rows), size)]
