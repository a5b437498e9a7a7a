"""What a model costs: its parameters, and the operations of one forward pass."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
import xarray as xr
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def count_parameters(model: nn.Module) -> int:
    """How many numbers are trained; those of weights that are shared count once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def count_operations(
    model: nn.Module, answer: Callable[[nn.Module], object], n_examples: int
) -> float:
    """Floating-point operations of a forward pass, for each of its examples.

    torch's own counter: matrix products and convolutions alone, a multiplication and an addition
    being two.

    Args:
        model: what is run.
        answer: runs it.
        n_examples: that it is run on.
    """
    training = model.training
    model.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        answer(model)
    model.train(training)
    return counter.get_total_flops() / n_examples


def count_blocks(model: nn.Module) -> int:
    """How many blocks or steps the names of its hook points number; 0 if they number none."""
    found = [
        re.match(r"(?:blocks|layers|steps)\.(\d+)\.", name) for name, _ in model.named_modules()
    ]
    return max((1 + int(one[1]) for one in found if one is not None), default=0)


def costs_of(
    model: nn.Module, answer: Callable[[nn.Module], object], n_examples: int
) -> xr.Dataset:
    """`parameters`, `operations` and `depth` of a model; arguments as above."""
    return xr.Dataset(
        {
            "parameters": ((), count_parameters(model), {"long_name": "trained parameters"}),
            "operations": (
                (),
                count_operations(model, answer, n_examples),
                {"long_name": "floating-point operations of a forward pass, for one example"},
            ),
            "depth": ((), count_blocks(model), {"long_name": "blocks, or steps"}),
        }
    )
