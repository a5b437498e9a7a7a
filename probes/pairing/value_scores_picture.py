"""Plots of value scores: which search chooses which retrieval."""

from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float

from probes.checking import checked

_MOST_NUMBERED = 6  # retrievals; beyond so many the numbers would touch one another


@checked
def draw_value_scores(
    axes: np.ndarray,
    value_scores: xr.DataArray,
    *,
    rows: str = "layer",
    columns: str = "group",
    highest: float | None = None,
) -> Any:
    """Draw value scores as matrices of searches and retrievals, with their numbers.

    Args:
        axes: matplotlib axes [row, column], as of `subplots(..., squeeze=False)`.
        value_scores: [rows, columns, search, retrieval], in any order, in 0..1, such as those of
            `summarise_value_scores`. NaN stays white.
        rows: dim of the rows of panels; numeric labels are written after its name.
        columns: dim of the columns of panels.
        highest: value of the brightest colour, above 0; None: the maximum.

    Returns:
        An image, for a colour bar of all panels.

    Raises:
        ValueError: dims or sizes do not match, or `highest` is not above 0.

    Example:
        >>> figure, axes = matplotlib.pyplot.subplots(2, 3, squeeze=False)
        >>> image = draw_value_scores(axes, result["value_scores"])
        >>> bar = figure.colorbar(image, ax=axes, label="mean value score")
    """
    dims = (rows, columns, "search", "retrieval")
    if set(value_scores.dims) != set(dims):
        raise ValueError(f"value_scores must have the dims {dims}, got {dict(value_scores.sizes)}")
    shares = value_scores.transpose(*dims).to_numpy()
    if axes.shape != shares.shape[:2]:
        raise ValueError(f"axes must have the shape {shares.shape[:2]}, got {axes.shape}")
    top = float(np.nanmax(shares)) if highest is None else highest
    if not top > 0:
        raise ValueError(f"highest must be above 0, got {top}")
    for index, axis in np.ndenumerate(axes):
        _draw_matrix(axis, shares[index], top)
    for axis, label in zip(axes[0], value_scores[columns].to_numpy(), strict=True):
        axis.set_title(label, fontsize=8)
    for axis, label in zip(axes[:, 0], value_scores[rows].to_numpy(), strict=True):
        row_label = label if isinstance(label, str) else f"{rows} {label}"
        axis.set_ylabel(f"{row_label}\nsearch", fontsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("retrieval", fontsize=8)
    return axes[0, 0].images[0]


def _draw_matrix(axis: Any, shares: Float[np.ndarray, "search retrieval"], top: float) -> None:
    axis.imshow(shares, vmin=0, vmax=top, cmap="viridis", aspect="auto")
    axis.set_xticks(range(shares.shape[1]))
    axis.set_yticks(range(shares.shape[0]))
    if shares.shape[1] > _MOST_NUMBERED:
        return
    for search, retrieval in np.argwhere(np.isfinite(shares)):
        share = shares[search, retrieval]
        axis.text(
            retrieval,
            search,
            f"{share:.2f}".removeprefix("0"),
            color="white" if share < 0.6 * top else "black",
            fontsize=6,
            ha="center",
            va="center",
        )
