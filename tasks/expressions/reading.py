"""Read expressions, many at once: what they say, and the graph along which values flow."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int

from tasks.expressions.trees import CHUNK, N_DIGITS, Notation
from tasks.finite import ExampleSet, small

Operate = Callable[
    [
        Int[np.ndarray, " operation"],
        Int[np.ndarray, "operation argument"],
        Int[np.ndarray, " operation"],
    ],
    tuple[Int[np.ndarray, " operation"], Bool[np.ndarray, "operation argument"]],
]
"""From the symbols, the arguments' values, and how many arguments there are (what is behind them is
to be ignored), to the results, and to which arguments each result depends on."""


@dataclass(frozen=True, eq=False)
class Reading:
    """What sequences say. A sub-expression is named by the position of its first token.

    Attributes:
        tokens: the sequences, -1 behind the end.
        head: the first token of the innermost sub-expression that each token belongs to itself.
        symbol: at a sub-expression's first token: the position of the token that stands for it.
        parent: at a sub-expression's first token: the operation whose argument it is, else -1.
        value, depth: at a sub-expression's first token: its value, its nesting depth.
        dependency_depth: likewise, with pruned branches left out.
        selected: at a sub-expression's first token: its operation's result depends on it.
    """

    tokens: Int[np.ndarray, "n pos"]
    head: Int[np.ndarray, "n pos"]
    symbol: Int[np.ndarray, "n pos"]
    parent: Int[np.ndarray, "n pos"]
    value: Int[np.ndarray, "n pos"]
    depth: Int[np.ndarray, "n pos"]
    dependency_depth: Int[np.ndarray, "n pos"]
    selected: Bool[np.ndarray, "n pos"]


def read(tokens: Int[np.ndarray, "n pos"], notation: Notation, operate: Operate) -> Reading:
    """Read sequences from left to right, evaluating each operation where it closes.

    Args:
        tokens: ids, -1 behind the end; every sequence is one well-formed expression.
        notation: how operations look.
        operate: what they do.
    """
    n, width = tokens.shape
    most = notation.n_arguments[1]
    n_levels = 2 + notation.max_operations(width)

    head, symbol, parent = (np.full((n, width), -1, np.int8) for _ in range(3))
    value, depth, dependency_depth = (np.full((n, width), -1, np.int8) for _ in range(3))
    selected = np.zeros((n, width), bool)

    # The operations that are open at the current token, the innermost one at `level`; level 0
    # takes the whole expression as its argument.
    level = np.zeros(n, np.int64)
    opened = np.full((n, n_levels), -1, np.int8)
    operator = np.zeros((n, n_levels), np.int8)
    argument = np.zeros((n, n_levels, most), np.int8)
    n_arguments = np.zeros((n, n_levels), np.int8)

    def add_argument(rows: np.ndarray, start: np.ndarray | int) -> None:
        here = level[rows]
        argument[rows, here, n_arguments[rows, here]] = start
        n_arguments[rows, here] += 1

    for position in range(width):
        token = tokens[:, position]

        if notation.opening is None:
            opening = (token >= notation.operators[0]) & (token <= notation.operators[-1])
        else:
            opening = token == notation.opening
        rows = np.flatnonzero(opening)
        level[rows] += 1
        opened[rows, level[rows]] = position
        n_arguments[rows, level[rows]] = 0
        head[rows, position] = position

        rows = np.flatnonzero((token >= notation.operators[0]) & (token <= notation.operators[-1]))
        start = opened[rows, level[rows]]
        operator[rows, level[rows]] = token[rows]
        head[rows, position] = start
        symbol[rows, start] = position

        rows = np.flatnonzero((token >= 0) & (token < N_DIGITS))
        head[rows, position] = symbol[rows, position] = position
        value[rows, position] = token[rows]
        depth[rows, position] = dependency_depth[rows, position] = 0
        add_argument(rows, position)

        rows = np.flatnonzero(token == notation.closing)
        here = level[rows]
        start = opened[rows, here]
        count = n_arguments[rows, here]
        arguments, each = argument[rows, here], rows[:, None]
        is_argument = np.arange(most) < count[:, None]
        result, chosen = operate(operator[rows, here], value[each, arguments], count)
        head[rows, position] = start
        value[rows, start] = result
        depth[rows, start] = 1 + np.where(is_argument, depth[each, arguments], 0).max(1, initial=0)
        deepest = np.where(chosen, dependency_depth[each, arguments], 0).max(1, initial=0)
        dependency_depth[rows, start] = 1 + deepest
        row, place = np.nonzero(is_argument)
        parent[rows[row], arguments[row, place]] = start[row]
        selected[rows[row], arguments[row, place]] = chosen[row, place]
        level[rows] -= 1
        add_argument(rows, start)

    return Reading(tokens, head, symbol, parent, value, depth, dependency_depth, selected)


def describe(tokens: Int[np.ndarray, "n pos"], notation: Notation, operate: Operate) -> ExampleSet:
    """Read sequences and return them with the latents of `ExpressionTask`.

    Args:
        tokens: ids, -1 behind the end; every sequence is one well-formed expression.
        notation: how operations look.
        operate: what they do.

    Returns:
        The examples, `depth` being the nesting depth, with a further latent `dependency_depth` [n].
        The latents over nodes are as wide as a sequence as long as `tokens` is wide can need.
    """
    max_nodes = notation.max_nodes(tokens.shape[1])
    parts = [
        _describe(read(tokens[start : start + CHUNK], notation, operate), max_nodes)
        for start in range(0, len(tokens), CHUNK)
    ]
    names = parts[0].latents
    return ExampleSet(
        inputs=torch.cat([part.inputs for part in parts]),
        targets=torch.cat([part.targets for part in parts]),
        latents={name: torch.cat([part.latents[name] for part in parts]) for name in names},
    )


def _describe(reading: Reading, max_nodes: int) -> ExampleSet:
    tokens = reading.tokens
    n, width = tokens.shape
    row = np.arange(n)[:, None]

    # Downwards, operations come before their arguments.
    used = reading.parent < 0
    for position in range(width):
        above = reading.parent[:, position]
        below = reading.selected[:, position] & used[row[:, 0], above]
        used[:, position] = np.where(above >= 0, below, used[:, position])

    is_head = reading.symbol >= 0
    head_at = np.full((n, width), -1, np.int8)  # at the token that stands for a sub-expression
    rows, starts = np.nonzero(is_head)
    head_at[rows, reading.symbol[rows, starts]] = starts
    number = np.where(head_at >= 0, (head_at >= 0).cumsum(1) - 1, -1)

    inside = tokens >= 0
    node = np.where(inside, number[row, reading.symbol[row, reading.head]], -1)
    node_token, is_node = _first(head_at >= 0, max_nodes)
    node_head = head_at[row, node_token]

    def of_nodes(values: np.ndarray) -> np.ndarray:
        return np.where(is_node, values[row, node_head], -1)

    is_argument = is_node & (reading.parent[row, node_head] >= 0)
    chosen, is_edge = _first(is_argument, max_nodes - 1)
    argument_head = node_head[row, chosen]
    source = reading.symbol[row, argument_head]
    target = reading.symbol[row, reading.parent[row, argument_head]]
    latents = {
        "length": inside.sum(1),
        "depth": reading.depth[:, 0],
        "dependency_depth": reading.dependency_depth[:, 0],
        "node": node,
        "node_token": np.where(is_node, node_token, -1),
        "node_value": of_nodes(reading.value),
        "node_depth": of_nodes(reading.depth),
        "edges": np.where(is_edge[..., None], np.stack([source, target], -1), -1),
        "edge_used": is_edge & used[row, argument_head],
        "root": reading.symbol[:, 0],
    }
    return ExampleSet(
        inputs=small(tokens),
        targets=small(reading.value[:, 0]),
        latents={name: small(values) for name, values in latents.items()},
    )


def _first(
    mask: Bool[np.ndarray, "n pos"], count: int
) -> tuple[Int[np.ndarray, "n count"], Bool[np.ndarray, "n count"]]:
    """Return where each row is True, and which of the places are; others are 0."""
    place = np.zeros((len(mask), count), np.int64)
    filled = np.arange(count) < mask.sum(1, keepdims=True)
    place[filled] = np.nonzero(mask)[1]
    return place, filled
