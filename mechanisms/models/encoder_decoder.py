"""An encoder-decoder transformer from one token sequence to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import dropout, linear
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from mechanisms.attention.crossing import require_crossing
from mechanisms.attention.positions import sinusoidal_embedding
from mechanisms.initialization import lecun_normal, zeros
from mechanisms.layers.depth import add_steps, stack_blocks
from mechanisms.models.transformer import LAYER_NORM_EPSILON, Block, run_blocks
from mechanisms.protocols import AttentionProtocol, ComponentConfig


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig:
    """What an `EncoderDecoder` is made of.

    Args:
        d_input: number of ids of the source.
        d_output: number of ids of the target, and of logits at each of its positions.
        d_model: width of both residual streams.
        n_layers: number of blocks of the encoder, and again of the decoder.
        attention: for example `AttentionConfig`; of both halves' self-attention.
        feed_forward: for example `FeedForwardConfig`.
        begin: the target's id before its first token.
        end: the target's id after its last one.
        padding: what fills up shorter sequences, source and target; any number, also one that is
            no id, such as -1.
        cross_attention: from the target to the source; None for the kind of `attention`. One that
            measures distances between query and key, or turns them by their positions, is refused:
            two sequences have none in common.
        shared: whether all blocks of the encoder have the same weights, and all of the decoder.
        dropout: on the embeddings and on what each part of a block adds to the stream, in
            training.

    Raises:
        ValueError: for a value that is not allowed.
    """

    d_input: int
    d_output: int
    d_model: int
    n_layers: int
    attention: AttentionProtocol
    feed_forward: ComponentConfig
    begin: int
    end: int
    padding: int
    cross_attention: AttentionProtocol | None = None
    shared: bool = True
    dropout: float = 0.0

    def __post_init__(self):
        for name in ("d_input", "d_output", "d_model", "n_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("begin", "end"):
            if not 0 <= getattr(self, name) < self.d_output:
                raise ValueError(
                    f"{name} must be in [0, d_output = {self.d_output}), got {getattr(self, name)}"
                )
            if getattr(self, name) == self.padding:
                raise ValueError(f"padding must not be {name} = {self.padding}")
        require_crossing("cross_attention", self.between)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")

    @property
    def between(self) -> AttentionProtocol:
        """The attention from the target to the source."""
        return self.attention if self.cross_attention is None else self.cross_attention


class DecoderBlock(nn.Module):
    """x + attention(LN(x)), then x + cross_attention(LN(x), encoded), x + feed_forward(LN(x)).

    Hook points [batch, target_pos, d_model], named as in TransformerLens: `hook_resid_pre`,
    `hook_attn_out`, `hook_resid_mid`, `hook_cross_attn_out`, `hook_resid_mid_cross`,
    `hook_mlp_out`, `hook_resid_post`; and those of `attn`, `cross_attn` and `mlp`.
    """

    def __init__(self, config: EncoderDecoderConfig, *, generator: torch.Generator | None = None):
        super().__init__()
        self.dropout = config.dropout
        self.ln1 = nn.LayerNorm(config.d_model, eps=LAYER_NORM_EPSILON)
        self.attn = config.attention.build(config.d_model, generator=generator)
        self.ln_cross = nn.LayerNorm(config.d_model, eps=LAYER_NORM_EPSILON)
        self.cross_attn = config.between.build(config.d_model, generator=generator)
        self.ln2 = nn.LayerNorm(config.d_model, eps=LAYER_NORM_EPSILON)
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
        """The stream after this block; `hooks` as in `Block`."""
        points = self if hooks is None else hooks
        x = points.hook_resid_pre(x)
        normed = self.ln1(x)
        attended = self.attn(normed, normed, mask=mask, hooks=points.attn)
        x = x + dropout(points.hook_attn_out(attended), self.dropout, self.training)
        x = points.hook_resid_mid(x)
        asked = self.cross_attn(
            self.ln_cross(x), encoded, mask=source_mask, hooks=points.cross_attn
        )
        x = x + dropout(points.hook_cross_attn_out(asked), self.dropout, self.training)
        x = points.hook_resid_mid_cross(x)
        written = points.hook_mlp_out(self.mlp(self.ln2(x), hooks=points.mlp))
        return points.hook_resid_post(x + dropout(written, self.dropout, self.training))


class EncoderDecoder(HookedRootModule):
    """A pre-LN transformer that writes the target token by token while it looks at the source.

    Vaswani et al. 2017 with the LayerNorm before each part of a block, and with weights shared
    over depth as Mittal et al. 2021 train it on SCAN. Sinusoidal positions; padding is attended
    to by nobody.

    Hook points: of the source `hook_embed`, `encoder_blocks.{i}.*` (those of a `Block`) and
    `hook_encoded`, the encoder's output after its LayerNorm; of the target `hook_embed_target` and
    `decoder_blocks.{i}.*` (those of a `DecoderBlock`). With shared weights the weights live in
    `encoder_core` and `decoder_core`. Embeddings start from N(0, 1), the scale of the sinusoids.

    Args:
        config: what it is made of.
        generator: source of the initial weights; None for torch's own.
    """

    def __init__(self, config: EncoderDecoderConfig, *, generator: torch.Generator | None = None):
        super().__init__()
        self.config = config
        d_model, shared = config.d_model, config.shared
        self.W_E = lecun_normal(config.d_input, d_model, fan_in=1, generator=generator)
        self.W_E_target = lecun_normal(config.d_output, d_model, fan_in=1, generator=generator)
        self.hook_embed, self.hook_embed_target = HookPoint(), HookPoint()
        self.encoder_core, self.encoder_blocks = stack_blocks(
            lambda: Block(config, dropout=config.dropout, generator=generator),
            config.n_layers,
            shared=shared,
        )
        self.ln_encoded = nn.LayerNorm(d_model, eps=LAYER_NORM_EPSILON)
        self.hook_encoded = HookPoint()
        self.decoder_core, self.decoder_blocks = stack_blocks(
            lambda: DecoderBlock(config, generator=generator), config.n_layers, shared=shared
        )
        self.ln_final = nn.LayerNorm(d_model, eps=LAYER_NORM_EPSILON)
        self.W_U = lecun_normal(d_model, config.d_output, fan_in=d_model, generator=generator)
        self.b_U = zeros(config.d_output)
        self.setup()

    def set_steps(self, n_steps: int) -> None:
        """Give steps beyond those trained with hook points too, so that hooks can name them.

        Raises:
            ValueError: if n_steps is less than 1, or the weights are not shared and it is not
                their number of layers.
        """
        config = self.config
        for blocks in (self.encoder_blocks, self.decoder_blocks):
            if add_steps(blocks, n_steps, n_layers=config.n_layers, shared=config.shared):
                self.setup()

    def forward(
        self,
        source: Int[Tensor, "batch source_pos"],
        target_in: Int[Tensor, "batch target_pos"],
        *,
        n_steps: int | None = None,
    ) -> Float[Tensor, "batch target_pos d_output"]:
        """The logits of the token that follows each position of `target_in`.

        Args:
            source: ids in [0, d_input), and padding.
            target_in: `begin`, then the target's ids in [0, d_output), and padding at the end.
            n_steps: with shared weights, how many steps to take in the encoder, and again in the
                decoder; None for `n_layers`.

        Raises:
            ValueError: if n_steps is less than 1, or the weights are not shared and it is not
                their number of layers.
        """
        n_steps = self._steps(n_steps)
        return self._decode(self._encode(source, n_steps), source, target_in, n_steps)

    @torch.no_grad()
    def greedy(
        self,
        source: Int[Tensor, "batch source_pos"],
        max_length: int,
        *,
        n_steps: int | None = None,
    ) -> Int[Tensor, "batch max_length"]:
        """The most probable token after each prefix, until `end`; then padding.

        The source is encoded once; the decoder runs over the whole prefix for each token, and the
        hooks fire each time. To know only whether the answer is the target, one call with
        `target_in` will do: it is, if at every position the target has the highest logit.

        Raises:
            ValueError: if max_length is less than 1, and as for a call.
        """
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        n_steps = self._steps(n_steps)
        encoded = self._encode(source, n_steps)
        written = source.new_full((len(source), max_length + 1), self.config.padding)
        written[:, 0] = self.config.begin
        going = torch.ones(len(source), dtype=torch.bool, device=source.device)
        for length in range(1, max_length + 1):
            logits = self._decode(encoded, source, written[:, :length], n_steps)
            best = logits[:, -1].argmax(-1)
            written[:, length] = torch.where(going, best, self.config.padding)
            going &= best != self.config.end
            if not going.any():
                break
        return written[:, 1:]

    def _steps(self, n_steps: int | None) -> int:
        if n_steps is None or n_steps == self.config.n_layers:
            return self.config.n_layers
        self.set_steps(n_steps)
        return n_steps

    def _encode(
        self, source: Int[Tensor, "batch source_pos"], n_steps: int
    ) -> Float[Tensor, "batch source_pos d_model"]:
        mask = self._real(source)[:, None, None]
        x = self.hook_embed(self._embed(self.W_E, source))
        x = run_blocks(x, self.encoder_core, self.encoder_blocks, n_steps, mask=mask)
        return self.hook_encoded(self.ln_encoded(x))

    def _decode(
        self,
        encoded: Float[Tensor, "batch source_pos d_model"],
        source: Int[Tensor, "batch source_pos"],
        target_in: Int[Tensor, "batch target_pos"],
        n_steps: int,
    ) -> Float[Tensor, "batch target_pos d_output"]:
        n_positions = target_in.shape[1]
        past = torch.ones(n_positions, n_positions, dtype=torch.bool, device=encoded.device).tril()
        mask = self._real(target_in)[:, None, None] & past
        source_mask = self._real(source)[:, None, None]
        x = self.hook_embed_target(self._embed(self.W_E_target, target_in))
        for step in range(n_steps):
            points = cast(DecoderBlock, self.decoder_blocks[step])
            block = points if self.decoder_core is None else self.decoder_core
            x = block(x, encoded, mask=mask, source_mask=source_mask, hooks=points)
        return linear(self.ln_final(x), self.W_U.T, self.b_U)

    def _real(self, tokens: Int[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
        return tokens != self.config.padding

    def _embed(
        self, table: Float[Tensor, "id d_model"], tokens: Int[Tensor, "batch pos"]
    ) -> Float[Tensor, "batch pos d_model"]:
        # Padding need not be an id of the table; nobody sees what stands in its place.
        x = table[tokens.masked_fill(~self._real(tokens), 0)]
        x = x + sinusoidal_embedding(*x.shape[1:]).to(x)
        return dropout(x, self.config.dropout, self.training)
