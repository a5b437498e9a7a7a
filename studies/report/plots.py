"""Plots of any study: bars, profiles along a dim, matrices, pictures, readings against a setting.

Each takes a result first, and gives a figure, or None where the result has nothing of it; a study
binds the rest with `functools.partial`. What several have in common:

- `readings`: by their labels.
- `group`, `variable`: of the result, with its `_low` and `_high`, if there are any.
- `select`: labels of dims; several in a list keep their dim.
- `rows`: a dim, or of `against` a setting, that has a row of panels for each label or value.
- `share`: whether panels share their axes.
- `log`, `log_x`, `log_y`: whether an axis is logarithmic; `log` is of the y-axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from studies.engine.readings import Reading
from studies.report.names import CONTROL, MARKERS, colour_of, name_of
from studies.report.panels import (
    Shown,
    condition_panels,
    data_of,
    draw_along,
    finished,
    grid,
    mean_and_bars,
    named_rows,
    parts_of,
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
        seeds = [some[one.cells] for one in conditions]
        colour = colour_of(label, number)
        axis.bar(places, _means(seeds), width * 0.9, label=name_of(label), color=colour)
        _dots(axis, places, seeds, color="black")
    labels = [one.label for one in conditions]
    axis.set_xticks(range(len(labels)), labels, rotation=30, ha="right", fontsize=8)
    return finished(figure, ylabel=ylabel, log_y=log)


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
    """A variable [cell, ..., along] along one of its dims: a column of panels for each condition.

    Args:
        result, group, variable, ylabel, select, rows, ylim, log_x, log_y: see above.
        along: the dim of the x-axis, by its labels.
        lines: a dim that has a line for each label; the first in the condition's colour, the
            others, controls, in grey.
        reference: a variable of the group, such as chance, or several: a horizontal line, or, if it
            has the dim `along`, one more line.
    """
    data = data_of(result, group, variable, select)
    figure, panels = condition_panels(result, named_rows(data, rows, ylabel), variable)
    if figure is None:
        return None
    references = (reference,) if isinstance(reference, str) else reference
    for axis, here, one in panels:
        curves = [(part, variable, label) for label, part in parts_of(here, lines).items()]
        curves += [(here, name, name) for name in references if along in here[name].dims]
        for number, (part, name, label) in enumerate(curves):
            look = {
                "color": one.colour if number == 0 else CONTROL,
                "ls": LINES[number % len(LINES)],
                "marker": MARKERS[number % len(MARKERS)],
                "label": None if label is None else name_of(label),
            }
            draw_along(axis, part, name, along, one, ms=4, capsize=2, **look)
        for number, name in enumerate(references):
            if along not in here[name].dims:
                level, line = here[name].isel(cell=one.cells).mean().item(), LINES[-1 - number]
                axis.axhline(level, color="black", lw=0.8, ls=line, label=name_of(name))
        axis.label_outer()
    return finished(figure, ylim=ylim, log_x=log_x, log_y=log_y)


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
    """A variable [cell, ..., y, x] over two of its dims, a panel for each condition: cells' mean.

    Args:
        result, group, variable, select, rows: see above.
        y, x: dims, by their labels.
        title: of the colour bar.
        shares: whether counts are drawn as shares of their row, summed over cells.
        limits: of the colours; None: least and greatest value, symmetric if there are both signs.
        colours: matplotlib's name of a colour map.
    """
    data = data_of(result, group, variable, select)
    parts = named_rows(data, rows, y.replace("_", " "))
    figure, panels = condition_panels(result, parts, variable, height=3.2, share=False)
    if data is None or figure is None:
        return None
    if limits is None:
        top = float(np.nanmax(np.abs(data[variable])))
        limits = (-top, top) if float(data[variable].min()) < 0 else (0.0, top)
    for axis, here, one in panels:
        cells = here[variable].isel(cell=one.cells)
        table = (cells.sum("cell") if shares else cells.mean("cell")).transpose(y, x).to_numpy()
        if shares:
            table = table / np.maximum(table.sum(1, keepdims=True), 1)
            _write_shares(axis, table)
        axis.imshow(table, vmin=limits[0], vmax=limits[1], cmap=colours, aspect="auto")
        _label_matrix(axis, cells, y, x)
    figure.colorbar(figure.axes[0].images[0], ax=figure.axes, shrink=0.7, label=title)
    return figure


def pictures(
    result: xr.DataTree,
    *,
    group: str,
    draw: Callable[[Axes, xr.Dataset], Any],
    rows: str | Mapping[str, Mapping[str, Any]],
    select: Mapping[str, Any] | None = None,
    mean: str | None = None,
    share: bool = True,
) -> Figure | None:
    """Pictures by a function that draws one, of `probes`, say: a column for each condition.

    Args:
        result, group, share: see above.
        draw: draws what was measured in one condition; the colour of the axes is the condition's.
        rows: a dim that has a row of panels for each label; or labels of dims by what their row is
            called, `{"solved": {"condition": "same_rule", "outcome": "base_rule"}}`.
        select: labels of further dims, in all rows.
        mean: a variable of which the mean over cells is drawn, with its interval `_low` to
            `_high`; without it, all variables of the first cell.
    """
    if group not in result.children:
        return None
    data = result[group].to_dataset().sel(select or {})
    if isinstance(rows, str):
        parts = named_rows(data, rows)
    else:
        parts = {label: data.sel(labels) for label, labels in rows.items()}
    figure, panels = condition_panels(result, parts, share=share)
    for axis, here, one in panels:
        axis.set_prop_cycle(color=[one.colour])
        draw(axis, here.isel(cell=one.cells[0]) if mean is None else _mean_of(here, mean, one))
    return finished(figure) if figure is not None else None


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

    None where the setting has one value.
    """
    conditions = [
        one
        for one in shown_conditions(result, but=(setting, rows or ""))
        if one.values.get(setting) is not None
    ]
    if len({one.values[setting] for one in conditions}) < 2:
        return None
    row_values = list(dict.fromkeys(one.values.get(rows or "") for one in conditions))
    figure, axes = grid(len(row_values), len(readings), height=3.2)
    panels = product(row_values, readings.items())
    for axis, (row, (label, reading)) in zip(axes.flat, panels, strict=True):
        values = reading.values(result)
        here = [one for one in conditions if one.values.get(rows or "") == row]
        for number, line in enumerate(dict.fromkeys(one.label for one in here)):
            some = sorted(
                (one for one in here if one.label == line), key=lambda one: one.values[setting]
            )
            places = [one.values[setting] for one in some]
            seeds = [values[one.cells] for one in some]
            colour = colour_of(some[0].values["model"], number)
            look = {"marker": MARKERS[number % len(MARKERS)], "ms": 4, "label": line}
            axis.plot(places, _means(seeds), color=colour, **look)
            _dots(axis, places, seeds, color=colour, alpha=0.5)
        title = "\n".join(name_of(name) for name in (row, label) if name is not None)
        axis.set(title=title, xlabel=setting.replace("_", " "))
    return finished(figure, ylabel=ylabel, log_x=log_x, log_y=log_y)


