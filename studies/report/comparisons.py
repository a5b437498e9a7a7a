"""Plots in which all conditions share a panel: lines along a dim, and intervals side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from studies.engine.readings import Reading
from studies.report.names import name_of
from studies.report.panels import (
    SMALL,
    data_of,
    draw_along,
    finished,
    grid,
    has_values,
    parts_of,
    shown_conditions,
)

MARKS = ((":", "#777777"), ("-.", "#777777"), ("--", "black"))
"""Lines and colours of known values, in turn."""


def lines(
    result: xr.DataTree,
    *,
    group: str,
    variable: str,
    along: str,
    ylabel: str,
    panels: str | None = None,
    select: Mapping[str, Any] | None = None,
    log_x: bool = False,
) -> Figure | None:
    """A variable along one of its dims: a line for each condition, a panel for each label of a dim.

    Args:
        result, group, variable, along, ylabel: as of `plots.profiles`.
        panels: a dim that has a panel for each label; None: there is one panel.
        select: labels of the other dims; a tuple of those of `panels` that are drawn.
        log_x: whether the x-axis is logarithmic, to base 2.
    """
    parts = parts_of(data_of(result, group, variable, select), panels)
    if not parts:
        return None
    figure, axes = grid(1, len(parts), height=3.2)
    for axis, (title, here) in zip(axes[0], parts.items(), strict=True):
        for one in shown_conditions(result):
            if has_values(here[variable], one):
                draw_along(axis, here, variable, along, one, label=one.label)
        axis.set_title(name_of(title or ""))
    return finished(figure, ylabel=ylabel, log_x=log_x)


def intervals(
    result: xr.DataTree,
    *,
    readings: Mapping[str, Reading],
    marks: Mapping[str, Mapping[str, Reading]] | None = None,
) -> Figure | None:
    """Readings with their intervals over examples: a row for each condition, a point for each cell.

    Args:
        result: what is drawn.
        readings: by the title of their panel.
        marks: known values of the conditions, such as chance, by title and label.
    """
    found = {title: reading.values(result) for title, reading in readings.items()}
    found = {title: values for title, values in found.items() if np.isfinite(values).any()}
    if not found:
        return None
    conditions = shown_conditions(result)
    figure, axes = grid(1, len(found), height=1 + 0.3 * len(conditions), share=False)
    for axis, (title, values) in zip(axes[0], found.items(), strict=True):
        bounds = readings[title].bounds
        low, high = bounds(result) if bounds is not None else (values, values)
        ends = np.maximum(np.nan_to_num(np.stack([values - low, high - values])), 0)
        for row, one in enumerate(conditions):
            shift = 0.15 * (np.arange(len(one.cells)) - (len(one.cells) - 1) / 2)
            look = {"color": one.colour, "fmt": "o", "ms": 3, "capsize": 2}
            axis.errorbar(values[one.cells], row + shift, xerr=ends[:, one.cells], **look)
        for (label, mark), (style, colour) in zip(
            (marks or {}).get(title, {}).items(), MARKS, strict=False
        ):
            at = mark.values(result)
            for row, one in enumerate(conditions):
                if np.isfinite(at[one.cells]).any():
                    place = [np.nanmean(at[one.cells])] * 2
                    axis.plot(place, [row - 0.4, row + 0.4], style, color=colour, label=label)
        axis.set_title(name_of(title))
        axis.grid(axis="x", lw=0.3)
        axis.set(yticks=[], ylim=(len(conditions) - 0.5, -0.5))
    labels = [one.label for one in conditions]
    axes[0, 0].set_yticks(range(len(labels)), labels, fontsize=SMALL)
    figure.set_figwidth(figure.get_figwidth() + 0.06 * max(map(len, labels)))
    return finished(figure)
