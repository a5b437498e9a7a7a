"""Plots of the quasi-attention studies: training, weights, the ablation, matrices of examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import probes
from studies.engine import Reading
from studies.engine.readings import conditions_of
from studies.measures.coda import QUANTITIES
from studies.report import drawings, plots
from studies.report.names import name_of, setting_names
from studies.report.panels import CONDITIONS, SMALL, Data, grid, shown_conditions, values, values_of
from studies.report.plots import by_settings
from studies.setups.quasi_attention import LIMITS

BASIC = {"affinity": "tanh", "gate": "sigmoid"}
BASIC |= {"affinity_centring": "none", "gate_centring": "none", "doubled": False}
"""The paper's settings of CoDA."""

FACTORS = ("alpha", "beta", "scaled", "projection")
"""Further settings of CoDA."""

MATRICES = {
    "affinity_matrix": "E",
    "gate_matrix": "gate of N",
    "pattern": "M",
    "sign": "planted sign",
}
"""Titles of what the figure of matrices shows."""


def at_split(position: int, data: Data) -> Data:
    """Data of the split at a position: 0 the first one, -1 the last one."""

    def take(result: xr.DataTree) -> xr.Dataset:
        table = data(result)
        return table.isel(split=position, drop=True) if table else table

    return take


def saturated(result: xr.DataTree) -> xr.Dataset:
    """The share of E and N beyond their limits, along training."""
    shares = values("saturation_along_training", "saturated_mean")(result)
    if not shares:
        return shares
    named = {"affinity": "E", "dissimilarity": "N"}
    limits = [f"{named[name]}, limits ±{LIMITS[name]:g}" for name in shares["quantity"].to_numpy()]
    sides = [
        {"low": "below the lower", "high": "above the upper"}[side]
        for side in shares["side"].to_numpy()
    ]
    return shares.assign_coords(quantity=limits, side=sides)


DRAWN: Mapping[str, Callable[[xr.DataTree], Figure | None]] = {
    "training": partial(
        plots.training,
        metric="accuracy",
        references={"chance": values("scores", "accuracy_chance", group="all")},
    ),
    "saturation": partial(
        plots.lines,
        data=at_split(0, saturated),
        along="train_step",
        rows="side",
        columns="quantity",
        lines=CONDITIONS,
        ylabel="share of pairs",
        ylim=(-0.02, 1.02),
    ),
    "weights": partial(
        drawings.pictures,
        data=at_split(-1, values("signs", "distribution", scale="weights")),
        mean="distribution",
        rows={"share of weights": {}},
        draw=probes.plots.distribution,
    ),
}
"""What all these studies draw."""

MAPS = (("affinity", "gate"), ("affinity_centring", "gate_centring"))
"""Rows and columns of the ablation's heat maps."""

MOST_KEYS_BESIDE = 9
"""The most keys of matrices that are side by side."""


def ablation(result: xr.DataTree, *, reading: Reading, title: str) -> Figure | None:
    """Heat maps of a reading by composition functions and by centrings, the others as in `BASIC`.

    One row for each combination of all other settings, such as the alignment, with more than one
    pair of functions; no column for centrings where there is only one. None if there is no row.
    """
    models = [c for c in conditions_of(result) if c.values["model"] == "coda"]
    names = [name for name in models[0].values if name not in BASIC] if models else []
    maps: dict[str, list[xr.DataArray]] = {}
    for model in models:
        others = {name: model.values[name] for name in names}
        if any(model.values.get(name, value) != value for name, value in BASIC.items()):
            continue
        for y, x in MAPS:
            fixed = {name: value for name, value in BASIC.items() if name not in (y, x)} | others
            cells = [c.cells for c in models if fixed.items() <= c.values.items()]
            table = by_settings(values_of({title: reading}), y, x)(result)["value"]
            table = table.isel(cell=np.concatenate(cells), reading=0).mean("cell")
            table = table.dropna(y, how="all").dropna(x, how="all")
            alignment = str(others.get("alignment") or "heads")
            more = setting_names({name: others[name] for name in FACTORS if name in others})
            maps.setdefault(", ".join([alignment, *more]), []).append(table)
    maps = {name: tables for name, tables in maps.items() if tables[0].size > 1}
    if not maps:
        return None
    shown = [n for n in range(len(MAPS)) if any(tables[n].size > 1 for tables in maps.values())]
    maps = {name: [tables[n] for n in shown] for name, tables in maps.items()}
    means = np.concatenate([t.to_numpy().ravel() for tables in maps.values() for t in tables])
    limits = float(np.nanmin(means)), float(np.nanmax(means))
    figure, axes = grid(len(maps), len(shown), width=4, height=3, share=False)
    for row, (label, tables) in zip(axes, maps.items(), strict=True):
        for axis, table in zip(row, tables, strict=True):
            colours: Any = {"limits": limits, "cmap": "viridis"}
            probes.plots.matrix(table, axis, numbers="{:.3f}", **colours)
            axis.set(ylabel=name_of(table.dims[0]), xlabel=name_of(table.dims[1]))
            axis.set_title(f"{label}: {title}", fontsize=8)
    return figure


