"""Forward passes of a hooked model over batches, and what its hooks show in them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from probes.capturing.hooking import (
    HookedModel,
    evaluating,
    layer_numbers,
    resolve_hooks,
    run_with_matches,
)
from probes.capturing.inputs import Inputs, call, count_examples, count_positions, describe
from probes.capturing.quantity import Quantity
from probes.checking import shape_of

# Explicit types: numpy has no bfloat16, and half precision gains nothing on the way to a file.
WIDENED = {torch.bfloat16: torch.float32, torch.float16: torch.float32}

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
    """The latents of a batch as arrays, in which half precision becomes float32.

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
        str(name): np.array(_widened(latent) if isinstance(latent, Tensor) else latent)
        for name, latent in latents.items()
    }


def _widened(latent: Tensor) -> np.ndarray:
    return latent.detach().to(WIDENED.get(latent.dtype, latent.dtype)).cpu().numpy()


def with_latents(
    batches: Iterable[Batch], named: Collection[str] = ()
) -> Iterator[tuple[Batch, dict[str, np.ndarray]]]:
    """Each batch with its latents, as `read_latents` reads them.

    Raises:
        KeyError: the batches lack a latent that is named in `latent_dims`.
        ValueError: a batch has other latents than the first, or of another shape.
    """
    shapes: dict[str, tuple[int, ...]] | None = None
    for batch in batches:
        latents = read_latents(batch)
        of_batch = {name: latent.shape[1:] for name, latent in latents.items()}
        shapes = of_batch if shapes is None else shapes
        names = {*shapes}
        if unknown := sorted({*named} - names):
            known = ", ".join(sorted(names))
            raise KeyError(
                f"latent_dims must name latents of the batches, which are {known}, got "
                f"{', '.join(unknown)}"
            )
        if differing := sorted(names ^ {*latents}):
            raise ValueError(
                f"batches must have the latents of the first, {sorted(names)}, got one with "
                f"{sorted(latents)}, which differs in {differing}"
            )
        if name := next((name for name in shapes if shapes[name] != of_batch[name]), None):
            raise ValueError(
                f"latent {name!r} must have one shape after the examples in all batches, got "
                f"{shapes[name]} and {of_batch[name]}; capture them in separate datasets"
            )
        yield batch, latents


class _Enough(Exception):
    """All that is asked for has been seen: the rest of the forward pass is not needed."""


_READING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_INDEX = torch.ops.aten.index.Tensor


