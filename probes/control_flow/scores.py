"""Scores of control-flow graphs against the true dataflow, with chance level and controls."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int

from probes.checking import checked
from probes.control_flow.graphs import collapse_columns, column_numbers, group_numbers, ordered
from probes.control_flow.metrics import (
    METRICS,
    Flow,
    Truth,
    counts_per_level,
    counts_per_step,
    last_updates,
    score_examples,
)
from probes.control_flow.nulls import (
    BESIDE,
    HABITS,
    NEIGHBOURS,
    beside_graphs,
    neighbour_graphs,
    shuffled_graphs,
)
from probes.decoding.cells import ALL
from probes.progress import progress
from probes.statistics.intervals import Interval, bootstrap_ratio, interval_variables


@checked
def score_control_flow(
    graphs: xr.Dataset,
    truth: xr.Dataset,
    *,
    untrained: xr.Dataset | None = None,
    by: Sequence[str] = (),
    routes: int | None = None,
    permutations: int = 5,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Score extracted graphs against the task's dataflow, with chance level and controls.

    Metrics are computed per example on the graph collapsed to columns (`collapse_columns`: reads
    of other columns, without copies); "true" edges are those of `truth`:

    - `precision`: share of true edges among the edges *between columns that hold a value*; NaN
      without such edges. `stray` is the share of all edges that are not between two such columns
      and do not count here (reads of and by brackets, BOS, EOS). To score the edge from the root
      to the read-out column too, add it to `edges` and give the read-out column a level.
    - `recall`: share of the used true edges that are in the graph; NaN without such edges.
    - `f1`: their harmonic mean; 0 if no used true edge is in the graph, NaN where neither is
      defined.
    - `order`: share of the used true edges u -> v where the last update of v is strictly later
      than that of u. Literals that never update are done before the first step; an operation that
      never updates is not done, and no edge from or to it is in order.
    - `tau`: Kendall's tau-b between first update step (-1 for never) and level, over the columns
      that hold a value; NaN where one of them is constant.
    - `parallelism`: overlap, in 0..1, of two series of counts: operations (level >= 1) whose last
      update is in the first, second, ... step with such updates, and operations at level 1, 2,
      ...; sum of the minima / number of operations. 1 if as many are done at once as possible, 1 /
      operations if a chain is done in one step.
    - `readout_step`, `root_step`: last update step of these columns; NaN if they never update.

    With `routes`, edges have no direction and may pass through other columns: u and v are linked
    if a path of reads, each in either direction, joins them with at most `routes` columns between,
    none of which holds a value. Precision counts the linked pairs: a column that reads all links
    all. For operations whose arguments read *them* (ListOps).

    Groups, if `truth` has them, are merged first: edges to or from any column of a group belong to
    the group, its level is the highest in it, and it updates when any of its columns does.

    Controls:

    - "left neighbour", "right neighbour", "both neighbours": habits that need no model and know
      nothing of the expression: "read your neighbour, in turn" (`neighbour_graphs`) and "read the
      columns beside you, always" (`beside_graphs`). Where one scores high, a score cannot tell a
      graph from a habit: the first do on chains, the last has all edges of an expression with all
      its brackets, but no order.
    - "shuffled": the same graphs with the valid columns of each example permuted at random, which
      keeps the shape of the graph and the steps. The mean over `permutations` where the score is
      defined.
    - "untrained": graphs of a model with random weights, if passed.

    Args:
        graphs: result of `extract_control_flow`.
        truth: positions are columns of the graphs. `edges` [example, edge, 2] int, source and
            target, padded with -1; `level` [example, pos] int, depth of the value that a column
            holds (0: a literal, -1: none). Optional: `used` [example, edge] bool; `group`
            [example, pos] int, -1 for none; `readout`, `root` [example] int; and the variables
            of `by`.
        untrained: graphs of the same examples.
        by: names of variables [example] of `truth` (depth, correct) by whose values scores are
            also grouped.
        routes: None scores directed reads; a number of at least 0 scores routes.
        permutations: number of permutations for "shuffled".
        resamples: number of bootstrap resamples.
        seed: seed of permutations and bootstrap.

    Returns:
        Coordinates `control` ("trained", "shuffled", "left neighbour", "right neighbour", "both
        neighbours", "untrained"), a dim per name in `by` (strings, last "all"), `metric`.

        - `score, score_low, score_high` [control, *by, metric]: mean over the examples where it is
          defined, and its percentile bootstrap 95% interval over examples (NaN for one example).
        - `above_chance, above_chance_low, above_chance_high` [*by, metric]: trained minus
          shuffled, resampled together, over the examples where both are defined.
        - `above_habit, above_habit_low, above_habit_high` [*by, metric]: the same minus the habit
          that has the largest mean F1; its name is an attribute.
        - `examples` [control, *by, metric]: number of examples of a score.
        - `example_score` [control, metric, example].
        - `updates_per_step` and `done_per_step` [control, example, step]: update nodes of
          operations, and last updates of operations; `operations_per_level` [example, level], from
          level 1. `parallelism` compares the last two.
        - `done` [control, step, *by] and `operations` [level, *by]: their means over examples.
        - the variables of `by` [example], as `example_{name}`.

    Raises:
        KeyError: `truth` lacks a variable.
        TypeError, ValueError: dtypes, dims or sizes of variables do not match, columns are out of
            range or not valid, or a number is out of range.

    Example:
        >>> score_control_flow(graphs, truth, by=["depth"])["score"].sel(metric="f1")
    """
    if permutations < 1 or resamples < 1:
        raise ValueError(
            f"permutations and resamples must be at least 1, got {permutations} and {resamples}"
        )
    if routes is not None and routes < 0:
        raise ValueError(f"routes must be None or at least 0, got {routes}")
    valid = graphs["valid"].to_numpy()
    dataflow = _read_truth(truth, valid)
    first = _first_of_group(truth, valid.shape)
    merged = dataflow.merged(first)
    flow = _flow(graphs)
    sources = {
        "trained": [flow],
        "shuffled": shuffled_graphs(flow, valid, permutations=permutations, seed=seed),
        **{
            name: [neighbour_graphs(merged.level, flow.update.shape[1], direction=direction)]
            for name, direction in NEIGHBOURS.items()
        },
        BESIDE: [beside_graphs(valid, flow.update.shape[1])],
    }
    if untrained is not None:
        if dict(untrained.sizes) | {"edge": 0} != dict(graphs.sizes) | {"edge": 0}:
            raise ValueError(
                f"untrained must have the sizes of graphs {dict(graphs.sizes)}, "
                f"got {dict(untrained.sizes)}"
            )
        sources["untrained"] = [_flow(untrained)]

    scores, updates, done = [], [], []
    for flows in sources.values():
        grouped = [flow.merged(first) for flow in flows]
        shown = progress(grouped, "score control flow")
        scores.append(_mean([score_examples(flow, merged, routes=routes) for flow in shown]))
        operation = (merged.level >= 1)[:, None]
        updates.append(np.mean([(flow.update & operation).sum(axis=2) for flow in grouped], axis=0))
        steps = flow.update.shape[1]
        done.append(
            np.mean(
                [
                    counts_per_step(last_updates(merged_flow.update), merged.level, steps)
                    for merged_flow in grouped
                ],
                axis=0,
            )
        )

    result = xr.Dataset(
        coords={"control": list(sources), "metric": list(METRICS), "step": graphs["step"]},
        attrs={
            "long_name": "control flow against the true dataflow",
            "routes": "directed reads" if routes is None else routes,
            "permutations": permutations,
            "seed": seed,
            "interval": f"percentile bootstrap over examples, 95%, {resamples} resamples",
            **{name: str(long_name) for name, long_name in METRICS.items()},
        },
    )
    result["metric"].attrs["long_name"] = "what is scored, see the attributes"
    result["control"].attrs["long_name"] = "whose graphs"
    result["example_score"] = (
        ("control", "metric", "example"),
        np.stack(scores),
        {"long_name": "score of one example"},
    )
    series = ("control", "example", "step")
    result["updates_per_step"] = (series, np.stack(updates), {"long_name": "updates of operations"})
    long_name = "operations that update for the last time"
    result["done_per_step"] = (series, np.stack(done), {"long_name": long_name})
    levels = max(int(merged.level.max(initial=0)), 1)
    result["operations_per_level"] = (
        ("example", "level"),
        counts_per_level(merged.level, levels),
        {"long_name": "operations whose value has the level"},
    )
    result = result.assign_coords(
        level=("level", np.arange(1, levels + 1), {"long_name": "true depth of a value"})
    )
    return _summarise(result, truth, by, resamples=resamples, seed=seed)


