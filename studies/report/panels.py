"""What all plots share: data, panels, conditions with their names and colours, means and bars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import probes
from studies.engine.readings import conditions_of, varied
from studies.report.names import MARKERS, colour_of, name_of, names_of_settings

SMALL = 8
"""The size of letters beside panels."""

LEGEND = 1.4
"""The width of a legend that figures have room for, in inches."""


@dataclass(frozen=True)
class Shown:
    """A condition as it is drawn: its values by coordinate (None: does not apply), its cells, the
    values that differ between conditions in words, and its colour and marker."""

    values: dict[str, Any]
    cells: Int[np.ndarray, " cell"]
    label: str
    colour: str
    marker: str


def shown_conditions(result: xr.DataTree, *, but: tuple[str, ...] = ()) -> list[Shown]:
    """The conditions of a result in order; labels leave out the coordinates `but`."""
    conditions, shown = conditions_of(result), []
    names = [name for name in varied(result) if name not in but]
    alone = len({one.values["model"] for one in conditions}) == len(conditions)
    for number, one in enumerate(conditions):
        label = ", ".join(names_of_settings(one.values, names))
        colour = colour_of(one.values["model"] if alone else "", number)
        marker = MARKERS[number % len(MARKERS)]
        shown.append(Shown(dict(one.values), one.cells, label, colour, marker))
    return shown


def data_of(
    result: xr.DataTree, group: str, variable: str, select: Mapping[str, Any] | None = None
) -> xr.Dataset | None:
    """A group of a result at labels of dims, several of which keep their dim; None: not measured.

    What the group does not have of `select` is passed over.
    """
    if group not in result.children or variable not in result[group].data_vars:
        return None
    data = result[group].to_dataset()
    for dim, label in (select or {}).items():
        if dim in data.dims and isinstance(label, list | tuple):
            data = data.isel({dim: data[dim].isin(label).to_numpy().nonzero()[0]})
        elif dim in data.dims:
            data = data.sel({dim: label})
    return data


def parts_of(data: xr.Dataset | None, dim: str | None) -> dict[Any, xr.Dataset]:
    """Data by the labels of a dim; without a dim all of it, by None; without data nothing."""
    if data is None or dim is None:
        return {} if data is None else {None: data}
    return {label: data.sel({dim: label}) for label in data[dim].to_numpy().tolist()}


def grid(
    n_rows: int, n_columns: int, *, width: float = 3.1, height: float = 2.7, share: Any = True
) -> tuple[Figure, np.ndarray]:
    """A figure with panels [row, column], beside which a legend has room.

    pyplot does not know of it: whoever drops it need not close it.
    """
    size = (width * n_columns + LEGEND + 0.4, height * n_rows)
    figure = Figure(size, layout="constrained")
    return figure, figure.subplots(n_rows, n_columns, sharex=share, sharey=share, squeeze=False)


def condition_panels(
    result: xr.DataTree, rows: Mapping[str, xr.Dataset], variable: str | None = None, **size: Any
) -> tuple[Figure | None, list[tuple[Axes, xr.Dataset, Shown]]]:
    """A figure with a column for each condition that has a variable, and rows by their names.

    Also gives the axes, data and condition of each panel. Without panels there is no figure.
    """
    conditions = [
        one
        for one in shown_conditions(result)
        if any(variable is None or has_values(data[variable], one) for data in rows.values())
    ]
    if not conditions:
        return None, []
    figure, axes = grid(len(rows), len(conditions), **size)
    for one, axis in zip(conditions, axes[0], strict=True):
        axis.set_title(one.label, fontsize=9)
    for name, axis in zip(rows, axes[:, 0], strict=True):
        axis.set_ylabel(name, fontsize=SMALL)
    places = zip(axes.flat, product(rows.values(), conditions), strict=True)
    return figure, [(axis, data, one) for axis, (data, one) in places]


def named_rows(
    data: xr.Dataset | None, rows: str | None, ylabel: str = ""
) -> dict[str, xr.Dataset]:
    """Data by what is written beside its row of panels: what is drawn, and the row's label."""
    found = {}
    for label, part in parts_of(data, rows).items():
        name = f"{rows} {label}" if str(label).isdigit() else name_of(label)
        found[ylabel if label is None else f"{ylabel}\n{name}".strip()] = part
    return found


def legend_beside(figure: Figure, axes: np.ndarray, **more: Any) -> None:
    """One legend for all panels, to their right, each label once."""
    handles: dict[str, Any] = {}
    for axis in axes.ravel():
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        look = {"loc": "outside right center", "frameon": False, "fontsize": SMALL} | more
        legend = figure.legend(list(handles.values()), list(handles), **look)
        # Long labels take no room from the panels.
        width = legend.get_window_extent().width / figure.dpi
        figure.set_figwidth(figure.get_figwidth() + max(0, width - LEGEND))


def finished(
    figure: Figure,
    *,
    ylabel: str | None = None,
    ylim: tuple[float, float] | None = None,
    log_x: bool = False,
    log_y: bool = False,
) -> Figure:
    """A figure of panels that share axes, with its legend, and what is said of the y-axis."""
    first = figure.axes[0]
    if ylabel is not None:
        first.set_ylabel(ylabel, fontsize=SMALL)
    if ylim is not None:
        first.set_ylim(*ylim)
    # Setting a linear scale would take names under the axis away.
    if log_x:
        first.set_xscale("log", base=2)
        first.xaxis.set_major_formatter("{x:g}")
    if log_y:
        first.set_yscale("log")
    legend_beside(figure, np.array(figure.axes))
    return figure


def has_values(data: xr.DataArray, one: Shown) -> bool:
    """Whether anything was measured in a condition."""
    return bool(np.isfinite(data.isel(cell=one.cells)).any())


def mean_and_bars(
    data: xr.Dataset, name: str, one: Shown
) -> tuple[Float[np.ndarray, ...], Float[np.ndarray, "end ..."]]:
    """The mean of a variable [cell, ...] in a condition, and how far its interval reaches.

    Of several seeds Student's t interval of their mean; of one its own, over examples.
    """
    here = data.isel(cell=one.cells)
    values = here[name].transpose("cell", ...).to_numpy().astype(float)
    if len(values) == 1 and f"{name}_low" in data:
        mean = values[0]
        low, high = (here[f"{name}_{end}"].isel(cell=0).to_numpy() for end in ("low", "high"))
    else:
        mean, low, high = probes.over_seeds(np.moveaxis(values, 0, -1))
    return mean, np.maximum(np.nan_to_num(np.stack([mean - low, high - mean])), 0)


def draw_along(
    axis: Axes, data: xr.Dataset, variable: str, along: str, one: Shown, **look: Any
) -> None:
    """The mean of a condition along a dim, by its labels; what is not known is left out."""
    mean, ends = mean_and_bars(data, variable, one)
    labels = data[along].to_numpy() if along in data.coords else np.arange(len(mean))
    places, known = labels, np.isfinite(mean)
    if labels.dtype.kind not in "if":
        # Names have their places, known or not.
        places, names = np.arange(len(labels)), [name_of(label) for label in labels]
        turned = 90 if max(map(len, names)) > 12 else 0
        axis.set_xticks(places, names, fontsize=7, rotation=turned)
        axis.set_xlim(-0.5, len(labels) - 0.5)
    look = {"color": one.colour, "marker": one.marker, "ms": 3} | look
    axis.errorbar(places[known], mean[known], yerr=ends[:, known], **look)
    axis.set_xlabel(along.replace("_", " "))
