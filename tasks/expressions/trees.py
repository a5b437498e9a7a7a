"""Random expressions, many at once: trees grow level by level and are then written down.

All trees of a call are kept in arrays in which one column is one operation; an operation's
arguments stand in later columns. So a loop over columns visits parents before their arguments, or
after them, and each of its steps treats all trees.
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
"""The literals are the digits; their token ids are their values."""

CHUNK = 2**14
"""How many trees are grown at once."""

_FRUITLESS_CHUNKS = 100  # in a row: over a million trees


@dataclass(frozen=True, kw_only=True)
class Notation:
    """How an operation is written: every operation ends with the same closing token.

    Attributes:
        operators: the ids of the operations' symbols.
        opening: the token before the first argument, the symbol then standing between the two
            arguments; None: the symbol itself comes before the first argument.
        closing: the token behind the last argument.
        n_arguments: the smallest and the largest number of arguments.
    """

    operators: tuple[int, ...]
    opening: int | None
    closing: int
    n_arguments: tuple[int, int]

    @property
    def overhead(self) -> int:
        """Number of tokens that an operation has besides its arguments."""
        return 2 if self.opening is None else 3

    def min_length(self, height: int) -> int:
        """Return the length of the shortest expression of a height, in tokens."""
        return 1 + height * (self.overhead + self.n_arguments[0] - 1)

    def max_operations(self, max_length: int) -> int:
        """Return how many operations fit into a sequence."""
        return (max_length - 1) // (self.overhead + self.n_arguments[0] - 1)

    def max_nodes(self, max_length: int) -> int:
        """Return how many operations and literals fit into a sequence together."""
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
    """Draw one expression of each height, and leave out those that are too long.

    An operation of height h has a random symbol and number of arguments. If h > 1, one of the
    arguments is an operation of height h - 1; each of the others is an operation with probability
    `nested`, and its height is then uniform from 1 to h - 1. Everything else is a random digit.

    Args:
        heights: nesting depth of each tree, >= 1.
        generator: where all choices come from.
        notation: how operations look.
        nested: in [0, 1].
        side: which argument has height h - 1: any with equal probability ("balanced"), or the last.
        max_length: the longest sequence that is kept, in tokens.

    Returns:
        Token ids, int8, -1 behind the end, [kept, max_length], in the order of `heights`.
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
        their_height = np.where(is_spine, h - 1, generator.integers(1, np.maximum(h, 2), (m, most)))
        digit = generator.integers(0, N_DIGITS, (m, most))

        name = n_operations[trees, None] + is_operation.cumsum(1) - 1
        argument[trees, column] = np.where(is_operation, name, -1 - digit)
        n_arguments[trees, column] = count[:, 0]
        n_operations[trees] += is_operation.sum(1)
        length[trees] += notation.overhead + count[:, 0] - 1
        # Operations that have yet to get their arguments need room too.
        needed = (n_operations[trees] - column - 1) * (notation.overhead + fewest - 1)
        fits = length[trees] + needed <= max_length
        n_operations[trees[~fits]] = 0
        row, place = np.nonzero(is_operation & fits[:, None])
        height[trees[row], name[row, place]] = their_height[row, place]

    kept = n_operations > 0
    return _write(
        symbol[kept], argument[kept], n_arguments[kept], n_operations[kept], notation, max_length
    )


def _write(
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
        for place in range(most):
            mine = np.flatnonzero(n_arguments[trees, column] > place)
            rows = trees[mine]
            one = argument[rows, column, place].astype(np.int64)
            literal, nested = one < 0, one >= 0
            tokens[rows[literal], cursor[mine[literal]]] = -1 - one[literal]
            start[rows[nested], one[nested]] = cursor[mine[nested]]
            cursor[mine[literal]] += 1
            cursor[mine[nested]] += size[rows[nested], one[nested]]
            if notation.opening is not None and place == 0:
                tokens[trees, cursor] = symbol[trees, column]
                cursor += 1
        tokens[trees, cursor] = notation.closing
    return tokens


def collect(
    count: int,
    draw: Callable[[np.random.Generator], Int[np.ndarray, "some pos"]],
    *,
    key: Key,
    path: str,
    distinct: bool,
) -> Int[np.ndarray, "count pos"]:
    """Draw until there are enough sequences.

    Args:
        count: how many.
        draw: returns as many as it happens to find.
        key: what the generators that `draw` is given follow from.
        path: likewise.
        distinct: no sequence shall occur twice.

    Raises:
        ValueError: over a million trees in a row brought nothing new.
    """
    parts: list[np.ndarray] = []
    n_found = fruitless = 0
    with tqdm(total=count, desc=f"drawing {path[1:]}", disable=None, leave=False, delay=1) as bar:
        for chunk in itertools.count():
            parts.append(draw(key.generator(f"{path}/{chunk}")))
            if distinct:
                found = np.concatenate(parts)
                parts = [found[np.sort(np.unique(found, axis=0, return_index=True)[1])]]
            new = sum(map(len, parts)) - n_found
            bar.update(new)
            n_found += new
            fruitless = 0 if new else fruitless + 1
            if n_found >= count or fruitless == _FRUITLESS_CHUNKS:
                break
    if n_found < count:
        raise ValueError(
            f"{path[1:]}: {count} expressions are wanted, but only {n_found} were found; allowed "
            "are fewer, or settings that make more"
        )
    return np.concatenate(parts)[:count]


def held_out(
    tokens: Int[np.ndarray, "n pos"], key: Key, one_in: int = 10
) -> Bool[np.ndarray, " n"]:
    """Return which sequences belong to `id` and not to `train`: a keyed hash of each decides.

    So no sequence is on both sides, however often it is drawn.

    Args:
        tokens: ids, -1 behind the end.
        key: what the hash follows from.
        one_in: one sequence in so many is held out.
    """
    factors = key.generator("/held out").integers(0, 2**64, tokens.shape[1], np.uint64)
    # Sums modulo 2^64, of which the upper half depends on all bits of all tokens.
    mixed = (tokens.astype(np.uint64) * (factors | np.uint64(1))).sum(1)
    return (mixed >> np.uint64(32)) % np.uint64(one_in) == 0
