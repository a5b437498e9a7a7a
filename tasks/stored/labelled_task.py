"""Base classes of the tasks with labelled texts: settings, vocabulary, labels and their order."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, final

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tasks.answers import LabelledAnswers
from tasks.batch import Inputs
from tasks.common import Key, SeedConfig, require_choice, require_int, require_path
from tasks.finite import ExampleSet, balanced_order, grouped_order
from tasks.finite_task import FiniteTask
from tasks.stored.labelled_files import OWN, Example, Format
from tasks.stored.words import encode_words, learn_words


@dataclass(frozen=True, kw_only=True)
class LabelledConfig:
    """Settings of a data set of labelled texts.

    Attributes:
        columns: names of the columns of the texts, then of the label and, where there is one, of
            the group of examples, in place of those of the data set; required with "own".
        labels: names of the labels, in place of those of the data set; rows with others are an
            error; required with "own".
        min_count: the least frequency in `train` of the words of the vocabulary, 1 to 10^6.
        vocabulary_size: the greatest size of the vocabulary, which has the most frequent words and
            one id each for padding and unknown words, 3 to 10^6.
        seed: seeds the order and what is held out, 0 to 2^32 - 1.
    """

    FORMATS: ClassVar[Mapping[str, Format]]
    MAX_LENGTH: ClassVar[int]
    N_COLUMNS: ClassVar[tuple[int, int]]

    name: str
    path: str | None = None
    columns: tuple[str, ...] | None = None
    labels: tuple[str, ...] | None = None
    min_count: int = 2
    vocabulary_size: int = 30_000
    max_length: int
    seed: int = 0

    def __post_init__(self) -> None:
        require_choice("name", self.name, tuple(self.FORMATS))
        require_path("path", self.path)
        require_int("min_count", self.min_count, 1, 10**6)
        require_int("vocabulary_size", self.vocabulary_size, 3, 10**6)
        require_int("max_length", self.max_length, 1, self.MAX_LENGTH)
        require_int("seed", self.seed, 0, 2**32 - 1)
        _require_names("columns", self.columns, self.N_COLUMNS)
        _require_names("labels", self.labels, (2, 1000))
        for setting in ("columns", "labels", "path"):
            if self.name == OWN and getattr(self, setting) is None:
                raise ValueError(f"{setting} must be given with name={OWN!r}, got None")
        if self.path is None and self.FORMATS[self.name].hub is None:
            raise ValueError(f"path must be a folder for name={self.name!r}, got None")

    @property
    def format(self) -> Format:
        """The format of the data set, with these columns and labels."""
        format_ = self.FORMATS[self.name]
        format_ = format_ if self.columns is None else format_.with_columns(self.columns)
        return format_ if self.labels is None else replace(format_, classes=self.labels)


def _require_names(name: str, values: tuple[str, ...] | None, count: tuple[int, int]) -> None:
    """Raise a ValueError unless `values` is None or has as many different names."""
    if values is None:
        return
    are_names = isinstance(values, tuple) and all(isinstance(one, str) and one for one in values)
    if not are_names or len(set(values)) < len(values) or not count[0] <= len(values) <= count[1]:
        numbers = " to ".join(map(str, dict.fromkeys(count)))
        raise ValueError(f"{name} must be {numbers} different names, got {values!r}")


class LabelledTask(LabelledAnswers, FiniteTask[Inputs]):
    """A task of labelled texts, which are read on first use."""

    SPLITS: ClassVar = ("train", "valid", "test")

    def __init__(self, config: LabelledConfig) -> None:
        super().__init__(key=Key(SeedConfig(config.seed)))
        self._classes = config.format.classes
        self._min_count = config.min_count
        self._vocabulary_size = config.vocabulary_size
        self._max_length = config.max_length

    @abstractmethod
    def _read(self) -> dict[str, list[Example]]:
        """Return the examples of each split."""

    @abstractmethod
    def _arrange(
        self, texts: list[Int[Tensor, "example pos"]], examples: list[Example]
    ) -> tuple[Inputs, dict[str, Tensor]]:
        """Return the inputs, and the latents other than `label` and `row`.

        Args:
            texts: for each text of an example, the ids of its words.
            examples: the examples of the texts.
        """

    @final
    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each label."""
        return self._classes

    @final
    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """The words; a word's id is its index."""
        texts = (text for example in self._rows["train"] for text in example.texts)
        return learn_words(texts, min_count=self._min_count, size=self._vocabulary_size)

    @final
    @property
    def vocabulary_size(self) -> int:
        """Number of word ids."""
        return len(self.vocabulary)

    @final
    def decode(self, ids: Int[Tensor, " pos"]) -> str:
        """Return the words of a text, with spaces between them."""
        return " ".join(self._words(ids))

    @final
    def _words(self, ids: Int[Tensor, " pos"]) -> list[str]:
        """The words of a text, without padding."""
        return [self.vocabulary[word_id] for word_id in ids.tolist() if word_id]

    @final
    def chance(self, split: str) -> float:
        """Return the accuracy of always predicting the most frequent label of a split.

        Raises:
            ValueError: `split` is unknown.
        """
        counts = self._examples(split).targets.bincount()
        return (counts.max() / counts.sum()).item()

    @cached_property
    def _rows(self) -> dict[str, list[Example]]:
        return self._read()

    @final
    def _make(self, split: str) -> ExampleSet[Inputs]:
        examples = self._rows[split]
        label = np.array([example.label for example in examples])
        if split != "train":
            generator = self._key.generator(f"/order/{split}")
            groups = [example.group for example in examples]
            grouped = None not in groups
            order = (
                grouped_order(groups, generator) if grouped else balanced_order(label, generator)
            )
            examples, label = [examples[row] for row in order], label[order]
        ids = {word: word_id for word_id, word in enumerate(self.vocabulary)}
        texts = [
            torch.from_numpy(encode_words(column, ids, self._max_length))
            for column in zip(*(example.texts for example in examples), strict=True)
        ]
        inputs, latents = self._arrange(texts, examples)
        targets = torch.from_numpy(label)
        row = torch.tensor([example.row for example in examples])
        latents = {"label": targets, "row": row, **latents}
        return ExampleSet(inputs=inputs, targets=targets, latents=latents)

    @final
    def _groups(self, train: ExampleSet[Inputs]) -> list[Int[np.ndarray, " member"]]:
        return [np.arange(len(train))]
