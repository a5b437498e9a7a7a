"""Matrices as colours: attention, codes, gates, mean value scores, similarities."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

from probes.checking import checked
from probes.plots.axes import given_or_current, put_names, title_of, variable_of, words

FRAME = "#cc3311"
"""The colour of frames."""

_EMPTY = "#e4e4e4"  # cells without a value, which differ from those of 0

_LEAST, _LARGEST = 5.0, 8.0  # font sizes of numbers; below the least one they are left out


@checked
def matrix(
    values: xr.DataArray,
    ax: Axes | None = None,
    *,
    limits: tuple[float, float] | None = None,
    numbers: str | Callable[[float], str] | None = None,
    cmap: str | None = None,
) -> Axes:
    """Draw a matrix as colours, the first dim downwards.

    What is not negative goes from white to blue; signed values have white at 0, blue above and red
    below. The image, for a colour bar, is `ax.images[-1]`.

    Args:
        values: [y, x], any two dims; their coordinates label rows and columns, and may repeat. NaN
            for empty cells, which are grey.
        ax: the axes to draw on; None: the current ones.
        limits: values of the first and the last colour; None: from 0 to the largest value, or of
            signed values the largest absolute value on both sides.
        numbers: format of the numbers in the cells; a function that returns "" omits one; None: no
            numbers. They are left out where cells are too small for them.
        cmap: name of a matplotlib colour map, instead of those above.

    Returns:
        The axes.

    Raises:
        ValueError: the matrix does not have two dims, or has no number.

    Example:
        The matrix of Tay et al. 2019, figure 2:

        >>> probes.plots.matrix(pattern.isel(example=0, head=0), numbers="{:.2f}")
    """
    ax = given_or_current(ax)
    cells = values.to_numpy().astype(float)
    if cells.ndim != 2 or not np.isfinite(cells).any():
        raise ValueError(f"values must have two dims and a number, got {dict(values.sizes)}")
    top = float(np.nanmax(np.abs(cells)))
    low, high = limits or ((-top if np.nanmin(cells) < 0 else 0.0), top)
    cmap = cmap or ("RdBu" if low < 0 else "Blues")
    image = ax.imshow(cells, vmin=low, vmax=high, cmap=cmap, aspect="auto", interpolation="none")
    ax.set_facecolor(_EMPTY)
    for dim, side in zip(values.dims, ("y", "x"), strict=True):
        put_names(ax, side, [words(label) for label in values[dim].to_numpy()])
    ax.set(xlabel=title_of(values[values.dims[1]]), ylabel=title_of(values[values.dims[0]]))
    if numbers is not None:
        _write(ax, image, cells, numbers.format if isinstance(numbers, str) else numbers)
    return ax


@checked
def attention(
    pattern: xr.DataArray,
    ax: Axes | None = None,
    *,
    labels: Sequence[str] | None = None,
    framed: Sequence[int] = (),
) -> Axes:
    """Draw the attention of an example: a row for each query, a column for each key.

    Weights that are not negative have colours from 0 to 1, signed ones from red to blue. The image,
    for a colour bar, is `ax.images[-1]`.

    Args:
        pattern: [query_pos, key_pos], or with `head`: the maximum over heads.
        ax: the axes to draw on; None: the current ones.
        labels: labels of the first positions, such as their tokens; further ones (padding) are left
            out. None: the coordinates of the pattern.
        framed: rows with a frame, such as those of columns that update.

    Returns:
        The axes.

    Raises:
        ValueError: the pattern has other dims.

    Example:
        >>> probes.plots.attention(data["pattern"].isel(example=0, layer=1), labels=tokens)
    """
    ax = given_or_current(ax)
    dims = ("query_pos", "key_pos")
    weights = pattern.max("head") if "head" in pattern.dims else pattern
    weights = variable_of(weights.to_dataset(name="pattern"), "pattern", *dims, probe="capture")
    if labels is not None:
        weights = weights[: len(labels), : len(labels)]
        weights = weights.assign_coords({dim: list(labels) for dim in dims})
    is_signed = bool((weights < 0).any())
    matrix(weights, ax, limits=None if is_signed else (0.0, max(1.0, float(weights.max()))))
    for row in framed:
        frame = Rectangle((-0.5, row - 0.5), weights.sizes["key_pos"], 1, clip_on=False)
        frame.set(fill=False, edgecolor=FRAME, linewidth=1.0)
        ax.add_patch(frame)
    ax.set(xlabel="key", ylabel="query")
    return ax


@checked
def gates(
    values: xr.DataArray, ax: Axes | None = None, *, labels: Sequence[str] | None = None
) -> Axes:
    """Draw the gates of an example at a step: a row for each channel, a column for each position.

    Args:
        values: [pos, channel], in 0..1.
        ax: the axes to draw on; None: the current ones.
        labels: labels of the first positions; further ones (padding) are left out.

    Returns:
        The axes.

    Raises:
        ValueError: the values have other dims.

    Example:
        >>> ax = probes.plots.gates(columns["gates"].isel(example=0, step=3), labels=tokens)
        >>> ax.get_xlabel()
        'column'

    Source: Csordás et al. 2021, "The Neural Data Router", figure 4.
    """
    ax = given_or_current(ax)
    dims = ("channel", "pos")
    values = variable_of(values.to_dataset(name="gates"), "gates", *dims, probe="capture")
    if labels is not None:
        values = values[:, : len(labels)].assign_coords(pos=list(labels))
    matrix(values, ax, limits=(0.0, 1.0))
    ax.set(yticks=[], xlabel="column")
    return ax


@checked
def value_scores(result: xr.Dataset, ax: Axes | None = None, *, highest: float = 1.0) -> Axes:
    """Draw which search chooses which retrieval: mean value scores with their numbers.

    Args:
        result: `value_scores` [search, retrieval], in 0..1, of `measure_value_scores` or
            `summarise_value_scores`, for one group (and layer, and token).
        ax: the axes to draw on; None: the current ones.
        highest: value of the darkest colour.

    Returns:
        The axes.

    Raises:
        KeyError: the result is not that of one of these probes.
        ValueError: a further dim has several labels, such as `group` or `layer`.

    Example:
        >>> probes.plots.value_scores(result.sel(group="all", layer=0, token="all"))

    Source: Mittal et al. 2021, "Compositional Attention", figures 14 and 15.
    """
    probe = "measure_value_scores or summarise_value_scores"
    scores = variable_of(result, "value_scores", "search", "retrieval", probe=probe)
    return matrix(scores, ax, limits=(0.0, highest), numbers=_hundredths)


def _hundredths(share: float) -> str:
    return f"{share:.2f}".removeprefix("0")


def _write(ax: Axes, image: AxesImage, cells: np.ndarray, write: Callable[[float], str]) -> None:
    """Write the numbers of cells, as large as they fit, in black or white, whichever is clearer.

    It stays clearer when the limits of the colours change, as those that panels share do.
    """
    texts = {
        (row, column): write(float(cells[row, column]))
        for row, column in np.argwhere(np.isfinite(cells)).tolist()
    }
    longest = max(map(len, texts.values()), default=0)
    extent, (rows, columns) = ax.get_window_extent(), cells.shape
    width, height = 72 * extent.width / ax.figure.dpi, 72 * extent.height / ax.figure.dpi
    size = min(_LARGEST, width / columns / (0.6 * longest + 0.4), height / rows / 1.2)
    if size < _LEAST:
        return
    drawn = {
        (row, column): ax.text(column, row, text, fontsize=size, ha="center", va="center")
        for (row, column), text in texts.items()
        if text
    }

    def paint(image: AxesImage) -> None:
        dark = image.to_rgba(cells)[..., :3] @ (0.3, 0.6, 0.1) < 0.5
        for cell, text in drawn.items():
            text.set_color("white" if dark[cell] else "black")

    paint(image)
    image.callbacks.connect("changed", paint)
