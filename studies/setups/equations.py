"""Setup: math equations, computed by modular networks (Ostapenko et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

import mechanisms
import tasks
from studies import engine
from studies.engine.setup import References, Scores

ROUTERS = ("cross_attention", "concatenation", "encoder")
MODULAR = ("structural_oracle", *ROUTERS)
MODELS = (*MODULAR, "monolithic")

_OF_MODULES = (
    *("objective", "selection_bottleneck", "functional_bottleneck", "module_keys", "pool"),
    *("n_layers", "d_model", "d_key", "temperature", "final_temperature", "entropy"),
    *("input_encoder", "choice"),
)
_OF_ENCODER = ("n_blocks", "n_heads", "d_encoder")


@dataclass(frozen=True, kw_only=True)
class EquationsSetup(engine.Setup):
    """A modular network with a router, or a monolithic network, that computes equations.

    Args:
        model: the router, or `monolithic`: a network with n_modules * d_mlp hidden units.
        task: the equations, of at least two operators.
        objective: train on a `sampled` path, or on the expected loss of `all_paths`.
        selection_bottleneck: whether the router sees one variable only, as the oracle always does.
        functional_bottleneck: the inputs of a module, see `mechanisms.ModularNetworkConfig`.
        module_keys: how module keys are parametrised, see `mechanisms.MatchingConfig`.
        pool: learned modules (`mlp`), or the true `operations`.
        n_layers: number of layers, 1 or the number of operators in an equation.
        n_modules, d_mlp: number of learned modules, and hidden units of each.
        d_model, d_key: widths of variables, and of queries and keys.
        n_blocks, n_heads, d_encoder: sizes of the encoder router's transformer.
        temperature, final_temperature: of the Gumbel softmax, at the first and the last step.
        entropy: weight of the entropy of paths with the objective `all_paths`.
        input_encoder: encoder of variables for the router, see `mechanisms.ModularNetworkConfig`.
        choice: what the router chooses from, a `pair` of variable and module or a `module`.

    Raises:
        ValueError: a value is not allowed, or validation leaves fewer than two examples of each
            task on `id` for measures.
    """

    task: tasks.MathEquationsConfig
    objective: Literal["sampled", "all_paths"] = "sampled"
    selection_bottleneck: bool = False
    functional_bottleneck: Literal["oracle", "attention", "none"] = "oracle"
    module_keys: Literal["direct", "projected", "shared"] = "direct"
    pool: Literal["mlp", "operations"] = "mlp"
    n_layers: int = 2
    n_modules: int = 10
    d_mlp: int = 64
    d_model: int = 64
    d_key: int = 32
    n_blocks: int = 1
    n_heads: int = 4
    d_encoder: int = 128
    temperature: float = 3.0
    final_temperature: float = 0.5
    entropy: float = 0.0
    input_encoder: Literal["mlp", "linear"] = "mlp"
    choice: Literal["pair", "module"] = "pair"

    task_type: ClassVar = tasks.MathEquations
    metrics: ClassVar = {"loss": engine.Metric("mean squared error", "lower", best=0.0)}
    selection: ClassVar = engine.Selection("id", "loss")
    depends_on_length: ClassVar = True

    def __post_init__(self):
        super().__post_init__()
        if self.task.length < 2:
            raise ValueError(f"task.length must be at least 2, got {self.task.length}")
        if self.n_layers not in (1, self.task.length):
            raise ValueError(f"n_layers must be 1 or {self.task.length}, got {self.n_layers}")
        if self.n_validation > (most := self.task.size("id") - 2 * self.task.n_known):
            raise ValueError(f"n_validation must be at most {most}, got {self.n_validation}")

    @property
    def operations(self) -> tuple[str, ...]:
        """The operations that a layer performs; with one layer, whole combinations."""
        return self.sampler().operations if self.n_layers > 1 else self.sampler().task_names

    def models(self) -> tuple[str, ...]:
        return MODELS

    def build(self, generator: torch.Generator) -> nn.Module:
        task = self.sampler()
        shape: dict[str, Any] = {"n_variables": task.n_variables, "d_input": task.n_features}
        if self.model == "monolithic":
            monolithic = mechanisms.MonolithicConfig(**shape, d_mlp=self.n_modules * self.d_mlp)
            return mechanisms.Monolithic(monolithic, generator=generator)
        n_modules, pool = self.n_modules, mechanisms.MlpPoolConfig(d_mlp=self.d_mlp)
        if self.pool == "operations":
            n_modules = len(task.operations)
            pool = mechanisms.OperationPoolConfig(names=task.operations)
        config = mechanisms.ModularNetworkConfig(
            **shape,
            d_model=self.d_model,
            n_layers=self.n_layers,
            router=self._router(),
            n_modules=n_modules,
            pool=pool,
            functional_bottleneck=self.functional_bottleneck,
            temperature=self.temperature,
            input_encoder=self.input_encoder,
            choice=self.choice,
        )
        return mechanisms.ModularNetwork(config, generator=generator)

    def _router(self) -> Any:
        matching = mechanisms.MatchingConfig(d_key=self.d_key, keys=self.module_keys)
        if self.model == "structural_oracle":
            variables = self.sampler().deciding[: self.n_layers]
            return mechanisms.StructuralOracleRouterConfig(matching=matching, variables=variables)
        common: Any = {"matching": matching, "selection_bottleneck": self.selection_bottleneck}
        if self.model == "encoder":
            common |= {"n_blocks": self.n_blocks, "n_heads": self.n_heads, "d_mlp": self.d_encoder}
            return mechanisms.EncoderRouterConfig(**common)
        if self.model == "cross_attention":
            return mechanisms.CrossAttentionRouterConfig(**common)
        return mechanisms.ConcatenationRouterConfig(**common)

    def temperature_at(self, step: int) -> float:
        """The temperature at training step `step`, which decays geometrically."""
        progress = step / max(1, self.training.n_steps - 1)
        return self.temperature * (self.final_temperature / self.temperature) ** progress

    def loss(self, model: nn.Module, batch: tasks.Batch[Any], step: int) -> Tensor:
        """Squared error of the network or of a sampled path, or the expected error of all paths."""
        inputs, targets = batch.inputs, batch.targets
        if self.model == "monolithic":
            return (model(inputs) - targets).square().mean()
        network = cast(mechanisms.ModularNetwork, model)
        if self.objective == "all_paths":
            return mechanisms.all_paths_loss(network, inputs, targets, entropy=self.entropy)
        at = self.temperature_at(step)
        return mechanisms.sampled_path_loss(network, inputs, targets, temperature=at)

    def scores(self, output: Tensor, batch: tasks.Batch[Any], split: str) -> Scores:
        errors = self.sampler().score(output, batch)["squared_error"]
        return {"loss": (errors, torch.ones_like(errors))}

    def references(self, split: str) -> References:
        """The loss of a constant answer, the mean of the training targets."""
        return {"constant": {"loss": {engine.ALL: self.sampler().baseline(split)}}}

    def inapplicable(self) -> frozenset[str]:
        """Settings that the model does not have."""
        of_encoder = () if self.model == "encoder" else _OF_ENCODER
        of_others = {"monolithic": _OF_MODULES, "structural_oracle": ("selection_bottleneck",)}
        return frozenset(of_encoder + of_others.get(self.model, ()))
