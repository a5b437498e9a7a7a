"""Plots of the contextual-retrieval study: which retrievals searches use, network by network."""

from __future__ import annotations

from itertools import product

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from studies.report.panels import grid, has_values, shown_conditions

MOST = 6
"""Networks in a figure."""


def pairing(result: xr.DataTree) -> Figure | None:
    """Mean value scores given the preference, pooled whatever it is: a row for each network.

    The model's searches and retrievals stand in the order of the true ones whose parts they were
    given on id, so that a network that pairs rightly shows diagonals. White: preferences that a
    split lacks. Of more than `MOST` networks the first are drawn; None where none pairs.
    """
    if "pairing" not in result.children:
        return None
    data = result["pairing"].to_dataset()
    shown = [one for one in shown_conditions(result) if has_values(data["entropy"], one)]
    networks = [(one.label, cell) for one in shown for cell in one.cells][:MOST]
    panels = list(product(data["search"].to_numpy(), data["group"].to_numpy()))
    figure, axes = grid(len(networks), len(panels), width=1.7, height=2.1, share=False)
    for row, (label, cell) in zip(axes, networks, strict=True):
        one = data.isel(cell=cell).sel(fitted="id", control="observed")
        searches, columns = _order(one["search_assignment"]), _order(one["retrieval_assignment"])
        one = one.isel(model_retrieval=columns, true_retrieval=range(len(columns)))
        for axis, (search, split) in zip(row, panels, strict=True):
            here, rows = one.sel(group=split, search=search), range(len(columns))
            table = here["activation"]
            if search == "pooled":
                table, rows = here["pairing"].isel(model_search=searches), searches
            axis.imshow(table, vmin=0, vmax=1, cmap="Blues")
            agrees = f"agrees {here['agreement'].item():.0%}"
            axis.set_title(f"search {search}, {split}\n{agrees}", fontsize=8)
            axis.set_xticks(range(len(columns)), columns, fontsize=6)
            axis.set_yticks(range(len(table)), rows, fontsize=6)
        seed = data["seed"].to_numpy()[cell]
        row[0].set_ylabel(f"{label}, seed {seed}\npreference", fontsize=8)
        row[-1].set_xlabel("model's retrieval", fontsize=8)
    return figure


def _order(assignment: xr.DataArray) -> list[int]:
    """The model's indices in the order of their true counterparts, then those without."""
    known = assignment.to_numpy()[np.isfinite(assignment.to_numpy())].astype(int).tolist()
    order = [one for one in known if one >= 0]
    return order + [one for one in range(len(known)) if one not in order]
