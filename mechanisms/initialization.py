"""Parameter initialisation from an explicit generator."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def lecun_normal(
    *shape: int, fan_in: int, generator: torch.Generator | None = None
) -> nn.Parameter:
    """A parameter drawn from N(0, 1/fan_in), truncated at two standard deviations.

    The variance holds after truncation (LeCun et al. 1998; flax's `lecun_normal`).
    """
    # The standard deviation of a unit normal truncated at two standard deviations.
    scale = fan_in**-0.5 / 0.87962566103423978
    weight: Tensor = torch.empty(*shape)
    nn.init.trunc_normal_(weight, std=scale, a=-2 * scale, b=2 * scale, generator=generator)
    return nn.Parameter(weight)


def normal(*shape: int, std: float, generator: torch.Generator | None = None) -> nn.Parameter:
    """A parameter drawn from a normal distribution with mean 0, not truncated."""
    return nn.Parameter(torch.randn(*shape, generator=generator) * std)


def uniform(*shape: int, bound: float, generator: torch.Generator | None = None) -> nn.Parameter:
    """A parameter drawn uniformly from [-bound, bound]."""
    return nn.Parameter(torch.empty(*shape).uniform_(-bound, bound, generator=generator))


@torch.no_grad()
def redraw_uniformly(module: nn.Module, *, generator: torch.Generator | None = None) -> None:
    """Draw the weights `W_X` and biases `b_X` of a module anew, as torch's linear layers do.

    Both are uniform in [-1, 1] / sqrt(fan_in), where fan_in is the number of inputs of `W_X`: its
    last dimension but one (heads come before it), and all but the last for `W_O`, which adds up
    the heads.
    """
    for part in module.modules():
        parameters = dict(part.named_parameters(recurse=False))
        for name, weight in parameters.items():
            if not name.startswith("W_"):
                continue
            inputs = weight.shape[:-1] if name == "W_O" else weight.shape[-2:][:1]
            bound = math.prod(inputs) ** -0.5
            weight.uniform_(-bound, bound, generator=generator)
            if (bias := parameters.get(f"b_{name[2:]}")) is not None:
                bias.uniform_(-bound, bound, generator=generator)


def zeros(*shape: int) -> nn.Parameter:
    """A parameter that is initialised to zeros."""
    return nn.Parameter(torch.zeros(shape))
