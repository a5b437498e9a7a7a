"""Means of a score by labels, such as the latents of a task."""

from collections.abc import Mapping

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from probes.checking import checked


@checked
def mean_by_labels(
    values: Float[Tensor, "..."],
    labels: Mapping[str, Int[Tensor, "..."]],
    sizes: Mapping[str, int] | int,
) -> xr.DataArray:
    """Average values over each combination of labels.

    Args:
        values: scores of any shape, such as [example] or [example, pos].
        labels: integers from 0, of the shape of `values`, by the name of the resulting dim.
        sizes: number of labels by the same names; or one number for all.

    Returns:
        [*labels]: the mean of each combination in double precision, NaN where none occurs.

    Raises:
        TypeError: labels are not integers.
        ValueError: there are no labels, shapes or names do not match, or a label is out of range.

    Example:
        >>> mean_by_labels(errors, {"rule": batch.latents["rule"]}, 8)
    """
    if isinstance(sizes, int):
        sizes = dict.fromkeys(labels, sizes)
    if not labels or labels.keys() != sizes.keys():
        raise ValueError(
            "labels must have at least one name, and sizes the same names, got "
            f"{', '.join(labels) or 'none'} and {', '.join(sizes) or 'none'}"
        )
    combination = torch.zeros(values.numel(), dtype=torch.long)
    for name, label in labels.items():
        if label.is_floating_point() or label.dtype == torch.bool:
            raise TypeError(f"labels[{name!r}] must hold integers, got {label.dtype}")
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
        combination = combination * sizes[name] + flat
    shape = tuple(sizes[name] for name in labels)
    flat_values = values.detach().double().cpu().reshape(-1).numpy()
    combination = combination.numpy()
    n_combinations = int(np.prod(shape))
    sums = np.bincount(combination, flat_values, minlength=n_combinations)
    counts = np.bincount(combination, minlength=n_combinations)
    # 0 / 0 is NaN for combinations that do not occur.
    with np.errstate(invalid="ignore"):
        mean = (sums / counts).reshape(shape)
    return xr.DataArray(mean, {name: np.arange(sizes[name]) for name in labels}, tuple(labels))
