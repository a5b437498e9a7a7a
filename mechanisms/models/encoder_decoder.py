"""An encoder-decoder transformer from one token sequence to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import dropout, linear
from transformer_lens.hook_points import HookPoint

from mechanisms.attention.crossing import require_crossing
from mechanisms.attention.positions import sinusoidal_embedding
from mechanisms.initialization import lecun_normal, zeros
from mechanisms.layers.depth import SteppedModel, stack_blocks
from mechanisms.models.transformer import LAYER_NORM_EPSILON, Block, run_blocks
from mechanisms.protocols import AttentionProtocol, ComponentConfig
from mechanisms.validation import check_dropout, check_positive, check_sizes


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig:
    """Configuration of an `EncoderDecoder`: sizes, components and special ids.

    Args:
        d_input: number of source token ids.
        d_output: number of target token ids, and of logits at each target position.
        d_model: width of both residual streams.
        n_layers: number of blocks of the encoder, and of the decoder.
        attention: config of the self-attention of both, for example `AttentionConfig`.
        feed_forward: config of the feed-forward layers, for example `FeedForwardConfig`.
        begin: target id before the first token.
        end: target id after the last token.
        padding: id of padding in source and target; it need not be a token id, so -1 is allowed.
        cross_attention: config of the attention from the target to the source; None for
            `decoder_attention`. It must not measure distances or be rotary, since positions of two
            sequences are not comparable.
        decoder_attention: config of the self-attention of the decoder; None for `attention`.
        shared: whether all encoder blocks have the same weights, and all decoder blocks.
        marks: whether the source gets a begin and an end, which are learned (`W_E` has two more
            rows); its padding is then at its end.
        tied: whether the read-out is the transposed embedding of the target, with a bias.
        one_embedding: whether source, target and read-out have one embedding, which starts from
            N(0, 1 / d_model) and is multiplied by sqrt(d_model) where tokens are embedded; the
            read-out has no bias (Vaswani et al. 2017, section 3.4; tensor2tensor). The ids of
            source and target are then the same, and there are no marks.
        post_norm: whether the LayerNorms come after the sums (see `Block`); none then follows the
            last block.
        norm_epsilon: epsilon of all LayerNorms.
        dropout: dropout probability of the embeddings and of what each part of a block adds to the
            stream.

    Raises:
        ValueError: a setting is not allowed.
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
    decoder_attention: AttentionProtocol | None = None
    shared: bool = True
    marks: bool = False
    tied: bool = False
    one_embedding: bool = False
    post_norm: bool = False
    norm_epsilon: float = LAYER_NORM_EPSILON
    dropout: float = 0.0

    def __post_init__(self):
        check_sizes(self, "d_input", "d_output", "d_model", "n_layers")
        for name in ("begin", "end"):
            if not 0 <= getattr(self, name) < self.d_output:
                raise ValueError(
                    f"{name} must be in [0, d_output = {self.d_output}), got {getattr(self, name)}"
                )
            if getattr(self, name) == self.padding:
                raise ValueError(f"padding must not be {name}, got {self.padding} for both")
        if self.marks and self.d_input <= self.padding < self.n_source_ids:
            raise ValueError(
                f"padding must not be {self.d_input} or {self.d_input + 1} with marks=True, got "
                f"{self.padding}"
            )
        if self.one_embedding and self.n_source_ids != self.d_output:
            raise ValueError(
                f"d_output must be the number of source ids with one_embedding=True, got "
                f"{self.d_output} and {self.n_source_ids}"
            )
        if self.one_embedding and (self.marks or self.tied):
            raise ValueError(
                f"marks and tied must be False with one_embedding=True, got {self.marks} and "
                f"{self.tied}"
            )
        require_crossing("cross_attention", self.between)
        check_positive(self, "norm_epsilon")
        check_dropout(self)

    @property
    def n_source_ids(self) -> int:
        """Number of embeddings of the source, with the marks."""
        return self.d_input + 2 * self.marks

    @property
    def within_target(self) -> AttentionProtocol:
        """The self-attention of the decoder."""
        return self.attention if self.decoder_attention is None else self.decoder_attention

    @property
    def between(self) -> AttentionProtocol:
        """The attention from the target to the source."""
        return self.within_target if self.cross_attention is None else self.cross_attention


