"""Plots of the control-flow study: scores by depth, and graphs of single examples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

import probes
from studies.engine.results import config_of
from studies.report.names import name_of
from studies.report.panels import Shown, group, has_values, shown_conditions, values

NODES = {"gate": (0.1, 0.2), "change": 0.2}
"""Criteria for a node of the graph, with thresholds (see `probes.extract_control_flow`).

`gate`: the gate's mean over channels (many of which stay closed) exceeds 0.2, until it falls below
0.1; untrained gates are at 0.05. `change`: the relative change of the state exceeds the threshold.
"""

LEAST_READ = 0.5
"""The smallest attention weight of a read; a head of geometric attention rarely has two such keys.
"""

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
    """The range of depths in training, which plots shade."""
    return 1.5, train_depth(result) + 0.5


def accuracy(result: xr.DataTree) -> xr.Dataset:
    """Accuracy at each depth; every depth belongs to one split."""
    names = [name for name in result["scores"]["group"].to_numpy() if name != "all"]
    data = values("scores", "accuracy", group=names)(result).max("split").rename(group="depth")
    depths = [int(name.removeprefix("depth ")) for name in names]
    return data.assign_coords(depth=depths).dropna("depth", how="all")


def scores(result: xr.DataTree, *, nodes: str) -> xr.Dataset:
    """How well graphs match the true dataflow, by depth and control."""
    at = {"nodes": nodes, "metric": ["f1", "order", "tau", "parallelism"]}
    data = values("control_flow", "score", **at)(result)
    if not data:
        return data
    n = group("control_flow", **at)(result)["examples"]
    data = data.where(n >= FEWEST).drop_sel(depth="all")
    return data.assign_coords(depth=data["depth"].astype(int)).sortby("depth")


def cuts(result: xr.DataTree) -> xr.Dataset:
    """The share of right answers that a cut gate or read makes wrong, and the number of cuts."""
    data = values("control_flow", "rate", outcome="broken", cut=["lasting", "one step"])(result)
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


# Graphs of examples


def kept_examples(result: xr.DataTree) -> Iterator[tuple[Shown, int, xr.Dataset]]:
    """Every condition and cell with its drawn examples, as `graphs_of` takes them."""
    data = group("drawn")(result)
    for condition in shown_conditions(result) if data else ():
        cells = condition.cells
        for cell in cells if has_values(data[["gate"]].isel(cell=cells)) else ():
            examples = data.isel(cell=cell)
            for dim in ("example", "step"):
                examples = examples.dropna(dim, how="all", subset=["gate"])
            lengths = np.array([len(text.split()) for text in examples["tokens"].to_numpy()])
            valid = np.arange(examples.sizes["pos"]) < lengths[:, None]
            yield condition, cell, examples.assign(valid=(("example", "pos"), valid))


def export(result: xr.DataTree, folder: Path) -> None:
    """Write all graphs into `graphs/`, as GraphML and as node-link JSON."""
    for condition, _, examples in kept_examples(result):
        values = [str(value) for value in condition.values.values() if value is not None]
        name = "-".join([*values, f"seed{examples['seed'].item()}"])
        for nodes in NODES:
            graphs = graphs_of(examples, nodes)
            probes.write_control_flow(graphs, folder / "graphs", f"{name}-{nodes}")


def drawn_examples(result: xr.DataTree, nodes: str) -> Iterator[probes.DrawnExample]:
    """Two examples of each condition's first cell: one of training depth, and the deepest."""
    for condition, cell, examples in kept_examples(result):
        for number in dict.fromkeys((0, int(examples["depth"].to_numpy().argmax()))):
            depth, target, answer = (
                examples[name][number].item() for name in ("depth", "target", "answer")
            )
            if cell == condition.cells[0]:
                yield probes.DrawnExample(
                    f"{condition.label}, depth {depth:.0f}: right is {target}, answered {answer}",
                    graphs_of(examples, nodes),
                    number,
                    examples["tokens"][number].item().split(),
                    examples["attention"][number],
                )


def graphs(result: xr.DataTree, *, nodes: str) -> Figure | None:
    """Graphs of two examples of each condition."""
    examples = list(drawn_examples(result, nodes))
    darkest, shade = SHADES[nodes]
    return probes.plot_control_flow(examples, darkest=darkest, shade=shade) if examples else None


def attention(result: xr.DataTree) -> Figure | None:
    """Attention at every step in an example of each condition; columns that change are framed."""
    examples = [drawn for drawn in drawn_examples(result, "change") if drawn.number == 0]
    return probes.plot_attention(examples) if examples else None
