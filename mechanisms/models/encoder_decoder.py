"""An encoder-decoder transformer from one token sequence to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear
from transformer_lens.hook_points import HookPoint

from mechanisms.attention.crossing import require_crossing
from mechanisms.attention.positions import sinusoidal_embedding
from mechanisms.dropout import dropout
from mechanisms.initialization import lecun_normal, zeros
from mechanisms.layers.depth import SteppedModel, stack_blocks
from mechanisms.layers.halting import Halting, HaltingConfig, run_steps
from mechanisms.layers.step_signals import StepSignal, StepSignals
from mechanisms.models.beam_search import beam_search
from mechanisms.models.decoder_block import DecoderBlock
from mechanisms.models.initial_weights import redraw_as_scan, redraw_as_tensor2tensor
from mechanisms.models.transformer import LAYER_NORM_EPSILON, Block
from mechanisms.protocols import AttentionProtocol, ComponentConfig
from mechanisms.sequences import rows_of_table
from mechanisms.validation import check_choice, check_dropout, check_positive, check_sizes

EncoderDecoderInitialization = Literal["lecun_normal", "xavier_uniform", "mittal_2021"]


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
        positions_each_step: whether the sinusoidal positions are added before each step instead of
            to the embeddings; needs `shared`, as do the next two.
        step_signal: what is added before each step to tell it from the others, see `StepSignals`;
            with `learned` there are `n_layers` steps at most.
        halting: config of adaptive computation time in encoder and decoder, at most `n_layers`
            steps for each column; None for `n_layers` steps of all columns.
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
        initialization: `lecun_normal`, with zero biases; `xavier_uniform`, with zero biases, as in
            tensor2tensor (its `uniform_unit_scaling` with gain 1); or `mittal_2021`, that of their
            encoder-decoders for SCAN (`redraw_as_scan`). In the latter two embeddings are normal
            without truncation.
        dropout: dropout probability of the embeddings and of what each part of a block adds to the
            stream.

    Raises:
        ValueError: a setting is not allowed.

    Example:
        >>> config = EncoderDecoderConfig(
        ...     d_input=10, d_output=12, d_model=16, n_layers=2, begin=10, end=11, padding=-1,
        ...     attention=AttentionConfig(n_heads=4, d_head=4),
        ...     feed_forward=FeedForwardConfig(d_mlp=32),
        ... )
        >>> EncoderDecoder(config)(tokens, tokens[:, :3]).shape  # [batch, target_pos, d_output]
        torch.Size([40, 3, 12])
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
    positions_each_step: bool = False
    step_signal: StepSignal = "none"
    halting: HaltingConfig | None = None
    marks: bool = False
    tied: bool = False
    one_embedding: bool = False
    post_norm: bool = False
    norm_epsilon: float = LAYER_NORM_EPSILON
    initialization: EncoderDecoderInitialization = "lecun_normal"
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
        check_choice(self, "step_signal", StepSignal)
        has_steps = self.positions_each_step or self.step_signal != "none" or self.halting
        if has_steps and not self.shared:
            raise ValueError(
                "shared must be True with positions_each_step, step_signal or halting, got False"
            )
        require_crossing("cross_attention", self.between)
        check_positive(self, "norm_epsilon")
        check_choice(self, "initialization", EncoderDecoderInitialization)
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


class EncoderDecoder(SteppedModel):
    """A transformer that predicts a target sequence from a source sequence.

    Vaswani et al. 2017, with weights shared over depth as Mittal et al. 2021 train it on SCAN (with
    `post_norm`; by default the LayerNorm is before each part of a block). Positions are sinusoidal;
    padding is never attended to. With `positions_each_step`, a `step_signal` and `halting` this is
    a Universal Transformer (Dehghani et al. 2019).

    Hook points: of the source, marks included, `hook_embed`, `encoder_blocks.{i}.*` (those of a
    `Block`) and `hook_encoded`, the encoder's output after its LayerNorm; of the target
    `hook_embed_target` and `decoder_blocks.{i}.*` (those of a `DecoderBlock`); with halting those
    of `Halting` in `encoder_blocks.{i}.halt` and `decoder_blocks.{i}.halt`. With shared weights the
    weights live in `encoder_core` and `decoder_core`. Embedded tokens start with the scale of the
    sinusoids, those of `W_E` and `W_E_target` from N(0, 1).

    Args:
        config: the configuration.
        generator: random generator of the initial weights; None for torch's global generator.

    Example:
        >>> parts = {"attention": attention, "feed_forward": feed_forward, "n_layers": 2}
        >>> ids = {"d_input": 10, "d_output": 12, "begin": 10, "end": 11, "padding": -1}
        >>> model = EncoderDecoder(EncoderDecoderConfig(d_model=16, **parts, **ids))
        >>> model.greedy(tokens, max_length=3).shape
        torch.Size([40, 3])
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
            lambda: self._halting(
                Block(
                    config,
                    norm_epsilon=config.norm_epsilon,
                    post_norm=config.post_norm,
                    dropout=config.dropout,
                    generator=generator,
                ),
                generator,
            ),
            config.n_layers,
            shared=shared,
        )
        self.ln_encoded = self._last_norm()
        self.hook_encoded = HookPoint()
        self.decoder_core, self.decoder_blocks = stack_blocks(
            lambda: self._halting(DecoderBlock(config, generator=generator), generator),
            config.n_layers,
            shared=shared,
        )
        self.encoder_signals, self.decoder_signals = (
            StepSignals(
                config.step_signal,
                positions=config.positions_each_step,
                n_steps=config.n_layers,
                d_model=d_model,
                generator=generator,
            )
            for _ in range(2)
        )
        self.ln_final = self._last_norm()
        self.W_U = None
        if not (config.tied or config.one_embedding):
            self.W_U = lecun_normal(d_model, config.d_output, fan_in=d_model, generator=generator)
        self.b_U = None if config.one_embedding else zeros(config.d_output)
        embedding_std = fan_in**-0.5
        if config.initialization == "xavier_uniform":
            redraw_as_tensor2tensor(self, embedding_std=embedding_std, generator=generator)
        elif config.initialization == "mittal_2021":
            redraw_as_scan(self, embedding_std=embedding_std, generator=generator)
        self.setup()

    def _last_norm(self) -> nn.Module:
        """The norm of the last state; with `post_norm` the block has done it."""
        config = self.config
        if config.post_norm:
            return nn.Identity()
        return nn.LayerNorm(config.d_model, eps=config.norm_epsilon)

    def _halting(
        self, block: Block | DecoderBlock, generator: torch.Generator | None
    ) -> Block | DecoderBlock:
        """The block, with a halting unit if the config has one."""
        config = self.config
        if config.halting is not None:
            halt = Halting(config.halting, config.d_model, generator=generator)
            block.add_module("halt", halt)
        return block

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
            ValueError: as for `set_steps` and `rows_of_table`, or there are not as many learned
                step signals.
        """
        return self.forward_with_cost(source, target_in, n_steps=n_steps)[0]

    def forward_with_cost(
        self,
        source: Int[Tensor, "batch source_pos"],
        target_in: Int[Tensor, "batch target_pos"],
        *,
        n_steps: int | None = None,
    ) -> tuple[
        Float[Tensor, "batch target_pos d_output"],
        tuple[Float[Tensor, "batch source_pos"], Float[Tensor, "batch target_pos"]],
    ]:
        """The logits, and the ponder costs of all columns of the encoder and of the decoder.

        The cost of a column is its number of steps, plus the remainder with halting; padding, and
        with `marks` the marks, have columns too. Arguments and errors as for `forward`.
        """
        n_steps, source = self._prepared(n_steps), self._marked(source)
        encoded, encoder_cost = self._encode(source, n_steps)
        logits, decoder_cost = self._decode(encoded, source, target_in, n_steps)
        return logits, (encoder_cost, decoder_cost)

    def greedy(
        self,
        source: Int[Tensor, "batch source_pos"],
        max_length: int,
        *,
        n_steps: int | None = None,
    ) -> Int[Tensor, "batch max_length"]:
        """Greedy decoding: the most probable token after each prefix up to `end`, then padding.

        To test whether the decoded sequence equals the target, one forward pass with `target_in` is
        enough: the target must have the highest logit everywhere.

        Raises:
            ValueError: max_length is less than 1, or as for `forward`.
        """
        return self.search(source, max_length, width=1, n_steps=n_steps)[0][:, 0]

    @torch.no_grad()
    def search(
        self,
        source: Int[Tensor, "batch source_pos"],
        max_length: int,
        *,
        width: int = 4,
        length_penalty: float = 0.6,
        n_steps: int | None = None,
    ) -> tuple[Int[Tensor, "batch width max_length"], Float[Tensor, "batch width"]]:
        """The best target sequences and their scores, by `beam_search`.

        The source is encoded once; the decoder runs over all whole prefixes for each token, and its
        hooks are called each time.

        Raises:
            ValueError: as for `beam_search` and `forward`.
        """
        n_steps, source = self._prepared(n_steps), self._marked(source)
        encoded, _ = self._encode(source, n_steps)

        def next_token(rows: Tensor, prefixes: Tensor) -> Tensor:
            logits, _ = self._decode(encoded[rows], source[rows], prefixes, n_steps)
            return logits[:, -1]

        config = self.config
        return beam_search(
            next_token,
            len(source),
            begin=config.begin,
            end=config.end,
            padding=config.padding,
            max_length=max_length,
            width=width,
            length_penalty=length_penalty,
            device=source.device,
        )

    def _prepared(self, n_steps: int | None) -> int:
        limit = self.config.n_layers
        if self.config.step_signal == "learned" and n_steps is not None and n_steps > limit:
            raise ValueError(
                f"n_steps must be at most n_layers = {limit} with step_signal='learned' "
                f"('sinusoidal' has no limit), got {n_steps}"
            )
        return self._prepare_steps(n_steps)

    def _encode(
        self, source: Int[Tensor, "batch source_pos"], n_steps: int
    ) -> tuple[Float[Tensor, "batch source_pos d_model"], Float[Tensor, "batch source_pos"]]:
        mask = self._is_token(source)[:, None, None]
        core = self.encoder_core

        def update(x: Tensor, points: Any) -> Tensor:
            return (core or points)(x, mask=mask, hooks=points)

        x, cost = run_steps(
            self.hook_embed(self._embed(self.W_E, source)),
            self.encoder_blocks[:n_steps],
            update,
            halt=_halt_of(core),
            signal=self.encoder_signals,
        )
        return self.hook_encoded(self.ln_encoded(x)), cost

    def _decode(
        self,
        encoded: Float[Tensor, "batch source_pos d_model"],
        source: Int[Tensor, "batch source_pos"],
        target_in: Int[Tensor, "batch target_pos"],
        n_steps: int,
    ) -> tuple[Float[Tensor, "batch target_pos d_output"], Float[Tensor, "batch target_pos"]]:
        n_positions = target_in.shape[1]
        causal = encoded.new_ones(n_positions, n_positions, dtype=torch.bool).tril()
        mask = self._is_token(target_in)[:, None, None] & causal
        source_mask = self._is_token(source)[:, None, None]
        table = self.W_E if self.W_E_target is None else self.W_E_target
        core = self.decoder_core

        def update(x: Tensor, points: Any) -> Tensor:
            block = core or points
            return block(x, encoded, mask=mask, source_mask=source_mask, hooks=points)

        x, cost = run_steps(
            self.hook_embed_target(self._embed(table, target_in)),
            self.decoder_blocks[:n_steps],
            update,
            halt=_halt_of(core),
            signal=self.decoder_signals,
        )
        weight = table if self.W_U is None else self.W_U.T
        return linear(self.ln_final(x), weight, self.b_U), cost

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
        # The embedding of padding is never attended to.
        x = table[rows_of_table(tokens, len(table), padding=self.config.padding)]
        x = x * self.config.d_model**0.5 if self.config.one_embedding else x
        if not self.config.positions_each_step:
            x = x + sinusoidal_embedding(*x.shape[1:]).to(x)
        return dropout(x, self.config.dropout, self.training)


def _halt_of(core: nn.Module | None) -> Halting | None:
    """The halting unit of a block; None if it has none."""
    return cast("Halting | None", getattr(core, "halt", None))
