"""Pairs of sequences in which one says what of the other counts: with which sign, or not at all.

Made for quasi-attention that adds, subtracts or deletes (Tay et al. 2019, "CoDA"), so that what is
right is known for every pair of tokens.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import comb
from string import ascii_lowercase
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tasks.answers import score_class
from tasks.batch import Batch
from tasks.common import Key, require_choice, require_int

_MAX_COMBINATIONS = 10**6


@dataclass(frozen=True, kw_only=True)
class SignedPairsConfig:
    """Which pairs they are.

    Attributes:
        n_keys: keys that there are, 3 to 1000.
        n_a: tokens of A, each with another key, 2 to n_keys - 1 (a single one could not be held
            out and yet be known); there are at most 10^6 sets of tokens.
        n_b: tokens of B, 2 to 1000.
        n_values: sizes of the values, 1 to 100.
        margin: how far from 0 the signed sum is at least, 1 to n_values.
        held_out: share of the sets of tokens of A that is held out for `ood`, rounded down to an
            even number of them, each with the one of the opposite polarities; leaves neither
            side empty.
        seed: chooses what is held out and every batch, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.
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
                f"n_a={self.n_a!r} with n_keys={self.n_keys!r}: allowed are at most "
                f"{_MAX_COMBINATIONS} sets of tokens, these are {self.n_combinations}"
            )
        require_int("n_b", self.n_b, 2, 1000)
        require_int("n_values", self.n_values, 1, 100)
        require_int("margin", self.margin, 1, self.n_values)
        share = self.held_out
        number = isinstance(share, int | float) and not isinstance(share, bool)
        if not number or not 0 < share < 1 or not 0 < self.n_ood < self.n_combinations:
            raise ValueError(
                f"held_out={share!r}: allowed is a number between 0 and 1 that holds out at least "
                f"two of the {self.n_combinations} sets"
            )
        require_int("seed", self.seed, 0, 2**32 - 1)

    @property
    def n_combinations(self) -> int:
        """Number of sets of tokens that A can have."""
        return comb(self.n_keys, self.n_a) * 2**self.n_a

    @property
    def n_ood(self) -> int:
        """Number of these that are held out."""
        return 2 * int(self.held_out * self.n_combinations / 2)


