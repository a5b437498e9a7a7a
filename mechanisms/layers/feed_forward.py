"""The feed-forward layer of a transformer block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, relu, silu
from transformer_lens.hook_points import HookPoint

from mechanisms.dropout import dropout
from mechanisms.initialization import lecun_normal, zeros
from mechanisms.validation import check_choice, check_dropout, check_sizes

Activation = Literal["gelu", "relu", "swiglu"]


@dataclass(frozen=True, kw_only=True)
class FeedForwardConfig:
    """Configuration of a `FeedForward` layer: width, activation and dropout.

    Args:
        d_mlp: width of the hidden layer.
        activation: `gelu` (tanh approximation), `relu`, or `swiglu`, whose hidden layer is gated.
        bias: whether the linear maps have biases.
        dropout: probability of setting a hidden activation to 0 in training.
        output_dropout: the same of an output.

    Raises:
        ValueError: d_mlp is less than 1, the activation is unknown, or a dropout is outside [0, 1).

    Example:
        >>> FeedForwardConfig(d_mlp=32, activation="swiglu").build(16)(x).shape
        torch.Size([2, 5, 16])
    """

    d_mlp: int
    activation: Activation = "gelu"
    bias: bool = True
    dropout: float = 0.0
    output_dropout: float = 0.0

    def __post_init__(self):
        check_sizes(self, "d_mlp")
        check_choice(self, "activation", Activation)
        check_dropout(self, "dropout", "output_dropout")

    def build(self, d_model: int, *, generator: torch.Generator | None = None) -> nn.Module:
        """The module for a residual stream of width `d_model`."""
        return FeedForward(self, d_model, generator=generator)


class FeedForward(nn.Module):
    """One hidden layer: phi(x W_in + b_in) W_out + b_out, where phi is the activation.

    With `swiglu` (Shazeer 2020, equation 6) the hidden layer is
    silu(x W_gate + b_gate) * (x W_in + b_in).

    Hook points [batch, pos, d_mlp]: `hook_pre`, the argument of phi or silu; `hook_post`, the
    hidden layer after dropout, which W_out multiplies; with `swiglu` also `hook_pre_linear`,
    x W_in + b_in (TransformerLens' names for gated layers).

    Example:
        >>> FeedForward(FeedForwardConfig(d_mlp=32), 16)(x).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        config: FeedForwardConfig,
        d_model: int,
        *,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        self.config = config
        d_mlp = config.d_mlp
        self.W_in = lecun_normal(d_model, d_mlp, fan_in=d_model, generator=generator)
        self.b_in = zeros(d_mlp) if config.bias else None
        self.W_out = lecun_normal(d_mlp, d_model, fan_in=d_mlp, generator=generator)
        self.b_out = zeros(d_model) if config.bias else None
        self.hook_pre, self.hook_post = HookPoint(), HookPoint()
        if config.activation == "swiglu":
            self.W_gate = lecun_normal(d_model, d_mlp, fan_in=d_model, generator=generator)
            self.b_gate = zeros(d_mlp) if config.bias else None
            self.hook_pre_linear = HookPoint()

    def forward(
        self, x: Float[Tensor, "batch pos d_model"], *, hooks: FeedForward | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """The output at every token; `hooks` as in `MultiHeadAttention`."""
        points = self if hooks is None else hooks
        hidden = linear(x, self.W_in.T, self.b_in)
        if self.config.activation == "swiglu":
            hidden = points.hook_pre_linear(hidden)
            gate = points.hook_pre(linear(x, self.W_gate.T, self.b_gate))
            post = silu(gate) * hidden
        elif self.config.activation == "relu":
            post = relu(points.hook_pre(hidden))
        else:
            post = gelu(points.hook_pre(hidden), approximate="tanh")
        post = points.hook_post(dropout(post, self.config.dropout, self.training))
        out = linear(post, self.W_out.T, self.b_out)
        return dropout(out, self.config.output_dropout, self.training)