def _flow(graphs: xr.Dataset) -> Flow:
    return Flow(collapse_columns(graphs).to_numpy() > 0, graphs["update"].to_numpy())


def _mean(scores: list[np.ndarray]) -> np.ndarray:
    """Average the scores that are defined."""
    stacked = np.stack(scores)
    count = np.isfinite(stacked).sum(axis=0)
    total = np.nansum(stacked, axis=0)
    return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)


def _read_truth(truth: xr.Dataset, valid: Bool[np.ndarray, "example pos"]) -> Truth:
    missing = [name for name in ("edges", "level") if name not in truth]
    if missing:
        raise KeyError(f"truth must hold {', '.join(missing)}, got {sorted(map(str, truth))}")
    examples, width = valid.shape
    edges = truth["edges"].to_numpy()
    if edges.ndim != 3 or edges.shape[::2] != (examples, 2):
        raise ValueError(f"edges must have the shape ({examples}, edge, 2), got {edges.shape}")
    used = np.ones(edges.shape[:2], dtype=bool)
    if "used" in truth:
        used = truth["used"].to_numpy()
        if used.dtype != bool or used.shape != edges.shape[:2]:
            raise ValueError(
                f"used must be boolean of shape {edges.shape[:2]}, got {used.dtype} {used.shape}"
            )
    level = ordered("level", truth["level"], ("example", "pos"))
    if level.shape != valid.shape:
        raise ValueError(f"level must have the shape {valid.shape}, got {level.shape}")
    if (level != np.rint(level)).any():
        raise ValueError("level must hold whole numbers, -1 for none, got NaN or fractions")
    if ((level >= 0) & ~valid).any():
        raise ValueError("level must be -1 at columns that are not valid, got other levels there")
    is_edge = (edges >= 0).all(axis=2)
    if ((edges >= 0).any(axis=2) & ~is_edge).any() or edges.max(initial=-1) >= width:
        raise ValueError(
            f"edges must hold pairs of columns in 0..{width - 1}, or -1 twice, got others"
        )
    example, edge = np.nonzero(is_edge)
    source, target = edges[example, edge].T
    if (level[example, source] < 0).any() or (level[example, target] < 0).any():
        raise ValueError("edges must join columns that hold a value (level at least 0), got others")
    matrix = np.zeros((examples, width, width), dtype=bool)
    matrix[example, target, source] = True
    used_edges = used[example, edge]
    used_matrix = np.zeros_like(matrix)
    used_matrix[example[used_edges], target[used_edges], source[used_edges]] = True
    return Truth(
        matrix,
        used_matrix,
        level.astype(np.int64),
        *(
            column_numbers(name, truth[name], valid) if name in truth else np.full(examples, -1)
            for name in ("readout", "root")
        ),
    )


