"""What all plots share: panels, conditions with their names and colours, means and bars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from matplotlib.figure import Figure

import probes
from studies.engine.readings import conditions_of, varied
from studies.report.names import colour_of, setting_name


@dataclass(frozen=True)
class Shown:
    """A condition as it is drawn.

    Attributes:
        values: by coordinate, None where one does not apply.
        cells: numbers of its cells.
        label: its values that differ between conditions.
        colour: that of its model, or of its own where models do not differ.
    """

    values: dict[str, Any]
    cells: Int[np.ndarray, " cell"]
    label: str
    colour: str


def shown_conditions(result: xr.DataTree, *, but: tuple[str, ...] = ()) -> list[Shown]:
    """The conditions of a result with their labels and colours, in order.

    Args:
        result: of a study.
        but: coordinates that labels leave out.
    """
    names, found = varied(result), []
    conditions = conditions_of(result)
    alone = len({one.values["model"] for one in conditions}) == len(conditions)
    for number, one in enumerate(conditions):
        parts = [
            setting_name(name, value)
            for name in names
            if name not in but and (value := one.values[name]) is not None
        ]
        colour = colour_of(one.values["model"]) if alone else colour_of("", number)
        found.append(Shown(dict(one.values), one.cells, ", ".join(filter(None, parts)), colour))
    return found


def grid(
    n_rows: int, n_columns: int, *, width: float = 3.1, height: float = 2.7, share: Any = True
) -> tuple[Figure, np.ndarray]:
    """A figure with panels [row, column], beside which a legend has room."""
    return plt.subplots(
        n_rows,
        n_columns,
        figsize=(width * n_columns + 1.8, height * n_rows),
        sharex=share,
        sharey=share,
        squeeze=False,
        layout="constrained",
    )


def legend_beside(figure: Figure, axes: np.ndarray, **more: Any) -> None:
    """One legend for all panels, to their right, each label once."""
    handles: dict[str, Any] = {}
    for axis in axes.ravel():
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        figure.legend(
            list(handles.values()),
            list(handles),
            loc="outside right center",
            frameon=False,
            fontsize=8,
            **more,
        )


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
