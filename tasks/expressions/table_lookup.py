"""Compositional table lookup (CTL), as in Csordás, Irie, Schmidhuber 2021, section 4.1.

A symbol is looked up in a table, the result in the next table, and so on. The tables are random
bijections, so the answer depends on each of them. The model must compose more tables than in
training, in either direction of writing: the computation runs along the sequence (forward) or
against it (backward).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from string import ascii_lowercase
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int

from tasks.causal import Variable
from tasks.common import Key, require_choice, require_int, require_range
from tasks.expressions.base import ExpressionTask
from tasks.expressions.causal import ExpressionModel
from tasks.expressions.trees import Notation
from tasks.finite import ExampleSet, allot, balanced_order, small

_MAX_DEPTH = 16
_ID_SHARE = 10  # at most one in so many sequences of a depth is in `id`


@dataclass(frozen=True, kw_only=True)
class TableLookupConfig:
    """Settings of table lookup. The defaults are the paper's, but for the evaluation splits.

    The number of sequences of depth d is n_symbols * n_tables^d.

    Attributes:
        direction: "forward" writes `101 d a b`, the tables applied from left to right;
            "backward" the mirror image, `b a d 101`.
        n_symbols: 2 to 64.
        n_tables: tables that occur in compositions, 1 to 26.
        n_lone: further tables, which occur only alone; n_tables + n_lone is at most 26.
        train_depth: the largest depth of `train` and `id`, 2 to 15.
        valid_depths: the smallest and the largest depth of `valid`, both beyond train_depth.
        ood_depths: the smallest and the largest depth of `ood`, both beyond valid_depths, at most
            16.
        n_compositions: sequences of depth 2 and more in `train`.
        lone_repeats: number of additional copies of the lone tables' entries in `train`.
        n_id, n_valid, n_ood: sequences of the evaluation splits, at least 1.
        sampling: the stream of `train` is "uniform" over its sequences, or over each "depth".
        seed: seeds the tables, the sequences and their order, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range, or exceeds the number of distinct sequences.

    Example:
        >>> TableLookupConfig(direction="backward").n_symbols
        8
    """

    direction: Literal["forward", "backward"] = "forward"
    n_symbols: int = 8
    n_tables: int = 9
    n_lone: int = 2
    train_depth: int = 5
    valid_depths: tuple[int, int] = (6, 8)
    ood_depths: tuple[int, int] = (9, 10)
    n_compositions: int = 53_136
    lone_repeats: int = 30
    n_id: int = 2_000
    n_valid: int = 3_000
    n_ood: int = 2_000
    sampling: Literal["uniform", "depth"] = "uniform"
    seed: int = 0

    def __post_init__(self) -> None:
        require_choice("direction", self.direction, ("forward", "backward"))
        require_choice("sampling", self.sampling, ("uniform", "depth"))
        require_int("n_symbols", self.n_symbols, 2, 64)
        require_int("n_tables", self.n_tables, 1, len(ascii_lowercase))
        require_int("n_lone", self.n_lone, 0, len(ascii_lowercase) - self.n_tables)
        require_int("lone_repeats", self.lone_repeats, 0, 10_000)
        require_int("seed", self.seed, 0, 2**32 - 1)
        require_int("train_depth", self.train_depth, 2, _MAX_DEPTH - 1)
        require_range("valid_depths", self.valid_depths, self.train_depth + 1, _MAX_DEPTH)
        require_range("ood_depths", self.ood_depths, self.valid_depths[1] + 1, _MAX_DEPTH)
        # The number of sequences limits the sizes; below 2^62, sequence numbers fit into 64 bits.
        if self.n_sequences(self.ood_depths[1]) >= 2**62:
            raise ValueError(
                f"ood_depths must be depths d with n_symbols * n_tables^d < 2^62, got "
                f"{self.ood_depths} with {self.n_symbols} * {self.n_tables}^d"
            )
        shallow = [self.n_sequences(depth) for depth in self._depths("train")]
        max_id = sum(n // _ID_SHARE for n in shallow)
        if not max_id:
            raise ValueError(
                f"n_symbols and n_tables must make at least {_ID_SHARE} sequences of one depth up "
                f"to train_depth={self.train_depth}, got {self.n_symbols} and {self.n_tables}, "
                f"which make {max(shallow)}"
            )
        require_int("n_id", self.n_id, 1, max_id)
        require_int("n_compositions", self.n_compositions, 1, sum(shallow) - self.n_id)
        for split, n in (("valid", self.n_valid), ("ood", self.n_ood)):
            available = sum(self.n_sequences(depth) for depth in self._depths(split))
            require_int(f"n_{split}", n, 1, min(available, 10**7))

    def n_sequences(self, depth: int) -> int:
        """Return the number of distinct sequences of a depth, without lone tables."""
        return self.n_symbols * self.n_tables**depth

    def counts(self, split: str) -> dict[int, int]:
        """Return the number of compositions of each depth from 2 on in a split.

        The numbers are as equal as the numbers of distinct sequences allow. `id` has at most a
        tenth of the sequences of a depth; the others are available for `train`.

        Raises:
            ValueError: `split` is unknown.
        """
        require_choice("split", split, ExpressionTask.SPLITS)
        depths = self._depths(split)
        n_sequences = [self.n_sequences(depth) for depth in depths]
        if split in ("valid", "ood"):
            total = self.n_valid if split == "valid" else self.n_ood
            return dict(zip(depths, allot(total, n_sequences), strict=True))
        n_id = allot(self.n_id, [n // _ID_SHARE for n in n_sequences])
        if split == "id":
            return dict(zip(depths, n_id, strict=True))
        available = [n - n_held_out for n, n_held_out in zip(n_sequences, n_id, strict=True)]
        return dict(zip(depths, allot(self.n_compositions, available), strict=True))

    def _depths(self, split: str) -> range:
        deeper = {"valid": self.valid_depths, "ood": self.ood_depths}
        first, last = deeper.get(split, (2, self.train_depth))
        return range(first, last + 1)


class TableLookup(ExpressionTask):
    """Compositional table lookup; splits and latents: see `ExpressionTask`.

    One epoch of `train` has every table applied to every symbol, `lone_repeats` more copies of the
    lone tables' entries, and `n_compositions` distinct compositions; by default
    88 + 480 + 53,136 = 53,704 sequences, as in the paper. `id` has compositions that are not in
    `train`, none of depth 1, which is all in `train`. Lone tables occur in `train` only.

    The compositions of every split are distributed over its depths as equally as the number of
    distinct sequences allows. In the authors' published split, the test set is shallower than the
    training set: of the sequences of depths 2 to 5, 12% are of depth 2 or 3, against 8%.

    Both directions have the same tables and, mirrored, the same sequences in the same order.

    `depth` is the number of tables. A node is a token: the symbol, or a table with its argument.
    All dataflow is used, since the tables are bijections.

    Example:
        >>> TableLookup(TableLookupConfig(direction="backward")).batch("ood", 0, 64)
    """

    def __init__(self, config: TableLookupConfig) -> None:
        # The sequences do not depend on the direction of writing or on the sampling.
        key = Key(replace(config, direction="forward", sampling="uniform"))
        super().__init__(key=key, separator=" ")
        self.config = config

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The symbols in binary, then the tables' letters, the lone tables last."""
        return self.answers + tuple(ascii_lowercase[: self.config.n_tables + self.config.n_lone])

    @property
    def answers(self) -> tuple[str, ...]:
        """The symbols in binary."""
        width = (self.config.n_symbols - 1).bit_length()
        return tuple(f"{symbol:0{width}b}" for symbol in range(self.config.n_symbols))

    @cached_property
    def tables(self) -> Int[np.ndarray, "table symbol"]:
        """The result of each table for each symbol."""
        n_tables = self.config.n_tables + self.config.n_lone
        generator = self._key.generator("/tables")
        return np.stack([generator.permutation(self.config.n_symbols) for _ in range(n_tables)])

    @property
    def _variables(self) -> dict[str, Variable]:
        n_symbols, n_tables = self.config.n_symbols, len(self.tables)
        operators = tuple(range(n_symbols, n_symbols + n_tables))
        notation = Notation(operators=operators, opening=None, closing=-1, n_arguments=(1, 1))
        constant = {"depth": Variable(), "edge_used": Variable()}
        return constant | ExpressionModel(notation, self._operate, n_symbols).variables()

    @property
    def _operation(self) -> str:
        symbol, table = "[01]+", "[a-z]"
        is_forward = self.config.direction == "forward"
        return f"{symbol} {table}" if is_forward else f"{table} {symbol}"

    def _operate(
        self,
        symbol: Int[np.ndarray, " operation"],
        values: Int[np.ndarray, "operation 1"],
        n_arguments: Int[np.ndarray, " operation"],
    ) -> tuple[Int[np.ndarray, " operation"], Bool[np.ndarray, "operation 1"]]:
        """Look values up: see `reading.Operate`."""
        result = self.tables[symbol - self.config.n_symbols, values[:, 0]]
        return result, np.ones(values.shape, bool)

    def _make(self, split: str) -> ExampleSet:
        codes = self._codes(split)
        width = 1 + max(codes)
        sequences = [self._decode(members, depth, width) for depth, members in codes.items()]
        if split == "train":
            entries, lone_entries = self._entries(width)
            copies = np.tile(lone_entries, (self.config.lone_repeats, 1))
            tokens = np.concatenate([entries, copies, *sequences])
        else:
            tokens = np.concatenate(sequences)
            generator = self._key.generator(f"/order/{split}")
            tokens = tokens[balanced_order((tokens >= 0).sum(1), generator)]
        if self.config.direction == "backward":
            tokens = mirrored(tokens)
        return self._describe(tokens)

    def _describe(self, tokens: Int[np.ndarray, "n pos"]) -> ExampleSet:
        return look_up(tokens, self.tables, self.config.direction)

    def _groups(self, train: ExampleSet) -> list[Int[np.ndarray, " member"]]:
        depth = train.latents["depth"].numpy()
        if self.config.sampling == "uniform":
            return [np.arange(len(depth))]
        return [np.flatnonzero(depth == level) for level in np.unique(depth)]

    def _codes(self, split: str) -> dict[int, Int[np.ndarray, " sequence"]]:
        """Draw the numbers of a split's sequences of each depth, without repetition."""
        # `id` and `train` are two parts of one draw.
        parts = ("id", "train") if split in ("id", "train") else (split,)
        counts = [self.config.counts(part) for part in parts]
        codes = {}
        for depth in counts[0]:
            ends = np.cumsum([count[depth] for count in counts])
            generator = self._key.generator(f"/sequences/{depth}")
            drawn = generator.choice(self.config.n_sequences(depth), ends[-1], replace=False)
            codes[depth] = np.split(drawn, ends[:-1])[parts.index(split)]
        return codes

    def _decode(
        self, codes: Int[np.ndarray, " sequence"], depth: int, width: int
    ) -> Int[np.ndarray, "sequence pos"]:
        """Return the forward sequence of each number, with tables up to `depth`."""
        tokens = np.full((len(codes), width), -1)
        codes, tokens[:, 0] = np.divmod(codes, self.config.n_symbols)
        for step in range(1, depth + 1):
            codes, table = np.divmod(codes, self.config.n_tables)
            tokens[:, step] = self.config.n_symbols + table
        return tokens

    def _entries(
        self, width: int
    ) -> tuple[Int[np.ndarray, "entry pos"], Int[np.ndarray, "lone_entry pos"]]:
        """Return all forward sequences of depth 1, and those with lone tables."""
        n_symbols = self.config.n_symbols
        entry = np.arange(self.tables.size)
        tokens = np.full((len(entry), width), -1)
        tokens[:, 0], tokens[:, 1] = entry % n_symbols, n_symbols + entry // n_symbols
        return tokens, tokens[self.config.n_tables * n_symbols :]


