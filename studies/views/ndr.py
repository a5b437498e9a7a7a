"""Plots of the control-flow study: scores by depth, and graphs of single examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import probes
from studies.claims.ndr import HABITS
from studies.engine.results import config_of
from studies.measures.control_flow import LEAST_READ, NODES
from studies.report.names import name_of
from studies.report.panels import SMALL, Shown, group, has_values, shown_conditions, values
from studies.setups.expressions import PAPERS_LISTOPS

CURVES = {
    "right answers": {"control": "trained", "correct": "True"},
    "wrong answers": {"control": "trained", "correct": "False"},
    "columns shuffled": {"control": "shuffled", "correct": "all"},
    "untrained": {"control": "untrained", "correct": "all"},
}
"""Lines of the plots by depth: the control, and which examples count."""

OPERATIONS = {name: CURVES[name] for name in ("right answers", "wrong answers", "untrained")}
OPERATIONS |= {"true, by level": {"control": "true", "correct": "all"}}
"""The lines of `parallelism`."""

SHADES = {
    "gate": (1.0, "gate, mean over channels"),
    "change": (0.5, "share by which the state changes"),
}
"""The darkest value of a node and the label of the shading, by criterion."""

WIDEST = 40
"""Two graphs with more columns in total are drawn below each other."""

FEWEST = 5
"""Means over fewer examples are not drawn."""


def graphs_of(columns: xr.Dataset, nodes: str) -> xr.Dataset:
    """The graphs of columns (`probes.capture_control_flow`) by a criterion, one of `NODES`."""
    return probes.extract_control_flow(
        columns[nodes],
        columns["attention"],
        columns["valid"],
        gate_threshold=NODES[nodes],
        attention_threshold=LEAST_READ,
    )


# Data


def train_depth(result: xr.DataTree) -> int:
    """The largest depth in training."""
    return config_of(result)["setup"]["task"]["train_depth"]


def depths_of_training(result: xr.DataTree) -> tuple[float, float]:
    """The range of depths of the in-distribution split, which plots shade."""
    depths = _by_depth(result, split="id")["depth"].to_numpy()
    return depths.min() - 0.5, depths.max() + 0.5


def accuracy(result: xr.DataTree) -> xr.Dataset:
    """Accuracy at each depth; every depth belongs to one split."""
    return _by_depth(result).max("split")


def scores(result: xr.DataTree, *, nodes: str) -> xr.Dataset:
    """How well graphs match the true dataflow, by depth and control."""
    at = {"nodes": nodes, "metric": ["f1", "order", "tau", "parallelism"]}
    data = values("control_flow", "score", **at)(result)
    if not data:
        return data
    n = group("control_flow", **at)(result)["examples"]
    data = data.where(n >= FEWEST).drop_sel(depth="all")
    names = {"f1": "F1 of edges", "order": "pairs in order", "tau": "rank correlation, tau"}
    metrics = [names.get(name, name) for name in data["metric"].to_numpy().tolist()]
    data = data.assign_coords(depth=data["depth"].astype(int), metric=metrics)
    return data.sortby("depth")


def sensitivity(result: xr.DataTree, *, controls: Sequence[str] = ("trained",)) -> xr.Dataset:
    """Scores of graphs of changes by thresholds: the greatest of these controls."""
    at = {"control": list(controls), "metric": ["f1", "tau"]}
    data = values("sensitivity", "score", **at)(result)
    if not data:
        return data
    names = [f"reads from {threshold:g}" for threshold in data["attention_threshold"].to_numpy()]
    greatest = data.max("control", keep_attrs=True).assign_coords(attention_threshold=names)
    # They are not gates here.
    return greatest.rename(gate_threshold="smallest_change")


def habit(result: xr.DataTree) -> xr.Dataset:
    """The best score of a habit that needs no model, whatever is a read."""
    data = sensitivity(result, controls=HABITS)
    return data[["value"]].max("attention_threshold") if data else data


def cuts(result: xr.DataTree) -> xr.Dataset:
    """The share of right answers that a cut gate or read makes wrong, and the number of cuts."""
    data = values("control_flow", "rate", outcome="broken")(result)
    trials = values("control_flow", "trials", outcome="broken", cut="lasting")(result)
    return data.assign(count=trials["value"]) if data else data


def parallelism(result: xr.DataTree) -> xr.Dataset:
    """The number of operations done at each step, beside that at each level of the true dataflow.

    Rows: criteria for nodes, at the largest depth in training and at the largest of all.
    """
    data = group("control_flow")(result)
    if not data:
        return data
    deepest = max((depth for depth in data["depth"].to_numpy() if depth != "all"), key=int)
    data = data.sel(depth=list(dict.fromkeys((str(train_depth(result)), deepest))))
    done = data["done"].where(data["examples"].max("metric") >= FEWEST)
    done = done.assign_coords(step=done["step"] + 1)
    true = data["operations"].sel(correct=["all"]).rename(level="step")
    both = xr.concat([done, true.expand_dims(control=["true"])], "control", join="outer")
    both = both.stack(row=["nodes", "depth"])
    names = [f"{name_of(nodes)}, depth {depth}" for nodes, depth in both["row"].to_numpy()]
    both = both.drop_vars(["row", "nodes", "depth"]).assign_coords(row=names)
    return both.to_dataset(name="value")


def roles(result: xr.DataTree) -> xr.Dataset:
    """How much each head attends to the pairs of each role, beside its controls."""
    data = values("heads", "score")(result)
    return data.assign_coords(head=data["head"].astype(str)) if data else data


def done_by_depth(result: xr.DataTree) -> xr.Dataset:
    """The mean step at which operations of each depth are done."""
    return values("timing", "step_of_depth")(result)


def done_by_length(result: xr.DataTree) -> xr.Dataset:
    """The mean step at which operations are done, by depth and length, for trained models."""
    data = values("timing", "step", control="trained")(result)
    if not data:
        return data
    # A single length says nothing about lengths.
    data = data.where(data["value"].notnull().any("cell").sum("length") > 1)
    return data.assign_coords(
        depth=[f"operations of depth {depth}" for depth in data["depth"].values]
    )


# Examples


def kept_examples(result: xr.DataTree) -> Iterator[tuple[Shown, int, xr.Dataset]]:
    """Every condition and cell with its drawn examples, as `graphs_of` takes them.

    Models without gates have NaN in `gate`.
    """
    data = group("drawn")(result)
    for condition in shown_conditions(result) if data else ():
        cells = condition.cells
        for cell in cells if has_values(data[["change"]].isel(cell=cells)) else ():
            examples = data.isel(cell=cell)
            for dim, name in (("example", "change"), ("step", "change"), ("head", "attention")):
                examples = examples.dropna(dim, how="all", subset=[name])
            lengths = np.array([len(text.split()) for text in examples["tokens"].to_numpy()])
            valid = np.arange(examples.sizes["pos"]) < lengths[:, None]
            yield condition, cell, examples.assign(valid=(("example", "pos"), valid))


def first_cells(result: xr.DataTree) -> Iterator[tuple[Shown, int, xr.Dataset]]:
    """The first cell of each condition with its drawn examples."""
    for condition, cell, examples in kept_examples(result):
        if cell == condition.cells[0]:
            yield condition, cell, examples


def has_gates(examples: xr.Dataset) -> bool:
    """Whether the model of drawn examples has gates."""
    return "gate" in examples and has_values(examples[["gate"]])


def criteria_of(examples: xr.Dataset) -> tuple[str, ...]:
    """The criteria for nodes (of `NODES`) that the model of drawn examples has: gates or not."""
    return tuple(name for name in NODES if name != "gate" or has_gates(examples))


def main_example(examples: xr.Dataset) -> int:
    """The number of the example whose maps are drawn: the paper's expression, or the deepest."""
    texts = examples["tokens"].to_numpy().tolist()
    known = f"BOS {PAPERS_LISTOPS} EOS"
    return texts.index(known) if known in texts else int(examples["depth"].to_numpy().argmax())


