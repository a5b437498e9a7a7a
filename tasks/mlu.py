"""Mathematical language understanding (MLU): Wangperawong 2018; Tay et al. 2019, "CoDA".

A line assigns values to two variables and asks for the result of an operation on them, such as
`y=691,x=-999,y*x`; the answer is `-690309`. Tokens are characters.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tasks.answers import score_sequence
from tasks.batch import Batch
from tasks.causal import CausalTask, Variable, integers
from tasks.common import Key, require_held_out, require_int, require_number
from tasks.stream_task import StreamTask

MLU_CHARACTERS = ("<pad>", "<bos>", "<eos>", *"0123456789-+*=,xy")
"""The tokens of lines and answers; a token's id is its index."""

MLU_OPERATORS = ("+", "-", "*")
"""The operators; an operator's id is its index."""

_PAD, _BOS, _EOS = range(3)
_DIGIT = MLU_CHARACTERS.index("0")
_MINUS = MLU_CHARACTERS.index("-")
_VARIABLES = np.array([MLU_CHARACTERS.index(name) for name in "xy"])
_SIGNS = np.array([MLU_CHARACTERS.index(name) for name in MLU_OPERATORS])
_FORMS = (2, 3, 2, 2)  # the variable assigned first, the operator, the left and right operand
_N_FORMS = 24
_MAX_NUMBERS = 4_000  # tables have an entry for each pair of numbers


@dataclass(frozen=True, kw_only=True)
class MLUConfig:
    """Settings of MLU. The default numbers are the paper's.

    Attributes:
        low: the smallest number, at least -9999.
        high: one more than the largest number, at most 10,000; there are 2 to 4000 numbers.
        ood_share: share of the pairs of numbers that is held out for `ood`, rounded to a number of
            pairs; neither side may be empty.
        seed: seeds the split and every batch, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> config = MLUConfig(low=0, high=10, ood_share=0.2)
        >>> config.n_pairs, config.n_ood
        (55, 11)
        >>> line, shifted = MLU(config).batch("train", 0, 64).inputs
        >>> MLU(config).decode(line[0]).count("=")  # such as y=2,x=4,x-y
        2
    """

    low: int = -1000
    high: int = 1000
    ood_share: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        _check_numbers(self)
        require_number("ood_share", self.ood_share, 0, 1)
        require_held_out("ood_share", self.ood_share, self.n_ood, self.n_pairs, "pairs")

    @property
    def n_numbers(self) -> int:
        """Number of values of a variable."""
        return self.high - self.low

    @property
    def n_pairs(self) -> int:
        """Number of unordered pairs of values."""
        return self.n_numbers * (self.n_numbers + 1) // 2

    @property
    def n_ood(self) -> int:
        """Number of unordered pairs that are held out."""
        return round(self.ood_share * self.n_pairs)


@dataclass(frozen=True, kw_only=True)
class MLULinesConfig:
    """Settings of MLU with a fixed set of lines. The defaults are the paper's: 12 million lines.

    Attributes:
        low: as in `MLUConfig`.
        high: as in `MLUConfig`.
        test_share: share of the lines that `train` lacks, rounded to a number of lines; neither
            side may be empty.
        seed: seeds the lines, the split and every batch, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> config = MLULinesConfig(low=0, high=10)
        >>> config.n_lines, config.n_test  # each of three operators with each x and y
        (300, 30)
        >>> MLULines(config).batch("train", 0, 64).targets.shape  # 81, -9, `<eos>`
        torch.Size([64, 3])
    """

    low: int = -1000
    high: int = 1000
    test_share: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        _check_numbers(self)
        require_number("test_share", self.test_share, 0, 1)
        require_held_out("test_share", self.test_share, self.n_test, self.n_lines, "lines")

    @property
    def n_numbers(self) -> int:
        """Number of values of a variable."""
        return self.high - self.low

    @property
    def n_lines(self) -> int:
        """Number of lines: one for each x, y and operator."""
        return len(MLU_OPERATORS) * self.n_numbers**2

    @property
    def n_test(self) -> int:
        """Number of lines that `train` lacks."""
        return round(self.test_share * self.n_lines)


