"""Do the gates and attention of a Neural Data Router draw the flow of its computation?

The claim of "The Neural Data Router" (Csordás, Irie and Schmidhuber 2021) is turned into graphs,
which are scored against the true computation: which column computes when, and which column reads
which? Gates are closed and attention is cut, on the graph's path to the answer and off it, to see
what the answer depends on.

    python studies/ndr_control_flow.py                              # 15 to 20 minutes
    python studies/ndr_control_flow.py --preset smoke
    python studies/ndr_control_flow.py task.direction=forward model=ndr,geometric,lstm
    python studies/ndr_control_flow.py --preset paper-listops --device cuda --workers 1
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any

import xarray as xr

import probes
import tasks
from studies import engine
from studies.engine import metric, read
from studies.report import plots
from studies.report.panels import values
from studies.setups import expressions
from studies.setups.expressions import ARITHMETIC, LAPTOP, LISTOPS, LOOKUP, by_model
from studies.views import ndr as views


def control_flow(trained: engine.Trained, n: int = 1000) -> xr.Dataset | None:
    """Whether graphs of gates and attention match the true dataflow, and whether answers need them.

    Args:
        trained: the trained model and its untrained control.
        n: number of examples, spread over all depths.
    """
    setup = trained.setup
    if setup.model not in expressions.GATED:
        return None
    batch = expressions.examples_of_all_depths(trained, n)
    return probes.examine_control_flow(
        trained.model,
        batch.inputs,
        tasks.column_dataflow(batch, readout=setup.readout),
        untrained=trained.untrained,
        answer=expressions.most_probable,
        thresholds=views.NODES,
        attention_threshold=views.LEAST_READ,
        routes=None if isinstance(setup.task, tasks.TableLookupConfig) else 1,
        seed=trained.seed,
        batch_size=setup.evaluation_batch_size,
    )


def drawn(trained: engine.Trained, n: int = 2) -> xr.Dataset | None:
    """Gates and attention of a few examples, whose graphs are drawn and exported.

    `gate`, `change`, `attention`, see `probes.capture_control_flow`; and `tokens`, `target`,
    `answer`, `depth` [example].

    Args:
        trained: the trained model.
        n: examples of the largest depth in training, and of each larger depth.
    """
    setup, task = trained.setup, trained.task
    if setup.model not in expressions.GATED:
        return None
    batch = expressions.examples_of_all_depths(trained, n * setup.task.ood_depths[1])
    batch = batch[batch.latents["depth"] >= setup.task.train_depth]
    examples = range(len(batch))
    parts = batch.parts(setup.evaluation_batch_size)
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


# Claims and table


def flow(score: str, nodes: str, control: str = "trained") -> engine.Reading:
    """A score of the graphs against the true dataflow, over all examples."""
    select: Any = {"depth": "all", "correct": "all", "nodes": nodes, "control": control}
    return read("control_flow", "score", metric=score, **select)


def broken(condition: str, cut: str = "lasting") -> engine.Reading:
    """The share of right answers that a cut makes wrong, in graphs of changes."""
    select: Any = {"outcome": "broken", "nodes": "change", "cut": cut}
    return read("control_flow", "rate", condition=condition, **select)


KINDS = {"gate": "open gates", "change": "changes"}
SCORES = {"f1": "edges, F1", "order": "in order", "tau": "tau x 100"}
CONTROLS = ("shuffled", "untrained")
NDR = {"model": "ndr"}
BACKWARD = {"direction": "backward"}


def claims_of_the_paper() -> Iterator[engine.Claim]:
    """Claims of the paper's tables, about accuracy."""
    for than, tables, group, where in (
        ("transformer", "tables 1 to 3", "all", {}),
        ("relative", "tables 1 to 3", "all", {}),
        ("relative_gate", "table 1", "all", BACKWARD),
        # Only arithmetic and ListOps are tested at depth 7.
        ("lstm", "tables 2 and 3", "depth 7", {}),
        ("abs_rel_gate", "table 3", "depth 7", {}),
    ):
        yield engine.Claim(
            f"NDR answers expressions deeper than in training better than {than}",
            f"Csordás et al. 2021, {tables}",
            metric("accuracy", "ood", group),
            NDR | where,
            {"model": than} | where,
        )
    yield engine.Claim(
        "NDR answers more than 95% of deeper expressions, in every direction",
        "Csordás et al. 2021, tables 1 to 3",
        metric("accuracy", "ood"),
        NDR,
        0.95,
    )


