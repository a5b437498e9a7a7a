"""Routers: which module should work on an input, asked of its variables by attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, cast, get_args

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Float
from torch import Tensor, nn

from mechanisms.attention.multi_head import AttentionConfig
from mechanisms.initialization import lecun_normal
from mechanisms.layers.feed_forward import FeedForwardConfig
from mechanisms.models.transformer import LAYER_NORM_EPSILON, Block, TransformerConfig

Keys = Literal["direct", "projected", "shared"]


class Scores(NamedTuple):
    """What a router says for all layers at once.

    Attributes:
        modules: of each module, given each variable; variable has size 1 where the router has
            one answer for all of them together.
        variables: with a selection bottleneck, of each variable: which is to be matched; else
            None, and one softmax runs over variables and modules together.
    """

    modules: Float[Tensor, "batch layer variable module"]
    variables: Float[Tensor, "batch layer variable"] | None


@dataclass(frozen=True, kw_only=True)
class RouterSizes:
    """What a router must fit: `n_layers` choices among `n_modules`, by vectors of `d_model`."""

    n_variables: int
    d_model: int
    n_layers: int
    n_modules: int


class RouterConfig(Protocol):
    """A frozen config that builds its router."""

    def build(self, sizes: RouterSizes, *, generator: torch.Generator | None = None) -> nn.Module:
        """The router: called with encoded variables [batch, variable, d_model] gives `Scores`."""
        ...


@dataclass(frozen=True, kw_only=True)
class MatchingConfig:
    """How queries are matched with modules: score_m = q · k_m.

    Args:
        d_key: width p of queries, keys and signatures.
        keys: `direct`, keys learned for each layer (the default of Ostapenko et al. 2022);
            `projected`, k_m = W_K s_m from signatures s_m that the layers share, W_K for each
            layer; `shared`, the same with one W_K for all layers.
        scaled: whether scores are divided by sqrt(d_key); the paper's equation has no such factor.

    Raises:
        ValueError: for a value that is not allowed.
    """

    d_key: int
    keys: Keys = "direct"
    scaled: bool = False

    def __post_init__(self):
        if self.d_key < 1:
            raise ValueError(f"d_key must be at least 1, got {self.d_key}")
        if self.keys not in get_args(Keys):
            raise ValueError(f"keys must be one of {', '.join(get_args(Keys))}, got {self.keys!r}")


class Matching(nn.Module):
    """Scores of modules from queries; see `MatchingConfig`.

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
        """Every layer's query against every module's key."""
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
    """The selection bottleneck: a signature of each layer is matched with every variable.

    score_n = u_l · W_S E(x_n); the variable is then chosen by hard attention, and it alone is
    matched with the modules. Parameters: `signatures` [layer, d_key], `W_S` [d_model, d_key].
    """

    def __init__(self, d_key: int, sizes: RouterSizes, *, generator: torch.Generator | None = None):
        super().__init__()
        self.signatures = lecun_normal(sizes.n_layers, d_key, fan_in=d_key, generator=generator)
        self.W_S = lecun_normal(sizes.d_model, d_key, fan_in=sizes.d_model, generator=generator)

    def forward(
        self, encoded: Float[Tensor, "batch variable d_model"]
    ) -> Float[Tensor, "batch layer variable"]:
        """Each layer's score of each variable."""
        return einsum(
            encoded @ self.W_S,
            self.signatures,
            "batch variable key, layer key -> batch layer variable",
        )


def _selector(
    wanted: bool, d_key: int, sizes: RouterSizes, generator: torch.Generator | None
) -> VariableSelector | None:
    return VariableSelector(d_key, sizes, generator=generator) if wanted else None


@dataclass(frozen=True, kw_only=True)
class CrossAttentionRouterConfig:
    """A query from each variable, with the same weights; see `CrossAttentionRouter`."""

    matching: MatchingConfig
    selection_bottleneck: bool = False

    def build(self, sizes: RouterSizes, *, generator: torch.Generator | None = None) -> nn.Module:
        """The router for these sizes."""
        return CrossAttentionRouter(self, sizes, generator=generator)