class _Reads(TorchDispatchMode):
    """Notes whether a pass reads numbers, or shapes, from the values of its tensors.

    The course of the pass may depend on them. It does not see `tolist()` and `numpy()`.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), settings: Any = None
    ) -> Any:
        # The shape depends on masks among the indices, not on the values of other indices.
        masked = function is not _INDEX or any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in arguments[1]
        )
        self.any |= masked and any(tag in getattr(function, "tags", ()) for tag in _READING)
        return function(*arguments, **(settings or {}))


Firings = list[list[Tensor]]
"""The reduced activations [example, ...] of a quantity, by hook and by firing."""


class Passes:
    """Forward passes of a model, and what its hooks show in them.

    Attributes:
        layers: numbers in the names of hooks, by quantity, for globs. They are known after the
            first pass, which may create hooks; those of steps that it does not take are left out.
    """

    def __init__(self, model: HookedModel, quantities: Mapping[str, Quantity]) -> None:
        self.model, self.quantities = model, quantities
        self.layers: dict[str, list[int]] = {}
        self._hooks: dict[str, list[str | None]] = {}
        self._n_hooks, self._n_matched = 0, dict[str, int]()
        self._attached = ExitStack()
        self._seen: dict[str, Firings] = {}
        self._batch: Batch | None = None
        self._n_examples, self._n_positions = 0, set[int]()
        # A pass may end early if another one, of the same course, has shown what fires.
        self._may_end = all(one.hook and one.fires == "once" for one in quantities.values())
        self._courses: set[str] = set()
        # The number of firings after which the pass ends; 0 for the whole pass.
        self._n_expected = self._n_seen = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Have the hooks attached, with the model in evaluation mode and without gradients."""
        with evaluating(self.model), self._attached:
            yield

    def run(self, batch: Batch, latents: Mapping[str, np.ndarray]) -> dict[str, Firings]:
        """What each quantity shows in a forward pass over a batch.

        Raises:
            KeyError: an unknown hook; the message lists the nearest names.
            RuntimeError: a hook did not fire, or fired again although it should fire once, or the
                batch takes more steps than the first.
            ValueError: the batch has no examples, or what is kept does not have the dims of its
                quantity.
        """
        self._batch = batch
        sizes = [len(latent) for latent in latents.values() if latent.ndim]
        self._n_examples = sizes[0] if sizes else count_examples("inputs", batch.inputs)
        if not self._n_examples:
            raise ValueError("batches must have at least one example each, got one with none")
        self._n_positions = count_positions(batch.inputs)
        if self._hooks:
            self._pass(batch)
            self._check_hooks()
        else:
            patterns = [one.hook for one in self.quantities.values() if one.hook is not None]
            run_with_matches(self.model, patterns, self._first_pass)
            self._n_hooks = len(self.model.hook_dict)
            self._number_layers()
        _check_batch(self._seen, self._hooks, latents)
        return self._seen

    def _first_pass(self, matches: Mapping[str, list[str]]) -> None:
        assert self._batch is not None
        self._hooks = {
            name: [None] if quantity.hook is None else [*matches[quantity.hook]]
            for name, quantity in self.quantities.items()
        }
        fwd_hooks = [
            (hook, partial(self._listen, name, index))
            for name, matched in self._hooks.items()
            for index, hook in enumerate(matched)
            if hook is not None
        ]
        self._attached.close()
        self._attached.enter_context(self.model.hooks(fwd_hooks=fwd_hooks))
        self._courses.clear()
        self._pass(self._batch)

    def _pass(self, batch: Batch) -> None:
        self._seen = {name: [[] for _ in matched] for name, matched in self._hooks.items()}
        self._n_seen, course = 0, describe(batch.inputs)
        is_known = self._may_end and course in self._courses
        self._n_expected = sum(map(len, self._hooks.values())) if is_known else 0
        reads = _Reads()
        try:
            with reads if self._may_end and not is_known else nullcontext():
                output = call(self.model, batch.inputs)
        except _Enough:
            output = None
        for name, matched in self._hooks.items():
            if matched == [None]:
                self._keep(name, 0, output, "the model's output")
        self._may_end &= not reads.any
        self._courses.add(course)

    def _number_layers(self) -> None:
        for name, quantity in self.quantities.items():
            if not quantity.has_layers:
                continue
            self._n_matched[name] = len(self._hooks[name])
            self.layers[name] = layer_numbers(str(quantity.hook), _names(self._hooks[name]))
            fired = [bool(firings) for firings in self._seen[name]]
            n_fired = sum(fired)
            if 0 < n_fired < len(fired) and all(fired[:n_fired]):
                self.layers[name] = self.layers[name][:n_fired]
                self._hooks[name] = self._hooks[name][:n_fired]
                self._seen[name] = self._seen[name][:n_fired]
                self._may_end = False

    def _check_hooks(self) -> None:
        if len(self.model.hook_dict) == self._n_hooks:
            return
        self._n_hooks = len(self.model.hook_dict)
        for name in self.layers:
            created = resolve_hooks(self.model, str(self.quantities[name].hook))
            if len(created) > self._n_matched[name]:
                raise _other_steps(len(self._hooks[name]), created[-1])

    def _listen(self, name: str, index: int, activation: Any, hook: Any) -> None:
        if index >= len(self._seen[name]):
            raise _other_steps(len(self._seen[name]), hook.name)
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


def _other_steps(n_steps: int, hook: str) -> RuntimeError:
    return RuntimeError(
        f"all batches must have the number of steps of the first, {n_steps}, got a pass in which "
        f"{hook!r} fires; capture them in separate datasets"
    )


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
