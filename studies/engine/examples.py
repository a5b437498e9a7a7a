"""Who gets which examples: training, the choice of checkpoints, and measures share none."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from studies.engine.folders import RunError
from studies.engine.setup import Setup
from tasks import Batch

TRAIN = "train"
"""The split that training draws from, and nothing else does."""

_PER_SEED = 2**30  # batches of training that are a seed's own
_PER_USE = 2**20  # batches that are a measure's own


class Examples:
    """The examples of a cell, on a device.

    Streams are dealt out by the index of their batches: 0 chooses checkpoints, every use has a
    range of its own behind it. In a split with an end the first `n_validation` examples choose, if
    the split is the selecting one, and each use gets those behind them.
    """

    def __init__(self, setup: Setup, device: str):
        self._setup, self._device = setup, device
        self._task = setup.sampler()

    def train(self, step: int, size: int) -> Batch[Any]:
        """The batch of update number `step`: other examples, or another order, for each seed."""
        return self._task.batch(TRAIN, self._setup.seed * _PER_SEED + step, size, self._device)

    def validation(self, split: str) -> list[Batch[Any]]:
        """The examples of a split that curves of training, and choices, are made with."""
        n, size = self._setup.n_validation, self._setup.size(split)
        if size is None:
            return list(self.of_stream(split, 0, n))
        return list(self.of_range(split, 0, min(n, size)))

    def fresh(self, use: str) -> Fresh:
        """Examples for a use, such as a measure, by its name: always the same ones."""
        return Fresh(self._setup, self, use)

    def of_stream(self, split: str, index: int, n: int) -> Iterator[Batch[Any]]:
        """Batch number `index`, of `n` examples, of a stream, some of them at a time."""
        yield from self._task.batch(split, index, n, self._device).parts(self._setup.at_once)

    def of_range(self, split: str, first: int, last: int) -> Iterator[Batch[Any]]:
        """The examples from `first` to before `last` of a split with an end."""
        size = self._setup.at_once
        for index in range(first // size, -(-last // size)):
            start = index * size
            batch = self._task.batch(split, index, size, self._device)
            yield batch[max(0, first - start) : last - start]


class Fresh:
    """Examples that training and the choice of the checkpoint have not seen, each given once."""

    def __init__(self, setup: Setup, examples: Examples, use: str):
        self._setup, self._examples, self._use = setup, examples, use
        self._next: dict[str, int] = {}

    def batches(self, split: str, n: int | None = None) -> Iterator[Batch[Any]]:
        """The next `n` examples of a split, `setup.at_once` at a time.

        Of a split with an end there may be fewer; None gives all that are left.

        Raises:
            ValueError: the split is `train` or none of the setup's, or `n` is None and it has no
                end.
            RunError: no examples are left.
        """
        if split == TRAIN or split not in self._setup.all_splits:
            allowed = ", ".join(self._setup.all_splits)
            raise ValueError(f"measures draw from {allowed}, got split {split!r}")
        size = self._setup.size(split)
        if size is None:
            if n is None:
                raise ValueError(f"n must be given: split {split!r} has no end")
            index = self._next.setdefault(split, first_batch(self._use))
            self._next[split] += 1
            return self._examples.of_stream(split, index, n)
        selecting = split == self._setup.selection.split
        first = self._next.get(split, self._setup.n_validation if selecting else 0)
        last = size if n is None else min(size, first + n)
        if last <= first:
            spent = "the choice of the checkpoint and " if selecting else ""
            raise RunError(
                f"split {split!r} has {size} examples, of which {spent}{self._use} have used all; "
                "make the split larger or ask for fewer"
            )
        self._next[split] = last
        return self._examples.of_range(split, first, last)


def first_batch(use: str) -> int:
    """The index of the first batch of a stream that is a use's own."""
    digest = hashlib.sha256(use.encode()).digest()
    return (1 + int.from_bytes(digest[:2], "little")) * _PER_USE
