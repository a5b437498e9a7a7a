"""Do the gates and attention of a Neural Data Router draw the flow of its computation?

The claim of "The Neural Data Router" (Csordás, Irie and Schmidhuber 2021), turned into graphs that
are scored against the true computation: which column computes when, and who reads whom? Gates are
closed and attention is cut, on the graph's path to the answer and off it, to see what computes.

    python studies/ndr_control_flow.py                              # 15 to 20 minutes
    python studies/ndr_control_flow.py --preset smoke
    python studies/ndr_control_flow.py task.direction=forward model=ndr,geometric,lstm
    python studies/ndr_control_flow.py --preset paper-listops --device cuda --workers 1
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from studies.engine import (
    Claim,
    Preset,
    Reading,
    Row,
    Section,
    Study,
    Table,
    TrainedIf,
    TrainingConfig,
    main,
    metric,
    read,
)
from studies.ndr_measures import ControlFlow, Drawn
from studies.report.curves import training_curves
from studies.setups.expressions import RECURRENT, ExpressionSetup
from studies.views import ndr as views
from tasks import ArithmeticConfig, ListOpsConfig, TableLookupConfig


def flow(score: str, nodes: str, control: str = "trained") -> Reading:
    """How well the graphs match the true dataflow, over all examples."""
    select: Any = {"depth": "all", "correct": "all", "nodes": nodes, "control": control}
    return read("control_flow", "score", metric=score, **select)


def broken(condition: str, *, cut: str = "lasting") -> Reading:
    """How often a right answer becomes wrong by a cut of graphs of changes."""
    select: Any = {"outcome": "broken", "nodes": "change", "cut": cut}
    return read("control_flow", "rate", condition=condition, **select)


def deeper(than: str, tables: str, *, group: str = "all", **where: str) -> Claim:
    """That NDR answers deeper expressions better than another model."""
    return Claim(
        statement=f"NDR answers expressions deeper than in training better than {than}",
        source=f"Csordás et al. 2021, {tables}",
        reading=metric("accuracy", "ood", group),
        of={"model": "ndr"} | where,
        exceeds={"model": than} | where,
    )


def ours(statement: str, reading: Reading, *others: Any, of_learning: bool = False) -> Claim:
    """That something is greater than zero in every model; or in one condition than in another."""
    of, exceeds = others or ({}, 0.0)
    return Claim(
        statement=statement,
        source="ours",
        reading=reading,
        of=of,
        exceeds=exceeds,
        of_learning=of_learning,
    )


KINDS = {"gate": "open gates", "change": "changes"}
SCORES = {"f1": "edges, F1", "order": "in order", "tau": "tau x 100"}
CONTROLS = ("shuffled", "untrained")
BACKWARD = {"model": "ndr", "direction": "backward"}

CLAIMS = (
    deeper("transformer", "tables 1 to 3"),
    deeper("relative", "tables 1 to 3"),
    deeper("relative_gate", "table 1", direction="backward"),
    # Depth 7 is tested in arithmetic and ListOps alone.
    deeper("lstm", "tables 2 and 3", group="depth 7"),
    deeper("abs_rel_gate", "table 3", group="depth 7"),
    Claim(
        statement="NDR answers more than 95% of deeper expressions, in every direction",
        source="Csordás et al. 2021, tables 1 to 3",
        reading=metric("accuracy", "ood"),
        of={"model": "ndr"},
        exceeds=0.95,
    ),
    ours(
        "NDR learns held-out expressions of depths of training better than transformer",
        metric("accuracy", "id"),
        {"model": "ndr"},
        {"model": "transformer"},
        of_learning=True,
    ),
    ours(
        "Backward, NDR answers deeper expressions better if it is read at the near mark",
        metric("accuracy", "ood"),
        BACKWARD | {"readout": "first"},
        BACKWARD | {"readout": "last"},
    ),
    *(
        ours(
            f"Graphs of {KINDS[nodes]}: {SCORES[score]} above those of {control} graphs",
            flow(score, nodes) - flow(score, nodes, control),
        )
        for nodes in KINDS
        for score in SCORES
        for control in CONTROLS
        # Gates stay open to the last step, when all is done at once.
        if (nodes, score) != ("gate", "order")
    ),
    ours(
        "Changes tell when a column is done, open gates do not: more is in order by changes",
        flow("order", "change") - flow("order", "gate"),
    ),
    *(
        ours(
            f"A cut {kind} on the path breaks more answers than {other}",
            broken(f"{kind} on the path") - broken(other),
        )
        for kind in ("node", "edge")
        for other in (f"{kind} off the path", f"no {kind}")
    ),
    ours(
        "A gate on the path that stays closed breaks more answers than one closed for one step",
        broken("node on the path") - broken("node on the path", cut="one step"),
    ),
)

TABLE = Table(
    title="Accuracy and control flow (in %)",
    rows=(
        Row("right, id", metric("accuracy", "id")),
        *(
            Row(f"  depth {depth}, {split}", metric("accuracy", split, f"depth {depth}"))
            for split in ("valid", "ood")
            for depth in range(2, 17)
        ),
        Row("right, ood", metric("accuracy", "ood")),
        Row("  the paper's", metric("accuracy_paper", "ood"), spread=False),
        Row("  chance", metric("accuracy_chance", "ood"), spread=False),
        *(
            row
            for nodes, title in KINDS.items()
            for row in (
                Section(title),
                *(
                    Row(
                        f"{label}, {control}".removesuffix(", trained"), flow(score, nodes, control)
                    )
                    for score, label in SCORES.items()
                    for control in ("trained", *CONTROLS)
                ),
            )
        ),
        *(
            row
            for kind, title in (("node", "closed gate"), ("edge", "cut read"))
            for row in (
                Section(title),
                Row("on path", broken(f"{kind} on the path")),
                Row("off path", broken(f"{kind} off the path")),
                Row("elsewhere", broken(f"no {kind}")),
            )
        ),
    ),
    caption="Right: share of right answers at depths of training (id), at deeper ones that choose "
    "the checkpoint (valid) and the deepest (ood); the paper's: its test, at its size. The graph's "
    "nodes are columns at steps where their gate is open, or where their state changes. Edges: who "
    "reads whom, by attention, against the true dataflow; in order: share of dependencies whose "
    "source is done first; tau: of first update and true depth; shuffled: the same graphs, columns "
    "permuted; untrained: as many nodes. Closed gate, cut read: how often a right answer becomes "
    "wrong when, from one node (change) on, the gate stays closed or the attention to one column "
    "zero.",
)


def by_model(
    gated: Mapping[str, Any], ungated: Mapping[str, Any], recurrent: Mapping[str, Any]
) -> dict[str, Any]:
    """What differs from the settings of NDR and of geometric attention without a gate."""
    kinds = {("relative_gate", "abs_rel_gate"): gated, ("relative", "transformer"): ungated}
    kinds |= {RECURRENT: recurrent}
    return {"model": {model: some for models, some in kinds.items() for model in models}}


LAPTOP = ExpressionSetup(
    model="ndr",
    task=TableLookupConfig(
        n_tables=8,
        n_lone=0,
        valid_depths=(6, 7),
        ood_depths=(8, 10),
        n_compositions=20_000,
        n_id=400,
        n_valid=1000,
        n_ood=2000,
        sampling="depth",
    ),
    d_model=64,
    d_mlp=128,
    n_heads=4,
    n_steps=8,
    n_test_steps=14,
    dropout=0.2,
    attention_dropout=0.0,
    initial_s_bias=-2.0,
    d_hidden=128,
    n_layers=1,
    training=TrainingConfig(
        n_steps=12_000,
        stop_at=0.995,
        batch_size=128,
        learning_rate=3e-3,
        weight_decay=0.01,
        warmup_steps=100,
        evaluate_every=500,
        beta2=0.98,
        clip=5.0,
    ),
    n_validation=500,
)
SLOW = {"training.n_steps": 3000, "training.stop_at": None, "training.learning_rate": 1e-3}


LOOKUP = replace(
    LAPTOP,
    task=TableLookupConfig(),
    d_model=256,
    d_mlp=512,
    n_heads=1,
    n_steps=14,
    n_test_steps=14,
    dropout=0.5,
    attention_dropout=0.1,
    initial_s_bias=0.0,
    d_hidden=200,
    training=TrainingConfig(
        n_steps=30_000,
        batch_size=512,
        learning_rate=1.5e-4,
        final_learning_rate=1.0,
        weight_decay=0.01,
        warmup_steps=0,
        evaluate_every=1000,
        clip=5.0,
    ),
    n_validation=1000,
)
"""The paper's settings of its appendix: of NDR, of LSTMs and the DNC."""

