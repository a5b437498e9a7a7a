"""Control-flow graphs from gates and attention: which column computes when, and from what."""

from collections.abc import Sequence

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int

from probes.capturing.inputs import slices
from probes.checking import checked
from probes.control_flow.updates import GateThreshold, gate_levels, open_gates
from probes.progress import progress

INPUT_STEP = -1
NO_HEAD = -1

# Number of examples whose attention rows are gathered at a time, to bound the memory.
_CHUNK = 256
_TOLERANCE = 1e-5

_ABOUT = {
    "example": "example of the edge",
    "target_step": "step at which the target column updates",
    "target_pos": "target column",
    "source_step": "step of the source column's newest update before it, -1 for its input",
    "source_pos": "source column",
    "head": "head that reads, -1 for a copy",
    "weight": "attention weight; for a copy, 1 - gate of the target",
}


@checked
def extract_control_flow(
    gates: xr.DataArray,
    attention: xr.DataArray,
    valid: xr.DataArray,
    *,
    gate_threshold: GateThreshold = 0.5,
    attention_threshold: float = 0.1,
    seed: int = 0,
) -> xr.Dataset:
    """Extract control flow from gates and attention as graphs over (column, step).

    For networks whose columns (one per position, including BOS and EOS) keep their state unless a
    gate opens: h <- g * update + (1 - g) * h at every step, where the update reads other columns
    by attention. These are the copy gate and geometric attention of Csordás, Irie & Schmidhuber
    2021 ("The Neural Data Router", sections 2.1 and 2.2), who draw such plots by hand (section 5).

    - A node is a column at a step where its gate is open, or the input of a valid column (step
      -1).
    - A read is an edge to an update node from the *newest* earlier node of another column whose
      attention weight is at least `attention_threshold`; one per head. Weights need not sum to 1
      over the keys. Negative weights make no edge.
    - A copy is an edge to each update node from the previous node of the same column. It stands
      for all that a column takes from itself; attention to the own column adds no edge.

    All edges go from an earlier step to a later one, so that every graph is acyclic.

    Args:
        gates: [example, step, pos], in 0..1; further dims (one gate per feature) are averaged.
        attention: [example, step, head, query_pos, key_pos]; both position dims are `pos`.
        valid: [example, pos] bool, False for padding, which never appears in a graph.
        gate_threshold: when a gate is open. A number in (0, 1]: where the gate is at least that. A
            pair (low, high): hysteresis, an update begins where the gate reaches high and lasts
            until it falls below low. "mixture": from the level at which both components of a
            Gaussian mixture, fitted to the logits of all valid gates (at most 100,000, drawn by
            seed; clipped to 1e-4 from 0 and 1), are equally likely. If they do not separate
            (Ashman, Bird & Zepf 1994: D < 2; or one covers the other's mean; or the gates at the
            two means are less than 0.1 apart), 0.5 is used with a RuntimeWarning.
        attention_threshold: smallest attention weight of a read, above 0.
        seed: seed of the mixture.

    Returns:
        `update` [example, step, pos] bool, `gate` [example, step, pos] (averaged, 0 where not
        valid), `valid` [example, pos], and the edges as a table along the dim `edge`, sorted by
        `edge_example`, `target_step`, `target_pos`, `source_pos`, `head`, with `source_step`,
        `weight` and `kind` ("attention" or "copy"). Steps count from 0. Attrs:
        `gate_threshold_low`, `gate_threshold_high`, `gate_threshold_rule` ("constant",
        "hysteresis", "mixture", "fallback"), `attention_threshold`, `seed`.

    Raises:
        TypeError: `valid` is not boolean.
        ValueError: dims or sizes do not match, gates at valid columns are outside 0..1, attention
            between valid columns is not finite, or a threshold is out of range.

    Example:
        >>> extract_control_flow(columns["gate"], columns["attention"], valid, gate_threshold=0.5)
    """
    gate, weights, valid_columns = _read(gates, attention, valid)
    if not 0 < attention_threshold < np.inf:
        raise ValueError(f"attention_threshold must be positive, got {attention_threshold}")
    levels = gate_levels(
        gate[np.broadcast_to(valid_columns[:, None], gate.shape)], gate_threshold, seed=seed
    )
    update = open_gates(gate, levels)
    edges = _edges(update, gate, weights, valid_columns, attention_threshold)
    return xr.Dataset(
        {
            "update": (("example", "step", "pos"), update, {"long_name": "the column updates"}),
            "gate": (
                ("example", "step", "pos"),
                gate,
                {"long_name": "gate: share of the state that is replaced", "units": "1"},
            ),
            "valid": (
                ("example", "pos"),
                valid_columns,
                {"long_name": "the column is real, not padding"},
            ),
            **edges,
        },
        coords={
            "step": ("step", np.arange(update.shape[1]), {"long_name": "step, from 0"}),
            "pos": ("pos", np.arange(update.shape[2]), {"long_name": "column"}),
        },
        attrs={
            "gate_threshold_low": levels.low,
            "gate_threshold_high": levels.high,
            "gate_threshold_rule": levels.rule,
            "attention_threshold": attention_threshold,
            "seed": seed,
        },
    )


