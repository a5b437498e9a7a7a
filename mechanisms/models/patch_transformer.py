"""A transformer that reads an image patch by patch and answers at a class token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear
from transformer_lens.hook_points import HookPoint

from mechanisms.attention.positions import sinusoidal_embedding
from mechanisms.dropout import dropout
from mechanisms.initialization import lecun_normal, redraw_uniformly, zeros
from mechanisms.layers.depth import SteppedModel, stack_blocks
from mechanisms.models.transformer import LAYER_NORM_EPSILON, Block, run_blocks
from mechanisms.protocols import AttentionProtocol, ComponentConfig
from mechanisms.sequences import rows_of_table
from mechanisms.validation import check_choice, check_dropout, check_positive, check_sizes

PatchPositions = Literal["learned", "sinusoidal", "fast_sinusoidal"]
PatchEmbedding = Literal["linear", "mlp"]
ConditionPlace = Literal["token", "beside"]
Initialization = Literal["lecun_normal", "uniform"]


@dataclass(frozen=True, kw_only=True)
class PatchTransformerConfig:
    """Configuration of a `PatchTransformer`: image and model sizes, components.

    Args:
        image_size: height and width of the images, in pixels.
        patch_size: height and width of a patch; it divides `image_size`.
        n_channels: number of channels of the images.
        d_output: number of classes; for several tasks a tuple with the number for each task: the
            index of the task is then a second input of the model.
        d_model: width of the residual stream.
        n_layers: number of blocks, or of steps through the shared block.
        attention: config of the attention, for example `AttentionConfig`.
        feed_forward: config of the feed-forward layer, for example `FeedForwardConfig`.
        d_condition: width of a second input vector, such as a question; None for no second input.
        condition: where the second input goes: a `token` of its own, or `beside` every token: both
            are embedded in d_model / 2 channels, whose concatenation is mapped linearly.
        positions: position encoding of the patches, row by row: `learned`, `sinusoidal`, or
            `fast_sinusoidal` (`fast_sinusoids`).
        embedding: a patch is mapped by a `linear` map or by an `mlp`, two linear maps with a relu
            between.
        shared: whether all blocks have the same weights.
        final_norm: whether the class token passes a LayerNorm before the read-out.
        d_readout: width of a hidden relu layer of the read-out, shared by all tasks; None for a
            linear read-out.
        norm_epsilon: epsilon of all LayerNorms.
        initialization: `lecun_normal`, with zero biases, or `uniform`, that of torch's linear
            layers, weights and biases in [-1, 1] / sqrt(fan_in); not with learned positions.
        dropout: dropout probability of the embedding and of what attention and feed-forward layer
            add to the stream.

    Raises:
        ValueError: a setting is not allowed, also with others as said above, there are both a
            condition and several tasks, or d_model is odd with a condition beside every token.

    Example:
        >>> config = PatchTransformerConfig(
        ...     image_size=8, patch_size=4, n_channels=3, d_output=10, d_model=16, n_layers=2,
        ...     attention=AttentionConfig(n_heads=4, d_head=4),
        ...     feed_forward=FeedForwardConfig(d_mlp=32),
        ... )
        >>> PatchTransformer(config)(torch.randn(2, 3, 8, 8)).shape  # [batch, 1, d_output]
        torch.Size([2, 1, 10])
    """

    image_size: int
    patch_size: int
    n_channels: int
    d_output: int | tuple[int, ...]
    d_model: int
    n_layers: int
    attention: AttentionProtocol
    feed_forward: ComponentConfig
    d_condition: int | None = None
    condition: ConditionPlace = "token"
    positions: PatchPositions = "learned"
    embedding: PatchEmbedding = "linear"
    shared: bool = True
    final_norm: bool = True
    d_readout: int | None = None
    norm_epsilon: float = LAYER_NORM_EPSILON
    initialization: Initialization = "lecun_normal"
    dropout: float = 0.0

    def __post_init__(self):
        sizes = ("image_size", "patch_size", "n_channels", "d_model", "n_layers")
        check_sizes(self, *sizes, optional=("d_readout",))
        if self.image_size % self.patch_size:
            raise ValueError(
                f"patch_size must divide image_size = {self.image_size}, got {self.patch_size}"
            )
        if not self.n_classes or min(self.n_classes) < 1:
            raise ValueError(f"d_output must be at least 1 for every task, got {self.d_output}")
        if self.d_condition is not None and self.d_condition < 1:
            raise ValueError(f"d_condition must be None or at least 1, got {self.d_condition}")
        if self.d_condition is not None and isinstance(self.d_output, tuple):
            raise ValueError(
                f"d_condition must be None with several tasks, d_output = {self.d_output}, "
                f"got {self.d_condition}"
            )
        check_choice(self, "condition", ConditionPlace)
        if self.beside and self.d_model % 2:
            raise ValueError(
                f"d_model must be even with a condition beside every token, got {self.d_model}"
            )
        check_choice(self, "positions", PatchPositions)
        check_choice(self, "embedding", PatchEmbedding)
        check_choice(self, "initialization", Initialization)
        if self.initialization == "uniform" and self.positions == "learned":
            raise ValueError(
                "positions must be sinusoidal or fast_sinusoidal with initialization='uniform', "
                f"got {self.positions!r}"
            )
        check_positive(self, "norm_epsilon")
        check_dropout(self)

    @property
    def beside(self) -> bool:
        """Whether there is a condition beside every token."""
        return self.d_condition is not None and self.condition == "beside"

    @property
    def d_token(self) -> int:
        """Width of an embedded patch before a condition is put beside it."""
        return self.d_model // 2 if self.beside else self.d_model

    @property
    def n_patches(self) -> int:
        """Number of patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def n_classes(self) -> tuple[int, ...]:
        """Number of classes of each task."""
        return self.d_output if isinstance(self.d_output, tuple) else (self.d_output,)


