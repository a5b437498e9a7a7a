"""Modular networks: each layer selects a module from one pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from einops import einsum, repeat
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear, relu
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from mechanisms.differentiation import widened
from mechanisms.hooking import observed
from mechanisms.initialization import lecun_normal, zeros
from mechanisms.layers.mixture_of_experts import weights_of_chosen
from mechanisms.modular.module_pools import MlpPoolConfig, ModulePool, PoolConfig
from mechanisms.modular.operands import OperandSlots
from mechanisms.modular.routers import RouterConfig, RouterSizes, Scores
from mechanisms.randomness import gumbel_softmax
from mechanisms.validation import check_choice, check_sizes

Choice = Literal["pair", "module"]
InputEncoder = Literal["linear", "mlp"]
Selection = Literal["hard", "soft", "top_k"]
FunctionalBottleneck = Literal["oracle", "attention", "none"]


@dataclass(frozen=True, kw_only=True)
class ModularNetworkConfig:
    """Configuration of a `ModularNetwork`: sizes, router, pool and selection.

    Args:
        n_variables: number of variables of an input; the first feature of each is its value.
        d_input: number of features of each variable.
        d_model: width of an encoded variable.
        n_layers: number of modules that are applied one after another.
        router: config of the router, for example `CrossAttentionRouterConfig`.
        n_modules: size of the pool.
        pool: config of the pool, for example `MlpPoolConfig`, or `OperationPoolConfig` for true
            operations.
        functional_bottleneck: operands of a module. `oracle`: in the first layer the values of
            the first two variables, later the current result and the first value; `attention`: two
            numbers, each selected by hard attention, with a query from the module's signature,
            among the values of all variables and the current result; `none`: all features and the
            current result.
        selection: `hard`, one module; `soft`, all modules, weighted by probability; `top_k`, the
            `top_k` most probable modules, weighted by renormalised probability.
        top_k: number of modules for selection `top_k`; else None.
        temperature: temperature of the Gumbel softmax of hard selections in training.
        input_encoder: how each variable is encoded for the router, alike in all layers: `linear`,
            one linear map; `mlp`, as in the paper, a perceptron with one hidden layer of d_model
            ReLUs (the paper does not give its size).
        choice: what a hard selection chooses from if the router scores every pair of variable and
            module. `pair`, as in the paper: a pair, in evaluation that with the highest score;
            `module`: a module by its probability, which is summed over variables. Files that were
            saved without this setting load with `pair`.

    Raises:
        ValueError: a setting is not allowed.

    Example:
        >>> router = CrossAttentionRouterConfig(matching=MatchingConfig(d_key=8))
        >>> config = ModularNetworkConfig(
        ...     router=router, n_variables=5, d_input=9, d_model=16, n_layers=2, n_modules=4
        ... )
        >>> ModularNetwork(config)(torch.randn(3, 5, 9)).shape
        torch.Size([3, 1])
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
    input_encoder: InputEncoder = "linear"
    choice: Choice = "pair"

    def __post_init__(self):
        check_sizes(self, "d_input", "d_model", "n_layers", "n_modules")
        check_sizes(self, "n_variables", minimum=2)
        check_choice(self, "functional_bottleneck", FunctionalBottleneck)
        check_choice(self, "input_encoder", InputEncoder)
        check_choice(self, "choice", Choice)
        check_choice(self, "selection", Selection)
        if (self.selection == "top_k") != (self.top_k is not None):
            allowed = "an integer" if self.selection == "top_k" else "None"
            raise ValueError(
                f"top_k must be {allowed} with selection={self.selection!r}, got {self.top_k}"
            )
        if self.top_k is not None and not 1 <= self.top_k <= self.n_modules:
            raise ValueError(
                f"top_k must be in [1, n_modules = {self.n_modules}], got {self.top_k}"
            )
        if not self.temperature > 0:
            raise ValueError(f"temperature must be greater than 0, got {self.temperature}")


