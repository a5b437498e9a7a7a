"""Plots of any study: bars, profiles along a dim, matrices, readings against a setting.

Each takes a result first, and gives a figure, or None where the result has nothing of it; a study
binds the rest with `functools.partial`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from studies.engine.readings import Reading
from studies.report.names import CONTROL, MARKERS, colour_of, name_of
from studies.report.panels import (
    Shown,
    grid,
    has_values,
    legend_beside,
    mean_and_bars,
    shown_conditions,
)

LINES = ("-", "--", ":", "-.")
"""Lines of controls, in turn."""


def bars(
    result: xr.DataTree, *, readings: Mapping[str, Reading], ylabel: str, log: bool = False
) -> Figure | None:
    """Bars of several readings for each condition: means over seeds, with a dot for each seed."""
    conditions = shown_conditions(result)
    values = {label: reading.values(result) for label, reading in readings.items()}
    values = {label: some for label, some in values.items() if np.isfinite(some).any()}
    if not values:
        return None
    size = 1.5 + 0.25 * len(conditions) * (1 + len(values))
    figure, axes = grid(1, 1, width=min(14, size), height=3.6)
    axis, width = axes[0, 0], 0.8 / len(values)
    for number, (label, some) in enumerate(values.items()):
        places = np.arange(len(conditions)) + (number - (len(values) - 1) / 2) * width
        means = [_mean(some[one.cells]) for one in conditions]
        colour = colour_of(label, number)
        axis.bar(places, means, width * 0.9, label=name_of(label), color=colour)
        for place, one in zip(places, conditions, strict=True):
            axis.plot(np.full(len(one.cells), place), some[one.cells], "k.", ms=3)
    labels = [one.label for one in conditions]
    axis.set_xticks(range(len(labels)), labels, rotation=30, ha="right", fontsize=8)
    axis.set(ylabel=ylabel, yscale="log" if log else "linear")
    legend_beside(figure, axes)
    return figure


def profiles(
    result: xr.DataTree,
    *,
    group: str,
    variable: str,
    along: str,
    ylabel: str,
    select: Mapping[str, Any] | None = None,
    rows: str | None = None,
    lines: str | None = None,
    reference: str | tuple[str, ...] = (),
    ylim: tuple[float, float] | None = None,
    log_x: bool = False,
    log_y: bool = False,
) -> Figure | None:
    """A variable along one of its dims: a column of panels for each condition.

    Args:
        result: what is drawn.
        group: of the result.
        variable: [cell, ..., along]; with its `_low` and `_high`, if there are any.
        along: the dim of the x-axis, by its labels.
        ylabel: what the variable is.
        select: labels of the other dims.
        rows: a dim that has a row of panels for each label.
        lines: a dim that has a line for each label; the first in the condition's colour, the
            others, controls, in grey.
        reference: a variable of the group, such as chance, or several: a horizontal line, or, if it
            has the dim `along`, one more line.
        ylim: ends of the y-axis.
        log_x, log_y: whether an axis is logarithmic.
    """
    if group not in result.children or variable not in result[group].data_vars:
        return None
    data = result[group].to_dataset()
    chosen = {name: value for name, value in (select or {}).items() if name in data.dims}
    data = data.sel(chosen)
    conditions = [one for one in shown_conditions(result) if has_values(data[variable], one)]
    row_labels = data[rows].to_numpy().tolist() if rows else [None]
    line_labels = data[lines].to_numpy().tolist() if lines else [None]
    references = (reference,) if isinstance(reference, str) else reference
    figure, axes = grid(len(row_labels), max(1, len(conditions)))
    for row, row_label in zip(axes, row_labels, strict=True):
        for axis, one in zip(row, conditions, strict=False):
            here = data if rows is None else data.sel({rows: row_label})
            for number, label in enumerate(line_labels):
                part = here if lines is None else here.sel({lines: label})
                _profile(axis, part, variable, along, one, number, label)
            for number, name in enumerate(references):
                if along in here[name].dims:
                    _profile(axis, here, name, along, one, len(line_labels) + number, name)
                    continue
                level, ls = float(here[name].isel(cell=one.cells).mean()), LINES[-1 - number]
                axis.axhline(level, color="black", lw=0.8, ls=ls, label=name_of(name))
            if row_label == row_labels[0]:
                axis.set_title(one.label, fontsize=9)
            if row_label == row_labels[-1]:
                axis.set_xlabel(along.replace("_", " "))
        named = "" if row_label is None else f"\n{name_of(row_label)}"
        row[0].set_ylabel(f"{ylabel}{named}", fontsize=8)
    if ylim is not None:
        axes[0, 0].set_ylim(*ylim)
    axes[0, 0].set(**_log_scales(log_x, log_y))
    legend_beside(figure, axes)
    return figure


def matrices(
    result: xr.DataTree,
    *,
    group: str,
    variable: str,
    y: str,
    x: str,
    title: str,
    select: Mapping[str, Any] | None = None,
    rows: str | None = None,
    shares: bool = False,
    limits: tuple[float, float] | None = (0.0, 1.0),
    colours: str = "Blues",
) -> Figure | None:
    """A variable over two of its dims, a panel for each condition: the mean over its cells.

    Args:
        result: what is drawn.
        group: of the result.
        variable: [cell, ..., y, x].
        y, x: dims, by their labels.
        title: of the colour bar.
        select: labels of the other dims.
        rows: a dim that has a row of panels for each label.
        shares: whether counts are drawn as shares of their row, summed over cells.
        limits: of the colours; None: least and greatest value, symmetric if there are both signs.
        colours: matplotlib's name of a colour map.
    """
    if group not in result.children or variable not in result[group].data_vars:
        return None
    data = result[group].to_dataset()[variable]
    data = data.sel({k: v for k, v in (select or {}).items() if k in data.dims})
    conditions = [one for one in shown_conditions(result) if has_values(data, one)]
    row_labels = data[rows].to_numpy().tolist() if rows else [None]
    if limits is None:
        top = float(np.nanmax(np.abs(data)))
        limits = (-top, top) if float(data.min()) < 0 else (0.0, top)
    figure, axes = grid(len(row_labels), max(1, len(conditions)), height=3.2, share=False)
    image = None
    for row, row_label in zip(axes, row_labels, strict=True):
        for axis, one in zip(row, conditions, strict=False):
            here = data if rows is None else data.sel({rows: row_label})
            here = here.isel(cell=one.cells)
            table = (here.sum("cell") if shares else here.mean("cell")).transpose(y, x).to_numpy()
            if shares:
                table = table / np.maximum(table.sum(1, keepdims=True), 1)
            image = axis.imshow(table, vmin=limits[0], vmax=limits[1], cmap=colours, aspect="auto")
            _label_matrix(axis, here, y, x)
            if shares:
                _write_shares(axis, table)
            axis.set_title(one.label, fontsize=9)
        named = "" if row_label is None else f"{name_of(row_label)}\n"
        row[0].set_ylabel(f"{named}{y.replace('_', ' ')}", fontsize=8)
    if image is not None:
        figure.colorbar(image, ax=axes, shrink=0.7, label=title)
    return figure


def against(
    result: xr.DataTree,
    *,
    readings: Mapping[str, Reading],
    setting: str,
    ylabel: str,
    rows: str | None = None,
    log_x: bool = False,
    log_y: bool = False,
) -> Figure | None:
    """Readings against a setting that varies: a panel for each reading, a line for the rest.

    None where the setting has one value. `rows`: another setting that has a row of panels for each
    value.
    """
    conditions = shown_conditions(result, but=(setting, rows or ""))
    values = [one.values.get(setting) for one in conditions]
    if len({value for value in values if value is not None}) < 2:
        return None
    row_values = list(dict.fromkeys(one.values[rows] if rows else None for one in conditions))
    figure, axes = grid(len(row_values), len(readings), height=3.2)
    panels = [
        (value, label, reading) for value in row_values for label, reading in readings.items()
    ]
    for axis, (value, label, reading) in zip(axes.ravel(), panels, strict=True):
        numbers = reading.values(result)
        by_line: dict[str, list[Shown]] = {}
        for one in conditions:
            if rows is None or one.values[rows] == value:
                by_line.setdefault(one.label, []).append(one)
        for number, (line, some) in enumerate(by_line.items()):
            colour = colour_of(some[0].values["model"], number)
            points = [(one.values[setting], numbers[one.cells]) for one in some]
            points = sorted((v, found) for v, found in points if v is not None and len(found))
            axis.plot(
                [place for place, _ in points],
                [_mean(found) for _, found in points],
                color=colour,
                marker=MARKERS[number % len(MARKERS)],
                ms=4,
                label=line,
            )
            for place, found in points:
                axis.plot(np.full(len(found), place), found, ".", color=colour, ms=3, alpha=0.5)
        title = name_of(label) if value is None else f"{name_of(value)}\n{name_of(label)}"
        axis.set(title=title, xlabel=setting.replace("_", " "))
        axis.set(**_log_scales(log_x, log_y))
    axes[0, 0].set_ylabel(ylabel, fontsize=8)
    legend_beside(figure, axes)
    return figure


def scatter(
    result: xr.DataTree, *, x: Reading, y: Reading, xlabel: str, ylabel: str, log: bool = False
) -> Figure | None:
    """One reading against another, a point for each cell."""
    first, second = x.values(result), y.values(result)
    if not np.isfinite(first + second).any():
        return None
    figure, axes = grid(1, 1, width=4.4, height=3.6)
    for number, one in enumerate(shown_conditions(result)):
        marker = MARKERS[number % len(MARKERS)]
        points = {"color": one.colour, "marker": marker, "label": one.label, "s": 24}
        axes[0, 0].scatter(first[one.cells], second[one.cells], **points)
    axes[0, 0].set(xlabel=xlabel, ylabel=ylabel, yscale="log" if log else "linear")
    legend_beside(figure, axes)
    return figure


def _profile(
    axis: Any, part: xr.Dataset, variable: str, along: str, one: Shown, number: int, label: Any
) -> None:
    mean, ends = mean_and_bars(part, variable, one)
    labels = part[along].to_numpy() if along in part.coords else np.arange(len(mean))
    places = labels if labels.dtype.kind in "if" else np.arange(len(labels))
    axis.errorbar(
        places,
        mean,
        yerr=ends,
        color=one.colour if number == 0 else CONTROL,
        ls=LINES[number % len(LINES)],
        marker=MARKERS[number % len(MARKERS)],
        ms=4,
        capsize=2,
        label=None if label is None else name_of(label),
    )
    if labels.dtype.kind not in "if":
        names = [name_of(one) for one in labels]
        turned = {"rotation": 90} if max(map(len, names)) > 12 else {}
        axis.set_xticks(places, names, fontsize=7, **turned)


def _label_matrix(axis: Any, data: xr.DataArray, y: str, x: str) -> None:
    for dim, ticks in ((y, axis.set_yticks), (x, axis.set_xticks)):
        labels = data[dim].to_numpy() if dim in data.coords else np.arange(data.sizes[dim])
        if len(labels) > 30:
            ticks([])
            continue
        rotation = {"rotation": 90} if dim == x and labels.dtype.kind not in "if" else {}
        ticks(range(len(labels)), [name_of(one) for one in labels], fontsize=7, **rotation)
    axis.set_xlabel(x.replace("_", " "), fontsize=8)


def _write_shares(axis: Any, table: np.ndarray) -> None:
    for i, j in np.argwhere(table >= 0.1):
        colour, text = "white" if table[i, j] > 0.6 else "black", f"{100 * table[i, j]:.0f}"
        axis.text(j, i, text, ha="center", va="center", fontsize=6, color=colour)


def _log_scales(log_x: bool, log_y: bool) -> dict[str, Any]:
    """The logarithmic scales alone: setting a linear one takes names under the axis away."""
    return {name: "log" for name, log in (("xscale", log_x), ("yscale", log_y)) if log}


def _mean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else np.nan
