"""Adaptive computation time: each column decides when to halt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear
from transformer_lens.hook_points import HookPoint

from mechanisms.initialization import lecun_normal


@dataclass(frozen=True, kw_only=True)
class HaltingConfig:
    """Configuration of adaptive computation time with `Halting`.

    Args:
        epsilon: a column halts when its halting probabilities sum to more than 1 - epsilon.
        initial_bias: initial bias of the halting probabilities' logits.

    Raises:
        ValueError: epsilon is outside (0, 1).
    """

    epsilon: float = 0.01
    initial_bias: float = 1.0

    def __post_init__(self):
        if not 0 < self.epsilon < 1:
            raise ValueError(f"epsilon must be in (0, 1), got {self.epsilon}")


class Halting(nn.Module):
    """The halting unit: p = sigmoid(x w + b) for each column.

    Graves 2016, "Adaptive Computation Time for Recurrent Neural Networks", equations 5 to 8, for
    each column separately as in the Universal Transformer (Dehghani et al. 2019).

    Hook points [batch, pos]: `hook_running`, before the step, 1 where a column has not halted (set
    it to 0 to halt the column); `hook_probability` (p).
    """

    def __init__(
        self, config: HaltingConfig, d_model: int, *, generator: torch.Generator | None = None
    ):
        super().__init__()
        self.config = config
        self.w = lecun_normal(1, d_model, fan_in=d_model, generator=generator)
        self.b = nn.Parameter(torch.full((1,), config.initial_bias))
        self.hook_running, self.hook_probability = HookPoint(), HookPoint()

    def forward(
        self, x: Float[Tensor, "batch pos d_model"], *, hooks: Halting | None = None
    ) -> Float[Tensor, "batch pos"]:
        """The halting probability of each column."""
        points = self if hooks is None else hooks
        return points.hook_probability(torch.sigmoid(linear(x, self.w, self.b)).squeeze(-1))


class Ponder:
    """Accumulates the states and halting probabilities of one forward pass.

    The result of a column is the mean of its states after each step, weighted by its halting
    probabilities. The step at which it halts, or else the last step, gets the remaining weight.

    Attributes:
        running: [batch, pos], 1 where a column has not halted.
        steps: [batch, pos], number of steps that each column took.
    """

    def __init__(self, x: Float[Tensor, "batch pos d_model"], config: HaltingConfig):
        self.epsilon = config.epsilon
        self.running = x.new_ones(x.shape[:2])
        self.steps = x.new_zeros(x.shape[:2])
        self._spent = x.new_zeros(x.shape[:2])
        self._remainder = x.new_zeros(x.shape[:2])
        self._sum = torch.zeros_like(x)

    def add(
        self, x: Float[Tensor, "batch pos d_model"], probability: Float[Tensor, "batch pos"]
    ) -> None:
        """Add a step of the `running` columns, whose states afterwards are x."""
        probability = probability * self.running
        halts = (self._spent + probability > 1 - self.epsilon) & (self.running > 0)
        remainder = 1 - self._spent
        weight = torch.where(halts, remainder, probability)
        self._sum = self._sum + weight[..., None] * x
        self._spent = self._spent + weight
        self._remainder = self._remainder + torch.where(halts, remainder, 0.0)
        self.steps = self.steps + self.running
        self.running = self.running * ~halts

    def result(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """The weighted mean of the states; the last states x get the remaining weight."""
        return self._sum + (1 - self._spent)[..., None] * x

    def cost(self) -> Float[Tensor, "batch pos"]:
        """The ponder cost: steps plus remainder, which is differentiable (Graves 2016, eq. 13)."""
        return self.steps + self._remainder + (1 - self._spent)
