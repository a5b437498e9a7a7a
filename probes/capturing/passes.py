"""Forward passes of a hooked model over batches, and what its hooks show in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from probes.capturing.hooking import (
    HookedModel,
    evaluating,
    is_glob,
    layer_numbers,
    resolve_hooks,
)
from probes.capturing.inputs import Inputs, call
from probes.capturing.quantity import Quantity


class Batch(Protocol):
    """An object with inputs and latents, such as a task's batch."""

    @property
    def inputs(self) -> Inputs:
        """What the model is called with."""
        ...

    @property
    def latents(self) -> Mapping[str, Any]:
        """Ground truth by name, each an array or tensor [example, ...]."""
        ...


def read_latents(batch: Batch) -> dict[str, np.ndarray]:
    """The latents of a batch as arrays.

    Raises:
        TypeError: the batch has no inputs or no mapping of latents.
    """
    latents = getattr(batch, "latents", None)
    if not hasattr(batch, "inputs") or not isinstance(latents, Mapping):
        raise TypeError(
            "batches must have inputs and latents (a mapping of arrays), like those of tasks; wrap "
            f"others, as in SimpleNamespace(inputs=x, latents={{'label': y}}), got {_shape(batch)}"
        )
    return {
        str(name): latent.detach().cpu().numpy() if isinstance(latent, Tensor) else np.array(latent)
        for name, latent in latents.items()
    }


class _Enough(Exception):
    """All that is asked for has been seen: the rest of the forward pass is not needed."""


class Passes:
    """Forward passes of a model, and what its hooks show in them."""

    def __init__(self, model: HookedModel, quantities: Mapping[str, Quantity]) -> None:
        self.model, self._quantities = model, quantities
        self._hooks = {
            name: resolve_hooks(model, quantity.hook)
            for name, quantity in quantities.items()
            if quantity.hook is not None
        }
        self.layers = {
            name: layer_numbers(quantity.hook, self._hooks[name])
            for name, quantity in quantities.items()
            if quantity.hook is not None and is_glob(quantity.hook)
        }
        self._outputs = [name for name, quantity in quantities.items() if quantity.hook is None]
        self._expected = sum(map(len, self._hooks.values()))
        self._seen: dict[tuple[str, int], Tensor] = {}
        self._is_checked = False

    def n_layers(self, name: str) -> int:
        """The number of hooks of a quantity."""
        return len(self._hooks.get(name, [name]))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Attach the hooks, with the model in evaluation mode and without gradients."""
        fwd_hooks = [
            (hook, partial(self._listen, name, index))
            for name, matched in self._hooks.items()
            for index, hook in enumerate(matched)
        ]
        with evaluating(self.model), self.model.hooks(fwd_hooks=fwd_hooks):
            yield

    def run(self, inputs: Inputs, latents: Mapping[str, np.ndarray]) -> dict[str, list[Tensor]]:
        """The reduced activations [example, ...] of each quantity, one for each of its hooks."""
        self._seen.clear()
        try:
            output = call(self.model, inputs)
        except _Enough:
            output = None
        for name in self._outputs:
            self._keep(name, 0, output, "the model's output")
        # Frees the output before the next batch runs.
        del output
        _check_batch(self._seen, self._hooks, latents)
        self._is_checked = True
        return {
            name: [self._seen[name, layer] for layer in range(self.n_layers(name))]
            for name in self._quantities
        }

    def _listen(self, name: str, index: int, activation: Any, hook: Any) -> None:
        self._keep(name, index, activation, f"hook {hook.name!r}")
        if self._is_checked and not self._outputs and len(self._seen) == self._expected:
            raise _Enough

    def _keep(self, name: str, index: int, activation: Any, source: str) -> None:
        if (name, index) in self._seen:
            raise RuntimeError(f"{source} must fire once in a forward pass, fired again")
        self._seen[name, index] = _reduce(name, self._quantities[name], activation, source)


def _reduce(name: str, quantity: Quantity, activation: Any, source: str) -> Tensor:
    reduced = activation if quantity.reduce is None else quantity.reduce(activation)
    if not isinstance(reduced, Tensor) or reduced.ndim != len(quantity.dims):
        raise ValueError(
            f"quantity {name!r} must have the dims {quantity.dims}, got {_shape(reduced)} from "
            f"{source} {_shape(activation)}"
        )
    return reduced.detach().clone()


def _check_batch(
    activations: Mapping[tuple[str, int], Tensor],
    hooks: Mapping[str, list[str]],
    latents: Mapping[str, np.ndarray],
) -> None:
    silent = [
        hook
        for name, matched in hooks.items()
        for index, hook in enumerate(matched)
        if (name, index) not in activations
    ]
    if silent:
        raise RuntimeError(f"hooks must fire in the forward pass, silent: {silent}")
    counts = {name: tensor.shape[:1] for (name, _), tensor in activations.items()}
    counts |= {name: latent.shape[:1] for name, latent in latents.items()}
    if len(set(counts.values())) > 1:
        shown = {name: tuple(count) for name, count in counts.items()}
        raise ValueError(f"first dims must be the examples of the batch, got sizes {shown}")


def _shape(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
