"""The feed-forward half of a transformer block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import gelu, linear
from transformer_lens.hook_points import HookPoint

from mechanisms.initialization import lecun_normal, zeros


@dataclass(frozen=True, kw_only=True)
class FeedForwardConfig:
    """One hidden layer of width `d_mlp`; ValueError if it is less than 1."""

    d_mlp: int

    def __post_init__(self):
        if self.d_mlp < 1:
            raise ValueError(f"d_mlp must be at least 1, got {self.d_mlp}")

    def build(self, d_model: int, *, generator: torch.Generator | None = None) -> nn.Module:
        """The module for a residual stream of width `d_model`."""
        return FeedForward(self, d_model, generator=generator)


class FeedForward(nn.Module):
    """gelu(x W_in + b_in) W_out + b_out, with the tanh form of gelu.

    Hook points: `hook_pre`, `hook_post` [batch, pos, d_mlp].
    """

    def __init__(
        self,
        config: FeedForwardConfig,
        d_model: int,
        *,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        self.W_in = lecun_normal(d_model, config.d_mlp, fan_in=d_model, generator=generator)
        self.b_in = zeros(config.d_mlp)
        self.W_out = lecun_normal(config.d_mlp, d_model, fan_in=config.d_mlp, generator=generator)
        self.b_out = zeros(d_model)
        self.hook_pre, self.hook_post = HookPoint(), HookPoint()

    def forward(
        self, x: Float[Tensor, "batch pos d_model"], *, hooks: FeedForward | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """Apply the network to every token; `hooks` as in `MultiHeadAttention`."""
        points = self if hooks is None else hooks
        pre = points.hook_pre(linear(x, self.W_in.T, self.b_in))
        post = points.hook_post(gelu(pre, approximate="tanh"))
        return linear(post, self.W_out.T, self.b_out)
