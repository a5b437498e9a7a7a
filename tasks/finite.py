"""Fixed sets of examples, and the orders in which they are served."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, cast

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tasks.batch import Batch, Inputs
from tasks.common import Key

_KEPT_EPOCHS = 2  # a batch may begin in one epoch and end in the next


@dataclass(frozen=True, eq=False)
class ExampleSet(Generic[Inputs]):
    """All examples of a split; integers are stored in the smallest dtypes that hold them.

    Attributes:
        inputs: [n, ...], or a tuple of several such inputs; token ids or floats.
        targets: [n], or [n, target].
        latents: each [n, ...]; bool, integers or floats.
        mask: [n, target], True where the target counts; None: all targets count.
        show: computes the model's input from the stored inputs of a batch, where the former would
            take much memory (images); None: the stored inputs are the model's input.
    """

    inputs: Inputs
    targets: Tensor
    latents: dict[str, Tensor]
    mask: Bool[Tensor, "n target"] | None = None
    show: Callable[[Inputs], Inputs] | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, rows: Int[Tensor, " batch"], device: str | torch.device) -> Batch[Inputs]:
        """Return the batch of some rows, integers as int64, targets as [batch, target]."""

        def select(values: Tensor) -> Tensor:
            selected = values.index_select(0, rows).to(device)
            is_integer = selected.dtype != torch.bool and not selected.is_floating_point()
            return selected.long() if is_integer else selected

        if isinstance(self.inputs, tuple):
            inputs = tuple(select(part) for part in self.inputs)
        else:
            inputs = select(self.inputs)
        inputs = cast(Inputs, inputs)
        targets = select(self.targets)
        if targets.ndim == 1:
            targets = targets[:, None]
        all_true = torch.ones_like(targets, dtype=torch.bool)
        return Batch(
            inputs=self.show(inputs) if self.show else inputs,
            targets=targets,
            mask=all_true if self.mask is None else select(self.mask),
            latents={name: select(values) for name, values in self.latents.items()},
        )


def small(values: np.ndarray) -> Tensor:
    """Return integers as int8 where they fit, else as int16; bool stays bool.

    Raises:
        ValueError: a value does not fit into 16 bits.
    """
    if values.dtype == bool:
        return torch.from_numpy(values.copy())
    low, high = (values.min(), values.max()) if values.size else (0, 0)
    for dtype in (np.int8, np.int16):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return torch.from_numpy(values.astype(dtype))
    raise ValueError(f"values must fit into 16 bits, got values from {low} to {high}")


class Stream:
    """An endless sequence of row indices in epochs; each epoch is a permutation of the rows.

    Args:
        groups: row indices; the groups take turns, and each has its own epochs, so every group
            occurs equally often, whatever its size. One group makes a plain stream of epochs.
        key: seeds the permutations.
        by_batch: whether the groups take turns from batch to batch, and not from row to row.
    """

    def __init__(
        self, groups: Sequence[Int[np.ndarray, " member"]], key: Key, *, by_batch: bool = False
    ) -> None:
        self._groups = groups
        self._key = key
        self._by_batch = by_batch
        self._orders: dict[tuple[int, int], np.ndarray] = {}

    def rows(self, index: int, size: int) -> Int[np.ndarray, " batch"]:
        """Return the rows at positions [index * size, (index + 1) * size) of the stream."""
        if self._by_batch:
            turn, group = divmod(index, len(self._groups))
            position_in_group = np.arange(turn * size, (turn + 1) * size)
            group_of = np.full(size, group)
        else:
            position = np.arange(index * size, (index + 1) * size)
            position_in_group, group_of = np.divmod(position, len(self._groups))
        rows = np.empty(size, np.int64)
        for group, members in enumerate(self._groups):
            epochs, rank = np.divmod(position_in_group, len(members))
            is_of_group = group_of == group
            for epoch in np.unique(epochs[is_of_group]):
                selected = is_of_group & (epochs == epoch)
                rows[selected] = self._order(group, int(epoch))[rank[selected]]
        return rows

    def _order(self, group: int, epoch: int) -> Int[np.ndarray, " member"]:
        if (group, epoch) not in self._orders:
            kept = sorted(e for g, e in self._orders if g == group)
            for old in kept[: len(kept) + 1 - _KEPT_EPOCHS]:
                del self._orders[group, old]
            generator = self._key.generator(f"/epoch/{group}/{epoch}")
            self._orders[group, epoch] = generator.permutation(self._groups[group])
        return self._orders[group, epoch]


def balanced_order(
    labels: Int[np.ndarray, " n"], generator: np.random.Generator
) -> Int[np.ndarray, " n"]:
    """Return a random order of which every prefix has each label in proportion.

    Args:
        labels: the label of each example.
        generator: source of the randomness.
    """
    order = generator.permutation(len(labels))
    position = np.empty(len(labels))
    for label in np.unique(labels):
        members = order[labels[order] == label]
        position[members] = (np.arange(len(members)) + 0.5) / len(members)
    return order[np.argsort(position[order], kind="stable")]


def grouped_order(
    groups: Sequence[str | None], generator: np.random.Generator
) -> Int[np.ndarray, " n"]:
    """Return an order with the groups in random order, and the members of each one after another.

    Args:
        groups: the group of each example.
        generator: source of the randomness.
    """
    _, group = np.unique(np.array(groups), return_inverse=True)
    place = generator.permutation(group.max() + 1)
    return np.argsort(place[group], kind="stable")


def allot(total: int, capacity: Sequence[int]) -> list[int]:
    """Divide `total` into shares that are as equal as their capacities allow.

    A remainder goes to the largest capacities.

    Args:
        total: at most sum(capacity).
        capacity: the largest value of each share, >= 0.
    """
    shares = [0] * len(capacity)
    # From the smallest capacity to the largest, each gets an equal part of the remainder.
    order = sorted(range(len(capacity)), key=lambda i: (capacity[i], i))
    for done, i in enumerate(order):
        shares[i] = min(capacity[i], total // (len(order) - done))
        total -= shares[i]
    return shares
