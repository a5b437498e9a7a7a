"""A batch of examples with their ground truth: what every task returns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Generic, cast

import torch
from torch import Tensor
from typing_extensions import TypeVar

Inputs = TypeVar("Inputs", bound="Tensor | tuple[Tensor, ...]", default=Tensor)


@dataclass(frozen=True, eq=False)
class Batch(Generic[Inputs]):
    """Examples of a task with the ground truth behind each of them.

    Attributes:
        inputs: the model's input, for example [batch, pos, d_in] (vectors) or [batch, pos]
            (token ids); or a tuple of several inputs, in the order of the model's arguments.
        targets: the correct answers, [batch, n_targets]; the task documents at which positions
            the model's output is compared with them.
        mask: [batch, n_targets] bool, True where the target counts.
        latents: the named ground truth, each [batch, ...]; never part of the inputs.

    Example:
        >>> batch[:5].inputs.shape[0]
        5
    """

    inputs: Inputs
    targets: Tensor
    mask: Tensor
    latents: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.targets)

    def __repr__(self) -> str:
        """Return shapes and dtypes: `Batch(inputs [2, 5] int64, ..., latents: depth [2] int64)`."""
        inputs = self.inputs if isinstance(self.inputs, tuple) else (self.inputs,)
        latents = [f"{name} {_shape(value)}" for name, value in self.latents.items()]
        parts = {"inputs": " and ".join(map(_shape, inputs)), "targets": _shape(self.targets)}
        shapes = ", ".join(f"{name} {shape}" for name, shape in parts.items())
        return f"Batch({shapes}, mask {_shape(self.mask)}, latents: {', '.join(latents) or 'none'})"

    def __getitem__(self, examples: "slice | Tensor") -> "Batch[Inputs]":
        """Return a batch of the selected examples, with their latents.

        Args:
            examples: a slice, indices, or a mask [batch] bool.

        Raises:
            TypeError: for a single index, since a batch keeps its first dimension.
        """
        if isinstance(examples, Integral) or (isinstance(examples, Tensor) and not examples.ndim):
            number = int(examples)
            raise TypeError(
                f"examples must be a slice, a tensor of indices or a mask, got {number}: "
                f"write batch[{number} : {number + 1}] for a batch of that example"
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
        """Return a batch of the examples at these indices, in this order; indices may repeat.

        Raises:
            IndexError: an index is out of range.
            TypeError: for a mask, or a single index.
        """
        indices = torch.as_tensor(examples, device=self.targets.device)
        if indices.dtype == torch.bool:
            raise TypeError("examples must be indices, got a mask: write batch[mask]")
        return self[indices.long()]

    def parts(self, size: int) -> "Iterator[Batch[Inputs]]":
        """Yield batches of `size` consecutive examples; the last one may be smaller.

        Raises:
            ValueError: `size` is less than 1.
        """
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        for start in range(0, len(self), size):
            yield self[start : start + size]

    @staticmethod
    def cat(batches: "Sequence[Batch[Inputs]]") -> "Batch[Inputs]":
        """Concatenate batches whose tensors agree in all dimensions but the first.

        Raises:
            ValueError: `batches` is empty.
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
