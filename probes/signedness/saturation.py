"""How much of a quantity lies where a function is flat, so that it passes on no gradient."""

import numpy as np
import xarray as xr
from jaxtyping import Float

from probes.attention_pairs import PairTable, read_pairs
from probes.statistics.intervals import bootstrap_ratio


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
    """Tell how much of a quantity lies in the flat parts of a function.

    Of `hook_affinity` with low = -2 and high = 2: where tanh is within 0.04 of -1 or 1 and passes
    on less than 8% of a gradient. Of `hook_gate` with low = 0.05 and high = 0.95: closed and open
    gates. With a dim `train_step`: over training.

    Args:
        values: [example, query_pos, key_pos], in any order; every further dim makes cells.
        low: values up to here are saturated below; a number, or one for each of some cells, with
            their dims.
        high: values from here on are saturated above; above `low`.
        valid: as in `score_signedness`.
        bins: of the distribution.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Returns:
        - `saturated`, with `_low` and `_high`, its 95% percentile bootstrap bounds over examples
          [*cells, side]: share of the pairs at each side ("low", "high").
        - `distribution` [*cells, bin]: share of the pairs in each bin, named by its middle; over
          the range of all valid values, and at least from the least `low` to the greatest `high`.

    Raises:
        TypeError: `valid` that is not bool.
        ValueError: dims or sizes that do not fit, no valid pairs, values that are not finite,
            numbers out of range.

    Example:
        Of several quantities at once, each with limits of its own::

            limit = xr.DataArray([2.0, 3.0], coords={"quantity": ["affinity", "dissimilarity"]})
            values = captured[["affinity", "dissimilarity"]].to_dataarray("quantity")
            score_saturation(values, low=-limit, high=limit)
    """
    table = read_pairs("values", values, valid, bins, resamples)
    lows, highs = (_of_cells(name, one, table) for name, one in (("low", low), ("high", high)))
    if not (lows < highs).all():
        raise ValueError(f"low must be below high = {high}, got {low}")
    sides = np.stack([table.values <= lows, table.values >= highs], -1) & table.valid[..., None]
    pairs = table.valid.sum((2, 3))[..., None]
    result = table.dataset("saturation", seed, resamples)
    result.coords["side"] = ["low", "high"]
    share = bootstrap_ratio(sides.sum((2, 3)), pairs, resamples=resamples, seed=seed)
    table.put(result, "saturated", share, "share of the pairs that are saturated", "side")
    known = table.values[np.broadcast_to(table.valid, table.values.shape)]
    start, stop = known.min(initial=lows.min()), known.max(initial=highs.max())
    table.put_distribution(result, start, stop, bins)
    return result


def _of_cells(
    name: str, limit: float | xr.DataArray, table: PairTable
) -> Float[np.ndarray, "cell 1 1"]:
    """A limit for each cell, by its labels."""
    if not isinstance(limit, xr.DataArray):
        limit = xr.DataArray(limit)
    wrong = [dim for dim in limit.dims if limit.sizes[dim] != table.cells.get(str(dim))]
    if wrong:
        raise ValueError(
            f"{name} must be a number, or have only dims of the cells, {table.cells}, of these "
            f"sizes, got {dict(limit.sizes)}"
        )
    labels = {dim: table.coords[str(dim)] for dim in limit.coords if str(dim) in table.coords}
    limit = limit.reindex(labels).drop_vars(list(limit.coords))
    new = {dim: size for dim, size in table.cells.items() if dim not in limit.dims}
    spread = limit.expand_dims(new).transpose(*table.cells)
    return spread.to_numpy().reshape(-1, 1, 1)
