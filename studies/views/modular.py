"""Plots of the modular-routing study: specialization, collapse, modules and paths."""

from __future__ import annotations

import functools

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from studies.report import plots
from studies.report.names import MARKERS
from studies.report.panels import grid, has_values, legend_beside, shown_conditions

of_paths = functools.partial(
    plots.profiles,
    group="paths",
    select={"split": "ood", "control": "trained"},
    ylabel="mean squared error, ood",
    log_y=True,
)
"""Losses of paths on held-out combinations, along a dim."""


def activation(result: xr.DataTree) -> Figure | None:
    """How often each operation is sent to each module, a row for each layer.

    Modules are in the order of the operations that they are assigned to, in each layer and network:
    one module for each operation gives a diagonal. The others follow, the most used ones first.
    """
    if "specialization" not in result.children:
        return None
    scores, result = result["specialization"].to_dataset(), result.copy()
    mine = scores["assignment"] == scores["module"]
    last = scores.sizes["operation"] + 1 - scores["utilisation"]
    rank = mine.argmax("operation").where(mine.any("operation"), last)
    order = rank.copy(data=np.argsort(rank.to_numpy(), axis=rank.get_axis_num("module")))
    shares, order = xr.broadcast(scores["activation"], order)
    axis = shares.get_axis_num("module")
    moved = np.take_along_axis(shares.to_numpy(), order.transpose(*shares.dims).to_numpy(), axis)
    scores = scores.assign(activation=shares.copy(data=moved))
    result["specialization"] = xr.DataTree(scores)
    return plots.matrices(
        result,
        group="specialization",
        variable="activation",
        y="operation",
        x="module",
        select={"split": "id"},
        rows="layer",
        shares=True,
        title="share of the operation (numbers: %)",
    )


def specialization(result: xr.DataTree) -> Figure | None:
    """Specialization against collapse of every network on `id`, a panel for each layer.

    Hollow: the same with operations dealt out anew. No network is right of the line: with M modules
    and |S| operations collapse is at most log |S| / log M + 1 - specialization.
    """
    if "specialization" not in result.children:
        return None
    data = result["specialization"].to_dataset().sel(split="id")
    known = data["specialization"].notnull().any(["cell", "control"]).to_numpy()
    layers = data["layer"].to_numpy()[known]
    figure, axes = grid(1, len(layers), height=3.2)
    for axis, layer in zip(axes[0], layers, strict=True):
        here = data.sel(layer=layer)
        for bound in _attainable(here):
            y = np.array([0.0, bound, 1.0])
            x = np.minimum(1, bound + 1 - y)
            axis.plot(x, y, color="black", lw=0.9, ls="--", label="attainable")
            star = {"ls": "", "marker": "*", "ms": 11, "color": "black", "mfc": "none"}
            axis.plot(bound, 1.0, label="a module for\neach operation", **star)
        for number, one in enumerate(shown_conditions(result)):
            if not has_values(here["specialization"], one):
                continue
            for control, filling in (("observed", one.colour), ("shuffled", "none")):
                points = here.sel(control=control).isel(cell=one.cells)
                axis.plot(
                    points["collapse"],
                    points["specialization"],
                    ls="",
                    marker=MARKERS[number % len(MARKERS)],
                    color=one.colour,
                    mfc=filling,
                    label=one.label if control == "observed" else None,
                )
        axis.set(xlim=(-0.03, 1.06), ylim=(-0.04, 1.06), xlabel="collapse (1: none)")
        axis.set_title("all layers" if layer == "pooled" else f"layer {layer}", fontsize=9)
    axes[0, 0].set_ylabel("specialization", fontsize=8)
    legend_beside(figure, axes)
    return figure


def _attainable(scores: xr.Dataset) -> list[float]:
    """The collapse of networks with a module for each operation: log |S| / log M, at most 1."""
    operations = (scores["seen"] > 0).sum("operation").to_numpy()
    modules = scores["utilisation"].notnull().sum("module").to_numpy()
    pairs = set(zip(operations.tolist(), modules.tolist(), strict=True))
    return sorted({min(1.0, float(np.log(n) / np.log(m))) for n, m in pairs if n and m > 1})
