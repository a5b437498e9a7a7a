"""Pictures of value scores: which search chooses which retrieval."""

from typing import Any

import numpy as np
import xarray as xr

_MOST_NUMBERED = 6  # retrievals; beyond so many the numbers would touch one another


def draw_value_scores(axis: Any, value_scores: xr.DataArray, *, highest: float = 1.0) -> Any:
    """Draw value scores of one layer as a matrix of searches and retrievals, with its numbers.

    Args:
        axis: matplotlib's, on which is drawn.
        value_scores: [search, retrieval], in any order, 0..1: `summarise_value_scores` of one
            group, say. NaN stays white.
        highest: the value of the brightest colour, above 0: the same for panels side by side.

    Returns:
        The image, of which a colour bar can be made.

    Raises:
        ValueError: other dims, or `highest` is not above 0.

    Example:
        >>> figure, axis = matplotlib.pyplot.subplots()
        >>> image = draw_value_scores(axis, found["value_scores"].sel(group="unary", layer=0))
        >>> bar = figure.colorbar(image, label="mean value score")
    """
    if set(value_scores.dims) != {"search", "retrieval"}:
        raise ValueError(
            "value_scores must have the dims 'search' and 'retrieval', got "
            f"{dict(value_scores.sizes)}"
        )
    if not highest > 0:
        raise ValueError(f"highest must be above 0, got {highest}")
    shares = value_scores.transpose("search", "retrieval").to_numpy()
    image = axis.imshow(shares, vmin=0, vmax=highest, cmap="viridis", aspect="auto")
    axis.set_xticks(range(shares.shape[1]))
    axis.set_yticks(range(shares.shape[0]))
    if shares.shape[1] > _MOST_NUMBERED:
        return image
    for search, retrieval in np.argwhere(np.isfinite(shares)):
        share = shares[search, retrieval]
        axis.text(
            retrieval,
            search,
            f"{share:.2f}".removeprefix("0"),
            color="white" if share < 0.6 * highest else "black",
            fontsize=6,
            ha="center",
            va="center",
        )
    return image
