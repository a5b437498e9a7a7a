"""Test control-flow graphs by intervention: close gates and cut attention on and off the path."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Int, Int64
from torch import Tensor

from probes.capturing.hooking import HookedModel, broadcasts, check_model, evaluating, resolve_hooks
from probes.capturing.inputs import (
    Inputs,
    call,
    check_answer,
    count_examples,
    once,
    slices,
    take_rows,
)
from probes.checking import checked
from probes.control_flow.graphs import NO_HEAD, column_numbers, newest_update
from probes.interventions.sites import firings
from probes.progress import progress
from probes.statistics.intervals import exact_rates, interval_variables

NODE_CONDITIONS = ("node on the path", "node off the path", "no node")
EDGE_CONDITIONS = ("edge on the path", "edge off the path", "no edge")
OUTCOMES = ("changed", "broken")


@checked
def cut(
    model: HookedModel,
    inputs: Inputs,
    graphs: xr.Dataset,
    *,
    readout: xr.DataArray,
    gates: str,
    attention: str,
    answer: Callable[[Any], Tensor],
    targets: Int[Tensor, " example"],
    cuts: int = 1,
    lasting: bool = False,
    seed: int = 0,
    batch_size: int = 256,
) -> xr.Dataset:
    """Set random gates or attention weights to zero and measure how often the answer changes.

    A graph is a causal claim: nodes that are not ancestors of the read-out column's last node
    cannot affect the answer. "On the path" are that node, its ancestors, and their reads. So
    closing a gate on the path should change the answer, and closing one off the path should not.
    Cells outside the graph are a further control, but a weak one: their gates and weights are
    already small. Each condition is a separate forward pass in which `cuts` random cells per
    example are set to zero together:

    - "node on the path", "node off the path": the gate of an update node, at its step and column.
    - "no node": the gate of a valid column at a step where it does not update.
    - "edge on the path", "edge off the path": the attention from the reading to the read column at
      the reading step, in all heads.
    - "no edge": the attention of an update node on the path to another valid column that it does
      not read.

    A network that computes a column repeatedly recovers from one closed gate. With `lasting` a cut
    holds from its step to the last one. Control cells must then not affect a later node on the
    path: nodes off the path and cells without a node lie after the last node on the path in their
    column, edges off the path after that of the reading column, and columns that are not read are
    not read later on the path either.

    Args:
        model: an eager HookedRootModule or TransformerBridge that runs as many steps as the
            graphs have.
        inputs: inputs of the model: the examples of the graphs, in order.
        graphs: result of `extract_control_flow` for the same hooks.
        readout: [example] int, the column from which the answer is read.
        gates: glob of the gate hooks, one per step (`blocks.*.hook_gate`), each [batch, pos, d]
            (d may be 1; all features are closed).
        attention: glob of the attention hooks, one per step (`blocks.*.attn.hook_pattern`), each
            [batch, head, query_pos, key_pos].
        answer: maps the model's output to answers, integers [batch].
        targets: the correct answers.
        cuts: number of cells per example and condition; examples with fewer are left out.
        lasting: whether a cut holds until the last step.
        seed: seed of the choice of cells.
        batch_size: examples per forward pass; does not affect the choice of cells.

    Returns:
        Coordinates `condition` and `outcome`: "changed" (the answer differs from that without the
        cut) and "broken" (it was correct and is now wrong).

        - `hit` [condition, outcome, example] int8: 0 or 1; -1 where the example has too few cells
          or, for "broken", was wrong without the cut.
        - `rate, rate_low, rate_high` [condition, outcome]: the share of hits among the trials and
          its exact 95% interval (Clopper-Pearson); NaN without trials. `trials`: their number.
        - `right` [example]: the answer without a cut is correct.
        - `cut_step`, `cut_pos`, `cut_key_pos` [condition, cut, example]: the cells that were cut,
          -1 for none; `cut_key_pos` is -1 for gates.

    Raises:
        KeyError: an unknown hook; the message lists the nearest names.
        TypeError: the model cannot be hooked, or answers are not integers.
        ValueError: the model is compiled, sizes do not match, read-out columns are not valid, or a
            number is out of range.
        RuntimeError: a hook did not fire exactly once in a forward pass.

    Example:
        `cut(model, inputs, graphs, readout=readout, gates="blocks.*.hook_gate", ...)["rate"]`
    """
    check_model(model)
    count_examples("inputs", inputs)
    hooks = {
        name: _hook_of_each_step(model, inputs, pattern)
        for name, pattern in (("gates", gates), ("attention", attention))
    }
    _check_arguments(hooks, inputs, graphs, targets, cuts, batch_size)
    column = column_numbers("readout", readout, graphs["valid"].to_numpy())
    masks = _Masks.of(graphs, column)
    generators = {
        condition: np.random.default_rng([seed, number])
        for number, condition in enumerate((*NODE_CONDITIONS, *EDGE_CONDITIONS))
    }
    chosen_cells: dict[str, list[np.ndarray]] = {condition: [] for condition in generators}
    answers: dict[str, list[Tensor]] = {condition: [] for condition in generators}
    unpatched_answers: list[Tensor] = []
    with evaluating(model):
        for rows in progress(slices(len(targets), batch_size), "cut"):
            batch = take_rows(inputs, rows)
            n_rows = rows.stop - rows.start
            check = partial(_check_answers, examples=n_rows)
            unpatched_answers.append(check(answer(call(model, batch))))
            for condition, generator in generators.items():
                cells = masks.cells(condition, rows, lasting=lasting)
                chosen = _choose(cells, cuts, generator)
                target = "gates" if condition in NODE_CONDITIONS else "attention"
                closed = _closed(chosen, cells.shape[1:], lasting=lasting)
                output = _run_cut(model, batch, hooks[target], closed)
                answers[condition].append(check(answer(output)))
                chosen_cells[condition].append(chosen)
    unpatched = torch.cat(unpatched_answers).numpy()
    right = unpatched == targets.cpu().numpy()
    chosen = {condition: np.concatenate(parts) for condition, parts in chosen_cells.items()}
    hits = np.stack(
        [
            _hits(torch.cat(answers[condition]).numpy(), unpatched, right, chosen[condition])
            for condition in generators
        ]
    )
    return _dataset(hits, right, chosen, graphs, lasting=lasting, seed=seed)


@dataclass(frozen=True)
class _Masks:
    """Graphs as boolean masks.

    Attributes:
        update: the column updates at the step.
        on_path: the update node is the read-out column's last, or an ancestor of it.
        valid: the column is not padding.
        reads: example, step, target and source column of each read, for all heads.
    """

    update: Bool[np.ndarray, "example step pos"]
    on_path: Bool[np.ndarray, "example step pos"]
    valid: Bool[np.ndarray, "example pos"]
    reads: Int[np.ndarray, "index edge"]

    @classmethod
    def of(cls, graphs: xr.Dataset, readout: Int[np.ndarray, " example"]) -> "_Masks":
        columns = ("edge_example", "target_step", "target_pos", "source_pos")
        is_read = graphs["head"].to_numpy() != NO_HEAD
        return cls(
            graphs["update"].to_numpy(),
            _ancestors(graphs, readout),
            graphs["valid"].to_numpy(),
            np.stack([graphs[name].to_numpy()[is_read] for name in columns]),
        )

    def cells(
        self, condition: str, rows: slice, *, lasting: bool
    ) -> Bool[np.ndarray, "example step ..."]:
        """Cells that a condition may cut: [example, step, pos], or for edges [..., query, key]."""
        update, on_path, valid = self.update[rows], self.on_path[rows], self.valid[rows]
        # Cells of controls: a lasting cut must not reach a node on the path.
        allowed = np.ones_like(on_path)
        if lasting:
            allowed = ~np.logical_or.accumulate(on_path[:, ::-1], axis=1)[:, ::-1]
        if condition == "node on the path":
            return on_path
        if condition == "node off the path":
            return update & ~on_path & allowed
        if condition == "no node":
            return ~update & valid[:, None] & allowed
        example, step, target, source = self.reads
        in_rows = (example >= rows.start) & (example < rows.stop)
        reads = np.zeros((*update.shape, update.shape[2]), dtype=bool)
        reads[example[in_rows] - rows.start, step[in_rows], target[in_rows], source[in_rows]] = True
        if condition == "edge on the path":
            return reads & on_path[..., None]
        if condition == "edge off the path":
            return reads & ~on_path[..., None] & allowed[..., None]
        other_columns = valid[:, None, None, :] & ~np.eye(update.shape[2], dtype=bool)
        if lasting:
            # A column that is not read now may be read later by a node on the path.
            read_on_path = reads & on_path[..., None]
            reads = np.logical_or.accumulate(read_on_path[:, ::-1], axis=1)[:, ::-1] | reads
        return on_path[..., None] & other_columns & ~reads


def _ancestors(
    graphs: xr.Dataset, readout: Int[np.ndarray, " example"]
) -> Bool[np.ndarray, "example step pos"]:
    """Mark the read-out column's last update node and its ancestors."""
    update = graphs["update"].to_numpy()
    examples, steps, width = update.shape
    rows = np.arange(examples)
    # Index 0 is the input (step -1), so that edges from it need no special case.
    reached = np.zeros((examples, steps + 1, width), dtype=bool)
    reached[rows, newest_update(update)[rows, -1, readout] + 1, readout] = True
    example, target_step, target, source_step, source = (
        graphs[name].to_numpy()
        for name in ("edge_example", "target_step", "target_pos", "source_step", "source_pos")
    )
    for step in reversed(range(steps)):
        edges = np.flatnonzero(target_step == step)
        edges = edges[reached[example[edges], step + 1, target[edges]]]
        reached[example[edges], source_step[edges] + 1, source[edges]] = True
    return reached[:, 1:]


