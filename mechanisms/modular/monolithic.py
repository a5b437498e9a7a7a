"""A monolithic network, the baseline of modular networks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear, relu
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from mechanisms.initialization import lecun_normal, zeros
from mechanisms.validation import check_sizes


@dataclass(frozen=True, kw_only=True)
class MonolithicConfig:
    """Configuration of a `Monolithic` network.

    Args:
        n_variables: number of variables of an input.
        d_input: number of features of each variable.
        d_mlp: width of the hidden layers; the default is that of Ostapenko et al. 2022.
        depth: number of linear maps, at least 2.

    Raises:
        ValueError: a setting is not allowed.

    Example:
        >>> config = MonolithicConfig(n_variables=5, d_input=9, d_mlp=32)
        >>> Monolithic(config)(inputs).shape
        torch.Size([3, 1])
    """

    n_variables: int
    d_input: int
    d_mlp: int = 9000
    depth: int = 2

    def __post_init__(self):
        check_sizes(self, "n_variables", "d_input", "d_mlp")
        check_sizes(self, "depth", minimum=2)


class Monolithic(HookedRootModule):
    """One ReLU perceptron from all features of all variables to one number.

    Hook points, for each hidden layer: `layers.{l}.hook_pre`, `layers.{l}.hook_post`
    [batch, d_mlp]. Parameters: `layers.{l}.W` and `b`, `W_out` [d_mlp], `b_out` [].

    Args:
        config: the configuration.
        generator: random generator of the initial weights; None for torch's global generator.

    Example:
        >>> model = Monolithic(MonolithicConfig(n_variables=5, d_input=9, d_mlp=32, depth=3))
        >>> _, cache = model.run_with_cache(inputs)
        >>> cache["layers.1.hook_post"].shape  # of the second of two hidden layers
        torch.Size([3, 32])
    """

    def __init__(self, config: MonolithicConfig, *, generator: torch.Generator | None = None):
        super().__init__()
        self.config = config
        widths = [config.n_variables * config.d_input] + [config.d_mlp] * (config.depth - 1)
        self.layers = nn.ModuleList(
            HiddenLayer(d_in, d_mlp, generator=generator) for d_in, d_mlp in pairwise(widths)
        )
        self.W_out = lecun_normal(config.d_mlp, fan_in=config.d_mlp, generator=generator)
        self.b_out = zeros()
        self.setup()

    def forward(self, inputs: Float[Tensor, "batch variable d_input"]) -> Float[Tensor, "batch 1"]:
        """The answer to each input."""
        x = inputs.flatten(1)
        for layer in self.layers:
            x = layer(x)
        return (x @ self.W_out + self.b_out)[:, None]


class HiddenLayer(nn.Module):
    """A hidden layer with hook points: relu(x W + b)."""

    def __init__(self, d_in: int, d_mlp: int, *, generator: torch.Generator | None = None):
        super().__init__()
        self.W = lecun_normal(d_in, d_mlp, fan_in=d_in, generator=generator)
        self.b = zeros(d_mlp)
        self.hook_pre, self.hook_post = HookPoint(), HookPoint()

    def forward(self, x: Float[Tensor, "batch d_in"]) -> Float[Tensor, "batch d_mlp"]:
        """The activations of the hidden units."""
        return self.hook_post(relu(self.hook_pre(linear(x, self.W.T, self.b))))
