"""One layer of attention over a set of objects, for contextual retrieval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from mechanisms.initialization import lecun_normal, redraw_uniformly, zeros
from mechanisms.protocols import AttentionProtocol
from mechanisms.sequences import check_shape
from mechanisms.validation import check_choice, check_sizes

Initialization = Literal["lecun_normal", "uniform"]


@dataclass(frozen=True, kw_only=True)
class RetrievalNetworkConfig:
    """Configuration of a `RetrievalNetwork`: sizes and attention.

    Args:
        d_input: number of features of an object.
        d_output: number of outputs for each object.
        d_model: width of an encoded object.
        d_mlp: number of hidden units of the encoder and of the read-out.
        attention: config of the attention, for example `AttentionConfig` or
            `CompositionalAttentionConfig`; in the paper with `own_value` (section C.1).
        initialization: `lecun_normal`, with biases of 0; or `uniform`, as torch's linear layers
            draw weights and biases, and with them the authors' code.

    Raises:
        ValueError: a width is less than 1, or the initialization is unknown.

    Example:
        >>> config = RetrievalNetworkConfig(
        ...     d_input=14, d_output=1, d_model=16, d_mlp=32,
        ...     attention=CompositionalAttentionConfig(n_searches=2, n_retrievals=4, d_head=8),
        ... )
        >>> RetrievalNetwork(config)(torch.randn(3, 10, 14)).shape  # an output for each object
        torch.Size([3, 10, 1])
    """

    d_input: int
    d_output: int
    d_model: int
    d_mlp: int
    attention: AttentionProtocol
    initialization: Initialization = "lecun_normal"

    def __post_init__(self):
        check_sizes(self, "d_input", "d_output", "d_model", "d_mlp")
        check_choice(self, "initialization", Initialization)


class Layer(nn.Module):
    """Attention from every object to the others, without residual connection or LayerNorm.

    Hook points [batch, pos, d_model]: `hook_resid_pre`, `hook_attn_out`, and those of its `attn`.
    """

    def __init__(self, config: RetrievalNetworkConfig, *, generator: torch.Generator | None = None):
        super().__init__()
        self.attn = config.attention.build(config.d_model, generator=generator)
        self.hook_resid_pre, self.hook_attn_out = HookPoint(), HookPoint()

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """The attention output of each object, which attends to all objects but itself."""
        x = self.hook_resid_pre(x)
        others = ~torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        return self.hook_attn_out(self.attn(x, x, mask=others[None, None]))


class RetrievalNetwork(HookedRootModule):
    """Encoder, one layer of attention, read-out: the network of contextual retrieval.

    After Mittal et al. 2021, "Compositional Attention", sections 4.1 and C.1. No residual
    connection bypasses the attention: the preferences of an object affect its output only through
    its queries, unless the attention has an own value. Encoder and read-out have a hidden relu
    layer (`W_in`, `W_E` and `W_hidden`, `W_U`), because the distance between two numbers is not a
    linear function of them.

    Hook points: `hook_embed` [batch, pos, d_model], `blocks.0.hook_resid_pre`,
    `blocks.0.hook_attn_out`, and those of `blocks.0.attn`.

    Args:
        config: the configuration.
        generator: random generator of the initial weights; None for torch's global generator.

    Example:
        >>> attention = CompositionalAttentionConfig(n_searches=2, n_retrievals=4, d_head=8)
        >>> sizes = {"d_input": 14, "d_output": 1, "d_model": 16, "d_mlp": 32}
        >>> model = RetrievalNetwork(RetrievalNetworkConfig(attention=attention, **sizes))
        >>> _, cache = model.run_with_cache(torch.randn(3, 10, 14))
        >>> cache["blocks.0.attn.hook_value_scores"].shape  # [batch, pos, search, retrieval]
        torch.Size([3, 10, 2, 4])
    """

    def __init__(self, config: RetrievalNetworkConfig, *, generator: torch.Generator | None = None):
        super().__init__()
        self.config = config
        d_input, d_model, d_mlp = config.d_input, config.d_model, config.d_mlp
        self.W_in = lecun_normal(d_input, d_mlp, fan_in=d_input, generator=generator)
        self.b_in = zeros(d_mlp)
        self.W_E = lecun_normal(d_mlp, d_model, fan_in=d_mlp, generator=generator)
        self.b_E = zeros(d_model)
        self.hook_embed = HookPoint()
        self.blocks = nn.ModuleList([Layer(config, generator=generator)])
        self.W_hidden = lecun_normal(d_model, d_mlp, fan_in=d_model, generator=generator)
        self.b_hidden = zeros(d_mlp)
        self.W_U = lecun_normal(d_mlp, config.d_output, fan_in=d_mlp, generator=generator)
        self.b_U = zeros(config.d_output)
        if config.initialization == "uniform":
            redraw_uniformly(self, generator=generator)
        self.setup()

    def forward(
        self, inputs: Float[Tensor, "batch pos d_input"]
    ) -> Float[Tensor, "batch pos d_output"]:
        """The outputs for all objects; their order has no effect on them.

        Raises:
            ValueError: inputs are not [batch, pos, d_input].
        """
        check_shape("inputs", inputs, "batch", "pos", self.config.d_input)
        hidden = linear(inputs, self.W_in.T, self.b_in).relu()
        x = self.hook_embed(linear(hidden, self.W_E.T, self.b_E))
        x = self.blocks[0](x)
        hidden = linear(x, self.W_hidden.T, self.b_hidden).relu()
        return linear(hidden, self.W_U.T, self.b_U)
