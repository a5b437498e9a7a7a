"""When operations are done: does the step go with the depth of an expression, or its length?"""

from __future__ import annotations

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from probes.checking import checked
from probes.control_flow.graphs import ordered, ordered_updates
from probes.control_flow.metrics import last_updates
from probes.statistics.intervals import Interval, bootstrap, interval_variables

PREDICTORS = ("depth", "length")
_FEWEST = 5  # cells of `step` with fewer operations are NaN
_WIDTH = 5  # tokens per bin of lengths


@checked
def score_timing(
    update: xr.DataArray, truth: xr.Dataset, *, resamples: int = 1000, seed: int = 0
) -> xr.Dataset:
    """Relate the step at which each operation is done to its depth and to its length.

    An operation is done at the last update of its column, counted from step 1; operations that
    never update are left out. Independent branches can be computed at the same time: then the step
    grows with the depth of an operation and, at equal depth, not with its length. A model that
    evaluates one operation after another needs more steps for longer ones.

    `slope` has the coefficients of a linear regression of the step on depth and length together,
    over all operations. Where one determines the other (table lookup), they are NaN.

    Args:
        update: [example, step, pos] bool, the columns that update.
        truth: `level` [example, pos] int, the depth of a column's value (0: a literal, -1: none);
            `span` [example, pos] int, the tokens of its expression (-1: none). Operations have a
            level of at least 1 and a span.
        resamples: number of bootstrap resamples.
        seed: seed of the bootstrap.

    Returns:
        - `step` [depth, length]: mean step at which operations are done; `length` is the middle of
          a bin of five lengths. NaN for fewer than five operations.
        - `step_of_depth` [depth]: the same over all lengths.
        - `slope, slope_low, slope_high` [predictor]: steps per level of `depth` and per token of
          `length`, with the percentile bootstrap 95% interval over examples.

    Raises:
        KeyError: the truth lacks a variable.
        TypeError: `update` is not boolean.
        ValueError: dims or sizes do not match.

    Example:
        >>> score_timing(columns["change"] >= 0.2, tasks.column_dataflow(batch))["slope"]

    Source: Csordás et al. 2021, section 4: on ListOps parallel branches are computed together.
    """
    missing = [name for name in ("level", "span") if name not in truth]
    if missing:
        raise KeyError(f"truth must hold {', '.join(missing)}, got {sorted(map(str, truth))}")
    updates = ordered_updates(update)
    level, span = (ordered(name, truth[name], ("example", "pos")) for name in ("level", "span"))
    if level.shape != (len(updates), updates.shape[2]):
        raise ValueError(f"update must have the sizes {level.shape} of truth, got {updates.shape}")
    last = last_updates(updates)
    example, column = np.nonzero((level >= 1) & (span >= 1) & (last >= 0))
    done = last[example, column] + 1
    depth, length = level[example, column], span[example, column]

    depths = np.arange(1, max(int(level[span >= 1].max(initial=1)), 1) + 1)
    n_bins = max(int(span.max(initial=1) - 1), 0) // _WIDTH + 1
    cells = (depth - 1, (length - 1) // _WIDTH)
    step = _means(cells, done, (len(depths), n_bins))
    slopes = _slopes(example, depth, length, done, len(updates), resamples=resamples, seed=seed)
    about = {"long_name": "step at which operations are done, from 1"}
    about_slope = "further steps per level of depth, or token of length"
    return xr.Dataset(
        {
            "step": (("depth", "length"), step, about),
            "step_of_depth": ("depth", _means(cells[:1], done, (len(depths),)), about),
            **interval_variables("slope", slopes, "predictor", long_name=about_slope),
        },
        {
            "depth": ("depth", depths, {"long_name": "depth of an operation"}),
            "length": (
                "length",
                _WIDTH * np.arange(n_bins) + (_WIDTH + 1) / 2,
                {"long_name": "tokens of an operation"},
            ),
            "predictor": ("predictor", list(PREDICTORS), {"long_name": "what predicts the step"}),
        },
        {"long_name": "when operations are done"},
    )


def _means(
    cells: tuple[Int[np.ndarray, " operation"], ...],
    values: Int[np.ndarray, " operation"],
    shape: tuple[int, ...],
) -> Float[np.ndarray, "*cell"]:
    """Means of the values in each cell of a table; NaN for too few."""
    total, count = np.zeros(shape), np.zeros(shape)
    np.add.at(total, cells, values)
    np.add.at(count, cells, 1)
    return np.where(count >= _FEWEST, total / np.maximum(count, 1), np.nan)


def _slopes(
    example: Int[np.ndarray, " operation"],
    depth: Int[np.ndarray, " operation"],
    length: Int[np.ndarray, " operation"],
    done: Int[np.ndarray, " operation"],
    n: int,
    *,
    resamples: int,
    seed: int,
) -> Interval:
    """The coefficients of depth and length, [predictor]."""
    table = np.stack([np.ones(len(done)), depth, length], axis=1)
    if np.linalg.matrix_rank(table) < 3:
        undefined = np.full(len(PREDICTORS), np.nan)
        return Interval(undefined, undefined, undefined)
    # Of each example what the normal equations sum up, so that a resample is a weighted sum.
    squares, products = np.zeros((n, 3, 3)), np.zeros((n, 3))
    np.add.at(squares, example, table[:, :, None] * table[:, None, :])
    np.add.at(products, example, table * done[:, None])

    def solve(weights: Float[np.ndarray, "draw example"]) -> Float[np.ndarray, "draw predictor"]:
        left, right = np.einsum("dn,nij->dij", weights, squares), weights @ products
        solvable = np.linalg.matrix_rank(left) == 3
        slopes = np.full((len(weights), len(PREDICTORS)), np.nan)
        slopes[solvable] = np.linalg.solve(left[solvable], right[solvable, :, None])[:, 1:, 0]
        return slopes

    return bootstrap(solve, (n,), resamples=resamples, seed=seed)
