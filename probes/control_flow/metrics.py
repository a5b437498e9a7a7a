"""Metrics of control-flow graphs against the true dataflow, per example."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

METRICS = {
    "precision": "share of the edges between value-holding columns that are true",
    "recall": "share of the true, used edges that are found",
    "f1": "harmonic mean of precision and recall",
    "stray": "share of all edges that begin or end at a column without a value",
    "order": "share of the true, used edges whose source is done before its target",
    "tau": "Kendall's tau-b of first update and true level, over columns that hold a value",
    "parallelism": "overlap of operations done per active step with operations per level",
    "readout_step": "last update step of the column that is read out",
    "root_step": "last update step of the root",
}


@dataclass(frozen=True)
class Flow:
    """Extracted graphs without weights: what the network did.

    Attributes:
        reads: column `target` reads column `source` at some step.
        update: the column updates at the step.
    """

    reads: Bool[np.ndarray, "example target source"]
    update: Bool[np.ndarray, "example step pos"]

    def relabelled(self, order: Int[np.ndarray, "example pos"]) -> "Flow":
        """Permute the columns: column i becomes what column order[i] was."""
        rows = np.take_along_axis(self.reads, order[:, :, None], axis=1)
        return Flow(
            np.take_along_axis(rows, order[:, None, :], axis=2),
            np.take_along_axis(self.update, order[:, None, :], axis=2),
        )

    def merged(self, first: Int[np.ndarray, "example pos"]) -> "Flow":
        """Merge the columns of each group into its first column."""
        member = _one_hot(first)
        reads = member.transpose(0, 2, 1) @ self.reads.astype(np.float32) @ member > 0
        reads &= ~np.eye(reads.shape[1], dtype=bool)
        return Flow(reads, self.update.astype(np.float32) @ member > 0)


@dataclass(frozen=True)
class Truth:
    """The true dataflow of the task.

    Attributes:
        edges: the value of `source` is an argument of `target`.
        used: the edges that matter for the answer.
        level: depth of the value that a column holds, 0 for a literal, -1 for none.
        readout: the column that is read out, -1 if unknown.
        root: the column whose value is the answer, -1 if unknown.
    """

    edges: Bool[np.ndarray, "example target source"]
    used: Bool[np.ndarray, "example target source"]
    level: Int[np.ndarray, "example pos"]
    readout: Int[np.ndarray, " example"]
    root: Int[np.ndarray, " example"]

    def merged(self, first: Int[np.ndarray, "example pos"]) -> "Truth":
        """Merge the columns of each group; its level is the highest in the group."""
        member = _one_hot(first)
        flow = member.transpose(0, 2, 1)
        edges, used = (
            (flow @ matrix.astype(np.float32) @ member > 0) & ~np.eye(member.shape[1], dtype=bool)
            for matrix in (self.edges, self.used)
        )
        level = np.full_like(self.level, -1)
        rows = np.arange(len(level))
        np.maximum.at(level, (rows[:, None], first), self.level)
        readout, root = (
            np.where(column >= 0, first[rows, column], -1) for column in (self.readout, self.root)
        )
        return Truth(edges, used, level, readout, root)


def score_examples(
    flow: Flow, truth: Truth, *, routes: int | None
) -> Float[np.ndarray, "metric example"]:
    """Compute all METRICS, in that order; NaN where undefined."""
    first = np.where(flow.update.any(axis=1), flow.update.argmax(axis=1), -1)
    last = last_updates(flow.update)
    return np.stack(
        [
            *_edge_scores(flow.reads, truth, routes),
            _order(last, truth),
            _kendall_tau(first, truth.level),
            _parallelism(last, truth.level, flow.update.shape[1]),
            _step_of(last, truth.readout),
            _step_of(last, truth.root),
        ]
    )


def last_updates(
    update: Bool[np.ndarray, "example step pos"],
) -> Int[np.ndarray, "example pos"]:
    """Find the last step at which each column updates, -1 for never."""
    steps = update.shape[1]
    return np.where(update.any(axis=1), steps - 1 - update[:, ::-1].argmax(axis=1), -1)


def counts_per_step(
    last: Int[np.ndarray, "example pos"], level: Int[np.ndarray, "example pos"], steps: int
) -> Int[np.ndarray, "example step"]:
    """Count the operation columns (level at least 1) whose last update is at each step."""
    done = (last[:, None] == np.arange(steps)[:, None]) & (level >= 1)[:, None]
    return done.sum(axis=2)


def counts_per_level(
    level: Int[np.ndarray, "example pos"], levels: int
) -> Int[np.ndarray, "example level"]:
    """Count the columns that hold a value of each level 1, 2, ... `levels`."""
    return (level[:, None] == np.arange(1, levels + 1)[:, None]).sum(axis=2)


def _edge_scores(
    reads: Bool[np.ndarray, "example target source"], truth: Truth, routes: int | None
) -> list[Float[np.ndarray, " example"]]:
    holds = truth.level >= 0
    pairs = holds[:, :, None] & holds[:, None, :] & ~np.eye(holds.shape[1], dtype=bool)
    graph_edges, true, used = reads, truth.edges, truth.used
    if routes is not None:
        graph_edges = _routes(reads | reads.transpose(0, 2, 1), ~holds, routes)
        true, used = (matrix | matrix.transpose(0, 2, 1) for matrix in (true, used))
    graph_edges = graph_edges & pairs
    precision = _share(graph_edges & true, graph_edges)
    recall = _share(graph_edges & used, used)
    # F1 is 0 where there are true edges but none is in the graph.
    total = np.nan_to_num(precision) + np.nan_to_num(recall)
    product = 2 * np.nan_to_num(precision) * np.nan_to_num(recall)
    f1 = np.divide(product, total, out=np.zeros_like(total), where=total > 0)
    f1[np.isnan(precision) & np.isnan(recall)] = np.nan
    return [precision, recall, f1, _share(reads & ~pairs, reads)]


def _routes(
    linked: Bool[np.ndarray, "example pos pos"],
    inner: Bool[np.ndarray, "example pos"],
    most: int,
) -> Bool[np.ndarray, "example pos pos"]:
    """Link columns that a path joins with at most `most` columns between, all `inner`."""
    reached, adjacency = linked, linked.astype(np.float32)
    for _ in range(most):
        reached = reached | ((reached & inner[:, None]).astype(np.float32) @ adjacency > 0)
    return reached


def _order(last: Int[np.ndarray, "example pos"], truth: Truth) -> Float[np.ndarray, " example"]:
    # A literal needs no update; an operation that never updates was never computed.
    done = (last >= 0) | (truth.level == 0)
    before = (last[:, :, None] > last[:, None, :]) & done[:, None, :]
    return _share(truth.used & before, truth.used)


def _kendall_tau(
    first: Int[np.ndarray, "example pos"], level: Int[np.ndarray, "example pos"]
) -> Float[np.ndarray, " example"]:
    """Compute tau-b (Kendall 1945) of each example; NaN where one side is constant."""
    holds = level >= 0
    pairs = holds[:, :, None] & holds[:, None, :]
    a, b = (np.sign(x[:, :, None] - x[:, None, :]) * pairs for x in (first, level))
    covariance, variance_a, variance_b = (
        (x * y).sum(axis=(1, 2)).astype(np.float64) for x, y in ((a, b), (a, a), (b, b))
    )
    size = np.sqrt(variance_a * variance_b)
    return np.divide(covariance, size, out=np.full(len(size), np.nan), where=size > 0)


def _parallelism(
    last: Int[np.ndarray, "example pos"], level: Int[np.ndarray, "example pos"], steps: int
) -> Float[np.ndarray, " example"]:
    levels = max(int(level.max(initial=0)), 1)
    per_step = counts_per_step(last, level, steps)
    # Idle steps do not count: a network may take two steps for a level, or start late.
    idle_steps_last = np.argsort(per_step == 0, axis=1, kind="stable")
    per_step = np.take_along_axis(per_step, idle_steps_last, axis=1)
    per_level = counts_per_level(level, levels)
    shared = min(steps, levels)
    overlap = np.minimum(per_step[:, :shared], per_level[:, :shared]).sum(axis=1)
    operations = (level >= 1).sum(axis=1)
    return np.divide(overlap, operations, out=np.full(len(level), np.nan), where=operations > 0)


def _step_of(
    last: Int[np.ndarray, "example pos"], column: Int[np.ndarray, " example"]
) -> Float[np.ndarray, " example"]:
    step = last[np.arange(len(last)), column]
    return np.where((column >= 0) & (step >= 0), step, np.nan)


def _share(
    selected: Bool[np.ndarray, "example target source"],
    total: Bool[np.ndarray, "example target source"],
) -> Float[np.ndarray, " example"]:
    count = total.sum(axis=(1, 2))
    result = np.full(len(count), np.nan)
    return np.divide(selected.sum(axis=(1, 2)), count, out=result, where=count > 0)


def _one_hot(first: Int[np.ndarray, "example pos"]) -> Float[np.ndarray, "example pos group"]:
    return (first[:, :, None] == np.arange(first.shape[1])).astype(np.float32)
