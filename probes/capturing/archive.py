"""Captures on disk: a zarr store that grows batch by batch and can be continued after a kill."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from probes.capturing.quantity import fill_of


class Archive:
    """A zarr store with one dataset, whose examples are appended in batches.

    What a kill leaves of an unfinished batch lies beyond the recorded number of examples, and is
    cut off when the store is opened again.

    Args:
        path: the folder of the store.
        identity: what the store holds, as JSON values; a store of something else is refused.
        ragged: dims whose size may differ between batches; see `Quantity`.

    Raises:
        ImportError: zarr is not installed.
        ValueError: there is a folder that holds something else.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], ragged: Collection[str] = ()):
        if find_spec("zarr") is None:
            raise ImportError("captures on disk need zarr: pip install 'modscope[disk]'")
        self._ragged = frozenset(ragged)
        self.path, self.identity = path, json.dumps(identity, sort_keys=True)
        self.batches = self.examples = 0
        # The number of examples and the digest of each batch.
        self._parts: list[tuple[int, str]] = []
        self._earlier = xr.Dataset()
        self._shapes: dict[str, tuple[int, ...]] = {}
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            self._continue()

    def _continue(self) -> None:
        if not (self.path / "zarr.json").exists():
            raise ValueError(f"to must be a new path or a capture, got {self.path}")
        group = self._group()
        identity = group.attrs.get("capture")
        if identity != self.identity:
            raise ValueError(
                f"to must be a new path or hold the same capture, {_short(self.identity)}, got "
                f"{self.path} with {_short(str(identity))}"
            )
        # Without a first batch everything is written anew.
        self.batches, self.examples = (
            int(str(group.attrs.get(name, 0))) for name in ("batches", "examples")
        )
        self._parts = json.loads(str(group.attrs.get("inputs", "[]")))
        if self.batches:
            for _, array in group.arrays():
                if (dims := array.metadata.dimension_names) and "example" in dims:
                    axis = dims.index("example")
                    array.resize((*array.shape[:axis], self.examples, *array.shape[axis + 1 :]))
            self._earlier = self.read()
            self._shapes = _shapes(self._earlier)

    def append(self, batch: xr.Dataset, digest: str) -> None:
        """Write the examples of a batch, then record that they are there, and its digest."""
        # zarr has strings of any length.
        strings = [name for name, values in batch.data_vars.items() if values.dtype.kind == "U"]
        batch = batch.assign({name: batch[name].astype(object) for name in strings})
        # Attributes are written first: until the examples are there, the counts are the old ones.
        batch = batch.assign_attrs(capture=self.identity, **self._counts())
        if self.batches:
            batch = self._fitted(batch)
            of_examples = [name for name in batch.variables if "example" in batch[name].dims]
            batch[of_examples].to_zarr(self.path, append_dim="example", consolidated=False)
        else:
            # A chunk per batch and layer: a decoder reads one layer of all examples.
            encoding = {
                name: {
                    "chunks": _chunks(variable),
                    "compressors": None,
                    "fill_value": fill_of(variable.dtype),
                }
                for name, variable in batch.data_vars.items()
            }
            batch.to_zarr(self.path, mode="w", encoding=encoding, consolidated=False)
            self._shapes = _shapes(batch)
        self.batches += 1
        self.examples += batch.sizes["example"]
        self._parts.append((batch.sizes["example"], digest))
        self._group().attrs.update(self._counts())

    def _counts(self) -> dict[str, Any]:
        counts = {"batches": self.batches, "examples": self.examples}
        return counts | {"inputs": json.dumps(self._parts)}

    def _group(self) -> Any:
        # Imported here because captures in memory do not need it.
        import zarr

        return zarr.open_group(self.path, mode="r+")

    def _fitted(self, batch: xr.Dataset) -> xr.Dataset:
        """The batch, and what is stored, with the larger size of each ragged dim."""
        padded: dict[str, xr.DataArray] = {}
        for name, variable in batch.data_vars.items():
            stored, sizes = self._shapes.get(str(name), ()), variable.shape[1:]
            ragged = [dim in self._ragged for dim in variable.dims[1:]]
            if len(stored) != len(sizes) or any(
                size != expected and not may_differ
                for size, expected, may_differ in zip(sizes, stored, ragged, strict=True)
            ):
                raise ValueError(
                    f"{name!r} must have one shape in all batches, got {stored} and {sizes} after "
                    "the examples"
                )
            largest = tuple(map(max, stored, sizes))
            if largest != stored:
                array = self._group()[str(name)]
                array.resize((array.shape[0], *largest))
                self._shapes[str(name)] = largest
            if largest != sizes:
                missing = {
                    dim: (0, size - variable.sizes[dim])
                    for dim, size in zip(variable.dims[1:], largest, strict=True)
                    if size > variable.sizes[dim]
                }
                filled = variable.pad(missing, constant_values=fill_of(variable.dtype))
                padded[str(name)] = filled.astype(variable.dtype)
        return batch.drop_vars([*padded]).assign(padded)

    def check(self, number: int, latents: Mapping[str, np.ndarray], digest: str) -> None:
        """Check that a batch is the one that was stored.

        Args:
            number: the number of the batch.
            latents: its latents.
            digest: the digest of what else the capture takes from it.

        Raises:
            ValueError: what was stored is of another batch.
        """
        start = sum(count for count, _ in self._parts[:number])
        count, stored_digest = self._parts[number]
        stored = self._earlier.isel(example=slice(start, start + count))
        differs = sorted(self._latents() ^ {*latents}) or [
            name for name, latent in latents.items() if not _equal(stored[name].to_numpy(), latent)
        ]
        if differs or digest != stored_digest:
            raise ValueError(
                f"batches must be those of the earlier capture in {self.path}, got another "
                f"{differs[0] if differs else 'inputs'!r} for the examples from {start}"
            )

    def _latents(self) -> set[str]:
        """The names of the latents that are stored."""
        others = {*json.loads(self.identity)["quantities"], *(f"n_{dim}" for dim in self._ragged)}
        return {str(name) for name in self._earlier.data_vars} - others

    def read(self, n_batches: int | None = None) -> xr.Dataset:
        """The dataset of all batches, or of the first; values are read when they are used."""
        data = xr.open_dataset(self.path, engine="zarr", consolidated=False, chunks=None)
        data.attrs.pop("inputs", None)
        if n_batches is None or n_batches == self.batches:
            return data
        n_examples = sum(count for count, _ in self._parts[:n_batches])
        data = data.isel(example=slice(n_examples))
        sizes = {dim: int(data[f"n_{dim}"].max()) for dim in self._ragged}
        data = data.isel({dim: slice(size) for dim, size in sizes.items()})
        return data.assign_attrs(batches=n_batches, examples=n_examples)


def _shapes(data: xr.Dataset) -> dict[str, tuple[int, ...]]:
    """The shape of each variable after the examples."""
    return {str(name): variable.shape[1:] for name, variable in data.data_vars.items()}


def _equal(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether arrays are equal, NaN included."""
    if first.shape != second.shape:
        return False
    return bool(((first == second) | ((first != first) & (second != second))).all())


def _chunks(variable: xr.DataArray) -> tuple[int, ...]:
    sizes = {str(dim): size for dim, size in variable.sizes.items()}
    return tuple(1 if dim == "layer" else max(1, size) for dim, size in sizes.items())


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]} ..."
