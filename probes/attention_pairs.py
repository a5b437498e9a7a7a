"""What probes of attention share: a quantity of every pair of query and key, cell by cell."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float

from probes.statistics.intervals import Interval, interval_variables

PAIRS = ("example", "query_pos", "key_pos")


@dataclass(frozen=True)
class PairTable:
    """A quantity of pairs, its cells flattened to one axis.

    Attributes:
        values: 0 where they are not valid.
        valid: which are looked at.
        cells: sizes of the dims that make cells.
        coords: their coordinates.
    """

    values: Float[np.ndarray, "example cell query_pos key_pos"]
    valid: Bool[np.ndarray, "example 1 query_pos key_pos"]
    cells: dict[str, int]
    coords: dict[str, xr.DataArray]

    def dataset(self, about: str, seed: int, resamples: int) -> xr.Dataset:
        """An empty result with the cells' coordinates."""
        interval = f"percentile bootstrap over examples, 95%, {resamples} resamples"
        return xr.Dataset(
            coords=self.coords, attrs={"long_name": about, "seed": seed, "interval": interval}
        )

    def variable(
        self, values: Float[np.ndarray, "..."], about: str, before: Sequence[str], *after: str
    ) -> xr.Variable:
        """Values [*before, cell, *after], with the cells' own dims."""
        start = len(before)
        shape = (*values.shape[:start], *self.cells.values(), *values.shape[start + 1 :])
        dims = (*before, *self.cells, *after)
        return xr.Variable(dims, values.reshape(shape), {"long_name": about})

    def put(
        self,
        result: xr.Dataset,
        name: str,
        interval: Interval,
        about: str,
        *after: str,
        before: Sequence[str] = (),
    ) -> None:
        """A score with its interval."""
        parts = [self.variable(values, about, before, *after) for values in interval]
        shaped = Interval(*(part.to_numpy() for part in parts))
        dims = tuple(map(str, parts[0].dims))
        result.update(interval_variables(name, shaped, dims, long_name=about))

    def put_distribution(self, result: xr.Dataset, start: float, stop: float, bins: int) -> None:
        """`distribution` [*cells, bin], over start..stop; what is beyond is in the last bins."""
        edges = np.linspace(start, stop, bins + 1)
        found = np.zeros((self.values.shape[1], bins))
        for cell in range(len(found)):
            known = self.values[:, cell][self.valid[:, 0]]
            found[cell] = np.histogram(known.clip(start, stop), edges)[0]
        found /= found.sum(1, keepdims=True)
        result.coords["bin"] = (edges[1:] + edges[:-1]) / 2
        result["distribution"] = self.variable(found, "share of the pairs in a bin", (), "bin")


def read_pairs(
    name: str, array: xr.DataArray, valid: xr.DataArray | None, bins: int, resamples: int
) -> PairTable:
    """A quantity of pairs, checked; see `score_signedness` for `valid` and for what is raised."""
    for argument, number in (("bins", bins), ("resamples", resamples)):
        if number < 1:
            raise ValueError(f"{argument} must be at least 1, got {number}")
    if not set(PAIRS) <= set(array.dims) or 0 in array.shape:
        raise ValueError(
            f"{name} must have the dims {PAIRS}, none of them empty, got {dict(array.sizes)}"
        )
    cells = [dim for dim in array.dims if dim not in PAIRS]
    ordered = array.transpose("example", *cells, "query_pos", "key_pos").to_numpy()
    shape = ordered.shape
    flat = ordered.reshape(shape[0], -1, *shape[-2:]).astype(np.float64)
    seen = np.ones((shape[0], 1, *shape[-2:]), dtype=bool)
    if valid is not None:
        if valid.dtype != bool:
            raise TypeError(f"valid must hold bool, got {valid.dtype}")
        seen = spread_pairs("valid", valid, seen.shape)
    if not seen.any():
        raise ValueError("valid must leave pairs of query and key, got none")
    if not np.isfinite(flat).all(where=np.broadcast_to(seen, flat.shape)):
        raise ValueError(f"{name} must be finite where valid, got NaN or infinite values")
    return PairTable(
        values=np.where(seen, flat, 0.0),
        valid=seen,
        cells={str(dim): array.sizes[dim] for dim in cells},
        coords={str(dim): array[dim] for dim in cells if dim in array.coords},
    )


def spread_pairs(name: str, array: xr.DataArray, shape: tuple[int, ...]) -> np.ndarray:
    """An array with some of the dims of pairs, for all pairs [example, 1, query_pos, key_pos]."""
    sizes: dict[str, int] = dict(zip(PAIRS, (shape[0], *shape[2:]), strict=True))
    wrong = [dim for dim in array.dims if array.sizes[dim] != sizes.get(str(dim))]
    if wrong:
        raise ValueError(
            f"{name} must have only dims of {sizes}, of these sizes, got {dict(array.sizes)}"
        )
    spread = array.drop_vars(list(array.coords)).expand_dims(
        {dim: size for dim, size in sizes.items() if dim not in array.dims}
    )
    return spread.transpose(*PAIRS).to_numpy()[:, None]