def matrices(result: xr.DataTree) -> Figure | None:
    """E, the gate, M and the planted signs of the example with most queries: the paper's Figure 2.

    Shows the head with the largest M in the model with the highest accuracy on the first split,
    `id` if there is one; with planted
    signs, the head whose M correlates most with them, in any model within one percent of it.
    """
    if "matrices" not in result.children:
        return None
    data = result["matrices"].to_dataset()
    kept = data["pattern"].notnull().any([dim for dim in data["pattern"].dims if dim != "cell"])
    accuracy = _accuracy(result).where(kept & (data["chosen"] == 1))
    candidates = accuracy >= accuracy.max() - (0.01 if "sign" in data else 0)
    head = probes.strongest_head(data, data["pattern"].where(candidates))
    shown = head[[name for name in MATRICES if name in head]]
    shown = shown.assign_coords(query_pos=head["query"], key_pos=head["key"])
    cell = data["cell"].to_numpy().tolist().index(head["cell"].item())
    label = next(c.label for c in shown_conditions(result) if cell in c.cells)
    where = f"layer {head['layer'].item()}, head {head['head'].item()}"
    return _side_by_side(shown, title=f"{label}; {_right(accuracy[cell])}; {where}")


def _side_by_side(matrices: xr.Dataset, *, title: str) -> Figure:
    """Matrices [query_pos, key_pos] of an example, without padding; a long one fills a row."""
    matrices = matrices.dropna("query_pos", how="all").dropna("key_pos", how="all")
    n_queries, n_keys = matrices.sizes["query_pos"], matrices.sizes["key_pos"]
    n_columns = 1 if n_keys > MOST_KEYS_BESIDE else 2
    n_rows = -(-len(matrices) // n_columns)
    size = n_columns * (1.2 + 0.45 * n_keys) + 1.8, n_rows * (1 + 0.3 * n_queries)
    figure = Figure(size, layout="constrained")
    for number, (name, matrix) in enumerate(matrices.items()):
        axis = figure.add_subplot(n_rows, n_columns, number + 1)
        matrix = matrix.transpose("query_pos", "key_pos")
        top = float(abs(matrix).max())
        probes.plots.matrix(matrix, axis, limits=(-top, top), numbers="{:.2f}")
        axis.set_title(MATRICES[str(name)], fontsize=9)
        axis.set(xlabel="", ylabel="")
    figure.suptitle(title, fontsize=9)
    return figure


def composition(result: xr.DataTree) -> Figure | None:
    """Matrices and distributions of tanh(E), the gate and M, early and late: the paper's Figure 2.

    Of the model with the highest accuracy on the first split, `id` if there is one, at its first
    and its last kept checkpoint.
    """
    name = "composition_along_training"
    if name not in result.children:
        return None
    data = result[name].to_dataset()
    measured = data["distribution"].notnull().all(("train_step", "quantity", "bin"))
    accuracy = _accuracy(result).where(measured & (data["chosen"] == 1))
    if not accuracy.notnull().any():
        return None
    cell = int(accuracy.argmax("cell"))
    data = data.isel(cell=cell)
    steps = data["train_step"].to_numpy()[[0, -1]]
    figure, axes = grid(4, len(QUANTITIES), width=3.6, height=2.4, share=False)
    for row, step in zip((0, 2), steps, strict=True):
        for column, (quantity, title) in enumerate(QUANTITIES.items()):
            one = data.sel(train_step=step, quantity=quantity)
            _draw_words(axes[row, column], one)
            axes[row, column].set_title(f"{title} after {step} steps", fontsize=8)
            axis = axes[row + 1, column]
            probes.plots.distribution(one[["distribution"]], axis)
            axis.tick_params(labelsize=6)
            axis.set_xlabel(title, fontsize=SMALL)
            axis.set_ylabel("share of pairs" if column == 0 else "", fontsize=SMALL)
        figure.colorbar(axes[row, -1].images[0], ax=axes[row, -1], fraction=0.05)
    label = next(c.label for c in shown_conditions(result) if cell in c.cells)
    figure.suptitle(f"{label}; {_right(accuracy[cell])}", fontsize=9)
    return figure


def _accuracy(result: xr.DataTree) -> xr.DataArray:
    """The accuracy of each cell on the first split."""
    return result["scores"].to_dataset()["accuracy"].sel(group="all").isel(split=0)


def _right(accuracy: xr.DataArray) -> str:
    return f"{100 * accuracy.item():.1f}% right on {accuracy['split'].item()}"


def _draw_words(axis: Axes, data: xr.Dataset) -> None:
    """Draw a matrix in [-1, 1] with the words of queries and keys."""
    matrix = data["matrix"].assign_coords(query_pos=data["query"], key_pos=data["key"])
    matrix = matrix.dropna("query_pos", how="all").dropna("key_pos", how="all")
    probes.plots.matrix(matrix.transpose("query_pos", "key_pos"), axis, limits=(-1.0, 1.0))
    axis.set(xlabel="", ylabel="")
