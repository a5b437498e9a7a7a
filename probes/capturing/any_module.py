"""Hooks for any model: inputs and outputs of its submodules, by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from probes.capturing.hooking import HookedModel
from probes.checking import checked

_IN, _OUT, _SECOND = "hook_in", "hook_out", "hook_out_1"


@checked
def hooked(model: nn.Module, **arguments: Any) -> HookedModel:
    """Make any module a model with hooks, or call a model with further arguments.

    A module gets the hooks `NAME.hook_in` and `NAME.hook_out` for each of its submodules (the names
    of `named_modules`): the first tensor among its inputs, and that of its output; and
    `NAME.hook_out_1`, the second tensor of an output, such as the weights of Hugging Face's
    attention modules (with `attn_implementation="eager"`). These can be captured, but interventions
    refuse them, since nothing reads what the module returns beside its result. The module itself
    stays as it is: hooks are attached while it is called, and only those that are listened to. The
    output is a tensor, too: `.logits` of a Hugging Face output, or else its first tensor.

    A model that has hooks keeps them. Hooks raise a ValueError at nested tensors, to which
    `nn.TransformerEncoder` turns padded inputs unless it has `enable_nested_tensor=False`.

    Args:
        model: any `nn.Module`, such as a model of `transformers`; or a model with hooks.
        arguments: keyword arguments of each call, such as `n_steps=9` or `use_cache=False`.

    Returns:
        A model that all probes accept. It shares the weights.

    Example:
        >>> model = hooked(torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 3)))
        >>> codes = {"code": Quantity("1.hook_out", ("example", "pos", "d_model"))}
        >>> capture(model, batches, codes)["code"].shape
        (80, 5, 3)
    """
    if isinstance(model, HookedModel):
        return _WithArguments(model, arguments)
    return _Hooked(model, arguments)


def bound_arguments(module: nn.Module) -> Mapping[str, Any]:
    """The arguments with which `hooked` calls a model."""
    return module._arguments if isinstance(module, _WithArguments | _Hooked) else {}


class _WithArguments(nn.Module):
    """A model with hooks that is called with further arguments."""

    def __init__(self, model: Any, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.model, self._arguments = model, dict(arguments)

    @property
    def hook_dict(self) -> Mapping[str, Any]:
        return self.model.hook_dict

    @property
    def hooks(self) -> Callable[..., Any]:
        return self.model.hooks

    def run_with_hooks(self, *inputs: Any, fwd_hooks: list[Any], **settings: Any) -> Any:
        with self.hooks(fwd_hooks=fwd_hooks):
            return self(*inputs, **settings)

    def run_with_cache(self, *inputs: Any, **settings: Any) -> Any:
        return self.model.run_with_cache(*inputs, **settings, **self._arguments)

    def forward(self, *inputs: Any, **settings: Any) -> Any:
        return self.model(*inputs, **settings, **self._arguments)


class _Hooked(HookedRootModule):
    """A module whose submodules have hook points outside of it."""

    def __init__(self, model: nn.Module, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.model, self._arguments = model, dict(arguments)
        # Not `setup()`, which would write names into the user's modules.
        self.hook_dict = {
            f"{name}.{side}": HookPoint()
            for name, _ in model.named_modules()
            if name
            for side in (_IN, _OUT, _SECOND)
        }
        for name, point in self.hook_dict.items():
            point.name = name
        self.mod_dict = dict(self.hook_dict)

    def forward(self, *inputs: Any, **settings: Any) -> Any:
        with self._listening():
            output = self.model(*inputs, **settings, **self._arguments)
        return next(iter(_tensors(output)), output)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        handles = []
        try:
            for name, module in self.model.named_modules():
                if not name:
                    continue
                if _is_used(point := self.hook_dict[f"{name}.{_IN}"]):
                    edit = _edit_inputs(point)
                    handles.append(module.register_forward_pre_hook(edit, with_kwargs=True))
                for number, side in enumerate((_OUT, _SECOND)):
                    if _is_used(point := self.hook_dict[f"{name}.{side}"]):
                        edit = _edit_output(point, number)
                        handles.append(module.register_forward_hook(edit))
            yield
        finally:
            for handle in handles:
                handle.remove()


def _is_used(point: HookPoint) -> bool:
    return bool(point.fwd_hooks or point.bwd_hooks)


def _edit_inputs(point: HookPoint) -> Callable[..., Any]:
    def edit(
        module: nn.Module, inputs: tuple[Any, ...], settings: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = [*inputs, *settings.values()]
        for number, value in enumerate(given):
            if isinstance(value, Tensor):
                given[number] = _shown(point, value)
                break
        split = len(inputs)
        return tuple(given[:split]), dict(zip(settings, given[split:], strict=True))

    return edit


def _edit_output(point: HookPoint, number: int) -> Callable[..., Any]:
    def edit(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        tensors = _tensors(output)
        if len(tensors) <= number:
            return output
        return _replaced(output, tensors[number], _shown(point, tensors[number]))

    return edit


def _shown(point: HookPoint, activation: Tensor) -> Tensor:
    if activation.is_nested:
        raise ValueError(
            f"hooks need padded tensors, got a nested one at {point.name!r}: make the "
            "nn.TransformerEncoder with enable_nested_tensor=False, or set its attribute "
            "use_nested_tensor to False"
        )
    return point(activation)


def _tensors(output: Any) -> list[Tensor]:
    """A tensor itself, or those of a tuple, mapping or dataclass, the `logits` first."""
    if not isinstance(output, Mapping) and is_dataclass(output):
        output = _named(output)
    if isinstance(output, Mapping):
        values = [output[name] for name in sorted(output, key=lambda name: name != "logits")]
    else:
        values = list(output) if isinstance(output, tuple | list) else [output]
    return [value for value in values if isinstance(value, Tensor)]


def _named(output: Any) -> dict[str, Any]:
    """The values of the fields of a dataclass."""
    return {field.name: getattr(output, field.name) for field in fields(output)}


def _replaced(output: Any, old: Tensor, new: Tensor) -> Any:
    """The output of a module with another tensor in place of an old one."""
    if isinstance(output, Tensor) or new is old:
        return new if isinstance(output, Tensor) else output
    if isinstance(output, Mapping):
        changed = copy(output)
        changed[next(name for name, value in output.items() if value is old)] = new  # pyright: ignore[reportIndexIssue]
        return changed
    if is_dataclass(output):
        changed = copy(output)
        name = next(name for name, value in _named(output).items() if value is old)
        object.__setattr__(changed, name, new)  # it may be frozen
        return changed
    changed = [new if value is old else value for value in output]
    return type(output)(*changed) if hasattr(output, "_fields") else type(output)(changed)
