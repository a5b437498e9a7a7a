"""Allocation of examples: training, checkpoint selection and measures never share any."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from studies.engine.folders import RunError
from studies.engine.setup import Setup
from tasks import Batch

TRAIN = "train"
"""The split that training, and only training, draws from."""

_BATCHES_PER_SEED = 2**30
_BATCHES_PER_MEASURE = 2**20


class Examples:
    """The examples of one cell, on a device.

    Endless splits are allocated by batch index: batch 0 is the validation batch, and each measure
    has its own range of indices after it. In a finite split the first `n_validation` examples are
    the validation examples; if the split selects checkpoints, measures get only the examples after
    them.
    """

    def __init__(self, setup: Setup, device: str):
        self._setup, self._device = setup, device
        self._task = setup.sampler()

    def train(self, step: int, size: int) -> Batch[Any]:
        """The batch of training step `step`; seeds differ in the examples or in their order."""
        index = self._setup.seed * _BATCHES_PER_SEED + step
        return self._task.batch(TRAIN, index, size, self._device)

    def validation(self, split: str) -> list[Batch[Any]]:
        """The examples of a split for training curves and checkpoint selection."""
        n, size = self._setup.n_validation, self._setup.size(split)
        if size is None:
            return list(self.of_stream(split, 0, n))
        return list(self.of_range(split, 0, min(n, size)))

    def fresh(self, measure: str) -> Fresh:
        """Examples for a measure; the same name always gets the same examples."""
        return Fresh(self._setup, self, measure)

    def of_stream(self, split: str, index: int, n: int) -> Iterator[Batch[Any]]:
        """Batch `index`, with `n` examples, of an endless split, in evaluation batches."""
        yield from self._task.batch(split, index, n, self._device).parts(
            self._setup.evaluation_batch_size
        )

    def of_range(self, split: str, first: int, last: int) -> Iterator[Batch[Any]]:
        """Examples `first` to `last - 1` of a finite split, in parts of `evaluation_batch_size`."""
        size = self._setup.evaluation_batch_size
        for index in range(first // size, -(-last // size)):
            start = index * size
            batch = self._task.batch(split, index, size, self._device)
            yield batch[max(0, first - start) : last - start]


class Fresh:
    """Examples for one measure, unseen by training and checkpoint selection, each given once."""

    def __init__(self, setup: Setup, examples: Examples, measure: str):
        self._setup, self._examples, self._measure = setup, examples, measure
        self._next: dict[str, int] = {}

    def batches(self, split: str, n: int | None = None) -> Iterator[Batch[Any]]:
        """The next `n` examples of a split, `setup.evaluation_batch_size` at a time.

        A finite split may have fewer left; None gives all that are left.

        Raises:
            ValueError: the split is `train` or not one of the setup's, or `n` is None and the
                split is endless.
            RunError: no examples are left.
        """
        if split == TRAIN or split not in self._setup.all_splits:
            allowed = ", ".join(self._setup.all_splits)
            raise ValueError(f"split must be one of {allowed} in a measure, got {split!r}")
        size = self._setup.size(split)
        if size is None:
            if n is None:
                raise ValueError(f"n must be a number for the endless split {split!r}, got None")
            index = self._next.setdefault(split, first_batch(self._measure))
            self._next[split] += 1
            return self._examples.of_stream(split, index, n)
        selecting = split == self._setup.selection.split
        first = self._next.get(split, self._setup.n_validation if selecting else 0)
        last = size if n is None else min(size, first + n)
        if last <= first:
            users = "checkpoint selection and " if selecting else ""
            raise RunError(
                f"split {split!r} has {size} examples, all used by {users}{self._measure}; "
                "make the split larger or ask for fewer"
            )
        self._next[split] = last
        return self._examples.of_range(split, first, last)


def first_batch(measure: str) -> int:
    """The index of the first batch of an endless split that belongs to a measure."""
    digest = hashlib.sha256(measure.encode()).digest()
    return (1 + int.from_bytes(digest[:2], "little")) * _BATCHES_PER_MEASURE
