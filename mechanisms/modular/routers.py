"""Routers: score the modules for an input by attention from its variables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, cast

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Float
from torch import Tensor, nn

from mechanisms.attention.multi_head import AttentionConfig
from mechanisms.initialization import lecun_normal
from mechanisms.layers.feed_forward import FeedForwardConfig
from mechanisms.models.transformer import LAYER_NORM_EPSILON, Block, TransformerConfig
from mechanisms.validation import check_choice, check_sizes

Keys = Literal["direct", "projected", "shared"]


class Scores(NamedTuple):
    """The scores of a router for all layers.

    Attributes:
        modules: score of each module, given each variable; variable has size 1 if the router
            scores modules once for all variables.
        variables: with a selection bottleneck the score of each variable, one of which is selected;
            else None, and one softmax runs over R, all pairs of variable and module.
    """

    modules: Float[Tensor, "batch layer variable module"]
    variables: Float[Tensor, "batch layer variable"] | None


@dataclass(frozen=True, kw_only=True)
class RouterSizes:
    """Sizes of the network that a router belongs to, as in `ModularNetworkConfig`.

    Example:
        >>> sizes = RouterSizes(n_variables=5, d_model=16, n_layers=2, n_modules=4)
        >>> router = CrossAttentionRouterConfig(matching=MatchingConfig(d_key=8)).build(sizes)
        >>> router(torch.randn(3, 5, 16)).modules.shape  # [batch, layer, variable, module]
        torch.Size([3, 2, 5, 4])
    """

    n_variables: int
    d_model: int
    n_layers: int
    n_modules: int


class RouterConfig(Protocol):
    """A frozen config that builds its router."""

    def build(self, sizes: RouterSizes, *, generator: torch.Generator | None = None) -> nn.Module:
        """The router, which maps encoded variables [batch, variable, d_model] to `Scores`."""
        ...


@dataclass(frozen=True, kw_only=True)
class MatchingConfig:
    """How queries are matched with modules: score_m = q · k_m.

    Args:
        d_key: width of queries, keys and signatures (p in the paper).
        keys: `direct`, keys learned for each layer (the default of Ostapenko et al. 2022);
            `projected`, k_m = W_K s_m with signatures s_m shared by the layers and one W_K for each
            layer; `shared`, the same with one W_K for all layers.
        scaled: whether scores are divided by sqrt(d_key); the paper's equation does not do so.

    Raises:
        ValueError: a setting is not allowed.

    Example:
        >>> MatchingConfig(d_key=16).d_key
        16
    """

    d_key: int
    keys: Keys = "direct"
    scaled: bool = False

    def __post_init__(self):
        check_sizes(self, "d_key")
        check_choice(self, "keys", Keys)


class Matching(nn.Module):
    """Scores of modules, given queries; see `MatchingConfig`.

    Parameters: `keys` [layer, module, d_key], or `signatures` [module, d_key] and
    `W_K` [layer or 1, d_key, d_key].
    """

    def __init__(
        self,
        config: MatchingConfig,
        sizes: RouterSizes,
        *,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        d_key, n_layers = config.d_key, sizes.n_layers
        self.n_layers = n_layers
        self.scale = d_key**-0.5 if config.scaled else 1.0
        self.signatures = self.W_K = self.keys = None
        if config.keys == "direct":
            self.keys = lecun_normal(
                n_layers, sizes.n_modules, d_key, fan_in=d_key, generator=generator
            )
        else:
            self.signatures = lecun_normal(
                sizes.n_modules, d_key, fan_in=d_key, generator=generator
            )
            maps = n_layers if config.keys == "projected" else 1
            self.W_K = lecun_normal(maps, d_key, d_key, fan_in=d_key, generator=generator)

    def forward(
        self, queries: Float[Tensor, "batch layer variable key"]
    ) -> Float[Tensor, "batch layer variable module"]:
        """The score of every module for the queries of every layer."""
        keys = self.keys
        if keys is None:
            assert self.signatures is not None
            assert self.W_K is not None
            keys = einsum(self.signatures, self.W_K, "module d, layer d key -> layer module key")
            keys = keys.expand(self.n_layers, -1, -1)
        scores = einsum(
            queries,
            keys,
            "batch layer variable key, layer module key -> batch layer variable module",
        )
        return self.scale * scores


class VariableSelector(nn.Module):
    """The selection bottleneck: each layer selects the variable that is matched with the modules.

    score_n = u_l · W_S E(x_n), where u_l is the signature of layer l; the variable is then selected
    by hard attention. Parameters: `signatures` [layer, d_key], `W_S` [d_model, d_key].
    """

    def __init__(self, d_key: int, sizes: RouterSizes, *, generator: torch.Generator | None = None):
        super().__init__()
        self.signatures = lecun_normal(sizes.n_layers, d_key, fan_in=d_key, generator=generator)
        self.W_S = lecun_normal(sizes.d_model, d_key, fan_in=sizes.d_model, generator=generator)

    def forward(
        self, encoded: Float[Tensor, "batch variable d_model"]
    ) -> Float[Tensor, "batch layer variable"]:
        """The score of each variable in each layer."""
        return einsum(
            encoded @ self.W_S,
            self.signatures,
            "batch variable key, layer key -> batch layer variable",
        )


def _selector(
    selection_bottleneck: bool, d_key: int, sizes: RouterSizes, generator: torch.Generator | None
) -> VariableSelector | None:
    return VariableSelector(d_key, sizes, generator=generator) if selection_bottleneck else None


@dataclass(frozen=True, kw_only=True)
class CrossAttentionRouterConfig:
    """Configuration of `CrossAttentionRouter`, with one query per variable.

    Example:
        >>> config = CrossAttentionRouterConfig(matching=MatchingConfig(d_key=8))
        >>> config.build(sizes)(encoded).modules.shape  # [batch, layer, variable, module]
        torch.Size([3, 2, 5, 4])
    """

    matching: MatchingConfig
    selection_bottleneck: bool = False

    def build(self, sizes: RouterSizes, *, generator: torch.Generator | None = None) -> nn.Module:
        """The router of a network with these sizes."""
        return CrossAttentionRouter(self, sizes, generator=generator)


class CrossAttentionRouter(nn.Module):
    """Routing by one query per variable: q_n = W_Q E(x_n) (Ostapenko et al. 2022).

    Without the selection bottleneck one softmax runs over all pairs of variable and module. The
    query weights are the same for all variables, so only E(x) can distinguish them.

    Parameters: `W_Q` [layer, d_model, d_key], and those of `matching` and `selector`.

    Example:
        >>> config = CrossAttentionRouterConfig(matching=matching, selection_bottleneck=True)
        >>> CrossAttentionRouter(config, sizes)(encoded).variables.shape  # [batch, layer, variable]
        torch.Size([3, 2, 5])
    """

    def __init__(
        self,
        config: CrossAttentionRouterConfig,
        sizes: RouterSizes,
        *,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        d_model, d_key = sizes.d_model, config.matching.d_key
        self.W_Q = lecun_normal(sizes.n_layers, d_model, d_key, fan_in=d_model, generator=generator)
        self.matching = Matching(config.matching, sizes, generator=generator)
        self.selector = _selector(config.selection_bottleneck, d_key, sizes, generator)

    def forward(self, encoded: Float[Tensor, "batch variable d_model"]) -> Scores:
        """Scores of all modules, given each variable."""
        queries = einsum(
            encoded, self.W_Q, "batch variable d, layer d key -> batch layer variable key"
        )
        variables = None if self.selector is None else self.selector(encoded)
        return Scores(self.matching(queries), variables)


@dataclass(frozen=True, kw_only=True)
class ConcatenationRouterConfig:
    """Configuration of `ConcatenationRouter`, with one query from all variables.

    Example:
        >>> config = ConcatenationRouterConfig(matching=MatchingConfig(d_key=8))
        >>> config.build(sizes)(encoded).modules.shape  # once for all five variables
        torch.Size([3, 2, 1, 4])
    """

    matching: MatchingConfig
    selection_bottleneck: bool = False

    def build(self, sizes: RouterSizes, *, generator: torch.Generator | None = None) -> nn.Module:
        """The router of a network with these sizes."""
        return ConcatenationRouter(self, sizes, generator=generator)


class ConcatenationRouter(nn.Module):
    """Routing by one query from all variables: q = W_Q [E(x_1), ..., E(x_N)].

    Ostapenko et al. 2022. With the selection bottleneck all variables but the selected one are
    replaced by zeros.

    Parameters: `W_Q` [layer, variable, d_model, d_key], and those of `matching` and `selector`.

    Example:
        >>> config = ConcatenationRouterConfig(matching=matching, selection_bottleneck=True)
        >>> ConcatenationRouter(config, sizes)(encoded).modules.shape  # given each variable
        torch.Size([3, 2, 5, 4])
    """

    def __init__(
        self,
        config: ConcatenationRouterConfig,
        sizes: RouterSizes,
        *,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        n_variables, d_model, d_key = sizes.n_variables, sizes.d_model, config.matching.d_key
        n_inputs = 1 if config.selection_bottleneck else n_variables
        self.W_Q = lecun_normal(
            sizes.n_layers,
            n_variables,
            d_model,
            d_key,
            fan_in=n_inputs * d_model,
            generator=generator,
        )
        self.matching = Matching(config.matching, sizes, generator=generator)
        self.selector = _selector(config.selection_bottleneck, d_key, sizes, generator)

    def forward(self, encoded: Float[Tensor, "batch variable d_model"]) -> Scores:
        """Scores of all modules: once for all variables, or given each selected variable."""
        queries = einsum(
            encoded, self.W_Q, "batch variable d, layer variable d key -> batch layer variable key"
        )
        if self.selector is None:
            return Scores(self.matching(queries.sum(2, keepdim=True)), None)
        return Scores(self.matching(queries), self.selector(encoded))


@dataclass(frozen=True, kw_only=True)
class EncoderRouterConfig:
    """Configuration of `EncoderRouter`: sizes of the encoder, and matching.

    Args:
        matching: how the summary token is matched with modules.
        n_blocks: number of blocks of the transformer.
        n_heads: number of heads of the transformer; must divide the width of the variables.
        d_mlp: width of the transformer's feed-forward layers.
        selection_bottleneck: whether the transformer reads only one variable, selected per layer.

    Raises:
        ValueError: a size is less than 1.

    Example:
        >>> config = EncoderRouterConfig(matching=MatchingConfig(d_key=8), d_mlp=32)
        >>> config.build(sizes)(encoded).modules.shape  # once for all five variables
        torch.Size([3, 2, 1, 4])
    """

    matching: MatchingConfig
    n_blocks: int = 1
    n_heads: int = 4
    d_mlp: int = 128
    selection_bottleneck: bool = False

    def __post_init__(self):
        check_sizes(self, "n_blocks", "n_heads", "d_mlp")

    def build(self, sizes: RouterSizes, *, generator: torch.Generator | None = None) -> nn.Module:
        """The router of a network with these sizes."""
        return EncoderRouter(self, sizes, generator=generator)


class EncoderRouter(nn.Module):
    """Routing by one query from the summary token of a transformer encoder.

    Ostapenko et al. 2022. All layers share the encoder, a pre-LN transformer without positions over
    [CLS, E(x_1), ...]. With the selection bottleneck it reads only [CLS, E(x_n)] for the selected
    variable n.

    Parameters: `cls` [d_model], `W_Q` [layer, d_model, d_key], those of `blocks`, `matching` and
    `selector`. Hook points: those of its `blocks`.

    Raises:
        ValueError: n_heads does not divide d_model.

    Example:
        >>> router = EncoderRouter(EncoderRouterConfig(matching=MatchingConfig(d_key=8)), sizes)
        >>> scores, reversed_scores = router(encoded).modules, router(encoded.flip(1)).modules
        >>> torch.allclose(scores, reversed_scores, atol=1e-5)  # there are no positions
        True
    """

    def __init__(
        self,
        config: EncoderRouterConfig,
        sizes: RouterSizes,
        *,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        d_model, d_key = sizes.d_model, config.matching.d_key
        if d_model % config.n_heads:
            raise ValueError(f"n_heads must divide d_model = {d_model}, got {config.n_heads}")
        transformer = TransformerConfig(
            d_input=d_model,
            d_output=d_model,
            d_model=d_model,
            n_layers=config.n_blocks,
            attention=AttentionConfig(n_heads=config.n_heads, d_head=d_model // config.n_heads),
            feed_forward=FeedForwardConfig(d_mlp=config.d_mlp),
            positions="none",
        )
        self.cls = lecun_normal(d_model, fan_in=1, generator=generator)
        self.blocks = nn.ModuleList(
            Block(transformer, generator=generator) for _ in range(config.n_blocks)
        )
        self.ln_final = nn.LayerNorm(d_model, eps=LAYER_NORM_EPSILON)
        self.W_Q = lecun_normal(sizes.n_layers, d_model, d_key, fan_in=d_model, generator=generator)
        self.matching = Matching(config.matching, sizes, generator=generator)
        self.selector = _selector(config.selection_bottleneck, d_key, sizes, generator)

    def forward(self, encoded: Float[Tensor, "batch variable d_model"]) -> Scores:
        """Scores of all modules: once for all variables, or given each selected variable."""
        batch, n_variables, _ = encoded.shape
        separate = self.selector is not None
        tokens = (
            rearrange(encoded, "batch variable d -> (batch variable) 1 d") if separate else encoded
        )
        cls = repeat(self.cls, "d -> batch 1 d", batch=len(tokens))
        x = torch.cat([cls, tokens], dim=1)
        for block in self.blocks:
            x = block(x)
        summary = self.ln_final(x[:, 0]).unflatten(0, (batch, n_variables if separate else 1))
        queries = einsum(
            summary, self.W_Q, "batch variable d, layer d key -> batch layer variable key"
        )
        variables = None if self.selector is None else self.selector(encoded)
        return Scores(self.matching(queries), variables)


@dataclass(frozen=True, kw_only=True)
class StructuralOracleRouterConfig:
    """Configuration of `StructuralOracleRouter`, which knows the routing variables.

    Args:
        matching: how the variable's query is matched with modules.
        variables: for each layer, the index of the variable that determines the module.

    Example:
        >>> config = StructuralOracleRouterConfig(matching=matching, variables=(3, 4))
        >>> config.build(sizes)(encoded).modules.shape  # [batch, layer, variable, module]
        torch.Size([3, 2, 5, 4])
    """

    matching: MatchingConfig
    variables: tuple[int, ...]

    def build(self, sizes: RouterSizes, *, generator: torch.Generator | None = None) -> nn.Module:
        """The router of a network with these sizes."""
        return StructuralOracleRouter(self, sizes, generator=generator)


class StructuralOracleRouter(nn.Module):
    """Routing by a query from the variable that determines the module of each layer.

    Ostapenko et al. 2022. This is cross-attention with the correct selection; which module belongs
    to which value of the variable is still learned. Parameters as in `CrossAttentionRouter`.

    Raises:
        ValueError: `variables` is not one index in [0, n_variables) for each layer.

    Example:
        >>> config = StructuralOracleRouterConfig(matching=matching, variables=(3, 4))
        >>> router = StructuralOracleRouter(config, sizes)
        >>> router(encoded).variables[0].argmax(-1)  # the variable that each layer selects
        tensor([3, 4])
    """

    def __init__(
        self,
        config: StructuralOracleRouterConfig,
        sizes: RouterSizes,
        *,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        within = all(0 <= index < sizes.n_variables for index in config.variables)
        if len(config.variables) != sizes.n_layers or not within:
            raise ValueError(
                f"variables must be {sizes.n_layers} indices in [0, {sizes.n_variables}), one for "
                f"each layer, got {config.variables}"
            )
        d_model, d_key = sizes.d_model, config.matching.d_key
        self.W_Q = lecun_normal(sizes.n_layers, d_model, d_key, fan_in=d_model, generator=generator)
        self.matching = Matching(config.matching, sizes, generator=generator)
        variable_scores = torch.full((sizes.n_layers, sizes.n_variables), -torch.inf)
        variable_scores[torch.arange(sizes.n_layers), list(config.variables)] = 0.0
        self.register_buffer("variable_scores", variable_scores, persistent=False)

    def forward(self, encoded: Float[Tensor, "batch variable d_model"]) -> Scores:
        """Scores of all modules, and of the variables: -inf for all but the correct one."""
        queries = einsum(
            encoded, self.W_Q, "batch variable d, layer d key -> batch layer variable key"
        )
        variable_scores = cast(Tensor, self.variable_scores)
        return Scores(self.matching(queries), variable_scores.expand(len(encoded), -1, -1))
