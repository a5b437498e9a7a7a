"""Mathematical language understanding (MLU): Wangperawong 2018; Tay et al. 2019, "CoDA".

A line gives values to two variables and asks for the result of an operation on them, such as
`y=691,x=-999,y*x`; the answer is `-690309`. Both are read and written character by character.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tasks.answers import score_sequence
from tasks.batch import Batch
from tasks.common import Key, require_choice, require_int

MLU_CHARACTERS = ("<pad>", "<bos>", "<eos>", *"0123456789-+*=,xy")
"""The characters and marks, of lines as of answers; an id is an index."""

MLU_OPERATORS = ("+", "-", "*")
"""The operators; an operator's id is its index."""

_PAD, _BOS, _EOS = range(3)
_DIGIT = MLU_CHARACTERS.index("0")
_MINUS = MLU_CHARACTERS.index("-")
_VARIABLES = np.array([MLU_CHARACTERS.index(name) for name in "xy"])
_SIGNS = np.array([MLU_CHARACTERS.index(name) for name in MLU_OPERATORS])
_FORMS = (2, 3, 2, 2)  # which is given first, the operator, the left and the right operand
_N_FORMS = 24
_MAX_NUMBERS = 4_000  # tables have a place for each pair of numbers


@dataclass(frozen=True, kw_only=True)
class MLUConfig:
    """Which lines they are. The default numbers are the paper's.

    Attributes:
        low: the smallest number, at least -9999.
        high: one more than the largest, at most 10,000; there are 2 to 4000 numbers.
        ood_share: share of the pairs of numbers that is held out for `ood`, rounded to a whole
            number of them, which leaves neither side empty.
        seed: chooses what is held out and every batch, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.
    """

    low: int = -1000
    high: int = 1000
    ood_share: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        require_int("low", self.low, -9999, 9998)
        require_int("high", self.high, self.low + 2, min(self.low + _MAX_NUMBERS, 10_000))
        share = self.ood_share
        number = isinstance(share, int | float) and not isinstance(share, bool)
        if not number or not 0 < share < 1 or not 0 < self.n_ood < self.n_pairs:
            raise ValueError(
                f"ood_share={share!r}: allowed is a number between 0 and 1 that leaves on both "
                f"sides some of the {self.n_pairs} pairs"
            )
        require_int("seed", self.seed, 0, 2**32 - 1)

    @property
    def n_numbers(self) -> int:
        """How many numbers there are."""
        return self.high - self.low

    @property
    def n_pairs(self) -> int:
        """How many pairs of numbers there are, whichever of them is x."""
        return self.n_numbers * (self.n_numbers + 1) // 2

    @property
    def n_ood(self) -> int:
        """How many of them are held out."""
        return round(self.ood_share * self.n_pairs)


