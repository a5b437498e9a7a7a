"""The copy gate, with which a column can keep its state (Neural Data Router)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear, relu

from mechanisms.dropout import dropout, dropout_mask
from mechanisms.initialization import lecun_normal, zeros
from mechanisms.validation import check_choice, check_dropout, check_sizes

GateWidth = Literal["vector", "scalar"]
UpdateForm = Literal["layer_norm", "tanh"]
Seen = Literal["all", "own"]
Skipped = Literal["layer", "feed_forward"]


@dataclass(frozen=True, kw_only=True)
class CopyGateConfig:
    """Configuration of `CopyGate`, and of the update that it lets through.

    Args:
        width: one gate for each channel (`vector`), or one for all channels of a token (`scalar`).
        d_hidden: width of the gate's hidden layer; None for that of the token.
        update: what bounds the update: `layer_norm` (with geometric attention) or `tanh` (with
            softmax attention).
        sees: whether gates depend on all columns, by way of the attention output (`all`), or on the
            token's own state before attention (`own`).
        skips: what a closed gate skips: the whole layer (`layer`), or what follows the attention
            (`feed_forward`).
        dropout: probability of setting all gates of a token to 0 in training, without rescaling:
            the token then keeps its state for this step.
        hidden_dropout: probability of setting a hidden activation to 0 in training.
        initial_bias: initial bias of the gates' logits; if negative, tokens initially keep their
            state.

    Raises:
        ValueError: a setting is not one of the choices, d_hidden is less than 1, or a dropout rate
            is outside [0, 1).

    Source: Csordás et al. 2021; `own` and `feed_forward` are gates that lack what section 6 says
    that gates need.

    Example:
        >>> CopyGateConfig(width="scalar").initial_bias
        -3.0
    """

    width: GateWidth = "vector"
    d_hidden: int | None = None
    update: UpdateForm = "layer_norm"
    sees: Seen = "all"
    skips: Skipped = "layer"
    dropout: float = 0.0
    hidden_dropout: float = 0.0
    initial_bias: float = -3.0

    def __post_init__(self):
        check_choice(self, "width", GateWidth)
        check_choice(self, "update", UpdateForm)
        check_choice(self, "sees", Seen)
        check_choice(self, "skips", Skipped)
        check_sizes(self, optional=("d_hidden",))
        check_dropout(self, "dropout", "hidden_dropout")


class CopyGate(nn.Module):
    """Gates sigmoid(relu(x W_in + b_in) W_out + b_out).

    Csordás et al. 2021, equation 8. `W_in`, `W_out` start from N(0, 1 / fan in), `b_out` at
    `initial_bias`.

    Example:
        >>> gate = CopyGate(CopyGateConfig(d_hidden=32), 16)
        >>> gate(torch.zeros(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self, config: CopyGateConfig, d_model: int, *, generator: torch.Generator | None = None
    ):
        super().__init__()
        self.config = config
        n_gates = d_model if config.width == "vector" else 1
        d_hidden = config.d_hidden or d_model
        self.W_in = lecun_normal(d_model, d_hidden, fan_in=d_model, generator=generator)
        self.b_in = zeros(d_hidden)
        self.W_out = lecun_normal(d_hidden, n_gates, fan_in=d_hidden, generator=generator)
        self.b_out = nn.Parameter(torch.full((n_gates,), config.initial_bias))

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos n_gates"]:
        """The gates, in [0, 1]: one for each channel, or one for all channels."""
        return self.gates(self.logits(x))

    def logits(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos n_gates"]:
        """The gates' logits."""
        hidden = relu(linear(x, self.W_in.T, self.b_in))
        hidden = dropout(hidden, self.config.hidden_dropout, self.training)
        return linear(hidden, self.W_out.T, self.b_out)

    def gates(
        self, logits: Float[Tensor, "batch pos n_gates"]
    ) -> Float[Tensor, "batch pos n_gates"]:
        """The gates of these logits, those of dropped tokens being 0."""
        gate = logits.sigmoid()
        if self.training and self.config.dropout:
            gate = gate * (dropout_mask((*gate.shape[:-1], 1), self.config.dropout, gate) > 0)
        return gate
