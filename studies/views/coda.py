"""Plots of the quasi-attention study: single matrices, weights, and functions and centrings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from studies.engine import Reading
from studies.engine.readings import conditions_of
from studies.report.panels import grid, legend_beside, shown_conditions

MATRICES = {"affinity_matrix": "E, centred", "gate_matrix": "gate of N", "pattern": "M"}
MAPS = (("affinity", "gate"), ("affinity_centring", "gate_centring"))
"""Rows and columns of the maps of the ablation."""

MOST_IN_ROW = 6


def only(
    result: xr.DataTree, *, view: Callable[[xr.DataTree], Figure | None], **values: Any
) -> Figure | None:
    """A view of the conditions with these values, or that they do not apply to."""
    some = [one for one in conditions_of(result) if one.matches(values)]
    cells = [int(cell) for one in some for cell in one.cells]
    if not cells:
        return None
    groups = {name: group.to_dataset() for name, group in result.children.items()}
    part = xr.DataTree.from_dict(
        {name: one.isel(cell=cells) if "cell" in one.dims else one for name, one in groups.items()}
    )
    part.attrs = result.attrs
    return view(part)


def weights(result: xr.DataTree) -> Figure:
    """How weights are distributed on `ood`, everywhere; the outer bins hold what is beyond too."""
    shares = result["signs"]["distribution"].sel(scale="weights", split="ood")
    bins = shares["bin"].to_numpy()
    edges = np.append(bins, 2 * bins[-1] - bins[-2]) - (bins[1] - bins[0]) / 2
    conditions = shown_conditions(result)
    n_columns = min(len(conditions), MOST_IN_ROW)
    figure, axes = grid(-(-len(conditions) // n_columns), n_columns, width=2.2, height=2.2)
    for axis, one in zip(axes.flat, conditions, strict=False):
        mean = shares.isel(cell=one.cells).mean("cell")
        look = {"fill": True, "color": one.colour, "alpha": 0.8}
        axis.stairs(mean.sel(weights="trained"), edges, label="trained", **look)
        axis.stairs(mean.sel(weights="untrained"), edges, color="black", label="untrained")
        axis.set_title(one.label.replace(", ", "\n"), fontsize=8)
        axis.set(yscale="log", ylim=(1e-5, 1.5))
    for axis in axes.flat[len(conditions) :]:
        axis.set_axis_off()
    figure.supxlabel("attention weight", fontsize=8)
    figure.supylabel("share of weights", fontsize=8)
    legend_beside(figure, axes[:1, :1])
    return figure


def ablation(result: xr.DataTree, *, reading: Reading, title: str) -> Figure | None:
    """What is read, by functions and by centrings; the other two as the paper has them.

    A row for each alignment in which functions vary.
    """
    values, usual = reading.values(result), {"affinity": "tanh", "gate": "sigmoid"}
    usual |= {"affinity_centring": "none", "gate_centring": "none"}
    coda = [one for one in conditions_of(result) if one.values["model"] == "coda"]
    coda = [one for one in coda if not one.values["doubled"]]
    functions: dict[str, set[Any]] = {}
    for one in coda:
        found = functions.setdefault(one.values.get("alignment", "heads"), set())
        found.add((one.values["affinity"], one.values["gate"]))
    rows = [alignment for alignment, found in functions.items() if len(found) > 1]
    if not rows:
        return None
    figure, axes = grid(len(rows), len(MAPS), width=4, height=3, share=False)
    means = [values[one.cells].mean() for one in coda]
    for row, alignment in zip(axes, rows, strict=True):
        for axis, names in zip(row, MAPS, strict=True):
            fixed = {name: value for name, value in usual.items() if name not in names}
            table: dict[tuple[str, str], float] = {}
            for one, mean in zip(coda, means, strict=True):
                if one.values.get("alignment", "heads") == alignment and one.matches(fixed):
                    table[one.values[names[0]], one.values[names[1]]] = mean
            y, x = (list(dict.fromkeys(key[side] for key in table)) for side in (0, 1))
            found = np.array([[table.get((a, b), np.nan) for b in x] for a in y])
            heat(axis, found, y, x, limits=(min(means), max(means)), style="{:.3f}")
            axis.set(ylabel=names[0].replace("_", " "), xlabel=names[1].replace("_", " "))
            axis.set_title(f"{alignment}: {title}", fontsize=8)
    return figure


def matrices(result: xr.DataTree) -> Figure | None:
    """E, its gate, M, and the planted signs of an example with most queries: the paper's Figure 2.

    Of the model with the highest accuracy on `id`, the head whose M is largest; where signs are
    planted, of all models within a percent of it that whose M correlates most with them.
    """
    if "matrices" not in result.children:
        return None
    data, pairs = result["matrices"].to_dataset(), ("example", "query_pos", "key_pos")
    right = result["scores"]["accuracy"].sel(split="id", group="all")
    strength, within = abs(data["pattern"]).mean(pairs), 0.0
    if "sign" in data:
        strength, within = abs(xr.corr(data["pattern"], data["sign"], pairs)), 0.01
    kept = (data["chosen"] == 1) & strength.notnull().any(("layer", "head"))
    strength = strength.where(kept & (right >= right.where(kept).max() - within)).fillna(0)
    place = strength.stack(place=("cell", "layer", "head")).idxmax("place").item()
    one = data.sel(dict(zip(("cell", "layer", "head"), place, strict=True)))
    there = one["affinity_matrix"].notnull()
    one = one.isel(example=int(there.any("key_pos").sum("query_pos").to_numpy().argmax()))
    there = one["affinity_matrix"].notnull()
    one = one.isel(query_pos=there.any("key_pos"), key_pos=there.any("query_pos"))
    names = [name for name in (*MATRICES, "sign") if name in one]
    n_queries, n_keys = one.sizes["query_pos"], one.sizes["key_pos"]
    n_rows, n_columns = (len(names), 1) if n_keys > 9 else (-(-len(names) // 2), 2)
    figure, axes = grid(
        n_rows, n_columns, width=1.2 + 0.45 * n_keys, height=1 + 0.3 * n_queries, share=False
    )
    for axis, name in zip(axes.flat, names, strict=False):
        found = one[name].transpose("query_pos", "key_pos").to_numpy()
        heat(axis, found, one["query"].to_numpy(), one["key"].to_numpy(), style="{:.2f}")
        axis.set_title(MATRICES.get(name, "planted sign"), fontsize=9)
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    cell = data["cell"].to_numpy().tolist().index(place[0])
    label = next(some.label for some in shown_conditions(result) if cell in some.cells)
    told = f"{label}; {100 * right[cell]:.1f}% right on id; layer {place[1]}, head {place[2]}"
    figure.suptitle(told, fontsize=9)
    return figure


def heat(
    axis: Any,
    values: np.ndarray,
    y: Any,
    x: Any,
    *,
    style: str,
    limits: tuple[float, float] | None = None,
) -> None:
    """A matrix with its numbers; without limits, colours are symmetric about 0."""
    top = float(np.nanmax(np.abs(values)))
    low, high = limits or (-top, top)
    image = axis.imshow(
        values, vmin=low, vmax=high, cmap="viridis" if limits else "RdBu", aspect="auto"
    )
    axis.set_xticks(range(len(x)), x, fontsize=8)
    axis.set_yticks(range(len(y)), y, fontsize=8)
    for row, column in np.argwhere(np.isfinite(values)):
        red, green, blue, _ = image.to_rgba(values[row, column])
        colour = "white" if 0.3 * red + 0.6 * green + 0.1 * blue < 0.5 else "black"
        text = style.format(values[row, column])
        axis.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)
