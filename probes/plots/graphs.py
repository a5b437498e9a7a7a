"""Graphs of control flow over columns and steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle

from probes.checking import checked
from probes.control_flow.export import to_networkx
from probes.control_flow.graphs import INPUT_STEP
from probes.plots.axes import given_or_current, put_names
from probes.plots.matrices import FRAME

_KEPT = "#888888"
# Lighter than black, so that arrows and outlines are visible on open gates.
_GATES = ListedColormap(colormaps["Greys"](np.linspace(0, 0.65, 256)), name="gates")
_HALF = 0.42


@checked
def control_flow(
    graphs: xr.Dataset,
    ax: Axes | None = None,
    *,
    example: int = 0,
    labels: Sequence[str] | None = None,
    darkest: float = 1.0,
) -> Axes:
    """Draw the graph of an example: columns along x, steps downwards, reads as arrows.

    Inputs are a separate row above step 0. Shades are gates, frames are update nodes, red arrows
    are reads (more visible with larger weight), and grey lines are kept states. The image, for a
    colour bar, is `ax.images[-1]`.

    Args:
        graphs: result of `extract_control_flow`.
        ax: the axes to draw on; None: the current ones.
        example: index of the example, from 0.
        labels: labels of the valid columns, such as their tokens; None: numbers.
        darkest: gate value, in 0..1, with the darkest shade.

    Returns:
        The axes.

    Raises:
        IndexError: the example is out of range.
        KeyError: the graphs are not those of `extract_control_flow`.
        ValueError: numbers of labels and of valid columns differ.

    Example:
        >>> probes.plots.control_flow(graphs, labels=tokens)

    Source: Csordás et al. 2021, "The Neural Data Router", figure 2.
    """
    if missing := [n for n in ("valid", "gate", "update", "edge_example") if n not in graphs]:
        raise KeyError(
            f"graphs must hold {', '.join(missing)}, made by extract_control_flow, got "
            f"{', '.join(map(str, graphs))}"
        )
    ax = given_or_current(ax)
    graph = to_networkx(graphs, example)
    columns = np.flatnonzero(graphs["valid"].to_numpy()[example]).tolist()
    width, n_steps = len(columns), graphs.sizes["step"]
    if labels is not None and len(labels) != width:
        raise ValueError(f"labels must name the {width} valid columns, got {len(labels)}")
    gate, update = (graphs[name].to_numpy()[example][:, columns] for name in ("gate", "update"))
    ax.imshow(gate, vmin=0, vmax=darkest, cmap=_GATES, aspect="auto")
    ax.spines[:].set_visible(False)
    ax.set(xlim=(-0.5, width - 0.5), ylim=(n_steps - 0.5, INPUT_STEP - 0.5))
    for column in range(width):
        _frame(ax, column, INPUT_STEP, _KEPT)
    for step, column in np.argwhere(update).tolist():
        _frame(ax, column, step, "black")
    place = {column: number for number, column in enumerate(columns)}
    for source, target, edge in graph.edges(data=True):
        _draw_edge(ax, (place[source[0]], source[1]), (place[target[0]], target[1]), edge)
    put_names(ax, "x", [*map(str, columns)] if labels is None else labels)
    ax.set_yticks(range(INPUT_STEP, n_steps), ["input", *map(str, range(n_steps))], fontsize=8)
    ax.tick_params(length=2)
    ax.set(xlabel="column", ylabel="step")
    return ax


def _frame(ax: Axes, column: int, step: int, color: str) -> None:
    corner, size = (column - _HALF, step - _HALF), 2 * _HALF
    ax.add_patch(Rectangle(corner, size, size, fill=False, ec=color, clip_on=False))


def _draw_edge(
    ax: Axes, source: tuple[int, int], target: tuple[int, int], edge: dict[str, Any]
) -> None:
    if edge["kind"] == "copy":
        ends = [source[1] + _HALF, target[1] - _HALF]
        ax.plot([source[0], target[0]], ends, color=_KEPT, lw=0.8)
        return
    strength = min(edge["weight"], 1.0)
    style = {
        "arrowstyle": "-|>",
        "connectionstyle": "arc3,rad=0.08",
        "color": FRAME,
        "lw": 0.5 + 1.2 * strength,
        "alpha": 0.3 + 0.7 * strength,
        "mutation_scale": 8,
        "shrinkA": 2,
        "shrinkB": 3,
    }
    ax.annotate("", xy=target, xytext=source, arrowprops=style)
