"""Plots of the quasi-attention study: the ablation, and matrices of single examples."""

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
"""The paper's settings of CoDA."""

MAPS = (("affinity", "gate"), ("affinity_centring", "gate_centring"))
"""Rows and columns of the ablation's heat maps."""


def ablation(result: xr.DataTree, *, reading: Reading, title: str) -> Figure | None:
    """Heat maps of a reading by composition functions and by centrings, the others as in `BASIC`.

    One row for each alignment with more than one pair of functions; None if there is none.
    """
    maps: dict[str, list[xr.DataArray]] = {}
    for alignment in dict.fromkeys(c.values.get("alignment") for c in conditions_of(result)):
        for y, x in MAPS:
            fixed = {name: value for name, value in BASIC.items() if name not in (y, x)}
            fixed |= {"model": "coda", "alignment": alignment}
            cells = [c.cells for c in conditions_of(result) if c.matches(fixed)]
            table = by_settings(values_of({title: reading}), y, x)(result)["value"]
            table = table.isel(cell=np.concatenate(cells), reading=0).mean("cell")
            table = table.dropna(y, how="all").dropna(x, how="all")
            maps.setdefault(alignment or "heads", []).append(table)
    maps = {name: tables for name, tables in maps.items() if tables[0].size > 1}
    if not maps:
        return None
    means = np.concatenate([t.to_numpy().ravel() for tables in maps.values() for t in tables])
    limits = float(np.nanmin(means)), float(np.nanmax(means))
    figure, axes = grid(len(maps), len(MAPS), width=4, height=3, share=False)
    for row, (alignment, tables) in zip(axes, maps.items(), strict=True):
        for axis, table in zip(row, tables, strict=True):
            probes.draw_numbers(axis, table, limits=limits, style="{:.3f}")
            axis.set(ylabel=name_of(table.dims[0]), xlabel=name_of(table.dims[1]))
            axis.set_title(f"{alignment}: {title}", fontsize=8)
    return figure


def matrices(result: xr.DataTree) -> Figure | None:
    """E, the gate, M and the planted signs of the example with most queries: the paper's Figure 2.

    Shows the head with the largest M in the model with the highest accuracy on `id`; with planted
    signs, the head whose M correlates most with them, in any model within one percent of it.
    """
    if "matrices" not in result.children:
        return None
    data = result["matrices"].to_dataset()
    kept = data["pattern"].notnull().any([dim for dim in data["pattern"].dims if dim != "cell"])
    accuracy = result["scores"]["accuracy"].sel(split="id", group="all")
    accuracy = accuracy.where(kept & (data["chosen"] == 1))
    candidates = accuracy >= accuracy.max() - (0.01 if "sign" in data else 0)
    head = probes.strongest_head(data, data["pattern"].where(candidates))
    names = ["affinity_matrix", "gate_matrix", "pattern", "sign"]
    shown = head[[name for name in names if name in head]]
    shown = shown.assign_coords(query_pos=head["query"], key_pos=head["key"])
    cell = data["cell"].to_numpy().tolist().index(head["cell"].item())
    label = next(c.label for c in shown_conditions(result) if cell in c.cells)
    where = f"layer {head['layer'].item()}, head {head['head'].item()}"
    percent = 100 * accuracy[cell].item()
    return probes.draw_matrices(shown, title=f"{label}; {percent:.1f}% right on id; {where}")
