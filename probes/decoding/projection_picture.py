"""A picture of what `project` returns: points in the plane, coloured by a label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import xarray as xr

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_projection(
    axes: Axes, found: xr.Dataset, *, label: str, names: Sequence[str], size: float = 4.0
) -> None:
    """Draw points in the plane, a colour for each label, without ticks: distances have no unit.

    Args:
        axes: matplotlib's, onto which to draw.
        found: `projection` [samples..., component], of which the first two components are drawn,
            and `label` [samples...].
        label: name of a variable of whole numbers from 0.
        names: what each number is called in a legend.
        size: area of a point, in points squared; in a legend it is larger.

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
