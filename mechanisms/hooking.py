"""Utilities for hook points: detecting hooks, and trees of hook points without weights."""

from __future__ import annotations

from typing import TypeVar, cast

from torch import nn
from transformer_lens.hook_points import HookPoint

Component = TypeVar("Component", bound=nn.Module)


def observed(*modules: nn.Module) -> bool:
    """Whether a forward or backward hook is registered on `modules` or their submodules.

    A mechanism checks this before it takes a faster path that skips their hook points.
    """
    return any(
        submodule._forward_hooks
        or submodule._forward_pre_hooks
        or submodule._backward_hooks
        or submodule._backward_pre_hooks
        for module in set(modules)
        for submodule in module.modules()
    )


def hook_tree(module: Component) -> Component:
    """A module tree with a new HookPoint wherever `module` has one, and no weights.

    Passed as the `hooks` argument of a component's forward, it provides the hook points of one
    step of a network whose weights are shared over depth. It is typed as the component that it
    mirrors because a forward pass uses nothing but its hook points.
    """
    tree = nn.Module()
    for name, child in module.named_children():
        if isinstance(child, HookPoint):
            tree.add_module(name, HookPoint())
        elif any(isinstance(submodule, HookPoint) for submodule in child.modules()):
            tree.add_module(name, hook_tree(child))
    return cast(Component, tree)


def remove_hook_points(module: nn.Module) -> None:
    """Delete all hook points of `module`; its forward then needs the `hooks` argument."""
    for name, child in list(module.named_children()):
        if isinstance(child, HookPoint):
            delattr(module, name)
        else:
            remove_hook_points(child)
