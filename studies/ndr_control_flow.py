"""Do the gates and attention of a Neural Data Router draw the flow of its computation?

The claim of "The Neural Data Router" (Csordás, Irie and Schmidhuber 2021) is turned into graphs,
which are scored against the true computation: which column computes when, and which column reads
which? Gates are closed and attention is cut, on the graph's path to the answer and off it, to see
what the answer depends on.

    python studies/ndr_control_flow.py                              # about 40 minutes
    python studies/ndr_control_flow.py --preset smoke
    python studies/ndr_control_flow.py task.direction=forward model=ndr,geometric,lstm
    python studies/ndr_control_flow.py --preset paper-listops --device cuda --workers 1
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from typing import Any

from studies import engine
from studies.engine import metric, read, short
from studies.measures import control_flow as measures
from studies.report import plots
from studies.report.panels import CONDITIONS, values, values_of
from studies.setups.expressions import ARITHMETIC, GATED, LAPTOP, LISTOPS, LOOKUP, ROUTERS, by_model
from studies.views import ndr as views
from studies.views import ndr_maps as maps

# Claims and table


def flow(score: str, nodes: str, control: str = "trained") -> engine.Reading:
    """A score of the graphs against the true dataflow, over all examples."""
    select: Any = {"depth": "all", "correct": "all", "nodes": nodes, "control": control}
    return read("control_flow", "score", metric=score, **select)


def broken(condition: str, cut: str = "lasting") -> engine.Reading:
    """The share of right answers that a cut makes wrong, in graphs of changes."""
    select: Any = {"outcome": "broken", "nodes": "change", "cut": cut}
    return read("control_flow", "rate", condition=condition, **select)


def best_head(role: str, control: str = "trained") -> engine.Reading:
    """The largest attention of a head to the pairs of a role, or to those of a control."""
    return read("heads", "best", role=role, control=control)


def further_steps(predictor: str) -> engine.Reading:
    """Steps per level of depth, or per token of length, until an operation is done."""
    return read("timing", "slope", predictor=predictor, control="trained")


KINDS = {"gate": "open gates", "change": "changes"}
SCORES = {"f1": "edges, F1", "order": "in order", "tau": "tau x 100"}
CONTROLS = ("shuffled", "untrained")
HABITS = ("left neighbour", "right neighbour")
ROLES = (
    "operator reads argument",
    "argument reads operator",
    "operator reads result",
    "readout reads root",
)
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

    section = "Csordás et al. 2021, section 4"
    for role in ("operator reads argument", "operator reads result"):
        yield engine.Claim(
            f"NDR has a head whose part is: {role}, more than other columns are read",
            section,
            best_head(role) - best_head(role, "others"),
            NDR,
            0.0,
        )
    yield engine.Claim(
        "Of operations of the same length, NDR does the deeper ones later",
        section,
        further_steps("depth"),
        NDR,
        0.0,
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
    nulls = [*product(SCORES, CONTROLS), *product(["f1"], HABITS)]
    for nodes, (score, control) in product(KINDS, nulls):
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
        for other, name in (
            (f"{kind} off the path", "one off the path"),
            (f"no {kind}", "elsewhere"),
        ):
            yield positive(
                f"A cut {kind} on the path breaks more answers than {name}",
                reading=broken(f"{kind} on the path") - broken(other),
            )
    yield positive(
        "A gate on the path that stays closed breaks more answers than one closed for one step",
        reading=broken("node on the path") - broken("node on the path", "one step"),
    )


def rows() -> Iterator[engine.Row | engine.Section]:
    """The rows of the table."""
    yield engine.Row("right, id", metric("accuracy", "id"))
    yield engine.Row("  the paper's, id", metric("accuracy_paper", "id"), spread=False)
    for split, depth in product(("valid", "ood"), range(2, 17)):
        yield engine.Row(f"  depth {depth}, {split}", metric("accuracy", split, f"depth {depth}"))
    yield engine.Row("right, ood", metric("accuracy", "ood"))
    yield engine.Row("  the paper's", metric("accuracy_paper", "ood"), spread=False)
    yield engine.Row("  chance", metric("accuracy_chance", "ood"), spread=False)
    for nodes, title in KINDS.items():
        yield engine.Section(title)
        for score, control in product(SCORES, ("trained", *CONTROLS, *HABITS)):
            label = f"{SCORES[score]}, {control}".removesuffix(", trained")
            yield engine.Row(label, flow(score, nodes, control))
    for kind, title in (("node", "closed gate"), ("edge", "cut read")):
        yield engine.Section(title)
        yield engine.Row("on path", broken(f"{kind} on the path"))
        yield engine.Row("off path", broken(f"{kind} off the path"))
        yield engine.Row("elsewhere", broken(f"no {kind}"))
    yield engine.Section("best head")
    for role, control in product(ROLES, ("trained", "others", "untrained")):
        yield engine.Row(f"{role}, {control}".removesuffix(", trained"), best_head(role, control))
    yield engine.Section("operations done")
    for predictor, label in (("depth", "steps per level"), ("length", "steps per token")):
        yield engine.Row(label, further_steps(predictor), short)


TABLE = engine.Table(
    title="Accuracy and control flow (in %)",
    rows=tuple(rows()),
    caption="Right: share of right answers at the depths of training (id), at larger ones that "
    "choose the checkpoint (valid) and at the largest (ood); the paper's: its test, at its size. "
    "Nodes of the graph are columns at steps where their gate is open, or where their state "
    "changes. Edges: which column reads which, by attention, against the true dataflow; in order: "
    "share of dependencies whose source is done first; tau: rank correlation of first update and "
    "true depth; shuffled: the same graphs with permuted columns; untrained: with as many nodes; "
    "left and right neighbour: each column reads the next one that holds a value, in turn. "
    "Closed gate, cut read: share of right answers that become wrong when, from a node (change) "
    "on, its gate stays closed or attention to one column is set to zero. Best head: attention "
    "at any step to the pairs of columns of a role, mean over pairs, of the head that has most; "
    "others: to columns beside those. Operations done: how the step of the last change goes with "
    "depth and length of an operation, together.",
)

# Settings

BOTH = {"task.direction": ("forward", "backward")}
SEEDS = {"seed": (0, 1, 2, 3, 4)}
FIVE = ("lstm", "transformer", "relative", "abs_rel_gate", "ndr")
EIGHT = ("lstm", "dnc", *FIVE[1:3], "relative_gate", "abs_rel_gate", "geometric", "ndr")

# Settings of the paper's tables 4 to 6 for models other than NDR.
SMALL = "d_model=128 d_mlp=256 n_heads=4 n_steps=11 n_test_steps=11"
UNGATED_LOOKUP = f"{SMALL} dropout=0.1 attention_dropout=0.0 training.weight_decay=0.0025"
UNGATED_ARITHMETIC = f"{SMALL} training.n_steps=200000 training.weight_decay=0.0025"
UNGATED_LISTOPS = (
    "d_model=256 n_steps=6 n_test_steps=6 dropout=0.015 attention_dropout=0.05 "
    "training.n_steps=200000 training.learning_rate=4e-4 training.weight_decay=0.05"
)
RECURRENT = "training.batch_size=256 training.learning_rate=1e-3 training.weight_decay=0.0"


DEPARTURES = {
    "task.n_valid": "as many examples as choose the checkpoint are added, for measures",
    "training.length_bucketed_batches": "batches have all lengths, so that they can be made anew",
}


def paper_arithmetic(changes: str = "") -> engine.Preset:
    """The paper's settings for arithmetic, with changes for all models."""
    return engine.Preset(
        setup=ARITHMETIC,
        changes=f"drawn.n=1 {changes}",
        grids=({"model": FIVE} | SEEDS,),
        where=by_model(
            ungated=UNGATED_ARITHMETIC,
            recurrent=f"training.n_steps=200000 {RECURRENT}",
        ),
        departures=DEPARTURES,
    )


