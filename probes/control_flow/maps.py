"""Maps of columns at single steps: attention of the maximum over heads or one head, and gates."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from probes.checking import checked
from probes.control_flow.graphs import ordered

PER_LINE = 7
"""The most maps beside one another."""

_FRAME = "#cc3311"


@dataclass(frozen=True, eq=False)
class ColumnMaps:
    """Maps of one example that are plotted together.

    Attributes:
        title: what is shown, above the maps.
        names: the title of each map.
        matrices: the maps [map, row, column], in 0..1.
        columns: labels along x, such as the tokens.
        rows: labels along y; None where rows need none, such as channels.
        framed: for each map the rows with a frame.
    """

    title: str
    names: Sequence[str]
    matrices: Float[np.ndarray, "map row column"]
    columns: Sequence[str]
    rows: Sequence[str] | None = None
    framed: Sequence[Sequence[int]] = field(default=())


@checked
def attention_maps(
    title: str,
    attention: xr.DataArray,
    labels: Sequence[str],
    *,
    panels: Sequence[tuple[int, int | None]] | None = None,
    update: xr.DataArray | None = None,
) -> ColumnMaps:
    """Attention of one example at steps: a row per query, a column per key.

    Args:
        title: what is shown.
        attention: [step, head, query_pos, key_pos], in 0..1.
        labels: labels of the first columns, such as their tokens; further columns are left out.
        panels: pairs of a step and a head, or None for the maximum over heads; by default the
            maximum at all steps.
        update: [step, pos] bool: columns that update, whose rows are framed.

    Raises:
        ValueError: dims do not match, or there is no panel.

    Example:
        `attention_maps("NDR", attention[0], "BOS 101 a EOS".split(), panels=[(0, None), (3, 1)])`
    """
    weights = ordered("attention", attention, ("step", "head", "query_pos", "key_pos"))
    weights = weights[..., : len(labels), : len(labels)]
    panels = [(step, None) for step in range(len(weights))] if panels is None else panels
    if not panels:
        raise ValueError("panels must be at least one step, got none")
    matrices = [
        weights[step].max(axis=0) if head is None else weights[step, head] for step, head in panels
    ]
    names = [f"step {step}" + ("" if head is None else f", head {head}") for step, head in panels]
    framed: list[list[int]] = []
    if update is not None:
        updates = ordered("update", update, ("step", "pos"))[:, : len(labels)]
        framed = [np.flatnonzero(updates[step]).tolist() for step, _ in panels]
    return ColumnMaps(title, names, np.stack(matrices), labels, labels, framed)


@checked
def gate_maps(title: str, gates: xr.DataArray, labels: Sequence[str]) -> ColumnMaps:
    """Gates of one example at all steps: a row per channel, a column per column of the model.

    Args:
        title: what is shown.
        gates: [step, pos, channel], in 0..1.
        labels: labels of the first columns; further columns are left out.

    Raises:
        ValueError: dims do not match.

    Example:
        `gate_maps("NDR", gates[0], "BOS 101 a EOS".split())`
    """
    values = ordered("gates", gates, ("step", "channel", "pos"))[..., : len(labels)]
    return ColumnMaps(title, [f"step {step}" for step in range(len(values))], values, labels)


@checked
def plot_column_maps(examples: Sequence[ColumnMaps], *, bar: str, note: str) -> Figure:
    """Plot the maps of examples below one another, with a colour bar.

    Args:
        examples: at least one.
        bar: label of the colour bar, what is 0 to 1.
        note: explanation of rows, columns and frames, below the maps.

    Raises:
        ValueError: there are no examples.

    Example:
        `plot_column_maps([attention_maps("NDR", attention[0], tokens)], bar="attention", note="")`

    Source: the layout of figures 2 and 4 to 11 of Csordás et al. 2021.
    """
    if not examples:
        raise ValueError("examples must be at least one, got none")
    sides = [max(1.3, 0.085 * len(example.columns)) for example in examples]
    n_lines = [-(-len(example.names) // PER_LINE) for example in examples]
    across = [-(-len(e.names) // lines) for e, lines in zip(examples, n_lines, strict=True)]
    heights = [lines * (side + 0.55) + 0.45 for lines, side in zip(n_lines, sides, strict=True)]
    width = max((side + 0.15) * n for side, n in zip(sides, across, strict=True)) + 1.5
    figure = Figure((width, sum(heights) + 0.3), layout="constrained")
    parts = np.atleast_1d(
        np.array(figure.subfigures(len(examples), 1, height_ratios=heights), dtype=object)
    )
    for part, example, lines, n in zip(parts, examples, n_lines, across, strict=True):
        part.suptitle(textwrap.fill(example.title, int(width * 13)), fontsize=9, ha="left", x=0.01)
        image: Any = None
        axes = part.subplots(lines, n, squeeze=False)
        for number, axis in enumerate(axes.flat):
            if number < len(example.names):
                image = _draw_map(axis, example, number, labelled=number % n == 0)
            else:
                axis.set_axis_off()
        colours = part.colorbar(image, ax=axes, aspect=12 * lines)
        colours.set_label(bar, fontsize=8)
        colours.ax.tick_params(labelsize=7)
    figure.supxlabel(note, fontsize=8)
    return figure


def _draw_map(axis: Axes, example: ColumnMaps, number: int, *, labelled: bool) -> Any:
    """Draw one map, with the labels of its rows if `labelled`."""
    matrix, width = example.matrices[number], len(example.columns)
    image = axis.imshow(matrix, vmin=0, vmax=1, cmap="Blues", aspect="auto", interpolation="none")
    for row in example.framed[number] if example.framed else ():
        style: Any = {"fill": False, "ec": _FRAME, "lw": 1.0, "clip_on": False}
        axis.add_patch(Rectangle((-0.5, row - 0.5), width, 1, **style))
    axis.set_title(example.names[number], fontsize=7, pad=3)
    axis.set_xticks(range(width), example.columns, fontsize=5, rotation=90)
    names = example.rows if labelled and example.rows is not None else []
    axis.set_yticks(range(len(names)), names, fontsize=5)
    axis.tick_params(length=1.5, pad=1)
    return image
