"""Do the gates and attention of a Neural Data Router draw the flow of its computation?

The claim of "The Neural Data Router" (Csordás, Irie and Schmidhuber 2021) is turned into graphs,
which are scored against the true computation: which column computes when, and which column reads
which? Gates are closed and attention is cut, on the graph's path to the answer and off it, to see
what the answer depends on.

    python studies/ndr_control_flow.py                              # about 40 minutes
    python studies/ndr_control_flow.py --preset smoke
    python studies/ndr_control_flow.py task.direction=forward model=ndr,geometric,lstm
    python studies/ndr_control_flow.py --study ndr_arithmetic
    python studies/ndr_control_flow.py --study ndr_listops --preset paper --device cuda --workers 1
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from studies import engine
from studies.claims import ndr as claims
from studies.claims.ndr import (
    CONTROLS,
    HABITS,
    KINDS,
    SCORES,
    best_head,
    broken,
    flow,
    right_above_wrong,
)
from studies.engine import metric, short
from studies.engine.study import Grid
from studies.measures import control_flow as measures
from studies.report import drawings, plots
from studies.report.panels import CONDITIONS, values, values_of
from studies.setups.expressions import (
    ARITHMETIC,
    GATED,
    LAPTOP,
    LAPTOP_ARITHMETIC,
    LAPTOP_LISTOPS,
    LATE_GATE,
    LISTOPS,
    LOOKUP,
    MODELS,
    MUON,
    NDRS,
    OWN_GATE,
    ROUTERS,
    ExpressionSetup,
    by_model,
)
from studies.views import ndr as views
from studies.views import ndr_browser
from studies.views import ndr_maps as maps

ROLES = (
    "operator reads argument",
    "argument reads operator",
    "operator reads result",
    "readout reads root",
)


NOTES = {
    "f1": "Edges: which column reads which, by attention, against the true dataflow.",
    "order": "In order: share of dependencies whose source is done first.",
    "tau": "Tau: rank correlation of first update and true depth.",
    "shuffled": "Shuffled: the same graphs with permuted columns.",
    "untrained": "Untrained: with as many nodes.",
    "left neighbour": "Left and right neighbour: each column reads the next one that holds a "
    "value, in turn.",
    "both neighbours": "Both neighbours: each reads the columns beside it, at every step.",
}
"""Of scores of graphs, and of their controls."""


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
        yield engine.Section(
            title,
            "Nodes of the graph are columns at steps where their gate is open, or where their "
            "state changes.",
        )
        # All controls of the edges; order and tau have theirs in the figures.
        for score, control in (
            *product(["f1"], ("trained", *CONTROLS, *HABITS)),
            *product(["order", "tau"], ("trained", "untrained")),
        ):
            label = f"{SCORES[score]}, {control}".removesuffix(", trained")
            note = NOTES[score] if control == "trained" else NOTES.get(control, "")
            yield engine.Row(label, flow(score, nodes, control), note=note)
        for score in ("f1", "tau"):
            yield engine.Row(
                f"{SCORES[score]}, right above wrong answers",
                right_above_wrong(score, nodes),
                note="Right above wrong answers: of the same depth, where there are enough wrong "
                "ones.",
            )
    for kind, title in (("node", "closed gate"), ("edge", "cut read")):
        yield engine.Section(
            title,
            "Closed gate, cut read: share of right answers that become wrong when, from a node "
            "(change) on, its gate stays closed or attention to one column is set to zero.",
        )
        yield engine.Row("on path", broken(f"{kind} on the path"))
        yield engine.Row("off path", broken(f"{kind} off the path"))
        yield engine.Row("elsewhere", broken(f"no {kind}"))
    yield engine.Section(
        "best head",
        "Best head: attention at any step to the pairs of columns of a role, mean over pairs, of "
        "the head that has most; others: to columns beside those.",
    )
    for role, control in product(ROLES, ("trained", "others", "untrained")):
        yield engine.Row(f"{role}, {control}".removesuffix(", trained"), best_head(role, control))
    yield engine.Section(
        "operations done",
        "Operations done: how the step of the last change goes with depth and length of an "
        "operation, together.",
    )
    for predictor, label in (("depth", "steps per level"), ("length", "steps per token")):
        yield engine.Row(label, claims.further_steps(predictor), short)
    yield engine.Section("reads")
    yield engine.Row(
        "of a neighbour",
        claims.NEIGHBOUR,
        note="Of a neighbour: share of operations that read the column beside theirs.",
    )
    for place, reading in claims.SAME.items():
        yield engine.Row(
            f"by read-out, same {place}",
            reading,
            note="By read-out: share of examples in which the read-out column reads at the most "
            "frequent position, or distance, over all lengths.",
        )
    for count, reading in claims.SHARP.items():
        yield engine.Row(
            f"{count} per level",
            reading,
            short,
            note="Per level of depth: columns with a sharp read, and the step of the last one.",
        )
    for step, reading in claims.ENTROPY.items():
        yield engine.Row(
            f"entropy, step {step}",
            reading,
            note="Entropy: of attention, in % of that of even attention.",
        )


TABLE = engine.Table(
    title="Accuracy and control flow (in %)",
    rows=tuple(rows()),
    caption="Right: share of right answers at the depths of training (id), at larger ones that "
    "choose the checkpoint (valid) and at the largest (ood); the paper's: its test, at its size.",
)

# Settings

BOTH = {"task.direction": ("forward", "backward")}
SEEDS = {"seed": (0, 1, 2, 3, 4)}
FIVE = ("lstm", "transformer", "relative", "abs_rel_gate", "ndr")
SIX = ("transformer", "relative", "relative_gate", "abs_rel_gate", "geometric", "ndr")
EIGHT = ("lstm", "dnc", *SIX)

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


def dropout_of(ungated: str = "", recurrent: str = "") -> engine.Where:
    """The dropout of models other than NDR at the size of two cores, with further changes."""
    return by_model(
        ungated=f"dropout=0.0 {ungated}",
        recurrent=f"dropout=0.1 {recurrent}",
        geometric="dropout=0.0",
    )


TO_THE_END = dropout_of(ungated="training.stop_at=none training.compile=true")
"""For models without gates, which take long."""


def smoke(task: str) -> engine.Preset:
    """A preset of tiny models on a few examples of a task."""
    return engine.Preset(
        changes=f"{task} task.train_depth=3 task.valid_depths=4,4 task.ood_depths=5,5 "
        "task.n_id=20 task.n_valid=50 task.n_ood=50 n_validation=20 d_model=16 d_mlp=16 n_steps=4 "
        "n_test_steps=6 d_embed=16 d_hidden=16 n_cells=4 d_cell=4 n_read_heads=1 "
        "training.stop_at=none training.n_steps=20 training.batch_size=16 "
        "training.warmup_steps=5 training.evaluate_every=10 control_flow.n=40 heads.n=40 "
        "sensitivity.n=40 timing.n=40 reads.n=40 drawn.n=1",
        where=by_model(recurrent="dropout=0.0"),
    )


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


LOOKUP_PRESETS = {
    "smoke": smoke("task.n_tables=3 task.n_compositions=150"),
    # Those of the paper, and what it says of others: all for the same number of steps. Muon needs
    # half of AdamW's.
    "models": engine.Preset(
        changes=f"{MUON} training.n_steps=6000 drawn.n=1",
        grids=(
            # Three seeds left open what the direction of keys does, and whether the DNC solves one
            # direction.
            {"model": NDRS} | BOTH | SEEDS,
            {"model": ("lstm", "dnc")} | BOTH | {"seed": tuple(range(7))},
            {
                "model": tuple(
                    name for name in MODELS if name not in (*NDRS, "lstm", "dnc", "albert")
                )
            }
            | BOTH
            | {"seed": (0, 1, 2)},
        ),
    ),
    # Backward, recurrent models still improve after 6,000 steps.
    "recurrent": engine.Preset(
        changes=f"{MUON} training.n_steps=24000 task.direction=backward drawn.n=1",
        grids=({"model": ("lstm", "dnc"), "seed": (0, 1, 2)},),
    ),
    # So does one in five Neural Data Routers. A sixth seed, to have more than `models`.
    "backward": engine.Preset(
        changes=f"{MUON} training.n_steps=12000 task.direction=backward drawn.n=1",
        grids=({"model": NDRS, "seed": (0, 1, 2, 3, 4, 5)},),
    ),
    # With the gate, geometric attention and positions, or without. Muon's rate was chosen with NDR
    # alone, and models without gates learn nothing at it.
    "parts": engine.Preset(
        changes="drawn.n=1",
        grids=({"model": SIX} | BOTH | {"seed": (0, 1, 2)},),
    ),
    # Three seeds left open which of the two is learned in fewer steps: seven more, backward.
    "choice": engine.Preset(
        changes="task.direction=backward",
        grids=({"model": ("abs_rel_gate", "ndr"), "seed": tuple(range(10))},),
        measures=(),
    ),
    # Each at its best rate. Models without gates take long: they were trained on a GPU. Three seeds
    # left open how far relative positions go.
    "gateless": engine.Preset(
        changes="drawn.n=1",
        grids=tuple(
            {"model": models, "training.learning_rate": rates, "seed": seeds} | BOTH
            for models, rates, seeds in (
                (("transformer", "relative", "ndr"), (0.001, 0.002, 0.004), (0, 1, 2)),
                (("relative",), (0.004,), (3, 4)),
            )
        ),
        where=TO_THE_END,
    ),
    # Five seeds left open how many of the deeper expressions it answers forward: two more.
    "relative": engine.Preset(
        changes="model=relative task.direction=forward drawn.n=1 training.learning_rate=0.004 "
        "seed=0,1,2,3,4,5,6",
        where=TO_THE_END,
    ),
    # The rate is the one at which transformers with relative positions are best. Three seeds left
    # open whether it is right in half of the deeper expressions forward.
    "geometric": engine.Preset(
        changes="model=geometric drawn.n=1 training.learning_rate=0.004",
        grids=tuple(
            {"task.direction": (direction,), "seed": tuple(range(n))}
            for direction, n in (("forward", 15), ("backward", 3))
        ),
        where=by_model(geometric="dropout=0.0 training.stop_at=none training.compile=true"),
    ),
    # The rate is the one at which the transformer with absolute positions is best.
    "albert": engine.Preset(
        changes="model=albert task.direction=forward drawn.n=1 training.learning_rate=0.002 "
        "seed=0,1,2",
        where=TO_THE_END,
    ),
    # The same for columns that halt when they will.
    "adaptive": engine.Preset(
        changes="model=act drawn.n=1 training.learning_rate=0.002 seed=0,1,2",
        grids=(BOTH,),
        where=TO_THE_END,
    ),
    # Gates that the paper tried before its own; all at the rate that is best without a gate.
    "other-gates": engine.Preset(
        changes=f"model=relative,{OWN_GATE},{LATE_GATE} task.direction=forward drawn.n=1 "
        "training.learning_rate=0.004 seed=0,1,2",
        where=TO_THE_END,
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
}
ARITHMETIC_PRESETS = {
    "smoke": smoke("task.n_train=300"),
    "models": engine.Preset(changes="drawn.n=1", grids=({"model": FIVE, "seed": (0, 1, 2)},)),
    # After the 8,000 steps of `models` those with attention still improve.
    "longer": engine.Preset(
        changes="training.n_steps=16000 training.compile=true drawn.n=1",
        grids=({"model": FIVE} | SEEDS,),
    ),
    # Three seeds left open whether the LSTM needs more steps: six new ones.
    "lstm": engine.Preset(
        changes="training.n_steps=16000 training.compile=true",
        grids=({"model": ("lstm", "ndr"), "seed": tuple(range(5, 11))},),
        measures=(),
    ),
    "paper": paper_arithmetic(),
    # The rate is constant, so the first 50,000 steps are those of the whole run.
    "paper-early": paper_arithmetic("training.n_steps=50000"),
}
LISTOPS_PRESETS = {
    "smoke": smoke("task.n_train=300"),
    # Three seeds left open what heads read, and five what those of NDR do.
    # The LSTM needs more steps until nine of ten are right, and less time for them.
    "models": engine.Preset(
        changes="drawn.n=1",
        grids=(
            {"model": FIVE} | SEEDS,
            {"model": ("ndr",), "seed": tuple(range(5, 13))},
        ),
        where=dropout_of(recurrent="training.n_steps=32000"),
    ),
    "paper": engine.Preset(
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
    "tuning": plots.tuning,
    **{
        f"scores_{nodes}": functools.partial(
            by_depth,
            data=functools.partial(views.scores, nodes=nodes),
            rows="metric",
            lines=views.CURVES,
            # The interval of two networks may be wider than what scores can be.
            ylim=(-0.6, 1.1),
        )
        for nodes in KINDS
    },
    "sensitivity": functools.partial(
        plots.lines,
        data=views.sensitivity,
        along="smallest_change",
        rows="metric",
        lines="attention_threshold",
        references={"best habit": views.habit},
        ylim=(-0.2, 1.02),
    ),
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
    "readout_reads": functools.partial(
        drawings.matrices,
        data=values("reads", "readout_reads", control="trained"),
        y="length",
        x="position",
        title="share of examples",
    ),
    "blur": functools.partial(
        plots.lines,
        data=values("reads", "entropy"),
        along="step",
        lines="control",
        ylabel="entropy of attention / largest",
        ylim=(-0.02, 1.02),
    ),
}


def control_flow_study(
    name: str,
    question: str,
    setup: ExpressionSetup,
    grid: Grid,
    presets: Mapping[str, engine.Preset],
    claimed: Sequence[engine.Claim],
) -> engine.Study:
    """The study of control flow in one task; arguments: see `engine.Study`."""
    return engine.Study(
        name=name,
        question=question,
        setup=setup,
        grids=({"model": ("ndr", "transformer"), "seed": (0,)} | dict(grid),),
        # With the dropout of NDR, geometric attention without gates stays at chance.
        where=dropout_of(),
        presets=presets,
        tuned=("training.learning_rate",),
        measures={
            "control_flow": measures.control_flow,
            "sensitivity": measures.sensitivity,
            "heads": measures.heads,
            "timing": measures.timing,
            "reads": measures.reads,
            "drawn": measures.drawn,
        },
        trained=engine.TrainedIf(split="id", metric="accuracy", reaches=claims.GOOD),
        claims=(*claimed, *claims.of_ours()),
        table=replace(TABLE, title=f"{TABLE.title}: {name.replace('_', ' ')}"),
        views=VIEWS,
        browsers={"control_flow_by_step": ndr_browser.control_flow},
        export=views.export,
    )


STUDY = control_flow_study(
    "ndr_control_flow",
    "Do gates and attention of a Neural Data Router draw its computation?",
    LAPTOP,
    BOTH,
    LOOKUP_PRESETS,
    (*claims.of_table_lookup(), *claims.of_reads(), *claims.of_near_mark()),
)
ARITHMETIC_STUDY = control_flow_study(
    "ndr_arithmetic",
    "Do they where the dataflow branches, in sums and products?",
    LAPTOP_ARITHMETIC,
    {},
    ARITHMETIC_PRESETS,
    (*claims.of_trees(FIVE[:-1], "table 2", faster=True),),
)
LISTOPS_STUDY = control_flow_study(
    "ndr_listops",
    "Do they in lists, where only some branches count?",
    LAPTOP_LISTOPS,
    {},
    LISTOPS_PRESETS,
    (*claims.of_trees(FIVE[:-1], "table 3", faster=False), *claims.of_branches()),
)


if __name__ == "__main__":
    engine.main(STUDY, ARITHMETIC_STUDY, LISTOPS_STUDY)