def _first_of_group(truth: xr.Dataset, shape: tuple[int, int]) -> Int[np.ndarray, "example pos"]:
    """Find the first column of each column's group; without a group it is the column itself."""
    own = np.broadcast_to(np.arange(shape[1]), shape)
    if "group" not in truth:
        return own
    group = group_numbers(truth["group"], shape)
    same_group = (group[:, :, None] == group[:, None, :]) & (group >= 0)[:, :, None]
    return np.where(group >= 0, same_group.argmax(axis=2), own)


def _summarise(
    result: xr.Dataset, truth: xr.Dataset, by: Sequence[str], *, resamples: int, seed: int
) -> xr.Dataset:
    """Compute means with intervals, over all examples and by the variables in `by`."""
    scores = result["example_score"].to_numpy()
    examples = scores.shape[2]
    f1 = result["example_score"].sel(metric="f1").fillna(0).mean("example")
    habit = max(HABITS, key=lambda name: float(f1.sel(control=name)))
    nulls = {"chance": "shuffled", "habit": habit}
    numbers = {name: result["control"].to_numpy().tolist().index(nulls[name]) for name in nulls}
    labels: dict[str, np.ndarray] = {}
    for name in by:
        if name not in truth:
            raise KeyError(f"truth must hold {name!r}, got {sorted(map(str, truth))}")
        if name in result.dims:
            raise ValueError(
                f"by must not name the result's dims {list(result.dims)}, got {name!r}"
            )
        labels[name] = ordered(name, truth[name], ("example",))
        if len(labels[name]) != examples:
            raise ValueError(f"{name!r} must have {examples} examples, got {len(labels[name])}")
    values = {name: np.unique(column) for name, column in labels.items()}
    sizes = [len(unique_values) + 1 for unique_values in values.values()]
    shape = (len(scores), *sizes, scores.shape[1])
    score = np.full((3, *shape), np.nan)
    above = {name: np.full((3, *shape[1:]), np.nan) for name in nulls}
    count = np.zeros(shape, dtype=np.int64)
    done, operations = result["done_per_step"], result["operations_per_level"]
    mean_done = np.full((done.sizes["control"], done.sizes["step"], *sizes), np.nan)
    mean_operations = np.full((operations.sizes["level"], *sizes), np.nan)
    for index in product(*map(range, sizes)):
        selected = np.ones(examples, dtype=bool)
        for number, name in zip(index, values, strict=True):
            if number < len(values[name]):
                selected &= labels[name] == values[name][number]
        if not selected.any():
            continue
        selected_scores = scores[:, :, selected]
        count[:, *index] = np.isfinite(selected_scores).sum(axis=-1)
        score[:, :, *index] = _interval(selected_scores, resamples, seed)
        for name, number in numbers.items():
            differences = selected_scores[0] - selected_scores[number]
            above[name][:, *index] = _interval(differences, resamples, seed)
        mean_done[:, :, *index] = done.to_numpy()[:, selected].mean(axis=1)
        mean_operations[:, *index] = operations.to_numpy()[selected].mean(axis=0)
    by_dims = tuple(by)
    result = result.assign_coords(
        {name: [*map(str, unique_values), ALL] for name, unique_values in values.items()}
    )
    for name in by:
        result[name].attrs["long_name"] = f"{name} of the example"
        result[f"example_{name}"] = truth[name].assign_attrs(long_name=f"{name} of the example")
    dims = (*by_dims, "metric")
    score_dims = ("control", *dims)
    result.update(interval_variables("score", Interval(*score), score_dims, long_name="mean score"))
    # Equal in all results, which are joined: which habit it is, is an attribute.
    abouts = {"chance": "shuffled graphs", "habit": "the best habit"}
    for name, null in abouts.items():
        values, about = Interval(*above[name]), f"mean score minus that of {null}"
        result.update(interval_variables(f"above_{name}", values, dims, long_name=about))
    result.attrs["habit"] = habit
    result["examples"] = (
        ("control", *by_dims, "metric"),
        count,
        {"long_name": "examples for which the score is defined"},
    )
    result["done"] = (("control", "step", *by_dims), mean_done, done.attrs)
    result["operations"] = (("level", *by_dims), mean_operations, operations.attrs)
    return result


def _interval(
    values: Float[np.ndarray, "... example"], resamples: int, seed: int
) -> Float[np.ndarray, "part ..."]:
    """Compute the mean over defined values, and its interval."""
    of_examples = np.moveaxis(values, -1, 0)
    defined = np.isfinite(of_examples)
    filled = np.where(defined, of_examples, 0.0)
    return np.stack(bootstrap_ratio(filled, defined, resamples=resamples, seed=seed))
