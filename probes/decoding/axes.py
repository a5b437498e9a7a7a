"""Codes in the principal axes of the samples that a decoder is fitted on.

A linear decoder with an L2 penalty gives the same predictions in any rotation of the features, and
its weights are combinations of the samples that it is fitted on. So no decoder needs more features
than samples, however wide the code is.
"""

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

# Variance of an axis, as a share of the largest, below which it is rounding.
_RESOLVED = 1e-12


def principal_axes(
    blocks: Iterable[Sequence[Float[Tensor, "sample feature"]]], n_features: int
) -> list[Float[Tensor, "sample axis"]]:
    """Standardise features on the first dataset, and rotate all datasets to its principal axes.

    Args:
        blocks: the features in parts, each for all datasets; one part is in memory at a time if
            there are at least as many features as samples.
        n_features: number of features of all parts together.

    Returns:
        The datasets, with uncorrelated features in the first, at most as many as it has samples.
    """
    scaled = (standardise(*block) for block in blocks)
    first = next(iter(scaled))
    n_samples = len(first[0])
    if n_features < n_samples:
        datasets = [torch.cat(parts, dim=1) for parts in zip(first, *scaled, strict=True)]
        _, axes = torch.linalg.eigh(datasets[0].T @ datasets[0])
        return [features @ axes for features in datasets]
    # All that is needed of the features is their products with those of the first dataset.
    products = [features @ first[0].T for features in first]
    for fit, *others in scaled:
        for total, features in zip(products, (fit, *others), strict=True):
            total.addmm_(features, fit.T)
    squares, axes = torch.linalg.eigh(products[0])
    kept = squares > _RESOLVED * squares[-1]
    return [total @ (axes[:, kept] / squares[kept].sqrt()) for total in products]


def standardise(
    fit: Float[Tensor, "sample feature"], *others: Float[Tensor, "other feature"]
) -> list[Tensor]:
    """Scale features to zero mean and unit variance in `fit`, and the others by the same map.

    Features that are constant in `fit` (up to rounding) become zero everywhere.
    """
    mean, deviation = fit.mean(dim=0), fit.std(dim=0, correction=0)
    constant = deviation <= 1e-9 * (fit.abs().amax(dim=0) + 1e-30)
    scale = torch.where(constant, 1.0, deviation)
    return [torch.where(constant, 0.0, (features - mean) / scale) for features in (fit, *others)]
