"""Random expressions, many at once: trees are drawn operation by operation, then serialized.

The trees of a call are arrays with one column per operation; an operation's arguments are in later
columns. So a forward loop over columns visits parents before their arguments, a backward loop after
them, and each step processes all trees.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int
from tqdm import tqdm

from tasks.common import Key

N_DIGITS = 10
"""Number of digits, the literals; a digit's token id is its value."""

CHUNK = 2**14
"""Number of trees that are drawn at once."""

_FRUITLESS_CHUNKS = 100  # in a row: over a million trees


@dataclass(frozen=True, kw_only=True)
class Notation:
    """The syntax of operations; all operations have the same closing token.

    Attributes:
        operators: the token ids of the operators.
        opening: the token before the first argument; the operator is then between the two
            arguments. None: the operator itself comes before the first argument.
        closing: the token after the last argument.
        n_arguments: the smallest and the largest number of arguments.
    """

    operators: tuple[int, ...]
    opening: int | None
    closing: int
    n_arguments: tuple[int, int]

    @property
    def overhead(self) -> int:
        """Number of tokens of an operation besides its arguments."""
        return 2 if self.opening is None else 3

    def min_length(self, height: int) -> int:
        """Return the length in tokens of the shortest expression of a height."""
        return 1 + height * (self.overhead + self.n_arguments[0] - 1)

    def min_length_nested(self, height: int) -> int:
        """Return the same for a height from 2 on, if no operation has literals beside another."""
        n, shallowest = self.n_arguments[0], self.min_length(1)
        return shallowest + (height - 1) * n * (shallowest - 1)

    def max_operations(self, max_length: int) -> int:
        """Return the most operations of a sequence."""
        return (max_length - 1) // (self.overhead + self.n_arguments[0] - 1)

    def max_nodes(self, max_length: int) -> int:
        """Return the most operations and literals of a sequence."""
        most = 1
        for operations in range(1, self.max_operations(max_length) + 1):
            literals = max_length - self.overhead * operations
            literals = min(literals, (self.n_arguments[1] - 1) * operations + 1)
            most = max(most, operations + literals)
        return most


def grow(
    heights: Int[np.ndarray, " tree"],
    generator: np.random.Generator,
    *,
    notation: Notation,
    nested: float,
    side: Literal["balanced", "right"],
    max_length: int,
) -> Int[np.ndarray, "kept pos"]:
    """Draw one expression of each height, and reject those that are too long.

    An operation of height h has a random operator and number of arguments. If h > 1, one of the
    arguments is an operation of height h - 1; each of the others is an operation with probability
    `nested`, of a height uniform from 1 to h - 1. All other arguments are random digits.

    Args:
        heights: nesting depth of each tree, >= 1.
        generator: source of the randomness.
        notation: the syntax of operations.
        nested: in [0, 1].
        side: the argument of height h - 1: any with equal probability ("balanced"), or the last.
        max_length: the greatest length of a sequence, in tokens.

    Returns:
        Token ids, int8, padded with -1, [kept, max_length], in the order of `heights`.
    """
    fewest, most = notation.n_arguments
    n, n_columns = len(heights), notation.max_operations(max_length)
    height = np.zeros((n, n_columns), np.int8)
    height[:, 0] = heights
    symbol = np.zeros((n, n_columns), np.int8)
    # A digit d is -1 - d, an operation its column.
    argument = np.zeros((n, n_columns, most), np.int8)
    n_arguments = np.zeros((n, n_columns), np.int8)
    n_operations = np.ones(n, np.int64)
    length = np.ones(n, np.int64)
    position = np.arange(most)

    for column in range(n_columns):
        trees = np.flatnonzero(n_operations > column)
        m = len(trees)
        h = height[trees, column].astype(np.int64)[:, None]
        count = generator.integers(fewest, most + 1, m)[:, None]
        symbol[trees, column] = generator.choice(np.array(notation.operators, np.int8), m)
        spine = generator.integers(0, count) if side == "balanced" else count - 1
        is_spine = position == spine
        is_operation = (is_spine | (generator.random((m, most)) < nested)) & (h > 1)
        is_operation &= position < count
        side_height = generator.integers(1, np.maximum(h, 2), (m, most))
        argument_height = np.where(is_spine, h - 1, side_height)
        digit = generator.integers(0, N_DIGITS, (m, most))

        new_column = n_operations[trees, None] + is_operation.cumsum(1) - 1
        argument[trees, column] = np.where(is_operation, new_column, -1 - digit)
        n_arguments[trees, column] = count[:, 0]
        n_operations[trees] += is_operation.sum(1)
        length[trees] += notation.overhead + count[:, 0] - 1
        # Reserve room for the arguments of the operations that are not processed yet.
        needed = (n_operations[trees] - column - 1) * (notation.overhead + fewest - 1)
        fits = length[trees] + needed <= max_length
        n_operations[trees[~fits]] = 0
        row, slot = np.nonzero(is_operation & fits[:, None])
        height[trees[row], new_column[row, slot]] = argument_height[row, slot]

    kept = n_operations > 0
    return _serialize(
        symbol[kept], argument[kept], n_arguments[kept], n_operations[kept], notation, max_length
    )


