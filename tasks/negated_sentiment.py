"""Negated sentiment: words with a polarity, and negators that invert those in their scope.

Designed for attention that adds, subtracts or deletes (Tay et al. 2019, "CoDA"): which word inverts
which is known. Out of distribution, known words are negated for the first time.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tasks.answers import LabelledAnswers
from tasks.batch import Batch
from tasks.common import (
    Key,
    require_choice,
    require_held_out,
    require_int,
    require_number,
    require_range,
)
from tasks.stream_task import StreamTask

_MOST_DRAWS = 10**4


@dataclass(frozen=True, kw_only=True)
class NegatedSentimentConfig:
    """Settings of negated sentiment.

    Attributes:
        n_polar: number of words with a polarity, an even number of 4 to 1000: half are positive.
        n_values: number of absolute values, 1 to 100, and at most n_polar / 2: each has a word.
        n_negators: number of words that negate, 1 to 100.
        n_fillers: number of words without polarity, 1 to 1000.
        clauses: least and largest number of clauses of a sentence, 1 to 20.
        words: least and largest number of words of a clause, negator and mark apart, 1 to 20.
        share_negated: probability of a negator in a clause, above 0 to 1.
        share_polar: probability that a word has a polarity, 0.01 to 1.
        margin: least absolute value of the sum, 1 to n_values.
        held_out: share of the polar words that are negated in `ood` only, rounded down to an even
            number: half of them are positive; neither side may be empty.
        seed: seeds values, split and every batch, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> task = NegatedSentiment(NegatedSentimentConfig(clauses=(1, 1), words=(2, 4)))
        >>> batch = task.batch("train", 0, 100)
        >>> latents = batch.latents
        >>> bool(((latents["effect"] * latents["value"]).sum(1) == latents["total"]).all())
        True
    """

    n_polar: int = 24
    n_values: int = 3
    n_negators: int = 2
    n_fillers: int = 12
    clauses: tuple[int, int] = (1, 4)
    words: tuple[int, int] = (2, 4)
    share_negated: float = 0.5
    share_polar: float = 0.6
    margin: int = 1
    held_out: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        require_int("n_polar", self.n_polar, 4, 1000)
        if self.n_polar % 2:
            raise ValueError(f"n_polar must be even, got {self.n_polar!r}")
        require_int("n_values", self.n_values, 1, min(100, self.n_polar // 2))
        require_int("n_negators", self.n_negators, 1, 100)
        require_int("n_fillers", self.n_fillers, 1, 1000)
        require_range("clauses", self.clauses, 1, 20)
        require_range("words", self.words, 1, 20)
        require_number("share_negated", self.share_negated, 0, 1)
        if not self.share_negated:
            raise ValueError(f"share_negated must be above 0, got {self.share_negated!r}")
        require_number("share_polar", self.share_polar, 0.01, 1)
        require_int("margin", self.margin, 1, self.n_values)
        require_number("held_out", self.held_out, 0, 1)
        require_held_out("held_out", self.held_out, self.n_held_out, self.n_polar, "polar words")
        require_int("seed", self.seed, 0, 2**32 - 1)

    @property
    def n_held_out(self) -> int:
        """Number of polar words that are negated in `ood` only."""
        return 2 * int(self.held_out * self.n_polar / 2)


class _Layout(NamedTuple):
    """Sentences as clauses of slots, before they are joined; see `_draw_rows`."""

    words: Int[np.ndarray, "sentence clause slot"]
    negates: Bool[np.ndarray, "sentence clause slot"]
    negator: Int[np.ndarray, "sentence clause"]
    position: Int[np.ndarray, "sentence clause"]
    total: Int[np.ndarray, " sentence"]


class NegatedSentiment(LabelledAnswers, StreamTask[Tensor]):
    """Sentences whose polar words count, inverted in the scope of a negator.

    A sentence has clauses with a mark between them. A clause has words, some of which are polar,
    with a value of either sign and absolute value 1 to n_values, and may have a negator, whose
    scope are the words after it in the clause:

        label = 1 if sum over words of effect_i value_i > 0, else 0;
        effect_i = -1 in the scope of a negator, else 1 (0 for words without polarity).

    In `train` and `id` half of the polar words (`held_out`) are never negated; in `ood` each
    sentence has at least one of them that is. Inverting all values leaves the distribution
    unchanged, so the label is 1 in half of the examples of every split.

    A batch has inputs [batch, pos] int64: word ids below `vocabulary_size`, padded with 0; targets
    [batch, 1] int64, the label; mask [batch, 1], all True; and the latents (int64)
    `effect`, `value` [batch, pos]: of each word, 0 without polarity and at padding;
    `negator` [batch, pos]: the position of the negator whose scope a word is in, -1 if none;
    `total` [batch]: the sum; `n_negated` [batch]: number of polar words with the effect -1;
    `length` [batch]: number of words, negators and marks included.

    Example:
        >>> NegatedSentiment(NegatedSentimentConfig()).batch("ood", 0, 100)
    """

    SPLITS: ClassVar = ("train", "id", "ood")

    def __init__(self, config: NegatedSentimentConfig) -> None:
        super().__init__(key=Key(config))
        self.config = config

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each label."""
        return ("negative", "positive")

    @property
    def vocabulary_size(self) -> int:
        """Number of word ids: padding, the mark, negators, polar words and fillers."""
        config = self.config
        return 2 + config.n_negators + config.n_polar + config.n_fillers

    @cached_property
    def values(self) -> Int[np.ndarray, " word"]:
        """The value of each word id, 0 for those without polarity."""
        config, first = self.config, 2 + self.config.n_negators
        values = np.zeros(self.vocabulary_size, np.int64)
        size = 1 + np.arange(config.n_polar // 2) % config.n_values
        values[first : first + config.n_polar] = np.concatenate([size, -size])
        return values

    @cached_property
    def held_out(self) -> Int[np.ndarray, " word"]:
        """The ids of the polar words that are negated in `ood` only, ascending."""
        config, first = self.config, 2 + self.config.n_negators
        half = config.n_polar // 2
        # A positive word and the negative one of the same size, so that signs stay alike.
        chosen = self._key.generator("/ood").permutation(half)[: config.n_held_out // 2]
        return np.sort(np.concatenate([first + chosen, first + half + chosen]))

    def chance(self, split: str) -> float:
        """Return the accuracy of guessing.

        Raises:
            ValueError: `split` is unknown.
        """
        require_choice("split", split, self.SPLITS)
        return 0.5

    def _draw(self, split: str, size: int, generator: np.random.Generator) -> Batch[Tensor]:
        layout = self._draw_rows(split, size, generator)
        for _ in range(_MOST_DRAWS):
            rows = np.flatnonzero(np.abs(layout.total) < self.config.margin)
            if not len(rows):
                return self._joined(layout)
            # Whole sentences are redrawn, which keeps both signs equally likely.
            for kept, new in zip(layout, self._draw_rows(split, len(rows), generator), strict=True):
                kept[rows] = new
        raise ValueError(
            f"margin must be smaller: with these settings sentences of the split {split!r} reach "
            f"it rarely or never, got {self.config.margin}"
        )

    def _draw_rows(self, split: str, size: int, generator: np.random.Generator) -> _Layout:
        """Words by clause and slot, 0 in slots that are not used; the slot before which a negator
        stands, or -1; and its id."""
        config = self.config
        shape = (size, config.clauses[1], config.words[1])
        n_clauses = generator.integers(*config.clauses, size=(size, 1, 1), endpoint=True)
        n_words = generator.integers(*config.words, size=(*shape[:2], 1), endpoint=True)
        slot = np.arange(shape[2])
        is_used = (np.arange(shape[1])[:, None] < n_clauses) & (slot < n_words)
        has_negator = generator.random(shape[:2]) < config.share_negated
        position = generator.integers(0, n_words[..., 0])
        if split == "ood":
            has_negator[:, 0] = True
        position = np.where(has_negator & is_used[..., 0], position, -1)
        negates = is_used & (position[..., None] >= 0) & (slot >= position[..., None])

        first = 2 + config.n_negators
        polar = np.arange(first, first + config.n_polar)
        allowed = np.setdiff1d(polar, self.held_out)
        anywhere, in_scope = (generator.choice(words, shape) for words in (polar, allowed))
        fillers = generator.integers(first + config.n_polar, self.vocabulary_size, shape)
        is_polar = generator.random(shape) < config.share_polar
        in_scope = anywhere if split == "ood" else in_scope
        words = np.where(is_polar, np.where(negates, in_scope, anywhere), fillers)
        if split == "ood":
            # One word of the first scope, at random, is held out.
            key = np.where(negates[:, 0], generator.random(shape[::2]), -1.0)
            novel = generator.choice(self.held_out, size)
            words[np.arange(size), 0, key.argmax(1)] = novel
        words = np.where(is_used, words, 0)
        negator = 2 + generator.integers(config.n_negators, size=shape[:2])
        total = (self.values[words] * np.where(negates, -1, 1)).sum((1, 2))
        return _Layout(words, negates, negator, position, total)

    def _joined(self, layout: _Layout) -> Batch[Tensor]:
        """The batch of sentences whose clauses are joined by marks."""
        size, n_clauses, n_slots = layout.words.shape
        # Before each slot there is room for a negator, and before each clause for the mark.
        width = 1 + 2 * n_slots
        grid = np.zeros((size, n_clauses, width), np.int64)
        is_clause = layout.words[..., 0] > 0
        grid[..., 0] = is_clause & (np.arange(n_clauses) > 0)
        grid[..., 2::2] = layout.words
        stands = layout.position[..., None] == np.arange(n_slots)
        grid[..., 1::2] = np.where(stands, layout.negator[..., None], 0)
        scope = np.zeros_like(grid, dtype=bool)
        scope[..., 2::2] = layout.negates

        flat = grid.reshape(size, -1)
        order = np.argsort(flat == 0, axis=1, kind="stable")
        ids = np.take_along_axis(flat, order, 1)
        in_scope = np.take_along_axis(scope.reshape(size, -1), order, 1)
        is_negator = (ids >= 2) & (ids < 2 + self.config.n_negators)
        # The last negator so far; scopes end with their clause.
        last = np.maximum.accumulate(np.where(is_negator, np.arange(ids.shape[1]), -1), axis=1)
        value = self.values[ids]
        effect = np.where(in_scope, -1, 1) * (value != 0)
        latents = {
            "effect": effect,
            "value": value,
            "negator": np.where(in_scope, last, -1),
            "total": layout.total,
            "n_negated": (effect < 0).sum(1),
            "length": (ids > 0).sum(1),
        }
        targets = torch.from_numpy(layout.total > 0).long()[:, None]
        return Batch(
            inputs=torch.from_numpy(ids),
            targets=targets,
            mask=torch.ones_like(targets, dtype=torch.bool),
            latents={name: torch.from_numpy(array) for name, array in latents.items()},
        )

    def groups(self, batch: Batch[Any]) -> dict[str, Bool[Tensor, " batch"]]:
        """Return the masks of sentences with no, one, or more negated polar words."""
        n = batch.latents["n_negated"]
        return {"none negated": n == 0, "one negated": n == 1, "more negated": n > 1}

    def words(self, batch: Batch[Any], example: int) -> list[str]:
        """Return the words of a sentence, without padding.

        `p0+2` is a polar word and its value, `not0` a negator, `f0` a filler and `,` the mark.
        """
        config = self.config
        polar = self.values[self.values != 0]
        names = ["", ",", *(f"not{number}" for number in range(config.n_negators))]
        names += [f"p{number}{value:+d}" for number, value in enumerate(polar)]
        names += [f"f{number}" for number in range(config.n_fillers)]
        return [names[word] for word in batch.inputs[example] if word]
