"""A decoder block: self-attention, attention to the source, feed-forward layer."""

from __future__ import annotations

from typing import Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from mechanisms.layers.residual import ResidualBlock
from mechanisms.models.transformer import BlockConfig
from mechanisms.protocols import AttentionProtocol


class DecoderBlockConfig(BlockConfig, Protocol):
    """The settings of a `DecoderBlock`, besides those of a `Block`."""

    @property
    def within_target(self) -> AttentionProtocol:
        """Config of the attention within the target."""
        ...

    @property
    def between(self) -> AttentionProtocol:
        """Config of the attention from the target to the source."""
        ...

    @property
    def norm_epsilon(self) -> float:
        """Epsilon of all LayerNorms."""
        ...

    @property
    def post_norm(self) -> bool:
        """Whether the LayerNorms come after the sums."""
        ...

    @property
    def dropout(self) -> float:
        """Dropout probability of what each part of the block adds to the stream."""
        ...


class DecoderBlock(ResidualBlock):
    """A decoder block: x + f(LN(x)) for self-attention, cross-attention, feed-forward.

    With `post_norm` LN(x + f(x)).

    Hook points [batch, target_pos, d_model], named as in TransformerLens: `hook_resid_pre`,
    `hook_attn_out`, `hook_resid_mid`, `hook_cross_attn_out`, `hook_resid_mid_cross`,
    `hook_mlp_out`, `hook_resid_post`; and those of `attn`, `cross_attn` and `mlp`.
    """

    def __init__(self, config: DecoderBlockConfig, *, generator: torch.Generator | None = None):
        super().__init__(post_norm=config.post_norm, dropout=config.dropout)
        self.ln1 = nn.LayerNorm(config.d_model, eps=config.norm_epsilon)
        self.attn = config.within_target.build(config.d_model, generator=generator)
        self.ln_cross = nn.LayerNorm(config.d_model, eps=config.norm_epsilon)
        self.cross_attn = config.between.build(config.d_model, generator=generator)
        self.ln2 = nn.LayerNorm(config.d_model, eps=config.norm_epsilon)
        self.mlp = config.feed_forward.build(config.d_model, generator=generator)
        self.hook_resid_pre, self.hook_attn_out = HookPoint(), HookPoint()
        self.hook_resid_mid, self.hook_cross_attn_out = HookPoint(), HookPoint()
        self.hook_resid_mid_cross, self.hook_mlp_out = HookPoint(), HookPoint()
        self.hook_resid_post = HookPoint()

    def forward(
        self,
        x: Float[Tensor, "batch target_pos d_model"],
        encoded: Float[Tensor, "batch source_pos d_model"],
        *,
        mask: Bool[Tensor, "batch 1 target_pos target_pos"],
        source_mask: Bool[Tensor, "batch 1 1 source_pos"],
        hooks: DecoderBlock | None = None,
    ) -> Float[Tensor, "batch target_pos d_model"]:
        """The residual stream after this block; `hooks` as in `Block`."""
        points = self if hooks is None else hooks
        x = points.hook_resid_pre(x)
        normed = self._before(self.ln1, x)
        attended = self.attn(normed, normed, mask=mask, hooks=points.attn)
        x = points.hook_resid_mid(self._after(self.ln1, x, points.hook_attn_out(attended)))
        normed = self._before(self.ln_cross, x)
        retrieved = self.cross_attn(normed, encoded, mask=source_mask, hooks=points.cross_attn)
        x = self._after(self.ln_cross, x, points.hook_cross_attn_out(retrieved))
        x = points.hook_resid_mid_cross(x)
        mlp_out = points.hook_mlp_out(self.mlp(self._before(self.ln2, x), hooks=points.mlp))
        return points.hook_resid_post(self._after(self.ln2, x, mlp_out))
