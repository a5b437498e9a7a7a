"""Weights of published models: each is taken once, and its shape is checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)
Weights = dict[str, Tensor]


class PublishedWeights:
    """Weights by their names; it knows which of them were used.

    Args:
        weights: the weights.
        kind: what errors call them, such as "state".
    """

    def __init__(self, weights: Mapping[str, Tensor], kind: str = "state"):
        self.unused = {name: torch.as_tensor(weight) for name, weight in weights.items()}
        self.kind, self.prefix = kind, ""
        self._read: dict[str, list[int]] = {}

    def below(self, prefix: str) -> PublishedWeights:
        """The weights with this prefix, by names without it."""
        part = PublishedWeights({}, self.kind)
        part.unused, part.prefix = self.unused, self.prefix + prefix
        part._read = self._read
        return part

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.unused

    def has(self, prefix: str) -> bool:
        """Whether there is a weight whose name begins with `prefix`."""
        return any(name.startswith(self.prefix + prefix) for name in self.unused)

    def sizes(self, name: str, *dims: str) -> tuple[int, ...]:
        """The sizes of a weight that must have these dims, from which settings follow."""
        weight = self._get(name, f"[{', '.join(dims)}]")
        if weight.ndim != len(dims):
            raise ValueError(
                f"{self.prefix}{name} must be [{', '.join(dims)}], got {list(weight.shape)}"
            )
        self._read[self.prefix + name] = list(weight.shape)
        return tuple(weight.shape)

    def take(self, name: str, *shape: int) -> Tensor:
        """The weight, which must have this shape."""
        weight = self._get(name, str(list(shape)))
        if weight.shape != shape:
            sources = ", ".join(f"{source} {sizes}" for source, sizes in self._read.items())
            raise ValueError(
                f"{self.prefix}{name} must be {list(shape)}, got {list(weight.shape)}; sizes "
                f"follow from {sources}"
            )
        return self.unused.pop(self.prefix + name).detach()

    def skip(self, *names: str) -> None:
        """Pass over weights that are there but not used by their module."""
        for name in names:
            self.unused.pop(self.prefix + name, None)

    def load_into(self, module: Module, weights: Weights) -> Module:
        """The module with copies of these weights, in evaluation mode, if none is left unused."""
        if self.unused:
            raise ValueError(
                f"{self.kind} must not have weights without counterpart in {type(module).__name__} "
                f"with these settings, got {', '.join(self.unused)}"
            )
        # Assigned, not copied: a copy would convert them to the dtype of the new weights.
        copies = {
            name: weight.clone(memory_format=torch.contiguous_format)
            for name, weight in weights.items()
        }
        module.load_state_dict(copies, assign=True)
        return module.eval()

    def _get(self, name: str, expected: str) -> Tensor:
        full = self.prefix + name
        if full not in self.unused:
            raise ValueError(f"{self.kind} must have {full} {expected}, got none")
        return self.unused[full]


def read_norm(source: PublishedWeights, theirs: str, ours: str, d_model: int) -> Weights:
    """The scale and the shift of a LayerNorm."""
    parts = ("weight", "bias")
    return {f"{ours}.{part}": source.take(f"{theirs}.{part}", d_model) for part in parts}
