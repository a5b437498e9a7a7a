"""Building blocks of plots: data selection, styles of conditions, panels, means over cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

import probes
from studies.engine.readings import Condition, Reading, conditions_of, varied
from studies.report.names import colours_of, name_of

SMALL = 8
"""The font size of text beside panels."""

LEGEND = 1.4
"""The width, in inches, that figures reserve for a legend."""

ACROSS = 5
"""The most panels of a single row beside one another; a longer row is wrapped."""

WIDEST = 8
"""The most panels beside one another where there are several rows."""

CONDITIONS = "conditions"
"""A value of `By`: one row, column or line for each condition."""

Data = Callable[[xr.DataTree], xr.Dataset]
"""A selection of data from a result: variables [cell, ...]; none where nothing was measured.

Numbers are in the variable `value`, with the optional variables `low` and `high` (its bounds over
examples) and `count` [cell, along], which is summed over cells and written under points.
"""

By = str | Mapping[str, Mapping[str, Any]] | None
"""How data is split into rows, columns or lines: a dim (one for each label); a mapping from names
to labels of dims, such as `{"best": {"layer": "all", "key": "all"}}`; `CONDITIONS`; or None (not
split)."""


def group(part: str, /, **select: Any) -> Data:
    """All variables of a group of the result, at given labels of its dims.

    Args:
        part: the group of the result.
        select: a label, which drops its dim, or a list of labels, which keeps it in that order.
            Dims that the data does not have are ignored, as are labels of a list; without the
            single label there is no data.

    Example:
        `group("probed", split="ood")`
    """

    def take(result: xr.DataTree) -> xr.Dataset:
        data = result[part].to_dataset() if part in result.children else xr.Dataset()
        for dim, labels in select.items():
            if dim not in data.dims:
                continue
            if isinstance(labels, list | tuple):
                data = data.sel({dim: [label for label in labels if label in data[dim]]})
            elif labels in data[dim]:
                data = data.sel({dim: labels}, drop=True)
            else:
                return xr.Dataset()
        return data

    return take


def values(part: str, variable: str, /, **select: Any) -> Data:
    """A variable of a group of the result, as `value`, with `low` and `high` if it has bounds.

    Args:
        part, select: see `group`.
        variable: the variable in that group.

    Example:
        `values("scores", "accuracy", split=["id", "ood"], group="all")`
    """
    names = {variable: "value", f"{variable}_low": "low", f"{variable}_high": "high"}

    def take(result: xr.DataTree) -> xr.Dataset:
        data = group(part, **select)(result)
        present = {name: new_name for name, new_name in names.items() if name in data}
        return data[list(present)].rename(present)

    return take


def values_of(readings: Mapping[str, Reading]) -> Data:
    """Readings as data [cell, reading] with bounds; readings without any number are left out.

    Args:
        readings: the readings by label.

    Example:
        `values_of({"id": metric("accuracy", "id")})`
    """

    def take(result: xr.DataTree) -> xr.Dataset:
        columns = {}
        for label, reading in readings.items():
            value = reading.values(result)
            no_bounds = (np.full(len(value), np.nan),) * 2
            bounds = no_bounds if reading.bounds is None else reading.bounds(result)
            if np.isfinite(value).any():
                columns[label] = np.stack([value, *bounds], axis=1)
        if not columns:
            return xr.Dataset()
        stacked = xr.DataArray(list(columns.values()), dims=("reading", "cell", "end"))
        stacked = stacked.assign_coords(reading=list(columns), end=["value", "low", "high"])
        return stacked.to_dataset("end")

    return take


@dataclass(frozen=True)
class Shown:
    """A condition and its style in plots.

    Attributes:
        values: the value of each coordinate; None where it does not apply.
        cells: indices of its cells.
        label: the display name, from the values that differ between conditions.
        colour, marker: the style.
    """

    values: dict[str, Any]
    cells: Int[np.ndarray, " cell"]
    label: str
    colour: str
    marker: str


def shown_conditions(result: xr.DataTree, *, ignore: Sequence[str] = ()) -> list[Shown]:
    """The conditions of a result with their styles, in order.

    Args:
        result: the result.
        ignore: coordinates to ignore; conditions that differ only in them are merged.
    """
    names = [name for name in varied(result) if name not in ignore]
    merged: dict[tuple[Any, ...], list[Condition]] = {}
    for condition in conditions_of(result):
        key = tuple(condition.values[name] for name in names)
        merged.setdefault(key, []).append(condition)
    models = [conditions[0].values["model"] for conditions in merged.values()]
    models_differ = len(set(models)) == len(models)
    colours = colours_of(models if models_differ else [""] * len(models))
    return [
        Shown(
            dict(conditions[0].values),
            np.concatenate([condition.cells for condition in conditions]),
            conditions[0].label(names),
            colours[number],
            probes.plots.MARKERS[number % len(probes.plots.MARKERS)],
        )
        for number, conditions in enumerate(merged.values())
    ]


class Part(NamedTuple):
    """A part of the data that is one row, column or line: labels of dims, or a condition."""

    name: str
    labels: Mapping[str, Any] = {}
    shown: Shown | None = None

    def of(self, data: xr.Dataset) -> xr.Dataset:
        """Select the part from data."""
        if self.shown is not None:
            return data.isel(cell=self.shown.cells)
        return data.sel(self.labels, drop=True)


def parts(data: xr.Dataset, by: By, conditions: Sequence[Shown]) -> list[Part]:
    """Split data by `by`, without parts in which nothing was measured."""
    if not data:
        return []
    if by is None:
        candidates = [Part("")]
    elif by == CONDITIONS:
        candidates = [Part(condition.label, shown=condition) for condition in conditions]
    elif isinstance(by, str):
        dim = by.replace("_", " ")
        candidates = [
            Part(f"{dim} {label}" if str(label).isdigit() else name_of(label), {by: label})
            for label in data[by].to_numpy().tolist()
        ]
    else:
        candidates = [
            Part(name, labels)
            for name, labels in by.items()
            if all(label in data[dim] for dim, label in labels.items())
        ]
    return [part for part in candidates if has_values(part.of(data))]


def has_values(data: xr.Dataset) -> bool:
    """Whether `value`, or without it any variable, has a number that is not NaN."""
    variables = [data["value"]] if "value" in data else data.data_vars.values()
    return any(bool(variable.notnull().any()) for variable in variables)


def over_cells(data: xr.Dataset) -> xr.Dataset:
    """The mean `value` over cells with its interval `low` to `high`.

    The interval is Student's t interval for three or more seeds, the range of two seeds, and for a
    single seed its interval over examples, if there is one.
    """
    cells = data["value"].transpose(..., "cell").astype(float)
    n = cells.notnull().sum("cell")
    bounds = {"low": cells.min("cell"), "high": cells.max("cell")}
    mean, *student = (
        bounds["low"].copy(data=values) for values in probes.over_seeds(cells.to_numpy())
    )
    for (name, extreme), student_bound in zip(bounds.items(), student, strict=True):
        over_examples = data[name].min("cell").fillna(extreme) if name in data else extreme
        bounds[name] = student_bound.where(n > 2, extreme).where(n > 1, over_examples)
    return xr.Dataset({"value": mean} | bounds)


def grid(
    n_rows: int, n_columns: int, *, width: float = 3.1, height: float = 2.7, share: Any = True
) -> tuple[Figure, np.ndarray]:
    """A figure with panels [row, column] and room for a legend beside them.

    The figure is not registered with pyplot, so it need not be closed.

    Args:
        n_rows, n_columns: number of panels.
        width, height: size of a panel, in inches.
        share: whether panels share their axes; see `matplotlib.figure.Figure.subplots`.
    """
    size = (width * n_columns + LEGEND + 0.4, height * n_rows)
    figure = Figure(size, layout="constrained")
    return figure, figure.subplots(n_rows, n_columns, sharex=share, sharey=share, squeeze=False)


@dataclass(frozen=True)
class Panel:
    """A panel of a figure.

    Attributes:
        axis: where it is drawn.
        data: the data at its row and column.
        shown: the condition that the data is from; None if it is from several.
    """

    axis: Axes
    data: xr.Dataset
    shown: Shown | None


def facets(
    data: xr.Dataset,
    conditions: Sequence[Shown],
    *,
    rows: By = None,
    columns: By = CONDITIONS,
    ylabel: str = "",
    **size: Any,
) -> tuple[Figure | None, list[Panel]]:
    """A figure with a panel for each row and column of the data, titled and labelled.

    Rows of many panels are wrapped, all rows together.

    Args:
        data: the data.
        conditions: the conditions, for `CONDITIONS` as rows or columns.
        rows, columns: how the data is split, see `By`.
        ylabel: label of the y-axis; the name of the row is added.
        size: `width`, `height` and `share` of `grid`.

    Returns:
        The figure and its panels, row by row; None and no panels if nothing was measured.
    """
    row_parts, column_parts = (parts(data, by, conditions) for by in (rows, columns))
    if not row_parts or not column_parts:
        return None, []
    n_blocks = math.ceil(len(column_parts) / (ACROSS if len(row_parts) == 1 else WIDEST))
    n_across = math.ceil(len(column_parts) / n_blocks)
    figure, axes = grid(n_blocks * len(row_parts), n_across, **size)
    found = []
    for line, (block, row) in enumerate(product(range(n_blocks), row_parts)):
        shown = column_parts[block * n_across :][:n_across]
        for axis in axes[line, len(shown) :]:
            axis.axis("off")
        for axis, column in zip(axes[line], shown, strict=False):
            if row is row_parts[0]:
                axis.set_title(column.name, fontsize=9)
            if column is shown[0]:
                axis.set_ylabel(f"{ylabel}\n{row.name}".strip(), fontsize=SMALL)
            found.append(Panel(axis, column.of(row.of(data)), column.shown or row.shown))
    return figure, found


def legend_beside(figure: Figure) -> None:
    """Add one legend for all panels to their right, with each label once.

    A label that has other colours in other panels, those of their conditions, is black.
    """
    handles: dict[str, list[Any]] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, []).append(handle)
    if handles:
        style: Any = {"loc": "outside right center", "frameon": False, "fontsize": SMALL}
        entries = [_of_all_panels(of_label) for of_label in handles.values()]
        legend = figure.legend(entries, list(handles), **style)
        # Widen the figure for long labels, so that the panels keep their size.
        width = legend.get_window_extent().width / figure.dpi
        figure.set_figwidth(figure.get_figwidth() + max(0, width - LEGEND))


def _of_all_panels(handles: Sequence[Any]) -> Any:
    """The legend handle of what is drawn in several panels, black if its colours differ."""
    artists = [_artist(handle) for handle in handles]
    if not isinstance(artists[0], Line2D | Patch):
        return handles[0]
    handle = copy(artists[0])
    if len({_colour(artist) for artist in artists}) > 1:
        handle.set_color("black")
    return handle


def _artist(handle: Any) -> Any:
    """The line of an errorbar, or the first bar of several."""
    if isinstance(handle, ErrorbarContainer):
        return handle.lines[0]
    return handle[0] if isinstance(handle, BarContainer) else handle


def _colour(artist: Any) -> str:
    return to_hex(artist.get_color() if isinstance(artist, Line2D) else artist.get_facecolor())


def finished(
    figure: Figure | None, *, ylim: tuple[float, float] | None = None, log: str = ""
) -> Figure | None:
    """Set limits and scales of a drawn figure, whose panels share their axes, and add its legend.

    Args:
        figure: the figure; None is returned as it is.
        ylim: limits of the y-axis.
        log: the logarithmic axes: `x`, `y` or `xy`.
    """
    if figure is None:
        return None
    first = figure.axes[0]
    if ylim is not None:
        first.set_ylim(*ylim)
    if "x" in log:
        first.set_xscale("log", base=2)
        first.xaxis.set_major_formatter("{x:g}")
    if "y" in log:
        first.set_yscale("log")
    legend_beside(figure)
    return figure
