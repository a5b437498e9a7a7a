"""Pictures of signed attention: a matrix with its numbers, and how weights are distributed."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.image import AxesImage
from matplotlib.patches import StepPatch


def draw_numbers(
    axis: Axes,
    matrix: xr.DataArray,
    *,
    limits: tuple[float, float] | None = None,
    style: str = "{:.2f}",
) -> AxesImage:
    """Draw a matrix as colours, with the number in every cell that has one.

    Args:
        axis: that is drawn into.
        matrix: [y, x], of any dims, the first one downward; their coordinates name the rows and
            columns, and may repeat. NaN where a cell stays empty.
        limits: the values of the first and the last colour; None: colours from red to blue, white
            at 0, up to the largest size.
        style: how numbers are written.

    Returns:
        The colours, for a colour bar.

    Raises:
        ValueError: not two dims, or no number at all.

    Example:
        `draw_numbers(plt.figure().gca(), pattern.isel(example=0, head=0))`, the matrix of Tay et
        al. 2019, Figure 2
    """
    values = matrix.to_numpy()
    if values.ndim != 2 or not np.isfinite(values).any():
        raise ValueError(f"matrix must have two dims and a number, got {dict(matrix.sizes)}")
    top = float(np.nanmax(np.abs(values)))
    low, high = limits or (-top, top)
    colours = "viridis" if limits else "RdBu"
    image = axis.imshow(values, vmin=low, vmax=high, cmap=colours, aspect="auto")
    for dim, put_ticks in zip(matrix.dims, (axis.set_yticks, axis.set_xticks), strict=True):
        put_ticks(range(matrix.sizes[dim]), matrix[dim].to_numpy(), fontsize=8)
    for row, column in np.argwhere(np.isfinite(values)):
        red, green, blue, _ = image.to_rgba(values[row, column])
        colour = "white" if 0.3 * red + 0.6 * green + 0.1 * blue < 0.5 else "black"
        text = style.format(values[row, column])
        axis.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)
    return image


def draw_distribution(axis: Axes, distribution: xr.DataArray, **look: Any) -> StepPatch:
    """Draw the share of pairs in each bin as steps.

    Args:
        axis: that is drawn into.
        distribution: [bin], with the middles of the bins, all of one width: of `score_signedness`
            or `score_saturation`.
        look: as `matplotlib.axes.Axes.stairs` takes it: `label`, `color`, `fill`, ...

    Returns:
        The steps.

    Raises:
        ValueError: other dims, or fewer than two bins.

    Example:
        `draw_distribution(plt.figure().gca(), score_signedness(pattern)["distribution"][0])`
    """
    if distribution.dims != ("bin",) or distribution.size < 2:
        raise ValueError(
            f"distribution must have the dim bin, at least two of them, got {distribution.sizes}"
        )
    middles = distribution["bin"].to_numpy()
    edges = np.append(middles, 2 * middles[-1] - middles[-2]) - (middles[1] - middles[0]) / 2
    return axis.stairs(distribution.to_numpy(), edges, **look)
