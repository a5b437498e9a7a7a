"""Stacks of blocks with their own or shared weights, and models that can run extra steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import nn
from transformer_lens import HookedRootModule

from mechanisms.hooking import hook_tree, remove_hook_points

Component = TypeVar("Component", bound=nn.Module)


def stack_blocks(
    build: Callable[[], Component], n_layers: int, *, shared: bool
) -> tuple[Component | None, nn.ModuleList]:
    """The core of a model, None unless its weights are shared, and its blocks.

    With shared weights the weights live once, in the core, and `blocks[t]` only holds the hook
    points of step t; otherwise each block has its own weights, and there is no core.
    """
    if not shared:
        return None, nn.ModuleList(build() for _ in range(n_layers))
    core = build()
    blocks = nn.ModuleList(hook_tree(core) for _ in range(n_layers))
    remove_hook_points(core)
    return core, blocks


def add_steps(blocks: nn.ModuleList, n_steps: int, *, n_layers: int, shared: bool) -> bool:
    """Add the hook points of steps beyond those trained; return whether any were missing.

    Raises:
        ValueError: n_steps is less than 1, or differs from n_layers without shared weights.
    """
    if n_steps < 1 or (not shared and n_steps != n_layers):
        allowed = "at least 1" if shared else f"{n_layers}"
        raise ValueError(f"n_steps must be {allowed} with shared={shared}, got {n_steps}")
    n_missing = n_steps - len(blocks)
    blocks.extend(hook_tree(blocks[0]) for _ in range(n_missing))
    return n_missing > 0


class SteppedModel(HookedRootModule, ABC):
    """A model that, with shared weights, can run more or fewer steps than in training."""

    def __init__(self, n_layers: int, *, shared: bool):
        super().__init__()
        self._n_layers, self._shared = n_layers, shared

    @abstractmethod
    def _stacks(self) -> Sequence[nn.ModuleList]:
        """The stacks of blocks, all of which run for the same number of steps."""

    def set_steps(self, n_steps: int) -> None:
        """Create hook points for steps beyond those trained, so that hooks can name them.

        Raises:
            ValueError: n_steps is less than 1, or is not the number of layers although weights
                are not shared.
        """
        for blocks in self._stacks():
            if add_steps(blocks, n_steps, n_layers=self._n_layers, shared=self._shared):
                self.setup()

    def _prepare_steps(self, n_steps: int | None) -> int:
        """The number of steps of a forward pass, whose hook points exist afterwards."""
        if n_steps is None or n_steps == self._n_layers:
            return self._n_layers
        self.set_steps(n_steps)
        return n_steps
