"""States over the steps of a model: how far they move, fixed points and cycles."""

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float

from probes.checking import checked
from probes.statistics.intervals import bootstrap_ratio, interval_variables


@checked
def score_states(
    states: xr.DataArray,
    *,
    tolerance: float = 0.01,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Measure how far the states of a looped model move: to a fixed point, in a cycle, or on.

    The distance of two states is |h - h'| / |h|, with the later state as h. It is 0 for equal
    states, also of zeros, and infinite from any other state to zeros, which means leave out.

    Args:
        states: [example, step, ...], the state after each step; the other dims are features. NaN
            after the last step of an example.
        tolerance: largest distance of states that count as the same.
        resamples: number of bootstrap resamples.
        seed: seed of the control and of the bootstrap.

    Returns:
        Coordinates `step` (the later one), `lag` (1 to the number of steps - 1) and `control`
        ("observed"; "shuffled", the earlier state is that of another example).

        - `distance` [control, step]: of the states of a step and the step before, mean over
          examples with both, with `_low` and `_high`: percentile bootstrap 95% intervals over
          examples.
        - `fixed` [step], with `_low` and `_high`: share of examples whose state moves by no more
          than the tolerance in this and all later steps.
        - `return_distance` [control, lag], with `_low` and `_high`: of the last state and the state
          `lag` steps before.
        - `period` [example]: the smallest lag at which the last state was there before, within the
          tolerance; 1 for a fixed point, 0 for none.

    Raises:
        ValueError: dims do not fit, there are fewer than two steps or examples, a state is
            infinite, or NaN before the last step, or `tolerance` is not positive.

    Example:
        >>> state = Quantity("core.hook_out", ("example", "pos", "d_model"), fires="each")
        >>> moved = score_states(capture(model, batches, {"state": state})["state"])
        >>> moved["distance"].sel(control="observed").plot()
    """
    if not {"example", "step"} < set(states.dims) or min(states.sizes.values()) < 1:
        raise ValueError(
            f"states must have the dims example, step and features, got {dict(states.sizes)}"
        )
    if states.sizes["step"] < 2 or states.sizes["example"] < 2:
        raise ValueError(f"states must have two steps and examples, got {dict(states.sizes)}")
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}")
    array = states.transpose("example", "step", ...).to_numpy().astype(np.float64)
    values = array.reshape(*array.shape[:2], -1)
    n_steps = _count_steps(values)
    order = _derangement(len(values), seed)
    moves = [_distances(values, values, 1), _distances(values, values[order], 1)]
    is_still = np.where(np.isnan(moves[0]), True, moves[0] <= tolerance)
    fixed = np.logical_and.accumulate(is_still[:, ::-1], axis=1)[:, ::-1].astype(float)
    lags = np.arange(1, values.shape[1])
    returned = [_last(values, other, n_steps, lags) for other in (values, values[order])]
    same = np.where(np.isnan(returned[0]), False, returned[0] <= tolerance)
    variables = {
        "period": (
            "example",
            np.where(same.any(axis=1), lags[same.argmax(axis=1)], 0),
            {"long_name": "steps after which the last state returns, 0 for none"},
        )
    }
    for name, columns, dims, long_name in (
        ("distance", moves, ("control", "step"), "relative distance to the state before"),
        ("fixed", fixed, ("step",), "share of examples whose state stays from this step on"),
        ("return_distance", returned, ("control", "lag"), "relative distance of the last state"),
    ):
        by_example = np.moveaxis(np.asarray(columns), -2, 0)
        counted = np.isfinite(by_example)
        parts = np.where(counted, by_example, 0.0)
        interval = bootstrap_ratio(parts, counted.astype(float), resamples=resamples, seed=seed)
        variables |= interval_variables(name, interval, dims, long_name=long_name)
    steps = states["step"].to_numpy() if "step" in states.coords else np.arange(values.shape[1])
    coords = {"control": ["observed", "shuffled"], "step": steps[1:], "lag": lags}
    attrs = {
        "tolerance": tolerance,
        "seed": seed,
        "interval": f"percentile bootstrap over examples, 95%, {resamples} resamples",
    }
    return xr.Dataset(variables, coords, attrs)


def _count_steps(values: Float[np.ndarray, "example step feature"]) -> np.ndarray:
    if diverged := int(np.isinf(values).any(axis=(1, 2)).sum()):
        raise ValueError(
            f"states must be finite, got infinity in {diverged} of {len(values)} examples: leave "
            "out those that diverge"
        )
    there = ~np.isnan(values).any(axis=2)
    n_steps = there.sum(axis=1)
    if (n_steps < 1).any() or not (np.sort(there, axis=1)[:, ::-1] == there).all():
        raise ValueError("states must be NaN only after the last step of each example, got others")
    return n_steps


def _derangement(n: int, seed: int) -> np.ndarray:
    """A permutation in which no example is its own partner."""
    order = np.random.default_rng(seed).permutation(n)
    partner = np.empty(n, dtype=int)
    partner[order] = np.roll(order, 1)
    return partner


def _relative(
    later: Float[np.ndarray, "... feature"], earlier: Float[np.ndarray, "... feature"]
) -> Float[np.ndarray, "..."]:
    size, moved = (np.linalg.norm(state, axis=-1) for state in (later, later - earlier))
    return np.divide(moved, size, out=np.where(moved > 0, np.inf, moved), where=size > 0)


def _distances(
    values: Float[np.ndarray, "example step feature"],
    others: Float[np.ndarray, "example step feature"],
    lag: int,
) -> Float[np.ndarray, "example later"]:
    return _relative(values[:, lag:], others[:, :-lag])


def _last(
    values: Float[np.ndarray, "example step feature"],
    others: Float[np.ndarray, "example step feature"],
    n_steps: np.ndarray,
    lags: np.ndarray,
) -> Float[np.ndarray, "example lag"]:
    """The distance of each last state to that some steps before; NaN where there is none."""
    example = np.arange(len(values))
    last = values[example, n_steps - 1]
    before = [others[example, np.maximum(n_steps - 1 - lag, 0)] for lag in lags]
    distances = np.stack([_relative(last, state) for state in before], axis=1)
    exists: Bool[np.ndarray, "example lag"] = n_steps[:, None] > lags
    return np.where(exists, distances, np.nan)
