"""Training steps: of one model, or of several models of one architecture as a batched model.

The batched model stacks the weights of models that differ in their seeds, [model, ...], and
`torch.func.vmap` evaluates it: each operation is called once for all of them, which for small
models takes less time than one after another. Each model keeps its own examples, dropout masks and
gradient norm, so its numbers are those of training alone, up to rounding.
"""

from __future__ import annotations

import hashlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from mechanisms import independent_draws
from studies.engine.checkpoints import State
from studies.engine.folders import RunError
from studies.engine.optimizers import make_optimizers
from studies.engine.processes import Processes
from studies.engine.training_config import TrainingConfig

Objective = Callable[[nn.Module, Any, int], Tensor]
"""(model, batch, step) -> the loss to minimise, a scalar."""


SHARED = ("step",)
"""What AdamW keeps for a parameter that is the same for all models that are trained together."""


class Updates(ABC):
    """The parameters of one or several models with their optimizers; `update` does a step.

    Args:
        parameters: the parameters by name, with `n_leading` dimensions before those of a model.
        config: the optimizer and schedule.
        n_leading: 0; or 1 if the parameters of several models are stacked.
    """

    def __init__(self, parameters: Mapping[str, Tensor], config: TrainingConfig, *, n_leading: int):
        self._parameters, self._config = parameters, config
        self._optimizers = make_optimizers(parameters, config, n_leading=n_leading)

    def update(self, batches: Sequence[Any], step: int) -> Float[Tensor, " model"]:
        """Do training step `step` with a batch for each model; return the losses."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = self._config.learning_rate_at(step)
        losses = self._differentiate(batches, step)
        if self._config.clip is not None:
            self._clip(self._config.clip)
        for optimizer in self._optimizers:
            optimizer.step()
        return losses

    def state(self, number: int) -> State:
        """The optimizer state of model `number`; views of what later steps change."""
        return {
            name: {
                key: value if key in SHARED else self._of_model(value, number)
                for optimizer in self._optimizers
                for key, value in optimizer.state.get(parameter, {}).items()
            }
            for name, parameter in self._parameters.items()
        }

    def restore(self, states: Sequence[State]) -> None:
        """Set the optimizer state of all models; it may be empty, as before the first step."""
        owners = {
            parameter: optimizer
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for name, first in states[0].items():
            parameter = self._parameters[name]
            for key, value in first.items():
                owners[parameter].state[parameter][key] = (
                    value.clone()
                    if key in SHARED
                    else self._joined([state[name][key] for state in states])
                )

    @abstractmethod
    def _differentiate(self, batches: Sequence[Any], step: int) -> Float[Tensor, " model"]:
        """Compute the losses and the gradients of all parameters."""

    @abstractmethod
    def _clip(self, largest: float) -> None:
        """Scale the gradient of each model down to a norm of at most `largest`."""

    @abstractmethod
    def _of_model(self, value: Tensor, number: int) -> Tensor:
        """A model's part of a tensor of optimizer state."""

    @abstractmethod
    def _joined(self, values: Sequence[Tensor]) -> Tensor:
        """A tensor of optimizer state from those of all models."""


