"""Plots of the control-flow study: scores and cuts by depth, and graphs of single examples."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
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

import probes
from studies.engine.folders import write_atomically
from studies.engine.results import config_of
from studies.ndr_measures import LEAST_READ, NODES, graphs_of
from studies.report import plots
from studies.report.names import name_of
from studies.report.panels import Shown, grid, has_values, shown_conditions

CURVES = {
    "right answers": ("trained", "True"),
    "wrong answers": ("trained", "False"),
    "columns shuffled": ("shuffled", "all"),
    "untrained": ("untrained", "all"),
}
"""Which graphs have a line: of what control, and of which examples."""

SHADES = {
    "gate": (1.0, "gate, mean over channels"),
    "change": (0.5, "share by which the state changes"),
}
"""What is darkest in a graph, and what is shaded, by what makes its nodes."""

FEWEST = 5
"""Means of fewer examples are not drawn: their intervals say nothing."""

WIDEST = 24
"""Graphs with more columns together are drawn below each other."""

READ = "#cc3311"
GATES = ListedColormap(colormaps["Greys"](np.linspace(0, 0.65, 256)), name="gates")
# Arrows and outlines must stand out from an open gate.


def accuracy_by_depth(result: xr.DataTree) -> Figure | None:
    """Accuracy at each depth, a panel for each condition; shaded: depths of training."""
    scores = result["scores"].to_dataset()
    names = [name for name in scores["group"].to_numpy() if name != "all"]
    # Each depth is of one split.
    data = scores[[f"accuracy{end}" for end in ("", "_low", "_high")]].max("split").sel(group=names)
    data = data.rename(group="depth").assign_coords(depth=[int(one.split()[1]) for one in names])
    data = data.dropna("depth", how="all")
    data["chance"] = scores["accuracy_chance"].mean(("split", "group"))
    return _by_depth(
        result, data, "accuracy", "share of right answers", reference="chance", ylim=(0, 1.02)
    )


def scores(result: xr.DataTree, *, nodes: str) -> Figure | None:
    """How well the graphs match the true dataflow, by depth, beside every control."""
    if "control_flow" not in result.children:
        return None
    data = result["control_flow"].to_dataset().drop_sel(depth="all")
    data = data.sel(nodes=nodes, metric=["f1", "order", "tau", "parallelism"])
    data = data[["score", "score_low", "score_high"]].where(data["examples"] >= FEWEST)
    data = _curves(data).assign_coords(depth=data["depth"].astype(int)).sortby("depth")
    return _by_depth(result, data, "score", "", rows="metric", lines="curve")


def _by_depth(
    result: xr.DataTree, data: xr.Dataset, variable: str, ylabel: str, **more: Any
) -> Figure | None:
    figure = _profiles(result, data, variable, along="depth", ylabel=ylabel, **more)
    for axis in figure.axes if figure is not None else ():
        axis.axvspan(0.5, config_of(result)["setup"]["task"]["train_depth"] + 0.5, color="#eeeeee")
        axis.set_xlim(data["depth"].to_numpy()[0] - 0.5, data["depth"].to_numpy()[-1] + 0.5)
    return figure


def _profiles(result: xr.DataTree, data: xr.Dataset, variable: str, **more: Any) -> Figure | None:
    """Profiles of data that were made of a result's."""
    drawn = result.copy()
    drawn["drawn_here"] = xr.DataTree(data)
    return plots.profiles(drawn, group="drawn_here", variable=variable, **more)


def _curves(data: Any) -> Any:
    """The lines of `CURVES`: a model may never be right, or never wrong."""
    known = set(data["correct"].to_numpy())
    of = {label: curve for label, curve in CURVES.items() if curve[1] in known}
    parts = [
        data.sel(control=control, correct=correct, drop=True) for control, correct in of.values()
    ]
    return xr.concat(parts, xr.Variable("curve", list(of)))


def cuts(result: xr.DataTree) -> Figure | None:
    """How often a right answer becomes wrong when one gate or read is cut; numbers: of trials."""
    if "control_flow" not in result.children:
        return None
    data = (
        result["control_flow"].to_dataset().sel(outcome="broken").sel(cut=["lasting", "one step"])
    )
    more = {"rows": "nodes", "lines": "cut", "ylabel": "right answers made wrong"}
    figure = _profiles(
        result,
        data[["rate", "rate_low", "rate_high", "trials"]],
        "rate",
        along="condition",
        ylim=(-0.1, 1.05),
        **more,
    )
    if figure is None:
        return None
    some = [one for one in shown_conditions(result) if has_values(data["rate"], one)]
    panels = [(nodes, one) for nodes in data["nodes"].to_numpy() for one in some]
    for axis, (nodes, one) in zip(figure.axes, panels, strict=True):
        for line in axis.lines:
            line.set_linestyle("none")
        trials = data["trials"].sel(nodes=nodes, cut="lasting").isel(cell=one.cells).sum("cell")
        for place, number in enumerate(trials.to_numpy()):
            axis.text(place, -0.08, f"{number:.0f}", ha="center", fontsize=6)
        axis.tick_params(axis="x", rotation=90)
    return figure