def _choose(
    cells: Bool[np.ndarray, "example step ..."], cuts: int, generator: np.random.Generator
) -> Int64[np.ndarray, "example cut index"]:
    """Choose random cells of each example, (step, pos) or (step, query, key); -1 if too few."""
    flat = cells.reshape(len(cells), -1)
    keys = np.where(flat, generator.random(flat.shape), -1)
    if flat.shape[1] < cuts:
        return np.full((len(cells), cuts, cells.ndim - 1), -1)
    largest = np.argpartition(keys, -cuts, axis=1)[:, -cuts:]
    index = np.stack(np.unravel_index(largest, cells.shape[1:]), axis=-1)
    index[flat.sum(axis=1) < cuts] = -1
    return index


def _closed(
    chosen: Int64[np.ndarray, "example cut index"], shape: tuple[int, ...], *, lasting: bool
) -> Bool[Tensor, "example step ..."]:
    """Mark the entries to set to zero: the chosen cells, or all from their step on."""
    mask = np.zeros((len(chosen), *shape), dtype=bool)
    example, number = np.nonzero(chosen[:, :, 0] >= 0)
    mask[(example, *chosen[example, number].T)] = True
    return torch.from_numpy(np.logical_or.accumulate(mask, axis=1) if lasting else mask)


def _run_cut(
    model: HookedModel,
    inputs: Inputs,
    hooks: Sequence[str],
    closed: Bool[Tensor, "example step ..."],
) -> Any:
    """Run a forward pass with the closed entries of each step's activation set to zero."""

    def close(activation: Tensor, step: int, *, name: str) -> Tensor:
        entries = closed[:, step].to(activation.device)
        # A gate is [batch, pos, d], closed for all d; a pattern [batch, head, query, key].
        entries = entries[..., None] if entries.ndim == 2 else entries[:, None]
        if not broadcasts(entries, activation):
            raise ValueError(
                f"the activation at {name!r} must have the shape {tuple(entries.shape)} of the "
                f"graphs (1 stands for features or heads), got {tuple(activation.shape)}"
            )
        return activation.masked_fill(entries, 0)

    if len({*hooks}) < len(hooks):
        return call(model, inputs, {hooks[0]: partial(close, name=hooks[0])})
    edits = {
        name: once(name, partial(close, step=step, name=name)) for step, name in enumerate(hooks)
    }
    return call(model, inputs, edits)


