"""What a model costs: its parameters, the operations of one forward pass, and its depth."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
import xarray as xr
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

Answer = Callable[[nn.Module], object]
"""What runs a model on some examples."""


def count_parameters(model: nn.Module) -> int:
    """How many numbers are trained; those of weights that are shared count once.

    Example:
        >>> count_parameters(torch.nn.Linear(3, 4))
        16
    """
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def count_operations(model: nn.Module, answer: Answer, n_examples: int) -> float:
    """Floating-point operations of a forward pass of a model in evaluation mode, per example.

    torch's own counter: matrix products and convolutions alone, a multiplication and an addition
    being two.

    Args:
        model: ends in the mode that it is in.
        answer: runs the model, which it is given, on some examples.
        n_examples: how many.

    Raises:
        ValueError: `n_examples` is less than 1.

    Example:
        >>> count_operations(torch.nn.Linear(3, 4), lambda model: model(torch.zeros(2, 3)), 2)
        24.0
    """
    if n_examples < 1:
        raise ValueError(f"n_examples must be at least 1, got {n_examples}")
    training = model.training
    model.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        answer(model)
    model.train(training)
    return counter.get_total_flops() / n_examples


def count_blocks(model: nn.Module) -> int:
    """How many blocks or steps the names of a model's hook points number; 0 if they number none.

    Those of `blocks.{i}`, `layers.{i}` and `steps.{i}`: what is shared over depth counts each time.
    """
    names = "\n".join(name for name, _ in model.named_modules())
    numbers = re.findall(r"^(?:blocks|layers|steps)\.(\d+)\.", names, re.MULTILINE)
    return max((int(number) + 1 for number in numbers), default=0)


def measure_costs(model: nn.Module, answer: Answer, n_examples: int) -> xr.Dataset:
    """`parameters`, `operations` and `depth` of a model, a number each.

    See `count_parameters`, `count_operations` (of which the arguments are) and `count_blocks`.
    """
    operations = "floating-point operations of a forward pass, for one example"
    counts = {
        "parameters": (count_parameters(model), "trained parameters"),
        "operations": (count_operations(model, answer, n_examples), operations),
        "depth": (count_blocks(model), "blocks, or steps"),
    }
    return xr.Dataset(
        {name: ((), count, {"long_name": said}) for name, (count, said) in counts.items()}
    )
