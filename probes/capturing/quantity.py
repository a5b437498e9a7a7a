"""Quantities to capture, and how the arrays of a capture are labelled."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import xarray as xr
from torch import Tensor

from probes.capturing.digests import digest_of
from probes.capturing.hooking import is_glob


@dataclass(frozen=True)
class Quantity:
    """A quantity to capture: a hook, and how its activation is reduced and labelled.

    Attributes:
        hook: a hook name; or a glob (`blocks.*.attn.hook_pattern`), which adds a `layer` dim after
            `example`; or None for the model's output.
        dims: dims of the reduced activation, `example` first, without `layer`.
        reduce: applied inside the hook to the activation [example, ...], or to the activation and
            the batch (see `masked_mean`); its result is kept. None keeps the whole activation.
        long_name: description of the variable for figures and files; empty for the hook's name.
        fires: how often the hook fires in a forward pass: `once`; or `each`, which adds a ragged
            `step` dim after `example` and `layer`, for modules that a model applies several times.
        ragged: dims whose size may differ between batches.

    What a ragged dim lacks is NaN, -1 (0 for unsigned integers) or False; `n_step` (or `n_` and the
    name of another ragged dim) [example] is the size that the batch of an example had.

    Raises:
        ValueError: `dims` do not begin with `example`, repeat a dim or name one that is added, or
            `ragged` are not among them.

    Example:
        >>> Quantity("blocks.*.attn.hook_z", ("example", "pos", "head", "d_head")).kept_dims
        ('example', 'layer', 'pos', 'head', 'd_head')
    """

    hook: str | None
    dims: tuple[str, ...]
    reduce: Callable[..., Tensor] | None = None
    long_name: str = ""
    fires: Literal["once", "each"] = "once"
    ragged: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.fires not in (allowed := ("once", "each")):
            raise ValueError(f"fires must be one of {', '.join(allowed)}, got {self.fires!r}")
        if not self.dims or self.dims[0] != "example":
            raise ValueError(f"dims must begin with 'example', got {self.dims}")
        if len(set(self.dims)) != len(self.dims):
            raise ValueError(f"dims must be distinct, got {self.dims}")
        if "layer" in self.dims and self.has_layers:
            raise ValueError(
                f"dims must not name 'layer': the glob {self.hook!r} adds it, got {self.dims}"
            )
        if "step" in self.dims and self.fires == "each":
            raise ValueError(f"dims must not name 'step': fires='each' adds it, got {self.dims}")
        if extra := [dim for dim in self.ragged if dim not in self.dims[1:]]:
            raise ValueError(f"ragged must be dims after 'example', {self.dims[1:]}, got {extra}")

    @property
    def has_layers(self) -> bool:
        """Whether the hook is a glob."""
        return self.hook is not None and is_glob(self.hook)

    @cached_property
    def takes_batch(self) -> bool:
        """Whether `reduce` has two arguments without defaults: the activation and the batch."""
        if self.reduce is None:
            return False
        try:
            parameters = inspect.signature(self.reduce).parameters.values()
        except ValueError:  # a built-in function without a signature
            return False
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        is_required = [one.kind in positional and one.default is one.empty for one in parameters]
        return sum(is_required) == 2

    @property
    def kept_dims(self) -> tuple[str, ...]:
        """The dims of what is kept: `example`, `layer` for a glob, `step`, and the others."""
        layer = ("layer",) if self.has_layers else ()
        step = ("step",) if self.fires == "each" else ()
        return (self.dims[0], *layer, *step, *self.dims[1:])

    @property
    def ragged_dims(self) -> tuple[str, ...]:
        """The dims whose size may differ between batches."""
        return (*(("step",) if self.fires == "each" else ()), *self.ragged)


def fill_of(dtype: np.dtype) -> Any:
    """What stands where a ragged dim ends."""
    return {"f": math.nan, "i": -1, "u": 0, "b": False, "O": ""}.get(dtype.kind)


@dataclass(frozen=True)
class Labels:
    """What the arrays of a capture are called."""

    quantities: Mapping[str, Quantity]
    layers: Mapping[str, list[int]]
    latent_dims: Mapping[str, tuple[str, ...]]

    def identity(self) -> dict[str, Any]:
        """What is captured, as JSON values.

        Raises:
            TypeError: a `reduce` cannot be told from another one.
        """
        quantities = {
            name: [
                one.hook,
                one.kept_dims,
                one.ragged,
                digest_of(f"reduce of {name!r}", one.reduce),
            ]
            for name, one in self.quantities.items()
        }
        return {"quantities": quantities, "latent_dims": dict(self.latent_dims)}

    def dataset(
        self,
        values: Mapping[str, np.ndarray],
        sizes: Mapping[str, np.ndarray],
        latents: Mapping[str, np.ndarray],
    ) -> xr.Dataset:
        """A dataset of the quantities, sizes of ragged dims [example], and latents [example, ...].

        Raises:
            ValueError: dims do not fit, quantities have other layers or sizes of a dim, or a name
                is that of a dim, a coordinate or a size.
        """
        clash = sorted(set(self.quantities) & set(latents))
        if clash:
            raise ValueError(
                f"quantities must be named differently from latents, got {clash} in both"
            )
        dims_of = {name: self._dims_of_latent(name, array) for name, array in latents.items()}
        dims = {dim for one in self.quantities.values() for dim in one.kept_dims}
        reserved = dims.union(*dims_of.values(), (f"n_{dim}" for dim in sizes))
        # A variable of such a name would take the place of the dim's labels.
        if clash := sorted(reserved & {*self.quantities, *latents}):
            raise ValueError(
                f"quantities and latents must not have the name of a dim, a coordinate or a size "
                f"of the capture, which are {', '.join(sorted(reserved))}, got {', '.join(clash)}"
            )
        result = xr.Dataset()
        for name, quantity in self.quantities.items():
            long_name = quantity.long_name or quantity.hook or "the model's output"
            variable = xr.DataArray(values[name], dims=quantity.kept_dims)
            if name in self.layers:
                variable = variable.assign_coords(layer=self.layers[name])
                # All quantities of a dataset share the layer axis.
                known = result["layer"].to_numpy().tolist() if "layer" in result.coords else None
                if known not in (None, self.layers[name]):
                    raise ValueError(
                        f"quantities must have the same layers, got {known} and, for {name!r}, "
                        f"{self.layers[name]}; capture them in separate datasets"
                    )
            _check_sizes(f"quantity {name!r}", variable, result)
            result[name] = variable.assign_attrs(
                long_name=long_name, hook=quantity.hook or "output"
            )
        for dim, size in sizes.items():
            about = {"long_name": f"size of {dim} in the batch of the example"}
            result[f"n_{dim}"] = ("example", size, about)
        for name, array in latents.items():
            about = {"long_name": f"ground truth: {name}"}
            variable = xr.DataArray(array, dims=dims_of[name], attrs=about)
            _check_sizes(f"latent {name!r}", variable, result)
            result[name] = variable
        if "layer" in result.coords:
            result["layer"].attrs["long_name"] = "layer (or step) number in the hook's name"
        return result

    def _dims_of_latent(self, name: str, array: np.ndarray) -> tuple[str, ...]:
        default = ("example", *(f"{name}_{axis}" for axis in range(1, array.ndim)))
        dims = self.latent_dims.get(name, default)
        if len(dims) != array.ndim or dims[0] != "example":
            raise ValueError(
                f"latent_dims[{name!r}] must name {array.ndim} dims, the first 'example', "
                f"got {dims} for shape {array.shape}"
            )
        return dims


def _check_sizes(name: str, variable: xr.DataArray, known: xr.Dataset) -> None:
    for dim, size in variable.sizes.items():
        if size != known.sizes.get(dim, size):
            raise ValueError(
                f"{name} must have the size {known.sizes[dim]} of dim {dim!r}, as the variables "
                f"before it, got {size}; give the dim another name"
            )
