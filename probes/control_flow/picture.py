"""Pictures of control flow: graphs over columns and steps, and attention at every step."""

from __future__ import annotations

import textwrap
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

from probes.control_flow.export import to_networkx
from probes.control_flow.graphs import INPUT_STEP, ordered

_READ, _KEPT = "#cc3311", "#888888"
# Arrows and outlines must stand out from an open gate.
_GATES = ListedColormap(colormaps["Greys"](np.linspace(0, 0.65, 256)), name="gates")
_HALF = 0.42
_WIDEST = 24  # graphs with more columns together are drawn below each other


@dataclass(frozen=True)
class DrawnExample:
    """An example whose control flow is drawn.

    Attributes:
        title: above it.
        graphs: of `extract_control_flow`.
        number: of the example in the graphs, from 0.
        labels: of its valid columns, such as their tokens.
        attention: [step, head, query_pos, key_pos], for `plot_attention`.
    """

    title: str
    graphs: xr.Dataset
    number: int
    labels: Sequence[str]
    attention: xr.DataArray | None = None


def plot_control_flow(
    examples: Sequence[DrawnExample], *, darkest: float = 1.0, shade: str = "gate"
) -> Figure:
    """Plot the graphs of several examples, see `draw_control_flow`, with a bar for the shades.

    Args:
        examples: at least one; in two columns where there is room.
        darkest: the gate, in 0..1, that is darkest.
        shade: what the gate is.

    Raises:
        ValueError: there are no examples, or labels do not fit.

    Example:
        `plot_control_flow([DrawnExample("first", graphs, 0, "BOS 101 a b EOS".split())])`
    """
    widest = max((len(one.labels) for one in examples), default=0)
    if widest == 0:
        raise ValueError("examples must be at least one, with labels")
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
    for axis, one in zip(axes.flat, examples, strict=False):
        look: Any = {"labels": one.labels, "darkest": darkest}
        image = draw_control_flow(axis, one.graphs, one.number, **look)
        axis.set_title(one.title, fontsize=8, loc="left")
        axis.set_ylabel("step", fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.6, label=shade)
    figure.supxlabel("framed: updates; red: reads; grey: state that is kept", fontsize=8)
    return figure


def plot_attention(examples: Sequence[DrawnExample]) -> Figure:
    """Plot the attention of examples at every step, a row for each; see `draw_attention`.

    Args:
        examples: with their attention; at least one.

    Raises:
        ValueError: there are no examples, or one without attention.

    Example:
        `plot_attention([DrawnExample("first", graphs, 0, tokens, columns["attention"][0])])`
    """
    weights = [one.attention for one in examples if one.attention is not None]
    if not weights or len(weights) < len(examples):
        raise ValueError("examples must be at least one, each with its attention")
    n_steps = max(one.sizes["step"] for one in weights)
    side = max(1.5, 0.06 * max(len(one.labels) for one in examples))
    figure, axes = plt.subplots(
        len(examples),
        n_steps,
        figsize=(side * n_steps + 1.8, (side + 0.5) * len(examples)),
        squeeze=False,
        layout="constrained",
    )
    image: Any = None
    for row, one, attention in zip(axes, examples, weights, strict=True):
        update = one.graphs["update"].isel(example=one.number)
        image = draw_attention(row, attention, update, labels=one.labels)
        row[0].set_ylabel(f"{textwrap.fill(one.title, 45)}\ncolumn that reads", fontsize=6)
    figure.supxlabel("column that is read; framed: columns that update", fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.6, label="attention")
    return figure


def draw_control_flow(
    axis: Axes,
    graphs: xr.Dataset,
    example: int = 0,
    *,
    labels: Sequence[str] | None = None,
    darkest: float = 1.0,
) -> AxesImage:
    """Draw the graph of an example: columns along x, steps downward, reads as arrows.

    The inputs stand in a row of their own, above step 0. Shaded is what the graph was made of
    (its gate), framed are update nodes; a red arrow is a read, the stronger the more visible, and
    a grey line the state that is kept.

    Args:
        axis: that is drawn into.
        graphs: of `extract_control_flow`.
        example: index, from 0.
        labels: of the valid columns, such as their tokens.
        darkest: the gate, in 0..1, that is darkest.

    Returns:
        The shaded cells, for a colour bar.

    Raises:
        IndexError: no such example.
        ValueError: there are not as many labels as valid columns.

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


def draw_attention(
    axes: Sequence[Axes],
    attention: xr.DataArray,
    update: xr.DataArray,
    *,
    labels: Sequence[str],
) -> AxesImage:
    """Draw who attends to whom at every step: the largest weight of all heads.

    Framed: columns that update at the step.

    Args:
        axes: at least as many as steps; what is over stays empty.
        attention: [step, head, query_pos, key_pos], in 0..1.
        update: [step, pos] bool, the columns that update.
        labels: of the columns from the first on, such as their tokens; further ones are left out.

    Returns:
        The matrix of the last step, for a colour bar.

    Raises:
        ValueError: dims that do not fit, or fewer axes than steps.

    Example:
        `draw_attention(row, attention.isel(example=0), graphs["update"][0], labels=tokens)`
    """
    weights = ordered("attention", attention, ("step", "head", "query_pos", "key_pos")).max(axis=1)
    updates = ordered("update", update, ("step", "pos"))
    if len(axes) < len(weights) or len(weights) == 0:
        raise ValueError(f"axes must be at least one for each of the steps, {len(weights)} of them")
    panels = zip(axes, weights, updates, strict=False)
    images = [_draw_weights(axis, matrix, now, labels) for axis, matrix, now in panels]
    for step, axis in enumerate(axes[: len(images)]):
        axis.set_yticks(range(len(labels)), labels if step == 0 else [], fontsize=5)
        axis.set_title(f"step {step}", fontsize=7)
    return images[-1]


def _draw_weights(
    axis: Axes, matrix: np.ndarray, update: np.ndarray, labels: Sequence[str]
) -> AxesImage:
    width = len(labels)
    image = axis.imshow(matrix[:width, :width], vmin=0, vmax=1, cmap="Blues")
    for column in np.flatnonzero(update):
        look: Any = {"fill": False, "ec": _READ, "lw": 1.2, "clip_on": False}
        axis.add_patch(Rectangle((-0.5, column - 0.5), width, 1, **look))
    axis.set_xticks(range(width), labels, fontsize=5, rotation=90)
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
    look = {
        "arrowstyle": "-|>",
        "connectionstyle": "arc3,rad=0.08",
        "color": _READ,
        "lw": 0.5 + 1.2 * strength,
        "alpha": 0.3 + 0.7 * strength,
        "mutation_scale": 8,
        "shrinkA": 2,
        "shrinkB": 3,
    }
    axis.annotate("", xy=target, xytext=source, arrowprops=look)