def title_of(condition: Shown, examples: xr.Dataset, number: int) -> str:
    """The title of a drawn example: condition, depth, and answers."""
    depth, target, answer = (
        examples[name][number].item() for name in ("depth", "target", "answer")
    )
    return f"{condition.label}, depth {depth:.0f}: right is {target}, answered {answer}"


# Graphs of examples


def export(result: xr.DataTree, folder: Path) -> None:
    """Write all graphs into `graphs/`, as GraphML and as node-link JSON."""
    for condition, _, examples in kept_examples(result):
        names = [str(value) for value in condition.values.values() if value is not None]
        name = "-".join([*names, f"seed{examples['seed'].item()}"])
        for nodes in criteria_of(examples):
            graphs = graphs_of(examples, nodes)
            probes.write_control_flow(graphs, folder / "graphs", f"{name}-{nodes}")


def graphs(result: xr.DataTree, *, nodes: str) -> Figure | None:
    """Graphs of the first, the deepest and the paper's own example, by a criterion of `NODES`.

    Of each condition that has it: models without gates have graphs of changes alone.
    """
    drawn: list[tuple[str, list[str], Callable[..., Axes]]] = []
    n_steps = 0
    darkest, shade = SHADES[nodes]
    for condition, _, examples in first_cells(result):
        if nodes in criteria_of(examples):
            deepest = int(examples["depth"].to_numpy().argmax())
            of_all, n_steps = graphs_of(examples, nodes), examples.sizes["step"]
            for number in dict.fromkeys((0, deepest, main_example(examples))):
                labels = examples["tokens"][number].item().split()
                settings: Any = {"example": number, "labels": labels, "darkest": darkest}
                draw = partial(probes.plots.control_flow, of_all, **settings)
                drawn.append((title_of(condition, examples, number), labels, draw))
    if not drawn:
        return None
    widest = max(len(labels) for _, labels, _ in drawn)
    n_columns = 1 if 2 * widest > WIDEST else 2
    n_rows = math.ceil(len(drawn) / n_columns)
    size = 0.36 * widest * n_columns + 2, (0.36 * n_steps + 1.2) * n_rows + 0.6
    figure = Figure(size, layout="constrained")
    axes = figure.subplots(n_rows, n_columns, squeeze=False)
    for axis, (title, _, draw) in zip(axes.flat, drawn, strict=False):
        draw(ax=axis)
        axis.set_title(title, fontsize=SMALL, loc="left")
        axis.tick_params(axis="x", labeltop=True)
        axis.set_xlabel("")
        axis.set_ylabel("step", fontsize=SMALL)
    for axis in axes.flat[len(drawn) :]:
        axis.axis("off")
    figure.colorbar(axes[0, 0].images[0], ax=axes, shrink=0.6, aspect=40, label=shade)
    figure.supxlabel("framed: updates; red: reads; grey lines: state that is kept", fontsize=SMALL)
    return figure


def _by_depth(result: xr.DataTree, **select: Any) -> xr.Dataset:
    """Accuracy at the depths that were measured."""
    names = [name for name in result["scores"]["group"].to_numpy() if name != "all"]
    data = values("scores", "accuracy", group=names, **select)(result).rename(group="depth")
    depths = [int(name.removeprefix("depth ")) for name in names]
    return data.assign_coords(depth=depths).dropna("depth", how="all")
