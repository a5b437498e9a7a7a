"""Plots of the quasi-attention study: single matrices, and functions and centrings."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

import probes
from studies.engine import Reading
from studies.engine.readings import conditions_of
from studies.report.names import name_of
from studies.report.panels import grid, shown_conditions, values_of
from studies.report.plots import by_settings

BASIC = {"affinity": "tanh", "gate": "sigmoid"}
BASIC |= {"affinity_centring": "none", "gate_centring": "none", "doubled": False}
"""CoDA's settings as the paper has them."""

MAPS = (("affinity", "gate"), ("affinity_centring", "gate_centring"))
"""Rows and columns of the maps of the ablation."""


def ablation(result: xr.DataTree, *, reading: Reading, title: str) -> Figure | None:
    """What is read, by functions and by centrings; the other two as the paper has them.

    A row for each alignment in which functions vary.
    """
    maps: dict[str, list[xr.DataArray]] = {}
    for alignment in dict.fromkeys(one.values.get("alignment") for one in conditions_of(result)):
        for y, x in MAPS:
            fixed = {name: value for name, value in BASIC.items() if name not in (y, x)}
            fixed |= {"model": "coda", "alignment": alignment}
            cells = [one.cells for one in conditions_of(result) if one.matches(fixed)]
            table = by_settings(values_of({title: reading}), y, x)(result)["value"]
            table = table.isel(cell=np.concatenate(cells), reading=0).mean("cell")
            known = table.dropna(y, how="all").dropna(x, how="all")
            maps.setdefault(alignment or "heads", []).append(known)
    maps = {name: tables for name, tables in maps.items() if tables[0].size > 1}
    if not maps:
        return None
    numbers = np.concatenate([one.to_numpy().ravel() for some in maps.values() for one in some])
    limits = float(np.nanmin(numbers)), float(np.nanmax(numbers))
    figure, axes = grid(len(maps), len(MAPS), width=4, height=3, share=False)
    for row, (alignment, tables) in zip(axes, maps.items(), strict=True):
        for axis, table in zip(row, tables, strict=True):
            probes.draw_numbers(axis, table, limits=limits, style="{:.3f}")
            axis.set(ylabel=name_of(table.dims[0]), xlabel=name_of(table.dims[1]))
            axis.set_title(f"{alignment}: {title}", fontsize=8)
    return figure


def matrices(result: xr.DataTree) -> Figure | None:
    """E, its gate, M, and the planted signs of an example with most queries: the paper's Figure 2.

    Of the model with the highest accuracy on `id`, the head whose M is largest; where signs are
    planted, of all models within a percent of it that whose M correlates most with them.
    """
    if "matrices" not in result.children:
        return None
    data = result["matrices"].to_dataset()
    known = data["pattern"].notnull().any([dim for dim in data["pattern"].dims if dim != "cell"])
    right = result["scores"]["accuracy"].sel(split="id", group="all")
    right = right.where(known & (data["chosen"] == 1))
    near = right >= right.max() - (0.01 if "sign" in data else 0)
    one = probes.strongest_head(data, data["pattern"].where(near))
    names = ["affinity_matrix", "gate_matrix", "pattern", "sign"]
    shown = one[[name for name in names if name in one]]
    shown = shown.assign_coords(query_pos=one["query"], key_pos=one["key"])
    cell = data["cell"].to_numpy().tolist().index(one["cell"].item())
    label = next(some.label for some in shown_conditions(result) if cell in some.cells)
    where = f"layer {one['layer'].item()}, head {one['head'].item()}"
    percent = 100 * right[cell].item()
    return probes.draw_matrices(shown, title=f"{label}; {percent:.1f}% right on id; {where}")