def _serialize(
    symbol: Int[np.ndarray, "tree operation"],
    argument: Int[np.ndarray, "tree operation argument"],
    n_arguments: Int[np.ndarray, "tree operation"],
    n_operations: Int[np.ndarray, " tree"],
    notation: Notation,
    max_length: int,
) -> Int[np.ndarray, "tree pos"]:
    n, n_columns, most = argument.shape
    size = np.zeros((n, n_columns), np.int64)
    for column in reversed(range(n_columns)):
        trees = np.flatnonzero(n_operations > column)
        arguments = argument[trees, column].astype(np.int64)
        sizes = np.where(arguments < 0, 1, size[trees[:, None], np.maximum(arguments, 0)])
        sizes[np.arange(most) >= n_arguments[trees, column, None]] = 0
        size[trees, column] = notation.overhead + sizes.sum(1)

    tokens = np.full((n, max_length), -1, np.int8)
    start = np.zeros((n, n_columns), np.int64)
    for column in range(n_columns):
        trees = np.flatnonzero(n_operations > column)
        cursor = start[trees, column]
        first = symbol[trees, column] if notation.opening is None else notation.opening
        tokens[trees, cursor] = first
        cursor += 1
        for slot in range(most):
            index = np.flatnonzero(n_arguments[trees, column] > slot)
            rows = trees[index]
            child = argument[rows, column, slot].astype(np.int64)
            literal, nested = child < 0, child >= 0
            tokens[rows[literal], cursor[index[literal]]] = -1 - child[literal]
            start[rows[nested], child[nested]] = cursor[index[nested]]
            cursor[index[literal]] += 1
            cursor[index[nested]] += size[rows[nested], child[nested]]
            if notation.opening is not None and slot == 0:
                tokens[trees, cursor] = symbol[trees, column]
                cursor += 1
        tokens[trees, cursor] = notation.closing
    return tokens


def collect(
    count: int,
    draw: Callable[[np.random.Generator], Int[np.ndarray, "n pos"]],
    *,
    key: Key,
    path: str,
    distinct: bool,
) -> Int[np.ndarray, "count pos"]:
    """Call `draw` until there are enough sequences.

    Args:
        count: number of sequences.
        draw: returns any number of sequences.
        key: seeds the generators of `draw`.
        path: the generators' path, followed by a chunk number.
        distinct: whether repeated sequences are rejected.

    Raises:
        ValueError: over a million trees in a row gave no new sequence.
    """
    parts: list[np.ndarray] = []
    n_kept = fruitless = 0
    with tqdm(total=count, desc=f"drawing {path[1:]}", disable=None, leave=False, delay=1) as bar:
        for chunk in itertools.count():
            parts.append(draw(key.generator(f"{path}/{chunk}")))
            if distinct:
                tokens = np.concatenate(parts)
                parts = [tokens[np.sort(np.unique(tokens, axis=0, return_index=True)[1])]]
            n_new = sum(map(len, parts)) - n_kept
            bar.update(n_new)
            n_kept += n_new
            fruitless = 0 if n_new else fruitless + 1
            if n_kept >= count or fruitless == _FRUITLESS_CHUNKS:
                break
    if n_kept < count:
        raise ValueError(
            f"the number of expressions of {path[1:]} must be at most {n_kept}, which were found "
            f"with these settings, got {count}"
        )
    return np.concatenate(parts)[:count]


def held_out(
    tokens: Int[np.ndarray, "n pos"], key: Key, one_in: int = 10
) -> Bool[np.ndarray, " n"]:
    """Return the mask of the sequences that belong to `id` and not to `train`, by a keyed hash.

    So no sequence is on both sides, however often it is drawn.

    Args:
        tokens: ids, padded with -1.
        key: seeds the hash.
        one_in: one sequence in so many is held out.
    """
    factors = key.generator("/held out").integers(0, 2**64, tokens.shape[1], np.uint64)
    # A sum modulo 2^64, whose upper half depends on all bits of all tokens.
    mixed = (tokens.astype(np.uint64) * (factors | np.uint64(1))).sum(1)
    return (mixed >> np.uint64(32)) % np.uint64(one_in) == 0