def claims_of_ours() -> Iterator[engine.Claim]:
    """Our claims: what should hold if the graphs show the computation."""
    yield engine.Claim(
        "NDR learns held-out expressions of depths of training better than transformer",
        "ours",
        metric("accuracy", "id"),
        NDR,
        {"model": "transformer"},
        of_learning=True,
    )
    yield engine.Claim(
        "Backward, NDR answers deeper expressions better if it is read at the near mark",
        "ours",
        metric("accuracy", "ood"),
        NDR | BACKWARD | {"readout": "first"},
        NDR | BACKWARD | {"readout": "last"},
    )
    positive = functools.partial(engine.Claim, source="ours", of={}, exceeds=0.0)
    for nodes, score, control in product(KINDS, SCORES, CONTROLS):
        # Gates stay open until the last step, so by gates all columns are done at once.
        if (nodes, score) != ("gate", "order"):
            yield positive(
                f"Graphs of {KINDS[nodes]}: {SCORES[score]} above those of {control} graphs",
                reading=flow(score, nodes) - flow(score, nodes, control),
            )
    yield positive(
        "Changes show when a column is done, open gates do not: changes are in order more often",
        reading=flow("order", "change") - flow("order", "gate"),
    )
    for kind in ("node", "edge"):
        for other in (f"{kind} off the path", f"no {kind}"):
            yield positive(
                f"A cut {kind} on the path breaks more answers than {other}",
                reading=broken(f"{kind} on the path") - broken(other),
            )
    yield positive(
        "A gate on the path that stays closed breaks more answers than one closed for one step",
        reading=broken("node on the path") - broken("node on the path", "one step"),
    )


def rows() -> Iterator[engine.Row | engine.Section]:
    """The rows of the table."""
    yield engine.Row("right, id", metric("accuracy", "id"))
    for split, depth in product(("valid", "ood"), range(2, 17)):
        yield engine.Row(f"  depth {depth}, {split}", metric("accuracy", split, f"depth {depth}"))
    yield engine.Row("right, ood", metric("accuracy", "ood"))
    yield engine.Row("  the paper's", metric("accuracy_paper", "ood"), spread=False)
    yield engine.Row("  chance", metric("accuracy_chance", "ood"), spread=False)
    for nodes, title in KINDS.items():
        yield engine.Section(title)
        for score, control in product(SCORES, ("trained", *CONTROLS)):
            label = f"{SCORES[score]}, {control}".removesuffix(", trained")
            yield engine.Row(label, flow(score, nodes, control))
    for kind, title in (("node", "closed gate"), ("edge", "cut read")):
        yield engine.Section(title)
        yield engine.Row("on path", broken(f"{kind} on the path"))
        yield engine.Row("off path", broken(f"{kind} off the path"))
        yield engine.Row("elsewhere", broken(f"no {kind}"))


TABLE = engine.Table(
    title="Accuracy and control flow (in %)",
    rows=tuple(rows()),
    caption="Right: share of right answers at the depths of training (id), at larger ones that "
    "choose the checkpoint (valid) and at the largest (ood); the paper's: its test, at its size. "
    "Nodes of the graph are columns at steps where their gate is open, or where their state "
    "changes. Edges: which column reads which, by attention, against the true dataflow; in order: "
    "share of dependencies whose source is done first; tau: rank correlation of first update and "
    "true depth; shuffled: the same graphs with permuted columns; untrained: with as many nodes. "
    "Closed gate, cut read: share of right answers that become wrong when, from a node (change) "
    "on, its gate stays closed or attention to one column is set to zero.",
)

# Settings

SLOW = "training.n_steps=3000 training.stop_at=none training.learning_rate=0.001"
SMALL = "d_model=128 d_mlp=256 n_heads=4 n_steps=11 n_test_steps=11"
WIDE = "d_model=256 d_mlp=1024 n_heads=16 n_steps=6 n_test_steps=6"
LONG = "training.n_steps=200000 training.batch_size=512"
SHORT = "training.weight_decay=0.0 training.batch_size=256"

