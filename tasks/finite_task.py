"""What the tasks with a fixed set of examples share: how these are served."""

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
    """A task whose splits are finite; the examples of one are made when it is first asked for.

    `train` is a stream of epochs, each in an order of its own; the other splits come in one fixed
    order, of which every prefix is balanced, and start again at the end.
    """

    SPLITS: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        *,
        key: Key,
        splits: tuple[str, ...] | None = None,
        trim: Callable[[Batch[Inputs]], Batch[Inputs]] | None = None,
    ) -> None:
        """Make a task, but no examples yet.

        Args:
            key: what all random choices follow from.
            splits: which of `SPLITS` there are; None: all.
            trim: what takes out of a batch what none of its examples needs; None: it stays.
        """
        self._key = key
        self._trim = trim
        self._splits = self.SPLITS if splits is None else splits
        self._made: dict[str, ExampleSet[Inputs]] = {}

    @abstractmethod
    def _make(self, split: str) -> ExampleSet[Inputs]:
        """Return the examples of a split; but for `train`, in the order in which they come."""

    @abstractmethod
    def _groups(self, train: ExampleSet[Inputs]) -> list[Int[np.ndarray, " member"]]:
        """Return the rows of `train` that take turns in the stream."""

    @final
    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits."""
        return self._splits

    @final
    def size(self, split: str) -> int:
        """Return the number of examples of a split: of one epoch of `train`.

        Raises:
            ValueError: `split` is unknown.
        """
        return len(self._examples(split))

    @final
    def batch(
        self, split: str, index: int, size: int, device: str | torch.device = "cpu"
    ) -> Batch[Inputs]:
        """Return batch number `index` of a split: always the same one for the same arguments.

        It holds the positions from index * size to (index + 1) * size of the split's order.

        Args:
            split: one of `splits`.
            index: 0 to 2^40.
            size: number of examples, 1 to 2^22.
            device: where the batch shall be.

        Returns:
            A batch; what it holds is told by the task.

        Raises:
            ValueError: `split` is unknown, or `index` or `size` is out of range.
        """
        examples = self._examples(split)
        require_int("index", index, 0, 2**40)
        require_int("size", size, 1, 2**22)
        if split == "train":
            rows = self._stream.rows(index, size)
        else:
            rows = np.arange(index * size, (index + 1) * size) % len(examples)
        batch = examples.take(torch.from_numpy(rows), device)
        return batch if self._trim is None else self._trim(batch)

    @final
    def _examples(self, split: str) -> ExampleSet[Inputs]:
        require_choice("split", split, self._splits)
        if split not in self._made:
            self._made[split] = self._make(split)
        return self._made[split]

    @cached_property
    def _stream(self) -> Stream:
        return Stream(self._groups(self._examples("train")), self._key)