def parallelism(result: xr.DataTree) -> Figure | None:
    """Operations that are done at each step, beside those at each level of the truth.

    Of the deepest depth of training, and of the deepest of all.
    """
    if "control_flow" not in result.children:
        return None
    data = result["control_flow"].to_dataset()
    deepest = max(int(one) for one in data["depth"].to_numpy() if one != "all")
    depths = dict.fromkeys((config_of(result)["setup"]["task"]["train_depth"], deepest))
    rows = {}
    for nodes in data["nodes"].to_numpy():
        for depth in depths:
            here = data.sel(nodes=nodes, depth=str(depth), drop=True)
            enough = here["examples"].max("metric") >= FEWEST
            done = _curves(here["done"].where(enough)).drop_sel(curve="columns shuffled")
            true = here["operations"].sel(correct="all", drop=True).rename(level="step")
            done = done.assign_coords(step=done["step"] + 1)
            both = xr.concat(
                [done, true.expand_dims(curve=["true, by level"])], "curve", join="outer"
            )
            rows[f"{name_of(nodes)}, depth {depth}"] = both
    whole = xr.Dataset({"done": xr.concat(list(rows.values()), xr.Variable("row", list(rows)))})
    more = {"along": "step", "rows": "row", "lines": "curve", "ylabel": "operations"}
    return _profiles(result, whole, "done", **more)


def kept_examples(result: xr.DataTree) -> Iterator[tuple[Shown, int, xr.Dataset]]:
    """Conditions, their cells and the cells' examples, as `graphs_of` takes them."""
    if "drawn" not in result.children:
        return
    data = result["drawn"].to_dataset()
    for one in shown_conditions(result):
        for cell in one.cells if has_values(data["gate"], one) else ():
            here = data.isel(cell=cell)
            for dim in ("example", "step"):
                here = here.dropna(dim, how="all", subset=["gate"])
            widths = np.array([len(text.split()) for text in here["tokens"].to_numpy()])
            valid = np.arange(here.sizes["pos"]) < widths[:, None]
            yield one, cell, here.assign(valid=(("example", "pos"), valid))


def export(result: xr.DataTree, folder: Path) -> None:
    """Write every kept graph into `graphs/`, as GraphML and as node-link JSON."""
    for one, _, examples in kept_examples(result):
        values = [str(value) for value in one.values.values() if value is not None]
        name = "-".join([*values, f"seed{examples['seed'].item()}"])
        for nodes in NODES:
            graphs = graphs_of(examples, nodes)
            for example in range(graphs.sizes["example"]):
                graph = probes.to_networkx(graphs, example)
                path = folder / "graphs" / f"{name}-{nodes}-{example}.json"
                write_atomically(path, functools.partial(probes.write_node_link, graph))
                path = path.with_suffix(".graphml")
                write_atomically(path, functools.partial(probes.write_graphml, graph))