def _hits(
    answers: Int[np.ndarray, " example"],
    unpatched: Int[np.ndarray, " example"],
    right: Bool[np.ndarray, " example"],
    chosen: Int64[np.ndarray, "example cut index"],
) -> Int[np.ndarray, "outcome example"]:
    changed = answers != unpatched
    done = (chosen >= 0).all(axis=(1, 2))
    return np.stack([np.where(done, changed, -1), np.where(done & right, changed, -1)]).astype(
        np.int8
    )


def _dataset(
    hits: Int[np.ndarray, "condition outcome example"],
    right: Bool[np.ndarray, " example"],
    chosen: Mapping[str, Int64[np.ndarray, "example cut index"]],
    graphs: xr.Dataset,
    *,
    lasting: bool,
    seed: int,
) -> xr.Dataset:
    dims = ("condition", "outcome")
    long_name = "share of examples whose answer changes"
    index = np.stack(
        [
            np.pad(
                cells_of_condition,
                ((0, 0), (0, 0), (0, 3 - cells_of_condition.shape[2])),
                constant_values=-1,
            )
            for cells_of_condition in chosen.values()
        ]
    )
    cells = ("condition", "cut", "example")
    index = index.transpose(3, 0, 2, 1)
    result = xr.Dataset(
        {
            "hit": ((*dims, "example"), hits, {"long_name": "the cut has the outcome"}),
            **interval_variables("rate", exact_rates(hits), dims, long_name=long_name),
            "trials": (
                dims,
                (hits >= 0).sum(axis=2),
                {"long_name": "examples that were tried"},
            ),
            "right": ("example", right, {"long_name": "the answer without a cut is right"}),
            "cut_step": (cells, index[0], {"long_name": "step of the cut"}),
            "cut_pos": (cells, index[1], {"long_name": "column whose gate or reading is cut"}),
            "cut_key_pos": (cells, index[2], {"long_name": "column that is read, -1 for gates"}),
        },
        coords={"condition": list(chosen), "outcome": list(OUTCOMES)},
        attrs={
            **graphs.attrs,
            "cut_lasting": int(lasting),
            "cut_seed": seed,
            "interval": "exact 95% (Clopper-Pearson) over examples",
        },
    )
    result["condition"].attrs["long_name"] = "what is cut"
    result["outcome"].attrs["long_name"] = "what becomes of the answer"
    return result


