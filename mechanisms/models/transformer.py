"""A pre-LN transformer with hook points, with or without weights shared over depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear
from transformer_lens.hook_points import HookPoint

from mechanisms.attention.masks import check_token_mask
from mechanisms.attention.positions import (
    RelativePositionBias,
    check_buckets,
    sinusoidal_embedding,
)
from mechanisms.dropout import dropout
from mechanisms.hooking import observed
from mechanisms.initialization import lecun_normal, normal, zeros
from mechanisms.layers.depth import SteppedModel, stack_blocks
from mechanisms.layers.residual import ResidualBlock
from mechanisms.models.initial_weights import redraw_as_fairseq
from mechanisms.protocols import AttentionProtocol, ComponentConfig
from mechanisms.sequences import check_shape, rows_of_table
from mechanisms.validation import check_choice, check_dropout, check_positive, check_sizes

Inputs = Literal["vectors", "tokens"]
Positions = Literal["relative", "sinusoidal", "relative_and_sinusoidal", "none"]
Norm = Literal["layer_norm", "rms_norm"]
TransformerInitialization = Literal["lecun_normal", "mittal_2021"]

LAYER_NORM_EPSILON = 1e-6


class BlockConfig(Protocol):
    """The settings of a `Block`, which the config of every model with such blocks has.

    Example:
        >>> config: BlockConfig = model.config  # that of a `Transformer`
        >>> config.d_model, config.attention.n_heads, config.feed_forward.d_mlp
        (16, 4, 16)
    """

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        ...

    @property
    def attention(self) -> AttentionProtocol:
        """Config of the attention, for example `AttentionConfig`."""
        ...

    @property
    def feed_forward(self) -> ComponentConfig:
        """Config of the feed-forward layer, for example `FeedForwardConfig`."""
        ...


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Configuration of a `Transformer`: sizes, components and positions.

    Args:
        d_input: width of the input vectors, or number of token ids.
        d_output: number of logits per position.
        d_model: width of the residual stream.
        n_layers: number of blocks, or of steps through the shared block.
        attention: config of the attention, for example `AttentionConfig`.
        feed_forward: config of the feed-forward layer, for example `FeedForwardConfig` or
            `MixtureOfExpertsConfig`.
        inputs: `vectors` [batch, pos, d_input] or `tokens` [batch, pos].
        positions: `relative` (T5 bias, one table for each layer), `sinusoidal` (added to the
            embedding), `relative_and_sinusoidal` or `none`.
        max_distance: the relative bias does not distinguish larger distances; required with
            relative positions only.
        n_buckets: number of distance buckets of the relative bias (T5: 32 with `max_distance`
            128); None for `max_distance`.
        bidirectional: whether the relative bias distinguishes keys to the right.
        causal: whether a position attends only to itself and to its left.
        shared: whether all blocks have the same weights.
        n_readout: number of last positions at which logits are computed; None for all positions.
        norm: norm before the attention and the feed-forward layer of each block, `layer_norm` or
            `rms_norm` (Zhang and Sennrich 2019; scale only). The final norm is a LayerNorm.
        tied: whether the read-out is the transposed token embedding without bias, with logits
            divided by sqrt(d_model); needs `tokens`, and as many logits as token ids.
        scaled: whether embeddings are multiplied by sqrt(d_model) (Vaswani et al. 2017, section
            3.4); the logits of a tied read-out are then not divided by it.
        dropout: dropout probability of the embedding, positions included, and of what attention
            and feed-forward layer add to the stream.
        norm_epsilon: epsilon of all norms.
        initialization: `lecun_normal`, with zero biases; or `mittal_2021`, that of their language
            models (`redraw_as_fairseq`), which needs `tied`.

    Raises:
        ValueError: a setting is not allowed, or is required by `positions` and missing.

    Example:
        >>> config = TransformerConfig(
        ...     d_input=10, d_output=10, d_model=16, n_layers=2,
        ...     attention=AttentionConfig(n_heads=4, d_head=4),
        ...     feed_forward=FeedForwardConfig(d_mlp=32),
        ...     inputs="tokens", positions="sinusoidal",
        ... )
        >>> Transformer(config)(tokens).shape  # [batch, pos, d_output]
        torch.Size([40, 5, 10])
    """

    d_input: int
    d_output: int
    d_model: int
    n_layers: int
    attention: AttentionProtocol
    feed_forward: ComponentConfig
    inputs: Inputs = "vectors"
    positions: Positions = "relative"
    max_distance: int | None = None
    n_buckets: int | None = None
    bidirectional: bool = False
    causal: bool = False
    shared: bool = False
    n_readout: int | None = None
    norm: Norm = "layer_norm"
    tied: bool = False
    scaled: bool = False
    dropout: float = 0.0
    norm_epsilon: float = LAYER_NORM_EPSILON
    initialization: TransformerInitialization = "lecun_normal"

    def __post_init__(self):
        check_sizes(self, "d_input", "d_output", "d_model", "n_layers")
        check_dropout(self)
        check_positive(self, "norm_epsilon")
        check_choice(self, "inputs", Inputs)
        check_choice(self, "positions", Positions)
        check_choice(self, "norm", Norm)
        check_choice(self, "initialization", TransformerInitialization)
        if self.has_relative_bias:
            if self.max_distance is None or self.max_distance < 2:
                raise ValueError(
                    f"max_distance must be at least 2 with positions={self.positions!r}, "
                    f"got {self.max_distance}"
                )
            check_buckets(
                n_buckets=self.max_distance if self.n_buckets is None else self.n_buckets,
                max_distance=self.max_distance,
                bidirectional=self.bidirectional,
            )
        if self.tied and self.inputs != "tokens":
            raise ValueError(f"inputs must be 'tokens' with tied=True, got {self.inputs!r}")
        if self.tied and self.d_output != self.d_input:
            raise ValueError(
                f"d_output must be d_input = {self.d_input} with tied=True, got {self.d_output}"
            )
        if self.initialization == "mittal_2021" and not self.tied:
            raise ValueError("tied must be True with initialization='mittal_2021', got False")
        if self.n_readout is not None and self.n_readout < 1:
            raise ValueError(f"n_readout must be None or at least 1, got {self.n_readout}")

    @property
    def has_relative_bias(self) -> bool:
        """Whether each block has a relative position bias."""
        return self.positions in ("relative", "relative_and_sinusoidal")

    @property
    def has_sinusoids(self) -> bool:
        """Whether sinusoidal positions are added to the embedding."""
        return self.positions in ("sinusoidal", "relative_and_sinusoidal")