@checked
def collapse_columns(graphs: xr.Dataset, *, groups: xr.DataArray | None = None) -> xr.DataArray:
    """Collapse graphs over steps and heads: which column reads which.

    Args:
        graphs: result of `extract_control_flow`.
        groups: [example, pos] int, the group of each column, -1 for none (for example an
            operation's symbol and its bracket). Edges are then between groups: columns without a
            group and reads within a group are left out.

    Returns:
        [example, target, source]: the largest weight of a read, 0 for none; copies are left out.
        Target and source are columns, or groups from 0 to the largest.

    Raises:
        KeyError: a variable of the graphs is missing.
        TypeError, ValueError: groups are not integers of at least -1, or sizes do not match.

    Example:
        >>> collapse_columns(graphs) > 0
    """
    read = graphs["head"].to_numpy() != NO_HEAD
    size = graphs.sizes["pos"]
    example = graphs["edge_example"].to_numpy()[read]
    target = graphs["target_pos"].to_numpy()[read]
    source = graphs["source_pos"].to_numpy()[read]
    weight = graphs["weight"].to_numpy()[read]
    unit = "column"
    if groups is not None:
        unit = "group of columns"
        group = group_numbers(groups, (graphs.sizes["example"], size))
        size = int(group.max(initial=-1)) + 1
        target, source = group[example, target], group[example, source]
        between_groups = (target >= 0) & (source >= 0) & (target != source)
        example, target, source, weight = (
            column[between_groups] for column in (example, target, source, weight)
        )
    collapsed = np.zeros((graphs.sizes["example"], size, size), dtype=weight.dtype)
    np.maximum.at(collapsed, (example, target, source), weight)
    return xr.DataArray(
        collapsed,
        dims=("example", "target", "source"),
        coords={
            "target": ("target", np.arange(size), {"long_name": f"{unit} that reads"}),
            "source": ("source", np.arange(size), {"long_name": f"{unit} that is read"}),
        },
        name="reads",
        attrs={"long_name": "largest weight of a read, over steps and heads", "units": "1"},
    )


def group_numbers(groups: xr.DataArray, shape: tuple[int, int]) -> Int[np.ndarray, "example pos"]:
    """Check the group of each column.

    Raises:
        TypeError, ValueError: groups are not integers of at least -1, or have another shape.
    """
    group = ordered("groups", groups, ("example", "pos"))
    if group.dtype.kind not in "iu":
        raise TypeError(f"groups must hold integers, got {group.dtype}")
    if group.shape != shape:
        raise ValueError(f"groups must have the shape {shape} of the graphs, got {group.shape}")
    if group.min(initial=-1) < -1:
        raise ValueError(f"groups must be at least -1 (no group), got {group.min()}")
    return group.astype(np.int64)


def column_numbers(
    name: str, columns: xr.DataArray, valid: Bool[np.ndarray, "example pos"]
) -> Int[np.ndarray, " example"]:
    """Check one valid column per example.

    Raises:
        ValueError: columns are not integers, have another shape, or are not valid.
    """
    numbers = ordered(name, columns, ("example",))
    examples, width = valid.shape
    if numbers.shape != (examples,) or numbers.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be integers of shape ({examples},), got {numbers.dtype} {numbers.shape}"
        )
    in_range = (numbers >= 0) & (numbers < width)
    if not in_range.all() or not valid[np.arange(examples), numbers].all():
        raise ValueError(f"{name} must name valid columns, got some in padding or out of range")
    return numbers.astype(np.int64)


def ordered(name: str, array: xr.DataArray, dims: Sequence[str]) -> np.ndarray:
    """Return the values of an array with the dims in the given order.

    Raises:
        ValueError: the array has other dims.
    """
    if set(array.dims) != set(dims):
        raise ValueError(f"{name} must have the dims {tuple(dims)}, got {array.dims}")
    return array.transpose(*dims).to_numpy()


def ordered_updates(update: xr.DataArray) -> Bool[np.ndarray, "example step pos"]:
    """Return which columns update, in this order of dims.

    Raises:
        TypeError: the array is not boolean.
        ValueError: the array has other dims.
    """
    if update.dtype != bool:
        raise TypeError(f"update must hold bool, such as gates >= 0.2, got {update.dtype}")
    return ordered("update", update, ("example", "step", "pos"))


def without_padding(
    name: str,
    weights: Float[np.ndarray, "example step head query_pos key_pos"],
    valid: Bool[np.ndarray, "example pos"],
) -> Float[np.ndarray, "example step head query_pos key_pos"]:
    """Set attention weights to 0 but those between valid columns; those of padding may be NaN.

    Raises:
        ValueError: weights between valid columns are not finite.
    """
    pairs = (valid[:, :, None] & valid[:, None, :])[:, None, None]
    if not np.isfinite(weights).all(where=np.broadcast_to(pairs, weights.shape)):
        raise ValueError(f"{name} must be finite between valid columns, got NaN or infinity")
    return np.where(pairs, weights, 0)


