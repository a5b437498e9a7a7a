"""A network without modules, to compare modular ones with."""

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


@dataclass(frozen=True, kw_only=True)
class MonolithicConfig:
    """What a `Monolithic` is made of.

    Args:
        n_variables, d_input: of the inputs.
        d_mlp: width; the default is that of Ostapenko et al. 2022.
        depth: number of linear maps, at least 2.

    Raises:
        ValueError: for a value that is not allowed.
    """

    n_variables: int
    d_input: int
    d_mlp: int = 9000
    depth: int = 2

    def __post_init__(self):
        for name, least in (("n_variables", 1), ("d_input", 1), ("d_mlp", 1), ("depth", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


class Monolithic(HookedRootModule):
    """One perceptron with ReLU on all features of all variables, giving one number.

    Hook points, for each hidden layer: `layers.{l}.hook_pre`, `layers.{l}.hook_post`
    [batch, d_mlp]. Parameters: `layers.{l}.W` and `b`, `W_out` [d_mlp], `b_out` [].

    Args:
        config: what it is made of.
        generator: source of the initial weights; None for torch's own.
    """

    def __init__(self, config: MonolithicConfig, *, generator: torch.Generator | None = None):
        super().__init__()
        self.config = config
        widths = [config.n_variables * config.d_input] + [config.d_mlp] * (config.depth - 1)
        self.layers = nn.ModuleList(
            HiddenLayer(narrow, wide, generator=generator) for narrow, wide in pairwise(widths)
        )
        self.W_out = lecun_normal(config.d_mlp, fan_in=config.d_mlp, generator=generator)
        self.b_out = zeros()
        self.setup()

    def forward(self, inputs: Float[Tensor, "batch variable d_input"]) -> Float[Tensor, "batch 1"]:
        """The answers."""
        x = inputs.flatten(1)
        for layer in self.layers:
            x = layer(x)
        return (x @ self.W_out + self.b_out)[:, None]


class HiddenLayer(nn.Module):
    """relu(x W + b)."""

    def __init__(self, d_in: int, d_mlp: int, *, generator: torch.Generator | None = None):
        super().__init__()
        self.W = lecun_normal(d_in, d_mlp, fan_in=d_in, generator=generator)
        self.b = zeros(d_mlp)
        self.hook_pre, self.hook_post = HookPoint(), HookPoint()

    def forward(self, x: Float[Tensor, "batch d_in"]) -> Float[Tensor, "batch d_mlp"]:
        """The hidden units."""
        return self.hook_post(relu(self.hook_pre(linear(x, self.W.T, self.b))))