class CrossAttentionRouter(nn.Module):
    """Every variable asks: q_n = W_Q E(x_n) (Ostapenko et al. 2022).

    Without the selection bottleneck one softmax runs over all pairs of variable and module. The
    query weights are the same for all variables: what tells variables apart must be in E(x).

    Parameters: `W_Q` [layer, d_model, d_key], and those of `matching` and `selector`.
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
        picks = None if self.selector is None else self.selector(encoded)
        return Scores(self.matching(queries), picks)


@dataclass(frozen=True, kw_only=True)
class ConcatenationRouterConfig:
    """One query from all variables beside one another; see `ConcatenationRouter`."""

    matching: MatchingConfig
    selection_bottleneck: bool = False

    def build(self, sizes: RouterSizes, *, generator: torch.Generator | None = None) -> nn.Module:
        """The router for these sizes."""
        return ConcatenationRouter(self, sizes, generator=generator)


class ConcatenationRouter(nn.Module):
    """All variables ask together: q = W_Q [E(x_1), ..., E(x_N)] (Ostapenko et al. 2022).

    With the selection bottleneck the places of all variables but the selected one are zero.

    Parameters: `W_Q` [layer, variable, d_model, d_key], and those of `matching` and `selector`.
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
        seen = 1 if config.selection_bottleneck else n_variables
        self.W_Q = lecun_normal(
            sizes.n_layers,
            n_variables,
            d_model,
            d_key,
            fan_in=seen * d_model,
            generator=generator,
        )
        self.matching = Matching(config.matching, sizes, generator=generator)
        self.selector = _selector(config.selection_bottleneck, d_key, sizes, generator)

    def forward(self, encoded: Float[Tensor, "batch variable d_model"]) -> Scores:
        """Scores of all modules: one for all variables together, or given each of them."""
        queries = einsum(
            encoded, self.W_Q, "batch variable d, layer variable d key -> batch layer variable key"
        )
        if self.selector is None:
            return Scores(self.matching(queries.sum(2, keepdim=True)), None)
        return Scores(self.matching(queries), self.selector(encoded))


@dataclass(frozen=True, kw_only=True)
class EncoderRouterConfig:
    """A transformer reads the variables; see `EncoderRouter`.

    Args:
        matching: how its summary is matched with modules.
        n_blocks, n_heads, d_mlp: of the transformer; n_heads must divide its width.
        selection_bottleneck: whether it sees only one variable, which a layer's signature picks.

    Raises:
        ValueError: if a size is less than 1.
    """

    matching: MatchingConfig
    n_blocks: int = 1
    n_heads: int = 4
    d_mlp: int = 128
    selection_bottleneck: bool = False

    def __post_init__(self):
        for name in ("n_blocks", "n_heads", "d_mlp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def build(self, sizes: RouterSizes, *, generator: torch.Generator | None = None) -> nn.Module:
        """The router for these sizes."""
        return EncoderRouter(self, sizes, generator=generator)


class EncoderRouter(nn.Module):
    """A transformer encoder asks: q = W_Q of its summary token (Ostapenko et al. 2022).

    All layers share the encoder, a pre-LN transformer without positions over [CLS, E(x_1), ...].
    With the selection bottleneck it reads [CLS, E(x_n)] for the selected variable n alone.

    Parameters: `cls` [d_model], `W_Q` [layer, d_model, d_key], those of `blocks`, `matching` and
    `selector`. Hook points: those of its `blocks`.

    Raises:
        ValueError: if n_heads does not divide d_model.
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
        """Scores of all modules: one for all variables together, or given each of them."""
        batch, n_variables, _ = encoded.shape
        alone = self.selector is not None
        tokens = (
            rearrange(encoded, "batch variable d -> (batch variable) 1 d") if alone else encoded
        )
        cls = repeat(self.cls, "d -> batch 1 d", batch=len(tokens))
        x = torch.cat([cls, tokens], dim=1)
        for block in self.blocks:
            x = block(x)
        summary = self.ln_final(x[:, 0]).unflatten(0, (batch, n_variables if alone else 1))
        queries = einsum(
            summary, self.W_Q, "batch variable d, layer d key -> batch layer variable key"
        )
        picks = None if self.selector is None else self.selector(encoded)
        return Scores(self.matching(queries), picks)


@dataclass(frozen=True, kw_only=True)
class StructuralOracleRouterConfig:
    """A router that is told where to look; see `StructuralOracleRouter`.

    Args:
        matching: how the variable's query is matched with modules.
        variables: the index of the variable that decides, for each layer.
    """

    matching: MatchingConfig
    variables: tuple[int, ...]

    def build(self, sizes: RouterSizes, *, generator: torch.Generator | None = None) -> nn.Module:
        """The router for these sizes."""
        return StructuralOracleRouter(self, sizes, generator=generator)


class StructuralOracleRouter(nn.Module):
    """Each layer's query comes from the variable that decides there (Ostapenko et al. 2022).

    That is cross-attention with the selection already made; which module goes with which value of
    the variable is still to be learned. Parameters as in `CrossAttentionRouter`.

    Raises:
        ValueError: unless there is one variable in [0, n_variables) for each layer.
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
        told = torch.full((sizes.n_layers, sizes.n_variables), -torch.inf)
        told[torch.arange(sizes.n_layers), list(config.variables)] = 0.0
        self.register_buffer("told", told, persistent=False)

    def forward(self, encoded: Float[Tensor, "batch variable d_model"]) -> Scores:
        """Scores of all modules given each variable, all but the deciding one ruled out."""
        queries = einsum(
            encoded, self.W_Q, "batch variable d, layer d key -> batch layer variable key"
        )
        told = cast(Tensor, self.told)
        return Scores(self.matching(queries), told.expand(len(encoded), -1, -1))