class _Lines(StreamTask[tuple[Tensor, Tensor]], CausalTask[tuple[Tensor, Tensor]]):
    """An endless stream of lines, each given by the numbers x and y and one of 24 forms."""

    def __init__(self, *, key: Key, low: int, high: int) -> None:
        """Args: the key that seeds all random choices; the bounds of the numbers."""
        super().__init__(key=key)
        self._low, self._high = low, high

    @abstractmethod
    def _chosen(
        self, split: str, size: int, generator: np.random.Generator
    ) -> tuple[Int[np.ndarray, " size"], Int[np.ndarray, " size"]]:
        """The flat index of (x, y) and the form of each line, int64."""

    def _draw(
        self, split: str, size: int, generator: np.random.Generator
    ) -> Batch[tuple[Tensor, Tensor]]:
        pair, form = self._chosen(split, size, generator)
        first, operator, left, right = np.unravel_index(form, _FORMS)
        x, y = np.stack(np.divmod(pair, self._high - self._low)) + self._low
        drawn = {"x": x, "y": y, "operator": operator}
        drawn |= {"left": left, "right": right, "first": first}
        return self._completed({name: torch.from_numpy(value) for name, value in drawn.items()})

    @property
    def _variables(self) -> dict[str, Variable]:
        number, variable = integers(self._low, self._high - 1), integers(0, 1)
        operation = ("x", "y", "operator", "left", "right")
        return {
            **{"x": Variable(allowed=number), "y": Variable(allowed=number)},
            "operator": Variable(allowed=integers(0, len(MLU_OPERATORS) - 1)),
            **{name: Variable(allowed=variable) for name in ("left", "right", "first")},
            "result": Variable(
                causes=operation, compute=_calculate, allowed=integers(*self._results)
            ),
            "length": Variable(causes=("result",), compute=self._length),
            "targets": Variable(causes=("result",), compute=self._answer),
            "inputs": Variable(causes=(*operation, "first", "targets"), compute=self._shown),
            "mask": Variable(causes=("length",), compute=self._mask),
        }

    def _answer(self, result: Int[Tensor, " batch"]) -> Int[Tensor, "batch target_pos"]:
        tokens = _packed(_tokens(result.numpy(), _n_digits(*self._results)))
        targets = np.pad(tokens, ((0, 0), (0, 1)))[:, : self._widths[1]]
        targets[np.arange(len(tokens)), (tokens != _PAD).sum(1)] = _EOS
        return torch.from_numpy(targets)

    def _length(self, result: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        powers = 10 ** torch.arange(1, _n_digits(*self._results))
        return (result < 0) + 1 + (result.abs()[:, None] >= powers).sum(1)

    def _mask(self, length: Int[Tensor, " batch"]) -> Bool[Tensor, "batch target_pos"]:
        return torch.arange(self._widths[1]) <= length[:, None]

    def _shown(
        self,
        x: Int[Tensor, " batch"],
        y: Int[Tensor, " batch"],
        operator: Int[Tensor, " batch"],
        left: Int[Tensor, " batch"],
        right: Int[Tensor, " batch"],
        first: Int[Tensor, " batch"],
        answer: Int[Tensor, "batch target_pos"],
    ) -> tuple[Int[Tensor, "batch source_pos"], Int[Tensor, "batch target_pos"]]:
        """Return the lines, and the answers after <bos>."""
        numbers = torch.stack([x, y], 1).numpy()
        row, digits = np.arange(len(numbers)), _n_digits(self._low, self._high - 1)
        source = _packed(
            *(
                part
                for variable in (first.numpy(), 1 - first.numpy())
                for part in (
                    _VARIABLES[variable],
                    "=",
                    _tokens(numbers[row, variable], digits),
                    ",",
                )
            ),
            # As arrays: NumPy takes a tensor of one example for a single index.
            _VARIABLES[left.numpy()],
            _SIGNS[operator.numpy()],
            _VARIABLES[right.numpy()],
        )[:, : self._widths[0]]
        shifted = torch.where(answer == _EOS, _PAD, answer).roll(1, 1)
        shifted[:, 0] = _BOS
        return torch.from_numpy(source), shifted

    def text(self, batch: Batch[tuple[Tensor, Tensor]], example: int) -> str:
        """Return the line of one example of a batch."""
        return self.decode(batch.inputs[0][example])

    def words(
        self, batch: Batch[tuple[Tensor, Tensor]], example: int
    ) -> tuple[list[str], list[str]]:
        """Return the answer and the line of one example as lists of tokens, "" for padding.

        They label the queries and the keys of attention from the answer to the line. `<eos>` ends
        the answer.
        """
        answer, line = (
            ["" if token == _PAD else MLU_CHARACTERS[token] for token in ids[example].tolist()]
            for ids in (batch.targets, batch.inputs[0])
        )
        return answer, line

    def decode(self, ids: Int[Tensor, " pos"]) -> str:
        """Return the characters before the first `<eos>`.

        Args:
            ids: of `MLU_CHARACTERS`; `<pad>` and `<bos>` are skipped.
        """
        tokens = ids.tolist()
        end = tokens.index(_EOS) if _EOS in tokens else len(tokens)
        return "".join(MLU_CHARACTERS[token] for token in tokens[:end] if token > _EOS)

    score = staticmethod(score_sequence)

    @cached_property
    def _results(self) -> tuple[int, int]:
        """The smallest and largest result; all operations are extreme at extreme numbers."""
        ends = (self._low, self._high - 1)
        extremes = [value for a in ends for b in ends for value in (a + b, a - b, a * b)]
        return min(extremes), max(extremes)

    @cached_property
    def _widths(self) -> tuple[int, int]:
        """The greatest lengths of a line and of an answer with `<eos>`."""
        number, result = (
            max(len(str(value)) for value in bounds)
            for bounds in ((self._low, self._high - 1), self._results)
        )
        return len("x=,y=,x+y") + 2 * number, result + 1


class MLU(_Lines):
    """Mathematical language understanding: an endless stream of lines.

    x and y are drawn from [low, high). The variable assigned first, the operator and the two
    operands, each x or y independently, make 24 forms of a line.

    Splits, disjoint as lines: `train`; `id`, which has, for each x and y, one of the 24 forms, not
    in `train`; `ood`, with pairs of numbers that `train` and `id` never have together, in either
    order. So `train` never asks for the sums, differences and products of two variables in `ood`;
    operations on a single variable (`x*x`) do occur there, beside another value of y.

    A batch has (ids of `MLU_CHARACTERS`, int64, padded with 0)
    inputs: the line [batch, source_pos]; and, for teacher forcing, `<bos>` and the answer
    [batch, target_pos];
    targets [batch, target_pos]: the answer and `<eos>`; both widths follow from the config and are
    19 and 8 by default;
    mask [batch, target_pos]: True for the answer and `<eos>`.

    Latents, each [batch] int64: the numbers `x`, `y` and `result`; `operator`, an index into
    `MLU_OPERATORS`; the operands `left` and `right`, 0 for x and 1 for y; `first`, the variable
    that is assigned first, 0 or 1; `length`, characters of the answer.

    Causal model: all but `length` can be set. If `result` is set the line stays; the second input,
    for teacher forcing, follows the answer. Lines that result from other numbers or forms may
    belong to another split.

    Example:
        >>> MLU(MLUConfig()).batch("train", 0, 64)
    """

    SPLITS: ClassVar = ("train", "id", "ood")

    def __init__(self, config: MLUConfig) -> None:
        super().__init__(key=Key(config), low=config.low, high=config.high)
        self.config = config

    def _chosen(
        self, split: str, size: int, generator: np.random.Generator
    ) -> tuple[Int[np.ndarray, " size"], Int[np.ndarray, " size"]]:
        pairs = self._sides["ood" if split == "ood" else "known"]
        pair = pairs[generator.integers(len(pairs), size=size)].astype(np.int64)
        if split == "ood":
            return pair, generator.integers(_N_FORMS, size=size)
        form = self._id_form[pair].astype(np.int64)
        if split == "train":
            form = (form + generator.integers(1, _N_FORMS, size=size)) % _N_FORMS
        return pair, form

    @cached_property
    def _sides(self) -> dict[str, Int[np.ndarray, " pair"]]:
        """The flat indices of the known and of the held-out pairs (x, y)."""
        n = self.config.n_numbers
        small, large = np.triu_indices(n)
        held_out = np.zeros((n, n), bool)
        drawn = self._key.generator("/ood").permutation(len(small))[: self.config.n_ood]
        held_out[small[drawn], large[drawn]] = True
        held_out |= held_out.T
        return {
            side: np.flatnonzero(mask).astype(np.int32)
            for side, mask in {"known": ~held_out, "ood": held_out}.items()
        }

    @cached_property
    def _id_form(self) -> Int[np.ndarray, " pair"]:
        """The form that `id` has and `train` lacks, for each pair (x, y)."""
        shape = self.config.n_numbers**2
        return self._key.generator("/id").integers(_N_FORMS, size=shape, dtype=np.int8)


class MLULines(_Lines):
    """Mathematical language understanding with a fixed set of lines, split at random.

    As the paper's data set, there is one line for each x and y from [low, high) and each operator,
    with a random order of the variables and random operands. (The data set has "about 12 million"
    lines, which is this number; its generator is not public.)

    Splits: `train`; `id`, the test lines of the paper. The numbers of a test line mostly occur in
    `train` with other operators. Batches are drawn with replacement; they and their latents are as
    those of `MLU`.

    Example:
        >>> MLULines(MLULinesConfig()).batch("train", 0, 64)
    """

    SPLITS: ClassVar = ("train", "id")

    def __init__(self, config: MLULinesConfig) -> None:
        super().__init__(key=Key(config), low=config.low, high=config.high)
        self.config = config

    def _chosen(
        self, split: str, size: int, generator: np.random.Generator
    ) -> tuple[Int[np.ndarray, " size"], Int[np.ndarray, " size"]]:
        lines = self._sides[split]
        line = lines[generator.integers(len(lines), size=size)].astype(np.int64)
        pair, operator = np.divmod(line, len(MLU_OPERATORS))
        first, left, right = np.unravel_index(self._variants[line], (2, 2, 2))
        return pair, np.ravel_multi_index((first, operator, left, right), _FORMS)

    @cached_property
    def _sides(self) -> dict[str, Int[np.ndarray, " line"]]:
        """The lines of each split: x, y and operator as a flat index."""
        lines = np.arange(self.config.n_lines, dtype=np.int32)
        lines = self._key.generator("/test").permutation(lines)
        return {"id": lines[: self.config.n_test], "train": lines[self.config.n_test :]}

    @cached_property
    def _variants(self) -> Int[np.ndarray, " line"]:
        """The order of the variables and the operands of each line, one of 8."""
        return self._key.generator("/lines").integers(8, size=self.config.n_lines, dtype=np.int8)


def _calculate(
    x: Int[Tensor, " batch"],
    y: Int[Tensor, " batch"],
    operator: Int[Tensor, " batch"],
    left: Int[Tensor, " batch"],
    right: Int[Tensor, " batch"],
) -> Int[Tensor, " batch"]:
    a, b = torch.where(left == 0, x, y), torch.where(right == 0, x, y)
    return torch.stack([a + b, a - b, a * b]).gather(0, operator[None])[0]


def _check_numbers(config: MLUConfig | MLULinesConfig) -> None:
    require_int("low", config.low, -9999, 9998)
    require_int("high", config.high, config.low + 2, min(config.low + _MAX_NUMBERS, 10_000))
    require_int("seed", config.seed, 0, 2**32 - 1)


def _n_digits(low: int, high: int) -> int:
    return max(len(str(abs(low))), len(str(abs(high))))


def _tokens(values: Int[np.ndarray, " n"], n_digits: int) -> Int[np.ndarray, "n sign_and_digits"]:
    """Return numbers as tokens: a minus or padding, padding for leading zeros, digits."""
    powers = 10 ** np.arange(n_digits - 1, -1, -1)
    absolute = np.abs(values)[:, None]
    is_digit = absolute >= powers
    is_digit[:, -1] = True
    digits = np.where(is_digit, _DIGIT + absolute // powers % 10, _PAD)
    return np.hstack([np.where(values < 0, _MINUS, _PAD)[:, None], digits])


def _packed(*parts: "str | Int[np.ndarray, 'n *pos']") -> Int[np.ndarray, "n pos"]:
    """Concatenate parts along the positions, padding last; a character is repeated for all rows."""
    n = max(len(part) for part in parts if not isinstance(part, str))
    columns = [
        np.full((n, 1), MLU_CHARACTERS.index(part))
        if isinstance(part, str)
        else part.reshape(n, -1)
        for part in parts
    ]
    tokens = np.hstack(columns)
    return np.take_along_axis(tokens, np.argsort(tokens == _PAD, axis=1, kind="stable"), 1)
