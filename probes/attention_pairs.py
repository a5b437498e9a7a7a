"""Quantities of query-key pairs, shared by the probes of attention."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float

from probes.statistics.intervals import Interval, interval_variables

PAIRS = ("example", "query_pos", "key_pos")


@dataclass(frozen=True)
class PairTable:
    """A quantity of query-key pairs, with all other dims (the cells) flattened to one axis.

    Attributes:
        values: values of the pairs, 0 where not valid.
        valid: pairs that count.
        cells: sizes of the cell dims.
        coords: coordinates of the cell dims.
    """

    values: Float[np.ndarray, "example cell query_pos key_pos"]
    valid: Bool[np.ndarray, "example 1 query_pos key_pos"]
    cells: dict[str, int]
    coords: dict[str, xr.DataArray]

    def dataset(self, long_name: str, seed: int, resamples: int) -> xr.Dataset:
        """Make an empty result with the coordinates of the cells."""
        interval = f"percentile bootstrap over examples, 95%, {resamples} resamples"
        return xr.Dataset(
            coords=self.coords, attrs={"long_name": long_name, "seed": seed, "interval": interval}
        )

    def variable(
        self, values: Float[np.ndarray, "..."], long_name: str, before: Sequence[str], *after: str
    ) -> xr.Variable:
        """Make a variable of values [*before, cell, *after], with the cell dims restored."""
        start = len(before)
        shape = (*values.shape[:start], *self.cells.values(), *values.shape[start + 1 :])
        dims = (*before, *self.cells, *after)
        return xr.Variable(dims, values.reshape(shape), {"long_name": long_name})

    def put(
        self,
        result: xr.Dataset,
        name: str,
        interval: Interval,
        long_name: str,
        *after: str,
        before: Sequence[str] = (),
    ) -> None:
        """Store a score [*before, cell, *after] with its interval in a result."""
        variables = [self.variable(values, long_name, before, *after) for values in interval]
        shaped = Interval(*(part.to_numpy() for part in variables))
        dims = tuple(map(str, variables[0].dims))
        result.update(interval_variables(name, shaped, dims, long_name=long_name))

    def put_distribution(self, result: xr.Dataset, start: float, stop: float, bins: int) -> None:
        """Store `distribution` [*cells, bin] over start..stop, clipping values outside."""
        edges = np.linspace(start, stop, bins + 1)
        shares = np.zeros((self.values.shape[1], bins))
        for cell in range(len(shares)):
            valid_values = self.values[:, cell][self.valid[:, 0]]
            shares[cell] = np.histogram(valid_values.clip(start, stop), edges)[0]
        shares /= shares.sum(1, keepdims=True)
        result.coords["bin"] = (edges[1:] + edges[:-1]) / 2
        result["distribution"] = self.variable(shares, "share of the pairs in a bin", (), "bin")


def read_pairs(
    name: str, array: xr.DataArray, valid: xr.DataArray | None, bins: int, resamples: int
) -> PairTable:
    """Read and check a quantity of pairs; see `score_signedness` for `valid` and for errors."""
    for option, number in (("bins", bins), ("resamples", resamples)):
        if number < 1:
            raise ValueError(f"{option} must be at least 1, got {number}")
    if not set(PAIRS) <= set(array.dims) or 0 in array.shape:
        raise ValueError(
            f"{name} must have the dims {PAIRS}, none of them empty, got {dict(array.sizes)}"
        )
    cells = [dim for dim in array.dims if dim not in PAIRS]
    ordered = array.transpose("example", *cells, "query_pos", "key_pos").to_numpy()
    shape = ordered.shape
    flat = ordered.reshape(shape[0], -1, *shape[-2:]).astype(np.float64)
    valid_pairs = np.ones((shape[0], 1, *shape[-2:]), dtype=bool)
    if valid is not None:
        if valid.dtype != bool:
            raise TypeError(f"valid must hold bool, got {valid.dtype}")
        valid_pairs = broadcast_pairs("valid", valid, valid_pairs.shape)
    if not valid_pairs.any():
        raise ValueError("valid must hold at least one pair of query and key, got none")
    if not np.isfinite(flat).all(where=np.broadcast_to(valid_pairs, flat.shape)):
        raise ValueError(f"{name} must be finite where valid, got NaN or infinite values")
    return PairTable(
        values=np.where(valid_pairs, flat, 0.0),
        valid=valid_pairs,
        cells={str(dim): array.sizes[dim] for dim in cells},
        coords={str(dim): array[dim] for dim in cells if dim in array.coords},
    )


def broadcast_pairs(name: str, array: xr.DataArray, shape: tuple[int, ...]) -> np.ndarray:
    """Broadcast an array with some dims of pairs to [example, 1, query_pos, key_pos]."""
    sizes: dict[str, int] = dict(zip(PAIRS, (shape[0], *shape[2:]), strict=True))
    mismatched = [dim for dim in array.dims if array.sizes[dim] != sizes.get(str(dim))]
    if mismatched:
        raise ValueError(
            f"{name} must have only dims of {sizes}, of these sizes, got {dict(array.sizes)}"
        )
    spread = array.drop_vars(list(array.coords)).expand_dims(
        {dim: size for dim, size in sizes.items() if dim not in array.dims}
    )
    return spread.transpose(*PAIRS).to_numpy()[:, None]
