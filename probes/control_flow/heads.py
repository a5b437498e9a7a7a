"""Parts that single heads play: which pairs of columns of the true dataflow a head joins."""

from __future__ import annotations

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float

from probes.checking import checked
from probes.control_flow.graphs import ordered, without_padding
from probes.statistics.intervals import Interval, bootstrap_ratio, interval_variables

ROLES = {
    "operator reads argument": "the column of an operation reads those of its arguments",
    "argument reads operator": "the column of an argument reads that of its operation",
    "operator reads result": "an operation reads the argument that has its value, not its others",
    "readout reads root": "the column that is read out reads that of the answer",
}

_PATTERN = ("example", "step", "head", "query_pos", "key_pos")


@checked
def score_heads(
    attention: xr.DataArray,
    truth: xr.Dataset,
    *,
    untrained: xr.DataArray | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Score how much each head attends to the pairs of columns that a role is about.

    The score of a head is the mean over all pairs of the largest attention weight at any step.
    Roles (`ROLES`) with their pairs of query and key: arguments and operations, in both directions;
    operations and those of their arguments that have the operation's value, for operations some
    but not all of whose arguments have it; and the readout column with that of the answer.

    Controls:

    - "others": the same queries, and the keys that they should not attend to: for `operator reads
      result` the operation's other arguments, else all other valid columns that are no partners of
      the query;
    - "untrained": the pairs themselves in another model, if its attention is passed.

    Args:
        attention: [example, step, head, query_pos, key_pos]; weights of padding do not count.
        truth: positions are columns. `edges` [example, edge, end], from argument to operation,
            padded with -1; `value` [example, pos] int; `readout`, `root` [example] int; `valid`
            [example, pos] bool. Edges to the readout column are no arguments.
        untrained: attention of a model with random weights, on the same examples.
        resamples: number of bootstrap resamples.
        seed: seed of the bootstrap.

    Returns:
        Coordinates `control` ("trained", "others", "untrained"), `role`, `head`, `step`.

        - `score, score_low, score_high` [control, role, head]: with the percentile bootstrap 95%
          interval over examples; NaN for roles without pairs.
        - `best` [control, role]: the largest score of a head.
        - `at_step` [role, head, step]: the mean weight of the pairs at each step.
        - `pairs` [role]: their number.

    Raises:
        KeyError: `truth` lacks a variable.
        ValueError: dims or sizes do not match, or attention between valid columns is not finite.

    Example:
        >>> score_heads(columns["attention"], tasks.column_dataflow(batch))["best"]

    Source: Csordás et al. 2021, section 4, describes such heads in figures 3 and 10.
    """
    weights, pairs, sources = _sources(attention, truth, untrained)
    scores = np.stack(
        [
            np.stack(bootstrap_ratio(*_sums(w.max(axis=1), m), resamples=resamples, seed=seed))
            for w, m in sources.values()
        ],
        axis=1,
    )
    n_pairs = pairs.sum(axis=(0, 2, 3))
    at_step = np.einsum("eshqk,erqk->rhs", weights, pairs.astype(weights.dtype), optimize=True)
    n_of_role = n_pairs[:, None, None]
    at_step = np.where(n_of_role > 0, at_step / np.maximum(n_of_role, 1), np.nan)
    coords = {
        "control": ("control", list(sources), {"long_name": "which pairs of which model"}),
        "role": ("role", list(ROLES), {"long_name": "what a head does"}),
        "head": ("head", np.arange(weights.shape[2]), {"long_name": "head"}),
        "step": ("step", np.arange(weights.shape[1]), {"long_name": "step"}),
    }
    dims = ("control", "role", "head")
    long_name = "mean over pairs of the largest attention weight at any step"
    best = np.where(np.isnan(scores[0]).all(-1), np.nan, np.nan_to_num(scores[0]).max(-1))
    data = {
        "best": (dims[:2], best, {"long_name": f"of the best head: {long_name}"}),
        "at_step": (("role", "head", "step"), at_step, {"long_name": "mean weight of the pairs"}),
        "pairs": ("role", n_pairs, {"long_name": "number of pairs"}),
    }
    variables = interval_variables("score", Interval(*scores), dims, long_name=long_name)
    return xr.Dataset(variables | data, coords, {"long_name": "parts of single heads", **ROLES})


def _sources(
    attention: xr.DataArray, truth: xr.Dataset, untrained: xr.DataArray | None
) -> tuple[np.ndarray, np.ndarray, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """The attention weights, the pairs of roles, and for each control both of these."""
    missing = [n for n in ("edges", "value", "readout", "root", "valid") if n not in truth]
    if missing:
        raise KeyError(f"truth must hold {', '.join(missing)}, got {sorted(map(str, truth))}")
    weights = ordered("attention", attention, _PATTERN)
    shape = (*truth["valid"].shape, truth.sizes["pos"])
    if weights.shape[:1] + weights.shape[3:] != shape:
        raise ValueError(f"attention must have the sizes {shape} of truth, got {weights.shape}")
    valid = truth["valid"].to_numpy()
    weights = without_padding("attention", weights, valid)
    pairs, others = _pairs(truth)
    sources = {"trained": (weights, pairs), "others": (weights, others)}
    if untrained is not None:
        control = ordered("untrained", untrained, _PATTERN)
        if control.shape != weights.shape:
            raise ValueError(
                f"untrained must have the shape {weights.shape} of attention, got {control.shape}"
            )
        sources["untrained"] = (without_padding("untrained", control, valid), pairs)
    return weights, pairs, sources


def _pairs(
    truth: xr.Dataset,
) -> tuple[Bool[np.ndarray, "example role query key"], Bool[np.ndarray, "example role query key"]]:
    """The pairs of each role, and those of its control, in the order of `ROLES`."""
    valid = truth["valid"].to_numpy()
    value = truth["value"].to_numpy()
    edges = truth["edges"].to_numpy()
    readout, root = truth["readout"].to_numpy(), truth["root"].to_numpy()
    n, width = valid.shape
    rows = np.arange(n)
    other = valid[:, :, None] & valid[:, None, :] & ~np.eye(width, dtype=bool)

    argument = np.zeros((n, width, width), dtype=bool)  # [example, operation, argument]
    example, edge = np.nonzero((edges[..., 0] >= 0) & (edges[..., 1] != readout[:, None]))
    source, target = edges[example, edge].T
    argument[example, target, source] = True
    linked = argument | argument.transpose(0, 2, 1)
    result = argument & (value[:, :, None] == value[:, None, :])
    # The argument with the result is known where others have another value.
    mixed = result.any(2, keepdims=True) & (argument & ~result).any(2, keepdims=True)
    answer = np.zeros_like(argument)
    answer[rows, readout, root] = True

    def beside(pairs: Bool[np.ndarray, "example query key"]) -> np.ndarray:
        return other & ~linked & ~answer & pairs.any(2, keepdims=True)

    backward = argument.transpose(0, 2, 1)
    pairs = [argument, backward, result & mixed, answer]
    controls = [beside(argument), beside(backward), argument & ~result & mixed, beside(answer)]
    return np.stack(pairs, axis=1), np.stack(controls, axis=1)


def _sums(
    weights: Float[np.ndarray, "example head query key"],
    pairs: Bool[np.ndarray, "example role query key"],
) -> tuple[Float[np.ndarray, "example role head"], Float[np.ndarray, "example role 1"]]:
    """The sum of weights over the pairs of each example, and the number of pairs."""
    total = np.einsum("ehqk,erqk->erh", weights, pairs.astype(weights.dtype), optimize=True)
    return total, pairs.sum(axis=(2, 3))[..., None].astype(float)
