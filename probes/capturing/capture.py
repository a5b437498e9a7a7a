"""Stream a model's activations, reduced inside the hook, beside the ground truth of a task."""

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
    Inputs,
    call,
    check_model,
    evaluating,
    is_glob,
    layer_numbers,
    resolve_hooks,
)

# Explicit types: numpy has no bfloat16, and half precision gains nothing on the way to a file.
_WIDENED = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


class Batch(Protocol):
    """Any object with inputs and latents, such as a task's batch."""

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
    """One thing to keep of each example.

    Attributes:
        hook: a hook name; or a glob (`blocks.*.attn.hook_pattern`), which adds a `layer` dim after
            `example`; or None for the model's output.
        dims: names of the dims of what is kept, first `example`, without `layer`.
        reduce: run inside the hook on the activation [example, ...]; returns what is kept. None
            keeps the whole activation.
        long_name: what the variable is, for figures and files; the hook's name when empty.
    """

    hook: str | None
    dims: tuple[str, ...]
    reduce: Callable[[Any], Tensor] | None = None
    long_name: str = ""

    def __post_init__(self) -> None:
        if not self.dims or self.dims[0] != "example":
            raise ValueError(f"dims must begin with 'example', got {self.dims}")
        if len(set(self.dims)) != len(self.dims):
            raise ValueError(f"dims must differ from one another, got {self.dims}")
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
    """Run the model over batches and keep what `quantities` asks for.

    The model runs in evaluation mode without gradients; its training flags are restored and its
    hooks removed at the end, also after an error. Hooks are attached once around the whole loop,
    what is kept is copied (activations alias live storage), and the rest is dropped batch by
    batch, so time is that of the plain forward passes and memory grows only with what is kept.

    Args:
        model: an eager HookedRootModule or TransformerBridge.
        batches: objects with `.inputs` and `.latents`; at least one.
        quantities: what to keep, by the name of the variable that it becomes.
        latent_dims: names of the dims of a latent, first `example`; `{name}_{axis}` for the
            further dims of a latent that is not listed. For example
            `{"rule": ("example", "feature")}`.

    Returns:
        One variable per quantity, [example, dims...] or [example, layer, dims...] for a glob
        (coordinate `layer`: the numbers in the names), and one per latent, all with `long_name`.
        Examples are in the order in which the batches came. Floats keep their precision, half
        precision becomes float32.

    Raises:
        KeyError: an unknown hook; the message lists the nearest.
        TypeError, ValueError: a model that cannot be hooked or was compiled, no batch, a name that
            is both a quantity and a latent, `dims` that do not fit the tensor, numbers of examples
            that differ.
        RuntimeError: a hook did not fire exactly once in a forward pass.
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
    now: dict[tuple[str, int], Tensor] = {}

    def keep(name: str, position: int, activation: Any, place: str) -> None:
        if (name, position) in now:
            raise RuntimeError(f"{place} fired more than once in one forward pass")
        now[name, position] = _reduce(name, quantities[name], activation, place)

    def listener(name: str, position: int) -> Callable[..., None]:
        return lambda activation, hook: keep(name, position, activation, f"hook {hook.name!r}")

    fwd_hooks = [
        (hook, listener(name, position))
        for name, matched in hooks.items()
        for position, hook in enumerate(matched)
    ]
    outputs = [name for name, quantity in quantities.items() if quantity.hook is None]
    kept = {name: _Rows(name, len(hooks.get(name, [name]))) for name in quantities}
    latents: dict[str, _Rows] = {}
    n_batches = 0
    with evaluating(model), model.hooks(fwd_hooks=fwd_hooks):
        for batch in batches:
            now.clear()
            output = call(model, batch.inputs)
            for name in outputs:
                keep(name, 0, output, "the model's output")
            # Not kept alive while the next batch runs.
            del output
            _check_batch(now, hooks, batch.latents)
            for name, rows in kept.items():
                rows.append([now[name, place] for place in range(rows.places)])
            for name, latent in batch.latents.items():
                latents.setdefault(name, _Rows(name, 1)).append([latent])
            n_batches += 1
    if not n_batches:
        raise ValueError("batches must hold at least one batch, got none")
    clash = sorted(set(quantities) & set(latents))
    if clash:
        raise ValueError(f"names must differ between quantities and latents, both have {clash}")

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
            # Quantities of one dataset share the axis, so their layers have to be the same.
            if "layer" in result.coords and result["layer"].to_numpy().tolist() != layers[name]:
                raise ValueError(
                    f"quantity {name!r} has layers {layers[name]}, others have "
                    f"{result['layer'].to_numpy().tolist()}; capture them in separate datasets"
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
    """What is kept of one variable [example, place, ...], in a buffer that grows by doubling.

    Small arrays kept per batch would lie in memory between one batch's activations and the
    next's, and what is freed there could not be joined again (measured: twice the peak). The
    buffer begins large, which costs nothing: pages that are not written take no memory.
    """

    _FIRST_BYTES = 1 << 26

    def __init__(self, name: str, places: int) -> None:
        self.name = name
        self.places = places
        self.count = 0
        self.buffer = torch.empty(0)

    def append(self, parts: list[Tensor]) -> None:
        """Copy one batch, a tensor [example, ...] per place."""
        shape = (self.places, *parts[0].shape[1:])
        examples = len(parts[0])
        if self.count == 0:
            dtype = _WIDENED.get(parts[0].dtype, parts[0].dtype)
            row = max(1, math.prod(shape) * parts[0].element_size())
            capacity = max(examples, self._FIRST_BYTES // row)
            self.buffer = torch.empty(capacity, *shape, dtype=dtype)
        shapes = {(self.places, *part.shape[1:]) for part in parts} | {self.buffer.shape[1:]}
        if len(shapes) > 1:
            seen = sorted(tuple(other[1:]) for other in shapes)
            raise ValueError(
                f"{self.name!r} has another shape in another batch or layer: {seen} after the "
                "examples; reduce it to one shape, or capture batches of one length at a time"
            )
        if self.count + examples > len(self.buffer):
            larger = self.buffer.new_empty(2 * (self.count + examples), *shape)
            larger[: self.count] = self.buffer[: self.count]
            self.buffer = larger
        for place, part in enumerate(parts):
            self.buffer[self.count : self.count + examples, place] = part
        self.count += examples

    def array(self) -> np.ndarray:
        """All examples so far (a view)."""
        return self.buffer[: self.count].numpy()


def _reduce(name: str, quantity: Quantity, activation: Any, place: str) -> Tensor:
    reduced = activation if quantity.reduce is None else quantity.reduce(activation)
    if not isinstance(reduced, Tensor) or reduced.ndim != len(quantity.dims):
        raise ValueError(
            f"quantity {name!r} has dims {quantity.dims}, but {_shape(reduced)} is kept of "
            f"{place} {_shape(activation)}"
        )
    return reduced.detach().clone()


def _check_batch(
    now: Mapping[tuple[str, int], Tensor],
    hooks: Mapping[str, list[str]],
    latents: Mapping[str, Tensor],
) -> None:
    silent = [
        hook
        for name, matched in hooks.items()
        for position, hook in enumerate(matched)
        if (name, position) not in now
    ]
    if silent:
        raise RuntimeError(f"hooks that did not fire in the forward pass: {silent}")
    counts = {name: tensor.shape[:1] for (name, _), tensor in now.items()}
    counts |= {name: latent.shape[:1] for name, latent in latents.items()}
    if len(set(counts.values())) > 1:
        shown = {name: tuple(count) for name, count in counts.items()}
        raise ValueError(f"the first dim must be the batch's examples everywhere, got {shown}")


def _shape(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
