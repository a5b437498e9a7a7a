"""Where columns read: beside them, at a fixed offset or position; how sharply, and until when."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int

from probes.checking import checked
from probes.control_flow.graphs import ordered, ordered_updates, without_padding
from probes.control_flow.metrics import last_updates
from probes.statistics.intervals import Interval, bootstrap, bootstrap_ratio, interval_variables

PLACES = {
    "offset": "the same number of columns away, whatever the length",
    "position": "the same column, whatever the length",
}
COUNTS = {
    "sharp reads": "columns that read sharply at one of their updates",
    "last step": "the last step at which a column does so, from 1",
}

_PATTERN = ("example", "step", "head", "query_pos", "key_pos")


@checked
def score_reads(
    attention: xr.DataArray,
    update: xr.DataArray,
    truth: xr.Dataset,
    *,
    sharp: float = 0.5,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Describe which columns are read, without the true dataflow: an account of habits.

    A column reads, at a step, the other column that gets most weight from one of its heads. A read
    is sharp if that weight is at least `sharp` and the reading column updates at that step.

    A model that reads its neighbour in turn, or always the same place, can look like one that
    follows the dataflow; see also the controls "left neighbour" and "right neighbour" of
    `score_control_flow`.

    Args:
        attention: [example, step, head, query_pos, key_pos], weights from 0 to 1; those of padding
            do not count.
        update: [example, step, pos] bool, the columns that update.
        truth: `valid` [example, pos] bool; `level` [example, pos] int, at least 1 for columns of
            operations; `readout`, `depth` [example] int.
        sharp: least weight of a sharp read.
        resamples: number of bootstrap resamples.
        seed: seed of the bootstrap.

    Returns:
        All intervals are percentile bootstrap 95% intervals over examples.

        - `neighbour, neighbour_low, neighbour_high`: share of operations (but the readout column)
          whose column reads one of its two neighbours at its last update; `neighbour_chance`: the
          share if the other valid columns were read alike.
        - `same, same_low, same_high` [place]: share of examples in which the readout column reads,
          at its last update, at the most frequent `offset`, or the most frequent `position`; all
          lengths count alike. `most_frequent` [place]: which one that is.
        - `readout_reads` [length, position]: where it reads, as a share of the examples of each
          length; `length` is the number of valid columns.
        - `mean_count` [count, depth] and `slope, slope_low, slope_high` [count]: the number of
          `sharp reads` of an example, and the `last step` of one, by depth; and by how much they
          grow with each level of depth.
        - `entropy, entropy_low, entropy_high` [step]: of attention, averaged over heads and valid
          columns, as a share of that of even attention to all valid columns.

    Raises:
        KeyError: `truth` lacks a variable.
        TypeError: `update` is not boolean.
        ValueError: dims or sizes do not match, attention between valid columns is not finite, or
            `sharp` is not between 0 and 1.

    Example:
        >>> score_reads(columns["attention"], columns["change"] >= 0.2, column_dataflow(batch))

    Source: Csordás et al. 2021, section 4 and figures 2, 4 and 7, describe such reads in words.
    """
    missing = [name for name in ("valid", "level", "readout", "depth") if name not in truth]
    if missing:
        raise KeyError(f"truth must hold {', '.join(missing)}, got {sorted(map(str, truth))}")
    if not 0 < sharp <= 1:
        raise ValueError(f"sharp must be between 0 and 1, got {sharp}")
    weights = ordered("attention", attention, _PATTERN)
    updates = ordered_updates(update)
    valid, level = (ordered(name, truth[name], ("example", "pos")) for name in ("valid", "level"))
    n, width = valid.shape
    if weights.shape[:1] + weights.shape[3:] != (n, width, width):
        raise ValueError(
            f"attention must have {n} examples of {width} columns like truth, got {weights.shape}"
        )
    if updates.shape != (n, weights.shape[1], width):
        raise ValueError(
            f"update must have the sizes {(n, weights.shape[1], width)}, got {updates.shape}"
        )
    weights = without_padding("attention", weights, valid)
    readout, depth = truth["readout"].to_numpy(), truth["depth"].to_numpy()
    other = valid[:, :, None] & valid[:, None, :] & ~np.eye(width, dtype=bool)
    strongest = np.where(other[:, None], weights.max(2), -1.0)
    key, weight = strongest.argmax(-1), strongest.max(-1)  # [example, step, query]
    draws: dict[str, Any] = {"resamples": resamples, "seed": seed}

    rows, last = np.arange(n), last_updates(updates)
    at_last = np.take_along_axis(key, np.maximum(last, 0)[:, None], axis=1)[:, 0]
    operation = (level >= 1) & valid & (last >= 0)
    operation[rows, readout] = False
    read = last[rows, readout] >= 0
    parts = [
        _neighbours(at_last, operation, other, draws),
        _readouts(at_last[rows, readout][read], readout[read], valid.sum(1)[read], width, draws),
        _counts(updates & valid[:, None] & (weight >= sharp), depth, draws),
        _blur(weights, valid, draws),
    ]
    joined = xr.merge(parts, join="exact", compat="identical")
    return joined.assign_attrs(long_name="where columns read", sharp=sharp)


