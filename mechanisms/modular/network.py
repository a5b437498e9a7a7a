"""Modular networks: layers that each choose a module from one pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, cast, get_args

import torch
from einops import einsum, repeat
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import gumbel_softmax, linear, one_hot
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from mechanisms.hooking import observed
from mechanisms.initialization import lecun_normal, zeros
from mechanisms.modular.module_pools import MlpPoolConfig, ModulePool, PoolConfig
from mechanisms.modular.routers import RouterConfig, RouterSizes, Scores

Selection = Literal["hard", "soft", "top_k"]
FunctionalBottleneck = Literal["oracle", "attention", "none"]


@dataclass(frozen=True, kw_only=True)
class ModularNetworkConfig:
    """What a `ModularNetwork` is made of.

    Args:
        n_variables: variables of an input; the first feature of each is its value, a number.
        d_input: features of each variable.
        d_model: width of an encoded variable.
        n_layers: how many modules work one after another.
        router: for example `CrossAttentionRouterConfig`.
        n_modules: size of the pool.
        pool: for example `MlpPoolConfig`, or `OperationPoolConfig` for true operations.
        functional_bottleneck: what a module is given. `oracle`: in the first layer the values of
            the first two variables, later the result so far and the first value; `attention`: two
            numbers, each chosen by hard attention, with a key from the module's signature, among
            all variables' values and the result so far; `none`: all features and the result.
        selection: `hard`, one module; `soft`, all by their probability; `top_k`, the `top_k` most
            probable ones by their renormalised probability.
        top_k: see there; None otherwise.
        temperature: of the Gumbel softmax of hard selections in training.

    Raises:
        ValueError: for a value that is not allowed.
    """

    n_variables: int
    d_input: int
    d_model: int
    n_layers: int
    router: RouterConfig
    n_modules: int = 30
    pool: PoolConfig = field(default_factory=MlpPoolConfig)
    functional_bottleneck: FunctionalBottleneck = "oracle"
    selection: Selection = "hard"
    top_k: int | None = None
    temperature: float = 1.0

    def __post_init__(self):
        for name in ("d_input", "d_model", "n_layers", "n_modules"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.n_variables < 2:
            raise ValueError(f"n_variables must be at least 2, got {self.n_variables}")
        kinds = (("functional_bottleneck", FunctionalBottleneck), ("selection", Selection))
        for name, allowed in kinds:
            if getattr(self, name) not in get_args(allowed):
                names = ", ".join(get_args(allowed))
                raise ValueError(f"{name} must be one of {names}, got {getattr(self, name)!r}")
        if (self.selection == "top_k") != (self.top_k is not None):
            raise ValueError(
                f"top_k goes with selection 'top_k', got {self.top_k} and {self.selection!r}"
            )
        if self.top_k is not None and not 1 <= self.top_k <= self.n_modules:
            raise ValueError(
                f"top_k must be in [1, n_modules = {self.n_modules}], got {self.top_k}"
            )
        if not self.temperature > 0:
            raise ValueError(f"temperature must be greater than 0, got {self.temperature}")


class ModularLayer(nn.Module):
    """The hook points of one layer; the weights of all layers are in the router and the pool."""

    def __init__(self, config: ModularNetworkConfig, *, picks: bool):
        super().__init__()
        self.hook_module_scores = HookPoint()
        if picks:
            self.hook_selected_variable = HookPoint()
        self.hook_module_probs, self.hook_expert_weights = HookPoint(), HookPoint()
        if config.selection != "soft":
            self.hook_expert_indices = HookPoint()
        self.hook_module_choice = HookPoint()
        if config.functional_bottleneck == "attention":
            self.hook_operand_choice = HookPoint()
        self.hook_operands, self.hook_module_out = HookPoint(), HookPoint()
        self.hook_result = HookPoint()


class ModularNetwork(HookedRootModule):
    """Layers that each let a router choose a module from one pool; the last result is the answer.

    Ostapenko et al. 2022, "Attention for Compositional Modularity". Variables are encoded by one
    linear map; the router scores all modules for all layers from the encoded variables alone; a
    module maps two operands (or everything, without functional bottleneck) to a number.

    The paper says neither how a router's pairs of variable and module become one choice nor what
    the slots of the functional bottleneck see. Here the probability of a module is summed over
    variables, a module is drawn by it in training (the same as drawing a pair) and the most
    probable one taken at test; slots choose among values, since operators are not to be seen.

    Hook points: `hook_embed` [batch, variable, d_model]; for each layer, `layers.{l}.`
    - `hook_module_scores` [batch, variable, module]; variable has size 1 where a router has one
      answer for all variables;
    - `hook_selected_variable` [batch, variable], with a selection bottleneck: one-hot;
    - `hook_module_probs` [batch, module] and TransformerLens' name for it, `hook_expert_weights`;
    - `hook_expert_indices` [batch, 1 or top_k], unless selection is soft;
    - `hook_module_choice` [batch, module]: the weight of each module's result;
    - `hook_operand_choice` [batch, module, slot, candidate], one-hot, with functional bottleneck
      `attention`; candidates are the variables, then the result so far;
    - `hook_operands` [batch, module, operand]; module has size 1 where all get the same;
    - `hook_module_out` [batch, module]; `hook_result` [batch];
    and those of a transformer in the router. Where one module is chosen and nobody listens to the
    others' results, they are not computed (but in training, whose gradient needs them).

    Args:
        config: what it is made of.
        generator: source of the initial weights; None for torch's own.
    """

    def __init__(self, config: ModularNetworkConfig, *, generator: torch.Generator | None = None):
        super().__init__()
        self.config = config
        n_variables, d_input, d_model = config.n_variables, config.d_input, config.d_model
        self.W_E = lecun_normal(d_input, d_model, fan_in=d_input, generator=generator)
        self.b_E = zeros(d_model)
        self.hook_embed = HookPoint()
        sizes = RouterSizes(
            n_variables=n_variables,
            d_model=d_model,
            n_layers=config.n_layers,
            n_modules=config.n_modules,
        )
        self.router = config.router.build(sizes, generator=generator)
        everything = n_variables * d_input + 1
        d_operands = everything if config.functional_bottleneck == "none" else 2
        self.pool: ModulePool = config.pool.build(config.n_modules, d_operands, generator=generator)
        self.slots = None
        if config.functional_bottleneck == "attention":
            self.slots = OperandSlots(config.n_modules, d_model, generator=generator)
        with torch.no_grad():
            probe: Scores = self.router(torch.zeros(1, n_variables, d_model))
        self.layers = nn.ModuleList(
            ModularLayer(config, picks=probe.variables is not None) for _ in range(config.n_layers)
        )
        self.setup()

    @property
    def n_layers(self) -> int:
        """Length of a path."""
        return self.config.n_layers

    @property
    def n_modules(self) -> int:
        """Modules to choose from in each layer."""
        return self.config.n_modules

    @property
    def bytes_per_result(self) -> int:
        """Memory that `advance` needs for each number that it gives."""
        return self.pool.bytes_per_result(shared=self.config.functional_bottleneck != "attention")

    def forward(
        self, inputs: Float[Tensor, "batch variable d_input"], *, temperature: float | None = None
    ) -> Float[Tensor, "batch 1"]:
        """The answers; in training along paths that are drawn, with straight-through gradients.

        Args:
            inputs: the variables.
            temperature: of the Gumbel softmax in training; None for the config's.

        Raises:
            ValueError: for inputs of another shape, or a temperature that is not positive.
        """
        temperature = self.config.temperature if temperature is None else temperature
        if not temperature > 0:
            raise ValueError(f"temperature must be greater than 0, got {temperature}")
        encoded = self._encode(inputs)
        scores: Scores = self.router(encoded)
        result = inputs.new_zeros(len(inputs))
        for layer, points in enumerate(self._points()):
            picks = None if scores.variables is None else scores.variables[:, layer]
            choice = self._choose(points, scores.modules[:, layer], picks, temperature)
            operands = self._operands(inputs, encoded, layer, result[:, None], points, temperature)
            operands = points.hook_operands(operands[:, 0])
            # Straight-through gradients ask what the other modules would have given.
            alone = self.config.selection == "hard" and not torch.is_grad_enabled()
            if alone and not observed(points.hook_module_choice, points.hook_module_out):
                result = self.pool.one(operands, choice.argmax(-1))
            else:
                result = (choice * points.hook_module_out(self.pool(operands))).sum(-1)
            result = points.hook_result(result)
        return result[:, None]

    def all_paths(
        self, inputs: Float[Tensor, "batch variable d_input"]
    ) -> tuple[Float[Tensor, "batch path"], Float[Tensor, "batch layer module"]]:
        """The answer of every path, and each layer's probabilities of the modules.

        Paths are in the order of their modules (the last layer's changes fastest); the choice of a
        layer does not depend on those before it, so that the probability of a path is the product
        over layers. The variable of a selection bottleneck is summed out. Hook points:
        `hook_embed`, `hook_module_scores`, `hook_module_probs` and `hook_expert_weights`.

        Raises:
            ValueError: for inputs of another shape.
        """
        encoded = self._encode(inputs)
        scores: Scores = self.router(encoded)
        probabilities = []
        for layer, points in enumerate(self._points()):
            given = points.hook_module_scores(scores.modules[:, layer])
            if scores.variables is None:
                layer_probs = given.logsumexp(1).softmax(-1)
            else:
                picks = scores.variables[:, layer].softmax(-1)
                layer_probs = einsum(
                    picks,
                    given.softmax(-1),
                    "batch variable, batch variable module -> batch module",
                )
            layer_probs = points.hook_expert_weights(points.hook_module_probs(layer_probs))
            probabilities.append(layer_probs)
        partial = self.begin(inputs)
        for layer in range(self.n_layers):
            partial = self._advance(inputs, encoded, layer, partial).flatten(1, 2)
        return partial[..., 0], torch.stack(probabilities, dim=1)

    def begin(self, inputs: Float[Tensor, "batch variable d_input"]) -> Float[Tensor, "batch 1 1"]:
        """The result before the first layer: zero, for each input's one empty path."""
        return inputs.new_zeros(len(inputs), 1, 1)

    def advance(
        self,
        inputs: Float[Tensor, "batch variable d_input"],
        layer: int,
        partial: Float[Tensor, "batch path 1"],
    ) -> Float[Tensor, "batch path module 1"]:
        """What each module of a layer makes of the results that different paths have come to.

        Raises:
            ValueError: for inputs of another shape, or a layer that is not there.
        """
        if not 0 <= layer < self.n_layers:
            raise ValueError(f"layer must be in [0, {self.n_layers}), got {layer}")
        return self._advance(inputs, self._encode(inputs), layer, partial)

    def _advance(
        self,
        inputs: Float[Tensor, "batch variable d_input"],
        encoded: Float[Tensor, "batch variable d_model"],
        layer: int,
        partial: Float[Tensor, "batch path 1"],
    ) -> Float[Tensor, "batch path module 1"]:
        temperature = self.config.temperature
        operands = self._operands(inputs, encoded, layer, partial[..., 0], None, temperature)
        return self.pool(operands)[..., None]

    def _encode(
        self, inputs: Float[Tensor, "batch variable d_input"]
    ) -> Float[Tensor, "batch variable d_model"]:
        expected = (self.config.n_variables, self.config.d_input)
        if inputs.ndim != 3 or inputs.shape[1:] != expected:
            raise ValueError(
                f"inputs must be [batch, {expected[0]}, {expected[1]}], got {tuple(inputs.shape)}"
            )
        return self.hook_embed(linear(inputs, self.W_E.T, self.b_E))

    def _points(self) -> list[ModularLayer]:
        return [cast(ModularLayer, points) for points in self.layers]

    def _choose(
        self,
        points: ModularLayer,
        scores: Float[Tensor, "batch variable module"],
        picks: Float[Tensor, "batch variable"] | None,
        temperature: float,
    ) -> Float[Tensor, "batch module"]:
        scores = points.hook_module_scores(scores)
        if picks is None:
            scores = scores.logsumexp(1)
        else:
            picked = self._hard(picks, temperature)
            picked = points.hook_selected_variable(picked)
            scores = einsum(picked, scores, "batch variable, batch variable module -> batch module")
        probs = points.hook_expert_weights(points.hook_module_probs(scores.softmax(-1)))
        if self.config.selection == "soft":
            return points.hook_module_choice(probs)
        if self.config.selection == "top_k":
            assert self.config.top_k is not None
            indices = points.hook_expert_indices(probs.topk(self.config.top_k, dim=-1).indices)
            kept = torch.zeros_like(probs).scatter(-1, indices, probs.gather(-1, indices))
            return points.hook_module_choice(kept / kept.sum(-1, keepdim=True))
        # A probability may have been set to zero at its hook point.
        drawn = self._hard(probs.clamp_min(torch.finfo(probs.dtype).tiny).log(), temperature)
        indices = points.hook_expert_indices(drawn.argmax(-1, keepdim=True))
        chosen = one_hot(indices[:, 0], self.n_modules).to(drawn)
        # The value of what was chosen, the gradient of what was drawn.
        return points.hook_module_choice(chosen + (drawn - drawn.detach()))

    def _hard(
        self, scores: Float[Tensor, "*batch option"], temperature: float
    ) -> Float[Tensor, "*batch option"]:
        """One-hot: drawn in training (Jang et al. 2017, straight through), else the maximum."""
        if self.training:
            return gumbel_softmax(scores, tau=temperature, hard=True)
        return one_hot(scores.argmax(-1), scores.shape[-1]).to(scores)

    def _operands(
        self,
        inputs: Float[Tensor, "batch variable d_input"],
        encoded: Float[Tensor, "batch variable d_model"],
        layer: int,
        result: Float[Tensor, "batch path"],
        points: ModularLayer | None,
        temperature: float,
    ) -> Float[Tensor, "batch path #module operand"]:
        """What each module of a layer is given, along paths that have come to a result."""
        n_paths = result.shape[1]
        values = inputs[..., 0]
        if self.config.functional_bottleneck == "none":
            features = repeat(inputs, "batch variable d -> batch path (variable d)", path=n_paths)
            return torch.cat([features, result[..., None]], dim=-1)[:, :, None]
        if self.config.functional_bottleneck == "oracle":
            first = repeat(values[:, 0], "batch -> batch path", path=n_paths)
            second = repeat(values[:, 1], "batch -> batch path", path=n_paths)
            pair = (first, second) if layer == 0 else (result, first)
            return torch.stack(pair, dim=-1)[:, :, None]
        assert self.slots is not None
        taken = self._hard(self.slots(encoded, first=layer == 0), temperature)
        if points is not None:
            taken = points.hook_operand_choice(taken)
        candidates = torch.cat(
            [repeat(values, "batch n -> batch path n", path=n_paths), result[..., None]], dim=-1
        )
        return einsum(
            taken,
            candidates,
            "batch module slot candidate, batch path candidate -> batch path module slot",
        )


class OperandSlots(nn.Module):
    """The functional bottleneck `attention`: which two numbers a module is given.

    score = (W_slot s_m) · (W_C E(x_n)) / sqrt(d), with s_m the signature of the module and, for the
    result so far, a learned key in the place of W_C E(x_n) (Goyal et al. 2021, neural production
    systems, choose arguments likewise). It depends on the encoded variables, not on the result.

    Parameters: `signatures` [module, d_model], `W_slot` [2, d_model, d_model], `W_C` [d_model,
    d_model], `result_key` [d_model].
    """

    def __init__(self, n_modules: int, d_model: int, *, generator: torch.Generator | None = None):
        super().__init__()
        self.signatures = lecun_normal(n_modules, d_model, fan_in=1, generator=generator)
        self.W_slot = lecun_normal(2, d_model, d_model, fan_in=d_model, generator=generator)
        self.W_C = lecun_normal(d_model, d_model, fan_in=d_model, generator=generator)
        self.result_key = lecun_normal(d_model, fan_in=1, generator=generator)

    def forward(
        self, encoded: Float[Tensor, "batch variable d_model"], *, first: bool
    ) -> Float[Tensor, "batch module 2 candidate"]:
        """The score of every candidate; before the `first` layer there is no result to choose."""
        queries = einsum(self.signatures, self.W_slot, "module d, slot d key -> module slot key")
        keys = encoded @ self.W_C
        result = repeat(self.result_key, "key -> batch 1 key", batch=len(encoded))
        keys = torch.cat([keys, result], dim=1)
        scores = einsum(
            queries, keys, "module slot key, batch candidate key -> batch module slot candidate"
        )
        scores = scores / keys.shape[-1] ** 0.5
        if first:
            masked = torch.zeros(scores.shape[-1], dtype=torch.bool, device=scores.device)
            masked[-1] = True
            scores = scores.masked_fill(masked, -torch.inf)
        return scores
