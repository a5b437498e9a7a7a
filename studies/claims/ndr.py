"""Readings and claims of the studies of control flow (Csordás et al. 2021)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import xarray as xr

from studies.engine import Claim, Reading, metric, read
from studies.engine.readings import unmeasured

NDR = {"model": "ndr"}
FORWARD, BACKWARD = {"direction": "forward"}, {"direction": "backward"}

PAPER = "Csordás et al. 2021"
SOLVED, FAILED = 0.95, 0.5
"""Shares of right answers from which on a task counts as solved, and up to which as failed."""
GOOD = 0.9
"""The share of right answers that counts as good in distribution, and as learned."""

KINDS = {"gate": "open gates", "change": "changes"}
SCORES = {"f1": "edges, F1", "order": "in order", "tau": "tau x 100"}
CONTROLS = ("shuffled", "untrained")
HABITS = ("left neighbour", "right neighbour", "both neighbours")
ROLES = ("argument reads operator", "operator reads result")
BLURRED = 4
"""The step at which attention is compared with that of the first one: "within a few steps"."""

FEWEST_WRONG = 20
"""The smallest number of wrong answers whose graphs are compared with those of right ones."""

FEW_STEPS = 0.1
"""Steps for a further token that are as good as none."""

accuracy = partial(metric, "accuracy")
LONGER = replace(
    read("scores", "accuracy", mean=("group",), split="ood", group=["depth 9", "depth 10"]),
    metric="accuracy",
)
"""Right answers to table lookups of nine and ten functions, on which the paper tests."""


# Readings


def flow(score: str, nodes: str, control: str = "trained") -> Reading:
    """A score of the graphs against the true dataflow, over all examples."""
    select: Any = {"depth": "all", "correct": "all", "nodes": nodes, "control": control}
    return read("control_flow", "score", metric=score, **select)


def broken(condition: str, cut: str = "lasting") -> Reading:
    """The share of right answers that a cut makes wrong, in graphs of changes."""
    select: Any = {"outcome": "broken", "nodes": "change", "cut": cut}
    return read("control_flow", "rate", condition=condition, **select)


def right_above_wrong(score: str, nodes: str) -> Reading:
    """How far a score of the graphs of right answers is above that of wrong ones of the same depth.

    The mean over the depths with both, weighted by wrong answers, of which there must be
    `FEWEST_WRONG`.
    """

    def values(result: xr.DataTree) -> np.ndarray:
        try:
            flows = result["control_flow"].sel(nodes=nodes, metric=score, control="trained")
        except KeyError:
            return unmeasured(result)
        flows = flows.to_dataset().drop_sel(depth="all")
        right, wrong = (flows.sel(correct=correct) for correct in ("True", "False"))
        difference = right["score"] - wrong["score"]
        n = wrong["examples"].where(difference.notnull(), 0)
        mean = (difference * n).sum("depth") / n.sum("depth").clip(1)
        return mean.where(n.sum("depth") >= FEWEST_WRONG).to_numpy()

    return Reading(f"{SCORES[score]}, right above wrong answers, {nodes}", values)


def best_head(role: str, control: str = "trained") -> Reading:
    """The largest attention of a head to the pairs of a role, or to those of a control."""
    return read("heads", "best", role=role, control=control)


def further_steps(predictor: str) -> Reading:
    """Steps per level of depth, or per token of length, until an operation is done."""
    return read("timing", "slope", predictor=predictor, control="trained")


reads_of = partial(read, "reads", control="trained")
NEIGHBOUR = reads_of("neighbour")
SAME = {place: reads_of("same", place=place) for place in ("position", "offset")}
SHARP = {count: reads_of("slope", count=count) for count in ("sharp reads", "last step")}
ENTROPY = {step: reads_of("entropy", step=step) for step in (1, BLURRED)}


def learning_steps(split: str, share: float = GOOD) -> Reading:
    """The logarithm to base 2 of the steps until a share of answers is right in validation.

    Where it is not reached, those of the whole training: a lower bound.
    """

    def reached(result: xr.DataTree) -> np.ndarray:
        curve = result["training"]["accuracy"].sel(split=split, group="all")
        return (curve >= share).transpose("cell", "train_step").to_numpy()

    def values(result: xr.DataTree) -> np.ndarray:
        training = result["training"].to_dataset()
        if split not in training["split"]:
            return unmeasured(result)
        is_reached, updates = reached(result), training["updates"].to_numpy()
        first = training["train_step"].to_numpy()[is_reached.argmax(1)]
        return np.log2(np.where(is_reached.any(1), first, updates))

    def never(result: xr.DataTree) -> np.ndarray:
        return np.asarray(~reached(result).any(1))

    label = f"log2 of steps until {share:.0%} right, {split}"
    return Reading(label, values, at_least=never)


def where_failing(reading: Reading) -> Reading:
    """This reading for networks that are right in less than `FAILED` of deeper expressions."""
    return reading.apply(lambda values, right: np.where(right < FAILED, values, np.nan), LONGER)


# Claims of the paper


def solves(model: str, where: dict[str, Any], tables: str, reading: Reading = LONGER) -> Claim:
    """The claim that a model is nearly always right beyond the depths of training."""
    statement = f"{model} answers more than {SOLVED:.0%} of deeper expressions"
    return Claim(statement, f"{PAPER}, {tables}", reading, {"model": model} | where, SOLVED)


def fails(
    model: str,
    where: dict[str, Any],
    tables: str,
    share: float = FAILED,
    words: str = "answers less than half",
) -> Claim:
    """The claim that a model answers less than a share of what is deeper than in training."""
    statement = f"{model} {words} of deeper expressions"
    return Claim(statement, f"{PAPER}, {tables}", 1 - LONGER, {"model": model} | where, 1 - share)


does_not_solve = partial(fails, share=SOLVED, words=f"does not answer {SOLVED:.0%}")


def deeper_than(
    models: Sequence[str], tables: str, where: dict[str, Any], reading: Reading = LONGER
) -> Iterator[Claim]:
    """The claims that NDR is better than others beyond the depths of training."""
    for model in models:
        yield Claim(
            f"NDR answers expressions deeper than in training better than {model}",
            f"{PAPER}, {tables}",
            reading,
            NDR | where,
            {"model": model} | where,
        )


def learns_faster(model: str, split: str, source: str, factor: float = 1.0) -> Claim:
    """The claim that NDR needs fewer steps to learn than another model, by a factor."""
    what = {"id": "expressions of the depths of training", "valid": "deeper expressions"}[split]
    times = "" if factor == 1 else f", {factor:g} times as many or more"
    return Claim(
        f"{model} needs more steps than NDR until {GOOD:.0%} of {what} are right{times}",
        f"{PAPER}, {source}",
        learning_steps(split),
        {"model": model},
        NDR,
        margin=float(np.log2(factor)),
        of_learning=True,
    )


def of_table_lookup() -> Iterator[Claim]:
    """Claims about table 1 and what the appendix says of it."""
    table = "table 1"
    yield from deeper_than(("transformer", "relative"), table, {})
    yield from deeper_than(("relative_gate",), table, BACKWARD)
    yield Claim(
        f"NDR answers more than {SOLVED:.0%} of deeper expressions, in every direction",
        f"{PAPER}, {table}",
        LONGER,
        NDR,
        SOLVED,
    )
    for model in ("lstm", "dnc"):
        yield solves(model, FORWARD, table)
        yield fails(model, BACKWARD, table)
    for model in ("transformer", "relative"):
        yield fails(model, {}, table)
    yield does_not_solve("geometric", {}, table)
    yield solves("relative_gate", FORWARD, table)
    yield does_not_solve("relative_gate", BACKWARD, table)
    yield solves("abs_rel_gate", {}, table)
    yield Claim(
        "Geometric attention without the gate is not as good as NDR in distribution",
        f"{PAPER}, {table}",
        accuracy("id"),
        NDR,
        {"model": "geometric"},
        of_learning=True,
    )
    yield Claim(
        "NDR answers deeper expressions better than without the direction in its attention",
        f"{PAPER}, section 2",
        LONGER,
        NDR,
        {"model": "ndr_undirected"},
        of_learning=True,
    )
    for kind, what in (("own", "does not see other columns"), ("late", "cannot skip attention")):
        yield Claim(
            f"A gate that {what} does not help: deeper expressions are right as often, to 3 points",
            f"{PAPER}, section 6",
            LONGER,
            {"model": "relative"},
            {"model": f"relative_{kind}_gate"},
            margin=-0.03,
            of_learning=True,
            no_gain=True,
        )
    yield learns_faster("abs_rel_gate", "id", "section 3.1")
    for model in ("transformer", "relative", "geometric"):
        yield Claim(
            f"Without gates, {model} is right in less than {GOOD:.0%} at the depths of training",
            f"{PAPER}, B.2",
            1 - accuracy("id"),
            {"model": model},
            1 - GOOD,
            of_learning=True,
        )


def of_reads() -> Iterator[Claim]:
    """Claims about attention on table lookup, which the paper shows in examples."""
    backward = NDR | BACKWARD
    figures = f"{PAPER}, figures 2 and 7"
    yield Claim(
        "Backward, NDR's columns read a neighbour, more than half of them",
        figures,
        NEIGHBOUR,
        backward,
        0.5,
    )
    yield Claim(
        "Backward, its read-out column reads the same column whatever the length, rather than "
        "at the same distance",
        figures,
        SAME["position"] - SAME["offset"],
        backward,
        0.0,
    )
    for model, control in product(("ndr", "abs_rel_gate"), CONTROLS):
        yield Claim(
            f"Backward, the gates of {model} open in order: tau x 100 above that of {control} "
            "graphs",
            f"{PAPER}, figures 2, 6 and 8",
            flow("tau", "gate") - flow("tau", "gate", control),
            {"model": model} | BACKWARD,
            0.0,
        )
    for count, what in (("sharp reads", "number"), ("last step", "last step")):
        yield Claim(
            f"Backward, the {what} of NDR's sharp reads grows by one with each function",
            figures,
            SHARP[count],
            backward,
            equals=1.0,
            margin=0.25,
        )
    at_distance = SAME["offset"] - SAME["position"]
    reads = "reads at the same distance whatever the length, rather than the same column"
    yield Claim(
        f"Backward, the read-out column of relative_gate {reads}",
        f"ours, after {PAPER}",
        at_distance,
        {"model": "relative_gate"} | BACKWARD,
        0.0,
    )
    # What a network that does not fail attends to is no cause of a failure.
    yield Claim(
        f"Where relative_gate is right in less than half, backward, its read-out column {reads}",
        f"{PAPER}, section 4",
        where_failing(at_distance),
        {"model": "relative_gate"} | BACKWARD,
        0.0,
    )
    yield Claim(
        f"The attention of relative is more blurred at step {BLURRED} than at the first",
        f"ours, after {PAPER}",
        ENTROPY[BLURRED] - ENTROPY[1],
        {"model": "relative"},
        0.0,
    )
    yield Claim(
        f"The attention of relative is more blurred at step {BLURRED} than that of NDR",
        f"{PAPER}, figure 4",
        ENTROPY[BLURRED],
        {"model": "relative"},
        NDR,
    )


def of_trees(others: Sequence[str], table: str, *, faster: bool) -> Iterator[Claim]:
    """Claims about arithmetic or ListOps: accuracy, and how fast it is learned."""
    for model in ("ndr", *others):
        yield Claim(
            f"{model} answers more than {GOOD:.0%} of expressions of the depths of training",
            f"{PAPER}, {table}",
            accuracy("id"),
            {"model": model},
            GOOD,
            of_learning=True,
        )
    yield from deeper_than(others, table, {}, accuracy("ood"))
    yield solves("ndr", {}, table, accuracy("ood"))
    if faster:
        for model in others:
            yield learns_faster(model, "valid", table, factor=2)


def of_branches() -> Iterator[Claim]:
    """Claims about ListOps' heads and the order of branches."""
    section = f"{PAPER}, section 4"
    for (model, too), role in product((("ndr", ""), ("relative", ", too")), ROLES):
        name = {"ndr": "NDR"}.get(model, model)
        for control, than in (("others", "other columns are read"), ("untrained", "untrained")):
            yield Claim(
                f"{name} has a head whose part is: {role}, more than {than}{too}",
                section,
                best_head(role) - best_head(role, control),
                {"model": model},
                0.0,
            )
    yield Claim(
        "Of operations of the same length, NDR does the deeper ones later",
        section,
        further_steps("depth"),
        NDR,
        0.0,
    )
    yield Claim(
        f"Of operations of the same depth, NDR does the longer ones as early: {FEW_STEPS} steps "
        "later, or less, for each token",
        section,
        further_steps("length"),
        NDR,
        equals=0.0,
        margin=FEW_STEPS,
    )