def _hook_of_each_step(model: HookedModel, inputs: Inputs, pattern: str) -> list[str]:
    """The hooks that fire, in this order: one for each step, or one that fires in all."""
    fired = firings(model, take_rows(inputs, slice(1)), resolve_hooks(model, pattern))
    return [name for name, _ in fired]


def _check_answers(answers: Tensor, *, examples: int) -> Tensor:
    checked = check_answer(answers, examples)
    if checked.ndim != 1:
        raise ValueError(f"answer must return one number per example, got {tuple(checked.shape)}")
    return checked


def _check_arguments(
    hooks: Mapping[str, Sequence[str]],
    inputs: Inputs,
    graphs: xr.Dataset,
    targets: Tensor,
    cuts: int,
    batch_size: int,
) -> None:
    examples, steps = graphs.sizes["example"], graphs.sizes["step"]
    for name, matched in hooks.items():
        if len(matched) != steps:
            raise ValueError(
                f"{name} must match one hook per step, {steps} in the graphs, or one that fires in "
                f"each, got {len(matched)}: "
                f"{', '.join(matched[:6])}{', ...' if len(matched) > 6 else ''}"
            )
    if count_examples("inputs", inputs) != examples:
        raise ValueError(
            f"inputs must have the {examples} examples of the graphs, "
            f"got {count_examples('inputs', inputs)}"
        )
    if targets.shape != (examples,):
        raise ValueError(f"targets must have the shape ({examples},), got {tuple(targets.shape)}")
    if cuts < 1 or batch_size < 1:
        raise ValueError(f"cuts and batch_size must be at least 1, got {cuts} and {batch_size}")