ARITHMETIC = replace(
    LOOKUP,
    n_validation=500,
    task=ArithmeticConfig(),
    d_mlp=1024,
    n_heads=4,
    n_steps=15,
    n_test_steps=15,
    n_layers=2,
    training=replace(LOOKUP.training, n_steps=100_000, clip=1.0),
)
LISTOPS = replace(
    ARITHMETIC,
    task=ListOpsConfig(),
    d_model=512,
    n_heads=16,
    n_steps=20,
    n_test_steps=24,
    dropout=0.1,
    gate_dropout=0.05,
    d_hidden=512,
    n_layers=4,
    training=replace(ARITHMETIC.training, learning_rate=2e-4, weight_decay=0.09),
)


def sized(d_model: int, d_mlp: int, n_heads: int, n_steps: int) -> dict[str, Any]:
    """Sizes of a transformer, which is tested with as many steps as it is trained with."""
    sizes = {"d_model": d_model, "d_mlp": d_mlp, "n_heads": n_heads}
    return sizes | {"n_steps": n_steps, "n_test_steps": n_steps}


def trained(n_steps: int, rate: float, decay: float, batch_size: int = 512) -> dict[str, Any]:
    """How a kind of model is trained."""
    values = {"n_steps": n_steps, "learning_rate": rate, "weight_decay": decay}
    return {f"training.{k}": v for k, v in (values | {"batch_size": batch_size}).items()}


