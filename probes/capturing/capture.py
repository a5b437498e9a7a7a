"""Stream a model's activations, reduced inside the hook, together with a task's ground truth."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from probes.capturing.hooking import (
    HookedModel,
    check_model,
    evaluating,
    is_glob,
    layer_numbers,
    resolve_hooks,
)
from probes.capturing.inputs import Inputs, call

# Explicit types: numpy has no bfloat16, and half precision gains nothing on the way to a file.
_WIDENED = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


class Batch(Protocol):
    """An object with inputs and latents, such as a task's batch."""

    @property
    def inputs(self) -> Inputs:
        """What the model is called with."""
        ...

    @property
    def latents(self) -> Mapping[str, Tensor]:
        """Ground truth by name, each [example, ...]."""
        ...


@dataclass(frozen=True)
class Quantity:
    """A quantity to capture: a hook, and how its activation is reduced and labelled.

    Attributes:
        hook: a hook name; or a glob (`blocks.*.attn.hook_pattern`), which adds a `layer` dim after
            `example`; or None for the model's output.
        dims: dims of the reduced activation, `example` first, without `layer`.
        reduce: applied to the activation [example, ...] inside the hook; its result is kept. None
            keeps the whole activation.
        long_name: description of the variable for figures and files; empty for the hook's name.
    """

    hook: str | None
    dims: tuple[str, ...]
    reduce: Callable[[Any], Tensor] | None = None
    long_name: str = ""

    def __post_init__(self) -> None:
        if not self.dims or self.dims[0] != "example":
            raise ValueError(f"dims must begin with 'example', got {self.dims}")
        if len(set(self.dims)) != len(self.dims):
            raise ValueError(f"dims must be distinct, got {self.dims}")
        if "layer" in self.dims and self.hook is not None and is_glob(self.hook):
            raise ValueError(
                f"dims must not name 'layer': the glob {self.hook!r} adds it, got {self.dims}"
            )


