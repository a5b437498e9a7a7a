"""Figures of the control-flow study: numbers by depth, graphs of single examples."""

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
"""What makes a node of the graph, with its threshold (see `probes.extract_control_flow`).

`gate`: the gate is open, averaged over channels, of which many stay closed: an update begins at
0.2 and lasts down to 0.1 (untrained gates are at 0.05). `change`: the state changes by this share.
"""

LEAST_READ = 0.5
"""The smallest weight of a read: geometric attention gives it to one key of a head, hardly to two.
"""

CURVES = {
    "right answers": {"control": "trained", "correct": "True"},
    "wrong answers": {"control": "trained", "correct": "False"},
    "columns shuffled": {"control": "shuffled", "correct": "all"},
    "untrained": {"control": "untrained", "correct": "all"},
}
"""Which graphs have a line: of what control, and of which examples."""

OPERATIONS = {name: CURVES[name] for name in ("right answers", "wrong answers", "untrained")}
OPERATIONS |= {"true, by level": {"control": "true", "correct": "all"}}
"""The lines of `parallelism`."""

SHADES = {
    "gate": (1.0, "gate, mean over channels"),
    "change": (0.5, "share by which the state changes"),
}
"""What is darkest in a graph, and what is shaded, by what makes its nodes."""

FEWEST = 5
"""Means of fewer examples are not drawn: their intervals say nothing."""


def graphs_of(columns: xr.Dataset, nodes: str) -> xr.Dataset:
    """The graphs of `probes.capture_control_flow` whose nodes are of this kind, one of `NODES`."""
    return probes.extract_control_flow(
        columns[nodes],
        columns["attention"],
        columns["valid"],
        gate_threshold=NODES[nodes],
        attention_threshold=LEAST_READ,
    )


# Data of plots


def train_depth(result: xr.DataTree) -> int:
    """The deepest depth of training."""
    return config_of(result)["setup"]["task"]["train_depth"]


def depths_of_training(result: xr.DataTree) -> tuple[float, float]:
    """What is shaded."""
    return 1.5, train_depth(result) + 0.5


def accuracy(result: xr.DataTree) -> xr.Dataset:
    """Accuracy at each depth, all of which are of one split."""
    names = [name for name in result["scores"]["group"].to_numpy() if name != "all"]
    data = values("scores", "accuracy", group=names)(result).max("split").rename(group="depth")
    depths = [int(name.removeprefix("depth ")) for name in names]
    return data.assign_coords(depth=depths).dropna("depth", how="all")


def scores(result: xr.DataTree, *, nodes: str) -> xr.Dataset:
    """How well the graphs match the true dataflow, by depth, beside every control."""
    at = {"nodes": nodes, "metric": ["f1", "order", "tau", "parallelism"]}
    data = values("control_flow", "score", **at)(result)
    if not data:
        return data
    n = group("control_flow", **at)(result)["examples"]
    data = data.where(n >= FEWEST).drop_sel(depth="all")
    return data.assign_coords(depth=data["depth"].astype(int)).sortby("depth")


def cuts(result: xr.DataTree) -> xr.Dataset:
    """How often a right answer becomes wrong when one gate or read is cut, and of how many."""
    data = values("control_flow", "rate", outcome="broken", cut=["lasting", "one step"])(result)
    trials = values("control_flow", "trials", outcome="broken", cut="lasting")(result)
    return data.assign(count=trials["value"]) if data else data


def parallelism(result: xr.DataTree) -> xr.Dataset:
    """Operations that are done at each step, beside those at each level of the truth.

    In rows the kinds of nodes; the deepest depth of training, and the deepest of all.
    """
    data = group("control_flow")(result)
    if not data:
        return data
    deepest = max((one for one in data["depth"].to_numpy() if one != "all"), key=int)
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
    """Conditions, their cells and the cells' examples, as `graphs_of` takes them."""
    data = group("drawn")(result)
    for one in shown_conditions(result) if data else ():
        for cell in one.cells if has_values(data[["gate"]].isel(cell=one.cells)) else ():
            here = data.isel(cell=cell)
            for dim in ("example", "step"):
                here = here.dropna(dim, how="all", subset=["gate"])
            widths = np.array([len(text.split()) for text in here["tokens"].to_numpy()])
            valid = np.arange(here.sizes["pos"]) < widths[:, None]
            yield one, cell, here.assign(valid=(("example", "pos"), valid))


def export(result: xr.DataTree, folder: Path) -> None:
    """Write every kept graph into `graphs/`, as GraphML and as node-link JSON."""
    for one, _, examples in kept_examples(result):
        known = [str(value) for value in one.values.values() if value is not None]
        name = "-".join([*known, f"seed{examples['seed'].item()}"])
        for nodes in NODES:
            graphs = graphs_of(examples, nodes)
            probes.write_control_flow(graphs, folder / "graphs", f"{name}-{nodes}")


def drawn_examples(result: xr.DataTree, nodes: str) -> Iterator[probes.DrawnExample]:
    """Two examples of the first seed of each condition: the first one, and the deepest.

    Of the deepest depth of training, and of the deepest of all.
    """
    for one, cell, examples in kept_examples(result):
        for number in dict.fromkeys((0, int(examples["depth"].to_numpy().argmax()))):
            depth, target, answer = (
                examples[name][number].item() for name in ("depth", "target", "answer")
            )
            if cell == one.cells[0]:
                yield probes.DrawnExample(
                    f"{one.label}, depth {depth:.0f}: right is {target}, answered {answer}",
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
    """Attention of an example of each condition at every step; framed: columns that change."""
    examples = [one for one in drawn_examples(result, "change") if one.number == 0]
    return probes.plot_attention(examples) if examples else None
