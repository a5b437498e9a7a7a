"""Every search's retrievals, scored and mixed by a softmax, without keeping them."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

# Numbers that are computed at once: on a CPU they should stay in its cache.
_AT_ONCE_ON_CPU = 2**18
_AT_ONCE = 2**26


def chosen_retrievals(
    pattern: Float[Tensor, "batch query_pos search key_pos"],
    v: Float[Tensor, "batch key_pos retrieval d_value"],
    direction: Float[Tensor, "batch query_pos search d_value"],
    offset: Float[Tensor, "batch query_pos search 1"],
) -> Float[Tensor, "batch query_pos search d_value"]:
    """sum_j c_j r_j: r_j = pattern · v_j, c = softmax over j of (r_j · direction + offset).

    The offset changes nothing, being the same for all j; it has a gradient, which is 0.

    The retrievals r are by far the largest tensor here. They are made some examples at a time,
    and once more for the gradient, so that they never fill the memory.
    """
    return _ChosenRetrievals.apply(pattern, v, direction, offset)  # pyright: ignore[reportReturnType]


class _ChosenRetrievals(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pattern: Tensor, v: Tensor, direction: Tensor, offset: Tensor) -> Tensor:
        pattern, v = pattern.contiguous(), v.contiguous()
        ctx.save_for_backward(pattern, v, direction, offset)
        z = torch.empty(*pattern.shape[:3], v.shape[-1], dtype=v.dtype, device=v.device)
        for part in _parts(pattern, v):
            retrieval = retrievals(pattern[part], v[part])
            scores = (retrieval * direction[part, :, :, None]).sum(-1).softmax(-1)
            torch.sum(retrieval.mul_(scores[..., None]), dim=-2, out=z[part])
        return z

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, ...]:
        (gradient,) = grad_outputs
        pattern, v, direction, offset = ctx.saved_tensors
        of_pattern, of_v = torch.empty_like(pattern), torch.empty_like(v)
        of_direction = torch.empty(gradient.shape, dtype=v.dtype, device=v.device)
        for part in _parts(pattern, v):
            retrieval = retrievals(pattern[part], v[part])
            along, wanted = direction[part, :, :, None], gradient[part, :, :, None]
            scores = (retrieval * along).sum(-1).softmax(-1)
            gain = (retrieval * wanted).sum(-1)
            of_logits = (scores * (gain - (scores * gain).sum(-1, keepdim=True)))[..., None]
            torch.sum(retrieval.mul_(of_logits), dim=-2, out=of_direction[part])
            of_retrieval = torch.mul(of_logits, along, out=retrieval)
            of_retrieval.addcmul_(scores[..., None], wanted)
            rows, weights, values = (
                of_retrieval.flatten(3).flatten(1, 2),
                pattern[part].flatten(1, 2),
                v[part].flatten(2),
            )
            torch.bmm(rows, values.transpose(1, 2), out=of_pattern[part].flatten(1, 2))
            torch.bmm(weights.transpose(1, 2), rows, out=of_v[part].flatten(2))
        return of_pattern, of_v, of_direction, torch.zeros_like(offset)


def retrievals(
    pattern: Float[Tensor, "batch query_pos search key_pos"],
    v: Float[Tensor, "batch key_pos retrieval d_value"],
) -> Float[Tensor, "batch query_pos search retrieval d_value"]:
    """One product for all searches and retrievals of an example: they share keys."""
    flat = pattern.flatten(1, 2) @ v.flatten(2)
    return flat.unflatten(1, pattern.shape[1:3]).unflatten(-1, v.shape[2:])


def _parts(pattern: Tensor, v: Tensor) -> list[slice]:
    """The examples that are computed together."""
    at_once = _AT_ONCE_ON_CPU if v.device.type == "cpu" else _AT_ONCE
    size = max(1, at_once // (pattern[0, :, :, 0].numel() * v[0, 0].numel()))
    return [slice(start, start + size) for start in range(0, len(v), size)]