# Our own claims


def of_ours() -> Iterator[Claim]:
    """What should hold if the graphs show the computation."""
    yield Claim(
        "NDR learns held-out expressions of depths of training better than transformer",
        "ours",
        accuracy("id"),
        NDR,
        {"model": "transformer"},
        of_learning=True,
    )
    positive = partial(Claim, source="ours", of={}, exceeds=0.0)
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
    for score in ("f1", "tau"):
        yield positive(
            f"Graphs of changes: {SCORES[score]} of right answers above that of wrong ones of the "
            "same depth",
            reading=right_above_wrong(score, "change"),
        )
    for kind in ("node", "edge"):
        for (other, name), (cut, read_as_often) in product(
            ((f"{kind} off the path", "one off the path"), (f"no {kind}", "elsewhere")),
            (("lasting", ""), ("lasting, matched", ", in columns that are read as often")),
        ):
            yield positive(
                f"A cut {kind} on the path breaks more answers than {name}{read_as_often}",
                reading=broken(f"{kind} on the path", cut) - broken(other, cut),
            )
    yield positive(
        "A gate on the path that stays closed breaks more answers than one closed for one step",
        reading=broken("node on the path") - broken("node on the path", "one step"),
    )


def of_near_mark() -> Iterator[Claim]:
    """What the place of the read-out does on table lookup."""
    yield Claim(
        "Backward, NDR answers deeper expressions better if it is read at the near mark",
        "ours",
        accuracy("ood"),
        NDR | BACKWARD | {"readout": "first"},
        NDR | BACKWARD | {"readout": "last"},
    )
