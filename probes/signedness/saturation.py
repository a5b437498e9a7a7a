"""Saturation: the share of a quantity in the flat parts of a function, without gradient."""

import numpy as np
import xarray as xr
from jaxtyping import Float

from probes.attention_pairs import PairTable, read_pairs
from probes.checking import checked
from probes.statistics.intervals import bootstrap_ratio


@checked
def score_saturation(
    values: xr.DataArray,
    *,
    low: float | xr.DataArray,
    high: float | xr.DataArray,
    valid: xr.DataArray | None = None,
    bins: int = 40,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Score how much of a quantity lies in the flat parts of a function.

    For example `hook_affinity` with low = -2 and high = 2, where tanh is within 0.04 of -1 or 1 and
    passes less than 8% of a gradient; or `hook_gate` with low = 0.05 and high = 0.95, closed and
    open gates. A dim `train_step` shows saturation over training.

    Args:
        values: [example, query_pos, key_pos], in any order; further dims are cells.
        low: values up to this are saturated below; a number, or an array over cell dims.
        high: values from this on are saturated above; above `low`.
        valid: as in `score_signedness`.
        bins: number of bins of the distribution.
        resamples: number of bootstrap resamples.
        seed: seed of the bootstrap.

    Returns:
        - `saturated`, with `_low` and `_high`, its 95% percentile bootstrap bounds over examples
          [*cells, side]: share of the pairs at each side ("low", "high").
        - `distribution` [*cells, bin]: share of the pairs in each bin, labelled by its centre; over
          the range of all valid values, at least from the smallest `low` to the largest `high`.

    Raises:
        TypeError: `valid` is not bool.
        ValueError: dims or sizes do not match, there are no valid pairs, values are not finite, or
            a number is out of range.

    Example:
        Several quantities at once, each with its limits:

        >>> limit = xr.DataArray([2.0, 3.0], coords={"quantity": ["affinity", "dissimilarity"]})
        >>> values = captured[["affinity", "dissimilarity"]].to_dataarray("quantity")
        >>> score_saturation(values, low=-limit, high=limit)
    """
    table = read_pairs("values", values, valid, bins, resamples)
    lows, highs = (_of_cells(name, limit, table) for name, limit in (("low", low), ("high", high)))
    for name, given, limits in (("low", low, lows), ("high", high, highs)):
        if not np.isfinite(limits).all():
            raise ValueError(f"{name} must be finite, for each cell, got {given}")
    if not (lows < highs).all():
        raise ValueError(f"low must be below high = {high}, got {low}")
    sides = np.stack([table.values <= lows, table.values >= highs], -1) & table.valid[..., None]
    pairs = table.valid.sum((2, 3))[..., None]
    result = table.dataset("saturation", seed, resamples)
    result.coords["side"] = ["low", "high"]
    share = bootstrap_ratio(sides.sum((2, 3)), pairs, resamples=resamples, seed=seed)
    table.put(result, "saturated", share, "share of the pairs that are saturated", "side")
    valid_values = table.values[np.broadcast_to(table.valid, table.values.shape)]
    start, stop = valid_values.min(initial=lows.min()), valid_values.max(initial=highs.max())
    table.put_distribution(result, start, stop, bins)
    return result


def _of_cells(
    name: str, limit: float | xr.DataArray, table: PairTable
) -> Float[np.ndarray, "cell 1 1"]:
    """Broadcast a limit to all cells, aligned by their labels."""
    if not isinstance(limit, xr.DataArray):
        limit = xr.DataArray(limit)
    mismatched = [dim for dim in limit.dims if limit.sizes[dim] != table.cells.get(str(dim))]
    if mismatched:
        raise ValueError(
            f"{name} must be a number, or have only dims of the cells with their sizes, "
            f"{table.cells}, got {dict(limit.sizes)}"
        )
    labels = {dim: table.coords[str(dim)] for dim in limit.coords if str(dim) in table.coords}
    limit = limit.reindex(labels).drop_vars(list(limit.coords))
    missing_dims = {dim: size for dim, size in table.cells.items() if dim not in limit.dims}
    broadcast = limit.expand_dims(missing_dims).transpose(*table.cells)
    return broadcast.to_numpy().reshape(-1, 1, 1)
