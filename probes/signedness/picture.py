"""Plots of signed attention: matrices with numbers, and distributions of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import StepPatch

from probes.checking import checked

_LEAST_SHARE = 1e-5
_MOST_KEYS_BESIDE = 9
_MOST_NAMED = 30  # rows or columns of a matrix
_LONGEST_LEVEL = 12  # letters of column labels that are not rotated


@checked
def draw_numbers(
    axis: Axes,
    matrix: xr.DataArray,
    *,
    limits: tuple[float, float] | None = None,
    style: str | Callable[[float], str] = "{:.2f}",
    colours: str | None = None,
) -> AxesImage:
    """Draw a matrix as colours, with its numbers.

    Args:
        axis: matplotlib axes to draw on.
        matrix: [y, x], any two dims, the first one downwards; their coordinates label rows and
            columns if there is room, and may repeat. NaN for empty cells.
        limits: values of the first and the last colour; None: red to blue, white at 0, up to the
            largest absolute value.
        style: format of the numbers; a function that returns "" omits a number.
        colours: name of a matplotlib colour map, used with limits; None: viridis.

    Returns:
        The image, for a colour bar.

    Raises:
        ValueError: the matrix does not have two dims, or has no number.

    Example:
        `draw_numbers(plt.figure().gca(), pattern.isel(example=0, head=0))`, the matrix of Tay et
        al. 2019, Figure 2
    """
    values = matrix.to_numpy()
    if values.ndim != 2 or not np.isfinite(values).any():
        raise ValueError(f"matrix must have two dims and a number, got {dict(matrix.sizes)}")
    write = style.format if isinstance(style, str) else style
    top = float(np.nanmax(np.abs(values)))
    low, high = limits or (-top, top)
    colours = colours or "viridis" if limits else "RdBu"
    image = axis.imshow(values, vmin=low, vmax=high, cmap=colours, aspect="auto")
    for dim, put_ticks in zip(matrix.dims, (axis.set_yticks, axis.set_xticks), strict=True):
        labels = [str(label) for label in matrix[dim].to_numpy()]
        rotation = 90 if dim == matrix.dims[1] and max(map(len, labels)) > _LONGEST_LEVEL else 0
        if len(labels) <= _MOST_NAMED:
            put_ticks(range(len(labels)), labels, fontsize=8, rotation=rotation)
    for row, column in np.argwhere(np.isfinite(values)):
        red, green, blue, _ = image.to_rgba(values[row, column])
        colour = "white" if 0.3 * red + 0.6 * green + 0.1 * blue < 0.5 else "black"
        if text := write(float(values[row, column])):
            text_style: Any = {"ha": "center", "va": "center", "fontsize": 7, "color": colour}
            axis.text(column, row, text, **text_style)
    return image


@checked
def draw_matrices(matrices: xr.Dataset, *, title: str = "") -> Figure:
    """Draw several matrices of one example with their numbers, side by side if they are small.

    Args:
        matrices: variables [query_pos, key_pos], such as `hook_affinity` (E), `hook_gate` and
            `hook_pattern` (M), titled by `long_name` or name. Their coordinates label queries and
            keys. Rows and columns that are NaN in all of them (padding) are left out.
        title: title of the figure.

    Returns:
        The figure, one panel per variable, in order.

    Raises:
        ValueError: dims do not match, or there is no variable or no number.

    Example:
        `draw_matrices(strongest_head(captured, captured["pattern"]))`, Figure 2 of Tay et al. 2019
    """
    for dim in ("query_pos", "key_pos"):
        if dim not in matrices.dims:
            raise ValueError(f"matrices must have the dim {dim}, got {dict(matrices.sizes)}")
        matrices = matrices.dropna(dim, how="all")
    n_queries, n_keys = matrices.sizes["query_pos"], matrices.sizes["key_pos"]
    n_columns = 1 if n_keys > _MOST_KEYS_BESIDE else 2
    n_rows = -(-len(matrices) // n_columns)
    size = n_columns * (1.2 + 0.45 * n_keys) + 1.8, n_rows * (1 + 0.3 * n_queries)
    figure = Figure(size, layout="constrained")
    for number, (name, matrix) in enumerate(matrices.items()):
        axis = figure.add_subplot(n_rows, n_columns, number + 1)
        draw_numbers(axis, matrix.transpose("query_pos", "key_pos"))
        axis.set_title(matrix.attrs.get("long_name", str(name)), fontsize=9)
    figure.suptitle(title, fontsize=9)
    return figure


@checked
def draw_distribution(
    axis: Axes, scores: xr.Dataset, *, xlabel: str = "attention weight"
) -> list[StepPatch]:
    """Draw the share of pairs in each bin as filled steps, and controls as black lines.

    Args:
        axis: matplotlib axes to draw on, in their next colour; shares are logarithmic.
        scores: result of `score_signedness` or `score_saturation`, with `distribution` [bin], or
            [model, bin] with any dim before `bin`: its first label is filled, the others are
            controls.
        xlabel: label of the x axis.

    Returns:
        The steps, one per label.

    Raises:
        ValueError: dims do not match, or there are fewer than two bins.

    Example:
        `draw_distribution(plt.figure().gca(), score_signedness(pattern))`
    """
    shares = scores["distribution"]
    if shares.dims[-1:] != ("bin",) or shares.ndim > 2 or shares.sizes["bin"] < 2:
        raise ValueError(
            "distribution must have the dim bin, with at least two bins, and at most one dim "
            f"before it, got {dict(shares.sizes)}"
        )
    centres = shares["bin"].to_numpy()
    edges = np.append(centres, 2 * centres[-1] - centres[-2]) - (centres[1] - centres[0]) / 2
    (first,) = axis.plot([], [])
    filled: dict[str, Any] = {"fill": True, "color": first.get_color(), "alpha": 0.8}
    outlined: dict[str, Any] = {"color": "black"}
    labels = shares[shares.dims[0]].to_numpy().tolist() if shares.ndim == 2 else [None]
    steps = [
        axis.stairs(values, edges, label=label, **(outlined if number else filled))
        for number, (values, label) in enumerate(
            zip(np.atleast_2d(shares.to_numpy()), labels, strict=True)
        )
    ]
    axis.set(yscale="log", ylim=(_LEAST_SHARE, 1.5), xlabel=xlabel)
    return steps
