"""Base class of the tasks with a fixed set of examples."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import ClassVar, Generic, final

import numpy as np
import torch
from jaxtyping import Int

from tasks.batch import Batch, Inputs
from tasks.common import Key, require_choice, require_int
from tasks.finite import ExampleSet, Stream


class FiniteTask(ABC, Generic[Inputs]):
    """A task whose splits are finite; the examples of a split are made on its first use.

    `train` is a stream of epochs, each in a new random order; the other splits have one fixed
    order, of which every prefix is balanced, and start again at the end.
    """

    SPLITS: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        *,
        key: Key,
        splits: tuple[str, ...] | None = None,
        trim: Callable[[Batch[Inputs]], Batch[Inputs]] | None = None,
        augment: Callable[[Batch[Inputs], int], Batch[Inputs]] | None = None,
        by_batch: bool = False,
    ) -> None:
        """Set up the task without making any examples.

        Args:
            key: seeds all random choices.
            splits: the subset of `SPLITS` that this task has; None: all.
            trim: removes the padding of a batch that none of its examples needs; None: it stays.
            augment: changes the inputs of a batch of `train` at random, by the batch and its index;
                None: they stay.
            by_batch: whether the groups of `train` take turns from batch to batch.
        """
        self._key = key
        self._trim = trim
        self._augment = augment
        self._by_batch = by_batch
        self._splits = self.SPLITS if splits is None else splits
        self._example_sets: dict[str, ExampleSet[Inputs]] = {}

    @abstractmethod
    def _make(self, split: str) -> ExampleSet[Inputs]:
        """Return the examples of a split; those of all splits but `train` in serving order."""

    @abstractmethod
    def _groups(self, train: ExampleSet[Inputs]) -> list[Int[np.ndarray, " member"]]:
        """Return the groups of rows of `train` that take turns in the stream."""

    @final
    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits."""
        return self._splits

    @final
    def size(self, split: str) -> int:
        """Return the number of examples of a split; for `train`, of one epoch.

        Raises:
            ValueError: `split` is unknown.
        """
        return len(self._examples(split))

    @final
    def batch(
        self, split: str, index: int, size: int, device: str | torch.device = "cpu"
    ) -> Batch[Inputs]:
        """Return batch `index` of a split, a pure function of the config and the arguments.

        It has the positions from index * size to (index + 1) * size of the split's order.

        Args:
            split: one of `splits`.
            index: 0 to 2^41.
            size: number of examples, 1 to 2^21.
            device: the device of the batch.

        Returns:
            A batch; its contents are documented by the task.

        Raises:
            ValueError: `split` is unknown, or `index` or `size` is out of range.
        """
        examples = self._examples(split)
        require_int("index", index, 0, 2**41)
        require_int("size", size, 1, 2**21)
        if split == "train":
            rows = self._stream.rows(index, size)
        else:
            rows = np.arange(index * size, (index + 1) * size) % len(examples)
        batch = examples.take(torch.from_numpy(rows), device)
        if split == "train" and self._augment is not None:
            batch = self._augment(batch, index)
        return batch if self._trim is None else self._trim(batch)

    @final
    def _examples(self, split: str) -> ExampleSet[Inputs]:
        require_choice("split", split, self._splits)
        if split not in self._example_sets:
            self._example_sets[split] = self._make(split)
        return self._example_sets[split]

    @cached_property
    def _stream(self) -> Stream:
        groups = self._groups(self._examples("train"))
        return Stream(groups, self._key, by_batch=self._by_batch)