def mirrored(tokens: Int[np.ndarray, "n pos"]) -> Int[np.ndarray, "n pos"]:
    """Reverse each sequence; padding stays at the end."""
    length = (tokens >= 0).sum(1, keepdims=True)
    source = length - 1 - np.arange(tokens.shape[1])
    return np.where(source >= 0, np.take_along_axis(tokens, source, 1), -1)


def look_up(
    tokens: Int[np.ndarray, "n pos"],
    tables: Int[np.ndarray, "table symbol"],
    direction: Literal["forward", "backward"],
) -> ExampleSet:
    """Evaluate sequences and compute their latents.

    Args:
        tokens: ids, n_symbols + t for table t; padded with -1.
        tables: the result of each table for each symbol.
        direction: the direction in which the sequences are written.

    Returns:
        The examples, with the latents of `ExpressionTask`.
    """
    n, width = tokens.shape
    n_symbols = tables.shape[1]
    position = np.arange(width)
    length = (tokens >= 0).sum(1)
    inside = position < length[:, None]

    forward = tokens if direction == "forward" else mirrored(tokens)
    value = np.full((n, width), -1)
    value[:, 0] = forward[:, 0]
    for step in range(1, width):
        rows = np.flatnonzero(inside[:, step])
        value[rows, step] = tables[forward[rows, step] - n_symbols, value[rows, step - 1]]
    answer = value[np.arange(n), length - 1]

    # Data flows between neighbours: the edge at p joins the tokens p and p + 1.
    node = np.where(inside, position, -1)
    edges = np.stack([node[:, :-1], node[:, 1:]], -1)
    edges[~inside[:, 1:]] = -1
    node_depth, root = node, length - 1
    if direction == "backward":
        value, node_depth, edges = mirrored(value), mirrored(node), edges[..., ::-1]
        root = np.zeros_like(root)
    latents = {
        "length": length,
        "depth": length - 1,
        "node": node,
        "node_token": node,
        "node_symbol": tokens,
        "node_value": value,
        "node_depth": node_depth,
        "edges": edges,
        "edge_used": inside[:, 1:],
        "root": root,
    }
    return ExampleSet(
        inputs=small(tokens),
        targets=small(answer),
        latents={name: small(values) for name, values in latents.items()},
    )
