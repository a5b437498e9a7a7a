"""Stream a model's activations, reduced inside the hook, together with a task's ground truth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from probes.capturing.archive import Archive
from probes.capturing.digests import digest_of
from probes.capturing.hooking import HookedModel, check_model
from probes.capturing.passes import WIDENED, Batch, Firings, Passes, with_latents
from probes.capturing.quantity import Labels, Quantity, fill_of
from probes.checking import checked
from probes.progress import progress


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
    pass ends at the last hook that is asked for, except where this might hide that a hook fires
    again: in the first batch, in the first of other shapes or settings, and always in models that
    read numbers from their tensors, as loops until convergence do (but by `tolist()` or `numpy()`
    this is not seen, and a hook that fires again in a later batch is missed). Activations that a
    module has as [example x pos, ...], such as a router of experts, become [example, pos, ...] if
    the inputs have as many positions.

    Args:
        model: an eager HookedRootModule or TransformerBridge.
        batches: objects with `.inputs` and `.latents`; at least one.
        quantities: what to keep, by variable name.
        latent_dims: dims of each latent by name, `example` first, for example
            `{"rule": ("example", "feature")}`; a latent that is not listed gets the dims
            `example`, `{name}_1`, `{name}_2`, ...
        to: a path that ends in `.zarr`: each batch is written to disk when it is done, so memory
            does not grow, and an interrupted capture continues when it is called again with the
            same model, quantities and batches, in which weights, public attributes of plain values,
            arguments, code and inputs are compared; or in `.nc`: a netCDF file, written at the end,
            in place of an earlier capture. None: in memory.

    Returns:
        One variable per quantity, [example, dims...] or [example, layer, dims...] for a glob
        (coordinate `layer`: the numbers in the names), and one per latent, all with `long_name`.
        Examples are in the order of the batches. Floats keep their precision, but half precision
        becomes float32. From disk, values are read when they are used.

    Raises:
        FileNotFoundError: the folder of a netCDF file does not exist.
        KeyError: an unknown hook, of which the message lists the nearest names, or an unknown
            latent in `latent_dims`.
        TypeError: the model cannot be hooked, a batch has no inputs or latents, or, for `.zarr`, a
            `reduce` or an input cannot be told from another one.
        ValueError: the model is compiled, there is no batch or no example in one, a name is both a
            quantity and a latent, or is that of a dim, a coordinate or a size, `dims` or
            `latent_dims` do not fit a tensor, numbers of examples or names or shapes of latents
            differ, or `to` has another ending or holds something else.
        RuntimeError: a hook did not fire exactly once in a forward pass, or a batch takes another
            number of steps than the first.

    Example:
        >>> capture(model, batches, {"code": Quantity("blocks.*.attn.hook_z", dims)}, to="z.zarr")
    """
    check_model(model)
    if not quantities:
        raise ValueError("quantities must name at least one quantity, got an empty mapping")
    path = None if to is None else Path(to)
    if path is not None and path.suffix not in (".zarr", ".nc"):
        raise ValueError(f"to must end in .zarr or .nc, got {str(to)!r}")
    if path is not None and path.suffix == ".nc":
        _check_file(path)
    passes = Passes(model, quantities)
    labels = Labels(quantities, passes.layers, latent_dims or {})
    shown = progress(batches, "capture")
    with passes.listening():
        if path is not None and path.suffix == ".zarr":
            return _to_archive(path, passes, labels, shown)
        kept = {name: _Rows(name, quantity) for name, quantity in quantities.items()}
        latents: list[dict[str, np.ndarray]] = []
        for batch, of_batch in with_latents(shown, labels.latent_dims):
            latents.append(of_batch)
            for name, firings in passes.run(batch, of_batch).items():
                kept[name].append(firings)
    if not latents:
        raise ValueError("batches must hold at least one batch, got none")
    joined = {name: np.concatenate([one[name] for one in latents]) for name in latents[0]}
    result = _dataset(labels, kept, joined)
    result.attrs["batches"] = len(latents)
    if path is None:
        return result
    unfinished = path.with_suffix(".partial")
    result.to_netcdf(unfinished, engine="netcdf4")
    unfinished.replace(path)
    return xr.open_dataset(path, engine="netcdf4")


