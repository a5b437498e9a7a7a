"""What all probes share: which models they take, how hooks are named, how a model is run."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

Inputs = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]
"""What a model is called with: one tensor, positional arguments, or keyword arguments."""


@runtime_checkable
class HookedModel(Protocol):
    """A model that TransformerLens can hook: a HookedRootModule or a TransformerBridge."""

    @property
    def hook_dict(self) -> Mapping[str, Any]:
        """Hook points by name."""
        ...

    @property
    def hooks(self) -> Callable[..., Any]:
        """`hooks(fwd_hooks=[(name, function)])`: a context in which the hooks are attached."""
        ...

    @property
    def run_with_hooks(self) -> Callable[..., Any]:
        """One forward pass with hooks."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass."""
        ...


def check_model(model: HookedModel) -> None:
    """Refuse what cannot be hooked.

    Raises:
        TypeError: the model is no `nn.Module` with `hook_dict`, `hooks` and `run_with_hooks`.
        ValueError: the model, or a part of it, was compiled.
    """
    compiled = _compiled_part(model)
    if compiled is not None:
        raise ValueError(
            f"model is compiled (at {compiled!r}), and hooks added after torch.compile are "
            "silently ignored; pass the eager model: compile a separate handle, `fast = "
            "torch.compile(model)`, train through `fast` and analyse `model`"
        )
    if not (isinstance(model, nn.Module) and isinstance(model, HookedModel)):
        raise TypeError(
            "model must be an nn.Module with hook_dict, hooks and run_with_hooks (a "
            "HookedRootModule that called setup(), or a TransformerBridge), "
            f"got {type(model).__name__}"
        )


def resolve_hooks(model: HookedModel, pattern: str) -> list[str]:
    """Hook names that `pattern` stands for, in natural order (layer 10 after layer 9).

    Args:
        pattern: a hook name, or a glob that is matched part by part between the dots:
            `blocks.*.attn.hook_pattern` means each layer's pattern, `blocks.[01].*.hook_*` the
            hooks one level inside the first two layers.

    Returns:
        At least one name; exactly one when `pattern` is a hook name.

    Raises:
        KeyError: nothing matches; the message lists the nearest names.
    """
    names = list(model.hook_dict)
    if pattern in names:
        return [pattern]
    parts = pattern.split(".")
    matches = [name for name in names if _matches(name.split("."), parts)]
    if not matches:
        near = get_close_matches(pattern, names, n=5, cutoff=0.0)
        raise KeyError(
            f"no hook {pattern!r} in {type(model).__name__}; nearest: {', '.join(near)} "
            f"({len(names)} hooks in all, see model.hook_dict)"
        )
    return sorted(matches, key=natural_key)


def is_glob(pattern: str) -> bool:
    """Whether `pattern` has wildcards."""
    return any(sign in pattern for sign in "*?[")


def natural_key(name: str) -> list[tuple[bool, int, str]]:
    """Sort key by which numbers inside a name count as numbers."""
    return [
        (part.isdigit(), int(part) if part.isdigit() else 0, part)
        for part in re.split(r"(\d+)", name)
    ]


def layer_numbers(pattern: str, names: Sequence[str]) -> list[int]:
    """The layer (or step) number in each name that the glob `pattern` stands for.

    Raises:
        ValueError: the names differ in more than one number, so that no single `layer` axis could
            hold them, or a name has no number.
    """
    parts = [name.split(".") for name in names]
    varying = [i for i, column in enumerate(zip(*parts, strict=False)) if len(set(column)) > 1]
    if not varying:
        varying = [i for i, part in enumerate(parts[0]) if part.isdigit()][:1]
    if len(varying) != 1 or not all(part[varying[0]].isdigit() for part in parts):
        raise ValueError(
            f"hook pattern {pattern!r} must match names that differ in one layer number only, but "
            f"it matches {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}"
        )
    return [int(part[varying[0]]) for part in parts]


@contextmanager
def evaluating(model: HookedModel) -> Iterator[None]:
    """Evaluation mode without gradients; each part gets its own training flag back at the end."""
    parts = list(_modules(model))
    flags = [part.training for part in parts]
    for part in parts:
        part.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for part, flag in zip(parts, flags, strict=True):
            part.training = flag


def call(model: HookedModel, inputs: Inputs) -> Any:
    """The model's output for a tensor, a tuple of arguments or a mapping of keyword arguments."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    if isinstance(inputs, tuple):
        return model(*inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    raise TypeError(
        "inputs must be a Tensor, a tuple (arguments) or a mapping (keyword arguments), "
        f"got {type(inputs).__name__}"
    )


def _matches(name: list[str], pattern: list[str]) -> bool:
    return len(name) == len(pattern) and all(map(fnmatchcase, name, pattern))


def _modules(model: HookedModel) -> Iterator[nn.Module]:
    # A TransformerBridge keeps the wrapped model out of its registered children.
    roots = [model, *vars(model).values()]
    seen = dict.fromkeys(
        chain.from_iterable(root.modules() for root in roots if isinstance(root, nn.Module))
    )
    return iter(seen)


def _compiled_part(model: object) -> str | None:
    """The name of a compiled part of the model, "the model" for the root, None when eager."""
    if not isinstance(model, nn.Module):
        return None
    # Imported here: 2 s, and only ever needed beside a model that has long been built.
    from torch._dynamo.eval_frame import OptimizedModule

    for name, part in model.named_modules():
        forward = part.forward
        # torch.compile marks a function with the original; torch.compiler.disable does so too.
        wrapped = getattr(forward, "_torchdynamo_orig_callable", None) is not None
        disabled = getattr(forward, "_torchdynamo_disable", False)
        if (
            isinstance(part, OptimizedModule)
            or part._compiled_call_impl is not None
            or (wrapped and not disabled)
        ):
            return name or "the model"
    return None
