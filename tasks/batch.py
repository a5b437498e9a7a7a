"""What every task hands out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, cast

import torch
from torch import Tensor
from typing_extensions import TypeVar

Inputs = TypeVar("Inputs", bound="Tensor | tuple[Tensor, ...]", default=Tensor)


@dataclass(frozen=True, eq=False)
class Batch(Generic[Inputs]):
    """Examples of a task with the ground truth behind each of them.

    Attributes:
        inputs: what the model reads, for example [batch, pos, d_in] (vectors) or [batch, pos]
            (token ids); or a tuple of several such inputs, in the order of the model's arguments.
        targets: what it should answer, [batch, n_targets]; which positions of the output it is
            read from is told by the task.
        mask: [batch, n_targets] bool, True where the target counts.
        latents: the named ground truth, each [batch, ...]; a model never sees it.
    """

    inputs: Inputs
    targets: Tensor
    mask: Tensor
    latents: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.targets)

    def __repr__(self) -> str:
        """Return the shapes: `Batch(inputs [2, 5] int64, ..., latents: depth [2] int64)`."""
        inputs = self.inputs if isinstance(self.inputs, tuple) else (self.inputs,)
        latents = [f"{name} {_shape(value)}" for name, value in self.latents.items()]
        parts = {"inputs": " and ".join(map(_shape, inputs)), "targets": _shape(self.targets)}
        shapes = ", ".join(f"{name} {shape}" for name, shape in parts.items())
        return f"Batch({shapes}, mask {_shape(self.mask)}, latents: {', '.join(latents) or 'none'})"

    def __getitem__(self, examples: "slice | Tensor") -> "Batch[Inputs]":
        """Return a batch of some of the examples, with their latents; see `take` for numbers.

        Args:
            examples: a slice, their numbers, or a mask [batch] bool.

        Raises:
            TypeError: for a single number: an example alone would be no batch.
        """
        if isinstance(examples, int):
            raise TypeError(
                f"a batch is indexed by a slice, a list of numbers or a mask, got {examples}: "
                f"write batch[{examples} : {examples + 1}] for a batch of that example"
            )
        if isinstance(self.inputs, tuple):
            inputs = tuple(part[examples] for part in self.inputs)
        else:
            inputs = self.inputs[examples]
        return Batch(
            inputs=cast(Inputs, inputs),
            targets=self.targets[examples],
            mask=self.mask[examples],
            latents={name: value[examples] for name, value in self.latents.items()},
        )

    def take(self, examples: "Sequence[int] | Tensor") -> "Batch[Inputs]":
        """Return a batch of the examples with these numbers, in this order, some perhaps twice.

        Raises:
            IndexError: there is no example with one of the numbers.
        """
        return self[torch.as_tensor(examples, dtype=torch.long, device=self.targets.device)]

    def parts(self, size: int) -> "Iterator[Batch[Inputs]]":
        """Return the batch in pieces of `size` examples, the last of what is left."""
        for start in range(0, len(self), size):
            yield self[start : start + size]

    @staticmethod
    def cat(batches: "Sequence[Batch[Inputs]]") -> "Batch[Inputs]":
        """Return the examples of several batches of the same widths in one, in their order.

        Raises:
            ValueError: there are none.
        """
        if not batches:
            raise ValueError("batches must not be empty, got none")
        first = batches[0]
        if isinstance(first.inputs, tuple):
            inputs = tuple(map(torch.cat, zip(*(b.inputs for b in batches), strict=True)))
        else:
            inputs = torch.cat([cast(Tensor, batch.inputs) for batch in batches])
        return Batch(
            inputs=cast(Inputs, inputs),
            targets=torch.cat([batch.targets for batch in batches]),
            mask=torch.cat([batch.mask for batch in batches]),
            latents={
                name: torch.cat([batch.latents[name] for batch in batches])
                for name in first.latents
            },
        )

    def to(self, device: str | torch.device) -> "Batch[Inputs]":
        """Return the same batch with every tensor on `device`."""
        if isinstance(self.inputs, tuple):
            inputs = tuple(part.to(device) for part in self.inputs)
        else:
            inputs = self.inputs.to(device)
        return Batch(
            inputs=cast(Inputs, inputs),
            targets=self.targets.to(device),
            mask=self.mask.to(device),
            latents={name: value.to(device) for name, value in self.latents.items()},
        )


def _shape(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