def _check_file(path: Path) -> None:
    """Check that a netCDF file can be written, which replaces no other file than a capture."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"to must be in a folder that exists, got {path}")
    if path.exists() and not _is_capture(path):
        raise ValueError(f"to must be a new path or a capture, got {path}")


def _is_capture(path: Path) -> bool:
    try:
        with xr.open_dataset(path, engine="netcdf4", decode_cf=False) as data:
            return "batches" in data.attrs and any("hook" in one.attrs for one in data.values())
    except OSError:
        return False


def _to_archive(path: Path, passes: Passes, labels: Labels, batches: Iterable[Batch]) -> xr.Dataset:
    identity = labels.identity() | {"model": digest_of("a model", passes.model)}
    takes_batch = any(one.takes_batch for one in passes.quantities.values())
    ragged = {dim for one in passes.quantities.values() for dim in one.ragged_dims}
    archive = Archive(path, identity, ragged)
    n_before, n_batches = archive.batches, 0
    # A batch is written while the next one is computed.
    with ThreadPoolExecutor(max_workers=1) as writer:
        written: Future[None] | None = None
        for number, (batch, latents) in enumerate(with_latents(batches, labels.latent_dims)):
            n_batches = number + 1
            digest = digest_of("batches", batch if takes_batch else batch.inputs)
            if number < n_before:
                archive.check(number, latents, digest)
                continue
            rows = {name: _Rows(name, quantity) for name, quantity in passes.quantities.items()}
            for name, firings in passes.run(batch, latents).items():
                rows[name].append(firings)
            if written is not None:
                written.result()
            written = writer.submit(archive.append, _dataset(labels, rows, latents), digest)
        if written is not None:
            written.result()
    if not n_batches:
        raise ValueError("batches must hold at least one batch, got none")
    return archive.read(n_batches)


def _dataset(
    labels: Labels, rows: Mapping[str, _Rows], latents: Mapping[str, np.ndarray]
) -> xr.Dataset:
    sizes: dict[str, np.ndarray] = {}
    for name, of_quantity in rows.items():
        for dim, size in of_quantity.sizes().items():
            if not np.array_equal(sizes.setdefault(dim, size), size):
                raise ValueError(
                    f"quantities must have the same sizes of {dim!r}, got others for {name!r}; "
                    "capture them in separate datasets"
                )
    return labels.dataset({name: one.array() for name, one in rows.items()}, sizes, latents)


class _Rows:
    """The kept values of one variable [example, layer, ...], in a buffer that grows by doubling.

    Small arrays kept per batch would fragment the memory between the activations of successive
    batches (measured: twice the peak). The buffer starts large, which costs nothing: pages that
    are never written take no memory.
    """

    _FIRST_BYTES = 1 << 26

    def __init__(self, name: str, quantity: Quantity) -> None:
        self._name, self._quantity = name, quantity
        self._stepped = quantity.fires == "each"
        self._is_ragged = [dim in quantity.ragged for dim in quantity.dims[1:]]
        self._count = 0
        self._counts: list[int] = []
        self._sizes: list[tuple[int, ...]] = []
        self._buffer = torch.empty(0)

    def append(self, firings: Firings) -> None:
        """Copy one batch: tensors [example, ...] by layer and step."""
        first, count = firings[0][0], self._count
        shape = self._shape(firings)
        examples = len(first)
        if not self._counts:
            dtype = WIDENED.get(first.dtype, first.dtype)
            row = max(1, math.prod(shape) * first.element_size())
            capacity = max(examples, self._FIRST_BYTES // row)
            self._buffer = self._new(capacity, shape, dtype)
        largest = tuple(map(max, shape, self._buffer.shape[1:]))
        is_full = count + examples > len(self._buffer)
        if is_full or largest != self._buffer.shape[1:]:
            capacity = 2 * (count + examples) if is_full else len(self._buffer)
            larger = self._new(capacity, largest, self._buffer.dtype)
            larger[(slice(count), *map(slice, self._buffer.shape[1:]))] = self._buffer[:count]
            self._buffer = larger
        rows = slice(count, count + examples)
        for layer, of_layer in enumerate(firings):
            for step, part in enumerate(of_layer):
                at = (rows, layer, *([step] if self._stepped else []))
                self._buffer[(*at, *map(slice, part.shape[1:]))] = part
        self._count += examples
        self._counts.append(examples)
        self._sizes.append(shape[1:])

    def _shape(self, firings: Firings) -> tuple[int, ...]:
        """The sizes of layers, steps and other dims that hold a batch.

        Raises:
            ValueError: a dim that is not ragged has several sizes.
        """
        shapes = [tuple(part.shape[1:]) for of_layer in firings for part in of_layer]
        shape = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
        steps = (max(map(len, firings)),) if self._stepped else ()
        known = [self._sizes[-1][len(steps) :]] if self._sizes else []
        for other in {*shapes, *known}:
            sizes = zip(shape, other, self._is_ragged, strict=True)
            if any(size != size_of_other and not ragged for size, size_of_other, ragged in sizes):
                raise ValueError(
                    f"{self._name!r} must have one shape in all batches and layers, got "
                    f"{sorted({*shapes, *known})} after the examples; reduce it to one shape, name "
                    "the dim in `ragged`, or capture batches of one length at a time"
                )
        return (len(firings), *steps, *shape)

    def _new(self, capacity: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        buffer = torch.empty(capacity, *shape, dtype=dtype)
        if self._quantity.ragged_dims:
            buffer.fill_(fill_of(buffer.numpy().dtype))
        return buffer

    def array(self) -> np.ndarray:
        """All examples so far."""
        values = self._buffer[: self._count]
        return (values if self._quantity.has_layers else values[:, 0]).numpy()

    def sizes(self) -> dict[str, np.ndarray]:
        """The size of each ragged dim in the batch of each example."""
        dims = (*(("step",) if self._stepped else ()), *self._quantity.dims[1:])
        return {
            dim: np.repeat([shape[axis] for shape in self._sizes], self._counts)
            for axis, dim in enumerate(dims)
            if dim in self._quantity.ragged_dims
        }
