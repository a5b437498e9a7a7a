"""Plots of specialization against collapse, and activation matrices of operations and modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from probes.checking import checked

MARKERS = ("o", "s", "^", "D", "X", "v", "P", "*", "<", ">")

_LINE: dict[str, Any] = {"color": "black", "lw": 0.9, "ls": "--", "label": "attainable"}
_STAR: dict[str, Any] = {"color": "black", "marker": "*", "ms": 11, "mfc": "none", "ls": ""}


@checked
def draw_specialization(
    axes: Sequence[Axes] | np.ndarray,
    scores: Mapping[str, xr.Dataset],
    *,
    colours: Sequence[str] | None = None,
) -> None:
    """Draw specialization against collapse: one panel per layer, one point per network.

    Filled points are the scores, hollow points the control "shuffled". No network is to the right
    of the dashed line: with M modules and |S| operations that occur, collapse is at most log |S| /
    log M + 1 - specialization (Ostapenko et al. 2022, see `score_specialization`). The star on the
    line is one module for each operation.

    Args:
        axes: one per layer.
        scores: results of `score_specialization` by label: [control, layer], with further dims for
            several networks of the same label. All have the same layers. Values that are not finite
            are not drawn.
        colours: one per label; matplotlib's by default.

    Raises:
        ValueError: numbers of axes or colours do not match.

    Example:
        `draw_specialization(plt.subplots(1, 3)[1], {"encoder": scores})`, of two layers and
        "pooled"
    """
    colours = [f"C{number}" for number in range(len(scores))] if colours is None else colours
    layers = [
        name
        for label_scores in scores.values()
        for name in label_scores["layer"].to_numpy().tolist()
    ]
    layers = list(dict.fromkeys(layers))
    if len(axes) != len(layers) or len(colours) != len(scores):
        raise ValueError(
            f"axes and colours must match the numbers of layers and labels, {len(layers)} and "
            f"{len(scores)}, got {len(axes)} and {len(colours)}"
        )
    for axis, layer in zip(axes, layers, strict=True):
        layer_scores = {
            label: label_scores.sel(layer=layer) for label, label_scores in scores.items()
        }
        for bound in sorted(
            {bound for label_scores in layer_scores.values() for bound in _attainable(label_scores)}
        ):
            y = np.array([0.0, bound, 1.0])
            axis.plot(np.minimum(1, bound + 1 - y), y, **_LINE)
            axis.plot(bound, 1.0, **_STAR, label="a module for\neach operation")
        for number, (label, label_scores) in enumerate(layer_scores.items()):
            if label_scores["specialization"].notnull().any():
                _draw_points(
                    axis, label_scores, label, colours[number], MARKERS[number % len(MARKERS)]
                )
        axis.set(xlim=(-0.03, 1.06), ylim=(-0.04, 1.06), xlabel="collapse (1: none)")
        axis.set_title("all layers" if layer == "pooled" else f"layer {layer}", fontsize=9)
    axes[0].set_ylabel("specialization", fontsize=8)


def _draw_points(axis: Axes, scores: xr.Dataset, label: str, colour: str, marker: str) -> None:
    for control, filling in (("observed", colour), ("shuffled", "none")):
        x, y = (scores[name].sel(control=control) for name in ("collapse", "specialization"))
        style: dict[str, Any] = {"color": colour, "marker": marker, "mfc": filling, "ls": ""}
        legend_label = label if control == "observed" else None
        axis.plot(x.to_numpy().ravel(), y.to_numpy().ravel(), label=legend_label, **style)


def _attainable(scores: xr.Dataset) -> list[float]:
    """Compute the collapse of one module for each operation: log |S| / log M, at most 1."""
    operations, modules = xr.broadcast(
        (scores["seen"] > 0).sum("operation"), scores["utilisation"].notnull().sum("module")
    )
    pairs = zip(operations.to_numpy().ravel(), modules.to_numpy().ravel(), strict=True)
    return [min(1.0, float(np.log(n) / np.log(m))) for n, m in {*pairs} if n and m > 1]
