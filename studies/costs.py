"""What a model costs: its parameters, and the operations of one forward pass."""

from __future__ import annotations

import torch
import xarray as xr
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


def count_parameters(model: nn.Module) -> int:
    """How many numbers are trained; those of weights that are shared count once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def count_operations(model: nn.Module, inputs: Tensor | tuple[Tensor, ...]) -> float:
    """Floating-point operations of a forward pass, for each example of `inputs`.

    torch's own counter: matrix products and convolutions alone, a multiplication and an addition
    being two.
    """
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    training = model.training
    model.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*arguments)
    model.train(training)
    return counter.get_total_flops() / len(arguments[0])


def costs_of(model: nn.Module, inputs: Tensor | tuple[Tensor, ...]) -> xr.Dataset:
    """`parameters` and `operations` of a model, for a result file; `inputs` as above."""
    return xr.Dataset(
        {
            "parameters": ((), count_parameters(model), {"long_name": "trained parameters"}),
            "operations": (
                (),
                count_operations(model, inputs),
                {"long_name": "floating-point operations of a forward pass, for one example"},
            ),
        }
    )
