"""Reductions of activations over positions: the mean, the last token, a span."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from probes.checking import checked

Where = str | Callable[[Any], Any]
"""The name of an input or a latent of a batch, or a function of the batch."""

Reduce = Callable[[Tensor, Any], Tensor]


@checked
def masked_mean(mask: Where = "attention_mask") -> Reduce:
    """Average an activation over the positions that are no padding.

    Args:
        mask: [example, pos], 1 or True at positions that count.

    Returns:
        A function for `Quantity.reduce`, from [example, pos, ...] and the batch to [example, ...];
        it raises a ValueError if an example has no such position or shapes do not fit.

    Example:
        >>> Quantity("encoder.layer.*.hook_out", ("example", "d_model"), masked_mean())
    """

    def reduce(activation: Float[Tensor, "example pos ..."], batch: Any) -> Tensor:
        return _mean(activation, _mask(batch, mask, activation))

    return reduce


@checked
def last_token(mask: Where = "attention_mask") -> Reduce:
    """Take an activation at the last position that is no padding, on either side.

    Args:
        mask: [example, pos], 1 or True at positions that count.

    Returns:
        A function for `Quantity.reduce`, as `masked_mean`.

    Example:
        >>> Quantity("h.*.hook_out", ("example", "d_model"), last_token())
    """

    def reduce(activation: Float[Tensor, "example pos ..."], batch: Any) -> Tensor:
        counted = _mask(batch, mask, activation)
        last = counted.shape[1] - 1 - counted.flip(1).int().argmax(1)
        return activation[torch.arange(len(activation), device=activation.device), last]

    return reduce


@checked
def span_mean(span: Where) -> Reduce:
    """Average an activation over a span of positions, such as a word of several tokens.

    Args:
        span: [example, 2], first position and the one after the last.

    Returns:
        A function for `Quantity.reduce`, as `masked_mean`.

    Example:
        >>> Quantity("encoder.layer.*.hook_out", ("example", "d_model"), span_mean("subject"))
    """

    def reduce(activation: Float[Tensor, "example pos ..."], batch: Any) -> Tensor:
        ends = torch.as_tensor(_read(batch, span), device=activation.device)
        if ends.shape != (len(activation), 2):
            raise ValueError(f"span must have shape {len(activation), 2}, got {tuple(ends.shape)}")
        if ends.min() < 0 or ends.max() > activation.shape[1]:
            raise ValueError(
                f"span must be in 0..{activation.shape[1]}, got {ends.min()}..{ends.max()}"
            )
        position = torch.arange(activation.shape[1], device=activation.device)
        inside = (position >= ends[:, :1]) & (position < ends[:, 1:])
        return _mean(activation, _checked_mask(inside, activation))

    return reduce


def _mean(activation: Tensor, mask: Bool[Tensor, "example pos"]) -> Tensor:
    counted = mask.reshape(*mask.shape, *[1] * (activation.ndim - 2))
    # Half precision cannot hold long sums.
    is_float = activation.is_floating_point()
    dtype = torch.promote_types(activation.dtype, torch.float32) if is_float else None
    # Padding may be NaN.
    mean = activation.where(counted, 0).sum(1, dtype=dtype) / counted.sum(1)
    return mean.to(activation.dtype) if is_float else mean


def _mask(batch: Any, mask: Where, activation: Tensor) -> Bool[Tensor, "example pos"]:
    return _checked_mask(torch.as_tensor(_read(batch, mask)).to(activation.device) > 0, activation)


def _checked_mask(mask: Tensor, activation: Tensor) -> Bool[Tensor, "example pos"]:
    if mask.shape != activation.shape[:2]:
        raise ValueError(
            f"mask must have the shape (example, pos) of the activation, "
            f"{tuple(activation.shape[:2])}, got {tuple(mask.shape)}"
        )
    if not mask.any(1).all():
        raise ValueError("mask must have a position that counts in each example, got none in some")
    return mask


def _read(batch: Any, where: Where) -> Any:
    if not isinstance(where, str):
        return where(batch)
    inputs = batch.inputs if isinstance(batch.inputs, Mapping) else {}
    for values in (inputs, batch.latents):
        if where in values:
            return values[where]
    names = [str(name) for name in (*inputs, *batch.latents)]
    raise KeyError(f"batches must have {where!r} among inputs or latents, got {names}")