def fast_sinusoids(n_positions: int, d_model: int) -> Float[Tensor, "pos d_model"]:
    """Sines in the even channels, cosines in the odd ones, at a rate of 10^(-8 c / d) in channel c.

    The positions of Mittal et al. 2021 (their code): rates fall twice as fast as those of Vaswani
    et al. 2017, the two channels of a pair have different ones, and the amplitude is 1 / (1 + 1/e).
    """
    channel = torch.arange(d_model, dtype=torch.float64)
    angle = torch.arange(n_positions)[:, None] * 10.0 ** (-8 * channel / d_model)
    wave = torch.where(channel % 2 == 0, angle.sin(), angle.cos())
    return (wave / (1 + math.exp(-1))).float()


class PatchTransformer(SteppedModel):
    """A pre-LN transformer over the patches of an image, read out at a class token.

    Dosovitskiy et al. 2021 (ViT), as Mittal et al. 2021 use it with weights shared over depth. The
    positions are the patches, row by row; the condition, if it has a token; and last the class
    token, whose final state is mapped to the logits. (It is last so that the last block computes
    only this position, unless it has hooks.) With several tasks each has its own class token and
    its own linear map to logits.

    Parameters: `W_E`, and with `mlp` `W_E2`, of the patches; `W_pos`; `W_condition`, and with a
    condition beside every token `W_join` [2 d_token, d_model]; `cls` [d_token], or with several
    tasks [task, d_token]; `W_hidden` [d_model, d_readout]; `W_U` [task, d, logit].

    Hook points: `hook_embed` and `blocks.{i}.*`; with shared weights the weights live in `core`.
    All embeddings, including learned positions, start at unit scale.

    Args:
        config: the configuration.
        generator: random generator of the initial weights; None for torch's global generator.

    Example:
        >>> parts = {"attention": attention, "feed_forward": feed_forward, "n_layers": 2}
        >>> sizes = {"image_size": 8, "patch_size": 4, "n_channels": 3, "d_model": 16}
        >>> model = PatchTransformer(PatchTransformerConfig(d_output=10, **parts, **sizes))
        >>> _, cache = model.run_with_cache(torch.randn(2, 3, 8, 8))
        >>> cache["hook_embed"].shape  # four patches and the class token
        torch.Size([2, 5, 16])
    """

    def __init__(self, config: PatchTransformerConfig, *, generator: torch.Generator | None = None):
        super().__init__(config.n_layers, shared=config.shared)
        self.config = config
        d_model, d_token = config.d_model, config.d_token
        n_tasks, n_logits = len(config.n_classes), max(config.n_classes)
        d_patch = config.n_channels * config.patch_size**2
        self.W_E, self.b_E = self._map(d_patch, d_token, generator)
        self.W_E2, self.b_E2 = None, None
        if config.embedding == "mlp":
            self.W_E2, self.b_E2 = self._map(d_token, d_token, generator)
        self.W_pos = None
        if config.positions == "learned":
            self.W_pos = lecun_normal(config.n_patches, d_token, fan_in=1, generator=generator)
        self.W_condition, self.b_condition, self.W_join, self.b_join = None, None, None, None
        if config.d_condition is not None:
            self.W_condition, self.b_condition = self._map(config.d_condition, d_token, generator)
        if config.beside:
            self.W_join, self.b_join = self._map(2 * d_token, d_model, generator)
        tasks = (n_tasks,) if isinstance(config.d_output, tuple) else ()
        self.cls = lecun_normal(*tasks, d_token, fan_in=1, generator=generator)
        self.hook_embed = HookPoint()
        self.core, self.blocks = stack_blocks(
            lambda: Block(
                config,
                norm_epsilon=config.norm_epsilon,
                dropout=config.dropout,
                generator=generator,
            ),
            config.n_layers,
            shared=config.shared,
        )
        norm = nn.LayerNorm(d_model, eps=config.norm_epsilon)
        self.ln_final = norm if config.final_norm else None
        self.W_hidden, self.b_hidden = None, None
        d_last = d_model
        if config.d_readout is not None:
            d_last = config.d_readout
            self.W_hidden, self.b_hidden = self._map(d_model, d_last, generator)
        self.W_U = lecun_normal(n_tasks, d_last, n_logits, fan_in=d_last, generator=generator)
        self.b_U = zeros(n_tasks, n_logits)
        absent = torch.arange(n_logits) >= torch.tensor(config.n_classes)[:, None]
        self.register_buffer("absent", absent, persistent=False)
        if config.initialization == "uniform":
            redraw_uniformly(self, generator=generator)
        self.setup()

    def _map(
        self, d_in: int, d_out: int, generator: torch.Generator | None
    ) -> tuple[nn.Parameter, nn.Parameter]:
        """The weight [d_in, d_out] and the bias of a linear map."""
        return lecun_normal(d_in, d_out, fan_in=d_in, generator=generator), zeros(d_out)

    def _stacks(self) -> Sequence[nn.ModuleList]:
        return (self.blocks,)

    def forward(
        self,
        image: Float[Tensor, "batch channel height width"],
        condition: Float[Tensor, "batch d_condition"] | Int[Tensor, " batch"] | None = None,
        *,
        n_steps: int | None = None,
    ) -> Float[Tensor, "batch 1 d_output"]:
        """The logits of each image; -inf for classes that its task does not have.

        Args:
            image: images with the size and number of channels of the config.
            condition: with `d_condition` a vector of that width; with several tasks the index of
                the task; else None.
            n_steps: number of steps with shared weights; None for `n_layers`.

        Raises:
            ValueError: the image has the wrong shape, the condition is missing or not expected, or
                as for `set_steps`, or for tasks as for `rows_of_table`.
        """
        config = self.config
        n_steps = self._prepare_steps(n_steps)
        expected = (config.n_channels, config.image_size, config.image_size)
        if image.shape[1:] != expected:
            raise ValueError(f"image must be [batch, *{expected}], got {list(image.shape)}")
        conditioned = config.d_condition is not None or isinstance(config.d_output, tuple)
        if conditioned != (condition is not None):
            raise ValueError(
                f"condition must {'not ' if conditioned else ''}be None with d_condition = "
                f"{config.d_condition} and d_output = {config.d_output}, got "
                f"{'None' if condition is None else list(condition.shape)}"
            )
        x = dropout(self._embed(image, condition), config.dropout, self.training)
        x = self.hook_embed(x)
        x = run_blocks(x, self.core, self.blocks, n_steps, n_readout=1)
        state = x[:, 0] if self.ln_final is None else self.ln_final(x[:, 0])
        if self.W_hidden is not None:
            state = linear(state, self.W_hidden.T, self.b_hidden).relu()
        heads = einsum(state, self.W_U, "batch d, task d logit -> batch task logit")
        if not isinstance(config.d_output, tuple):
            return heads + self.b_U
        assert condition is not None
        logits = (heads + self.b_U).take_along_dim(condition[:, None, None], 1)
        return logits.masked_fill(self.get_buffer("absent")[condition][:, None], -math.inf)

    def _embed(
        self,
        image: Float[Tensor, "batch channel height width"],
        condition: Float[Tensor, "batch d_condition"] | Int[Tensor, " batch"] | None,
    ) -> Float[Tensor, "batch pos d_model"]:
        size = self.config.patch_size
        pattern = "batch channel (row y) (column x) -> batch (row column) (channel y x)"
        patches = linear(rearrange(image, pattern, y=size, x=size), self.W_E.T, self.b_E)
        if self.W_E2 is not None:
            patches = linear(patches.relu(), self.W_E2.T, self.b_E2)
        positions = self.W_pos
        if positions is None:
            is_fast = self.config.positions == "fast_sinusoidal"
            waves = fast_sinusoids if is_fast else sinusoidal_embedding
            positions = waves(*patches.shape[1:]).to(patches)
        if isinstance(self.config.d_output, tuple):
            assert condition is not None
            cls = self.cls[rows_of_table(condition, len(self.cls), name="tasks")][:, None]
        else:
            cls = repeat(self.cls, "d -> batch 1 d", batch=len(image))
        tokens = [patches + positions, cls]
        if self.W_condition is None:
            return torch.cat(tokens, 1)
        assert condition is not None
        embedded = linear(condition, self.W_condition.T, self.b_condition)[:, None]
        if self.W_join is None:
            return torch.cat([tokens[0], embedded, cls], 1)
        x = torch.cat(tokens, 1)
        pairs = torch.cat([x, embedded.expand(-1, x.shape[1], -1)], -1)
        return linear(pairs, self.W_join.T, self.b_join)
