"""Base class of the tasks that draw their examples anew for every batch."""

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, final

import numpy as np
import torch

from tasks.batch import Batch, Inputs
from tasks.common import Key, require_choice, require_int


class StreamTask(ABC, Generic[Inputs]):
    """A task whose splits are endless streams of examples, drawn on the CPU."""

    SPLITS: ClassVar[tuple[str, ...]]

    def __init__(self, *, key: Key) -> None:
        """Args: the key that seeds all random choices."""
        self._key = key

    @abstractmethod
    def _draw(self, split: str, size: int, generator: np.random.Generator) -> Batch[Inputs]:
        """Return `size` examples of a split."""

    @final
    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits."""
        return self.SPLITS

    @final
    def batch(
        self, split: str, index: int, size: int, device: str | torch.device = "cpu"
    ) -> Batch[Inputs]:
        """Return batch `index` of a split, a pure function of the config and the arguments.

        Args:
            split: one of `splits`.
            index: 0 to 2^62.
            size: number of examples, 1 to 2^22; a smaller batch is in general not a part of a
                larger one.
            device: the device of the batch.

        Returns:
            A batch; its contents are documented by the task.

        Raises:
            ValueError: `split` is unknown, or `index` or `size` is out of range.
        """
        require_choice("split", split, self.SPLITS)
        require_int("index", index, 0, 2**62)
        require_int("size", size, 1, 2**22)
        return self._draw(split, size, self._key.generator(f"/{split}/{index}")).to(device)
