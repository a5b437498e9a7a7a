"""Null models of control flow: graphs that know nothing of what an example computes."""

import numpy as np
from jaxtyping import Bool, Int
from transformer_lens.utilities.statistics import derive_generator

from probes.control_flow.metrics import Flow

NEIGHBOURS = {"left neighbour": 1, "right neighbour": -1}
"""Names of the graphs of `neighbour_graphs`, with the direction in which values are passed on."""

BESIDE = "both neighbours"
"""Name of the graphs of `beside_graphs`."""

HABITS = (*NEIGHBOURS, BESIDE)
"""Names of the graphs that need no model."""


def shuffled_graphs(
    flow: Flow, valid: Bool[np.ndarray, "example pos"], *, permutations: int, seed: int
) -> list[Flow]:
    """The same graphs with the valid columns of each example permuted at random."""
    generator = np.random.default_rng(derive_generator(seed, "columns").initial_seed())
    valid_first = np.argsort(~valid, axis=1, kind="stable")  # valid columns first
    flows = []
    for _ in range(permutations):
        keys = np.where(valid, generator.random(valid.shape), np.inf)
        order = np.empty(valid.shape, dtype=np.int64)
        # Both list the valid columns first; the others follow in their order and stay in place.
        np.put_along_axis(order, valid_first, np.argsort(keys, axis=1, kind="stable"), axis=1)
        flows.append(flow.relabelled(order))
    return flows


def neighbour_graphs(level: Int[np.ndarray, "example pos"], steps: int, *, direction: int) -> Flow:
    """Graphs of the habit "read your neighbour, in turn", the same for all expressions.

    Each column that holds a value reads the nearest one that does on one side, one after the other:
    the first one waits, the k-th one after it reads at step k - 1, or, if there are more columns
    than steps, at equal distances over the steps.

    Args:
        level: as in `Truth`; -1 for columns without a value.
        steps: number of steps of the graphs.
        direction: 1 if the left neighbour is read, -1 for the right one.
    """
    holds = (level >= 0)[:, ::direction]
    n_examples, width = holds.shape
    before = np.maximum.accumulate(np.where(holds, np.arange(width), -1), axis=1)
    source = np.concatenate([np.full((n_examples, 1), -1), before[:, :-1]], axis=1)
    example, target = np.nonzero(holds & (source >= 0))
    reads = np.zeros((n_examples, width, width), dtype=bool)
    reads[example, target, source[example, target]] = True
    turn = (holds.cumsum(axis=1) - 2)[example, target]
    turns = np.maximum(holds.sum(axis=1) - 1, steps)[example]
    update = np.zeros((n_examples, steps, width), dtype=bool)
    update[example, turn * steps // turns, target] = True
    return Flow(reads[:, ::direction, ::direction], update[:, :, ::direction])


def beside_graphs(valid: Bool[np.ndarray, "example pos"], steps: int) -> Flow:
    """Graphs of the habit "read the columns beside you, always", the same for all expressions.

    In a fully bracketed expression two columns that are next to each other belong to one operation
    or to an operation and its argument, so with groups these graphs have all edges of the tree.

    Args:
        valid: whether a column is in use.
        steps: number of steps of the graphs; each column updates at each of them.
    """
    pos = np.arange(valid.shape[1])
    beside = np.abs(pos[:, None] - pos) == 1
    update = np.repeat(valid[:, None], steps, axis=1)
    return Flow(beside & valid[:, :, None] & valid[:, None, :], update)
