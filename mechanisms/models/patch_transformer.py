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
from torch.nn.functional import dropout, linear
from transformer_lens.hook_points import HookPoint

from mechanisms.attention.positions import sinusoidal_embedding
from mechanisms.initialization import lecun_normal, zeros
from mechanisms.layers.depth import SteppedModel, stack_blocks
from mechanisms.models.transformer import LAYER_NORM_EPSILON, Block, run_blocks
from mechanisms.protocols import AttentionProtocol, ComponentConfig
from mechanisms.validation import check_choice, check_dropout, check_sizes

PatchPositions = Literal["learned", "sinusoidal"]


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
        positions: position encoding of the patches, row by row: `learned` or `sinusoidal`.
        shared: whether all blocks have the same weights.
        dropout: dropout probability of the embedding and of what attention and feed-forward layer
            add to the stream.

    Raises:
        ValueError: a setting is not allowed, or there are both a condition and several tasks.
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
    positions: PatchPositions = "learned"
    shared: bool = True
    dropout: float = 0.0

    def __post_init__(self):
        check_sizes(self, "image_size", "patch_size", "n_channels", "d_model", "n_layers")
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
        check_choice(self, "positions", PatchPositions)
        check_dropout(self)

    @property
    def n_patches(self) -> int:
        """Number of patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def n_classes(self) -> tuple[int, ...]:
        """Number of classes of each task."""
        return self.d_output if isinstance(self.d_output, tuple) else (self.d_output,)


class PatchTransformer(SteppedModel):
    """A pre-LN transformer over the patches of an image, read out at a class token.

    Dosovitskiy et al. 2021 (ViT), as Mittal et al. 2021 use it with weights shared over depth. The
    positions are the patches, row by row; the condition, if any; and last the class token, whose
    final state is mapped linearly to the logits. (It is last so that the last block computes only
    this position, unless it has hooks.)

    Hook points: `hook_embed` and `blocks.{i}.*`; with shared weights the weights live in `core`.
    All embeddings, including learned positions, start at unit scale.

    Args:
        config: the configuration.
        generator: random generator of the initial weights; None for torch's global generator.
    """

    def __init__(self, config: PatchTransformerConfig, *, generator: torch.Generator | None = None):
        super().__init__(config.n_layers, shared=config.shared)
        self.config = config
        d_model, d_patch = config.d_model, config.n_channels * config.patch_size**2
        self.W_E = lecun_normal(d_patch, d_model, fan_in=d_patch, generator=generator)
        self.b_E = zeros(d_model)
        self.W_pos = None
        if config.positions == "learned":
            self.W_pos = lecun_normal(config.n_patches, d_model, fan_in=1, generator=generator)
        self.W_condition, self.b_condition = None, None
        if config.d_condition is not None:
            self.W_condition = lecun_normal(
                config.d_condition, d_model, fan_in=config.d_condition, generator=generator
            )
            self.b_condition = zeros(d_model)
        self.cls = lecun_normal(d_model, fan_in=1, generator=generator)
        self.hook_embed = HookPoint()
        self.core, self.blocks = stack_blocks(
            lambda: Block(config, dropout=config.dropout, generator=generator),
            config.n_layers,
            shared=config.shared,
        )
        self.ln_final = nn.LayerNorm(d_model, eps=LAYER_NORM_EPSILON)
        n_tasks, n_logits = len(config.n_classes), max(config.n_classes)
        self.W_U = lecun_normal(n_tasks, d_model, n_logits, fan_in=d_model, generator=generator)
        self.b_U = zeros(n_tasks, n_logits)
        absent = torch.arange(n_logits) >= torch.tensor(config.n_classes)[:, None]
        self.register_buffer("absent", absent, persistent=False)
        self.setup()

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
                as for `set_steps`.
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
        heads = einsum(
            self.ln_final(x[:, 0]), self.W_U, "batch d, task d logit -> batch task logit"
        )
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
        positions = self.W_pos
        if positions is None:
            positions = sinusoidal_embedding(*patches.shape[1:]).to(patches)
        tokens = [patches + positions, repeat(self.cls, "d -> batch 1 d", batch=len(image))]
        if self.W_condition is not None:
            assert condition is not None
            embedded = linear(condition, self.W_condition.T, self.b_condition)
            tokens.insert(1, embedded[:, None])
        return torch.cat(tokens, 1)