LSTMS = trained(200_000, 1e-3, 0.0, batch_size=256)
MODELS = ("ndr", "transformer")
ONE_TASK = ({"model": MODELS, "seed": (0,)},)
SPLITS = {
    "task": "evaluation splits of our own, as even over depths as can be",
    "n_validation": "checkpoints are chosen by a part of `valid`; the rest is measured",
}
PRESETS = {
    "smoke": Preset(
        changes={
            "n_validation": 20,
            "task": replace(
                LAPTOP.task,
                n_tables=3,
                train_depth=3,
                valid_depths=(4, 4),
                ood_depths=(5, 5),
                n_compositions=150,
                n_id=20,
                n_valid=50,
                n_ood=50,
            ),
            **{"d_model": 16, "d_mlp": 16, "n_steps": 4, "n_test_steps": 6, "d_hidden": 16},
            **{"n_cells": 4, "d_cell": 4, "n_read_heads": 1},
            "training": replace(
                LAPTOP.training,
                stop_at=None,
                n_steps=20,
                batch_size=16,
                warmup_steps=5,
                evaluate_every=10,
            ),
            "control_flow.n": 40,
            "drawn.n": 1,
        },
        where=by_model({}, {}, {"dropout": 0.0}),
    ),
    # Backward, the computation ends beside the first mark.
    "near-mark": Preset(
        changes={
            "model": "ndr",
            "task.direction": "backward",
            "readout": "first",
            "training.n_steps": 4000,
            "training.stop_at": None,
        }
    ),
    "paper": Preset(
        setup=LOOKUP,
        where=by_model(
            {"training.learning_rate": 2e-4},
            sized(128, 256, 4, 11) | {"dropout": 0.1} | trained(30_000, 1.5e-4, 0.0025),
            trained(20_000, 1e-3, 0.0, batch_size=256),
        ),
        departures=SPLITS,
    ),
    "paper-arithmetic": Preset(
        setup=ARITHMETIC,
        grids=ONE_TASK,
        where=by_model({}, sized(128, 256, 4, 11) | trained(200_000, 1.5e-4, 0.0025), LSTMS),
        departures=SPLITS,
    ),
    "paper-listops": Preset(
        setup=LISTOPS,
        grids=ONE_TASK,
        where=by_model(
            {"d_mlp": 2048, "gate_dropout": 0.1},
            sized(256, 1024, 16, 6) | {"dropout": 0.015} | trained(200_000, 4e-4, 0.05),
            trained(200_000, 1e-3, 0.08),
        ),
        departures=SPLITS,
    ),
}

STUDY = Study(
    name="ndr_control_flow",
    question="Do gates and attention of a Neural Data Router draw its computation?",
    setup=LAPTOP,
    grids=({"model": MODELS, "task.direction": ("forward", "backward"), "seed": (0,)},),
    where=by_model(SLOW, SLOW | {"n_test_steps": 8}, SLOW | {"dropout": 0.1}),
    presets=PRESETS,
    measures={"control_flow": ControlFlow(), "drawn": Drawn()},
    trained=TrainedIf(split="id", metric="accuracy", reaches=0.9),
    claims=CLAIMS,
    table=TABLE,
    views={
        "accuracy": views.accuracy_by_depth,
        "training": functools.partial(
            training_curves, metric="accuracy", limits={"chance": ("scores", "accuracy_chance")}
        ),
        **{f"scores_{nodes}": functools.partial(views.scores, nodes=nodes) for nodes in KINDS},
        "cuts": views.cuts,
        "parallelism": views.parallelism,
        **{f"graphs_{nodes}": functools.partial(views.graphs, nodes=nodes) for nodes in KINDS},
        "attention": views.attention,
    },
    export=views.export,
)


if __name__ == "__main__":
    main(STUDY)
