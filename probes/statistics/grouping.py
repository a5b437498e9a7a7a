"""Means of a score by labels, such as the latents of a task."""

from collections.abc import Mapping

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor


def mean_by_labels(
    values: Float[Tensor, "..."],
    labels: Mapping[str, Int[Tensor, "..."]],
    sizes: Mapping[str, int] | int,
) -> xr.DataArray:
    """Average values over all that have the same combination of labels.

    Args:
        values: one for each example, or for each part of one: [example], [example, pos], ...
        labels: by the name of the dim that they become, numbers from 0 of the shape of `values`.
        sizes: how many labels there are, by the same names; or of each.

    Returns:
        [*labels]: the mean of each combination in double precision, NaN where there is none.

    Raises:
        TypeError: labels that are not whole numbers.
        ValueError: no labels, shapes or names that do not fit, labels out of range.

    Example:
        `mean_by_labels(errors, {"rule": batch.latents["rule"]}, 8)`
    """
    if isinstance(sizes, int):
        sizes = dict.fromkeys(labels, sizes)
    if not labels or labels.keys() != sizes.keys():
        raise ValueError(
            "labels must have at least one name, and sizes the same ones, got "
            f"{', '.join(labels) or 'none'} and {', '.join(sizes) or 'none'}"
        )
    number = torch.zeros(values.numel(), dtype=torch.long)
    for name, label in labels.items():
        if label.is_floating_point() or label.dtype == torch.bool:
            raise TypeError(f"labels[{name!r}] must hold whole numbers, got {label.dtype}")
        if label.shape != values.shape:
            raise ValueError(
                f"labels[{name!r}] must have the shape of values, {tuple(values.shape)}, got "
                f"{tuple(label.shape)}"
            )
        flat = label.detach().cpu().reshape(-1).long()
        if len(flat) and (flat.min() < 0 or flat.max() >= sizes[name]):
            raise ValueError(
                f"labels[{name!r}] must be in 0..{sizes[name] - 1}, got {int(flat.min())}.."
                f"{int(flat.max())}"
            )
        number = number * sizes[name] + flat
    shape = tuple(sizes[name] for name in labels)
    weights = values.detach().double().cpu().reshape(-1).numpy()
    number = number.numpy()
    least = int(np.prod(shape))
    totals = np.bincount(number, weights, minlength=least)
    counts = np.bincount(number, minlength=least)
    # 0 / 0 is NaN: nothing to average.
    with np.errstate(invalid="ignore"):
        mean = (totals / counts).reshape(shape)
    return xr.DataArray(mean, {name: np.arange(sizes[name]) for name in labels}, tuple(labels))
