"""Plots of control flow: graphs over columns and steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

from probes.checking import checked
from probes.control_flow.export import to_networkx
from probes.control_flow.graphs import INPUT_STEP

_READ, _KEPT = "#cc3311", "#888888"
# Lighter than black, so that arrows and outlines are visible on open gates.
_GATES = ListedColormap(colormaps["Greys"](np.linspace(0, 0.65, 256)), name="gates")
_HALF = 0.42
_WIDEST = 24  # two graphs with more columns in total are drawn below each other


@dataclass(frozen=True)
class DrawnExample:
    """An example whose control flow is drawn.

    Attributes:
        title: title of its panel.
        graphs: result of `extract_control_flow`.
        number: index of the example in the graphs, from 0.
        labels: labels of its valid columns, such as their tokens.
    """

    title: str
    graphs: xr.Dataset
    number: int
    labels: Sequence[str]


@checked
def plot_control_flow(
    examples: Sequence[DrawnExample], *, darkest: float = 1.0, shade: str = "gate"
) -> Figure:
    """Plot the graphs of several examples with a colour bar; see `draw_control_flow`.

    Args:
        examples: at least one; plotted in two columns if they fit.
        darkest: gate value, in 0..1, with the darkest shade.
        shade: label of the colour bar.

    Raises:
        ValueError: there are no examples, or labels do not match the columns.

    Example:
        `plot_control_flow([DrawnExample("first", graphs, 0, "BOS 101 a b EOS".split())])`
    """
    widest = max((len(example.labels) for example in examples), default=0)
    if widest == 0:
        raise ValueError(f"examples must be at least one, with labels, got {len(examples)}")
    n_columns = 1 if 2 * widest > _WIDEST else 2
    n_rows, n_steps = -(-len(examples) // n_columns), examples[0].graphs.sizes["step"]
    figure, axes = plt.subplots(
        n_rows,
        n_columns,
        figsize=(0.36 * widest * n_columns + 2, (0.36 * n_steps + 1.2) * n_rows + 0.6),
        squeeze=False,
        layout="constrained",
    )
    image: Any = None
    for axis, example in zip(axes.flat, examples, strict=False):
        options: Any = {"labels": example.labels, "darkest": darkest}
        image = draw_control_flow(axis, example.graphs, example.number, **options)
        axis.set_title(example.title, fontsize=8, loc="left")
        axis.set_ylabel("step", fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.6, label=shade)
    figure.supxlabel("framed: updates; red: reads; grey: state that is kept", fontsize=8)
    return figure


@checked
def draw_control_flow(
    axis: Axes,
    graphs: xr.Dataset,
    example: int = 0,
    *,
    labels: Sequence[str] | None = None,
    darkest: float = 1.0,
) -> AxesImage:
    """Draw the graph of an example: columns along x, steps downwards, reads as arrows.

    Inputs are a separate row above step 0. Shades are gates, frames are update nodes, red arrows
    are reads (more visible with larger weight), and grey lines are kept states.

    Args:
        axis: matplotlib axes to draw on.
        graphs: result of `extract_control_flow`.
        example: index of the example, from 0.
        labels: labels of the valid columns, such as their tokens.
        darkest: gate value, in 0..1, with the darkest shade.

    Returns:
        The shaded cells, for a colour bar.

    Raises:
        IndexError: the example is out of range.
        ValueError: numbers of labels and of valid columns differ.

    Example:
        `draw_control_flow(plt.figure().gca(), graphs, labels="BOS 101 a b EOS".split())`
    """
    graph = to_networkx(graphs, example)
    width, n_steps = int(graphs["valid"][example].sum()), graphs.sizes["step"]
    if labels is not None and len(labels) != width:
        raise ValueError(f"labels must name the {width} valid columns, got {len(labels)}")
    gate, update = (graphs[name].to_numpy()[example, :, :width] for name in ("gate", "update"))
    image = axis.imshow(gate, vmin=0, vmax=darkest, cmap=_GATES, aspect="auto")
    axis.spines[:].set_visible(False)
    axis.set(xlim=(-0.5, width - 0.5), ylim=(n_steps - 0.5, INPUT_STEP - 0.5))
    for column in range(width):
        _frame(axis, column, INPUT_STEP, _KEPT)
    for step, column in np.argwhere(update).tolist():
        _frame(axis, column, step, "black")
    for source, target, edge in graph.edges(data=True):
        _draw_edge(axis, source, target, edge)
    axis.set_yticks(range(INPUT_STEP, n_steps), ["input", *map(str, range(n_steps))])
    axis.tick_params(labelsize=8, length=2)
    if labels is not None:
        axis.set_xticks(range(width), labels, fontsize=7)
        axis.tick_params(axis="x", labeltop=True)
    return image


def _frame(axis: Axes, column: int, step: int, colour: str) -> None:
    corner, size = (column - _HALF, step - _HALF), 2 * _HALF
    axis.add_patch(Rectangle(corner, size, size, fill=False, ec=colour, clip_on=False))


def _draw_edge(
    axis: Axes, source: tuple[int, int], target: tuple[int, int], edge: dict[str, Any]
) -> None:
    if edge["kind"] == "copy":
        ends = [source[1] + _HALF, target[1] - _HALF]
        axis.plot([source[0], target[0]], ends, color=_KEPT, lw=0.8)
        return
    strength = min(edge["weight"], 1.0)
    style = {
        "arrowstyle": "-|>",
        "connectionstyle": "arc3,rad=0.08",
        "color": _READ,
        "lw": 0.5 + 1.2 * strength,
        "alpha": 0.3 + 0.7 * strength,
        "mutation_scale": 8,
        "shrinkA": 2,
        "shrinkB": 3,
    }
    axis.annotate("", xy=target, xytext=source, arrowprops=style)
