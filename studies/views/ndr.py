"""Figures of the control-flow study: scores and cuts by depth, graphs of single examples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

import probes
from studies import engine
from studies.engine.results import config_of
from studies.report import plots
from studies.report.names import name_of
from studies.report.panels import Shown, has_values, shown_conditions
from studies.setups import expressions

NODES = {"gate": (0.1, 0.2), "change": 0.2}
"""What makes a node of the graph, with its threshold (see `probes.extract_control_flow`).

`gate`: the gate is open, averaged over channels, of which many stay closed: an update begins at
0.2 and lasts down to 0.1 (untrained gates are at 0.05). `change`: the state changes by this share.
"""

LEAST_READ = 0.5
"""The smallest weight of a read: geometric attention gives it to one key of a head, hardly to two.
"""

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


def graphs_of(columns: xr.Dataset, nodes: str) -> xr.Dataset:
    """The graphs of `probes.capture_control_flow` whose nodes are of this kind, one of `NODES`."""
    return probes.extract_control_flow(
        columns[nodes],
        columns["attention"],
        columns["valid"],
        gate_threshold=NODES[nodes],
        attention_threshold=LEAST_READ,
    )


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


def train_depth(result: xr.DataTree) -> int:
    """The deepest depth of training."""
    return config_of(result)["setup"]["task"]["train_depth"]


def _by_depth(
    result: xr.DataTree, data: xr.Dataset, variable: str, ylabel: str, **more: Any
) -> Figure | None:
    figure = _profiles(result, data, variable, along="depth", ylabel=ylabel, **more)
    for axis in figure.axes if figure is not None else ():
        axis.axvspan(0.5, train_depth(result) + 0.5, color="#eeeeee")
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
    data = result["control_flow"].to_dataset()
    data = data.sel(outcome="broken", cut=["lasting", "one step"])
    figure = _profiles(
        result,
        data,
        "rate",
        along="condition",
        rows="nodes",
        lines="cut",
        ylabel="right answers made wrong",
        ylim=(-0.1, 1.05),
    )
    if figure is None:
        return None
    trials = data["trials"].sel(cut="lasting")
    some = [one for one in shown_conditions(result) if has_values(data["rate"], one)]
    panels = product(data["nodes"].to_numpy(), some)
    for axis, (nodes, one) in zip(figure.axes, panels, strict=True):
        for line in axis.lines:
            line.set_linestyle("none")
        numbers = trials.sel(nodes=nodes).isel(cell=one.cells).sum("cell").to_numpy()
        for place, number in enumerate(numbers):
            axis.text(place, -0.08, f"{number:.0f}", ha="center", fontsize=6)
    return figure


def parallelism(result: xr.DataTree) -> Figure | None:
    """Operations that are done at each step, beside those at each level of the truth.

    Of the deepest depth of training, and of the deepest of all.
    """
    if "control_flow" not in result.children:
        return None
    data = result["control_flow"].to_dataset()
    deepest = max((one for one in data["depth"].to_numpy() if one != "all"), key=int)
    depths = dict.fromkeys((str(train_depth(result)), deepest))
    done = _curves(data["done"].where(data["examples"].max("metric") >= FEWEST))
    done = done.drop_sel(curve="columns shuffled").assign_coords(step=done["step"] + 1)
    true = data["operations"].sel(correct="all", drop=True).rename(level="step")
    both = xr.concat([done, true.expand_dims(curve=["true, by level"])], "curve", join="outer")
    rows = {
        f"{name_of(nodes)}, depth {depth}": both.sel(nodes=nodes, depth=depth, drop=True)
        for nodes in data["nodes"].to_numpy()
        for depth in depths
    }
    whole = xr.Dataset({"done": xr.concat(list(rows.values()), xr.Variable("row", list(rows)))})
    more = {"along": "step", "rows": "row", "lines": "curve", "ylabel": "operations"}
    return _profiles(result, whole, "done", **more)


@dataclass(frozen=True)
class Drawn:
    """Gates and attention of some examples, of which graphs are drawn and exported.

    Args:
        n: examples of the deepest depth of training, and of each depth beyond.
    """

    n: int = 2

    def __call__(self, trained: engine.Trained) -> xr.Dataset | None:
        """`gate`, `change`, `attention`, see `probes.capture_control_flow`; and `tokens`,
        `target`, `answer`, `depth` [example].
        """
        setup, task = trained.setup, trained.task
        if setup.model not in expressions.GATED:
            return None
        batch = expressions.examples_of_all_depths(trained, self.n * setup.task.ood_depths[1])
        batch = batch[batch.latents["depth"] >= setup.task.train_depth]
        examples = range(len(batch))
        parts = batch.parts(setup.at_once)
        data = probes.capture_control_flow(trained.model, parts, answer=expressions.most_probable)
        words = [f"BOS {' '.join(task.words(batch, example))} EOS" for example in examples]
        texts = {
            "tokens": ("tokens of the columns", words),
            "target": ("right answer", [task.answers[i] for i in batch.targets[:, 0]]),
            "answer": ("the model's answer", [task.answers[i] for i in data["answer"].to_numpy()]),
            "depth": ("depth of the expression", batch.latents["depth"].cpu().numpy()),
        }
        kept = data[["gate", "change", "attention"]].assign_coords(example=examples)
        return kept.assign({k: ("example", v, {"long_name": a}) for k, (a, v) in texts.items()})


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
            probes.write_control_flow(graphs, folder / "graphs", f"{name}-{nodes}")


def drawn_examples(
    result: xr.DataTree, nodes: str, between: str = ", "
) -> Iterator[probes.DrawnExample]:
    """Two examples of the first cell of each condition: the first one, and the deepest."""
    for one, cell, examples in kept_examples(result):
        for number in dict.fromkeys((0, int(examples["depth"].to_numpy().argmax()))):
            about = {name: examples[name][number].item() for name in ("depth", "target", "answer")}
            said = f"right is {about['target']}, answered {about['answer']}"
            if cell == one.cells[0]:
                yield probes.DrawnExample(
                    f"{one.label}{between}depth {about['depth']:.0f}: {said}",
                    graphs_of(examples, nodes),
                    number,
                    examples["tokens"][number].item().split(),
                    examples["attention"][number],
                )


def graphs(result: xr.DataTree, *, nodes: str) -> Figure | None:
    """Graphs of two examples of each condition.

    Of the deepest depth of training, and of the deepest of all, of the first seed.
    """
    examples = list(drawn_examples(result, nodes))
    if not examples:
        return None
    darkest, shade = SHADES[nodes]
    figure = probes.plot_control_flow(examples, darkest=darkest, shade=shade)
    reads = f"red: reads (attention of {LEAST_READ:g} or more); grey: state that is kept"
    figure.supxlabel(f"framed: updates ({nodes}); {reads}", fontsize=8)
    return figure


def attention(result: xr.DataTree) -> Figure | None:
    """Attention of an example of each condition at every step; framed: columns that change."""
    examples = [one for one in drawn_examples(result, "change", "\n") if one.number == 0]
    if not examples:
        return None
    figure = probes.plot_attention(examples)
    figure.supxlabel("column that is read; framed: columns whose state changes", fontsize=8)
    return figure