class SingleUpdates(Updates):
    """Training steps of one model, possibly with other processes that share its batches.

    Args:
        model: the model, on its device.
        config: the optimizer and schedule.
        objective: the loss to minimise.
        seed: seed of the dropout masks.
        processes: the processes that train it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        config: TrainingConfig,
        objective: Objective,
        seed: int,
        processes: Processes,
    ):
        super().__init__(dict(model.named_parameters()), config, n_leading=0)
        self._seed = seed
        # Only the handle is compiled: a compiled model would ignore hooks that are added later.
        handle = compiled(model, model) if config.compile else model
        self._loss = processes.prepare(_Loss(cast(nn.Module, handle), objective))

    def _differentiate(self, batches: Sequence[Any], step: int) -> Float[Tensor, 1]:
        (batch,) = batches
        _seed(seed_of_step(self._seed, step), batch.mask.device)
        losses = []
        for part in _parts(batch, self._config.n_parts):
            with _autocast(batch, self._config):
                loss = self._loss(part, step) * (len(part.mask) / len(batch.mask))
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()[None]

    def _clip(self, largest: float) -> None:
        nn.utils.clip_grad_norm_(self._loss.parameters(), largest)

    def _of_model(self, value: Tensor, number: int) -> Tensor:
        return value

    def _joined(self, values: Sequence[Tensor]) -> Tensor:
        return values[0].clone()


class StackedUpdates(Updates):
    """Training steps of several models of one architecture, as one batched model.

    The models' parameters become views of the stacked ones, so that evaluation and checkpoints see
    every step.

    Args:
        models: the models, on one device, equal but for the values of their weights.
        config: the optimizer and schedule.
        objective: the loss to minimise.
        seeds: the seed of each model's dropout masks.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        *,
        config: TrainingConfig,
        objective: Objective,
        seeds: Sequence[int],
    ):
        stacked, self._buffers = stack_module_state(list(models))
        together = stacked | self._buffers
        for number, model in enumerate(models):
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                tensor.data = together[name].data[number]
        super().__init__(stacked, config, n_leading=1)
        self._seeds, self._loss = seeds, _Loss(models[0], objective)
        # A compiled function cannot draw from a generator for each model.
        losses = vmap(
            self._loss_of,
            (0, 0, 0, None, None),
            randomness="different" if config.compile else "error",
        )
        self._losses = compiled(losses, models[0]) if config.compile else losses

    def _loss_of(
        self, parameters: Any, buffers: Any, values: dict[str, Any], kind: type, step: int
    ) -> Tensor:
        state = {f"model.{name}": tensor for name, tensor in (parameters | buffers).items()}
        return functional_call(self._loss, state, (kind(**values), step))

    def _differentiate(self, batches: Sequence[Any], step: int) -> Float[Tensor, " model"]:
        seeds = [seed_of_step(seed, step) for seed in self._seeds]
        device, losses = batches[0].mask.device, []
        _seed(seeds[0], device)
        parts = [_parts(batch, self._config.n_parts) for batch in batches]
        masks = nullcontext() if self._config.compile else independent_draws(seeds, device)
        with masks:
            for of_models in zip(*parts, strict=True):
                with _autocast(batches[0], self._config):
                    loss = self._losses_of(of_models, step)
                loss = loss * (len(of_models[0].mask) / len(batches[0].mask))
                loss.sum().backward()
                losses.append(loss.detach())
        return torch.stack(losses).sum(0)

    def _losses_of(self, batches: Sequence[Any], step: int) -> Float[Tensor, " model"]:
        """The losses of all models.

        Raises:
            RunError: batches differ in shape, or a model does what `vmap` cannot do, such as
                drawing random numbers in its own way.
        """
        kind = type(batches[0])
        try:
            values = _stack([vars(batch) for batch in batches])
            return self._losses(self._parameters, self._buffers, values, kind, step)
        except RuntimeError as error:
            raise RunError(f"the models cannot be trained together: {error}") from error

    def _clip(self, largest: float) -> None:
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        squares = [g.reshape(len(g), -1).square().sum(1) for g in gradients]
        scale = (largest / (torch.stack(squares).sum(0).sqrt() + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale.view(-1, *[1] * (gradient.ndim - 1)))

    def _of_model(self, value: Tensor, number: int) -> Tensor:
        return value[number]

    def _joined(self, values: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(values))


class _Loss(nn.Module):
    """The objective as a module, so that it may call any method of a model in several processes."""

    def __init__(self, model: nn.Module, objective: Objective):
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, batch: Any, step: int) -> Tensor:
        return self.objective(self.model, batch, step)


def compiled(function: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
    """A compiled handle of a function or model; on CUDA it replays CUDA graphs."""
    # Mechanisms cache tables of positions; compiled, these are computed with the step.
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    if next(model.parameters()).device.type == "cuda":
        return torch.compile(function, mode="reduce-overhead")
    return torch.compile(function)


def seed_of_step(seed: int, step: int) -> int:
    """The seed of the random numbers of a training step."""
    digest = hashlib.sha256(f"{seed}/{step}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _seed(seed: int, device: torch.device) -> None:
    """Seed the random numbers of a step.

    As `torch.manual_seed`, which at each call notes the call stack for kinds of devices that are
    not in use; on small models that takes some percent of a step.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def _autocast(batch: Any, config: TrainingConfig) -> torch.autocast:
    return torch.autocast(
        batch.mask.device.type, torch.bfloat16, enabled=config.precision == "bf16"
    )


def _parts(batch: Any, n_parts: int) -> list[Any]:
    return [batch] if n_parts == 1 else list(batch.parts(-(-len(batch) // n_parts)))


def _stack(values: Sequence[Any]) -> Any:
    """Tensors stacked along a new first dimension, inside of tuples and dicts."""
    first = values[0]
    if isinstance(first, dict):
        return {key: _stack([value[key] for value in values]) for key in first}
    if isinstance(first, tuple):
        return tuple(map(_stack, zip(*values, strict=True)))
    return torch.stack(list(values))
