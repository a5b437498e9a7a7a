"""Quantities to capture, and how the arrays of a capture are labelled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from torch import Tensor

from probes.capturing.hooking import is_glob


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


@dataclass(frozen=True)
class Labels:
    """What the arrays of a capture are called."""

    quantities: Mapping[str, Quantity]
    layers: Mapping[str, list[int]]
    latent_dims: Mapping[str, tuple[str, ...]]

    def identity(self) -> dict[str, Any]:
        """What is captured, as JSON values."""
        return {
            name: [quantity.hook, list(quantity.dims), self.layers.get(name)]
            for name, quantity in self.quantities.items()
        }

    def dataset(
        self, values: Mapping[str, np.ndarray], latents: Mapping[str, np.ndarray]
    ) -> xr.Dataset:
        """A dataset of the quantities [example, layer, ...] and the latents [example, ...]."""
        clash = sorted(set(self.quantities) & set(latents))
        if clash:
            raise ValueError(
                f"quantities must be named differently from latents, got {clash} in both"
            )
        result = xr.Dataset()
        for name, quantity in self.quantities.items():
            long_name = quantity.long_name or quantity.hook or "the model's output"
            if name in self.layers:
                variable = xr.DataArray(
                    values[name],
                    dims=(quantity.dims[0], "layer", *quantity.dims[1:]),
                    coords={"layer": self.layers[name]},
                )
                # All quantities of a dataset share the layer axis.
                known = result["layer"].to_numpy().tolist() if "layer" in result.coords else None
                if known not in (None, self.layers[name]):
                    raise ValueError(
                        f"quantities must have the same layers, got {known} and, for {name!r}, "
                        f"{self.layers[name]}; capture them in separate datasets"
                    )
            else:
                variable = xr.DataArray(values[name][:, 0], dims=quantity.dims)
            result[name] = variable.assign_attrs(
                long_name=long_name, hook=quantity.hook or "output"
            )
        for name, array in latents.items():
            dims = self.latent_dims.get(name)
            if dims is None:
                dims = ("example", *(f"{name}_{axis}" for axis in range(1, array.ndim)))
            if len(dims) != array.ndim or dims[0] != "example":
                raise ValueError(
                    f"latent_dims[{name!r}] must name {array.ndim} dims, the first 'example', "
                    f"got {dims} for shape {array.shape}"
                )
            long_name = f"ground truth: {name}"
            result[name] = xr.DataArray(array, dims=dims, attrs={"long_name": long_name})
        if "layer" in result.coords:
            result["layer"].attrs["long_name"] = "layer (or step) number in the hook's name"
        return result