class MLU:
    """The sampler of MLU: an endless stream of lines.

    x and y are drawn from [low, high). Which is given first, the operator, and the two operands, of
    {x, y} and independent of one another, make 24 forms of a line.

    Splits, disjoint as lines: `train`; `id`, for each x and y one of the 24 forms, which `train`
    lacks; `ood`, pairs of numbers that `train` and `id` never have together, whichever is x. So in
    `ood` the sum, difference or product of two variables is one that `train` never asks for, while
    those of one and the same (`x*x`) are known beside another number.

    A batch holds (ids of `MLU_CHARACTERS`, int64, 0 behind the end)
    inputs: the line [batch, source_pos]; and, for teacher forcing, `<bos>` and the answer
    [batch, target_pos];
    targets [batch, target_pos]: the answer and `<eos>`; both widths follow from the config, with
    the default numbers 19 and 8;
    mask [batch, target_pos]: True for the answer and `<eos>`.

    Latents, each [batch] int64: the numbers `x`, `y` and `result`; `operator`, an index into
    `MLU_OPERATORS`; the operands `left` and `right`, 0 for x and 1 for y; `first`, the variable
    that is given first, 0 or 1; `length`, characters of the answer.
    """

    SPLITS: ClassVar = ("train", "id", "ood")

    def __init__(self, config: MLUConfig) -> None:
        self.config = config
        self._key = Key(config)

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits."""
        return self.SPLITS

    def batch(
        self, split: str, index: int, size: int, device: str | torch.device = "cpu"
    ) -> Batch[tuple[Tensor, Tensor]]:
        """Return batch number `index` of a split: always the same one for the same arguments.

        Args:
            split: one of `splits`.
            index: 0 to 2^62.
            size: number of examples, 1 to 2^22; a smaller batch need not be a part of a larger one.
            device: where the batch shall be.

        Raises:
            ValueError: `split` is unknown, or `index` or `size` is out of range.
        """
        pairs = self._pairs(split)
        require_int("index", index, 0, 2**62)
        require_int("size", size, 1, 2**22)
        generator = self._key.generator(f"/{split}/{index}")
        pair = pairs[generator.integers(len(pairs), size=size)].astype(np.int64)
        if split == "ood":
            form = generator.integers(_N_FORMS, size=size)
        else:
            form = self._id_form[pair].astype(np.int64)
            if split == "train":
                form = (form + generator.integers(1, _N_FORMS, size=size)) % _N_FORMS
        first, operator, left, right = np.unravel_index(form, _FORMS)
        numbers = np.stack(np.divmod(pair, self.config.n_numbers), 1) + self.config.low

        row = np.arange(size)
        a, b = numbers[row, left], numbers[row, right]
        result = np.choose(operator, [a + b, a - b, a * b])
        digits = _n_digits(self.config.low, self.config.high - 1)
        source = _packed(
            *(
                part
                for place in (first, 1 - first)
                for part in (_VARIABLES[place], "=", _written(numbers[row, place], digits), ",")
            ),
            *(_VARIABLES[left], _SIGNS[operator], _VARIABLES[right]),
        )[:, : self._widths[0]]
        answer = _packed(_written(result, _n_digits(*self._results)))
        length = (answer != _PAD).sum(1)
        targets = np.pad(answer, ((0, 0), (0, 1)))[:, : self._widths[1]]
        given = np.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=_BOS)
        targets[row, length] = _EOS
        latents = {
            **{"x": numbers[:, 0], "y": numbers[:, 1], "operator": operator, "left": left},
            **{"right": right, "first": first, "result": result, "length": length},
        }
        made = Batch(
            inputs=(torch.from_numpy(source), torch.from_numpy(given)),
            targets=torch.from_numpy(targets),
            mask=torch.from_numpy(np.arange(targets.shape[1]) <= length[:, None]),
            latents={name: torch.from_numpy(values.copy()) for name, values in latents.items()},
        )
        return made if torch.device(device).type == "cpu" else made.to(device)

    def text(self, batch: Batch[tuple[Tensor, Tensor]], example: int) -> str:
        """Return the line of one example of a batch."""
        return self.decode(batch.inputs[0][example])

    def words(
        self, batch: Batch[tuple[Tensor, Tensor]], example: int
    ) -> tuple[list[str], list[str]]:
        """Return what is to be written and the line of one example, a word for each position.

        For the queries and keys of attention that reads the line to write the answer: characters,
        `<eos>` at the end of the answer, and "" for padding.
        """
        written, line = (
            ["" if one == _PAD else MLU_CHARACTERS[one] for one in part[example].tolist()]
            for part in (batch.targets, batch.inputs[0])
        )
        return written, line

    def decode(self, ids: Int[Tensor, " pos"]) -> str:
        """Return the characters up to the first `<eos>`, which is not among them.

        Args:
            ids: of `MLU_CHARACTERS`; `<pad>` and `<bos>` are passed over.
        """
        plain = ids.tolist()
        end = plain.index(_EOS) if _EOS in plain else len(plain)
        return "".join(MLU_CHARACTERS[one] for one in plain[:end] if one > _EOS)

    def score(
        self, output: Int[Tensor, "batch pos"], batch: Batch[tuple[Tensor, Tensor]]
    ) -> dict[str, Tensor]:
        """Return how right the answers are.

        Args:
            output: [batch, pos], ids of `MLU_CHARACTERS`, from the first character on, whether
                decoded greedily or the argmax of teacher-forced logits. It may be shorter or longer
                than the targets; what follows the place of their `<eos>` is not read.
            batch: the batch that they answer.

        Returns:
            `correct` [batch]: 1 where all characters and `<eos>` are right, else 0: either kind of
            output gives the same;
            `token_correct` [batch]: the share of these that is right, in which the kinds differ.

        Raises:
            ValueError: `output` has another shape, or holds no whole numbers.
        """
        return score_sequence(output, batch)

    @cached_property
    def _sides(self) -> dict[str, Int[np.ndarray, " pair"]]:
        """The places of (x, y) among all, of known and of held-out pairs."""
        n = self.config.n_numbers
        small, large = np.triu_indices(n)
        held_out = np.zeros((n, n), bool)
        chosen = self._key.generator("/ood").permutation(len(small))[: self.config.n_ood]
        held_out[small[chosen], large[chosen]] = True
        held_out |= held_out.T
        return {
            side: np.flatnonzero(places).astype(np.int32)
            for side, places in {"known": ~held_out, "ood": held_out}.items()
        }

    @cached_property
    def _id_form(self) -> Int[np.ndarray, " pair"]:
        """For each (x, y), the form that is not in `train`."""
        shape = self.config.n_numbers**2
        return self._key.generator("/id").integers(_N_FORMS, size=shape, dtype=np.int8)

    @cached_property
    def _results(self) -> tuple[int, int]:
        """Bounds of the results: all operations are extreme at extreme numbers."""
        ends = (self.config.low, self.config.high - 1)
        found = [value for a in ends for b in ends for value in (a + b, a - b, a * b)]
        return min(found), max(found)

    @cached_property
    def _widths(self) -> tuple[int, int]:
        """The most characters of a line; of an answer and its end."""
        number, result = (
            max(len(str(value)) for value in bounds)
            for bounds in ((self.config.low, self.config.high - 1), self._results)
        )
        return len("x=,y=,x+y") + 2 * number, result + 1

    def _pairs(self, split: str) -> Int[np.ndarray, " pair"]:
        require_choice("split", split, self.SPLITS)
        return self._sides["ood" if split == "ood" else "known"]


def _n_digits(low: int, high: int) -> int:
    return max(len(str(abs(low))), len(str(abs(high))))


def _written(values: Int[np.ndarray, " n"], n_digits: int) -> Int[np.ndarray, "n sign_and_digits"]:
    """Return numbers as characters: a minus or padding, padding for leading zeros, digits."""
    powers = 10 ** np.arange(n_digits - 1, -1, -1)
    size = np.abs(values)[:, None]
    shown = size >= powers
    shown[:, -1] = True
    digits = np.where(shown, _DIGIT + size // powers % 10, _PAD)
    return np.hstack([np.where(values < 0, _MINUS, _PAD)[:, None], digits])


def _packed(*parts: "str | Int[np.ndarray, 'n *pos']") -> Int[np.ndarray, "n pos"]:
    """Return parts side by side, with all padding at the end; a character is for every row."""
    n = max(len(part) for part in parts if not isinstance(part, str))
    columns = [
        np.full((n, 1), MLU_CHARACTERS.index(part))
        if isinstance(part, str)
        else part.reshape(n, -1)
        for part in parts
    ]
    tokens = np.hstack(columns)
    return np.take_along_axis(tokens, np.argsort(tokens == _PAD, axis=1, kind="stable"), 1)