def _neighbours(
    key: Int[np.ndarray, "example query"],
    operation: Bool[np.ndarray, "example query"],
    other: Bool[np.ndarray, "example query key"],
    draws: dict[str, Any],
) -> xr.Dataset:
    """How often operations read their neighbours, and would by chance."""
    beside = np.abs(key - np.arange(key.shape[1])) == 1
    interval = bootstrap_ratio((beside & operation).sum(1), operation.sum(1), **draws)
    step = np.abs(np.subtract.outer(np.arange(key.shape[1]), np.arange(key.shape[1])))
    chance = (other & (step == 1)).sum(-1) / np.maximum(other.sum(-1), 1)
    about = "share of operations that read a neighbour"
    by_chance = chance[operation].mean() if operation.any() else np.nan
    variables = interval_variables("neighbour", interval, (), long_name=about)
    return xr.Dataset(
        {**variables, "neighbour_chance": ((), by_chance, {"long_name": f"{about}, by chance"})}
    )


def _readouts(
    key: Int[np.ndarray, " example"],
    readout: Int[np.ndarray, " example"],
    length: Int[np.ndarray, " example"],
    width: int,
    draws: dict[str, Any],
) -> xr.Dataset:
    """At which offset and position the readout column reads, by length."""
    lengths = np.unique(length)
    place = {"offset": key - readout + width, "position": key}
    counts = {name: np.zeros((len(key), len(lengths), 2 * width)) for name in PLACES}
    of_length = np.searchsorted(lengths, length)
    for name, where in place.items():
        counts[name][np.arange(len(key)), of_length, where] = 1

    def shares(weights: Float[np.ndarray, "draw example"], name: str) -> np.ndarray:
        table = np.einsum("de,elp->dlp", weights, counts[name])
        whole = table.sum(-1, keepdims=True)
        return np.divide(table, whole, out=np.full(table.shape, np.nan), where=whole > 0)

    def most(weights: Float[np.ndarray, "draw example"]) -> Float[np.ndarray, "draw place"]:
        return np.stack([np.nanmean(shares(weights, name), 1).max(-1) for name in PLACES], -1)

    coords = {
        "place": ("place", list(PLACES), {"long_name": "what may be the same", **PLACES}),
        "length": ("length", lengths, {"long_name": "valid columns"}),
        "position": ("position", np.arange(width), {"long_name": "column that is read"}),
    }
    if len(key) == 0:
        undefined = np.full(len(PLACES), np.nan)
        interval, frequent = Interval(undefined, undefined, undefined), undefined
        table = np.zeros((0, width))
    else:
        ones = np.ones((1, len(key)))
        interval = bootstrap(most, (len(key),), **draws)
        by_length = {name: shares(ones, name)[0] for name in PLACES}
        frequent = np.array([by_length[name].mean(0).argmax() for name in PLACES], dtype=float)
        frequent -= [width, 0]
        table = by_length["position"][:, :width]
    about = "share of examples whose readout column reads at the most frequent place"
    return xr.Dataset(
        {
            **interval_variables("same", interval, "place", long_name=about),
            "most_frequent": ("place", frequent, {"long_name": "most frequent place"}),
            "readout_reads": (
                ("length", "position"),
                table,
                {"long_name": "share of examples whose readout column reads a column"},
            ),
        },
        coords,
    )


def _counts(
    is_sharp: Bool[np.ndarray, "example step query"],
    depth: Int[np.ndarray, " example"],
    draws: dict[str, Any],
) -> xr.Dataset:
    """How the number of sharp reads, and the step of the last one, grow with depth."""
    steps = np.arange(1, is_sharp.shape[1] + 1)
    number = is_sharp.any(1).sum(1)
    last = (is_sharp.any(2) * steps).max(1)
    counts = np.stack([number, last], -1).astype(float)
    depths = np.unique(depth)
    means = np.stack([counts[depth == each].mean(0) for each in depths], -1)

    def slope(weights: Float[np.ndarray, "draw example"]) -> Float[np.ndarray, "draw count"]:
        whole = weights.sum(1, keepdims=True)
        x, y = weights @ depth / whole[:, 0], weights @ counts / whole
        products = weights @ (depth[:, None] * counts) / whole - x[:, None] * y
        spread = weights @ depth**2 / whole[:, 0] - x**2
        return np.where(
            spread[:, None] > 1e-9, products / np.maximum(spread, 1e-9)[:, None], np.nan
        )

    interval = bootstrap(slope, (len(depth),), **draws)
    return xr.Dataset(
        {
            "mean_count": (("count", "depth"), means, {"long_name": "mean over examples"}),
            **interval_variables("slope", interval, "count", long_name="growth per level of depth"),
        },
        {
            "count": ("count", list(COUNTS), {"long_name": "what is counted", **COUNTS}),
            "depth": ("depth", depths, {"long_name": "depth of the expression"}),
        },
    )


def _blur(
    weights: Float[np.ndarray, "example step head query key"],
    valid: Bool[np.ndarray, "example pos"],
    draws: dict[str, Any],
) -> xr.Dataset:
    """The entropy of attention at each step, as a share of the largest."""
    mass = np.where(weights > 0, weights, 1.0)
    # Weights need not sum to 1: those of geometric attention leave a rest.
    whole = weights.sum(-1)
    entropy = -(weights * np.log(mass)).sum(-1)
    entropy = np.divide(entropy, whole, out=np.zeros(whole.shape), where=whole > 0)
    entropy += np.log(np.where(whole > 0, whole, 1.0))
    largest = np.log(np.maximum(valid.sum(1), 2))
    share = entropy.mean(2) / largest[:, None, None]
    parts = (share * valid[:, None]).sum(-1)
    interval = bootstrap_ratio(parts, np.broadcast_to(valid.sum(1)[:, None], parts.shape), **draws)
    about = "entropy of attention, as a share of that of even attention"
    steps = np.arange(1, weights.shape[1] + 1)
    return xr.Dataset(
        interval_variables("entropy", interval, "step", long_name=about),
        {"step": ("step", steps, {"long_name": "step, from 1"})},
    )