class Block(ResidualBlock):
    """A transformer block: x + attention(norm(x)), then x + feed_forward(norm(x)) (pre-LN).

    With `post_norm` norm(x + attention(x)), then norm(x + feed_forward(x)) (Vaswani et al. 2017).

    `relative_bias`, None at first, may be set to a `RelativePositionBias`, which is then added to
    the attention scores.

    Hook points [batch, pos, d_model]: `hook_resid_pre`, `hook_attn_out`, `hook_resid_mid`,
    `hook_mlp_out`, `hook_resid_post`, and those of its `attn` and `mlp`.

    Args:
        config: config of the model that contains the block: its width, attention and feed-forward
            layer.
        norm: `layer_norm` or `rms_norm` (scale only).
        norm_epsilon: epsilon of the norms.
        post_norm: whether the norms come after the sums.
        dropout: dropout probability of what attention and feed-forward layer add to the stream.
        generator: random generator of the initial weights; None for torch's global generator.

    Example:
        >>> block = Block(model.config, norm="rms_norm")
        >>> block(x).shape, block(x, n_queries=1).shape  # all positions, the last one
        (torch.Size([2, 5, 16]), torch.Size([2, 1, 16]))
    """

    def __init__(
        self,
        config: BlockConfig,
        *,
        norm: Norm = "layer_norm",
        norm_epsilon: float = LAYER_NORM_EPSILON,
        post_norm: bool = False,
        dropout: float = 0.0,
        generator: torch.Generator | None = None,
    ):
        super().__init__(post_norm=post_norm, dropout=dropout)
        make_norm = nn.LayerNorm if norm == "layer_norm" else nn.RMSNorm
        self.ln1 = make_norm(config.d_model, eps=norm_epsilon)
        self.attn = config.attention.build(config.d_model, generator=generator)
        self.needs_all_queries = config.attention.needs_all_queries
        self.ln2 = make_norm(config.d_model, eps=norm_epsilon)
        self.mlp = config.feed_forward.build(config.d_model, generator=generator)
        self.relative_bias: RelativePositionBias | None = None
        self.hook_resid_pre, self.hook_attn_out = HookPoint(), HookPoint()
        self.hook_resid_mid, self.hook_mlp_out = HookPoint(), HookPoint()
        self.hook_resid_post = HookPoint()

    def forward(
        self,
        x: Float[Tensor, "batch pos d_model"],
        *,
        mask: Bool[Tensor, "#batch 1 #pos pos"] | None = None,
        n_queries: int | None = None,
        hooks: Block | None = None,
    ) -> Float[Tensor, "batch query_pos d_model"]:
        """The residual stream after this block at the last `n_queries` positions (None: all).

        `hooks` are the hook points of one step, if weights are shared over depth.
        """
        points = self if hooks is None else hooks
        x = points.hook_resid_pre(x)
        queries = keys = self._before(self.ln1, x)
        if n_queries is not None:
            x, queries = x[:, -n_queries:], keys[:, -n_queries:]
            mask = None if mask is None else mask[..., -n_queries:, :]
        bias = None
        if self.relative_bias is not None:
            bias = self.relative_bias(queries.shape[1], keys.shape[1])
        attended = self.attn(queries, keys, bias=bias, mask=mask, hooks=points.attn)
        x = points.hook_resid_mid(self._after(self.ln1, x, points.hook_attn_out(attended)))
        mlp_out = points.hook_mlp_out(self.mlp(self._before(self.ln2, x), hooks=points.mlp))
        return points.hook_resid_post(self._after(self.ln2, x, mlp_out))


