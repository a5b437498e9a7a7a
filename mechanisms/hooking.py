"""What every hooked mechanism shares: asking who listens, and hook points without weights."""

from __future__ import annotations

from typing import TypeVar, cast

from torch import nn
from transformer_lens.hook_points import HookPoint

Component = TypeVar("Component", bound=nn.Module)


def observed(*modules: nn.Module) -> bool:
    """Whether anyone listens, forward or backward, to a hook point or a part of `modules`.

    A mechanism asks this before it takes a short cut that would skip what they see.
    """
    return any(
        part._forward_hooks
        or part._forward_pre_hooks
        or part._backward_hooks
        or part._backward_pre_hooks
        for module in set(modules)
        for part in module.modules()
    )


def hook_tree(module: Component) -> Component:
    """A bare tree with a fresh HookPoint wherever `module` has one, and no weights.

    Passed as the `hooks` argument of a component's forward, it names the activations of one
    step of a network whose weights are shared over depth. Typed as the component that it
    mirrors, since its hook points are all that a forward pass asks of it.
    """
    tree = nn.Module()
    for name, child in module.named_children():
        if isinstance(child, HookPoint):
            tree.add_module(name, HookPoint())
        elif any(isinstance(part, HookPoint) for part in child.modules()):
            tree.add_module(name, hook_tree(child))
    return cast(Component, tree)


def remove_hook_points(module: nn.Module) -> None:
    """Take every hook point out of `module`, whose forward then needs a `hooks` tree."""
    for name, child in list(module.named_children()):
        if isinstance(child, HookPoint):
            delattr(module, name)
        else:
            remove_hook_points(child)