ONE_TASK = ({"model": ("ndr", "transformer"), "seed": (0,)},)
SPLITS = {
    "task": "our own evaluation splits, as evenly spread over depths as possible",
    "n_validation": "checkpoints are chosen on a part of `valid`, measures use the rest",
}
PRESETS = {
    "smoke": engine.Preset(
        changes="task.n_tables=3 task.train_depth=3 task.valid_depths=4,4 task.ood_depths=5,5 "
        "task.n_compositions=150 task.n_id=20 task.n_valid=50 task.n_ood=50 n_validation=20 "
        "d_model=16 d_mlp=16 n_steps=4 n_test_steps=6 d_hidden=16 n_cells=4 d_cell=4 "
        "n_read_heads=1 training.stop_at=none training.n_steps=20 training.batch_size=16 "
        "training.warmup_steps=5 training.evaluate_every=10 control_flow.n=40 drawn.n=1",
        where=by_model(recurrent="dropout=0.0"),
    ),
    # Backward, the computation ends beside the first mark.
    "near-mark": engine.Preset(
        changes="model=ndr task.direction=backward readout=first training.n_steps=4000 "
        "training.stop_at=none"
    ),
    "paper": engine.Preset(
        setup=LOOKUP,
        where=by_model(
            gated="training.learning_rate=2e-4",
            ungated=f"{SMALL} dropout=0.1 training.n_steps=30000 training.learning_rate=1.5e-4 "
            "training.weight_decay=0.0025 training.batch_size=512",
            recurrent=f"training.n_steps=20000 training.learning_rate=1e-3 {SHORT}",
        ),
        departures=SPLITS,
    ),
    "paper-arithmetic": engine.Preset(
        setup=ARITHMETIC,
        grids=ONE_TASK,
        where=by_model(
            ungated=f"{SMALL} {LONG} training.learning_rate=1.5e-4 training.weight_decay=0.0025",
            recurrent=f"training.n_steps=200000 training.learning_rate=1e-3 {SHORT}",
        ),
        departures=SPLITS,
    ),
    "paper-listops": engine.Preset(
        setup=LISTOPS,
        grids=ONE_TASK,
        where=by_model(
            gated="d_mlp=2048 gate_dropout=0.1",
            ungated=f"{WIDE} {LONG} dropout=0.015 training.learning_rate=4e-4 "
            "training.weight_decay=0.05",
            recurrent=f"{LONG} training.learning_rate=1e-3 training.weight_decay=0.08",
        ),
        departures=SPLITS,
    ),
}

CHANCE = {"chance": values("scores", "accuracy_chance", group="all")}
by_depth = functools.partial(plots.lines, along="depth", shaded=views.depths_of_training)
VIEWS = {
    "accuracy": functools.partial(
        by_depth,
        data=views.accuracy,
        references=CHANCE,
        ylabel="share of right answers",
        ylim=(0, 1.02),
    ),
    "training": functools.partial(plots.training, metric="accuracy", references=CHANCE),
    **{
        f"scores_{nodes}": functools.partial(
            by_depth,
            data=functools.partial(views.scores, nodes=nodes),
            rows="metric",
            lines=views.CURVES,
        )
        for nodes in KINDS
    },
    "cuts": functools.partial(
        plots.lines,
        data=views.cuts,
        along="condition",
        rows="nodes",
        lines="cut",
        seeds="points",
        ylabel="right answers made wrong",
        ylim=(-0.1, 1.05),
    ),
    "parallelism": functools.partial(
        plots.lines,
        data=views.parallelism,
        along="step",
        rows="row",
        lines=views.OPERATIONS,
        ylabel="operations",
    ),
    **{f"graphs_{nodes}": functools.partial(views.graphs, nodes=nodes) for nodes in KINDS},
    "attention": views.attention,
}

STUDY = engine.Study(
    name="ndr_control_flow",
    question="Do gates and attention of a Neural Data Router draw its computation?",
    setup=LAPTOP,
    grids=(ONE_TASK[0] | {"task.direction": ("forward", "backward")},),
    where=by_model(SLOW, f"{SLOW} n_test_steps=8", f"{SLOW} dropout=0.1"),
    presets=PRESETS,
    measures={"control_flow": control_flow, "drawn": drawn},
    trained=engine.TrainedIf(split="id", metric="accuracy", reaches=0.9),
    claims=(*claims_of_the_paper(), *claims_of_ours()),
    table=TABLE,
    views=VIEWS,
    export=views.export,
)


if __name__ == "__main__":
    engine.main(STUDY)
