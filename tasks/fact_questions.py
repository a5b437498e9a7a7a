"""Fact questions: paragraphs of facts, and questions that need one of them or a chain of two.

Generated, for readers that point to answers in passages (Tay et al. 2019, "CoDA", section 3.1):
which tokens support the answer is known.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tasks.batch import Batch
from tasks.common import (
    Key,
    require_choice,
    require_held_out,
    require_int,
    require_number,
    require_shape,
)
from tasks.spans import best_spans, score_answer
from tasks.stream_task import StreamTask

_LONGEST = 2
"""Words of the longest name."""


@dataclass(frozen=True, kw_only=True)
class FactQuestionsConfig:
    """Settings of fact questions.

    Attributes:
        n_entities: number of entities, at least as many as subjects and objects of a passage:
            n_paragraphs * (1 + n_facts), and at most 10^4.
        n_relations: number of relations, n_facts + 1 to 100.
        n_paragraphs: paragraphs of a passage, of which each has its own subject, 3 to 100.
        n_facts: facts of a paragraph, with different relations, 2 to 20.
        two_facts: share of the questions of `train` and `id` that need two facts, 0 to 1.
        held_out: share of the pairs of relations that is held out for `ood`: of the differences
            between the numbers of both relations, rounded down, so that each relation is held out
            as often in either place; neither side may be empty.
        seed: seeds the split and every batch, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> FactQuestionsConfig(n_entities=100).n_paragraphs
        4
    """

    n_entities: int = 60
    n_relations: int = 8
    n_paragraphs: int = 4
    n_facts: int = 2
    two_facts: float = 0.5
    held_out: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        require_int("n_paragraphs", self.n_paragraphs, 3, 100)
        require_int("n_facts", self.n_facts, 2, 20)
        require_int("n_entities", self.n_entities, self.n_paragraphs * (1 + self.n_facts), 10**4)
        require_int("n_relations", self.n_relations, self.n_facts + 1, 100)
        require_number("two_facts", self.two_facts, 0, 1)
        require_number("held_out", self.held_out, 0, 1)
        require_held_out(
            "held_out", self.held_out, self.n_ood, self.n_relations, "differences of relations"
        )
        require_int("seed", self.seed, 0, 2**32 - 1)

    @property
    def n_ood(self) -> int:
        """Number of differences between relations that are held out."""
        return int(self.held_out * self.n_relations)


class FactQuestions(StreamTask[tuple[Tensor, Tensor]]):
    """Passages of facts, with questions whose answer is a span.

    A fact is a subject, a relation and an object. Subjects and objects are entities, whose names
    have one or two words. A paragraph has the facts of one subject, each with another relation. The
    object of a fact is, with probability 1/2, the subject of another paragraph, else an entity that
    the passage has only there.

    A question is about a subject s: for its relation r ("r s"), or for relation r2 of what is r1 of
    s ("r2 r1 s"), which needs a second fact, in another paragraph. A further paragraph, about
    another subject, has a fact with the relation that is asked for (r or r2), so that this relation
    alone does not determine the answer. In the passage paragraphs, and in these facts, are in
    random order.

    Splits: `train` and `id` have questions of both kinds, those for two facts with the same pairs
    (r1, r2); in `ood` all need two facts, with the pairs that are held out. On either side each
    relation is as often the first as the second of a pair.

    A batch has inputs, a tuple of passage [batch, pos] and question [batch, 4], int64 ids of words
    below `vocabulary_size`, padded with 0; targets [batch, 2] int64, the positions of the first and
    of the last word of the answer; mask [batch, 2], all True; and the latents (int64)
    `start`, `end`, `hops` [batch]: the targets; the number of facts that are needed, 1 or 2;
    `relation` [batch, 2]: r1 and r2, or r and -1;
    `combination` [batch]: the row in `combinations(split)`, -1 for one fact;
    `subject`, `bridge`, `answer` [batch]: entities; what is r1 of s, -1 for one fact;
    `fact` [batch, pos]: the number of a word's fact in the passage, -1 outside;
    `support` [batch, pos]: 1 in the fact about s, 2 in the second fact, else 0;
    `sign` [batch, pos, 4]: 1 for the same word in a needed fact and in the question, where a
    relation counts only in the fact that it is asked of; else 0. No pair is to be subtracted.

    Example:
        >>> len(FactQuestions(FactQuestionsConfig()).batch("ood", 0, 100))
        100
    """

    SPLITS: ClassVar = ("train", "id", "ood")

    def __init__(self, config: FactQuestionsConfig) -> None:
        super().__init__(key=Key(config))
        self.config = config

    @property
    def vocabulary_size(self) -> int:
        """Number of word ids: padding, the beginning of a paragraph, relations, words of names."""
        return 2 + self.config.n_relations + _LONGEST * self.config.n_entities

    def combinations(self, split: str) -> Int[np.ndarray, "combination 2"]:
        """Return the pairs (r1, r2) of the questions of a split that need two facts, ascending.

        Raises:
            ValueError: `split` is unknown.
        """
        require_choice("split", split, self.SPLITS)
        return self._sides["ood" if split == "ood" else "train"]

    def chance(self, split: str) -> float:
        """Return the exact match of the object of a fact that is drawn at random, expected.

        With n paragraphs of m facts it is above 1 / (n m): with probability 1/2 the answer is a
        subject, and then each further fact of other paragraphs than its own has it as object with
        probability 1 / (2 (n - 1)); but, of two needed facts, the first one never has it.

        Raises:
            ValueError: `split` is unknown.
        """
        require_choice("split", split, self.SPLITS)
        n_others, n_facts = self.config.n_paragraphs - 1, self.config.n_facts
        two_facts = 1.0 if split == "ood" else self.config.two_facts
        # The first of two facts is in the answer's own paragraph in one of n - 1 cases.
        n_further = n_others * n_facts - 1 - two_facts * (1 - 1 / n_others)
        n_right = 1 + n_further / (4 * n_others)
        return n_right / (self.config.n_paragraphs * n_facts)

    def score(
        self, logits: Float[Tensor, "batch 2 pos"], batch: Batch[Any]
    ) -> dict[str, Float[Tensor, " batch"]]:
        """Return scores of the most probable spans of at most two words.

        Args:
            logits: those of the first and of the last word of the answer, -inf at padding.
            batch: the batch that was answered.

        Returns:
            Each [batch]: `exact_match`, 1 where the words are those of the answer; `f1`; `start`
            and `end`, 1 where the position is that of the target.

        Raises:
            ValueError: `logits` has another shape.
        """
        passage, targets = batch.inputs[0], batch.targets
        require_shape("logits", logits, (len(batch), 2, passage.shape[1]))
        start, end = best_spans(logits, _LONGEST)
        found, right = (
            [self._text(passage[i, a : b + 1]) for i, (a, b) in enumerate(spans)]
            for spans in (zip(start.tolist(), end.tolist(), strict=True), targets.tolist())
        )
        scores = [score_answer(*pair) for pair in zip(found, ([r] for r in right), strict=True)]
        exact_match, f1 = torch.tensor(scores, device=logits.device).unbind(1)
        is_right = (torch.stack([start, end], 1) == targets).float()
        return {
            "exact_match": exact_match,
            "f1": f1,
            "start": is_right[:, 0],
            "end": is_right[:, 1],
        }

    def groups(self, batch: Batch[Any]) -> dict[str, Bool[Tensor, " batch"]]:
        """Return the masks of the questions that need one fact, and of those that need two."""
        hops = batch.latents["hops"]
        return {"one fact": hops == 1, "two facts": hops == 2}

    def words(self, batch: Batch[Any], example: int) -> tuple[list[str], list[str]]:
        """Return the words of a passage and of its question, without padding.

        `¶` begins a paragraph, `r3` is a relation; names are `e4`, or `e5 f5` for odd numbers.
        """
        passage, question = (self._text(text[example]).split() for text in batch.inputs)
        return passage, question

    def _text(self, ids: Int[Tensor, " pos"]) -> str:
        return " ".join(self._words[word] for word in ids.tolist() if word)

    @cached_property
    def _words(self) -> list[str]:
        relations = [f"r{number}" for number in range(self.config.n_relations)]
        names = [f"{word}{number}" for number in range(self.config.n_entities) for word in "ef"]
        return ["", "¶", *relations, *names]

    def _draw(
        self, split: str, size: int, generator: np.random.Generator
    ) -> Batch[tuple[Tensor, Tensor]]:
        config = self.config
        n, n_facts = config.n_paragraphs, config.n_facts
        row = np.arange(size)
        pairs = self.combinations(split)
        combination = generator.integers(len(pairs), size=size)
        first, last = pairs[combination].T
        is_pair = np.ones(size, bool)
        if split != "ood":
            is_pair = generator.random(size) < config.two_facts
            first = np.where(is_pair, first, generator.integers(config.n_relations, size=size))
        asked = np.where(is_pair, last, first)

        # Paragraph 0 is about s, 1 has the second fact, 2 the same relation, each as first fact.
        keys = generator.random((size, n, config.n_relations))
        keys[row, 0, first] = keys[row, 2, asked] = -1
        keys[row[is_pair], 1, asked[is_pair]] = -1
        relation = np.argsort(keys, axis=2)[..., :n_facts]
        entity = np.argsort(generator.random((size, config.n_entities)), axis=1)
        subject, other = entity[:, :n], entity[:, n : n * (1 + n_facts)]
        is_link = generator.random((size, n, n_facts)) < 0.5
        linked = generator.integers(n - 1, size=is_link.shape)
        linked += linked >= np.arange(n)[:, None]
        is_link[is_pair, 0, 0], linked[is_pair, 0, 0] = True, 1
        objects = np.where(
            is_link, subject[row[:, None, None], linked], other.reshape(is_link.shape)
        )
        subjects = np.broadcast_to(subject[..., None], objects.shape)
        number = 2 + relation[..., None]
        facts = np.concatenate([self._names(subjects), number, self._names(objects)], axis=3)
        needed = np.zeros_like(facts)
        needed[:, 0, 0], needed[is_pair, 1, 0] = 1, 2
        is_answer = np.zeros_like(facts)
        is_answer[row, is_pair.astype(int), 0, -_LONGEST:] = 1

        order = generator.permuted(np.broadcast_to(np.arange(n_facts), objects.shape), axis=2)
        parts = np.stack([facts, needed, is_answer], -1)
        parts = np.take_along_axis(parts, order[..., None, None], axis=2).reshape(size, n, -1, 3)
        beginning = np.broadcast_to(np.array([1, 0, 0]), (size, n, 1, 3))
        parts = np.concatenate([beginning, parts], axis=2)
        order = generator.permuted(np.broadcast_to(np.arange(n), (size, n)), axis=1)
        parts = np.take_along_axis(parts, order[..., None, None], axis=1).reshape(size, -1, 3)
        numbers = np.repeat(np.arange(n * n_facts).reshape(n, n_facts), facts.shape[-1], axis=1)
        numbers = np.concatenate([np.full((n, 1), -1), numbers], axis=1).reshape(1, -1, 1)
        numbers = np.broadcast_to(numbers, (*parts.shape[:2], 1))
        parts = _without_gaps(np.concatenate([parts, numbers], axis=2))
        passage, support, answers, fact = np.moveaxis(parts, 2, 0)
        support, answers = (np.where(passage > 0, x, 0) for x in (support, answers))
        fact = np.where(passage > 0, fact, -1)
        start = answers.argmax(1)
        end = start + answers.sum(1) - 1

        # Of each word of the question, the fact that it is about.
        asks = np.stack([2 + asked, 1 + is_pair], -1)
        about_s = np.stack([self._names(subject[:, 0]), np.ones((size, _LONGEST), int)], -1)
        by = np.stack([np.where(is_pair, 2 + first, 0), np.ones(size, int)], -1)
        parts = np.concatenate([asks[:, None], by[:, None], about_s], axis=1)
        question, asked_of = np.moveaxis(_without_gaps(parts), 2, 0)
        is_same = (passage[:, :, None] == question[:, None]) & (question > 0)[:, None]
        latents = {
            "start": start,
            "end": end,
            "hops": 1 + is_pair,
            "relation": np.stack([first, np.where(is_pair, last, -1)], 1),
            "combination": np.where(is_pair, combination, -1),
            "subject": subject[:, 0],
            "bridge": np.where(is_pair, subject[:, 1], -1),
            "answer": objects[row, is_pair.astype(int), 0],
            "fact": fact,
            "support": support,
            "sign": is_same & (support[:, :, None] == asked_of[:, None]),
        }
        targets = torch.from_numpy(np.stack([start, end], 1))
        return Batch(
            inputs=(torch.from_numpy(passage.copy()), torch.from_numpy(question.copy())),
            targets=targets,
            mask=torch.ones_like(targets, dtype=torch.bool),
            latents={
                name: torch.from_numpy(values.astype(np.int64)) for name, values in latents.items()
            },
        )

    def _names(self, entity: Int[np.ndarray, "*batch"]) -> Int[np.ndarray, "*batch 2"]:
        """The words of names, 0 where a name has no second word."""
        word = 2 + self.config.n_relations + _LONGEST * entity
        return np.stack([word, np.where(entity % 2, word + 1, 0)], -1)

    @cached_property
    def _sides(self) -> dict[str, Int[np.ndarray, "combination 2"]]:
        config = self.config
        pairs = np.indices((config.n_relations,) * 2).reshape(2, -1).T
        order = self._key.generator("/ood").permutation(config.n_relations)
        difference = (pairs[:, 1] - pairs[:, 0]) % config.n_relations
        is_ood = np.isin(difference, order[: config.n_ood])
        return {"train": pairs[~is_ood], "ood": pairs[is_ood]}


def _without_gaps(
    parts: Int[np.ndarray, "text pos part"],
) -> Int[np.ndarray, "text pos part"]:
    """The words of texts (part 0) moved to the front, with what belongs to them."""
    order = np.argsort(parts[..., 0] == 0, axis=1, kind="stable")
    return np.take_along_axis(parts, order[..., None], axis=1)
