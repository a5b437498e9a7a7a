"""Costs of a model: parameters, operations of a forward pass, and depth."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import xarray as xr
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from probes.capturing.hooking import evaluating
from probes.checking import checked

Answer = Callable[[nn.Module], object]
"""A function that runs a model on some examples."""


@checked
def count_parameters(model: nn.Module) -> int:
    """Count the trained parameters of a model; shared weights count once.

    Example:
        >>> count_parameters(torch.nn.Linear(3, 4))
        16
    """
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@checked
def count_operations(
    model: nn.Module, answer: Answer, n_examples: int, *, of_layers: bool = False
) -> float:
    """Count the floating-point operations of a forward pass in evaluation mode, per example.

    Uses torch's counter: matrix products and convolutions only; a multiplication with an addition
    counts as two. Fused kernels, into which the counter does not see, are switched off meanwhile.

    Args:
        model: the model; the training flags of its modules are restored.
        answer: runs the model on some examples.
        n_examples: number of these examples.
        of_layers: without batched matrix products, such as those of queries and keys, which
            counters that see modules alone (such as pytorch-OpCounter) leave out.

    Raises:
        ValueError: `n_examples` is less than 1.

    Example:
        >>> count_operations(torch.nn.Linear(3, 4), lambda model: model(torch.zeros(2, 3)), 2)
        24.0
    """
    if n_examples < 1:
        raise ValueError(f"n_examples must be at least 1, got {n_examples}")
    with evaluating(model), _without_fused_kernels(), FlopCounterMode(display=False) as counter:
        answer(model)
    counts = counter.get_flop_counts().get("Global", {})
    batched = [torch.ops.aten.bmm, torch.ops.aten.baddbmm] if of_layers else []
    return sum(n for operation, n in counts.items() if operation not in batched) / n_examples


@contextmanager
def _without_fused_kernels() -> Iterator[None]:
    # Not `mkldnn.flags()`, which also sets the precision, and warns.
    backends: tuple[Any, ...] = (torch.backends.mkldnn, torch.backends.cudnn)
    enabled = [backend.enabled for backend in backends]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for backend in backends:
            backend.enabled = False
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for backend, flag in zip(backends, enabled, strict=True):
            backend.enabled = flag


@checked
def count_blocks(model: nn.Module) -> int:
    """Count the blocks, layers or steps of a model by the numbers in its module names.

    These are `blocks.{i}`, `layers.{i}` and `steps.{i}`, in the model or in a part of it, such as
    `encoder.layers.{i}`; of several the most, without those within another one. Weights shared over
    depth count at each step. 0 if no name has such a number, as in `Sequential`.

    Example:
        >>> config = mechanisms.NeuralDataRouterConfig.named(
        ...     "ndr", d_input=10, d_output=3, d_model=16, d_mlp=32, n_heads=4, n_steps=6
        ... )
        >>> count_blocks(mechanisms.NeuralDataRouter(config))
        6
    """
    names = "\n".join(name for name, _ in model.named_modules(remove_duplicate=False))
    pattern = r"^(?:[^\d\W]\w*\.)*?(?:blocks|layers|steps)\.(\d+)(?:\.|$)"
    numbers = re.findall(pattern, names, re.MULTILINE)
    return max((int(number) + 1 for number in numbers), default=0)


@checked
def measure_costs(model: nn.Module, answer: Answer, n_examples: int) -> xr.Dataset:
    """Measure `parameters`, `operations`, `layer_operations` and `depth` of a model, as scalars.

    See `count_parameters`, `count_operations` (which takes the same arguments; `layer_operations`
    are those `of_layers`) and `count_blocks`.

    Example:
        >>> costs = measure_costs(torch.nn.Linear(3, 4), lambda model: model(torch.zeros(2, 3)), 2)
        >>> float(costs["parameters"])
        16.0
    """
    operations = "floating-point operations of a forward pass, for one example"
    counts = {
        "parameters": (count_parameters(model), "trained parameters"),
        "operations": (count_operations(model, answer, n_examples), operations),
        "layer_operations": (
            count_operations(model, answer, n_examples, of_layers=True),
            f"{operations}, without products of activations",
        ),
        "depth": (count_blocks(model), "blocks, or steps"),
    }
    return xr.Dataset(
        {name: ((), count, {"long_name": long_name}) for name, (count, long_name) in counts.items()}
    )
