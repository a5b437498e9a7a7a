"""Plots for any study: lines, intervals, readings against a setting or against one another.

Each function takes a result first and returns a figure, or None if the result has nothing to draw;
a study binds the other arguments with `functools.partial`. Arguments that several functions share:

- `data`: the data, for example `values("scores", "accuracy", group="all")`; see `panels.Data`.
- `readings`: readings by label.
- `rows`, `columns`, `lines`: how the data is split, a dim or `CONDITIONS`; see `panels.By`.
- `references`: reference values, such as chance, by label, with the dims of `data` or fewer.
- `ylabel`: label of the y-axis.
- `log`: the logarithmic axes: `x`, `y` or `xy`.
- `ignore`: coordinates to ignore; conditions that differ only in them are merged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Literal

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from probes.plots import COLOURS, CONTROL, DASHES, MARKERS, line
from probes.plots.axes import put_names
from studies.engine.readings import Reading, conditions_of, pairs_of, with_none
from studies.report.names import colours_of, name_of, setting_names
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


def lines(
    result: xr.DataTree,
    *,
    data: Data,
    along: str,
    ylabel: str = "",
    rows: By = None,
    columns: By = CONDITIONS,
    lines: By = None,
    references: Mapping[str, Data] | None = None,
    seeds: Literal["interval", "dots", "each", "points"] = "interval",
    shaded: Callable[[xr.DataTree], tuple[float, float]] | None = None,
    ylim: tuple[float, float] | None = None,
    log: str = "",
    ignore: tuple[str, ...] = (),
) -> Figure | None:
    """Values along a dim, with conditions as panels or as lines.

    Args:
        result, data, ylabel, rows, columns, log, ignore: see the module's docstring.
        along: the dim of the x-axis.
        lines: how the data of a panel is split into lines. In the panel of a condition the first
            line has the condition's colour; so do the labels of a dim other than `control`. All
            others are controls, and grey.
        references: reference values; drawn as a horizontal line at their mean over the cells of a
            panel, or as a further line if they have the dim `along`.
        seeds: how cells are drawn: the mean with its `interval`, the mean with `dots` for the
            cells, a line for `each` cell, or `points` with intervals and no line.
        shaded: result -> the range of the x-axis that is shaded.
        ylim: limits of the y-axis.
    """
    conditions, table = (
        shown_conditions(result, ignore=ignore),
        _with_references(result, data, references),
    )
    layout: Any = {"rows": rows, "columns": columns, "ylabel": ylabel}
    height = 2.7 if columns == CONDITIONS else 3.2
    if table and table[along].dtype.kind not in "if":
        # Long names below the panels leave less room.
        height += 0.06 * max(len(name_of(label)) for label in table[along].to_numpy())
    figure, panels = facets(table, conditions, height=height, **layout)
    # Split the whole table, so that a line has the same style in all panels.
    line_parts = parts(table, lines, conditions)
    drawn = [name for name in references or () if name in table]
    for panel in panels:
        if shaded is not None:
            panel.axis.axvspan(*shaded(result), color="#eeeeee")
        curves = [(part.name, part.of(panel.data), part.shown) for part in line_parts]
        for name in drawn:
            if along in panel.data[name].dims:
                curves.append((name, xr.Dataset({"value": panel.data[name]}), None))
        for number, (name, curve, line_condition) in enumerate(curves):
            condition = line_condition or panel.shown
            is_control = number > 0 and (lines in (None, "control") or not isinstance(lines, str))
            is_control = (is_control or name in drawn) and line_condition is None
            marker = line_condition.marker if line_condition else MARKERS[number % len(MARKERS)]
            colour = condition.colour if condition else COLOURS[0]
            style = {
                "color": CONTROL if is_control else colour,
                "marker": marker,
                "linestyle": "-" if line_condition else DASHES[number % len(DASHES)],
                "label": name or None,
            }
            if has_values(curve):
                _draw_along(panel.axis, curve, along, seeds, **style)
        for name, line_style in zip(drawn, DASHES[1:], strict=False):
            reference = panel.data[name]
            if along not in reference.dims and reference.notnull().any():
                mean = reference.mean().item()
                panel.axis.axhline(mean, color="black", lw=1, ls=line_style, label=name)
        counts = panel.data["count"].sum("cell") if "count" in panel.data else ()
        for x, count in zip(_positions(panel.data[along]), counts, strict=False):
            panel.axis.text(x, -0.08, f"{count:.0f}", ha="center", fontsize=6)
        if panel.data[along].dtype.kind not in "if":
            # Panels without curves have the names, too.
            names = [name_of(label) for label in panel.data[along].to_numpy()]
            put_names(panel.axis, "x", names)
        panel.axis.label_outer()
    return finished(figure, ylim=ylim, log=log)


def training(
    result: xr.DataTree, *, metric: str, references: Mapping[str, Data] | None = None, log: str = ""
) -> Figure | None:
    """A metric on the validation examples over training: a panel per split, a line per cell.

    Args:
        result, references, log: see the module's docstring.
        metric: one of the setup's metrics.
    """
    attrs = result["scores"][metric].attrs
    is_share = attrs.get("percent", 0) and not log and not (result["training"][metric] < 0).any()
    return lines(
        result,
        data=values("training", metric, group="all"),
        along="train_step",
        columns="split",
        lines=CONDITIONS,
        references=references,
        seeds="each",
        ylabel=attrs["long_name"],
        ylim=(-0.02, 1.02) if is_share else None,
        log=log,
    )


def tuning(result: xr.DataTree, *, log: str = "") -> Figure | None:
    """The score that chooses tuned settings, at all values that were tried: a panel per condition.

    Along the first setting of which a condition has several values, with a line for each
    combination of the others: means over the seeds and draws of the data that all of these have.
    Dots are all cells, hollow where not all values have their seed. A ring marks what was chosen,
    so that it is seen where better values may lie beyond those tried, and where further seeds of
    two have decided. None if nothing was chosen.

    Args:
        result, log: see the module's docstring; positive numbers have a logarithmic x-axis.
    """
    scores, conditions = result["scores"].to_dataset(), conditions_of(result)
    varied = [
        name
        for name in json.loads(result.attrs["axes"])["tuned"]
        if any(len(np.unique(scores[name][condition.tried])) > 1 for condition in conditions)
    ]
    if not varied:
        return None
    table = _by_tried_values(result, varied)
    along, names = varied[0], list(dict.fromkeys(table["tried"].to_numpy().tolist()))
    labels, x = table[along].to_numpy(), _positions(table[along])
    shown = [
        replace(one, cells=condition.tried)
        for one, condition in zip(shown_conditions(result), conditions, strict=True)
    ]
    ylabel = f"{result.attrs['selection']}, validation"
    figure, drawn = facets(table, shown, columns=CONDITIONS, ylabel=ylabel)
    for panel in drawn:
        colour = panel.shown.colour if panel.shown else COLOURS[0]
        compared = panel.data.sel(cell=panel.data["compared"])
        chosen = compared["value"].where(compared["chosen"] == 1).mean("cell")
        panel.axis.plot(x, chosen, "o", ms=10, mfc="none", color="black", label="chosen")
        for number, name in enumerate(names):
            curve = compared.sel(cell=compared["tried"] == name)
            style = {
                "color": colour,
                "marker": MARKERS[number % len(MARKERS)],
                "linestyle": DASHES[number % len(DASHES)],
                "label": name or None,
            }
            if has_values(curve):
                _draw_along(panel.axis, curve, along, "dots", **style)
        further = panel.data.sel(cell=~panel.data["compared"])
        if has_values(further):
            style = {"marker": "o", "mfc": "none", "label": "seeds not at all values"}
            _draw_dots(panel.axis, further, along, colour, **style)
        panel.axis.label_outer()
    are_positive = labels.dtype.kind in "if" and labels[0] > 0
    figure = finished(figure, log=f"x{log}" if are_positive else log)
    ticks = dict(zip(x.tolist(), labels.tolist(), strict=True))
    if are_positive:
        ticks = _far_apart(ticks)
    for axis in figure.axes if figure else ():
        texts = [
            f"{one:g}" if isinstance(one, int | float) else name_of(one) for one in ticks.values()
        ]
        axis.set_xticks(list(ticks), texts, fontsize=7)
    return figure


def _far_apart(ticks: Mapping[float, Any]) -> dict[float, Any]:
    """Ticks of a logarithmic axis, without those whose labels would run into the one before."""
    kept: dict[float, Any] = {}
    for x, label in ticks.items():
        if not kept or np.log(x / max(kept)) >= np.log(max(ticks) / min(ticks)) / 7:
            kept[x] = label
    return kept


def _by_tried_values(result: xr.DataTree, tuned: Sequence[str]) -> xr.Dataset:
    """The selecting score as `value` [cell, first of the tuned settings], NaN at other values.

    With the coordinates [cell] `tried`, the values of the other settings in words, and `compared`,
    whether all values that the condition tried have the cell's seed and draw of the data.
    """
    scores, (along, *others) = result["scores"].to_dataset(), tuned
    columns = {name: with_none(scores[name].to_numpy()) for name in tuned}
    settings = [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
    tried = [", ".join(setting_names({name: one[name] for name in others})) for one in settings]
    compared = np.zeros(len(tried), bool)
    for condition in conditions_of(result):
        pairs = dict(zip(condition.tried.tolist(), pairs_of(result, condition.tried), strict=True))
        of_values: dict[tuple[Any, ...], set[Any]] = {}
        for cell, pair in pairs.items():
            of_values.setdefault(tuple(settings[cell].values()), set()).add(pair)
        shared = set.intersection(*of_values.values())
        for cell, pair in pairs.items():
            compared[cell] = pair in shared or not shared
    labels = np.array(sorted({one for one in columns[along] if one is not None}))
    at = xr.DataArray(scores[along].to_numpy() == labels[:, None], {along: labels}, (along, "cell"))
    score = result["training"]["validation"].drop_vars(tuned).where(at)
    score = score.assign_coords(tried=("cell", tried), compared=("cell", compared))
    return score.to_dataset(name="value")


def against(
    result: xr.DataTree,
    *,
    readings: Mapping[str, Reading],
    setting: str,
    ylabel: str,
    rows: str | None = None,
    log: str = "",
    ignore: tuple[str, ...] = (),
) -> Figure | None:
    """Readings against a setting: a panel per reading, a line per combination of other settings.

    None if the setting has only one value.

    Args:
        result, readings, ylabel, log, ignore: see the module's docstring.
        setting: the coordinate on the x-axis.
        rows: a coordinate with a row of panels for each value.
    """
    coordinates = (setting,) if rows is None else (setting, rows)

    def data(result: xr.DataTree) -> xr.Dataset:
        table = by_settings(values_of(readings), *coordinates)(result)
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
        ignore=(*coordinates, *ignore),
    )


def by_settings(data: Data, *settings: str) -> Data:
    """Data with settings as additional dims; each cell is NaN except at its own values.

    Args:
        data: the data.
        settings: the coordinates that become dims.
    """

    def take(result: xr.DataTree) -> xr.Dataset:
        table, coordinates = data(result), result["scores"].coords
        for name in settings:
            settings_of = (condition.values.get(name) for condition in conditions_of(result))
            labels = [value for value in dict.fromkeys(settings_of) if value is not None]
            if not table or not labels:
                return xr.Dataset()
            if not isinstance(labels[0], str):
                labels.sort()
            values_of_cells = xr.DataArray(coordinates[name].to_numpy(), dims="cell")
            table = table.where(values_of_cells == xr.DataArray(labels, {name: labels}))
        return table

    return take


def points(
    result: xr.DataTree,
    *,
    readings: Mapping[str, Reading],
    xlabel: str = "",
    separate: bool = False,
    references: Mapping[str, Data] | None = None,
    log: bool = False,
    ignore: tuple[str, ...] = (),
) -> Figure | None:
    """Readings of each condition: dots for its cells, with intervals over examples, and the mean.

    Args:
        result, readings, ignore: see the module's docstring.
        xlabel: label of the x-axis.
        separate: whether each reading has its own panel and x-axis, rather than its own colour.
        references: reference values by label, as data [cell, reading] with labels of `readings`.
        log: whether the x-axis is logarithmic.
    """
    table = _with_references(result, values_of(readings), references)
    rows = parts(table, CONDITIONS, shown_conditions(result, ignore=ignore))
    labels = [row.name for row in rows]
    label_width = 0.06 * max(map(len, labels), default=0)
    columns, width = ("reading", 3.1) if separate else (None, 5 + label_width)
    n_strips = 1 if separate else len(readings)
    height = 0.8 + len(rows) * (0.15 + 0.15 * n_strips) * (1 if len(rows) <= 12 else 0.6)
    figure, panels = facets(
        table, [], columns=columns, width=width, height=height, share=not separate
    )
    for panel in panels:
        strips = parts(panel.data, None if separate else "reading", [])
        colours = colours_of([reading.labels.get("reading") for reading in strips])
        for (number, reading), (row, condition) in product(enumerate(strips), enumerate(rows)):
            cells = condition.of(reading.of(panel.data)).dropna("cell", subset=["value"])
            shown: Any = condition.shown
            strip = row - 0.4 + 0.8 / len(strips) * np.array([number, number + 1])
            colour = shown.colour if separate else colours[number]
            _draw_cells(panel.axis, cells, strip, colour, reading.name)
            for label, style in zip(references or (), DASHES[1:], strict=False):
                if label in cells and cells[label].notnull().any():
                    x = [cells[label].mean().item()] * 2
                    panel.axis.plot(x, strip, style, color="black", label=label)
        panel.axis.grid(axis="x", lw=0.3)
        panel.axis.set_xlabel(xlabel, fontsize=SMALL)
        panel.axis.set_yticks(range(len(rows)), labels, fontsize=SMALL)
        panel.axis.set_ylim(len(rows) - 0.5, -0.5)
        if log:
            panel.axis.set_xscale("log")
        else:
            # Long numbers, such as perplexities, would touch one another.
            panel.axis.ticklabel_format(axis="x", scilimits=(-3, 4))
        panel.axis.label_outer()
    return finished(figure)


def scatter(
    result: xr.DataTree, *, x: Reading, y: Reading, xlabel: str, ylabel: str, log: str = ""
) -> Figure | None:
    """One reading against another, with a point for each cell.

    Args:
        result, ylabel, log: see the module's docstring.
        x, y: the readings on the axes.
        xlabel: label of the x-axis.
    """
    x_values, y_values = x.values(result), y.values(result)
    is_measured = np.isfinite(x_values + y_values)
    if not is_measured.any():
        return None
    figure, axes = grid(1, 1, width=4.4, height=3.6)
    for condition in shown_conditions(result):
        cells = condition.cells
        if is_measured[cells].any():
            axes[0, 0].scatter(
                x_values[cells],
                y_values[cells],
                color=condition.colour,
                marker=condition.marker,
                label=condition.label,
                s=24,
            )
    axes[0, 0].set(xlabel=xlabel, ylabel=ylabel)
    return finished(figure, log=log)


def only(
    result: xr.DataTree, *, view: Callable[[xr.DataTree], Figure | None], **coordinates: object
) -> Figure | None:
    """A view of the conditions with these coordinates.

    Args:
        result: the result.
        view: the function that draws.
        coordinates: required values; a coordinate that does not apply to a condition matches all.
    """
    selected = [
        condition.cells for condition in conditions_of(result) if condition.matches(coordinates)
    ]
    if not sum(map(len, selected)):
        return None
    cells = np.concatenate(selected)
    return view(result.map_over_datasets(lambda data: data.isel(cell=cells, missing_dims="ignore")))


def _with_references(
    result: xr.DataTree, data: Data, references: Mapping[str, Data] | None
) -> xr.Dataset:
    """The data, with a further variable for each of the reference values."""
    table = data(result)
    for label, take in (references or {}).items():
        if table and (reference := take(result)):
            table[label] = reference["value"].drop_vars("cell", errors="ignore")
    return table


def _positions(labels: xr.DataArray) -> np.ndarray:
    """Where the labels of a dim are on the x-axis: numbers at their values, names in a row."""
    return labels.to_numpy() if labels.dtype.kind in "if" else np.arange(len(labels))


def _draw_along(axis: Axes, data: xr.Dataset, along: str, seeds: str, **style: Any) -> None:
    """Draw the values of cells along a dim, without NaN; `seeds` as in `lines`."""
    ylabel, positions = axis.get_ylabel(), _positions(data[along])
    if data[along].dtype.kind not in "if":
        data = data.assign_coords({along: [name_of(label) for label in data[along].to_numpy()]})
    curves = [over_cells(data).rename(low="value_low", high="value_high")]
    if seeds == "dots":
        curves = [curves[0][["value"]]]
    elif seeds == "points":
        style["linestyle"] = "none"
    elif seeds == "each":
        cells = (data[["value"]].isel(cell=cell) for cell in range(data.sizes["cell"]))
        curves = [cell for cell in cells if has_values(cell)]
    for curve in curves:
        line(curve, "value", axis, along=along, **style)
        if seeds == "each":
            # Only its end has a marker, which tells colours that look alike apart.
            axis.lines[-1].set(markevery=[-1], lw=1.2)
    if seeds == "dots":
        _draw_dots(axis, data, along, style["color"])
    if positions.max() >= 10_000:
        # Labels of five digits run into each other at more ticks.
        axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.set(xlabel=name_of(along), ylabel=ylabel)


def _draw_dots(axis: Axes, data: xr.Dataset, along: str, colour: str, **style: Any) -> None:
    """Draw the values of all cells along a dim as dots."""
    of_cells = data["value"].transpose(along, "cell").to_numpy()
    x = np.broadcast_to(_positions(data[along])[:, None], of_cells.shape)
    finite = np.isfinite(of_cells)
    style = {"marker": ".", "ms": 3, "color": colour, "alpha": 0.5, "ls": "none"} | style
    axis.plot(x[finite], of_cells[finite], **style)


def _draw_cells(axis: Axes, cells: xr.Dataset, strip: np.ndarray, colour: str, label: str) -> None:
    """Draw cells as dots, and a line at their mean, within a strip of the y-axis."""
    x = cells["value"].to_numpy()
    lengths = np.stack([x - cells["low"], cells["high"] - x])
    y = np.linspace(strip[0], strip[1], len(x) + 2)[1:-1]
    style: Any = {"color": colour, "fmt": "o", "ms": 3, "capsize": 2, "label": label or None}
    axis.errorbar(x, y, xerr=np.maximum(np.nan_to_num(lengths), 0), **style)
    if len(x) > 1:
        axis.plot([x.mean()] * 2, strip, color=colour, lw=1)