def capture(
    model: HookedModel,
    batches: Iterable[Batch],
    quantities: Mapping[str, Quantity],
    *,
    latent_dims: Mapping[str, tuple[str, ...]] | None = None,
) -> xr.Dataset:
    """Run the model over batches and keep the chosen quantities of each example.

    The model runs in evaluation mode without gradients; its training flags are restored and the
    hooks removed at the end, also after an error. Hooks are attached once for all batches, kept
    values are copied (activations alias live storage), and all else is dropped after each batch.
    So the time is that of the forward passes, and memory grows only with what is kept.

    Args:
        model: an eager HookedRootModule or TransformerBridge.
        batches: objects with `.inputs` and `.latents`; at least one.
        quantities: what to keep, by variable name.
        latent_dims: dims of each latent by name, `example` first, for example
            `{"rule": ("example", "feature")}`; a latent that is not listed gets the dims
            `example`, `{name}_1`, `{name}_2`, ...

    Returns:
        One variable per quantity, [example, dims...] or [example, layer, dims...] for a glob
        (coordinate `layer`: the numbers in the names), and one per latent, all with `long_name`.
        Examples are in the order of the batches. Floats keep their precision, but half precision
        becomes float32.

    Raises:
        KeyError: an unknown hook; the message lists the nearest names.
        TypeError: the model cannot be hooked.
        ValueError: the model is compiled, there is no batch, a name is both a quantity and a
            latent, `dims` do not fit a tensor, or numbers of examples differ.
        RuntimeError: a hook did not fire exactly once in a forward pass.

    Example:
        `capture(model, batches, {"code": Quantity("blocks.*.attn.hook_z", dims)})`
    """
    check_model(model)
    if not quantities:
        raise ValueError("quantities must name at least one quantity, got an empty mapping")
    hooks = {
        name: resolve_hooks(model, quantity.hook)
        for name, quantity in quantities.items()
        if quantity.hook is not None
    }
    layers = {
        name: layer_numbers(quantity.hook, hooks[name])
        for name, quantity in quantities.items()
        if quantity.hook is not None and is_glob(quantity.hook)
    }
    activations: dict[tuple[str, int], Tensor] = {}

    def keep(name: str, index: int, activation: Any, source: str) -> None:
        if (name, index) in activations:
            raise RuntimeError(f"{source} must fire once in a forward pass, fired again")
        activations[name, index] = _reduce(name, quantities[name], activation, source)

    def listener(name: str, index: int) -> Callable[..., None]:
        return lambda activation, hook: keep(name, index, activation, f"hook {hook.name!r}")

    fwd_hooks = [
        (hook, listener(name, index))
        for name, matched in hooks.items()
        for index, hook in enumerate(matched)
    ]
    outputs = [name for name, quantity in quantities.items() if quantity.hook is None]
    kept = {name: _Rows(name, len(hooks.get(name, [name]))) for name in quantities}
    latents: dict[str, _Rows] = {}
    n_batches = 0
    with evaluating(model), model.hooks(fwd_hooks=fwd_hooks):
        for batch in batches:
            activations.clear()
            output = call(model, batch.inputs)
            for name in outputs:
                keep(name, 0, output, "the model's output")
            # Frees the output before the next batch runs.
            del output
            _check_batch(activations, hooks, batch.latents)
            for name, rows in kept.items():
                rows.append([activations[name, layer] for layer in range(rows.n_layers)])
            for name, latent in batch.latents.items():
                latents.setdefault(name, _Rows(name, 1)).append([latent])
            n_batches += 1
    if not n_batches:
        raise ValueError("batches must hold at least one batch, got none")
    clash = sorted(set(quantities) & set(latents))
    if clash:
        raise ValueError(f"quantities must be named differently from latents, got {clash} in both")

    result = xr.Dataset(attrs={"batches": n_batches})
    for name, quantity in quantities.items():
        long_name = quantity.long_name or quantity.hook or "the model's output"
        values = kept[name].array()
        if name in layers:
            variable = xr.DataArray(
                values,
                dims=(quantity.dims[0], "layer", *quantity.dims[1:]),
                coords={"layer": layers[name]},
            )
            # All quantities of a dataset share the layer axis.
            if "layer" in result.coords and result["layer"].to_numpy().tolist() != layers[name]:
                raise ValueError(
                    "quantities must have the same layers, got "
                    f"{result['layer'].to_numpy().tolist()} and, for {name!r}, {layers[name]}; "
                    "capture them in separate datasets"
                )
        else:
            variable = xr.DataArray(values[:, 0], dims=quantity.dims)
        result[name] = variable.assign_attrs(long_name=long_name, hook=quantity.hook or "output")
    for name, rows in latents.items():
        array = rows.array()[:, 0]
        dims = (latent_dims or {}).get(name)
        if dims is None:
            dims = ("example", *(f"{name}_{axis}" for axis in range(1, array.ndim)))
        if len(dims) != array.ndim or dims[0] != "example":
            raise ValueError(
                f"latent_dims[{name!r}] must name {array.ndim} dims, the first 'example', "
                f"got {dims} for shape {array.shape}"
            )
        result[name] = xr.DataArray(array, dims=dims, attrs={"long_name": f"ground truth: {name}"})
    if "layer" in result.coords:
        result["layer"].attrs["long_name"] = "layer (or step) number in the hook's name"
    return result


class _Rows:
    """The kept values of one variable [example, layer, ...], in a buffer that grows by doubling.

    Small arrays kept per batch would fragment the memory between the activations of successive
    batches (measured: twice the peak). The buffer starts large, which costs nothing: pages that
    are never written take no memory.
    """

    _FIRST_BYTES = 1 << 26

    def __init__(self, name: str, n_layers: int) -> None:
        self.name = name
        self.n_layers = n_layers
        self.count = 0
        self.buffer = torch.empty(0)

    def append(self, parts: list[Tensor]) -> None:
        """Copy one batch: a tensor [example, ...] per layer."""
        shape = (self.n_layers, *parts[0].shape[1:])
        examples = len(parts[0])
        if self.count == 0:
            dtype = _WIDENED.get(parts[0].dtype, parts[0].dtype)
            row = max(1, math.prod(shape) * parts[0].element_size())
            capacity = max(examples, self._FIRST_BYTES // row)
            self.buffer = torch.empty(capacity, *shape, dtype=dtype)
        shapes = {(self.n_layers, *part.shape[1:]) for part in parts} | {self.buffer.shape[1:]}
        if len(shapes) > 1:
            shown = sorted(tuple(other[1:]) for other in shapes)
            raise ValueError(
                f"{self.name!r} must have one shape in all batches and layers, got {shown} after "
                "the examples; reduce it to one shape, or capture batches of one length at a time"
            )
        if self.count + examples > len(self.buffer):
            larger = self.buffer.new_empty(2 * (self.count + examples), *shape)
            larger[: self.count] = self.buffer[: self.count]
            self.buffer = larger
        for layer, part in enumerate(parts):
            self.buffer[self.count : self.count + examples, layer] = part
        self.count += examples

    def array(self) -> np.ndarray:
        """View all examples so far."""
        return self.buffer[: self.count].numpy()


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
    latents: Mapping[str, Tensor],
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
