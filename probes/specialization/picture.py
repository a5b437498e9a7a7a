"""Pictures of specialization: against collapse, and which module takes which operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

MARKERS = ("o", "s", "^", "D", "X", "v", "P", "*", "<", ">")

_LINE: dict[str, Any] = {"color": "black", "lw": 0.9, "ls": "--", "label": "attainable"}
_STAR: dict[str, Any] = {"color": "black", "marker": "*", "ms": 11, "mfc": "none", "ls": ""}


def draw_specialization(
    axes: Sequence[Axes],
    scores: Mapping[str, xr.Dataset],
    *,
    colours: Sequence[str] | None = None,
) -> None:
    """Draw specialization against collapse: a panel for each layer, a point for each network.

    Filled are the scores, hollow the control "shuffled", with operations dealt out anew. No network
    is right of the dashed line: with M modules and |S| operations that occur, collapse is at most
    log |S| / log M + 1 - specialization (Ostapenko et al. 2022, see `score_specialization`). The
    star on it is a module for each operation.

    Args:
        axes: one for each layer.
        scores: by the label of its points, what `score_specialization` gave: [control, layer], and
            further dims where several networks have the same label. The same layers in all. What is
            not finite is not drawn.
        colours: one for each label; matplotlib's by default.

    Raises:
        ValueError: numbers of axes or colours that do not fit.

    Example:
        `draw_specialization(plt.subplots(1, 3)[1], {"encoder": scores})`, of two layers and
        "pooled"
    """
    colours = [f"C{number}" for number in range(len(scores))] if colours is None else colours
    layers = [name for one in scores.values() for name in one["layer"].to_numpy().tolist()]
    layers = list(dict.fromkeys(layers))
    if len(axes) != len(layers) or len(colours) != len(scores):
        raise ValueError(
            f"axes and colours must be as many as layers and labels, {len(layers)} and "
            f"{len(scores)}, got {len(axes)} and {len(colours)}"
        )
    for axis, layer in zip(axes, layers, strict=True):
        here = {label: one.sel(layer=layer) for label, one in scores.items()}
        for bound in sorted({bound for one in here.values() for bound in _attainable(one)}):
            y = np.array([0.0, bound, 1.0])
            axis.plot(np.minimum(1, bound + 1 - y), y, **_LINE)
            axis.plot(bound, 1.0, **_STAR, label="a module for\neach operation")
        for number, (label, one) in enumerate(here.items()):
            if one["specialization"].notnull().any():
                _draw_points(axis, one, label, colours[number], MARKERS[number % len(MARKERS)])
        axis.set(xlim=(-0.03, 1.06), ylim=(-0.04, 1.06), xlabel="collapse (1: none)")
        axis.set_title("all layers" if layer == "pooled" else f"layer {layer}", fontsize=9)
    axes[0].set_ylabel("specialization", fontsize=8)


def ordered_activation(scores: xr.Dataset) -> xr.DataArray:
    """Put the modules of activation matrices in the order of the operations assigned to them.

    The others follow, the most used ones first. In that order one module for each operation gives a
    diagonal, whatever the modules' numbers; each layer, and each network, has an order of its own.

    Args:
        scores: `assignment` [..., operation], `utilisation` [..., module] and `activation`
            [..., operation, module], as `score_specialization` gives them, with any further dims.

    Returns:
        The activation, 0..1; `module` counts places in the order.

    Raises:
        KeyError: a variable is missing.

    Example:
        `ordered_activation(score_specialization(...)).sel(layer="pooled")`
    """
    mine = scores["assignment"] == scores["module"]
    last = scores.sizes["operation"] + 1 - scores["utilisation"]
    rank = mine.argmax("operation").where(mine.any("operation"), last)
    order = rank.copy(data=np.argsort(rank.to_numpy(), axis=rank.get_axis_num("module")))
    shares, order = xr.broadcast(scores["activation"], order)
    axis = shares.get_axis_num("module")
    order = order.transpose(*shares.dims).to_numpy()
    return shares.copy(data=np.take_along_axis(shares.to_numpy(), order, axis))


def _draw_points(axis: Axes, one: xr.Dataset, label: str, colour: str, marker: str) -> None:
    for control, filling in (("observed", colour), ("shuffled", "none")):
        x, y = (one[name].sel(control=control) for name in ("collapse", "specialization"))
        look: dict[str, Any] = {"color": colour, "marker": marker, "mfc": filling, "ls": ""}
        shown = label if control == "observed" else None
        axis.plot(x.to_numpy().ravel(), y.to_numpy().ravel(), label=shown, **look)


def _attainable(scores: xr.Dataset) -> list[float]:
    """The collapse of networks with a module for each operation: log |S| / log M, at most 1."""
    operations, modules = xr.broadcast(
        (scores["seen"] > 0).sum("operation"), scores["utilisation"].notnull().sum("module")
    )
    pairs = zip(operations.to_numpy().ravel(), modules.to_numpy().ravel(), strict=True)
    return [min(1.0, float(np.log(n) / np.log(m))) for n, m in {*pairs} if n and m > 1]