def _read(
    gates: xr.DataArray, attention: xr.DataArray, valid: xr.DataArray
) -> tuple[
    Float[np.ndarray, "example step pos"],
    Float[np.ndarray, "example step head query_pos key_pos"],
    Bool[np.ndarray, "example pos"],
]:
    dims = ("example", "step", "pos")
    missing = [dim for dim in dims if dim not in gates.dims]
    if missing:
        raise ValueError(f"gates must have the dims {dims} (others are averaged), got {gates.dims}")
    extra_dims = [dim for dim in gates.dims if dim not in dims]
    gate = gates.mean(extra_dims) if extra_dims else gates
    gate = gate.transpose(*dims).to_numpy()
    weights = ordered("attention", attention, ("example", "step", "head", "query_pos", "key_pos"))
    valid_columns = ordered("valid", valid, ("example", "pos"))
    if valid_columns.dtype != bool:
        raise TypeError(f"valid must be boolean, got {valid_columns.dtype}")
    examples, steps, pos = gate.shape
    if valid_columns.shape != (examples, pos):
        raise ValueError(f"valid must have the shape {(examples, pos)}, got {valid_columns.shape}")
    heads = weights.shape[2]
    if weights.shape != (examples, steps, heads, pos, pos):
        raise ValueError(
            f"attention must have {examples} examples, {steps} steps and {pos} positions twice, "
            f"like the gates, got the shape {weights.shape}"
        )
    inside = np.broadcast_to(valid_columns[:, None], gate.shape)
    valid_gates = gate[inside]
    # Negated so that NaN fails too.
    if not ((valid_gates >= -_TOLERANCE) & (valid_gates <= 1 + _TOLERANCE)).all():
        bad = valid_gates[~((valid_gates >= -_TOLERANCE) & (valid_gates <= 1 + _TOLERANCE))]
        raise ValueError(
            f"gates must be in 0..1 at valid columns, got {len(bad)} outside, such as {bad[0]}"
        )
    return np.where(inside, np.clip(gate, 0, 1), 0), weights, valid_columns


def _edges(
    update: Bool[np.ndarray, "example step pos"],
    gate: Float[np.ndarray, "example step pos"],
    attention: Float[np.ndarray, "example step head query_pos key_pos"],
    valid: Bool[np.ndarray, "example pos"],
    threshold: float,
) -> dict[str, xr.Variable]:
    newest = newest_update(update)
    # Copies: every update node has one.
    example, step, pos = np.nonzero(update)
    columns = {
        "example": [example],
        "target_step": [step],
        "target_pos": [pos],
        "source_step": [newest[example, step, pos]],
        "source_pos": [pos],
        "head": [np.full(len(pos), NO_HEAD)],
        "weight": [1 - gate[example, step, pos]],
    }
    for batch in progress(slices(len(update), _CHUNK), "extract control flow"):
        between = valid[batch, None, None, :, None] & valid[batch, None, None, None]
        if not np.isfinite(attention[batch]).all(where=between):
            raise ValueError("attention must be finite at valid columns, got NaN or infinity")
        example, step, pos = np.nonzero(update[batch])
        example += batch.start
        rows = attention[example, step, :, pos, :]  # [node, head, key_pos]
        keys = valid[example]
        keys[np.arange(len(pos)), pos] = False
        node, head, source = np.nonzero((rows >= threshold) & keys[:, None])
        example, step, pos = example[node], step[node], pos[node]
        reads = {
            "example": example,
            "target_step": step,
            "target_pos": pos,
            "source_step": newest[example, step, source],
            "source_pos": source,
            "head": head,
            "weight": rows[node, head, source],
        }
        for name, values in reads.items():
            columns[name].append(values)
    table = {name: np.concatenate(values) for name, values in columns.items()}
    _, steps, width = update.shape
    target_index = (table["example"] * steps + table["target_step"]) * width + table["target_pos"]
    # The copy of a column and its reads, ordered by head, are in consecutive rows.
    order = np.argsort(target_index * width + table["source_pos"], kind="stable")
    edges = {
        "edge_example" if name == "example" else name: xr.Variable(
            "edge",
            values[order] if name == "weight" else values[order].astype(np.int32),
            {"long_name": _ABOUT[name]},
        )
        for name, values in table.items()
    }
    kinds = np.where(edges["head"].values == NO_HEAD, "copy", "attention")
    edges["kind"] = xr.Variable("edge", kinds, {"long_name": "what kind of edge"})
    return edges


def newest_update(
    update: Bool[np.ndarray, "example step pos"],
) -> Int[np.ndarray, "example after pos"]:
    """Find the newest update of each column strictly before each step, -1 for none.

    There is one more entry than steps: the last holds the newest update of all steps.
    """
    examples, steps, width = update.shape
    newest = np.full((examples, steps + 1, width), INPUT_STEP, dtype=np.int64)
    step_of_update = np.where(update, np.arange(steps)[:, None], INPUT_STEP)
    np.maximum.accumulate(step_of_update, axis=1, out=newest[:, 1:])
    return newest
