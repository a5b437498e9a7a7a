"""What every task hands out."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples of a task with the ground truth behind each of them.

    Attributes:
        inputs: what the model reads, [batch, pos, d_in] (vectors) or [batch, pos] (token ids).
        targets: what it should answer, [batch, n_targets]; which positions of the output it is
            read from is told by the task.
        mask: [batch, n_targets] bool, True where the target counts.
        latents: the named ground truth, each [batch, ...]; a model never sees it.
    """

    inputs: Tensor
    targets: Tensor
    mask: Tensor
    latents: dict[str, Tensor]

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def __getitem__(self, examples: slice) -> "Batch":
        """Return a batch of some of the examples, with their latents."""
        return Batch(
            inputs=self.inputs[examples],
            targets=self.targets[examples],
            mask=self.mask[examples],
            latents={name: value[examples] for name, value in self.latents.items()},
        )

    def parts(self, size: int) -> Iterator["Batch"]:
        """Return the batch in pieces of `size` examples, the last of what is left."""
        for start in range(0, len(self), size):
            yield self[start : start + size]

    def to(self, device: str | torch.device) -> "Batch":
        """Return the same batch with every tensor on `device`."""
        return Batch(
            inputs=self.inputs.to(device),
            targets=self.targets.to(device),
            mask=self.mask.to(device),
            latents={name: value.to(device) for name, value in self.latents.items()},
        )
