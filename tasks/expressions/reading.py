"""Parsing and evaluation of many expressions at once, and their dataflow graphs."""

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
"""Maps the operators, the arguments' values and the numbers of arguments (further values are
padding) to the results and to masks of the arguments that each result depends on."""


@dataclass(frozen=True, eq=False)
class Reading:
    """Parsed sequences. A sub-expression is identified by the position of its first token.

    Attributes:
        tokens: the sequences, padded with -1.
        head: for each token, the first token of its innermost sub-expression.
        symbol: at a sub-expression's first token: the position of the token that represents it.
        parent: at a sub-expression's first token: the operation whose argument it is, else -1.
        value, depth: at a sub-expression's first token: its value, its nesting depth.
        dependency_depth: at a sub-expression's first token: its depth without pruned branches.
        selected: at a sub-expression's first token: whether the result of its operation depends on
            it.
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
    """Parse sequences from left to right, evaluating each operation where it closes.

    Args:
        tokens: ids, padded with -1; every sequence is one well-formed expression.
        notation: the syntax of operations.
        operate: evaluates operations.
    """
    n, width = tokens.shape
    max_arguments = notation.n_arguments[1]
    n_levels = 2 + notation.max_operations(width)

    head, symbol, parent = (np.full((n, width), -1, np.int8) for _ in range(3))
    value, depth, dependency_depth = (np.full((n, width), -1, np.int8) for _ in range(3))
    selected = np.zeros((n, width), bool)

    # The operations that are open at the current token, the innermost one at `level`; level 0
    # takes the whole expression as its argument.
    level = np.zeros(n, np.int64)
    opened = np.full((n, n_levels), -1, np.int8)
    operator = np.zeros((n, n_levels), np.int8)
    argument = np.zeros((n, n_levels, max_arguments), np.int8)
    n_arguments = np.zeros((n, n_levels), np.int8)

    def add_argument(rows: np.ndarray, start: np.ndarray | int) -> None:
        current = level[rows]
        argument[rows, current, n_arguments[rows, current]] = start
        n_arguments[rows, current] += 1

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
        current = level[rows]
        start = opened[rows, current]
        count = n_arguments[rows, current]
        arguments, row_column = argument[rows, current], rows[:, None]
        is_argument = np.arange(max_arguments) < count[:, None]
        values, depths = value[row_column, arguments], depth[row_column, arguments]
        result, is_selected = operate(operator[rows, current], values, count)
        head[rows, position] = start
        value[rows, start] = result
        depth[rows, start] = 1 + np.where(is_argument, depths, 0).max(1, initial=0)
        depths = dependency_depth[row_column, arguments]
        dependency_depth[rows, start] = 1 + np.where(is_selected, depths, 0).max(1, initial=0)
        row, slot = np.nonzero(is_argument)
        parent[rows[row], arguments[row, slot]] = start[row]
        selected[rows[row], arguments[row, slot]] = is_selected[row, slot]
        level[rows] -= 1
        add_argument(rows, start)

    return Reading(tokens, head, symbol, parent, value, depth, dependency_depth, selected)


def describe(tokens: Int[np.ndarray, "n pos"], notation: Notation, operate: Operate) -> ExampleSet:
    """Parse sequences and return them with the latents of `ExpressionTask`.

    Args:
        tokens: ids, padded with -1; every sequence is one well-formed expression.
        notation: the syntax of operations.
        operate: evaluates operations.

    Returns:
        The examples, with the nesting depth as `depth` and a further latent `dependency_depth` [n].
        The latents over nodes have room for the most nodes of a sequence as long as `tokens`.
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

    # Operations come before their arguments.
    used = reading.parent < 0
    for position in range(width):
        parent = reading.parent[:, position]
        is_used = reading.selected[:, position] & used[row[:, 0], parent]
        used[:, position] = np.where(parent >= 0, is_used, used[:, position])

    is_head = reading.symbol >= 0
    head_at = np.full((n, width), -1, np.int8)  # at the token of each sub-expression
    rows, starts = np.nonzero(is_head)
    head_at[rows, reading.symbol[rows, starts]] = starts
    number = np.where(head_at >= 0, (head_at >= 0).cumsum(1) - 1, -1)

    inside = tokens >= 0
    node = np.where(inside, number[row, reading.symbol[row, reading.head]], -1)
    node_token, is_node = _first(head_at >= 0, max_nodes)
    node_head = head_at[row, node_token]

    def at_nodes(values: np.ndarray) -> np.ndarray:
        return np.where(is_node, values[row, node_head], -1)

    is_argument = is_node & (reading.parent[row, node_head] >= 0)
    argument_node, is_edge = _first(is_argument, max_nodes - 1)
    argument_head = node_head[row, argument_node]
    source = reading.symbol[row, argument_head]
    target = reading.symbol[row, reading.parent[row, argument_head]]
    latents = {
        "length": inside.sum(1),
        "depth": reading.depth[:, 0],
        "dependency_depth": reading.dependency_depth[:, 0],
        "node": node,
        "node_token": np.where(is_node, node_token, -1),
        "node_symbol": np.where(is_node, tokens[row, node_token], -1),
        "node_value": at_nodes(reading.value),
        "node_depth": at_nodes(reading.depth),
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
    """Return the positions of each row's True entries, padded with 0, and the mask of entries."""
    positions = np.zeros((len(mask), count), np.int64)
    is_entry = np.arange(count) < mask.sum(1, keepdims=True)
    positions[is_entry] = np.nonzero(mask)[1]
    return positions, is_entry
