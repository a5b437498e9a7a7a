"""Plots in which all conditions share a panel: lines along a dim, and intervals side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from studies.engine.readings import Reading
from studies.report.names import MARKERS, name_of
from studies.report.panels import (
    grid,
    has_values,
    legend_beside,
    mean_and_bars,
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
        result: what is drawn.
        group: of the result.
        variable: [cell, ..., along]; with its `_low` and `_high`, if there are any.
        along: the dim of the x-axis, a number.
        ylabel: what the variable is.
        panels: a dim that has a panel for each label; None: there is one panel.
        select: labels of the other dims; a tuple of those of `panels` that are drawn.
        log_x: whether the x-axis is logarithmic.
    """
    if group not in result.children or variable not in result[group].data_vars:
        return None
    data = result[group].to_dataset()
    for dim, labels in (select or {}).items():
        if isinstance(labels, tuple):
            data = data.isel({dim: data[dim].isin(labels).to_numpy().nonzero()[0]})
        else:
            data = data.sel({dim: labels})
    titles = [None] if panels is None else data[panels].to_numpy().tolist()
    figure, axes = grid(1, len(titles), height=3.2)
    for axis, title in zip(axes[0], titles, strict=True):
        here = data if title is None else data.sel({panels: title})
        for number, one in enumerate(shown_conditions(result)):
            if has_values(here[variable], one):
                mean, ends = mean_and_bars(here, variable, one)
                known = np.isfinite(mean)
                look = {"color": one.colour, "marker": MARKERS[number % len(MARKERS)], "ms": 3}
                places = here[along].to_numpy()[known]
                axis.errorbar(places, mean[known], yerr=ends[:, known], label=one.label, **look)
        axis.set(title=name_of(title or ""), xlabel=along.replace("_", " "))
        if log_x:
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:g}")
    axes[0, 0].set_ylabel(ylabel, fontsize=8)
    legend_beside(figure, axes)
    return figure


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
        for row, one in enumerate(conditions):
            shift = 0.15 * (np.arange(len(one.cells)) - (len(one.cells) - 1) / 2)
            ends = np.stack([values - low, high - values])[:, one.cells]
            ends = np.maximum(np.nan_to_num(ends), 0)
            look = {"color": one.colour, "fmt": "o", "ms": 3, "capsize": 2}
            axis.errorbar(values[one.cells], row + shift, xerr=ends, **look)
            for (label, mark), (style, colour) in zip(
                (marks or {}).get(title, {}).items(), MARKS, strict=False
            ):
                if np.isfinite(at := mark.values(result)[one.cells]).any():
                    place = [np.nanmean(at)] * 2
                    axis.plot(place, [row - 0.4, row + 0.4], style, color=colour, label=label)
        axis.set(title=name_of(title))
        axis.grid(axis="x", lw=0.3)
        axis.set(yticks=[], ylim=(len(conditions) - 0.5, -0.5))
    axes[0, 0].set_yticks(range(len(conditions)), [one.label for one in conditions], fontsize=8)
    legend_beside(figure, axes)
    return figure