def graphs(result: xr.DataTree, *, nodes: str) -> Figure | None:
    """Graphs of two examples of each condition: columns along x, steps downward, reads as arrows.

    Of the deepest depth of training, and of the deepest of all, of the first seed.
    """
    shown = []
    for one, cell, examples in kept_examples(result):
        depth = examples["depth"].to_numpy()
        for example in dict.fromkeys((0, int(depth.argmax()))) if cell == one.cells[0] else ():
            shown.append((one.label, examples.isel(example=[example])))
    if not shown:
        return None
    widths = [int(examples["valid"].sum()) for _, examples in shown]
    n_columns = 1 if 2 * max(widths) > WIDEST else 2
    n_rows, n_steps = -(-len(shown) // n_columns), shown[0][1].sizes["step"]
    size = 0.36 * max(widths) * n_columns + 2, (0.36 * n_steps + 1.2) * n_rows + 0.6
    figure, axes = plt.subplots(
        n_rows, n_columns, figsize=size, squeeze=False, layout="constrained"
    )
    darkest, shade = SHADES[nodes]
    image: Any = None
    for axis, (label, examples) in zip(axes.flat, shown, strict=False):
        image = draw_graph(axis, graphs_of(examples, nodes), darkest)
        tokens = examples["tokens"].item().split()
        axis.set_xticks(range(len(tokens)), tokens, fontsize=7)
        axis.tick_params(axis="x", labeltop=True)
        axis.set_title(f"{label}, {_answers(examples)}", fontsize=8, loc="left")
        axis.set_ylabel("step", fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.6, label=shade)
    reads = f"red: reads (attention of {LEAST_READ:g} or more); grey: state that is kept"
    figure.supxlabel(f"framed: updates ({nodes}); {reads}", fontsize=8)
    return figure


def draw_graph(axis: Axes, graphs: xr.Dataset, darkest: float) -> AxesImage:
    """The graph of a single example; the inputs stand in a row of their own, above step 0."""
    width, n_steps = int(graphs["valid"].sum()), graphs.sizes["step"]
    gate, update = (graphs[name].to_numpy()[0, :, :width] for name in ("gate", "update"))
    image = axis.imshow(gate, vmin=0, vmax=darkest, cmap=GATES, aspect="auto")
    axis.spines[:].set_visible(False)
    axis.set(xlim=(-0.5, width - 0.5), ylim=(n_steps - 0.5, -1.5))
    inputs = [(pos, -1) for pos in range(width)]
    for pos, step in inputs + [(pos, step) for step, pos in np.argwhere(update).tolist()]:
        look = {"fill": False, "ec": "#888888" if step < 0 else "black", "clip_on": False}
        axis.add_patch(Rectangle((pos - 0.42, step - 0.42), 0.84, 0.84, **look))
    graph = probes.to_networkx(graphs, 0)
    for (x0, y0), (x1, y1), edge in graph.edges(data=True):
        if edge["kind"] == "copy":
            axis.plot([x0, x1], [y0 + 0.42, y1 - 0.42], color="#888888", lw=0.8)
            continue
        strength = min(edge["weight"], 1.0)
        look = {"arrowstyle": "-|>", "color": READ, "lw": 0.5 + 1.2 * strength}
        look |= {"alpha": 0.3 + 0.7 * strength, "mutation_scale": 8, "shrinkA": 2, "shrinkB": 3}
        look |= {"connectionstyle": "arc3,rad=0.08"}
        axis.annotate("", xy=(x1, y1), xytext=(x0, y0), arrowprops=look)
    axis.set_yticks(range(-1, n_steps), ["input", *map(str, range(n_steps))])
    axis.tick_params(labelsize=8, length=2)
    return image


def attention(result: xr.DataTree) -> Figure | None:
    """Attention of an example of each condition at every step, the largest of all heads.

    Framed: columns whose state changes.
    """
    shown = [
        (one.label, examples.isel(example=[0]))
        for one, cell, examples in kept_examples(result)
        if cell == one.cells[0]
    ]
    if not shown:
        return None
    n_steps = max(examples.sizes["step"] for _, examples in shown)
    side = max(1.5, 0.06 * max(int(examples["valid"].sum()) for _, examples in shown))
    figure, axes = grid(len(shown), n_steps, width=side, height=side + 0.5, share=False)
    image: Any = None
    for row, (label, examples) in zip(axes, shown, strict=True):
        tokens = examples["tokens"].item().split()
        weights = examples["attention"].max("head").to_numpy()[0]
        update = graphs_of(examples, "change")["update"].to_numpy()[0]
        for step, axis in enumerate(row[: len(weights)]):
            inner = weights[step, : len(tokens), : len(tokens)]
            image = axis.imshow(inner, vmin=0, vmax=1, cmap="Blues")
            for pos in np.flatnonzero(update[step]):
                look: Any = {"fill": False, "ec": READ, "lw": 1.2, "clip_on": False}
                axis.add_patch(Rectangle((-0.5, pos - 0.5), len(tokens), 1, **look))
            axis.set_xticks(range(len(tokens)), tokens, fontsize=5, rotation=90)
            axis.set_yticks(range(len(tokens)), tokens if step == 0 else [], fontsize=5)
            axis.set_title(f"step {step}", fontsize=7)
        row[0].set_ylabel(f"{label}\n{_answers(examples)}\ncolumn that reads", fontsize=6)
    figure.supxlabel("column that is read; framed: columns whose state changes", fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.6, label="attention")
    return figure


def _answers(examples: xr.Dataset) -> str:
    right, given = examples["target"].item(), examples["answer"].item()
    return f"depth {examples['depth'].item():.0f}: right is {right}, answered {given}"
