"""Stream a model's activations, reduced inside the hook, together with a task's ground truth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from probes.capturing.archive import Archive, weights_digest
from probes.capturing.hooking import HookedModel, check_model
from probes.capturing.passes import Batch, Passes, read_latents
from probes.capturing.quantity import Labels, Quantity
from probes.checking import checked
from probes.progress import progress

# Explicit types: numpy has no bfloat16, and half precision gains nothing on the way to a file.
_WIDENED = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


@checked
def capture(
    model: HookedModel,
    batches: Iterable[Batch],
    quantities: Mapping[str, Quantity],
    *,
    latent_dims: Mapping[str, tuple[str, ...]] | None = None,
    to: str | Path | None = None,
) -> xr.Dataset:
    """Run the model over batches and keep the chosen quantities of each example.

    The model runs in evaluation mode without gradients; its training flags are restored and the
    hooks removed at the end, also after an error. Hooks are attached once for all batches, kept
    values are copied (activations alias live storage), and all else is dropped after each batch.
    So the time is that of the forward passes, and memory grows only with what is kept. A forward
    pass ends at the last hook that is asked for, except in the first batch, where it is checked
    that each fires once.

    Args:
        model: an eager HookedRootModule or TransformerBridge.
        batches: objects with `.inputs` and `.latents`; at least one.
        quantities: what to keep, by variable name.
        latent_dims: dims of each latent by name, `example` first, for example
            `{"rule": ("example", "feature")}`; a latent that is not listed gets the dims
            `example`, `{name}_1`, `{name}_2`, ...
        to: a path that ends in `.zarr`: each batch is written to disk when it is done, so memory
            does not grow, and an interrupted capture continues when it is called again with the
            same model and batches; or in `.nc`: a netCDF file, written at the end. None: in memory.

    Returns:
        One variable per quantity, [example, dims...] or [example, layer, dims...] for a glob
        (coordinate `layer`: the numbers in the names), and one per latent, all with `long_name`.
        Examples are in the order of the batches. Floats keep their precision, but half precision
        becomes float32. From disk, values are read when they are used.

    Raises:
        KeyError: an unknown hook; the message lists the nearest names.
        TypeError: the model cannot be hooked, or a batch has no inputs or latents.
        ValueError: the model is compiled, there is no batch, a name is both a quantity and a
            latent, `dims` do not fit a tensor, numbers of examples differ, or `to` has another
            ending or holds something else.
        RuntimeError: a hook did not fire exactly once in a forward pass.

    Example:
        `capture(model, batches, {"code": Quantity("blocks.*.attn.hook_z", dims)}, to="z.zarr")`
    """
    check_model(model)
    if not quantities:
        raise ValueError("quantities must name at least one quantity, got an empty mapping")
    path = None if to is None else Path(to)
    if path is not None and path.suffix not in (".zarr", ".nc"):
        raise ValueError(f"to must end in .zarr or .nc, got {str(to)!r}")
    passes = Passes(model, quantities)
    labels = Labels(quantities, passes.layers, latent_dims or {})
    shown = progress(batches, "capture")
    with passes.listening():
        if path is not None and path.suffix == ".zarr":
            return _to_archive(path, passes, labels, shown)
        kept = {name: _Rows(name, passes.n_layers(name)) for name in quantities}
        latents: list[dict[str, np.ndarray]] = []
        for batch in shown:
            latents.append(read_latents(batch))
            for name, parts in passes.run(batch.inputs, latents[-1]).items():
                kept[name].append(parts)
    if not latents:
        raise ValueError("batches must hold at least one batch, got none")
    joined = {name: np.concatenate([one[name] for one in latents]) for name in latents[0]}
    result = labels.dataset({name: rows.array() for name, rows in kept.items()}, joined)
    result.attrs["batches"] = len(latents)
    if path is None:
        return result
    unfinished = path.with_suffix(".partial")
    result.to_netcdf(unfinished, engine="h5netcdf")
    unfinished.replace(path)
    return xr.open_dataset(path, engine="h5netcdf")


def _to_archive(path: Path, passes: Passes, labels: Labels, batches: Iterable[Batch]) -> xr.Dataset:
    identity = labels.identity() | {"weights": weights_digest(passes.model)}
    archive = Archive(path, identity)
    n_before, examples = archive.batches, 0
    for number, batch in enumerate(batches):
        latents = read_latents(batch)
        if number < n_before:
            examples += archive.check(examples, latents)
            continue
        parts = passes.run(batch.inputs, latents)
        values = {name: _stacked(layers) for name, layers in parts.items()}
        archive.append(labels.dataset(values, latents))
    if not archive.batches:
        raise ValueError("batches must hold at least one batch, got none")
    return archive.read()


def _stacked(parts: list[Tensor]) -> np.ndarray:
    stacked = torch.stack(parts, dim=1)
    return stacked.to(_WIDENED.get(stacked.dtype, stacked.dtype)).cpu().numpy()


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
