"""Adaptive computation time: each column decides when to halt."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear
from transformer_lens.hook_points import HookPoint

from mechanisms.differentiation import is_in_transform
from mechanisms.hooking import observed
from mechanisms.initialization import lecun_normal
from mechanisms.validation import check_choice

HaltingRule = Literal["graves_2016", "tensor2tensor"]


@dataclass(frozen=True, kw_only=True)
class HaltingConfig:
    """Configuration of adaptive computation time with `Halting`.

    Args:
        epsilon: a column halts when its halting probabilities sum to more than 1 - epsilon.
        initial_bias: initial bias of the halting probabilities' logits.
        rule: how a column goes through the steps. `graves_2016`: its probability is computed from
            its state after the step, it keeps its state once it has halted, and after the last step
            it halts in any case, with the remaining weight. `tensor2tensor` (the code of Dehghani
            et al. 2019, `act_type="basic"`): its probability is computed from its state before the
            step, its state goes on changing for others to attend to, and if it has not halted
            after the last step, its weights sum to less than 1 and its cost has no remainder.

    Raises:
        ValueError: epsilon is outside (0, 1), or the rule is unknown.

    Example:
        >>> HaltingConfig(epsilon=0.05).rule
        'graves_2016'
    """

    epsilon: float = 0.01
    initial_bias: float = 1.0
    rule: HaltingRule = "graves_2016"

    def __post_init__(self):
        check_choice(self, "rule", HaltingRule)
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
        self.b = nn.Parameter(torch.full((1,), float(config.initial_bias)))
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
    probabilities. The step at which it halts, or else the last step, gets the remaining weight (the
    last step not with the rule `tensor2tensor`; there the code also subtracts the sum of the
    weights from all components, which the LayerNorm that follows undoes).

    Attributes:
        running: [batch, pos], 1 where a column has not halted.
        steps: [batch, pos], number of steps that each column took.
    """

    def __init__(self, x: Float[Tensor, "batch pos d_model"], config: HaltingConfig):
        self.epsilon = config.epsilon
        self.halts_at_last = config.rule == "graves_2016"
        self.running = x.new_ones(x.shape[:2])
        self.steps = x.new_zeros(x.shape[:2])
        self._spent = x.new_zeros(x.shape[:2])
        self._remainder = x.new_full(x.shape[:2], float(self.halts_at_last))
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
        # The step may be the last one, at which a column halts whatever its probability.
        may_halt = self.running > 0 if self.halts_at_last else halts
        self._remainder = torch.where(may_halt, remainder, self._remainder)
        self.steps = self.steps + self.running
        self.running = self.running * ~halts

    def result(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """The weighted mean of the states; the last states x get the remaining weight."""
        return self._sum + (1 - self._spent)[..., None] * x if self.halts_at_last else self._sum

    def cost(self) -> Float[Tensor, "batch pos"]:
        """The ponder cost: steps plus remainder, which is differentiable (Graves 2016, eq. 13)."""
        return self.steps + self._remainder


def run_steps(
    x: Float[Tensor, "batch pos d_model"],
    steps: Iterable[nn.Module],
    update: Callable[[Float[Tensor, "batch pos d_model"], Any], Float[Tensor, "batch pos d_model"]],
    *,
    halt: Halting | None = None,
    signal: Callable[[Float[Tensor, "batch pos d_model"], int], Tensor] | None = None,
) -> tuple[Float[Tensor, "batch pos d_model"], Float[Tensor, "batch pos"]]:
    """The columns after the steps of a block with shared weights, and the ponder cost of each.

    Outside of training, and unless a step is observed, no step is computed after all columns have
    halted.

    Args:
        x: states before the first step.
        steps: the hook points of each step; with halting their `halt` are those of `halt`.
        update: the states after a step, from those before it and its hook points.
        halt: the halting unit; None for all steps, whose number is then the cost.
        signal: adds to the states before a step what depends on its number, counted from 0.
    """
    steps = list(steps)
    if halt is None:
        for step, points in enumerate(steps):
            x = update(x if signal is None else signal(x, step), points)
        return x, x.new_full(x.shape[:2], len(steps))
    ponder, keeps = Ponder(x, halt.config), halt.config.rule == "graves_2016"
    for step, points in enumerate(steps):
        of_step: Any = points.halt
        ponder.running = of_step.hook_running(ponder.running)
        if not (halt.training or observed(points) or is_in_transform() or ponder.running.any()):
            break
        before = x if signal is None else signal(x, step)
        probability = None if keeps else halt(before, hooks=of_step)
        updated = update(before, points).to(x.dtype)
        x = torch.lerp(x, updated, ponder.running[..., None]) if keeps else updated
        ponder.add(x, halt(x, hooks=of_step) if probability is None else probability)
    return ponder.result(x), ponder.cost()
