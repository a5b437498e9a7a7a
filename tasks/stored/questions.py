"""Open-domain questions with retrieved contexts: SearchQA and Quasar-T.

SearchQA (Dunn et al. 2017): questions of a quiz with snippets of a search engine. Quasar-T (Dhingra
et al. 2017): trivia with sentences or paragraphs of the web. The answer is a span of the contexts;
where it is was not annotated (distant supervision).
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tasks.batch import Batch
from tasks.common import (
    Key,
    SeedConfig,
    require_choice,
    require_int,
    require_path,
    require_shape,
)
from tasks.finite import ExampleSet
from tasks.finite_task import FiniteTask
from tasks.spans import best_spans, score_answer
from tasks.stored.question_files import LAYOUTS, Question, read_questions
from tasks.stored.words import PAD, encode_words, learn_words, word_spans, words_of

_CONTEXTS = ("short", "long")


@dataclass(frozen=True, kw_only=True)
class QuestionsConfig:
    """Settings of a data set of questions.

    Attributes:
        name: the data set, or "own".
        path: a folder with its files. SearchQA: train.txt, val.txt and test.txt, or folders or .zip
            files of one JSON file for each question; Quasar-T: its folders questions and contexts;
            "own": train.jsonl, dev.jsonl and test.jsonl, whose lines have a `question`, and lists
            of `contexts` and of right `answers`.
        contexts: for Quasar-T, the short or the long contexts.
        n_contexts: the first contexts that are read, 1 to 1000.
        max_passage: words of all contexts together that are read, 1 to 10^4.
        max_question: words of a question that are read, 1 to 1000.
        longest: words of the longest answer that is given, 1 to 100.
        min_count: the least frequency in `train` of the words of the vocabulary, 1 to 10^6.
        vocabulary_size: the greatest size of the vocabulary, with one id each for padding and
            unknown words, 3 to 10^6.
        seed: seeds the order, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> QuestionsConfig(name="searchqa", path="data/searchqa").n_contexts > 0
        True
    """

    name: Literal["searchqa", "quasar-t", "own"]
    path: str
    contexts: Literal["short", "long"] = "short"
    n_contexts: int = 50
    max_passage: int = 700
    max_question: int = 50
    longest: int = 10
    min_count: int = 2
    vocabulary_size: int = 100_000
    seed: int = 0

    def __post_init__(self) -> None:
        require_choice("name", self.name, tuple(LAYOUTS))
        require_path("path", self.path)
        require_choice("contexts", self.contexts, _CONTEXTS)
        require_int("n_contexts", self.n_contexts, 1, 1000)
        require_int("max_passage", self.max_passage, 1, 10**4)
        require_int("max_question", self.max_question, 1, 1000)
        require_int("longest", self.longest, 1, 100)
        require_int("min_count", self.min_count, 1, 10**6)
        require_int("vocabulary_size", self.vocabulary_size, 3, 10**6)
        require_int("seed", self.seed, 0, 2**32 - 1)


class Questions(FiniteTask[tuple[Tensor, Tensor]]):
    """Questions about passages, whose answer is a span of the passage.

    The passage of a question is its contexts one after another. Words are in lower case, and
    punctuation marks are words. The target is the first span whose words are those of a right
    answer. Questions of `train` without one are left out; in `valid` and `test` they count as
    wrong, unless a span has a right answer nevertheless, and have a mask that is False.

    Splits: `train`, `valid` and `test`, as in the data set.

    A batch has inputs, a tuple of passage [batch, pos] and question [batch, question_pos], int64:
    ids of words in `vocabulary`, 1 for an unknown word, padded with 0 (as wide as the split's
    longest); targets [batch, 2] int64, the positions of the first and of the last word of the
    answer; mask [batch, 2], whether there is one; and the latents, each [batch] int64,
    `start`, `end`: the targets, -1 where there is none;
    `n_spans`: how many spans of the passage are a right answer;
    `length_passage`, `length_question`: numbers of words;
    `number`: the number of the question, counted over all splits.

    The data are read on first use.

    Raises:
        FileNotFoundError: on first use, if the data set is missing: says what to fetch and where to
            put it.
        ValueError: on first use, if the data have an unknown layout, or no question of `train` has
            its answer in the passage.

    Example:
        >>> task = Questions(QuestionsConfig(name="own", path="trivia", min_count=1))
        >>> batch = task.batch("test", 0, 1)
        >>> passage, question = task.words(batch, 0)
        >>> first, last = batch.targets[0].tolist()
        >>> passage[first : last + 1]
        ['william', 'shakespeare']
    """

    SPLITS: ClassVar = ("train", "valid", "test")

    def __init__(self, config: QuestionsConfig) -> None:
        super().__init__(key=Key(SeedConfig(config.seed)))
        self.config = config

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """The words; a word's id is its index."""
        train = self._questions["train"]
        texts = chain.from_iterable((self._passage(one), one.question) for one in train)
        config = self.config
        return learn_words(texts, min_count=config.min_count, size=config.vocabulary_size)

    @property
    def vocabulary_size(self) -> int:
        """Number of word ids."""
        return len(self.vocabulary)

    def words(self, batch: Batch[Any], example: int) -> tuple[list[str], list[str]]:
        """Return the words of a passage and of its question, as far as they are known."""
        passage, question = (
            [self.vocabulary[word] for word in text[example].tolist() if word != PAD]
            for text in batch.inputs
        )
        return passage, question

    def score(
        self, logits: Float[Tensor, "batch 2 pos"], batch: Batch[Any]
    ) -> dict[str, Float[Tensor, " batch"]]:
        """Return scores of the most probable spans, as texts, of at most `longest` words.

        Args:
            logits: those of the first and of the last word of the answer, -inf at padding.
            batch: the batch that was answered.

        Returns:
            Each [batch]: `exact_match` and `f1`, see `tasks.spans.score_answer`, of the best of the
            right answers; `start` and `end`, 1 where the position is that of the target.

        Raises:
            ValueError: `logits` has another shape.
        """
        require_shape("logits", logits, (len(batch), 2, batch.inputs[0].shape[1]))
        start, end = best_spans(logits, self.config.longest)
        numbers = batch.latents["number"].tolist()
        spans = zip(numbers, start.tolist(), end.tolist(), strict=True)
        scores = [
            score_answer(self._answer(*span), self._all[number].answers)
            for number, span in zip(numbers, spans, strict=True)
        ]
        exact_match, f1 = torch.tensor(scores, device=logits.device).unbind(1)
        is_right = ((torch.stack([start, end], 1) == batch.targets) & batch.mask).float()
        return {
            "exact_match": exact_match,
            "f1": f1,
            "start": is_right[:, 0],
            "end": is_right[:, 1],
        }

    def _answer(self, number: int, first: int, last: int) -> str:
        """The text from one word of a passage to another."""
        passage = self._passage(self._all[number])
        spans = word_spans(passage)
        # A passage without words is one unknown word.
        return passage[spans[first][0] : spans[last][1]] if spans else ""

    @cached_property
    def _questions(self) -> dict[str, list[Question]]:
        config = self.config
        return read_questions(config.name, Path(config.path).expanduser(), config.contexts)

    @cached_property
    def _all(self) -> list[Question]:
        return list(chain.from_iterable(self._questions[split] for split in self.SPLITS))

    def _passage(self, question: Question) -> str:
        return " ".join(question.contexts[: self.config.n_contexts]).lower()

    def _make(self, split: str) -> ExampleSet[tuple[Tensor, Tensor]]:
        config, earlier = self.config, self.SPLITS[: self.SPLITS.index(split)]
        questions = self._questions[split]
        numbers = np.arange(len(questions)) + sum(len(self._questions[one]) for one in earlier)
        passages = [self._passage(question) for question in questions]
        spans = [
            _spans(words_of(passage)[: config.max_passage], question.answers)
            for passage, question in zip(passages, questions, strict=True)
        ]
        kept = [row for row, of_row in enumerate(spans) if of_row or split != "train"]
        if not kept:
            raise ValueError(
                f"answers must occur in the first {config.max_passage} words of their contexts, "
                f"got none in {split} of {config.name}"
            )
        if split != "train":
            kept = self._key.generator(f"/order/{split}").permutation(kept).tolist()
        ids = {word: word_id for word_id, word in enumerate(self.vocabulary)}
        passage, question = (
            torch.from_numpy(encode_words(texts, ids, width))
            for texts, width in (
                ([passages[row] for row in kept], config.max_passage),
                ([questions[row].question for row in kept], config.max_question),
            )
        )
        first = torch.tensor([spans[row][0] if spans[row] else (-1, -1) for row in kept])
        latents = {
            "start": first[:, 0],
            "end": first[:, 1],
            "n_spans": torch.tensor([len(spans[row]) for row in kept]),
            "length_passage": (passage != PAD).sum(1),
            "length_question": (question != PAD).sum(1),
            "number": torch.from_numpy(numbers[kept]),
        }
        return ExampleSet(
            inputs=(passage, question),
            targets=first.clamp(min=0),
            latents=latents,
            mask=first >= 0,
        )

    def _groups(self, train: ExampleSet[tuple[Tensor, Tensor]]) -> list[Int[np.ndarray, " member"]]:
        return [np.arange(len(train))]


def _spans(words: list[str], answers: tuple[str, ...]) -> list[tuple[int, int]]:
    """The first and the last position of all spans whose words are those of an answer."""
    found = set()
    for answer in answers:
        wanted = words_of(answer)
        n = len(wanted)
        for start, word in enumerate(words if n else ()):
            if word == wanted[0] and words[start : start + n] == wanted:
                found.add((start, start + n - 1))
    return sorted(found)
