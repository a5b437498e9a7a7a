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
    layer_numbers,
    resolve_hooks,
)
from probes.capturing.inputs import Inputs, call, count_examples, count_positions
from probes.capturing.quantity import Quantity
from probes.checking import shape_of

_SECOND = (
    ". A module has a second output only where it returns one: attention weights of Hugging Face "
    'need attn_implementation="eager"'
)


class Batch(Protocol):
    """An object with inputs and latents, such as a task's batch.

    Example:
        >>> from types import SimpleNamespace
        >>> tokens = torch.randint(10, (20, 5))
        >>> batch: Batch = SimpleNamespace(inputs=tokens, latents={"parity": tokens[:, 0] % 2})
        >>> z = probes.Quantity("blocks.*.attn.hook_z", ("example", "pos", "head", "d_head"))
        >>> sorted(probes.capture(model, [batch], {"z": z}))
        ['parity', 'z']
    """

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
            "others, as in SimpleNamespace(inputs=x, latents={'label': y}), got "
            f"{shape_of(batch)}"
        )
    return {
        # Copies, since batches may be views of one buffer.
        str(name): np.array(latent.detach().cpu().numpy() if isinstance(latent, Tensor) else latent)
        for name, latent in latents.items()
    }


class _Enough(Exception):
    """All that is asked for has been seen: the rest of the forward pass is not needed."""


Firings = list[list[Tensor]]
"""The reduced activations [example, ...] of a quantity, by hook and by firing."""


class Passes:
    """Forward passes of a model, and what its hooks show in them.

    Attributes:
        layers: numbers in the names of hooks, by quantity, for globs. After the first pass these
            are the hooks that fire: a model that was once called with more steps has more hooks.
    """

    def __init__(self, model: HookedModel, quantities: Mapping[str, Quantity]) -> None:
        self.model, self.quantities = model, quantities
        self._hooks: dict[str, list[str | None]] = {
            name: [None] if quantity.hook is None else [*resolve_hooks(model, quantity.hook)]
            for name, quantity in quantities.items()
        }
        self.layers = {
            name: layer_numbers(str(quantity.hook), _names(self._hooks[name]))
            for name, quantity in quantities.items()
            if quantity.has_layers
        }
        self._seen: dict[str, Firings] = {}
        self._batch: Batch | None = None
        self._n_examples, self._n_positions = 0, set[int]()
        # Firings after which a pass may end; 0 if it must not, None before the first pass.
        self._n_expected: int | None = None
        self._n_seen = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Attach the hooks, with the model in evaluation mode and without gradients."""
        fwd_hooks = [
            (hook, partial(self._listen, name, index))
            for name, matched in self._hooks.items()
            for index, hook in enumerate(matched)
            if hook is not None
        ]
        with evaluating(self.model), self.model.hooks(fwd_hooks=fwd_hooks):
            yield

    def run(self, batch: Batch, latents: Mapping[str, np.ndarray]) -> dict[str, Firings]:
        """What each quantity shows in a forward pass over a batch.

        Raises:
            RuntimeError: a hook did not fire, or fired again although it should fire once.
            ValueError: what is kept does not have the dims of its quantity.
        """
        self._batch = batch
        sizes = [len(latent) for latent in latents.values() if latent.ndim]
        self._n_examples = sizes[0] if sizes else count_examples("inputs", batch.inputs)
        self._n_positions = count_positions(batch.inputs)
        self._seen = {name: [[] for _ in matched] for name, matched in self._hooks.items()}
        self._n_seen = 0
        try:
            output = call(self.model, batch.inputs)
        except _Enough:
            output = None
        for name, matched in self._hooks.items():
            if matched == [None]:
                self._keep(name, 0, output, "the model's output")
        # Frees the output before the next batch runs.
        del output
        if self._n_expected is None:
            is_fixed = not self._drop_hooks_of_further_steps() and all(
                quantity.hook and quantity.fires == "once" for quantity in self.quantities.values()
            )
            self._n_expected = sum(map(len, self._hooks.values())) if is_fixed else 0
        _check_batch(self._seen, self._hooks, latents)
        return self._seen

    def _drop_hooks_of_further_steps(self) -> bool:
        is_dropped = False
        for name, layers in self.layers.items():
            fired = [bool(firings) for firings in self._seen[name]]
            n_fired = sum(fired)
            if 0 < n_fired < len(fired) and all(fired[:n_fired]):
                self.layers[name] = layers[:n_fired]
                self._hooks[name] = self._hooks[name][:n_fired]
                self._seen[name] = self._seen[name][:n_fired]
                is_dropped = True
        return is_dropped

    def _listen(self, name: str, index: int, activation: Any, hook: Any) -> None:
        if index >= len(self._seen[name]):
            raise RuntimeError(
                f"all batches must have the number of steps of the first, {len(self._seen[name])}, "
                f"got a pass in which {hook.name!r} fires; capture them in separate datasets"
            )
        self._keep(name, index, activation, f"hook {hook.name!r}")
        self._n_seen += 1
        if self._n_seen == self._n_expected:
            raise _Enough

    def _keep(self, name: str, index: int, activation: Any, source: str) -> None:
        quantity, firings = self.quantities[name], self._seen[name][index]
        if firings and quantity.fires == "once":
            raise RuntimeError(
                f"{source} must fire once in a forward pass, fired again; fires='each' keeps all"
            )
        activation = _by_example(activation, self._n_examples, self._n_positions)
        firings.append(_reduce(name, quantity, activation, self._batch, source))


def _names(hooks: list[str | None]) -> list[str]:
    return [hook for hook in hooks if hook is not None]


def _by_example(activation: Any, n_examples: int, n_positions: set[int]) -> Any:
    """Split [example x pos, ...], as routers of experts have it, into [example, pos, ...]."""
    if not isinstance(activation, Tensor) or activation.ndim == 0:
        return activation
    # Another multiple of the examples is chance: embeddings of positions have no examples.
    for n in n_positions - {1}:
        if len(activation) == n_examples * n:
            return activation.unflatten(0, (n_examples, n))
    return activation


def _reduce(
    name: str, quantity: Quantity, activation: Any, batch: Batch | None, source: str
) -> Tensor:
    arguments = (activation, batch) if quantity.takes_batch else (activation,)
    reduced = activation if quantity.reduce is None else quantity.reduce(*arguments)
    if not isinstance(reduced, Tensor) or reduced.ndim != len(quantity.dims):
        raise ValueError(
            f"quantity {name!r} must have the dims {quantity.dims}, got {shape_of(reduced)} from "
            f"{source} {shape_of(activation)}"
        )
    return reduced.detach().clone()


def _check_batch(
    activations: Mapping[str, Firings],
    hooks: Mapping[str, list[str | None]],
    latents: Mapping[str, np.ndarray],
) -> None:
    silent = [
        hook
        for name, matched in hooks.items()
        for hook, firings in zip(matched, activations[name], strict=True)
        if not firings
    ]
    if silent:
        second = any(str(hook).endswith("_1") for hook in silent)
        raise RuntimeError(
            f"hooks must fire in the forward pass, silent: {silent}{_SECOND if second else ''}"
        )
    counts = {
        name: tensor.shape[:1]
        for name, of_hooks in activations.items()
        for firings in of_hooks
        for tensor in firings
    }
    counts |= {name: latent.shape[:1] for name, latent in latents.items()}
    if len(set(counts.values())) > 1:
        shown = {name: tuple(count) for name, count in counts.items()}
        raise ValueError(f"first dims must be the examples of the batch, got sizes {shown}")
