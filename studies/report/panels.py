"""What all plots share: data, panels, conditions with their names and colours, means and bars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Shown:
    """A condition as it is drawn.

    Attributes:
        values: by coordinate, None where one does not apply.
        cells: numbers of its cells.
        label: its values that differ between conditions.
        colour: that of its model, or of its own where models do not differ.
        marker: of its own.
    """

    values: dict[str, Any]
    cells: Int[np.ndarray, " cell"]
    label: str
    colour: str
    marker: str


def shown_conditions(result: xr.DataTree, *, but: tuple[str, ...] = ()) -> list[Shown]:
    """The conditions of a result with their labels and colours, in order.

    Args:
        result: of a study.
        but: coordinates that labels leave out.
    """
    names, found = [name for name in varied(result) if name not in but], []
    conditions = conditions_of(result)
    alone = len({one.values["model"] for one in conditions}) == len(conditions)
    for number, one in enumerate(conditions):
        label = ", ".join(names_of_settings(one.values, names))
        colour = colour_of(one.values["model"] if alone else "", number)
        marker = MARKERS[number % len(MARKERS)]
        found.append(Shown(dict(one.values), one.cells, label, colour, marker))
    return found


def data_of(
    result: xr.DataTree, group: str, variable: str, select: Mapping[str, Any] | None = None
) -> xr.Dataset | None:
    """A group of a result that has a variable, None where there is none.

    Args:
        result: of a study.
        group, variable: names.
        select: labels of dims; several keep their dim. Other dims and labels are passed over.
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


def labels_of(data: xr.Dataset, dim: str | None) -> list[Any]:
    """The labels of a dim; of none, None."""
    return [None] if dim is None else data[dim].to_numpy().tolist()


def grid(
    n_rows: int, n_columns: int, *, width: float = 3.1, height: float = 2.7, share: Any = True
) -> tuple[Figure, np.ndarray]:
    """A figure with panels [row, column], beside which a legend has room.

    pyplot does not know of it: whoever drops it need not close it.
    """
    figure = Figure((width * n_columns + 1.8, height * n_rows), layout="constrained")
    return figure, figure.subplots(n_rows, n_columns, sharex=share, sharey=share, squeeze=False)


def condition_panels(
    result: xr.DataTree,
    data: xr.Dataset | None,
    variable: str,
    *,
    rows: str | None,
    ylabel: str,
    **size: Any,
) -> tuple[Figure, list[tuple[Axes, xr.Dataset, Shown]]] | None:
    """A column of panels for each condition, a row for each label of the dim `rows`.

    Returns:
        The figure, and for each panel its axes, data and condition; None where nothing was
        measured.
    """
    if data is None:
        return None
    conditions = [one for one in shown_conditions(result) if has_values(data[variable], one)]
    if not conditions:
        return None
    labels, panels = labels_of(data, rows), []
    figure, axes = grid(len(labels), len(conditions), **size)
    for one, axis in zip(conditions, axes[0], strict=True):
        axis.set_title(one.label, fontsize=9)
    for label, row in zip(labels, axes, strict=True):
        name = f"{rows} {label}" if str(label).isdigit() else name_of(label)
        named = ylabel if label is None else f"{ylabel}\n{name}"
        row[0].set_ylabel(named, fontsize=SMALL)
        part = data if rows is None else data.sel({rows: label})
        panels += [(axis, part, one) for axis, one in zip(row, conditions, strict=True)]
    return figure, panels


def legend_beside(figure: Figure, axes: np.ndarray, **more: Any) -> None:
    """One legend for all panels, to their right, each label once."""
    handles: dict[str, Any] = {}
    for axis in axes.ravel():
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        look = {"loc": "outside right center", "frameon": False, "fontsize": SMALL} | more
        figure.legend(list(handles.values()), list(handles), **look)


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
        first.set_xscale("log")
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
