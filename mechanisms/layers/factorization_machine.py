"""Factorization machine: a linear function plus all products of two inputs, of low rank."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from mechanisms.initialization import lecun_normal, zeros


class FactorizationMachine(nn.Module):
    """b + sum_i w_i x_i + sum_{i<j} (v_i · v_j) x_i x_j, a scalar.

    Rendle 2010, "Factorization Machines", equation 1. The sum over pairs is computed in linear time
    (his lemma 3.1), as half of sum_f (sum_i v_if x_i)² - sum_i v_if² x_i².

    Parameters: `W` [d_in], from N(0, 1 / d_in); `W_factors` [d_in, n_factors], whose rows are the
    v_i, from N(0, 1 / (d_in sqrt(n_factors))), with which both sums have about the same variance at
    inputs of unit variance; `b` [].

    Args:
        d_in: number of inputs.
        n_factors: width of the v_i, the rank of the products.
        generator: random generator of the initial weights; None for torch's global generator.

    Example:
        >>> FactorizationMachine(16, 4)(torch.zeros(2, 5, 16)).shape
        torch.Size([2, 5])
    """

    def __init__(self, d_in: int, n_factors: int, *, generator: torch.Generator | None = None):
        super().__init__()
        self.W = lecun_normal(d_in, fan_in=d_in, generator=generator)
        self.W_factors = lecun_normal(d_in, n_factors, fan_in=d_in, generator=generator)
        with torch.no_grad():
            self.W_factors.mul_(n_factors**-0.25)
        self.b = zeros()

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch"]:
        """The value of each row."""
        sums = linear(x, self.W_factors.T).square().sum(-1)
        squares = linear(x.square(), self.W_factors.square().sum(1)[None])[..., 0]
        return linear(x, self.W[None])[..., 0] + (sums - squares) / 2 + self.b
