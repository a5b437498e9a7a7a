"""Parameter initialisation from an explicit generator."""

from __future__ import annotations

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


def zeros(*shape: int) -> nn.Parameter:
    """A parameter that is initialised to zeros."""
    return nn.Parameter(torch.zeros(shape))
