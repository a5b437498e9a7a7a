"""What planted tasks of two texts share: questions and answers about concepts.

Designed for attention between two texts that adds, subtracts or deletes (Tay et al. 2019, "CoDA"):
the sign of every pair of words is known.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import comb
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tasks.answers import LabelledAnswers
from tasks.batch import Batch
from tasks.common import Key, require_choice, require_held_out, require_int, require_number
from tasks.held_out import hold_out, require_cover
from tasks.stream_task import StreamTask

_MAX_COMBINATIONS = 10**6

AFFIRMS, DENIES, MISSES = range(3)
"""Kinds of answers: all that is asked for is affirmed; one of it is denied, or missing."""


@dataclass(frozen=True, kw_only=True)
class PlantedTextsConfig:
    """Settings of questions and answers about concepts.

    Attributes:
        n_concepts: number of concepts, 4 to 1000.
        n_asked: concepts that a question asks for, 2 to n_concepts / 2; at most 10^6 sets.
        n_synonyms: words of each concept that ask, and that affirm, and that deny, 1 or 3 to 20 (of
            two, each would have a single partner in training).
        n_others: words of an answer about other concepts, 1 to n_concepts - n_asked - 1.
        n_fillers: number of words without meaning, 1 to 1000.
        most_fillers: most of them in a question or an answer, 0 to 100.
        held_out: share of the sets of asked concepts that is held out for `ood`, rounded down;
            neither side may be empty. The draw is repeated until `train` asks for all concepts.
        seed: seeds the split and every batch, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range, or `held_out` leaves too few sets to ask for
            all concepts; so does the first batch where no random draw leaves enough.

    Example:
        >>> PlantedTextsConfig(n_synonyms=3).n_concepts
        20
    """

    n_concepts: int = 20
    n_asked: int = 3
    n_synonyms: int = 1
    n_others: int = 2
    n_fillers: int = 10
    most_fillers: int = 4
    held_out: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        require_int("n_concepts", self.n_concepts, 4, 1000)
        require_int("n_asked", self.n_asked, 2, self.n_concepts // 2)
        if (n_sets := comb(self.n_concepts, self.n_asked)) > _MAX_COMBINATIONS:
            raise ValueError(
                f"n_asked must make at most {_MAX_COMBINATIONS} sets of concepts, got "
                f"{self.n_asked} with n_concepts={self.n_concepts}, which makes {n_sets}"
            )
        require_int("n_synonyms", self.n_synonyms, 1, 20)
        if self.n_synonyms == 2:
            raise ValueError("n_synonyms must be 1 or an integer from 3 to 20, got 2")
        require_int("n_others", self.n_others, 1, self.n_concepts - self.n_asked - 1)
        require_int("n_fillers", self.n_fillers, 1, 1000)
        require_int("most_fillers", self.most_fillers, 0, 100)
        require_number("held_out", self.held_out, 0, 1)
        n_ood = int(self.held_out * n_sets)
        require_held_out("held_out", self.held_out, n_ood, n_sets, "sets of concepts")
        n_left = n_sets - n_ood
        require_cover(self.held_out, n_left, self.n_asked, self.n_concepts, "concepts")
        require_int("seed", self.seed, 0, 2**32 - 1)


class PlantedTexts(LabelledAnswers, StreamTask[tuple[Tensor, Tensor]]):
    """Questions with answers that affirm, deny or miss what is asked for.

    Each concept has `n_synonyms` words that ask for it, as many that affirm it, and as many that
    deny it. A question asks for `n_asked` concepts. An answer affirms them all; or it denies one of
    them; or it has another concept in the place of one. It also has `n_others` words about concepts
    that are not asked for.

        sign_ij = 1 if word j of the answer affirms what word i of the question asks for, -1 if it
        denies it, else 0.

    In all answers, whatever their kind, as many words affirm and as many deny, in distribution:
    counts in the question or the answer alone do not tell the kind. Words are in random order,
    between fillers.

    Sets of asked concepts are shared out: `train` and `id` have the same ones, `ood` those held
    out, of concepts that `train` asks for as well. With synonyms, so are pairs of words: those of
    equal number never answer one another in `train` and `id`, and always do in `ood`. That they do
    follows from the other pairs.

    Sharing sets out leaves a trace: an affirming answer affirms a set of its split, others do so by
    accident. Who has learned which sets training has can tell the kind from the answer alone more
    often than by guessing (in 0.41 of three kinds that are equally frequent, with the default
    sizes; in 0.48 with half of the sets held out), and is misled by it in `ood`.
    """

    SPLITS: ClassVar = ("train", "id", "ood")

    def __init__(self, config: PlantedTextsConfig) -> None:
        super().__init__(key=Key(config))
        self._texts = config

    @abstractmethod
    def chance(self, split: str) -> float:
        """Return the accuracy of the best answer without the texts.

        Raises:
            ValueError: `split` is unknown.
        """

    @property
    def vocabulary_size(self) -> int:
        """Number of word ids: padding, words that ask, that affirm, that deny, and fillers."""
        return self._n_words + self._texts.n_fillers

    @property
    def _n_words(self) -> int:
        """Number of word ids before the fillers."""
        return 1 + 3 * self._texts.n_concepts * self._texts.n_synonyms

    def combinations(self, split: str) -> Int[np.ndarray, "combination concept"]:
        """Return the sets of asked concepts of a split, ascending.

        Raises:
            ValueError: `split` is unknown.
        """
        require_choice("split", split, self.SPLITS)
        return self._sides["ood" if split == "ood" else "train"]

    def _draw_texts(
        self,
        split: str,
        row: Int[np.ndarray, " answer"],
        kind: Int[np.ndarray, " answer"],
        generator: np.random.Generator,
    ) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
        """The questions and answers, and the latents.

        Args:
            row: the number of each answer's question, ascending from 0.
            kind: the kind of each answer.
        """
        config, size = self._texts, len(row)
        sets = self.combinations(split)
        combination = generator.integers(len(sets), size=row[-1] + 1)
        asked = sets[combination]
        synonym = generator.integers(config.n_synonyms, size=asked.shape)
        questions = self._word(0, asked, synonym)
        question_words, length_a = self._with_fillers(questions, generator)

        other = _others(asked, config.n_concepts, config.n_others + 1, generator, row)
        about = asked[row]
        changed = generator.integers(config.n_asked, size=size)
        is_changed = np.arange(config.n_asked) == changed[:, None]
        about = np.where(is_changed & (kind == MISSES)[:, None], other[:, -1:], about)
        denied = is_changed & (kind == DENIES)[:, None]
        # As many denials in all answers: one of them may be that of an asked concept.
        n_denied = generator.integers(1, config.n_others, size=size, endpoint=True)
        n_denied = n_denied - (kind == DENIES)
        other_denied = np.arange(config.n_others) < n_denied[:, None]
        concept = np.concatenate([about, other[:, :-1]], axis=1)
        denies = np.concatenate([denied, other_denied], axis=1)
        # A word does not answer the one of its number in training; others have any number.
        step = 0
        if split != "ood" and config.n_synonyms > 1:
            step = generator.integers(1, config.n_synonyms, size=about.shape)
        answering = (synonym[row] + step) % config.n_synonyms
        of_others = generator.integers(config.n_synonyms, size=(size, config.n_others))
        answer = self._word(1 + denies, concept, np.concatenate([answering, of_others], axis=1))
        answer_words, length_b = self._with_fillers(answer, generator)

        a, b = question_words[row], answer_words
        latents = {
            "sign": self._signs(a, b),
            "kind": kind,
            "combination": combination[row],
            "length_a": length_a[row],
            "length_b": length_b,
        }
        tensors = {name: torch.from_numpy(np.asarray(value)) for name, value in latents.items()}
        return (torch.from_numpy(a), torch.from_numpy(b)), tensors

    def _word(
        self,
        role: int | Int[np.ndarray, "text word"],
        concept: Int[np.ndarray, "text word"],
        synonym: Int[np.ndarray, "text word"],
    ) -> Int[np.ndarray, "text word"]:
        """The ids of words that ask (role 0), affirm (1) or deny (2)."""
        config = self._texts
        return 1 + (role * config.n_concepts + concept) * config.n_synonyms + synonym

    def _with_fillers(
        self, words: Int[np.ndarray, "text word"], generator: np.random.Generator
    ) -> tuple[Int[np.ndarray, "text pos"], Int[np.ndarray, " text"]]:
        """Words in random order between fillers, padded; and the lengths."""
        config = self._texts
        size, n_words = words.shape
        n = generator.integers(config.most_fillers, size=size, endpoint=True)
        fillers = generator.integers(
            self._n_words, self.vocabulary_size, (size, config.most_fillers)
        )
        is_kept = np.arange(config.most_fillers) < n[:, None]
        every = np.concatenate([words, np.where(is_kept, fillers, 0)], axis=1)
        # Padding comes last.
        order = np.argsort(generator.random(every.shape) + (every == 0), axis=1)
        return np.take_along_axis(every, order, 1).astype(np.int64), n_words + n

    def _signs(
        self, a: Int[np.ndarray, "batch pos_a"], b: Int[np.ndarray, "batch pos_b"]
    ) -> Int[np.ndarray, "batch pos_a pos_b"]:
        n, n_synonyms = self._texts.n_concepts, self._texts.n_synonyms
        # -1 for padding.
        asks, answers = ((words - 1) // n_synonyms for words in (a[:, :, None], b[:, None]))
        is_asking = (asks >= 0) & (asks < n)
        affirmed, denied = (is_asking & (asks == answers - role * n) for role in (1, 2))
        return affirmed.astype(np.int64) - denied

    def words(self, batch: Batch[Any], example: int) -> tuple[list[str], list[str]]:
        """Return the words of a question and of its answer, without padding.

        `c7?` asks for concept 7, `+c7` affirms it, `-c7` denies it; fillers are `f0`, `f1`, ...
        Synonyms have a number of their own: `c7.2?`.
        """
        n, n_synonyms = self._texts.n_concepts, self._texts.n_synonyms
        numbers = [f".{number}" for number in range(n_synonyms)] if n_synonyms > 1 else [""]
        forms = ["c{}{}?", "+c{}{}", "-c{}{}"]
        names = [form.format(c, number) for form in forms for c in range(n) for number in numbers]
        names = ["", *names, *(f"f{number}" for number in range(self._texts.n_fillers))]
        a, b = ([names[word] for word in text[example] if word] for text in batch.inputs)
        return a, b

    @cached_property
    def _sides(self) -> dict[str, Int[np.ndarray, "combination concept"]]:
        config = self._texts
        sets = np.array(list(combinations(range(config.n_concepts), config.n_asked)))
        n_ood = int(config.held_out * len(sets))
        train, ood = hold_out(sets, n_ood, self._key.generator("/ood"))
        return {"train": sets[np.sort(train)], "ood": sets[np.sort(ood)]}


def _others(
    asked: Int[np.ndarray, "question concept"],
    n_concepts: int,
    n: int,
    generator: np.random.Generator,
    row: Int[np.ndarray, " answer"],
) -> Int[np.ndarray, "answer n"]:
    """For each answer `n` different concepts that its question does not ask for."""
    keys = generator.random((len(row), n_concepts))
    np.put_along_axis(keys, asked[row], 2.0, axis=1)
    return np.argpartition(keys, range(n), axis=1)[:, :n]