PRESETS = {
    "smoke": engine.Preset(
        changes="task.n_tables=3 task.train_depth=3 task.valid_depths=4,4 task.ood_depths=5,5 "
        "task.n_compositions=150 task.n_id=20 task.n_valid=50 task.n_ood=50 n_validation=20 "
        "d_model=16 d_mlp=16 n_steps=4 n_test_steps=6 d_embed=16 d_hidden=16 n_cells=4 d_cell=4 "
        "n_read_heads=1 training.stop_at=none training.n_steps=20 training.batch_size=16 "
        "training.warmup_steps=5 training.evaluate_every=10 control_flow.n=40 heads.n=40 "
        "timing.n=40 drawn.n=1",
        where=by_model(recurrent="dropout=0.0"),
    ),
    # Backward, the computation ends beside the first mark.
    "near-mark": engine.Preset(
        changes="model=ndr task.direction=backward readout=first training.n_steps=4000 "
        "training.stop_at=none"
    ),
    "paper": engine.Preset(
        setup=LOOKUP,
        changes="drawn.n=1",
        grids=({"model": EIGHT} | BOTH | SEEDS,),
        where=by_model(
            gated="d_mlp=1024 gate_dropout=0.0 training.learning_rate=2e-4",
            ungated=UNGATED_LOOKUP,
            recurrent=f"training.n_steps=20000 {RECURRENT}",
            geometric=UNGATED_LOOKUP,
        ),
        departures=DEPARTURES,
    ),
    "paper-arithmetic": paper_arithmetic(),
    # The rate is constant, so the first 50,000 steps are those of the whole run.
    "paper-arithmetic-early": paper_arithmetic("training.n_steps=50000"),
    "paper-listops": engine.Preset(
        setup=LISTOPS,
        changes="drawn.n=1",
        grids=({"model": FIVE} | SEEDS,),
        where=by_model(
            gated="d_mlp=2048",
            ungated=UNGATED_LISTOPS,
            recurrent="training.n_steps=200000 training.learning_rate=1e-3 "
            "training.weight_decay=0.08",
            relative=f"{UNGATED_LISTOPS} embedding_init=xavier_uniform",
        ),
        departures=DEPARTURES,
    ),
}

