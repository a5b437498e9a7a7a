"""Signed pairs: sequence A determines which tokens of sequence B count, and with which sign.

Designed for quasi-attention that adds, subtracts or deletes (Tay et al. 2019, "CoDA"): the correct
sign of every pair of tokens is known.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import comb
from string import ascii_lowercase
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tasks.answers import LabelledAnswers
from tasks.batch import Batch
from tasks.causal import Allowed, CausalTask, Variable, integers
from tasks.common import Key, require_choice, require_held_out, require_int, require_number
from tasks.held_out import hold_out, require_cover
from tasks.rows import find_rows
from tasks.stream_task import StreamTask

_MAX_COMBINATIONS = 10**6


@dataclass(frozen=True, kw_only=True)
class SignedPairsConfig:
    """Settings of signed pairs.

    Attributes:
        n_keys: number of keys, 3 to 1000.
        n_a: tokens of A, with different keys, 2 to n_keys - 1 (a set of a single token could not be
            held out without holding out the token); at most 10^6 sets of tokens.
        n_b: tokens of B, 2 to 1000.
        n_values: number of absolute values, 1 to 100.
        margin: least absolute value of the signed sum, 1 to n_values.
        held_out: share of the sets of tokens of A that is held out for `ood`, rounded down to an
            even number, since a set is held out with the set of opposite polarities; neither side
            may be empty. The draw is repeated until `train` has all tokens.
        seed: seeds the split and every batch, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range, or `held_out` leaves too few sets to have all
            tokens; so does the first batch where no random draw leaves enough.

    Example:
        >>> SignedPairsConfig(n_keys=4, n_a=2).n_b
        8
    """

    n_keys: int = 8
    n_a: int = 3
    n_b: int = 8
    n_values: int = 4
    margin: int = 1
    held_out: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        require_int("n_keys", self.n_keys, 3, 1000)
        require_int("n_a", self.n_a, 2, self.n_keys - 1)
        if self.n_combinations > _MAX_COMBINATIONS:
            raise ValueError(
                f"n_a must make at most {_MAX_COMBINATIONS} sets of tokens, got {self.n_a!r} with "
                f"n_keys={self.n_keys!r}, which makes {self.n_combinations}"
            )
        require_int("n_b", self.n_b, 2, 1000)
        require_int("n_values", self.n_values, 1, 100)
        require_int("margin", self.margin, 1, self.n_values)
        require_number("held_out", self.held_out, 0, 1)
        require_held_out(
            "held_out", self.held_out, self.n_ood, self.n_combinations, "sets of tokens"
        )
        n_left = self.n_combinations - self.n_ood
        require_cover(self.held_out, n_left, self.n_a, 2 * self.n_keys, "tokens of A")
        require_int("seed", self.seed, 0, 2**32 - 1)

    @property
    def n_combinations(self) -> int:
        """Number of sets of tokens that A can have."""
        return comb(self.n_keys, self.n_a) * 2**self.n_a

    @property
    def n_ood(self) -> int:
        """Number of sets of tokens that are held out."""
        return 2 * int(self.held_out * self.n_combinations / 2)


class SignedPairs(
    LabelledAnswers, StreamTask[tuple[Tensor, Tensor]], CausalTask[tuple[Tensor, Tensor]]
):
    """Signed pairs.

    A token of A has a key and a polarity, +1 or -1; its id is 1 + 2 key, or one more for -1. A
    token of B has a key and a value of either sign and absolute value 1 to n_values. Half of the
    tokens of B, rounded up, at random positions, have keys of A; their values are multiplied by the
    polarity of that key in A. The other tokens have other keys and are to be ignored:

        label = 1 if sum over i, j of sign_ij value_j > 0, else 0;
        sign_ij = polarity_i if key_i = key_j, else 0.

    In every split, flipping all polarities, or all values, leaves the distribution unchanged. So
    the label, 1 in half of the examples, is independent of A alone and of B alone.

    Splits: `train` and `id` draw from the same sets of tokens of A, `ood` from the held-out sets,
    each equally often and in any order. So `ood` needs the known effects of the tokens of A in new
    combinations.

    A batch has inputs A [batch, n_a] and B [batch, n_b], int64 ids below `vocabulary_size`;
    targets [batch, 1] int64: the label; mask [batch, 1], all True; and the latents (int64)
    `sign` [batch, n_a, n_b]: -1 where a token of A subtracts one of B, 1 where it adds it, else 0;
    `key_a`, `polarity` [batch, n_a]; `key_b`, `value` [batch, n_b]: the parts of the ids;
    `total` [batch]: the signed sum;
    `combination` [batch]: the row in `combinations(split)`.

    Causal model: the parts of the ids can be set, and in between `sign` and `total`. The mask is
    False where the absolute value of the sum is below the margin. After keys or polarities of A are
    set, `combination` is the row in the combinations of the split that has this set of tokens, -1
    if none does.

    Example:
        >>> SignedPairs(SignedPairsConfig()).batch("ood", 0, 100)
    """

    SPLITS: ClassVar = ("train", "id", "ood")

    def __init__(self, config: SignedPairsConfig) -> None:
        super().__init__(key=Key(config))
        self.config = config

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each label."""
        return ("negative", "positive")

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids: padding (0, which does not occur), those of A, those of B."""
        return 1 + 2 * self.config.n_keys * (1 + self.config.n_values)

    def combinations(self, split: str) -> Int[np.ndarray, "combination token"]:
        """Return the sets of tokens of A in a split, as ascending ids.

        Raises:
            ValueError: `split` is unknown.
        """
        require_choice("split", split, self.SPLITS)
        return self._sides["ood" if split == "ood" else "train"]

    def _draw(
        self, split: str, size: int, generator: np.random.Generator
    ) -> Batch[tuple[Tensor, Tensor]]:
        config = self.config
        combinations = self.combinations(split)
        combination = generator.integers(len(combinations), size=size)
        a = generator.permuted(combinations[combination], axis=1)
        key_a = (a - 1) // 2

        shape = (size, config.n_b)
        counts = np.broadcast_to(np.arange(config.n_b) < -(-config.n_b // 2), shape)
        counts = generator.permuted(counts, axis=1)
        position_in_a = generator.integers(config.n_a, size=shape)
        other_key = generator.integers(config.n_keys - config.n_a, size=shape)
        for key in np.sort(key_a, 1).T:  # skip the keys of A, the smallest first
            other_key += other_key >= key[:, None]
        key_b = np.where(counts, np.take_along_axis(key_a, position_in_a, 1), other_key)

        polarity = 1 - 2 * ((a - 1) % 2)
        sign = np.where(key_a[:, :, None] == key_b[:, None], polarity[:, :, None], 0)
        net = sign.sum(1)
        value = np.empty(shape, np.int64)
        total, rows = np.zeros(size, np.int64), np.arange(size)
        while len(rows):
            # Sums below the margin are redrawn, which keeps both signs equally likely.
            level = generator.integers(2 * config.n_values, size=(len(rows), config.n_b))
            value[rows] = level - config.n_values + (level >= config.n_values)
            total = (net * value).sum(1)
            rows = np.flatnonzero(np.abs(total) < config.margin)
        latents = {
            **{"sign": sign, "key_a": key_a, "polarity": polarity, "key_b": key_b},
            **{"value": value, "total": total, "combination": combination},
        }
        return self._completed({name: torch.from_numpy(values) for name, values in latents.items()})

    @property
    def _variables(self) -> dict[str, Variable]:
        config = self.config
        keys, most = integers(0, config.n_keys - 1), config.n_values
        polarities = Allowed("-1 or 1", lambda new, _: new.abs() == 1)
        values = Allowed(
            f"integers from {-most} to {most} but 0",
            lambda new, _: (new.abs() <= most) & (new != 0),
        )
        largest = config.n_a * config.n_b * most
        return {
            "key_a": Variable(allowed=keys),
            "polarity": Variable(allowed=polarities),
            "key_b": Variable(allowed=keys),
            "value": Variable(allowed=values),
            "combination": Variable(causes=("key_a", "polarity"), compute=self._combination),
            "sign": Variable(
                causes=("key_a", "polarity", "key_b"), compute=_signs, allowed=integers(-1, 1)
            ),
            "total": Variable(
                causes=("sign", "value"),
                compute=lambda sign, value: (sign.sum(1) * value).sum(1),
                allowed=integers(-largest, largest),
            ),
            "inputs": Variable(
                causes=("key_a", "polarity", "key_b", "value"), compute=self._tokens
            ),
            "targets": Variable(
                causes=("total",), compute=lambda total: (total > 0).long()[:, None]
            ),
            "mask": Variable(
                causes=("total",), compute=lambda total: (total.abs() >= config.margin)[:, None]
            ),
        }

    def _combination(
        self, key_a: Int[Tensor, "batch n_a"], polarity: Int[Tensor, "batch n_a"]
    ) -> Int[Tensor, " batch"]:
        ids = np.sort(_tokens_of_a(key_a, polarity).numpy())
        return torch.from_numpy(find_rows(ids, self._sides.values()))

    def _tokens(
        self,
        key_a: Int[Tensor, "batch n_a"],
        polarity: Int[Tensor, "batch n_a"],
        key_b: Int[Tensor, "batch n_b"],
        value: Int[Tensor, "batch n_b"],
    ) -> tuple[Int[Tensor, "batch n_a"], Int[Tensor, "batch n_b"]]:
        n_values = self.config.n_values
        level = value + n_values - (value > 0).long()
        b = 1 + 2 * self.config.n_keys + key_b * 2 * n_values + level
        return _tokens_of_a(key_a, polarity), b

    def words(
        self, batch: Batch[tuple[Tensor, Tensor]], example: int
    ) -> tuple[list[str], list[str]]:
        """Return the tokens of A and of B of one example as words.

        Words of A are key and polarity (`c+`), words of B key and value (`c -3`). Keys are letters
        from a to z, then `k26`, `k27`, ...
        """
        latents = {name: values[example].tolist() for name, values in batch.latents.items()}
        key_a, key_b = (
            [ascii_lowercase[key : key + 1] or f"k{key}" for key in latents[name]]
            for name in ("key_a", "key_b")
        )
        return (
            [f"{k}{'-+'[p > 0]}" for k, p in zip(key_a, latents["polarity"], strict=True)],
            [f"{k} {v:+d}" for k, v in zip(key_b, latents["value"], strict=True)],
        )

    @cached_property
    def _sides(self) -> dict[str, Int[np.ndarray, "combination token"]]:
        config = self.config
        keys = np.array(list(combinations(range(config.n_keys), config.n_a)))
        negative = np.indices((1, *(2,) * (config.n_a - 1))).reshape(config.n_a, -1).T
        # Each set whose first polarity is +1, with the set of opposite polarities.
        twins = 1 + 2 * keys[:, None, None] + np.stack([negative, 1 - negative], 1)
        twins = twins.reshape(-1, 2, config.n_a)
        train, ood = hold_out(twins, config.n_ood // 2, self._key.generator("/ood"))
        return {"train": _sorted_rows(twins[train]), "ood": _sorted_rows(twins[ood])}


def _signs(
    key_a: Int[Tensor, "batch n_a"],
    polarity: Int[Tensor, "batch n_a"],
    key_b: Int[Tensor, "batch n_b"],
) -> Int[Tensor, "batch n_a n_b"]:
    return (key_a[:, :, None] == key_b[:, None]) * polarity[:, :, None]


def _tokens_of_a(
    key_a: Int[Tensor, "batch n_a"], polarity: Int[Tensor, "batch n_a"]
) -> Int[Tensor, "batch n_a"]:
    return 1 + 2 * key_a + (polarity < 0).long()


def _sorted_rows(twins: Int[np.ndarray, "pair 2 token"]) -> Int[np.ndarray, "combination token"]:
    return np.unique(twins.reshape(-1, twins.shape[-1]), axis=0)
