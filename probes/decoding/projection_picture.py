"""Scatter plot of a projection, coloured by a label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xarray as xr
from matplotlib.axes import Axes

from probes.checking import checked


@checked
def draw_projection(
    axes: Axes, found: xr.Dataset, *, label: str, names: Sequence[Any], size: float = 4.0
) -> None:
    """Draw the points of a projection in one colour per label, without ticks.

    Args:
        axes: matplotlib axes to draw on.
        found: result of `project`: `projection` [samples..., component], whose first two
            components are drawn, and `label` [samples...].
        label: name of the variable of labels, integers from 0.
        names: legend entry of each label.
        size: area of a point, in points squared; larger in the legend.

    Raises:
        ValueError: a label has no name.

    Example:
        draw_projection(plt.gca(), project(code).reset_coords("rule"), label="rule", names=RULES)
    """
    labels = found[label]
    if int(labels.max()) >= len(names):
        raise ValueError(f"names must have more than {int(labels.max())} entries, got {len(names)}")
    points = found["projection"].transpose(*labels.dims, "component").to_numpy()
    for number, name in enumerate(names):
        x, y, *_ = points[labels.to_numpy() == number].T
        axes.scatter(x, y, s=size, color=f"C{number}", linewidths=0)
        axes.scatter([], [], s=9 * size, color=f"C{number}", linewidths=0, label=name)
    axes.set(xticks=[], yticks=[])
