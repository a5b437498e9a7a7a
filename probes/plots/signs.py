"""Plots of signed attention: shares of added and subtracted tokens, distributions of weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from probes.checking import checked
from probes.plots.axes import given_or_current, variable_of
from probes.plots.rates import bars

_LEAST_SHARE = 1e-5


@checked
def signedness(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Draw the shares of tokens that are added, subtracted and deleted, with their intervals.

    Args:
        result: `share` [kind] with its bounds, of `score_signedness` or `measure_signedness`, for
            one cell.
        ax: the axes to draw on; None: the current ones.

    Returns:
        The axes.

    Raises:
        KeyError: the result is not that of one of these probes.
        ValueError: a further dim has several labels, such as `layer` or `head`.

    Example:
        >>> probes.plots.signedness(score_signedness(pattern).isel(layer=0, head=1))
    """
    variable_of(result, "share", "kind", probe="score_signedness or measure_signedness")
    ax = bars(result, "share", ax, along="kind")
    ax.set(xlabel="", ylim=(0, 1.02))
    return ax


@checked
def distribution(
    result: xr.Dataset, ax: Axes | None = None, *, xlabel: str = "attention weight"
) -> Axes:
    """Draw the share of pairs in each bin as filled steps, and controls as black lines.

    Args:
        result: `distribution` [bin], of `score_signedness`, `score_saturation` or the probes that
            measure these; or [model, bin] with any dim before `bin`: its first label is filled, in
            the next colour of the axes, the others are controls.
        ax: the axes to draw on, whose y-axis becomes logarithmic; None: the current ones.
        xlabel: label of the x-axis.

    Returns:
        The axes.

    Raises:
        KeyError: the result is not that of one of these probes.
        ValueError: dims do not match, or there are fewer than two bins.

    Example:
        >>> probes.plots.distribution(score_signedness(pattern).isel(layer=0, head=1))
    """
    if "distribution" not in result:
        variable_of(result, "distribution", "bin", probe="score_signedness or score_saturation")
    shares = result["distribution"]
    if shares.dims[-1:] != ("bin",) or shares.ndim > 2 or shares.sizes["bin"] < 2:
        raise ValueError(
            "distribution must have the dim bin, with at least two bins, and at most one dim "
            f"before it, got {dict(shares.sizes)}"
        )
    ax = given_or_current(ax)
    centres = shares["bin"].to_numpy()
    edges = np.append(centres, 2 * centres[-1] - centres[-2]) - (centres[1] - centres[0]) / 2
    (first,) = ax.plot([], [])
    filled: dict[str, Any] = {"fill": True, "color": first.get_color(), "alpha": 0.8}
    outlined: dict[str, Any] = {"color": "black"}
    labels = shares[shares.dims[0]].to_numpy().tolist() if shares.ndim == 2 else [None]
    values = np.atleast_2d(shares.to_numpy())
    for number, label in enumerate(labels):
        ax.stairs(values[number], edges, label=label, **(outlined if number else filled))
    ax.set(yscale="log", ylim=(_LEAST_SHARE, 1.5), xlabel=xlabel, ylabel="share of pairs")
    return ax
