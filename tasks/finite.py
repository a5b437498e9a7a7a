"""A fixed set of examples, served as an endless stream or in one fixed order."""

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
    """Examples, their whole numbers in any integer types that hold them.

    Attributes:
        inputs: [n, ...], or a tuple of several such inputs; token ids or floats.
        targets: [n], or [n, target].
        latents: each [n, ...]; bool, whole numbers or floats.
        mask: [n, target], True where the target counts; None: all of them do.
        show: what makes of a batch's inputs what the model reads, where that would be large to
            keep (pictures); None: they are it.
    """

    inputs: Inputs
    targets: Tensor
    latents: dict[str, Tensor]
    mask: Bool[Tensor, "n target"] | None = None
    show: Callable[[Inputs], Inputs] | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, rows: Int[Tensor, " batch"], device: str | torch.device) -> Batch[Inputs]:
        """Return some of the examples, whole numbers as int64, targets as [batch, target]."""

        def of(values: Tensor) -> Tensor:
            chosen = values.index_select(0, rows).to(device)
            whole = chosen.dtype != torch.bool and not chosen.is_floating_point()
            return chosen.long() if whole else chosen

        if isinstance(self.inputs, tuple):
            inputs = tuple(of(part) for part in self.inputs)
        else:
            inputs = of(self.inputs)
        inputs = cast(Inputs, inputs)
        targets = of(self.targets)
        if targets.ndim == 1:
            targets = targets[:, None]
        full = torch.ones_like(targets, dtype=torch.bool)
        return Batch(
            inputs=self.show(inputs) if self.show else inputs,
            targets=targets,
            mask=full if self.mask is None else of(self.mask),
            latents={name: of(values) for name, values in self.latents.items()},
        )


def small(values: np.ndarray) -> Tensor:
    """Return whole numbers as int8 where they fit, else as int16; bool stays bool.

    Raises:
        ValueError: one does not fit into 16 bits.
    """
    if values.dtype == bool:
        return torch.from_numpy(values.copy())
    low, high = (values.min(), values.max()) if values.size else (0, 0)
    for dtype in (np.int8, np.int16):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return torch.from_numpy(values.astype(dtype))
    raise ValueError(f"values from {low} to {high}: allowed is what fits into 16 bits")


class Stream:
    """Rows in epochs without end: each epoch is a permutation, which depends on the key alone.

    Args:
        groups: rows; the groups take turns, and each has epochs of its own, so every group occurs
            equally often, however large it is. One group makes a plain stream of epochs.
        key: what the permutations follow from.
    """

    def __init__(self, groups: Sequence[Int[np.ndarray, " member"]], key: Key) -> None:
        self._groups = groups
        self._key = key
        self._orders: dict[tuple[int, int], np.ndarray] = {}

    def rows(self, index: int, size: int) -> Int[np.ndarray, " batch"]:
        """Return the rows at positions [index * size, (index + 1) * size) of the stream."""
        place, turn = np.divmod(np.arange(index * size, (index + 1) * size), len(self._groups))
        rows = np.empty(size, np.int64)
        for number, members in enumerate(self._groups):
            epoch, rank = np.divmod(place, len(members))
            mine = turn == number
            for one in np.unique(epoch[mine]):
                here = mine & (epoch == one)
                rows[here] = self._order(number, int(one))[rank[here]]
        return rows

    def _order(self, number: int, epoch: int) -> Int[np.ndarray, " member"]:
        if (number, epoch) not in self._orders:
            kept = sorted(e for n, e in self._orders if n == number)
            for old in kept[: len(kept) + 1 - _KEPT_EPOCHS]:
                del self._orders[number, old]
            generator = self._key.generator(f"/epoch/{number}/{epoch}")
            self._orders[number, epoch] = generator.permutation(self._groups[number])
        return self._orders[number, epoch]


def balanced_order(
    kind: Int[np.ndarray, " n"], generator: np.random.Generator
) -> Int[np.ndarray, " n"]:
    """Return a random order in which every prefix holds each kind in proportion.

    Args:
        kind: what each example is.
        generator: where the order comes from.
    """
    order = generator.permutation(len(kind))
    place = np.empty(len(kind))
    for one in np.unique(kind):
        members = order[kind[order] == one]
        place[members] = (np.arange(len(members)) + 0.5) / len(members)
    return order[np.argsort(place[order], kind="stable")]


def allot(total: int, room: Sequence[int]) -> list[int]:
    """Return how `total` is shared out as equally as the room of each allows.

    What does not divide goes to the last ones.

    Args:
        total: at most sum(room).
        room: the largest share of each, >= 0.
    """
    shares = [0] * len(room)
    # From the smallest room to the largest, each gets an equal part of what is left, or all it has.
    order = sorted(range(len(room)), key=lambda i: (room[i], i))
    for done, one in enumerate(order):
        shares[one] = min(room[one], total // (len(order) - done))
        total -= shares[one]
    return shares
