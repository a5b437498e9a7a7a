"""Many perceptrons with one hidden layer on the same operands, without keeping hidden units."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from mechanisms.chunking import chunk_slices
from mechanisms.differentiation import with_own_gradient


def perceptrons(
    x: Float[Tensor, "row operand"],
    W_in: Float[Tensor, "module operand mlp"],
    b_in: Float[Tensor, "module mlp"],
    W_out: Float[Tensor, "module mlp"],
) -> Float[Tensor, "row module"]:
    """The output of every module: relu(x W_in + b_in) · W_out.

    The hidden units, rows x modules x mlp of them, are by far the largest tensor here. They are
    computed in chunks of rows, and again for the gradient, to limit memory.
    """
    return with_own_gradient(_definition, _forward, _gradient, x, W_in, b_in, W_out)


def _definition(x: Tensor, W_in: Tensor, b_in: Tensor, W_out: Tensor) -> Tensor:
    rows, weights = _with_bias(x, W_in, b_in)
    return ((rows @ weights).relu().unflatten(1, W_out.shape) * W_out).sum(-1)


def _forward(x: Tensor, W_in: Tensor, b_in: Tensor, W_out: Tensor) -> tuple[Tensor, ...]:
    rows, weights = _with_bias(x, W_in, b_in)
    out = x.new_empty(len(x), len(W_out))
    for chunk in _chunks(rows, W_out):
        hidden = (rows[chunk] @ weights).relu_().unflatten(1, W_out.shape)
        torch.sum(hidden.mul_(W_out), dim=-1, out=out[chunk])
    return out, rows, weights


def _gradient(
    needed: tuple[bool, ...],
    gradient: Tensor,
    _x: Tensor,
    _W_in: Tensor,
    _b_in: Tensor,
    W_out: Tensor,
    rows: Tensor,
    weights: Tensor,
) -> tuple[Tensor | None, ...]:
    # The sum over rows of x times the gradient of a unit's module, where the unit is active,
    # gives the gradients of all weights: times W_out that of W_in, times W_in that of W_out.
    row_sums = torch.zeros_like(weights)
    weights_to_output = weights * W_out.flatten()
    grad_rows = torch.empty_like(rows) if needed[0] else None
    for chunk in _chunks(rows, W_out):
        hidden = (rows[chunk] @ weights).unflatten(1, W_out.shape)
        active = torch.ops.aten.threshold_backward(gradient[chunk, :, None], hidden, 0)
        active = active.flatten(1)
        row_sums.addmm_(rows[chunk].T, active)
        if grad_rows is not None:
            torch.mm(active, weights_to_output.T, out=grad_rows[chunk])
    grad_W_out = (row_sums * weights).sum(0).view_as(W_out)
    grad_weights = (row_sums * W_out.flatten()).unflatten(1, W_out.shape)
    grad_x = None if grad_rows is None else grad_rows[:, :-1]
    return grad_x, grad_weights[:-1].transpose(0, 1), grad_weights[-1], grad_W_out


def _with_bias(
    x: Float[Tensor, "row operand"],
    W_in: Float[Tensor, "module operand mlp"],
    b_in: Float[Tensor, "module mlp"],
) -> tuple[Float[Tensor, "row operand_and_1"], Float[Tensor, "operand_and_1 module_mlp"]]:
    """Operands with an appended 1, and the concatenated weights of all modules with biases last."""
    weights = torch.cat([W_in.transpose(0, 1).flatten(1), b_in.flatten()[None]])
    return torch.cat([x, x.new_ones(len(x), 1)], dim=1), weights


def _chunks(rows: Tensor, W_out: Tensor) -> list[slice]:
    """Chunks of rows with a limited number of hidden units."""
    return chunk_slices(len(rows), W_out.numel(), rows.device)
