"""Maps of the control-flow study: attention by head and step, gates, and the order of keys.

The views draw one example of the first cell of each condition: the paper's own expression, or the
deepest one.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import probes
from studies.report.panels import grid, group, shown_conditions
from studies.setups.expressions import GEOMETRIC
from studies.views.ndr import first_cells, graphs_of, has_gates, main_example, title_of

JOINING = ("operator reads argument", "argument reads operator")
"""The roles of a head that joins arguments and operations, in either direction."""

N_COPYING = 3
"""The number of heads that are drawn as those that copy results."""

NOTE = "rows read columns; framed: columns that update (models with gates)"


PER_LINE = 7
"""The most maps beside one another."""


class Maps(NamedTuple):
    """Maps of an example: what is shown, the number of its columns, and names and drawings."""

    title: str
    width: int
    draw: list[tuple[str, Callable[..., Axes]]]


class Drawn(NamedTuple):
    """The example of a condition: its cell, title and tokens; of the example, arrays by name."""

    cell: int
    title: str
    tokens: list[str]
    data: xr.Dataset

    def attention(self, what: str, panels: Sequence[tuple[int, int | None]]) -> Maps:
        """Attention at pairs of steps and heads, with frames around rows that update.

        Head None is the maximum over heads.
        """
        draw = []
        for step, head in panels:
            data = self.data.isel(step=step)
            data = data if head is None else data.isel(head=head)
            update = data["update"][: len(self.tokens)] if "update" in data else []
            rows: Any = {"labels": self.tokens, "framed": np.flatnonzero(update).tolist()}
            name = f"step {step}" + ("" if head is None else f", head {head}")
            draw.append((name, partial(probes.plots.attention, data["attention"], **rows)))
        return Maps(f"{self.title} ({what})", len(self.tokens), draw)


def drawn_examples(result: xr.DataTree, model: str | None) -> Iterator[Drawn]:
    """One example of each condition, of all models or of one."""
    for condition, cell, examples in first_cells(result):
        if model in (None, condition.values["model"]):
            number = main_example(examples)
            data = examples.isel(example=number)
            if has_gates(examples):
                data["update"] = graphs_of(examples, "change")["update"].isel(example=number)
            title, tokens = title_of(condition, examples, number), data["tokens"].item().split()
            yield Drawn(cell, title, tokens, data)


def attention(
    result: xr.DataTree, *, model: str | None = None, most: int | None = None
) -> Figure | None:
    """Attention, the maximum over heads.

    Args:
        result: the result.
        model: the model whose conditions are drawn, by default all.
        most: the most steps that are drawn, evenly spaced; by default all.
    """

    def maps(drawn: Drawn) -> Maps:
        n_steps, n_heads = (drawn.data.sizes[dim] for dim in ("step", "head"))
        steps = spaced(n_steps, most or n_steps)
        what = "attention" if n_heads == 1 else f"attention, maximum over {n_heads} heads"
        what += f", {len(steps)} of {n_steps} steps" if len(steps) < n_steps else ""
        return drawn.attention(what, [(step, None) for step in steps])

    return _plot(result, model, maps)


def joining_head(result: xr.DataTree, *, model: str) -> Figure | None:
    """At all steps, attention of the head that joins arguments and operations most clearly.

    Source: Csordás et al. 2021, figure 10; there the head was chosen by eye.
    """

    def maps(drawn: Drawn) -> Maps | None:
        joining = best_heads(result, drawn, JOINING, 1)
        if drawn.data.sizes["head"] == 1 or not joining:
            return None
        (role, head, _), steps = joining[0], range(drawn.data.sizes["step"])
        return drawn.attention(f"head {head}: {role}", [(step, head) for step in steps])

    return _plot(result, model, maps)


def heads(result: xr.DataTree) -> Figure | None:
    """Attention of the heads that have a role, at single steps.

    First the head that joins arguments and operations, at four steps; then the heads that read
    results (without any in the task: the head that reads the answer), at their clearest step.

    Source: Csordás et al. 2021, figure 3; there the heads were chosen by eye.
    """

    def maps(drawn: Drawn) -> Maps | None:
        joining = best_heads(result, drawn, JOINING, 1)
        if drawn.data.sizes["head"] == 1 or not joining:
            return None
        (role, head, _), n_steps = joining[0], drawn.data.sizes["step"]
        others = best_heads(result, drawn, ("operator reads result",), N_COPYING)
        others = others or best_heads(result, drawn, ("readout reads root",), 1)
        panels = [(step, head) for step in spaced(n_steps, 4)]
        panels += [(step, other) for _, other, step in others]
        return drawn.attention(f"first head {head}: {role}; then: {others[0][0]}", panels)

    return _plot(result, None, maps)


def gates(result: xr.DataTree, *, model: str) -> Figure | None:
    """The gates of all channels at all steps."""

    def maps(drawn: Drawn) -> Maps | None:
        if "gates" not in drawn.data or drawn.data["gates"].isnull().all():
            return None
        values = drawn.data["gates"].dropna("channel", how="all")
        title = f"{drawn.title} (gates of {values.sizes['channel']} channels)"
        draw = [
            (
                f"step {step}",
                partial(probes.plots.gates, values.isel(step=step), labels=drawn.tokens),
            )
            for step in range(values.sizes["step"])
        ]
        return Maps(title, len(drawn.tokens), draw)

    return _plot(result, model, maps, bar="gate", note="a row for each channel of a column")


def key_order(result: xr.DataTree, *, n: int = 6) -> Figure | None:
    """The order in which geometric attention goes through the keys of each query.

    Source: Csordás et al. 2021, figure 1, right.
    """
    models = [condition.values["model"] for condition in shown_conditions(result)]
    if not set(models) & set(GEOMETRIC):
        return None
    from mechanisms.attention.geometric import geometric_weights  # slow to import

    # With equal probabilities, a weight is the smaller the later its key comes.
    own = torch.eye(n, dtype=torch.bool)
    weights = geometric_weights(torch.zeros(n, n).masked_fill(own, -torch.inf))
    order = (weights.argsort(dim=1, descending=True).argsort(dim=1) + 1.0).masked_fill(
        own, torch.nan
    )
    positions = {name: range(n) for name in ("query", "key")}
    table = xr.DataArray(order.numpy(), positions, ("query", "key"))
    figure, axes = grid(1, 1, width=3.2, height=3.0)
    probes.plots.matrix(table, axes[0, 0], limits=(1.0, n - 1.0), numbers="{:.0f}")
    axes[0, 0].set(xlabel="key", ylabel="query", title="order of keys in geometric attention")
    axes[0, 0].title.set_fontsize(9)
    return figure


def best_heads(
    result: xr.DataTree, drawn: Drawn, roles: Sequence[str], n: int
) -> list[tuple[str, int, int]]:
    """The heads that have one of the roles most clearly: role, head, and its clearest step.

    Heads are ordered by their score above that of the control "others".
    """
    data = group("heads", role=list(roles))(result)
    if not data:
        return []
    of_cell = data.isel(cell=drawn.cell)
    scores = of_cell["score"].sel(control="trained") - of_cell["score"].sel(control="others")
    of_pairs = scores.stack(pair=("role", "head")).dropna("pair").sortby("pair")
    order = np.argsort(-of_pairs.to_numpy(), kind="stable")[:n]
    pairs = [of_pairs["pair"].to_numpy()[index] for index in order]
    at_step = of_cell["at_step"]
    return [
        (role, int(head), int(at_step.sel(role=role, head=head).argmax("step")))
        for role, head in pairs
    ]


def spaced(n: int, most: int) -> list[int]:
    """At most `most` numbers from 0 to n - 1, evenly spaced from first to last."""
    return np.unique(np.linspace(0, n - 1, min(n, most)).round().astype(int)).tolist()


def _plot(
    result: xr.DataTree,
    model: str | None,
    maps: Callable[[Drawn], Maps | None],
    *,
    bar: str = "attention",
    note: str = NOTE,
) -> Figure | None:
    """The maps of examples below one another: the layout of figures 2 and 4 to 11 of the paper."""
    candidates = [maps(drawn) for drawn in drawn_examples(result, model)]
    rows = [candidate for candidate in candidates if candidate is not None]
    if not rows:
        return None
    sides = [max(1.3, 0.085 * row.width) for row in rows]
    n_lines = [math.ceil(len(row.draw) / PER_LINE) for row in rows]
    across = [math.ceil(len(row.draw) / lines) for row, lines in zip(rows, n_lines, strict=True)]
    heights = [lines * (side + 0.55) + 0.45 for lines, side in zip(n_lines, sides, strict=True)]
    width = max((side + 0.15) * n for side, n in zip(sides, across, strict=True)) + 1.5
    figure = Figure((width, sum(heights) + 0.3), layout="constrained")
    subfigures = figure.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)
    for part, row, lines, n in zip(subfigures[:, 0], rows, n_lines, across, strict=True):
        part.suptitle(textwrap.fill(row.title, int(width * 13)), fontsize=9, ha="left", x=0.01)
        axes = part.subplots(lines, n, squeeze=False)
        for number, (axis, (name, draw)) in enumerate(zip(axes.flat, row.draw, strict=False)):
            draw(ax=axis)
            axis.set_title(name, fontsize=7, pad=3)
            axis.set(xlabel="", ylabel="")
            axis.tick_params(length=1.5, pad=1)
            if number % n:
                axis.set_yticks([])
        for axis in axes.flat[len(row.draw) :]:
            axis.set_axis_off()
        colours = part.colorbar(axes[0, 0].images[0], ax=axes, aspect=12 * lines)
        colours.set_label(bar, fontsize=8)
        colours.ax.tick_params(labelsize=7)
    figure.supxlabel(note, fontsize=8)
    return figure
