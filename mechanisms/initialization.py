"""Parameter initialisation from an explicit generator."""

from __future__ import annotations

import math
from collections.abc import Mapping

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

    Both are uniform in [-1, 1] / sqrt(fan_in) with the inputs of `W_X`; see `fans`.
    """
    for part in module.modules():
        parameters = dict(part.named_parameters(recurse=False))
        for name, weight in parameters.items():
            if not name.startswith("W_"):
                continue
            bound = fans(name, weight)[0] ** -0.5
            weight.uniform_(-bound, bound, generator=generator)
            if (bias := parameters.get(f"b_{name[2:]}")) is not None:
                bias.uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def redraw_xavier(
    module: nn.Module,
    gains: Mapping[str, float] | None = None,
    *,
    generator: torch.Generator | None = None,
) -> None:
    """Draw weights `W_X` of a module anew, uniformly with Xavier's variance (Glorot, Bengio 2010).

    Each is uniform in gain * sqrt(6 / (fan_in + fan_out)) around 0; see `fans`.

    Args:
        module: the module.
        gains: the gain of each weight by its name, for example `{"W_in": 2**0.5}`; others stay as
            they are. None for all weights, with gain 1.
        generator: random generator; None for torch's global generator.
    """
    for path, weight in module.named_parameters():
        name = path.rpartition(".")[2]
        if not (name.startswith("W_") if gains is None else name in gains):
            continue
        bound = (6 / sum(fans(name, weight))) ** 0.5
        bound *= 1.0 if gains is None else gains[name]
        weight.uniform_(-bound, bound, generator=generator)


def fans(name: str, weight: Tensor) -> tuple[int, int]:
    """The numbers of inputs and of outputs of a weight, all heads together.

    Inputs are the last dimension but one (heads come before it), and all but the last for `W_O`,
    which adds up the heads; all others are outputs.

    Args:
        name: the name of the weight, without the path to its module.
        weight: the weight.
    """
    fan_in = math.prod(weight.shape[:-1] if name == "W_O" else weight.shape[-2:][:1])
    return fan_in, weight.numel() // fan_in


def zeros(*shape: int) -> nn.Parameter:
    """A parameter that is initialised to zeros."""
    return nn.Parameter(torch.zeros(shape))