class SignedPairs:
    """The sampler of signed pairs.

    A token of A has a key and a polarity, +1 or -1; its id is 1 + 2 key, or one more for -1. A
    token of B has a key and a value, of the sizes 1 to V and either sign. Half of the tokens of B,
    rounded up, at places drawn anew, have keys of A; each is added or subtracted as the polarity of
    that key in A says. The others have other keys and are to be ignored:

        label = 1 if sum over i, j of sign_ij value_j > 0, else 0;
        sign_ij = polarity_i if key_i = key_j, else 0.

    In every split, all polarities together, and all values together, are as likely with the other
    sign. So the label, 1 in half of the examples, is independent of A alone and of B alone.

    Splits: `train` and `id` draw from the same sets of tokens of A, `ood` from the held-out ones,
    each equally often and in any order. In `ood`, what each token of A does to those of B must be
    put together anew.
    """

    SPLITS: ClassVar = ("train", "id", "ood")

    def __init__(self, config: SignedPairsConfig) -> None:
        self.config = config
        self._key = Key(config)

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits."""
        return self.SPLITS

    @property
    def vocabulary_size(self) -> int:
        """One for padding (0, which does not occur), those of A, those of B."""
        return 1 + 2 * self.config.n_keys * (1 + self.config.n_values)

    def combinations(self, split: str) -> Int[np.ndarray, "combination token"]:
        """Return the sets of tokens that A has in a split, as ascending ids.

        Raises:
            ValueError: `split` is unknown.
        """
        require_choice("split", split, self.SPLITS)
        return self._sides["ood" if split == "ood" else "train"]

    def batch(
        self, split: str, index: int, size: int, device: str | torch.device = "cpu"
    ) -> Batch[tuple[Tensor, Tensor]]:
        """Return batch number `index` of a split: always the same one for the same arguments.

        Args:
            split: one of `splits`.
            index: 0 to 2^62.
            size: number of examples, 1 to 2^22; a smaller batch need not be a part of a larger one.
            device: where the batch shall be.

        Returns:
            A batch with
            inputs: A [batch, n_a] and B [batch, n_b], int64 ids below `vocabulary_size`;
            targets [batch, 1] int64: the label;
            mask [batch, 1], all True;
            latents (int64)
            `sign` [batch, n_a, n_b]: -1 where a token of A subtracts one of B, 1 where it adds it,
            0 where they have nothing to do with each other;
            `key_a`, `polarity` [batch, n_a]; `key_b`, `value` [batch, n_b]: the parts of the ids;
            `total` [batch]: the signed sum;
            `combination` [batch]: the row in `combinations(split)`.

        Raises:
            ValueError: `split` is unknown, or `index` or `size` is out of range.
        """
        known = self.combinations(split)
        require_int("index", index, 0, 2**62)
        require_int("size", size, 1, 2**22)
        config = self.config
        generator = self._key.generator(f"/{split}/{index}")
        combination = generator.integers(len(known), size=size)
        a = generator.permuted(known[combination], axis=1)
        key_a = (a - 1) // 2

        shape = (size, config.n_b)
        counts = np.broadcast_to(np.arange(config.n_b) < -(-config.n_b // 2), shape)
        counts = generator.permuted(counts, axis=1)
        chosen = generator.integers(config.n_a, size=shape)
        other = generator.integers(config.n_keys - config.n_a, size=shape)
        for key in np.sort(key_a, 1).T:  # step over those of A, the smallest first
            other += other >= key[:, None]
        key_b = np.where(counts, np.take_along_axis(key_a, chosen, 1), other)

        polarity = 1 - 2 * ((a - 1) % 2)
        sign = np.where(key_a[:, :, None] == key_b[:, None], polarity[:, :, None], 0)
        net = sign.sum(1)
        level, value = np.empty((2, *shape), np.int64)
        total, rows = np.zeros(size, np.int64), np.arange(size)
        while len(rows):
            # Both signs of a sum are equally likely, and stay so when sums near 0 are drawn again.
            level[rows] = generator.integers(2 * config.n_values, size=(len(rows), config.n_b))
            value[rows] = level[rows] - config.n_values + (level[rows] >= config.n_values)
            total = (net * value).sum(1)
            rows = np.flatnonzero(np.abs(total) < config.margin)
        b = 1 + 2 * config.n_keys + key_b * 2 * config.n_values + level
        targets = torch.from_numpy((total > 0).astype(np.int64))[:, None]
        latents = {
            **{"sign": sign, "key_a": key_a, "polarity": polarity, "key_b": key_b},
            **{"value": value, "total": total, "combination": combination},
        }
        made = Batch(
            inputs=(torch.from_numpy(a), torch.from_numpy(b)),
            targets=targets,
            mask=torch.ones_like(targets, dtype=torch.bool),
            latents={name: torch.from_numpy(one) for name, one in latents.items()},
        )
        return made if torch.device(device).type == "cpu" else made.to(device)

    def score(
        self, logits: Float[Tensor, "batch 1 2"], batch: Batch[tuple[Tensor, Tensor]]
    ) -> dict[str, Float[Tensor, " batch"]]:
        """Return whether the more probable label is right.

        Args:
            logits: [batch, 1, 2].
            batch: the batch that they answer.

        Returns:
            `correct` [batch]: 1 where it is right, else 0.

        Raises:
            ValueError: `logits` has another shape.
        """
        return score_class(logits, batch, 2)

    def words(
        self, batch: Batch[tuple[Tensor, Tensor]], example: int
    ) -> tuple[list[str], list[str]]:
        """Return the tokens of A and of B of one example as words.

        Of A the key and the polarity (`c+`), of B the key and the value (`c -3`). Keys are letters
        from a to z, then `k26`, `k27`, ...
        """
        of = {name: values[example].tolist() for name, values in batch.latents.items()}
        key_a, key_b = (
            [ascii_lowercase[key : key + 1] or f"k{key}" for key in of[name]]
            for name in ("key_a", "key_b")
        )
        asking = zip(key_a, of["polarity"], strict=True)
        asked = zip(key_b, of["value"], strict=True)
        return [f"{k}{'-+'[sign > 0]}" for k, sign in asking], [f"{k} {v:+d}" for k, v in asked]

    @cached_property
    def _sides(self) -> dict[str, Int[np.ndarray, "combination token"]]:
        config = self.config
        keys = np.array(list(combinations(range(config.n_keys), config.n_a)))
        negative = np.indices((1, *(2,) * (config.n_a - 1))).reshape(config.n_a, -1).T
        # Each set in which the first polarity is +1, and the one of the opposite polarities.
        twins = 1 + 2 * keys[:, None, None] + np.stack([negative, 1 - negative], 1)
        twins = twins.reshape(-1, 2, config.n_a)
        order = self._key.generator("/ood").permutation(len(twins))
        ood, train = np.split(order, [config.n_ood // 2])
        return {"train": _sorted_rows(twins[train]), "ood": _sorted_rows(twins[ood])}


def _sorted_rows(twins: Int[np.ndarray, "pair 2 token"]) -> Int[np.ndarray, "combination token"]:
    return np.unique(twins.reshape(-1, twins.shape[-1]), axis=0)
