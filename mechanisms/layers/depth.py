"""Blocks over depth: one for each layer, or one whose weights all steps share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from mechanisms.hooking import hook_tree, remove_hook_points

Component = TypeVar("Component", bound=nn.Module)


def stack_blocks(
    build: Callable[[], Component], n_layers: int, *, shared: bool
) -> tuple[Component | None, nn.ModuleList]:
    """A model's core, if its weights are shared, and its blocks.

    With shared weights these live once, in the core, and `blocks[t]` holds the hook points of step
    t alone; else each block has its own, and there is no core.
    """
    if not shared:
        return None, nn.ModuleList(build() for _ in range(n_layers))
    core = build()
    blocks = nn.ModuleList(hook_tree(core) for _ in range(n_layers))
    remove_hook_points(core)
    return core, blocks


def add_steps(blocks: nn.ModuleList, n_steps: int, *, n_layers: int, shared: bool) -> bool:
    """Give steps beyond those trained with hook points too; whether there were any.

    Raises:
        ValueError: if n_steps is less than 1, or the weights are not shared and it is not
            their number of layers.
    """
    if n_steps < 1 or (not shared and n_steps != n_layers):
        allowed = "at least 1" if shared else f"{n_layers}"
        raise ValueError(f"n_steps must be {allowed} with shared={shared}, got {n_steps}")
    missing = n_steps - len(blocks)
    blocks.extend(hook_tree(blocks[0]) for _ in range(missing))
    return missing > 0