class DecoderBlock(nn.Module):
    """A decoder block: x + f(LN(x)) for self-attention, cross-attention, feed-forward.

    With `post_norm` LN(x + f(x)).

    Hook points [batch, target_pos, d_model], named as in TransformerLens: `hook_resid_pre`,
    `hook_attn_out`, `hook_resid_mid`, `hook_cross_attn_out`, `hook_resid_mid_cross`,
    `hook_mlp_out`, `hook_resid_post`; and those of `attn`, `cross_attn` and `mlp`.
    """

    def __init__(self, config: EncoderDecoderConfig, *, generator: torch.Generator | None = None):
        super().__init__()
        self.dropout, self.post_norm = config.dropout, config.post_norm
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

    def _before(self, norm: nn.LayerNorm, x: Tensor) -> Tensor:
        """The input of a part of the block."""
        return x if self.post_norm else norm(x)

    def _after(self, norm: nn.LayerNorm, x: Tensor, part: Tensor) -> Tensor:
        """The stream after the output of a part is added."""
        x = x + dropout(part, self.dropout, self.training)
        return norm(x) if self.post_norm else x


class EncoderDecoder(SteppedModel):
    """A transformer that predicts a target sequence from a source sequence.

    Vaswani et al. 2017, with weights shared over depth as Mittal et al. 2021 train it on SCAN (with
    `post_norm`; by default the LayerNorm is before each part of a block). Positions are sinusoidal;
    padding is never attended to.

    Hook points: of the source, marks included, `hook_embed`, `encoder_blocks.{i}.*` (those of a
    `Block`) and `hook_encoded`, the encoder's output after its LayerNorm; of the target
    `hook_embed_target` and `decoder_blocks.{i}.*` (those of a `DecoderBlock`). With shared weights
    the weights live in `encoder_core` and `decoder_core`. Embedded tokens start with the scale of
    the sinusoids, those of `W_E` and `W_E_target` from N(0, 1).

    Args:
        config: the configuration.
        generator: random generator of the initial weights; None for torch's global generator.
    """

    def __init__(self, config: EncoderDecoderConfig, *, generator: torch.Generator | None = None):
        super().__init__(config.n_layers, shared=config.shared)
        self.config = config
        d_model, shared = config.d_model, config.shared
        ids, fan_in = config.n_source_ids, d_model if config.one_embedding else 1
        self.W_E = lecun_normal(ids, d_model, fan_in=fan_in, generator=generator)
        self.W_E_target = None
        if not config.one_embedding:
            self.W_E_target = lecun_normal(config.d_output, d_model, fan_in=1, generator=generator)
        self.hook_embed, self.hook_embed_target = HookPoint(), HookPoint()
        self.encoder_core, self.encoder_blocks = stack_blocks(
            lambda: Block(
                config,
                norm_epsilon=config.norm_epsilon,
                post_norm=config.post_norm,
                dropout=config.dropout,
                generator=generator,
            ),
            config.n_layers,
            shared=shared,
        )
        self.ln_encoded = self._last_norm()
        self.hook_encoded = HookPoint()
        self.decoder_core, self.decoder_blocks = stack_blocks(
            lambda: DecoderBlock(config, generator=generator), config.n_layers, shared=shared
        )
        self.ln_final = self._last_norm()
        self.W_U = None
        if not (config.tied or config.one_embedding):
            self.W_U = lecun_normal(d_model, config.d_output, fan_in=d_model, generator=generator)
        self.b_U = None if config.one_embedding else zeros(config.d_output)
        self.setup()

    def _last_norm(self) -> nn.Module:
        """The norm of the last state; with `post_norm` the block has done it."""
        config = self.config
        if config.post_norm:
            return nn.Identity()
        return nn.LayerNorm(config.d_model, eps=config.norm_epsilon)

    def _stacks(self) -> Sequence[nn.ModuleList]:
        return self.encoder_blocks, self.decoder_blocks

    def forward(
        self,
        source: Int[Tensor, "batch source_pos"],
        target_in: Int[Tensor, "batch target_pos"],
        *,
        n_steps: int | None = None,
    ) -> Float[Tensor, "batch target_pos d_output"]:
        """The logits of the token that follows each position of `target_in`.

        Args:
            source: ids in [0, d_input), or padding.
            target_in: `begin`, then target ids in [0, d_output), and padding at the end.
            n_steps: number of steps of the encoder, and of the decoder, with shared weights; None
                for `n_layers`.

        Raises:
            ValueError: as for `set_steps`.
        """
        n_steps, source = self._prepare_steps(n_steps), self._marked(source)
        return self._decode(self._encode(source, n_steps), source, target_in, n_steps)

    @torch.no_grad()
    def greedy(
        self,
        source: Int[Tensor, "batch source_pos"],
        max_length: int,
        *,
        n_steps: int | None = None,
    ) -> Int[Tensor, "batch max_length"]:
        """Greedy decoding: the most probable token after each prefix up to `end`, then padding.

        The source is encoded once; the decoder runs over the whole prefix for each token, and its
        hooks are called each time. To test whether the decoded sequence equals the target, one
        forward pass with `target_in` is enough: the target must have the highest logit everywhere.

        Raises:
            ValueError: max_length is less than 1, or as for `forward`.
        """
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}")
        n_steps, source = self._prepare_steps(n_steps), self._marked(source)
        encoded = self._encode(source, n_steps)
        decoded = source.new_full((len(source), max_length + 1), self.config.padding)
        decoded[:, 0] = self.config.begin
        unfinished = torch.ones(len(source), dtype=torch.bool, device=source.device)
        for length in range(1, max_length + 1):
            logits = self._decode(encoded, source, decoded[:, :length], n_steps)
            best = logits[:, -1].argmax(-1)
            decoded[:, length] = torch.where(unfinished, best, self.config.padding)
            unfinished &= best != self.config.end
            if not unfinished.any():
                break
        return decoded[:, 1:]

    def _encode(
        self, source: Int[Tensor, "batch source_pos"], n_steps: int
    ) -> Float[Tensor, "batch source_pos d_model"]:
        mask = self._is_token(source)[:, None, None]
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
        causal = encoded.new_ones(n_positions, n_positions, dtype=torch.bool).tril()
        mask = self._is_token(target_in)[:, None, None] & causal
        source_mask = self._is_token(source)[:, None, None]
        table = self.W_E if self.W_E_target is None else self.W_E_target
        x = self.hook_embed_target(self._embed(table, target_in))
        for step in range(n_steps):
            points = cast(DecoderBlock, self.decoder_blocks[step])
            block = points if self.decoder_core is None else self.decoder_core
            x = block(x, encoded, mask=mask, source_mask=source_mask, hooks=points)
        weight = table if self.W_U is None else self.W_U.T
        return linear(self.ln_final(x), weight, self.b_U)

    def _marked(self, source: Int[Tensor, "batch pos"]) -> Int[Tensor, "batch marked_pos"]:
        """The source between its marks, if the config has them."""
        if not self.config.marks:
            return source
        begin, end = self.config.d_input, self.config.d_input + 1
        marked = nn.functional.pad(source, (1, 1), value=self.config.padding)
        marked[:, 0] = begin
        length = self._is_token(source).sum(1, keepdim=True)
        return marked.scatter(1, length + 1, end)

    def _is_token(self, tokens: Int[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
        return tokens != self.config.padding

    def _embed(
        self, table: Float[Tensor, "id d_model"], tokens: Int[Tensor, "batch pos"]
    ) -> Float[Tensor, "batch pos d_model"]:
        # Padding need not be an id of the table; its embedding is never attended to.
        x = table[tokens.masked_fill(~self._is_token(tokens), 0)]
        x = x * self.config.d_model**0.5 if self.config.one_embedding else x
        x = x + sinusoidal_embedding(*x.shape[1:]).to(x)
        return dropout(x, self.config.dropout, self.training)
