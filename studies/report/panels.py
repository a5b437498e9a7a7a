"""What all plots share: data of a result, conditions as they are drawn, panels, means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import probes
from studies.engine.readings import Condition, Reading, conditions_of, varied
from studies.report.names import MARKERS, colours_of, name_of

SMALL = 8
"""The size of letters beside panels."""

LEGEND = 1.4
"""The width of a legend that figures have room for, in inches."""

CONDITIONS = "conditions"
"""In place of a dim: there is a row, a column or a line for each condition."""

Data = Callable[[xr.DataTree], xr.Dataset]
"""What is drawn of a result, variables [cell, ...]; none where nothing was measured.

Of numbers that is `value`, perhaps with its bounds over examples, `low` and `high`, and perhaps
`count`, [cell, along], which is written under points, summed over cells.
"""

By = str | Mapping[str, Mapping[str, Any]] | None
"""What has rows, columns or lines: a dim, for each of its labels; labels of dims, by what they are
called, `{"best": {"layer": "all", "key": "all"}}`; `CONDITIONS`; or nothing: there is one."""


def group(part: str, /, **select: Any) -> Data:
    """All variables of a result's group at labels of its dims.

    Several labels in a list keep their dim, in their order; those that there are not, and dims that
    there are not, are passed over.
    """

    def take(result: xr.DataTree) -> xr.Dataset:
        data = result[part].to_dataset() if part in result.children else xr.Dataset()
        for dim, label in select.items():
            if dim in data.dims and isinstance(label, list | tuple):
                data = data.sel({dim: [one for one in label if one in data[dim]]})
            elif dim in data.dims:
                data = data.sel({dim: label}, drop=True)
        return data

    return take


def values(part: str, variable: str, /, **select: Any) -> Data:
    """A variable of a result's group, with its bounds, if it has any; see `group`.

    Example:
        `values("scores", "accuracy", split=["id", "ood"], group="all")`
    """
    names = {variable: "value", f"{variable}_low": "low", f"{variable}_high": "high"}

    def take(result: xr.DataTree) -> xr.Dataset:
        data = group(part, **select)(result)
        known = {name: short for name, short in names.items() if name in data}
        return data[list(known)].rename(known)

    return take


def values_of(readings: Mapping[str, Reading]) -> Data:
    """Readings [cell, reading] by their labels, with their bounds; those without a number left out.

    Example:
        `values_of({"id": metric("accuracy", "id")})`
    """

    def take(result: xr.DataTree) -> xr.Dataset:
        found = {}
        for label, reading in readings.items():
            value = reading.values(result)
            unknown = (np.full(len(value), np.nan),) * 2
            ends = unknown if reading.bounds is None else reading.bounds(result)
            if np.isfinite(value).any():
                found[label] = np.stack([value, *ends], axis=1)
        if not found:
            return xr.Dataset()
        stacked = xr.DataArray(list(found.values()), dims=("reading", "cell", "end"))
        stacked = stacked.assign_coords(reading=list(found), end=["value", "low", "high"])
        return stacked.to_dataset("end")

    return take


@dataclass(frozen=True)
class Shown:
    """A condition as it is drawn: its values by coordinate (None: does not apply), its cells, the
    values that differ between conditions in words, and its colour and marker."""

    values: dict[str, Any]
    cells: Int[np.ndarray, " cell"]
    label: str
    colour: str
    marker: str


def shown_conditions(result: xr.DataTree, *, but: Sequence[str] = ()) -> list[Shown]:
    """The conditions of a result in order; those that differ in coordinates `but` alone are one."""
    names = [name for name in varied(result) if name not in but]
    alike: dict[tuple[Any, ...], list[Condition]] = {}
    for one in conditions_of(result):
        alike.setdefault(tuple(one.values[name] for name in names), []).append(one)
    models = [some[0].values["model"] for some in alike.values()]
    alone = len(set(models)) == len(models)
    colours = colours_of(models if alone else [""] * len(models))
    return [
        Shown(
            dict(some[0].values),
            np.concatenate([one.cells for one in some]),
            some[0].label(names),
            colours[number],
            MARKERS[number % len(MARKERS)],
        )
        for number, some in enumerate(alike.values())
    ]


class Part(NamedTuple):
    """A part of the data that has a row, a column or a line of its own."""

    name: str
    labels: Mapping[str, Any] = {}
    shown: Shown | None = None

    def of(self, data: xr.Dataset) -> xr.Dataset:
        """Of data the part."""
        if self.shown is not None:
            return data.isel(cell=self.shown.cells)
        return data.sel(self.labels, drop=True)


def parts(data: xr.Dataset, by: By, conditions: Sequence[Shown]) -> list[Part]:
    """The parts of data in which something was measured."""
    if not data:
        return []
    if by is None:
        found = [Part("")]
    elif by == CONDITIONS:
        found = [Part(one.label, shown=one) for one in conditions]
    elif isinstance(by, str):
        dim = by.replace("_", " ")
        found = [
            Part(f"{dim} {label}" if str(label).isdigit() else name_of(label), {by: label})
            for label in data[by].to_numpy().tolist()
        ]
    else:
        found = [
            Part(name, labels)
            for name, labels in by.items()
            if all(label in data[dim] for dim, label in labels.items())
        ]
    return [part for part in found if has_values(part.of(data))]


def has_values(data: xr.Dataset) -> bool:
    """Whether anything was measured."""
    known = [data["value"]] if "value" in data else data.data_vars.values()
    return any(bool(one.notnull().any()) for one in known)


def over_cells(data: xr.Dataset) -> xr.Dataset:
    """The mean `value` of cells, from `low` to `high`.

    That is Student's t interval over seeds; of two seeds both of them, of a single one its own
    interval over examples, if it has one.
    """
    cells = data["value"].transpose(..., "cell").astype(float)
    n = cells.notnull().sum("cell")
    ends = {"low": cells.min("cell"), "high": cells.max("cell")}
    mean, *student = (ends["low"].copy(data=one) for one in probes.over_seeds(cells.to_numpy()))
    for (name, end), wide in zip(ends.items(), student, strict=True):
        own = data[name].min("cell").fillna(end) if name in data else end
        ends[name] = wide.where(n > 2, end).where(n > 1, own)
    return xr.Dataset({"value": mean} | ends)


def grid(
    n_rows: int, n_columns: int, *, width: float = 3.1, height: float = 2.7, share: Any = True
) -> tuple[Figure, np.ndarray]:
    """A figure with panels [row, column], beside which a legend has room.

    pyplot does not know of it: whoever drops it need not close it.
    """
    size = (width * n_columns + LEGEND + 0.4, height * n_rows)
    figure = Figure(size, layout="constrained")
    return figure, figure.subplots(n_rows, n_columns, sharex=share, sharey=share, squeeze=False)


@dataclass(frozen=True)
class Panel:
    """Where data is drawn: what there is at its row and column, and whose it is, if one's."""

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
    """A figure with a panel for each row and column, and all of them, those of a row together.

    Without anything measured there is no figure. `size` is that of `grid`.
    """
    down, across = (parts(data, by, conditions) for by in (rows, columns))
    if not down or not across:
        return None, []
    figure, axes = grid(len(down), len(across), **size)
    for part, axis in zip(across, axes[0], strict=True):
        axis.set_title(part.name, fontsize=9)
    for part, axis in zip(down, axes[:, 0], strict=True):
        axis.set_ylabel(f"{ylabel}\n{part.name}".strip(), fontsize=SMALL)
    return figure, [
        Panel(axis, column.of(row.of(data)), column.shown or row.shown)
        for row, line in zip(down, axes, strict=True)
        for column, axis in zip(across, line, strict=True)
    ]


def legend_beside(figure: Figure) -> None:
    """One legend for all panels, to their right, each label once."""
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        look: Any = {"loc": "outside right center", "frameon": False, "fontsize": SMALL}
        legend = figure.legend(list(handles.values()), list(handles), **look)
        # Long labels take no room from the panels.
        width = legend.get_window_extent().width / figure.dpi
        figure.set_figwidth(figure.get_figwidth() + max(0, width - LEGEND))


def finished(
    figure: Figure | None, *, ylim: tuple[float, float] | None = None, log: str = ""
) -> Figure | None:
    """A figure whose panels share their axes, with its legend.

    Args:
        figure: that is drawn; None if there is none.
        ylim: the ends of the y-axis.
        log: the axes that are logarithmic: `x`, `y` or `xy`.
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
