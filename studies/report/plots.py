"""Plots of any study: lines, bars, intervals, matrices, pictures, readings against a setting.

Each takes a result first, and gives a figure, or None where the result has nothing of it; a study
binds the rest with `functools.partial`. What several have in common:

- `data`: what is drawn, `values("scores", "accuracy", group="all")`, say: see `panels.Data`.
- `readings`: by their labels.
- `rows`, `columns`, `lines`: a dim, or `CONDITIONS`: see `panels.By`.
- `known`: known values, such as chance, by their labels: data with dims of what is drawn.
- `log`: the axes that are logarithmic: `x`, `y` or `xy`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, Literal

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import probes
from studies.engine.readings import Reading, conditions_of
from studies.report.names import CONTROL, MARKERS, colours_of, name_of
from studies.report.panels import (
    CONDITIONS,
    SMALL,
    By,
    Data,
    facets,
    finished,
    grid,
    has_values,
    over_cells,
    parts,
    shown_conditions,
    values,
    values_of,
)

STYLES = ("-", "--", ":", "-.")
"""Lines of controls, in turn; those of known values are not solid."""


def lines(
    result: xr.DataTree,
    *,
    data: Data,
    along: str,
    ylabel: str = "",
    rows: By = None,
    columns: By = CONDITIONS,
    lines: By = None,
    known: Mapping[str, Data] | None = None,
    seeds: Literal["interval", "dots", "each", "points"] = "interval",
    shaded: Callable[[xr.DataTree], tuple[float, float]] | None = None,
    ylim: tuple[float, float] | None = None,
    log: str = "",
    but: tuple[str, ...] = (),
) -> Figure | None:
    """Numbers along a dim: in panels, or in lines, of conditions.

    Args:
        result, data, ylabel, rows, columns, log: see above.
        along: the dim of the x-axis, by its labels.
        lines: where a column is a condition, the first line has its colour, and the others,
            controls, are grey.
        known: a horizontal line, the mean over the cells of a panel; or, along the x-axis, one more
            line.
        seeds: whether there is the mean over seeds with its `interval`, or with `dots` for each
            seed, or a line for `each`; or `points` with their interval that no line joins.
        shaded: the part of the x-axis that is.
        ylim: the ends of the y-axis.
        but: coordinates in which the cells of a condition may differ.
    """
    conditions, table = shown_conditions(result, but=but), _with_known(result, data, known)
    where: Any = {"rows": rows, "columns": columns, "ylabel": ylabel}
    height = 2.7 if columns == CONDITIONS else 3.2
    figure, panels = facets(table, conditions, height=height, **where)
    # A line looks alike in all panels, whatever else is there.
    shown, levels = parts(table, lines, conditions), [name for name in known or () if name in table]
    for panel in panels:
        if shaded is not None:
            panel.axis.axvspan(*shaded(result), color="#eeeeee")
        curves = [(part.name, part.of(panel.data), part.shown) for part in shown]
        for name in levels:
            if along in panel.data[name].dims:
                curves.append((name, xr.Dataset({"value": panel.data[name]}), None))
        for number, (name, curve, of) in enumerate(curves):
            one = of or panel.shown
            look = {
                "color": one.colour if one and (of or number == 0) else CONTROL,
                "marker": of.marker if of else MARKERS[number % len(MARKERS)],
                "ls": "-" if of else STYLES[number % len(STYLES)],
                "label": name or None,
            }
            if has_values(curve):
                _draw_along(panel.axis, curve, along, seeds, **look)
        for name, style in zip(levels, STYLES[1:], strict=False):
            level = panel.data[name]
            if along not in level.dims and level.notnull().any():
                panel.axis.axhline(level.mean().item(), color="black", lw=1, ls=style, label=name)
        counts = panel.data["count"].sum("cell").to_numpy() if "count" in panel.data else ()
        for place, number in enumerate(counts):
            panel.axis.text(place, -0.08, f"{number:.0f}", ha="center", fontsize=6)
        panel.axis.label_outer()
    return finished(figure, ylim=ylim, log=log)


def training(
    result: xr.DataTree, *, metric: str, known: Mapping[str, Data] | None = None, log: str = ""
) -> Figure | None:
    """A metric on the validation examples over training: a panel for each split, a line each seed.

    Args:
        result, known, log: see above; of known values the ones of the group of all examples.
        metric: of the setup.
    """
    about = result["scores"][metric].attrs
    whole = about.get("percent", 0) and not log and not (result["training"][metric] < 0).any()
    return lines(
        result,
        data=values("training", metric, group="all"),
        along="train_step",
        columns="split",
        lines=CONDITIONS,
        known=known,
        seeds="each",
        ylabel=about["long_name"],
        ylim=(-0.02, 1.02) if whole else None,
        log=log,
    )


def against(
    result: xr.DataTree,
    *,
    readings: Mapping[str, Reading],
    setting: str,
    ylabel: str,
    rows: str | None = None,
    log: str = "",
) -> Figure | None:
    """Readings against a setting that varies: a panel for each reading, a line for the rest.

    None where the setting has one value.

    Args:
        result, readings, ylabel, log: see above.
        setting: the coordinate of the x-axis.
        rows: a coordinate that has a row of panels for each value.
    """
    by = (setting,) if rows is None else (setting, rows)

    def data(result: xr.DataTree) -> xr.Dataset:
        table = by_settings(values_of(readings), *by)(result)
        return table if table.sizes.get(setting, 0) > 1 else xr.Dataset()

    return lines(
        result,
        data=data,
        along=setting,
        columns="reading",
        rows=rows,
        lines=CONDITIONS,
        seeds="dots",
        ylabel=ylabel,
        log=log,
        but=by,
    )


def by_settings(data: Data, *settings: str) -> Data:
    """Data with a dim for each of some settings, in which a cell has numbers at its own values."""

    def take(result: xr.DataTree) -> xr.Dataset:
        table, coordinates = data(result), result["scores"].coords
        for name in settings:
            found = dict.fromkeys(one.values.get(name) for one in conditions_of(result))
            labels = [label for label in found if label is not None]
            if not table or not labels:
                return xr.Dataset()
            if not isinstance(labels[0], str):
                labels.sort()
            own = xr.DataArray(coordinates[name].to_numpy(), dims="cell")
            table = table.where(own == xr.DataArray(labels, {name: labels}))
        return table

    return take


def points(
    result: xr.DataTree,
    *,
    readings: Mapping[str, Reading],
    xlabel: str = "",
    apart: bool = False,
    known: Mapping[str, Data] | None = None,
    log: bool = False,
) -> Figure | None:
    """Readings of each condition: dots of its cells with intervals over examples, and their mean.

    Args:
        result, readings: see above.
        xlabel: what is read.
        apart: whether each reading has a panel, with an axis of its own, in place of a colour.
        known: by label, data of readings with labels of `readings`.
        log: whether what is read is logarithmic.
    """
    table = _with_known(result, values_of(readings), known)
    rows, n = parts(table, CONDITIONS, shown_conditions(result)), 1 if apart else len(readings)
    labels = [one.name for one in rows]
    room = 0.06 * max(map(len, labels), default=0)
    by: Any = (
        {"columns": "reading", "width": 3.1} if apart else {"columns": None, "width": 5 + room}
    )
    height = 0.8 + len(rows) * (0.15 + 0.15 * n) * (1 if len(rows) <= 12 else 0.6)
    figure, panels = facets(table, [], height=height, share=not apart, **by)
    for panel in panels:
        some = parts(panel.data, None if apart else "reading", [])
        colours = colours_of([reading.labels.get("reading") for reading in some])
        for (number, reading), (row, condition) in product(enumerate(some), enumerate(rows)):
            cells = condition.of(reading.of(panel.data)).dropna("cell", subset=["value"])
            one: Any = condition.shown
            strip = row - 0.4 + 0.8 / len(some) * np.array([number, number + 1])
            _draw_cells(
                panel.axis, cells, strip, one.colour if apart else colours[number], reading.name
            )
            for label, style in zip(known or (), STYLES[1:], strict=False):
                if label in cells and cells[label].notnull().any():
                    x = [cells[label].mean().item()] * 2
                    panel.axis.plot(x, strip, style, color="black", label=label)
        panel.axis.grid(axis="x", lw=0.3)
        panel.axis.set_xlabel(xlabel, fontsize=SMALL)
        panel.axis.set_yticks(range(len(rows)), labels, fontsize=SMALL)
        panel.axis.set_ylim(len(rows) - 0.5, -0.5)
        if log:
            panel.axis.set_xscale("log")
        panel.axis.label_outer()
    return finished(figure)


def scatter(
    result: xr.DataTree, *, x: Reading, y: Reading, xlabel: str, ylabel: str, log: str = ""
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
    axes[0, 0].set(xlabel=xlabel, ylabel=ylabel)
    return finished(figure, log=log)


def pictures(
    result: xr.DataTree,
    *,
    data: Data,
    draw: Callable[[Axes, xr.Dataset], Any],
    rows: By,
    mean: str | None = None,
    share: bool = True,
    bar: str = "",
    ylabel: str = "",
) -> Figure | None:
    """Pictures by a function that draws one, of `probes`, say: a column for each condition.

    Args:
        result, data, rows, ylabel: see above.
        draw: draws what was measured in one condition; the colour of the axes is the condition's.
        mean: what the mean over cells is called where `data` has a `value`, with its interval
            `_low` to `_high`; without it, all variables of the first cell are drawn.
        share: whether panels share their axes.
        bar: title of a colour bar, from 0 to the greatest colour of all panels.
    """
    where: Any = {"rows": rows, "ylabel": ylabel, "share": share}
    figure, panels = facets(data(result), shown_conditions(result), **where)
    for panel in panels:
        panel.axis.set_prop_cycle(color=[panel.shown.colour if panel.shown else CONTROL])
        if mean is None:
            draw(panel.axis, panel.data.isel(cell=0))
        else:
            names = {"value": mean, "low": f"{mean}_low", "high": f"{mean}_high"}
            draw(panel.axis, over_cells(panel.data).rename(names))
    images = [image for panel in panels for image in panel.axis.images]
    if bar and figure is not None:
        top = max(image.get_clim()[1] for image in images)
        for image in images:
            image.set_clim(0, top)
        figure.colorbar(images[0], ax=figure.axes, shrink=0.7, label=bar)
    return finished(figure)


def matrices(
    result: xr.DataTree,
    *,
    data: Data,
    y: str,
    x: str,
    title: str,
    rows: By = None,
    shares: bool = False,
) -> Figure | None:
    """Numbers, none of them negative, over two dims, a column of panels for each condition.

    Args:
        result, data, rows: see above; drawn is the mean of a condition's cells.
        y, x: dims, by their labels.
        title: of the colour bar.
        shares: whether counts are drawn as shares of their row.
    """
    draw = functools.partial(_draw_matrix, y=y, x=x, shares=shares)
    look: Any = {"rows": rows, "share": False, "ylabel": name_of(y)}
    return pictures(result, data=data, draw=draw, mean="value", bar=title, **look)


def only(
    result: xr.DataTree, *, view: Callable[[xr.DataTree], Figure | None], **coordinates: object
) -> Figure | None:
    """A view of the conditions with these values, or that they do not apply to."""
    some = [one.cells for one in conditions_of(result) if one.matches(coordinates)]
    if not sum(map(len, some)):
        return None
    cells = np.concatenate(some)
    return view(result.map_over_datasets(lambda one: one.isel(cell=cells, missing_dims="ignore")))


def _with_known(result: xr.DataTree, data: Data, known: Mapping[str, Data] | None) -> xr.Dataset:
    """Data, and beside it what is known, by its labels."""
    table = data(result)
    for label, take in (known or {}).items():
        if table and (found := take(result)):
            table[label] = found["value"].drop_vars("cell", errors="ignore")
    return table


def _draw_along(axis: Axes, data: xr.Dataset, along: str, seeds: str, **look: Any) -> None:
    """A line of cells along a dim, by its labels; what is not known is left out."""
    labels = data[along].to_numpy()
    places = labels
    if labels.dtype.kind not in "if":
        # Names have their places, known or not.
        places, names = np.arange(len(labels)), [name_of(label) for label in labels]
        turned = 90 if max(map(len, names)) > 12 else 0
        axis.set_xticks(places, names, fontsize=7, rotation=turned)
        axis.set_xlim(-0.5, len(labels) - 0.5)
    axis.set_xlabel(name_of(along))
    if seeds == "each":
        for line in data["value"].transpose("cell", along).to_numpy():
            known = np.isfinite(line)
            axis.plot(places[known], line[known], **look | {"marker": "", "lw": 1.2})
        return
    found = over_cells(data).transpose(along)
    mean, low, high = (found[name].to_numpy() for name in ("value", "low", "high"))
    known = np.isfinite(mean)
    ends = np.maximum(np.nan_to_num([mean - low, high - mean]), 0)
    look |= {"ms": 4, "capsize": 2} | ({"ls": "none"} if seeds == "points" else {})
    yerr = None if seeds == "dots" else ends[:, known]
    axis.errorbar(places[known], mean[known], yerr=yerr, **look)
    if seeds == "dots":
        cells = data["value"].transpose(along, "cell").to_numpy()
        x = np.broadcast_to(places[:, None], cells.shape)
        dots = np.isfinite(cells)
        axis.plot(x[dots], cells[dots], ".", ms=3, color=look["color"], alpha=0.5)


def _draw_cells(axis: Axes, cells: xr.Dataset, strip: np.ndarray, colour: str, label: str) -> None:
    """Dots of cells, and a line at their mean, within a strip of the y-axis."""
    value = cells["value"].to_numpy()
    ends = np.stack([value - cells["low"], cells["high"] - value])
    places = np.linspace(strip[0], strip[1], len(value) + 2)[1:-1]
    look: Any = {"color": colour, "fmt": "o", "ms": 3, "capsize": 2, "label": label or None}
    axis.errorbar(value, places, xerr=np.maximum(np.nan_to_num(ends), 0), **look)
    if len(value) > 1:
        axis.plot([value.mean()] * 2, strip, color=colour, lw=1)


def _draw_matrix(axis: Axes, data: xr.Dataset, *, y: str, x: str, shares: bool) -> None:
    """A matrix with the names of its rows and columns; of shares with numbers, from a tenth on."""
    matrix = data["value"].transpose(y, x)
    if shares:
        total = matrix.sum(x)
        matrix = matrix / total.where(total > 0, 1)
    axis.set_xlabel(name_of(x), fontsize=SMALL)
    if matrix.isnull().all():
        return
    named = {dim: [name_of(label) for label in matrix[dim].to_numpy()] for dim in (y, x)}
    probes.draw_numbers(
        axis,
        matrix.assign_coords(named),
        limits=(0.0, 1.0 if shares else float(matrix.max())),
        style=lambda share: f"{100 * share:.0f}" if shares and share >= 0.1 else "",
        colours="Blues",
    )
