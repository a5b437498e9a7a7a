"""Models with hooks: the interface that probes accept, hook names, and evaluation mode."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from probes.checking import checked

Result = TypeVar("Result")


@runtime_checkable
class HookedModel(Protocol):
    """A model that TransformerLens can hook: a HookedRootModule or a TransformerBridge.

    Example:
        >>> isinstance(model, HookedModel), isinstance(torch.nn.Linear(2, 2), HookedModel)
        (True, False)
        >>> model.hook_dict["blocks.1.attn.hook_pattern"].name
        'blocks.1.attn.hook_pattern'
    """

    @property
    def hook_dict(self) -> Mapping[str, Any]:
        """Hook points by name."""
        ...

    @property
    def hooks(self) -> Callable[..., Any]:
        """`hooks(fwd_hooks=[(name, function)])`: a context manager that attaches the hooks."""
        ...

    @property
    def run_with_hooks(self) -> Callable[..., Any]:
        """One forward pass with hooks."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass."""
        ...


def check_model(model: HookedModel) -> None:
    """Raise an error for a model that cannot be hooked.

    Raises:
        TypeError: the model is no `nn.Module` with `hook_dict`, `hooks` and `run_with_hooks`.
        ValueError: the model, or a submodule, is compiled.
    """
    compiled = _compiled_part(model)
    if compiled is not None:
        raise ValueError(
            f"model must be eager, got one that is compiled (at {compiled!r}): hooks added after "
            "torch.compile are silently ignored. Pass the eager model: compile a separate handle, "
            "`fast = torch.compile(model)`, train through `fast` and analyse `model`"
        )
    if not (isinstance(model, nn.Module) and isinstance(model, HookedModel)):
        raise TypeError(
            "model must be an nn.Module with hook_dict, hooks and run_with_hooks (a "
            "HookedRootModule that called setup(), a TransformerBridge, or probes.hooked(model)), "
            f"got {type(model).__name__}"
        )


@checked
def resolve_hooks(model: HookedModel, pattern: str) -> list[str]:
    """List the hooks that a name or glob matches, in natural order (layer 10 after layer 9).

    Args:
        model: a hooked model.
        pattern: a hook name, or a glob whose wildcards do not match dots:
            `blocks.*.attn.hook_pattern` is the pattern of each layer, `blocks.[01].*.hook_*` the
            hooks one level inside the first two layers.

    Returns:
        At least one name; exactly one if `pattern` is a hook name.

    Raises:
        KeyError: nothing matches; the message lists the nearest names.

    Example:
        >>> resolve_hooks(model, "blocks.*.attn.hook_pattern")
    """
    names = list(model.hook_dict)
    matches = _matching(names, pattern)
    if not matches:
        near = get_close_matches(pattern, names, n=5, cutoff=0.0)
        raise KeyError(
            f"hook must be one of the {len(names)} hooks of the model (see "
            f"model.hook_dict), got {pattern!r}; nearest: {', '.join(near)}"
        )
    return matches


def run_with_matches(
    model: HookedModel, patterns: Iterable[str], run: Callable[[Mapping[str, list[str]]], Result]
) -> Result:
    """Run a forward pass with the hooks that match; again if it has created more of them.

    Models create the hooks of steps, or positions, that they have not had before in the pass.

    Args:
        model: a hooked model.
        patterns: hook names and globs; see `resolve_hooks`.
        run: runs a pass, given the names that each pattern matches.

    Returns:
        What the last pass returns.

    Raises:
        KeyError: a pattern matches nothing after the pass either.
    """
    names = list(model.hook_dict)
    matches = {pattern: _matching(names, pattern) for pattern in patterns}
    while True:
        result = run(matches)
        after = {pattern: resolve_hooks(model, pattern) for pattern in matches}
        if after == matches:
            return result
        matches = after


def is_glob(pattern: str) -> bool:
    """Whether a hook pattern has wildcards."""
    return any(wildcard in pattern for wildcard in "*?[")


def natural_key(name: str) -> list[tuple[bool, int, str]]:
    """Sort key that compares numbers inside names by value."""
    return [
        (chunk.isdigit(), int(chunk) if chunk.isdigit() else 0, chunk)
        for chunk in re.split(r"(\d+)", name)
    ]


def layer_numbers(pattern: str, names: Sequence[str]) -> list[int]:
    """Read the layer (or step) number in each hook name that the glob `pattern` matches.

    Raises:
        ValueError: a name has no number, or the names differ in more than one number, so that no
            single `layer` axis can hold them.
    """
    split_names = [name.split(".") for name in names]
    varying = [i for i, parts in enumerate(zip(*split_names, strict=False)) if len(set(parts)) > 1]
    if not varying:
        varying = [i for i, part in enumerate(split_names[0]) if part.isdigit()][:1]
    if len(varying) != 1 or not all(parts[varying[0]].isdigit() for parts in split_names):
        raise ValueError(
            f"hook pattern {pattern!r} must match names that differ in one layer number only, but "
            f"it matches {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}"
        )
    return [int(parts[varying[0]]) for parts in split_names]


def broadcasts(mask: Tensor, activation: Tensor) -> bool:
    """Whether a mask has all dims of an activation, each of the same size or 1."""
    return mask.ndim == activation.ndim and all(
        size in (1, expected) for size, expected in zip(mask.shape, activation.shape, strict=True)
    )


@contextmanager
def evaluating(model: object, *, gradients: bool = False) -> Iterator[None]:
    """Run in evaluation mode, without gradients unless asked, then restore the training flags."""
    modules = modules_of(model)
    flags = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        with torch.set_grad_enabled(gradients):
            yield
    finally:
        for module, flag in zip(modules, flags, strict=True):
            module.training = flag


def _matching(names: Sequence[str], pattern: str) -> list[str]:
    if pattern in names:
        return [pattern]
    parts = pattern.split(".")
    return sorted((name for name in names if _matches(name.split("."), parts)), key=natural_key)


def _matches(name: list[str], pattern: list[str]) -> bool:
    return len(name) == len(pattern) and all(map(fnmatchcase, name, pattern))


def modules_of(model: object) -> list[nn.Module]:
    """The modules of a model, and those that its modules hold without having registered them.

    A TransformerBridge does not register the wrapped model as a child.
    """
    modules: dict[nn.Module, None] = {}
    found = [model, *vars(model).values()]
    while found:
        module = found.pop()
        if isinstance(module, nn.Module) and module not in modules:
            modules[module] = None
            found += [*module.children(), *vars(module).values()]
    return [*modules]


def _compiled_part(model: object) -> str | None:
    """Name a compiled submodule ("the model" for the root); None if the model is eager."""
    if not isinstance(model, nn.Module):
        return None
    # Imported here because the import takes 2 s.
    from torch._dynamo.eval_frame import OptimizedModule

    for name, module in model.named_modules():
        forward = module.forward
        # torch.compile marks a function with the original; torch.compiler.disable does so too.
        wrapped = getattr(forward, "_torchdynamo_orig_callable", None) is not None
        disabled = getattr(forward, "_torchdynamo_disable", False)
        if (
            isinstance(module, OptimizedModule)
            or module._compiled_call_impl is not None
            or (wrapped and not disabled)
        ):
            return name or "the model"
    return None
