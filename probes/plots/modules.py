"""Plots of modular networks: specialization against collapse, and activation matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from probes.checking import checked
from probes.plots.axes import given_or_current, variable_of
from probes.plots.decoders import percent
from probes.plots.matrices import matrix
from probes.specialization.ordering import ordered_activation

_PROBE = "score_specialization or measure_specialization"
_LINE: dict[str, Any] = {"color": "black", "lw": 0.9, "ls": "--"}
_STAR: dict[str, Any] = {"color": "black", "marker": "*", "ms": 11, "mfc": "none", "ls": ""}


@checked
def specialization(
    result: xr.Dataset,
    ax: Axes | None = None,
    *,
    layer: str = "pooled",
    label: str | None = None,
    color: str | None = None,
    marker: str = "o",
) -> Axes:
    """Draw specialization against collapse: a point for each network, filled, and its control.

    Hollow points are the control "shuffled". No network is to the right of the dashed line: with M
    modules and |S| operations that occur, collapse is at most log |S| / log M + 1 - specialization
    (Ostapenko et al. 2022, see `score_specialization`). The star on the line is a module for each
    operation. Several kinds of networks are drawn by several calls.

    Args:
        result: `specialization` and `collapse` [control, layer], `seen` and `utilisation`, of
            `score_specialization` or `measure_specialization`, with further dims for several
            networks. Values that are not finite are not drawn.
        ax: the axes to draw on; None: the current ones.
        layer: the layer, by default all together.
        label: the entry of the legend.
        color: None: the next one of the axes.
        marker: as in matplotlib.

    Returns:
        The axes.

    Raises:
        KeyError: the result is not that of one of these probes, or lacks the layer.

    Example:
        >>> for name, scores in results.items():
        ...     probes.plots.specialization(scores, label=name)
    """
    for name in ("specialization", "collapse", "seen", "utilisation"):
        if name not in result:
            variable_of(result, name, probe=_PROBE)
    ax = given_or_current(ax)
    if "layer" in result.dims:
        result = result.sel(layer=layer)
    for bound in _attainable(result):
        x = np.array([min(1, bound + 1), 1, bound])
        # Networks with as many operations and modules share a line.
        if not any(np.array_equal(known.get_xdata(), x) for known in ax.lines):
            ax.plot(x, [0, bound, 1], **_LINE, label="attainable")
            ax.plot(bound, 1.0, **_STAR, label="a module for\neach operation")
    for control, filling in (("observed", None), ("shuffled", "none")):
        x, y = (
            result[name].sel(control=control).to_numpy().ravel()
            for name in ("collapse", "specialization")
        )
        if np.isfinite(x + y).any():
            style: dict[str, Any] = {"color": color, "marker": marker, "mfc": filling, "ls": ""}
            (points,) = ax.plot(x, y, **style, label=label if filling is None else None)
            color = to_hex(points.get_color())
    ax.set(xlim=(-0.03, 1.06), ylim=(-0.04, 1.06))
    ax.set(xlabel="collapse (1: none)", ylabel="specialization")
    return ax


@checked
def activation(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Draw the share of each operation that each module gets, modules in the order of operations.

    One module for each operation shows a diagonal. Shares of at least 10% are written.

    Args:
        result: `activation` [operation, module], `assignment` [operation] and `utilisation`
            [module], of `score_specialization` or `measure_specialization`, for one layer.
        ax: the axes to draw on; None: the current ones.

    Returns:
        The axes.

    Raises:
        KeyError: the result is not that of one of these probes.
        ValueError: a further dim has several labels, such as `layer`.

    Example:
        >>> probes.plots.activation(scores.sel(layer="pooled"))
    """
    variable_of(result, "activation", "operation", "module", probe=_PROBE)
    shares = ordered_activation(result).squeeze().to_dataset(name="activation")
    shares = variable_of(shares, "activation", "operation", "module", probe=_PROBE)
    ax = matrix(shares, ax, limits=(0.0, 1.0), numbers=percent)
    ax.set(xlabel="module, in the order of operations", ylabel="operation")
    return ax


def _attainable(scores: xr.Dataset) -> list[float]:
    """Compute the collapse of one module for each operation: log |S| / log M, at most 1."""
    operations, modules = xr.broadcast(
        (scores["seen"] > 0).sum("operation"), scores["utilisation"].notnull().sum("module")
    )
    pairs = zip(operations.to_numpy().ravel(), modules.to_numpy().ravel(), strict=True)
    return sorted({min(1.0, float(np.log(n) / np.log(m))) for n, m in pairs if n and m > 1})
