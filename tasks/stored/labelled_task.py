"""What the tasks with labelled texts share: a vocabulary of words, labels, their order."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tasks.answers import score_class
from tasks.batch import Batch, Inputs
from tasks.common import Key
from tasks.finite import ExampleSet, balanced_order
from tasks.finite_task import FiniteTask
from tasks.stored.labelled_files import Example
from tasks.stored.words import encode_words, learn_words


class LabelledTask(FiniteTask[Inputs]):
    """Texts with labels, read when a split is first asked for."""

    SPLITS: ClassVar = ("train", "valid", "test")

    def __init__(
        self,
        *,
        classes: tuple[str, ...],
        min_count: int,
        vocabulary_size: int,
        max_length: int,
        seed: int,
    ) -> None:
        """Args: what the labels are called; as in the configs, the others."""
        super().__init__(key=Key(_Choice(seed)))
        self._classes = classes
        self._min_count = min_count
        self._vocabulary_size = vocabulary_size
        self._max_length = max_length

    @abstractmethod
    def _read(self) -> dict[str, list[Example]]:
        """Return the examples of each split."""

    @abstractmethod
    def _arrange(
        self, texts: list[Int[Tensor, "example pos"]], examples: list[Example]
    ) -> tuple[Inputs, dict[str, Tensor]]:
        """Return the inputs, and latents beside `label` and `row`.

        Args:
            texts: for each text of an example, the ids of its words.
            examples: what they are from.
        """

    @final
    @property
    def classes(self) -> tuple[str, ...]:
        """What the labels are called; a label is an index."""
        return self._classes

    @final
    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """The words; a word's id is its index."""
        texts = (text for example in self._rows["train"] for text in example.texts)
        return learn_words(texts, min_count=self._min_count, size=self._vocabulary_size)

    @final
    def decode(self, ids: Int[Tensor, " pos"]) -> str:
        """Return the words of a text, with spaces between them."""
        return " ".join(self.vocabulary[one] for one in ids.tolist() if one)

    @final
    def chance(self, split: str) -> float:
        """Return the share of the label that a split has most often.

        Raises:
            ValueError: `split` is unknown.
        """
        counts = self._examples(split).targets.bincount()
        return (counts.max() / counts.sum()).item()

    @final
    def score(
        self, logits: Float[Tensor, "batch 1 class"], batch: Batch[Any]
    ) -> dict[str, Float[Tensor, " batch"]]:
        """Return whether the most probable label is right.

        Args:
            logits: [batch, 1, class].
            batch: the batch that they answer.

        Returns:
            `correct` [batch]: 1 where it is right, else 0.

        Raises:
            ValueError: `logits` has another shape.
        """
        return score_class(logits, batch, len(self.classes))

    @cached_property
    def _rows(self) -> dict[str, list[Example]]:
        return self._read()

    @final
    def _make(self, split: str) -> ExampleSet[Inputs]:
        examples = self._rows[split]
        label = np.array([example.label for example in examples])
        if split != "train":
            order = balanced_order(label, self._key.generator(f"/order/{split}"))
            examples, label = [examples[one] for one in order], label[order]
        ids = {word: number for number, word in enumerate(self.vocabulary)}
        texts = [
            torch.from_numpy(encode_words(every, ids, self._max_length))
            for every in zip(*(example.texts for example in examples), strict=True)
        ]
        inputs, latents = self._arrange(texts, examples)
        targets = torch.from_numpy(label)
        row = torch.tensor([example.row for example in examples])
        latents = {"label": targets, "row": row, **latents}
        return ExampleSet(inputs=inputs, targets=targets, latents=latents)

    @final
    def _groups(self, train: ExampleSet[Inputs]) -> list[Int[np.ndarray, " member"]]:
        return [np.arange(len(train))]


@dataclass(frozen=True)
class _Choice:
    """What decides on the order, and on what is held out."""

    seed: int
