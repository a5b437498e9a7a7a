"""What is added to the states of a network with shared weights before each of its steps."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mechanisms.attention.positions import sinusoidal_embedding
from mechanisms.initialization import normal

StepSignal = Literal["none", "learned", "sinusoidal"]


class StepSignals(nn.Module):
    """Adds the position of each column and the number of the step to the states before a step.

    Dehghani et al. 2019, "Universal Transformers", section 2.1. Steps are `sinusoidal` there, and
    `learned` by default in their code (tensor2tensor), as here: from N(0, 1 / d_model), multiplied
    by sqrt(d_model) where they are added.

    Args:
        step: what tells the steps apart.
        positions: whether sinusoidal positions are added.
        n_steps: number of learned signals.
        d_model: width of the states.
        generator: random generator of the initial signals; None for torch's global generator.

    Example:
        >>> signals = StepSignals("sinusoidal", positions=True, n_steps=8, d_model=4)
        >>> signals(torch.zeros(1, 2, 4), 0)[0, 0]
        tensor([0., 0., 2., 2.])
    """

    def __init__(
        self,
        step: StepSignal,
        *,
        positions: bool,
        n_steps: int,
        d_model: int,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        self.step, self.positions, self.table = step, positions, None
        if step == "learned":
            self.table = normal(n_steps, d_model, std=d_model**-0.5, generator=generator)

    def forward(
        self, x: Float[Tensor, "batch pos d_model"], step: int
    ) -> Float[Tensor, "batch pos d_model"]:
        """The states before step number `step`, counted from 0, with the signals."""
        d_model = x.shape[2]
        if self.positions:
            x = x + sinusoidal_embedding(x.shape[1], d_model).to(x)
        if self.table is not None:
            return x + self.table[step] * d_model**0.5
        if self.step == "sinusoidal":
            return x + sinusoidal_embedding(step + 1, d_model)[step].to(x)
        return x
