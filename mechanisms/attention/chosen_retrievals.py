"""A softmax mixture of the retrievals of every search, without keeping the retrievals."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from mechanisms.chunking import chunk_slices


def chosen_retrievals(
    pattern: Float[Tensor, "batch query_pos search key_pos"],
    v: Float[Tensor, "batch key_pos retrieval d_value"],
    direction: Float[Tensor, "batch query_pos search d_value"],
    offset: Float[Tensor, "batch query_pos search 1"],
) -> Float[Tensor, "batch query_pos search d_value"]:
    """Mix retrievals by a softmax of their scores: sum_j c_j r_j.

    r_j = pattern · v_j, c = softmax over j of (r_j · direction + offset). The offset is the same
    for all j and has no effect; its gradient is 0.

    The retrievals r are by far the largest tensor here. They are computed in chunks of examples,
    and again for the gradient, to limit memory.
    """
    return _ChosenRetrievals.apply(pattern, v, direction, offset)  # pyright: ignore[reportReturnType]


class _ChosenRetrievals(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pattern: Tensor, v: Tensor, direction: Tensor, offset: Tensor) -> Tensor:
        pattern, v = pattern.contiguous(), v.contiguous()
        ctx.save_for_backward(pattern, v, direction, offset)
        z = torch.empty(*pattern.shape[:3], v.shape[-1], dtype=v.dtype, device=v.device)
        for chunk in _chunks(pattern, v):
            retrieval = retrievals(pattern[chunk], v[chunk])
            scores = (retrieval * direction[chunk, :, :, None]).sum(-1).softmax(-1)
            torch.sum(retrieval.mul_(scores[..., None]), dim=-2, out=z[chunk])
        return z

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, ...]:
        (gradient,) = grad_outputs
        pattern, v, direction, offset = ctx.saved_tensors
        grad_pattern, grad_v = torch.empty_like(pattern), torch.empty_like(v)
        grad_direction = torch.empty(gradient.shape, dtype=v.dtype, device=v.device)
        for chunk in _chunks(pattern, v):
            retrieval = retrievals(pattern[chunk], v[chunk])
            chunk_direction = direction[chunk, :, :, None]
            chunk_gradient = gradient[chunk, :, :, None]
            scores = (retrieval * chunk_direction).sum(-1).softmax(-1)
            grad_scores = (retrieval * chunk_gradient).sum(-1)
            mean_grad = (scores * grad_scores).sum(-1, keepdim=True)
            grad_logits = (scores * (grad_scores - mean_grad))[..., None]
            torch.sum(retrieval.mul_(grad_logits), dim=-2, out=grad_direction[chunk])
            grad_retrieval = torch.mul(grad_logits, chunk_direction, out=retrieval)
            grad_retrieval.addcmul_(scores[..., None], chunk_gradient)
            rows, weights, values = (
                grad_retrieval.flatten(3).flatten(1, 2),
                pattern[chunk].flatten(1, 2),
                v[chunk].flatten(2),
            )
            torch.bmm(rows, values.transpose(1, 2), out=grad_pattern[chunk].flatten(1, 2))
            torch.bmm(weights.transpose(1, 2), rows, out=grad_v[chunk].flatten(2))
        return grad_pattern, grad_v, grad_direction, torch.zeros_like(offset)


def retrievals(
    pattern: Float[Tensor, "batch query_pos search key_pos"],
    v: Float[Tensor, "batch key_pos retrieval d_value"],
) -> Float[Tensor, "batch query_pos search retrieval d_value"]:
    """All retrievals pattern_i v_j, as one matrix product per example."""
    flat = pattern.flatten(1, 2) @ v.flatten(2)
    return flat.unflatten(1, pattern.shape[1:3]).unflatten(-1, v.shape[2:])


def _chunks(pattern: Tensor, v: Tensor) -> list[slice]:
    """Chunks of examples with a limited number of retrieval elements."""
    return chunk_slices(len(v), pattern[0, :, :, 0].numel() * v[0, 0].numel(), v.device)
