"""The copy gate, with which a column can keep its state (Neural Data Router)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear, relu

from mechanisms.initialization import lecun_normal, zeros
from mechanisms.validation import check_choice, check_dropout

GateWidth = Literal["vector", "scalar"]
UpdateForm = Literal["layer_norm", "tanh"]


@dataclass(frozen=True, kw_only=True)
class CopyGateConfig:
    """Configuration of `CopyGate`, and of the update that it lets through.

    Args:
        width: one gate for each channel (`vector`), or one for all channels of a token (`scalar`).
        update: what bounds the update: `layer_norm` (with geometric attention) or `tanh` (with
            softmax attention).
        dropout: probability of setting all gates of a token to 0 in training, without rescaling:
            the token then keeps its state for this step.
        initial_bias: initial bias of the gates' logits; if negative, tokens initially keep their
            state.

    Raises:
        ValueError: a setting is not one of the choices, or dropout is outside [0, 1).
    """

    width: GateWidth = "vector"
    update: UpdateForm = "layer_norm"
    dropout: float = 0.0
    initial_bias: float = -3.0

    def __post_init__(self):
        check_choice(self, "width", GateWidth)
        check_choice(self, "update", UpdateForm)
        check_dropout(self)


class CopyGate(nn.Module):
    """Gates sigmoid(relu(x W_in + b_in) W_out + b_out), with a hidden layer as wide as x.

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
        """The gates, in [0, 1]: one for each channel, or one for all channels."""
        hidden = relu(linear(x, self.W_in.T, self.b_in))
        gate = torch.sigmoid(linear(hidden, self.W_out.T, self.b_out))
        if self.training and self.config.dropout:
            kept = torch.rand(*gate.shape[:-1], 1, device=gate.device) >= self.config.dropout
            gate = gate * kept
        return gate
