"""The copy gate: a column changes only when it is its turn (the Neural Data Router)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear, relu

from mechanisms.initialization import lecun_normal, zeros

GateWidth = Literal["vector", "scalar"]
UpdateForm = Literal["layer_norm", "tanh"]


@dataclass(frozen=True, kw_only=True)
class CopyGateConfig:
    """How a block writes its update.

    Args:
        width: a gate for each channel (`vector`), or one for all of a token's (`scalar`).
        update: what keeps the update within bounds: `layer_norm` (with geometric attention) or
            `tanh` (with softmax attention).
        dropout: probability with which a token's whole gate is set to 0 in training, unscaled:
            the token then keeps its state for this step.
        initial_bias: of the gates' logits; negative: tokens start by keeping their state.

    Raises:
        ValueError: for another kind, or a dropout outside of [0, 1).
    """

    width: GateWidth = "vector"
    update: UpdateForm = "layer_norm"
    dropout: float = 0.0
    initial_bias: float = -3.0

    def __post_init__(self):
        for name, kinds in (("width", GateWidth), ("update", UpdateForm)):
            if getattr(self, name) not in get_args(kinds):
                allowed = ", ".join(get_args(kinds))
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")


class CopyGate(nn.Module):
    """sigmoid(relu(x W_in + b_in) W_out + b_out), with a hidden layer as wide as x.

    Csordás et al. 2021, equation 8. `W_in`, `W_out` start from N(0, 1 / d_model), `b_out` at
    `initial_bias`.
    """

    def __init__(
        self, config: CopyGateConfig, d_model: int, *, generator: torch.Generator | None = None
    ):
        super().__init__()
        self.config = config
        n_gates = d_model if config.width == "vector" else 1
        self.W_in = lecun_normal(d_model, d_model, fan_in=d_model, generator=generator)
        self.b_in = zeros(d_model)
        self.W_out = lecun_normal(d_model, n_gates, fan_in=d_model, generator=generator)
        self.b_out = nn.Parameter(torch.full((n_gates,), config.initial_bias))

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos n_gates"]:
        """The gates, in [0, 1]: one for each channel, or one for all of them."""
        hidden = relu(linear(x, self.W_in.T, self.b_in))
        gate = torch.sigmoid(linear(hidden, self.W_out.T, self.b_out))
        if self.training and self.config.dropout:
            kept = torch.rand(*gate.shape[:-1], 1, device=gate.device) >= self.config.dropout
            gate = gate * kept
        return gate