DONE = "step at which operations are done"
CHANCE = {"chance": values("scores", "accuracy_chance", group="all")}
PAPER = values_of({split: metric("accuracy_paper", split) for split in ("id", "ood")})
by_depth = functools.partial(plots.lines, along="depth", shaded=views.depths_of_training)
VIEWS = {
    "accuracy": functools.partial(
        by_depth,
        data=views.accuracy,
        references=CHANCE,
        ylabel="share of right answers",
        ylim=(0, 1.02),
    ),
    "accuracy_paper": functools.partial(
        plots.points,
        readings={split: metric("accuracy", split) for split in ("id", "ood")},
        references={"the paper's": PAPER},
        xlabel="share of right answers",
        separate=True,
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
    "attention": functools.partial(maps.attention, most=5),
    **{f"attention_{m}": functools.partial(maps.attention, model=m) for m in ROUTERS},
    **{f"head_{m}": functools.partial(maps.joining_head, model=m) for m in ROUTERS},
    **{f"gates_{m}": functools.partial(maps.gates, model=m) for m in GATED},
    "heads": maps.heads,
    "roles": functools.partial(
        plots.lines,
        data=views.roles,
        along="head",
        rows="role",
        lines="control",
        seeds="points",
        ylabel="attention to the pairs",
        ylim=(-0.02, 1.02),
    ),
    "done_by_depth": functools.partial(
        plots.lines, data=views.done_by_depth, along="depth", lines="control", ylabel=DONE
    ),
    "done_by_length": functools.partial(
        plots.lines,
        data=views.done_by_length,
        along="length",
        columns="depth",
        lines=CONDITIONS,
        ylabel=DONE,
    ),
    "key_order": maps.key_order,
}

STUDY = engine.Study(
    name="ndr_control_flow",
    question="Do gates and attention of a Neural Data Router draw its computation?",
    setup=LAPTOP,
    grids=({"model": ("ndr", "transformer"), "seed": (0,)} | BOTH,),
    where=by_model(ungated="dropout=0.0", recurrent="dropout=0.1"),
    presets=PRESETS,
    measures={
        "control_flow": measures.control_flow,
        "heads": measures.heads,
        "timing": measures.timing,
        "drawn": measures.drawn,
    },
    trained=engine.TrainedIf(split="id", metric="accuracy", reaches=0.9),
    claims=(*claims_of_the_paper(), *claims_of_ours()),
    table=TABLE,
    views=VIEWS,
    export=views.export,
)


if __name__ == "__main__":
    engine.main(STUDY)
