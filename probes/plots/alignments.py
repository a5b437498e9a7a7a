"""Plots of alignments of a task's variables with sites of a model."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from probes.checking import checked
from probes.plots.axes import bar_lengths, given_or_current, put_names, title_of, variable_of, words
from probes.plots.style import COLOURS, MARKERS

_WIDTH = 0.7  # of all points of a site


@checked
def alignment(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Draw the accuracy of a learned subspace at each site, beside its controls.

    The learned subspace is filled; the controls are hollow.

    Args:
        result: `accuracy` [control, site] with its bounds, of `align`, for one split, variable,
            rank and kind of pairs.
        ax: the axes to draw on; None: the current ones.

    Returns:
        The axes.

    Raises:
        KeyError: the result is not that of `align`.
        ValueError: a further dim has several labels, such as `variable`.

    Example:
        >>> accuracy = found.sel(split="ood", variable="rule", rank=4, pairs="all")
        >>> ax = probes.plots.alignment(accuracy)
        >>> [label.get_text() for label in ax.get_xticklabels()]
        ['layer 1']
    """
    values, low, high = (
        variable_of(result, f"accuracy{end}", "control", "site", probe="align")
        for end in ("", "_low", "_high")
    )
    ax = given_or_current(ax)
    lengths = bar_lengths(values, low, high)
    controls = values["control"].to_numpy().tolist()
    offsets = _WIDTH * (np.arange(len(controls)) - (len(controls) - 1) / 2) / len(controls)
    for number, (name, offset) in enumerate(zip(controls, offsets, strict=True)):
        y = values[number].to_numpy()
        ax.errorbar(
            np.arange(len(y)) + offset,
            y,
            yerr=lengths[:, number],
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            mfc=None if number == 0 else "white",
            linestyle="",
            lw=1,
            ms=5,
            label=words(name),
        )
    put_names(ax, "x", [words(name) for name in values["site"].to_numpy()])
    ax.set(xlim=(-0.5, values.sizes["site"] - 0.5), ylim=(-0.02, 1.02))
    ax.set(xlabel=title_of(values["site"]), ylabel=title_of(values))
    return ax