def run_blocks(
    x: Float[Tensor, "batch pos d_model"],
    core: Block | None,
    blocks: nn.ModuleList,
    n_steps: int,
    *,
    mask: Bool[Tensor, "#batch 1 #pos pos"] | None = None,
    n_readout: int | None = None,
) -> Float[Tensor, "batch readout_pos d_model"]:
    """The last `n_readout` positions (None: all) of the residual stream after `n_steps` blocks.

    The last block computes only these positions, unless its attention needs all queries or it has
    hooks, which see all positions. `core` and `blocks` are those of `stack_blocks`.
    """
    for step in range(n_steps):
        points = cast(Block, blocks[step])
        block = points if core is None else core
        is_last = step == n_steps - 1
        needs_all = block.needs_all_queries or observed(block, points)
        n_queries = n_readout if is_last and not needs_all else None
        x = block(x, mask=mask, n_queries=n_queries, hooks=points)
    return x if n_readout is None else x[:, -n_readout:]


class Embed(nn.Module):
    """A linear map of vectors, or a table of token embeddings: `W_E` [d_input, d_model].

    The table starts from a normal distribution with the standard deviation d_model^-0.5.
    """

    def __init__(self, config: TransformerConfig, *, generator: torch.Generator | None = None):
        super().__init__()
        d_input, d_model = config.d_input, config.d_model
        if config.inputs == "vectors":
            self.W_E = lecun_normal(d_input, d_model, fan_in=d_input, generator=generator)
            self.b_E = zeros(d_model)
        else:
            self.W_E = normal(d_input, d_model, std=d_model**-0.5, generator=generator)
            self.b_E = None

    def forward(
        self, inputs: Float[Tensor, "batch pos d_input"] | Int[Tensor, "batch pos"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """The embedding of every token."""
        if self.b_E is None:
            check_shape("tokens", inputs, "batch", "pos")
            return self.W_E[rows_of_table(inputs, len(self.W_E))]
        check_shape("inputs", inputs, "batch", "pos", len(self.W_E))
        return linear(inputs, self.W_E.T, self.b_E)


class Unembed(nn.Module):
    """The linear read-out: `W_U` [d_model, d_output], `b_U` [d_output]."""

    def __init__(self, config: TransformerConfig, *, generator: torch.Generator | None = None):
        super().__init__()
        self.W_U = lecun_normal(
            config.d_model, config.d_output, fan_in=config.d_model, generator=generator
        )
        self.b_U = zeros(config.d_output)

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_output"]:
        """The logits of every token."""
        return linear(x, self.W_U.T, self.b_U)


class Transformer(SteppedModel):
    """A pre-LN transformer: embedding, blocks, final LayerNorm, linear read-out (`read_out`).

    Vaswani et al. 2017 with the LayerNorm before attention and feed-forward layer (Xiong et al.
    2020); with `shared=True` a Universal Transformer without halting (Dehghani et al. 2019).

    Hook points: `hook_embed` and `blocks.{i}.*`. With shared weights the weights live in `core`,
    and `blocks[t]` only holds the hook points of step t.

    With `n_readout` the last block computes only the last `n_readout` positions, unless it has
    hooks, which see all positions. (This saves a fifth to a quarter of the time per step with four
    layers.)

    Args:
        config: the configuration.
        generator: random generator of the initial weights; None for torch's global generator.

    Example:
        >>> logits, cache = model.run_with_cache(tokens)
        >>> logits.shape, cache["blocks.1.attn.hook_pattern"].shape
        (torch.Size([40, 5, 10]), torch.Size([40, 4, 5, 5]))
    """

    def __init__(self, config: TransformerConfig, *, generator: torch.Generator | None = None):
        super().__init__(config.n_layers, shared=config.shared)
        self.config = config
        self.embed = Embed(config, generator=generator)
        self.hook_embed = HookPoint()
        self.core, self.blocks = stack_blocks(
            lambda: build_block(config, generator=generator), config.n_layers, shared=config.shared
        )
        self.ln_final = nn.LayerNorm(config.d_model, eps=config.norm_epsilon)
        self.unembed = None if config.tied else Unembed(config, generator=generator)
        if config.initialization == "mittal_2021":
            redraw_as_fairseq(self, embedding_std=config.d_model**-0.5, generator=generator)
        self.setup()

    def _stacks(self) -> Sequence[nn.ModuleList]:
        return (self.blocks,)

    def forward(
        self,
        inputs: Float[Tensor, "batch pos d_input"] | Int[Tensor, "batch pos"],
        *,
        mask: Bool[Tensor, "batch pos"] | None = None,
        n_steps: int | None = None,
    ) -> Float[Tensor, "batch readout_pos d_output"]:
        """The logits at the last `n_readout` positions.

        Args:
            inputs: vectors or token ids in [0, d_input), depending on the config.
            mask: True for tokens, False for padding, which is never attended to, and whose ids may
                be any.
            n_steps: number of steps with shared weights; None for `n_layers`.

        Raises:
            TypeError: `mask` is not boolean, or as for `rows_of_table`.
            ValueError: inputs or `mask` have another shape; as for `set_steps`, or for ids as for
                `rows_of_table`.
        """
        n_steps = self._prepare_steps(n_steps)
        config = self.config
        check_token_mask(mask, inputs)
        if mask is not None and config.inputs == "tokens":
            inputs = torch.where(mask, inputs, inputs.clamp(0, config.d_input - 1))
        x = self.embed(inputs)
        n_positions = x.shape[1]
        if config.scaled:
            x = x * config.d_model**0.5
        if config.has_sinusoids:
            x = x + sinusoidal_embedding(n_positions, config.d_model).to(x)
        x = self.hook_embed(dropout(x, config.dropout, self.training))

        pair_mask = None if mask is None else mask[:, None, None, :]
        if self.config.causal:
            causal = torch.ones(n_positions, n_positions, dtype=torch.bool, device=x.device).tril()
            pair_mask = causal[None, None] if pair_mask is None else pair_mask & causal

        x = run_blocks(
            x, self.core, self.blocks, n_steps, mask=pair_mask, n_readout=self.config.n_readout
        )
        return self.read_out(x)

    def read_out(
        self, x: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_output"]:
        """The logits of a residual stream, through the final LayerNorm and the read-out."""
        x = self.ln_final(x)
        if self.unembed is None:
            logits = linear(x, self.embed.W_E)
            return logits if self.config.scaled else logits / self.config.d_model**0.5
        return self.unembed(x)


def build_block(config: TransformerConfig, *, generator: torch.Generator | None = None) -> Block:
    """One block of a `Transformer`, with its relative position bias where it has one."""
    block = Block(
        config,
        norm=config.norm,
        norm_epsilon=config.norm_epsilon,
        dropout=config.dropout,
        generator=generator,
    )
    if config.has_relative_bias:
        assert config.max_distance is not None
        block.relative_bias = RelativePositionBias(
            n_heads=config.attention.n_heads,
            n_buckets=config.max_distance if config.n_buckets is None else config.n_buckets,
            max_distance=config.max_distance,
            bidirectional=config.bidirectional,
            generator=generator,
        )
    return block
