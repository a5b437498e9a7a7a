"""A transformer over several images that classifies the relation between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from mechanisms.attention.positions import interleaved_sinusoids
from mechanisms.differentiation import is_in_transform, widened
from mechanisms.initialization import fans, lecun_normal, zeros
from mechanisms.layers.depth import stack_blocks
from mechanisms.models.transformer import Block, run_blocks
from mechanisms.protocols import AttentionProtocol, ComponentConfig
from mechanisms.validation import check_sizes

N_FILTERS, KERNEL, N_CONVOLUTIONS, D_HIDDEN = 32, 4, 3, 256
MLP_WEIGHTS = ("mlp.W_in", "mlp.W_out")
ATTENTION_WEIGHTS = tuple(
    f"attn.W_{name}" for name in ("Q", "K", "V", "O", "value_query", "value_key", "score")
)
VARIANCE_EPSILON, LAYER_NORM_EPSILON = 1e-8, 1e-5


@dataclass(frozen=True, kw_only=True)
class RelationClassifierConfig:
    """Configuration of a `RelationClassifier`: sizes, components and windows.

    Args:
        d_output: number of classes.
        attention: config of the attention, for example `AttentionConfig`.
        feed_forward: config of the feed-forward layer, for example `FeedForwardConfig`.
        d_model: width of an encoded image and of the residual stream; even.
        n_layers: number of blocks, each with its own weights.
        image_size: height and width of the images, in pixels; a multiple of 8.
        windows: numbers of successive images that are normalised together, at least 2, such as
            (3, 6) for a row of three images and the six after it; None for all images together.

    Raises:
        ValueError: a setting is not allowed.

    Example:
        >>> config = RelationClassifierConfig(
        ...     d_output=4, d_model=16, image_size=16, windows=(3, 2),
        ...     attention=AttentionConfig(n_heads=4, d_head=4),
        ...     feed_forward=FeedForwardConfig(d_mlp=32),
        ... )
        >>> RelationClassifier(config)(torch.rand(2, 5, 1, 16, 16)).shape  # [batch, 1, d_output]
        torch.Size([2, 1, 4])
    """

    d_output: int
    attention: AttentionProtocol
    feed_forward: ComponentConfig
    d_model: int = 128
    n_layers: int = 1
    image_size: int = 32
    windows: tuple[int, ...] | None = None

    def __post_init__(self):
        check_sizes(self, "d_output", "d_model", "n_layers", "image_size")
        if self.d_model % 2:
            raise ValueError(f"d_model must be even, got {self.d_model}")
        if self.image_size % 2**N_CONVOLUTIONS:
            raise ValueError(
                f"image_size must be a multiple of {2**N_CONVOLUTIONS}, got {self.image_size}"
            )
        # A single image has no variance.
        if self.windows is not None and (not self.windows or min(self.windows) < 2):
            raise ValueError(f"windows must be None or numbers of at least 2, got {self.windows}")


class ImageEncoder(nn.Module):
    """Three convolutions that each halve the image size, and two linear maps, a relu after each.

    Webb, Sinha and Cohen 2021, "Emergent Symbols through Binding in External Memory".
    `W_conv.{i}` [filter, channel, y, x], `W_in` [features, 256], `W_out` [256, d_model]. Weights
    start from N(0, 2 / fan in), biases at 0.
    """

    def __init__(self, image_size: int, d_model: int, *, generator: torch.Generator | None = None):
        super().__init__()
        self.W_conv, self.b_conv = nn.ParameterList(), nn.ParameterList()
        n_channels = 1
        for _ in range(N_CONVOLUTIONS):
            shape = (N_FILTERS, n_channels, KERNEL, KERNEL)
            # Half of the fan-in: a relu halves the second moment (He et al. 2015).
            halved = n_channels * KERNEL**2 // 2
            self.W_conv.append(lecun_normal(*shape, fan_in=halved, generator=generator))
            self.b_conv.append(zeros(N_FILTERS))
            n_channels = N_FILTERS
        d_flat = N_FILTERS * (image_size // 2**N_CONVOLUTIONS) ** 2
        self.W_in = lecun_normal(d_flat, D_HIDDEN, fan_in=d_flat // 2, generator=generator)
        self.b_in = zeros(D_HIDDEN)
        self.W_out = lecun_normal(D_HIDDEN, d_model, fan_in=D_HIDDEN // 2, generator=generator)
        self.b_out = zeros(d_model)

    def forward(self, images: Float[Tensor, "n 1 height width"]) -> Float[Tensor, "n d_model"]:
        """The encoding of each image."""
        x = images
        for weight, bias in zip(self.W_conv, self.b_conv, strict=True):
            x = conv2d(x, weight, bias, stride=2, padding=1).relu()
        hidden = linear(x.flatten(1), self.W_in.T, self.b_in).relu()
        return linear(hidden, self.W_out.T, self.b_out).relu()


def encode_distinct(
    encoder: nn.Module, images: Float[Tensor, "n 1 height width"]
) -> Float[Tensor, "n d_model"]:
    """The encoding of each image, computed once for images that are equal.

    A batch of problems about few objects has few distinct images, and encoding them takes most of
    the time. Their number depends on the data: on a GPU, compiled, in a function transform and for
    gradients of images each image is encoded by itself.
    """
    is_fixed = images.is_cuda or torch.compiler.is_compiling() or is_in_transform()
    if is_fixed or images.requires_grad:
        return encoder(images)
    distinct, index = torch.unique(images, dim=0, return_inverse=True)
    return encoder(distinct)[index]


class ContextNormalization(nn.Module):
    """Temporal context normalisation: features are normalised over the images of a context.

    (z - mean) / sqrt(variance + 1e-8) * gain + shift, with the unbiased variance (Webb et al. 2020,
    "Learning Representations that Support Extrapolation"): only the differences between the images
    remain. `gain` and `shift` [d_model] start at 1 and 0.
    """

    def __init__(self, d_model: int):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(d_model)), zeros(d_model)

    def forward(
        self, z: Float[Tensor, "batch image d_model"]
    ) -> Float[Tensor, "batch image d_model"]:
        """The normalised encodings of the images of one context."""
        # The variance and its epsilon may be too small for float16.
        variance, mean = torch.var_mean(widened(z), 1, keepdim=True)
        normalized = (z - mean) * (variance + VARIANCE_EPSILON).rsqrt()
        return (normalized * self.gain + self.shift).to(self.gain)


class RelationClassifier(HookedRootModule):
    """A transformer over separately encoded images, normalised over their context.

    The transformer baseline of Webb, Sinha and Cohen 2021, "Emergent Symbols through Binding in
    External Memory" (as in Mittal et al. 2021): convolutional encoder, temporal context
    normalisation, sinusoidal positions, post-LN blocks and another LayerNorm. The logits are read
    from the mean over the images, through a hidden relu layer (`W_hidden` [d_model, 256]).

    Initial weights are theirs: biases 0; before a relu N(0, 2 / fan in); elsewhere
    N(0, 2 / (fan in + fan out)), in attention (but for its output) half of this variance, where
    parameters have the names of `MultiHeadAttention` and `CompositionalAttention`.

    Hook points: `hook_encoded`, `hook_normalized`, `hook_embed` (with positions)
    [batch, image, d_model], and `blocks.{i}.*`, where images are the positions.

    Args:
        config: the configuration.
        generator: random generator of the initial weights; None for torch's global generator.

    Example:
        >>> parts = {"attention": attention, "feed_forward": feed_forward}
        >>> config = RelationClassifierConfig(d_output=4, d_model=16, image_size=16, **parts)
        >>> model = RelationClassifier(config)
        >>> _, cache = model.run_with_cache(torch.rand(2, 5, 1, 16, 16))
        >>> cache["hook_normalized"].mean(1).abs().max() < 1e-4  # only differences remain
        tensor(True)
    """

    def __init__(
        self, config: RelationClassifierConfig, *, generator: torch.Generator | None = None
    ):
        super().__init__()
        self.config = config
        self.encoder = ImageEncoder(config.image_size, config.d_model, generator=generator)
        self.normalization = ContextNormalization(config.d_model)
        self.hook_encoded, self.hook_normalized = HookPoint(), HookPoint()
        self.hook_embed = HookPoint()
        self.core, self.blocks = stack_blocks(
            lambda: Block(
                config, norm_epsilon=LAYER_NORM_EPSILON, post_norm=True, generator=generator
            ),
            config.n_layers,
            shared=False,
        )
        self.ln_final = nn.LayerNorm(config.d_model, eps=LAYER_NORM_EPSILON)
        self.W_hidden = lecun_normal(
            config.d_model, D_HIDDEN, fan_in=config.d_model // 2, generator=generator
        )
        self.b_hidden = zeros(D_HIDDEN)
        self.W_U = lecun_normal(D_HIDDEN, config.d_output, fan_in=D_HIDDEN, generator=generator)
        self.b_U = zeros(config.d_output)
        self._initialize(generator)
        self.setup()

    @torch.no_grad()
    def _initialize(self, generator: torch.Generator | None) -> None:
        """Draw the weights of the transformer and of the read-out."""
        relu: list[Tensor] = [self.W_hidden]
        for block in self.blocks:
            parameters = dict(block.named_parameters())
            relu += [parameters[name] for name in MLP_WEIGHTS if name in parameters]
            for name in filter(parameters.__contains__, ATTENTION_WEIGHTS):
                name_alone = name.rpartition(".")[2]
                scale = 2 if name_alone == "W_O" else 1
                std = (scale / sum(fans(name_alone, parameters[name]))) ** 0.5
                parameters[name].normal_(std=std, generator=generator)
        for weight in relu:
            weight.normal_(std=(2 / weight.shape[0]) ** 0.5, generator=generator)
        self.W_U.normal_(std=(2 / sum(self.W_U.shape)) ** 0.5, generator=generator)

    def forward(
        self, images: Float[Tensor, "batch image 1 height width"]
    ) -> Float[Tensor, "batch 1 d_output"]:
        """The logits of each sequence of images.

        Raises:
            ValueError: the images have the wrong size, or their number is less than 2 or not that
                of the windows.
        """
        size, windows = self.config.image_size, self.config.windows
        batch, n_images = images.shape[:2]
        if images.shape[2:] != (1, size, size):
            raise ValueError(
                f"images must be [batch, image, 1, {size}, {size}], got {list(images.shape)}"
            )
        if windows is not None and sum(windows) != n_images:
            raise ValueError(
                f"number of images must be {sum(windows)} with windows = {windows}, got {n_images}"
            )
        if n_images < 2:
            # A single image has no variance.
            raise ValueError(f"number of images must be at least 2, got {n_images}")
        z = encode_distinct(self.encoder, rearrange(images, "batch image ... -> (batch image) ..."))
        z = self.hook_encoded(z.unflatten(0, (batch, n_images)))
        parts = z.split(n_images if windows is None else list(windows), dim=1)
        x = self.hook_normalized(torch.cat([self.normalization(part) for part in parts], 1))
        positions = interleaved_sinusoids(0, n_images, self.config.d_model).to(x)
        x = self.hook_embed(x + positions)
        x = run_blocks(x, self.core, self.blocks, self.config.n_layers)
        mean = self.ln_final(x).mean(1, keepdim=True)
        hidden = linear(mean, self.W_hidden.T, self.b_hidden).relu()
        return linear(hidden, self.W_U.T, self.b_U)