def scatter(
    result: xr.DataTree, *, x: Reading, y: Reading, xlabel: str, ylabel: str, log: bool = False
) -> Figure | None:
    """One reading against another, a point for each cell."""
    first, second = x.values(result), y.values(result)
    if not np.isfinite(first + second).any():
        return None
    figure, axes = grid(1, 1, width=4.4, height=3.6)
    for one in shown_conditions(result):
        if np.isfinite((first + second)[one.cells]).any():
            look = {"color": one.colour, "marker": one.marker, "label": one.label, "s": 24}
            axes[0, 0].scatter(first[one.cells], second[one.cells], **look)
    axes[0, 0].set_xlabel(xlabel)
    return finished(figure, ylabel=ylabel, log_y=log)


def _mean_of(data: xr.Dataset, name: str, one: Shown) -> xr.Dataset:
    """The mean of a variable over a condition's cells, with its interval."""
    mean, (below, above) = mean_and_bars(data, name, one)
    like = data[name].isel(cell=0, drop=True)
    ends = {name: mean, f"{name}_low": mean - below, f"{name}_high": mean + above}
    return xr.Dataset({end: like.copy(data=values) for end, values in ends.items()})


def _label_matrix(axis: Any, data: xr.DataArray, y: str, x: str) -> None:
    for dim, ticks in ((y, axis.set_yticks), (x, axis.set_xticks)):
        labels = data[dim].to_numpy() if dim in data.coords else np.arange(data.sizes[dim])
        if len(labels) > 30:
            ticks([])
            continue
        turned = 90 if dim == x and labels.dtype.kind not in "if" else 0
        ticks(range(len(labels)), [name_of(one) for one in labels], fontsize=7, rotation=turned)
    axis.set_xlabel(x.replace("_", " "), fontsize=8)


def _write_shares(axis: Any, table: np.ndarray) -> None:
    for i, j in np.argwhere(table >= 0.1):
        colour, text = "white" if table[i, j] > 0.6 else "black", f"{100 * table[i, j]:.0f}"
        axis.text(j, i, text, ha="center", va="center", fontsize=6, color=colour)


def _dots(axis: Any, places: Any, seeds: list[np.ndarray], **look: Any) -> None:
    """A dot for each seed."""
    x = np.repeat(places, [len(some) for some in seeds])
    axis.plot(x, np.concatenate(seeds), ".", ms=3, **look)


def _means(seeds: list[np.ndarray]) -> list[float]:
    """Over seeds that are known; NaN where none is."""
    return [float(np.nanmean(some)) if np.isfinite(some).any() else np.nan for some in seeds]
