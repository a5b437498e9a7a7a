"""Inputs of a model: call it on them, count and slice examples, and check its answers."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from torch import Tensor

from probes.capturing.hooking import HookedModel
from probes.checking import described, shape_of

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""The inputs of a model: one tensor, positional arguments, or keyword arguments.

Tensors are [example, ...]; other values, such as a number of steps, are the same for all examples:
arrays and lists with as many rows as there are examples are refused where examples are sliced.
"""


Edit = Callable[[Tensor, int], Tensor]
"""Maps the activation of a hook and the number of its firing in the pass to a new activation."""


def call(model: Callable[..., Any], inputs: Inputs, edits: Mapping[str, Edit] | None = None) -> Any:
    """Call the model with a tensor, a tuple of arguments or a mapping of keyword arguments.

    Args:
        model: the model; a `HookedModel` if there are edits.
        inputs: its inputs.
        edits: functions by hook name that replace the activation of the hook.

    Raises:
        RuntimeError: a hook in `edits` did not fire in the forward pass.
    """
    if edits:
        return _call_edited(cast(HookedModel, model), inputs, edits)
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


def _call_edited(model: HookedModel, inputs: Inputs, edits: Mapping[str, Edit]) -> Any:
    steps = dict.fromkeys(edits, 0)

    def hook_function(name: str) -> Callable[..., Tensor]:
        def edit(activation: Tensor, hook: Any) -> Tensor:
            steps[name] += 1
            return edits[name](activation, steps[name] - 1)

        return edit

    with model.hooks(fwd_hooks=[(name, hook_function(name)) for name in edits]):
        output = call(model, inputs)
    if silent := [name for name, step in steps.items() if not step]:
        raise RuntimeError(f"hooks must fire in the forward pass, silent: {silent}")
    return output


def once(name: str, edit: Callable[[Tensor], Tensor]) -> Edit:
    """An edit of a hook that fires once in a pass.

    Raises:
        RuntimeError: when it is called: the hook fired again.
    """

    def edit_once(activation: Tensor, step: int) -> Tensor:
        if step:
            raise RuntimeError(f"hook {name!r} must fire once in a forward pass, fired again")
        return edit(activation)

    return edit_once


def check_answer(answers: Tensor, n_examples: int) -> Tensor:
    """Check the answers of a model to some examples and move them to the CPU.

    Raises:
        TypeError: the answers are not integers.
        ValueError: the answers are not a tensor with one row per example.
    """
    if not isinstance(answers, Tensor) or answers.ndim == 0 or len(answers) != n_examples:
        shape = shape_of(answers)
        raise ValueError(f"answer must return a tensor [{n_examples} examples, ...], got {shape}")
    if answers.is_floating_point() or answers.is_complex():
        raise TypeError(f"answer must return integers, got {answers.dtype}")
    return answers.cpu()


def count_examples(name: str, inputs: Inputs) -> int:
    """Count the examples in a model's inputs.

    Raises:
        ValueError: there are none, or tensors differ in their number of examples.
    """
    tensors = _tensors(inputs)
    counts = {len(tensor) if tensor.ndim else 0 for tensor in tensors}
    if len(counts) != 1 or counts == {0}:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        got = f"shapes {shapes}" if tensors else _described(inputs)
        raise ValueError(
            f"{name} must be tensors with the same number of examples (at least 1), got {got}"
        )
    return counts.pop()


def count_positions(inputs: Inputs) -> set[int]:
    """The numbers of positions in a model's inputs [example, pos, ...]."""
    return {tensor.shape[1] for tensor in _tensors(inputs) if tensor.ndim > 1}


def describe(inputs: Inputs) -> str:
    """The shapes of the tensors in a model's inputs, and the other values."""
    return repr(
        [
            (name, value.shape if isinstance(value, Tensor) else value)
            for name, value in _named(inputs).items()
        ]
    )


def _tensors(inputs: Inputs) -> list[Tensor]:
    return [value for value in _named(inputs).values() if isinstance(value, Tensor)]


def _described(inputs: Inputs) -> str:
    values = [f"{name!r}: {described(value)}" for name, value in _named(inputs).items()]
    return f"no tensor but {', '.join(values) or 'nothing'}"


def _named(inputs: Inputs) -> Mapping[Any, Any]:
    if isinstance(inputs, Mapping):
        return inputs
    return dict(enumerate(inputs if isinstance(inputs, tuple) else [inputs]))


def take_rows(inputs: Inputs, rows: slice | Tensor) -> Inputs:
    """Take a slice of the examples, or those of these indices, in the same layout.

    Raises:
        TypeError: an array or a list has as many rows as there are examples, and would not be
            sliced with them.
    """
    n_examples = count_examples("inputs", inputs)
    for name, value in _named(inputs).items():
        is_rows = isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim)
        if is_rows and len(value) == n_examples:
            raise TypeError(
                f"inputs with a row for each of the {n_examples} examples must be tensors, got "
                f"{name!r}: {described(value)} (a tuple is passed on as it is)"
            )

    def take(value: Any) -> Any:
        return value[rows] if isinstance(value, Tensor) else value

    if isinstance(inputs, Tensor):
        return inputs[rows]
    if isinstance(inputs, Mapping):
        return {name: take(value) for name, value in inputs.items()}
    return tuple(map(take, inputs))


def slices(n_examples: int, batch_size: int) -> list[slice]:
    """Slices of at most `batch_size` examples that cover all examples.

    Raises:
        ValueError: `batch_size` is less than 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    starts = range(0, n_examples, batch_size)
    return [slice(start, min(start + batch_size, n_examples)) for start in starts]
