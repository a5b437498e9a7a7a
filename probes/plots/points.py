"""Codes in the plane, coloured by a label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from probes.checking import checked
from probes.plots.axes import given_or_current, words
from probes.plots.style import COLOURS, MARKERS

_SIZE = 7.0  # area of a point, in points squared


@checked
def projection(
    result: xr.Dataset,
    ax: Axes | None = None,
    *,
    label: str | None = None,
    names: Sequence[Any] | None = None,
) -> Axes:
    """Draw codes as points in the plane, coloured by a label, without ticks.

    Each string or integer has a colour and a marker of its own, and an entry in the legend unless
    these are too many. Other numbers are shades, for a colour bar of `ax.collections[0]`.

    Args:
        result: `projection` [samples..., component] of `project`, whose first two components are
            drawn, and the label.
        ax: the axes to draw on; None: the current ones.
        label: name of the variable or coordinate [samples...]; None: all points are alike.
        names: names of the labels 0, 1, ..., which all get a colour and an entry in the legend.

    Returns:
        The axes.

    Raises:
        KeyError: the result lacks the projection or the label.
        ValueError: several methods are left (dim `kind`), or a label has no name.

    Example:
        >>> probes.plots.projection(project(data.set_coords("rule")["code"]), label="rule")
    """
    ax = given_or_current(ax)
    for name, made in (("projection", "made by project"), (label, "named by label")):
        if name is not None and name not in result:
            raise KeyError(f"result must hold {name!r}, {made}, got {sorted(map(str, result))}")
    points = result["projection"]
    if "kind" in points.dims and label is not None and "kind" not in result[label].dims:
        points = points.squeeze("kind") if points.sizes["kind"] == 1 else points
    if "kind" in points.dims:
        raise ValueError("projection must be of one method, select one: result.sel(kind='pca')")
    samples = [dim for dim in points.dims if dim != "component"]
    coordinates = points.transpose(*samples, "component").to_numpy()[..., :2].reshape(-1, 2)
    ax.set(xticks=[], yticks=[], xlabel="", ylabel="")
    if label is None:
        ax.scatter(*coordinates.T, s=_SIZE, linewidths=0)
        return ax
    labels = result[label].broadcast_like(points.isel(component=0)).transpose(*samples).to_numpy()
    labels = labels.ravel()
    kinds = np.unique(labels) if names is None else np.arange(len(names))
    if names is not None and labels.max() >= len(names):
        raise ValueError(f"names must have more than {int(labels.max())} entries, got {len(names)}")
    if names is None and labels.dtype.kind == "f":
        ax.scatter(*coordinates.T, c=labels, s=_SIZE, linewidths=0)
        return ax
    in_legend = names is not None or len(kinds) <= len(COLOURS)
    for number, kind in enumerate(kinds):
        style: Any = {"color": COLOURS[number % len(COLOURS)], "linewidths": 0}
        style["marker"] = MARKERS[number // len(COLOURS) % len(MARKERS)]
        ax.scatter(*coordinates[labels == kind].T, s=_SIZE, **style)
        if in_legend:  # with larger points
            name = words(kind if names is None else names[number])
            ax.scatter([], [], s=5 * _SIZE, **style, label=name)
    return ax