class ModularLayer(nn.Module):
    """The hook points of one layer; router and pool hold the weights of all layers."""

    def __init__(self, config: ModularNetworkConfig, *, selects_variable: bool):
        super().__init__()
        self.hook_module_scores = HookPoint()
        if selects_variable:
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
    """A router selects a module from one pool for each layer; the last result is the answer.

    Ostapenko et al. 2022, "Attention for Compositional Modularity". Variables are encoded, each by
    itself; the router scores all modules for all layers from the encoded variables; a module maps
    two operands (or all features, without functional bottleneck) to a number. The encoder is the
    same before each layer (section 2), and so are the variables, which are encoded once.

    In evaluation the module with the highest score in R [variable, module] is taken, in training a
    pair is drawn from the Gumbel softmax over R (section 4). The probability of a module is the sum
    over its pairs, also where all paths are weighted; with `choice="module"` the most probable
    module is taken, which often differs. What the slots of the functional bottleneck attend to is
    not in the paper: here they select among values, which excludes operators.

    Parameters: `W_E` [d_input, d_model], `b_E`, with a perceptron as encoder `W_H`
    [d_model, d_model], `b_H` after its hidden layer; and those of `router`, `pool` and `slots`.

    Hook points: `hook_embed` [batch, variable, d_model]; for each layer, `layers.{l}.`

    - `hook_module_scores` [batch, variable, module]; variable has size 1 if the router scores
      modules once for all variables;
    - `hook_selected_variable` [batch, variable], with a selection bottleneck: one-hot;
    - `hook_module_probs` [batch, module] and TransformerLens' name for it, `hook_expert_weights`;
    - `hook_expert_indices` [batch, 1 or top_k], unless selection is soft;
    - `hook_module_choice` [batch, module]: the weight of each module's result;
    - `hook_operand_choice` [batch, module, slot, candidate], one-hot, with functional bottleneck
      `attention`; candidates are the variables, then the current result;
    - `hook_operands` [batch, module, operand]; module has size 1 if all operands are the same;
    - `hook_module_out` [batch, module]; `hook_result` [batch];

    and those of a transformer in the router. With hard selection and without hooks on the results
    of the modules, only the selected module is computed (not in training, where the gradient needs
    all of them).

    Args:
        config: the configuration.
        generator: random generator of the initial weights; None for torch's global generator.

    Example:
        >>> router = CrossAttentionRouterConfig(matching=MatchingConfig(d_key=8))
        >>> sizes = {"n_variables": 5, "d_input": 9, "d_model": 16, "n_layers": 2, "n_modules": 4}
        >>> model = ModularNetwork(ModularNetworkConfig(router=router, **sizes)).eval()
        >>> _, cache = model.run_with_cache(inputs)
        >>> cache["layers.1.hook_module_choice"].sum(-1)  # a single module for each example
        tensor([1., 1., 1.])
    """

    def __init__(self, config: ModularNetworkConfig, *, generator: torch.Generator | None = None):
        super().__init__()
        self.config = config
        n_variables, d_input, d_model = config.n_variables, config.d_input, config.d_model
        self.W_E = lecun_normal(d_input, d_model, fan_in=d_input, generator=generator)
        self.b_E = zeros(d_model)
        self.W_H = self.b_H = None
        if config.input_encoder == "mlp":
            self.W_H = lecun_normal(d_model, d_model, fan_in=d_model, generator=generator)
            self.b_H = zeros(d_model)
        self.hook_embed = HookPoint()
        sizes = RouterSizes(
            n_variables=n_variables,
            d_model=d_model,
            n_layers=config.n_layers,
            n_modules=config.n_modules,
        )
        self.router = config.router.build(sizes, generator=generator)
        all_features = n_variables * d_input + 1
        d_operands = all_features if config.functional_bottleneck == "none" else 2
        self.pool: ModulePool = config.pool.build(config.n_modules, d_operands, generator=generator)
        self.slots = None
        if config.functional_bottleneck == "attention":
            self.slots = OperandSlots(config.n_modules, d_model, generator=generator)
        with torch.no_grad():
            scores: Scores = self.router(torch.zeros(1, n_variables, d_model))
        selects = scores.variables is not None
        self.layers = nn.ModuleList(
            ModularLayer(config, selects_variable=selects) for _ in range(config.n_layers)
        )
        self.setup()

    @property
    def n_layers(self) -> int:
        """Number of layers, the length of a path."""
        return self.config.n_layers

    @property
    def n_modules(self) -> int:
        """Number of modules to select from in each layer."""
        return self.config.n_modules

    @property
    def bytes_per_result(self) -> int:
        """Peak memory of `advance` per output number."""
        return self.pool.bytes_per_result(shared=self.config.functional_bottleneck != "attention")

    def forward(
        self, inputs: Float[Tensor, "batch variable d_input"], *, temperature: float | None = None
    ) -> Float[Tensor, "batch 1"]:
        """The answers; in training along sampled paths, with straight-through gradients.

        Args:
            inputs: the variables.
            temperature: temperature of the Gumbel softmax in training; None for the config's.

        Raises:
            ValueError: the inputs have the wrong shape, or the temperature is not positive.
        """
        temperature = self.config.temperature if temperature is None else temperature
        if not temperature > 0:
            raise ValueError(f"temperature must be greater than 0, got {temperature}")
        encoded = self._encode(inputs)
        scores: Scores = self.router(encoded)
        result = inputs.new_zeros(len(inputs))
        for layer, points in enumerate(self._points()):
            variables = None if scores.variables is None else scores.variables[:, layer]
            choice = self._choose(points, scores.modules[:, layer], variables, temperature)
            operands = self._operands(inputs, encoded, layer, result[:, None], points, temperature)
            operands = points.hook_operands(operands[:, 0])
            # Straight-through gradients need the results of all modules.
            one_module = self.config.selection == "hard" and not torch.is_grad_enabled()
            if one_module and not observed(points.hook_module_choice, points.hook_module_out):
                result = self.pool.selected(operands, choice.argmax(-1))
            else:
                result = (choice * points.hook_module_out(self.pool(operands))).sum(-1)
            result = points.hook_result(result)
        return result[:, None]

    def all_paths(
        self, inputs: Float[Tensor, "batch variable d_input"]
    ) -> tuple[Float[Tensor, "batch path"], Float[Tensor, "batch layer module"]]:
        """The answer of every path, and the module probabilities of each layer.

        Paths are ordered by their modules (the last layer changes fastest); layers choose
        independently, so the probability of a path is the product over layers. The variable of a
        selection bottleneck is marginalised. Hook points: `hook_embed`, `hook_module_scores`,
        `hook_module_probs` and `hook_expert_weights`.

        Raises:
            ValueError: the inputs have the wrong shape.
        """
        encoded = self._encode(inputs)
        scores: Scores = self.router(encoded)
        probabilities = []
        for layer, points in enumerate(self._points()):
            module_scores = points.hook_module_scores(scores.modules[:, layer])
            if scores.variables is None:
                layer_probs = module_scores.logsumexp(1).softmax(-1)
            else:
                layer_probs = einsum(
                    scores.variables[:, layer].softmax(-1),
                    module_scores.softmax(-1),
                    "batch variable, batch variable module -> batch module",
                )
            layer_probs = points.hook_expert_weights(points.hook_module_probs(layer_probs))
            probabilities.append(layer_probs)
        partial = self.begin(inputs)
        for layer in range(self.n_layers):
            partial = self._advance(inputs, encoded, layer, partial).flatten(1, 2)
        return partial[..., 0], torch.stack(probabilities, dim=1)

    def begin(self, inputs: Float[Tensor, "batch variable d_input"]) -> Float[Tensor, "batch 1 1"]:
        """The result before the first layer: zero, for the empty path of each input."""
        return inputs.new_zeros(len(inputs), 1, 1)

    def advance(
        self,
        inputs: Float[Tensor, "batch variable d_input"],
        layer: int,
        partial: Float[Tensor, "batch path 1"],
    ) -> Float[Tensor, "batch path module 1"]:
        """The results of each module of a layer, given the partial results of several paths.

        Raises:
            ValueError: the inputs have the wrong shape, or the layer does not exist.
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
        encoded = linear(inputs, self.W_E.T, self.b_E)
        if self.W_H is not None:
            encoded = linear(relu(encoded), self.W_H.T, self.b_H)
        return self.hook_embed(encoded)

    def _points(self) -> list[ModularLayer]:
        return [cast(ModularLayer, points) for points in self.layers]

    def _choose(
        self,
        points: ModularLayer,
        scores: Float[Tensor, "batch variable module"],
        variable_scores: Float[Tensor, "batch variable"] | None,
        temperature: float,
    ) -> Float[Tensor, "batch module"]:
        """The weight of each module's result in a layer."""
        # A hook may have excluded modules by scores of -inf.
        scores = points.hook_module_scores(scores).clamp_min(torch.finfo(scores.dtype).min)
        if variable_scores is not None:
            selected = points.hook_selected_variable(self._hard(variable_scores, temperature))
            scores = einsum(
                selected, scores, "batch variable, batch variable module -> batch module"
            )[:, None]
        elif self.config.choice == "module":
            scores = scores.logsumexp(1, keepdim=True)
        probs = scores.logsumexp(1).softmax(-1)
        probs = points.hook_expert_weights(points.hook_module_probs(probs))
        if self.config.selection == "soft":
            return points.hook_module_choice(probs)
        if self.config.selection == "top_k":
            assert self.config.top_k is not None
            indices = points.hook_expert_indices(probs.topk(self.config.top_k, dim=-1).indices)
            return points.hook_module_choice(weights_of_chosen(probs, indices))
        # p(variable, module) = p(module) p(variable | module), so that a changed p(module) counts.
        # A hook may have set a probability to zero.
        log_probs = probs.clamp_min(torch.finfo(probs.dtype).tiny).log()
        pairs = log_probs[:, None] + scores.log_softmax(1)
        sampled = self._hard(pairs.flatten(1), temperature).unflatten(1, pairs.shape[1:]).sum(1)
        indices = points.hook_expert_indices(sampled.argmax(-1, keepdim=True))
        chosen = torch.zeros_like(sampled).scatter(-1, indices, 1.0)
        # The value of the (possibly hooked) choice, the gradient of the sample.
        return points.hook_module_choice(chosen + (sampled - sampled.detach()))

    def _hard(
        self, scores: Float[Tensor, "*batch option"], temperature: float
    ) -> Float[Tensor, "*batch option"]:
        """One-hot: sampled in training (Jang et al. 2017, straight through), else the maximum."""
        if self.training:
            # In float16, some of the sampled numbers would be infinite.
            return gumbel_softmax(widened(scores), temperature=temperature, hard=True).to(scores)
        # Not `one_hot`, which has no `vmap` where gradients are taken.
        return torch.zeros_like(scores).scatter(-1, scores.argmax(-1, keepdim=True), 1.0)

    def _operands(
        self,
        inputs: Float[Tensor, "batch variable d_input"],
        encoded: Float[Tensor, "batch variable d_model"],
        layer: int,
        result: Float[Tensor, "batch path"],
        points: ModularLayer | None,
        temperature: float,
    ) -> Float[Tensor, "batch path #module operand"]:
        """The operands of each module of a layer, given the current results of several paths."""
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
        choice = self._hard(self.slots(encoded, first=layer == 0), temperature)
        if points is not None:
            choice = points.hook_operand_choice(choice)
        candidates = torch.cat(
            [repeat(values, "batch n -> batch path n", path=n_paths), result[..., None]], dim=-1
        )
        return einsum(
            choice,
            candidates,
            "batch module slot candidate, batch path candidate -> batch path module slot",
        )
