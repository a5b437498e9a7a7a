"""What a model costs: its parameters, and the operations of one forward pass."""

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
    """How many numbers are trained; those of weights that are shared count once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def count_operations(model: nn.Module, answer: Answer, n_examples: int) -> float:
    """Floating-point operations of a forward pass, for each of the examples that `answer` runs.

    torch's own counter: matrix products and convolutions alone, a multiplication and an addition
    being two.
    """
    training = model.training
    model.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        answer(model)
    model.train(training)
    return counter.get_total_flops() / n_examples


def count_blocks(model: nn.Module) -> int:
    """How many blocks or steps the names of its hook points number; 0 if they number none."""
    names = "\n".join(name for name, _ in model.named_modules())
    numbers = re.findall(r"^(?:blocks|layers|steps)\.(\d+)\.", names, re.MULTILINE)
    return max((int(number) + 1 for number in numbers), default=0)


def costs_of(model: nn.Module, answer: Answer, n_examples: int) -> xr.Dataset:
    """`parameters`, `operations` and `depth` of a model; arguments as of `count_operations`."""
    operations = "floating-point operations of a forward pass, for one example"
    counts = {
        "parameters": (count_parameters(model), "trained parameters"),
        "operations": (count_operations(model, answer, n_examples), operations),
        "depth": (count_blocks(model), "blocks, or steps"),
    }
    return xr.Dataset(
        {name: ((), count, {"long_name": said}) for name, (count, said) in counts.items()}
    )
