"""Test control-flow graphs by intervention: close gates and cut attention on and off the path."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from probes.capturing.hooking import HookedModel, broadcasts, check_model, evaluating
from probes.capturing.inputs import (
    Edit,
    Inputs,
    call,
    check_answer,
    count_examples,
    slices,
    take_rows,
)
from probes.checking import checked
from probes.control_flow.cut_cells import Masks, at_columns, choose_cells
from probes.control_flow.graphs import column_numbers
from probes.interventions.answers import Metric, check_integers, check_scored, measure
from probes.interventions.readers import check_read
from probes.interventions.sites import Firing, firings
from probes.progress import progress
from probes.statistics.intervals import bootstrap_ratio, exact_rates, interval_variables

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
    gates: str | tuple[str, str],
    attention: str | None,
    answer: Callable[[Any], Tensor] | None = None,
    targets: Int[Tensor, " example"] | None = None,
    metrics: Mapping[str, Metric] | None = None,
    cuts: int = 1,
    lasting: bool = False,
    matched: bool = False,
    seed: int = 0,
    batch_size: int = 256,
) -> xr.Dataset:
    """Close random gates or cut attention weights, and measure how often the answer changes.

    A graph is a causal claim: nodes that are not ancestors of the read-out column's last node
    cannot affect the answer. "On the path" are that node, its ancestors, and their reads. So
    closing a gate on the path should change the answer, and closing one off the path should not.
    Cells outside the graph are a further control, but a weak one: their gates and weights are
    already small. Each condition is a separate forward pass in which `cuts` random cells per
    example are closed together:

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

    Columns on the path may be read more often than others, whatever they compute. With `matched`
    the cells of controls are those whose column (of an edge, the one that is read) is read most
    nearly as often as that of the cells on the path; examples without those are left out.

    Args:
        model: an eager HookedRootModule or TransformerBridge that runs as many steps as the
            graphs have.
        inputs: inputs of the model: the examples of the graphs, in order.
        graphs: result of `extract_control_flow` for the same hooks.
        readout: [example] int, the column from which the answer is read.
        gates: glob of the gate hooks, one per step (`blocks.*.hook_gate`), or the name of one hook
            that fires in each step; each [batch, pos, d] (d may be 1; all features are set to 0).
            Of a model without gates a pair: the hooks of the column states [batch, pos, d] before
            and after a step; a closed column keeps its state.
        attention: as `gates`, the attention hooks (`blocks.*.attn.hook_pattern`), each [batch,
            head, query_pos, key_pos]; weights are set to 0. None: no edges are cut, as of modules
            of Hugging Face, which return a copy of their weights that nothing reads.
        answer: maps the model's output to answers, integers [batch].
        targets: the correct answers.
        metrics: numbers by name, instead of or beside answers: functions of the model's output and
            the examples (a slice) to floats [example], such as a difference of logits.
        cuts: number of cells per example and condition; examples with fewer are left out.
        lasting: whether a cut holds until the last step.
        matched: whether controls are matched by how often columns are read.
        seed: seed of the choice of cells, and of the bootstrap of metrics.
        batch_size: examples per forward pass; does not affect the choice of cells.

    Returns:
        `cut_step`, `cut_pos`, `cut_key_pos` [condition, cut, example]: the cells that were cut,
        -1 for none; `cut_key_pos` is -1 for gates. `cut_reads` [condition, cut, example]: how many
        nodes of the graph read that column (of an edge, the one that is read), -1 for none.

        With answers, coordinate `outcome`: "changed" (the answer differs from that without the
        cut) and "broken" (it was correct and is now wrong).

        - `hit` [condition, outcome, example] int8: 0 or 1; -1 where the example has too few cells
          or, for "broken", was wrong without the cut.
        - `rate, rate_low, rate_high` [condition, outcome]: the share of hits among the trials and
          its exact 95% interval (Clopper-Pearson); NaN without trials. `trials`: their number.
        - `right` [example]: the answer without a cut is correct.

        With metrics, over the examples with enough cells: `value` [condition, metric], the mean
        with the cut; `change` [condition, metric], the mean difference to the run without it, both
        with percentile bootstrap 95% intervals (`_low`, `_high`); and `example_change` [condition,
        metric, example], NaN where the example has too few cells.

    Raises:
        KeyError: an unknown hook.
        TypeError: the model cannot be hooked, or answers or targets are not integers.
        ValueError: the model is compiled, nothing downstream reads the gates or the attention
            weights (or the states after a step), sizes do not match, read-out columns are not
            valid, there are neither answers nor metrics, or a number is out of range.
        RuntimeError: a hook did not fire, or more often than for the first example.

    Example:
        >>> hooks = {"gates": "blocks.*.hook_gate", "attention": "blocks.*.attn.hook_pattern"}
        >>> scored = {"answer": answer, "targets": targets}
        >>> cut(model, inputs, graphs, readout=truth["readout"], **hooks, **scored)["rate"]
    """
    check_model(model)
    count_examples("inputs", inputs)
    metrics = metrics or {}
    hooks = {
        f"gates[{number}]" if isinstance(gates, tuple) else "gates": pattern
        for number, pattern in enumerate(gates if isinstance(gates, tuple) else (gates,))
    }
    fired = {
        name: _firing_of_each_step(model, inputs, pattern)
        for name, pattern in (hooks | {"attention": attention}).items()
        if pattern is not None
    }
    _check_arguments(fired, inputs, graphs, (answer, targets), metrics, (cuts, batch_size))
    # Of a pair, the second is changed.
    *_, gate = hooks
    changed = [{hook for hook, _ in fired[name]} for name in (gate, "attention") if name in fired]
    check_read(model, inputs, changed, batch_size)
    column = column_numbers("readout", readout, graphs["valid"].to_numpy())
    masks = Masks.of(graphs, column)
    generators = {
        condition: np.random.default_rng([seed, number])
        for number, condition in enumerate((*NODE_CONDITIONS, *EDGE_CONDITIONS))
        if condition in NODE_CONDITIONS or attention is not None
    }
    chosen_cells: dict[str, list[np.ndarray]] = {condition: [] for condition in generators}
    times_read: dict[str, list[np.ndarray]] = {condition: [] for condition in generators}
    answers: dict[str, list[np.ndarray]] = {condition: [] for condition in ("", *generators)}
    numbers: dict[str, list[np.ndarray]] = {condition: [] for condition in ("", *generators)}

    def keep(condition: str, output: Any, rows: slice) -> None:
        if answer is not None:
            answers[condition].append(_check_answers(answer(output), rows).numpy())
        numbers[condition].append(measure(metrics, output, rows))

    with evaluating(model):
        for rows in progress(slices(graphs.sizes["example"], batch_size), "cut"):
            batch = take_rows(inputs, rows)
            keep("", call(model, batch), rows)
            of_columns, on_path = masks.times_read(rows), np.empty(0)
            for condition, generator in generators.items():
                cells = masks.cells(condition, rows, lasting=lasting)
                is_control = condition not in (NODE_CONDITIONS[0], EDGE_CONDITIONS[0])
                distance = abs(of_columns - on_path) if matched and is_control else None
                chosen = choose_cells(cells, cuts, generator, distance)
                of_cells = at_columns(of_columns, chosen)
                times_read[condition].append(of_cells)
                if not is_control:
                    on_path = np.where(of_cells >= 0, of_cells, np.nan).mean(1, keepdims=True)
                closed = _closed(chosen, cells.shape[1:], lasting=lasting)
                if condition in EDGE_CONDITIONS:
                    edits = _zeros(fired["attention"], closed)
                elif isinstance(gates, tuple):
                    edits = _kept_states(fired["gates[0]"], fired["gates[1]"], closed)
                else:
                    edits = _zeros(fired["gates"], closed)
                keep(condition, call(model, batch, edits), rows)
                chosen_cells[condition].append(chosen)
    chosen = {condition: np.concatenate(parts) for condition, parts in chosen_cells.items()}
    attrs = {"cut_lasting": int(lasting), "cut_matched": int(matched), "cut_seed": seed}
    result = _cells_dataset(chosen, graphs).assign_attrs(attrs)
    of_cells = np.stack([np.concatenate(parts).T for parts in times_read.values()])
    about = {"long_name": "how many nodes read the column"}
    result["cut_reads"] = result["cut_pos"].dims, of_cells, about
    if answer is not None and targets is not None:
        by_condition = [np.concatenate(parts) for parts in answers.values()]
        right = by_condition[0] == targets.cpu().numpy()
        result = result.assign(_outcomes(by_condition, right, [*chosen.values()]))
        result["outcome"] = "outcome", list(OUTCOMES), {"long_name": "what becomes of the answer"}
        result.attrs["interval"] = "exact 95% (Clopper-Pearson) over examples"
    if metrics:
        values = np.stack([np.concatenate(parts, axis=1) for parts in numbers.values()])
        result = result.assign(_changes(values, [*chosen.values()], seed=seed))
        result["metric"] = "metric", list(metrics), {"long_name": "what is measured"}
    return result


def _closed(
    chosen: Int64[np.ndarray, "example cut index"], shape: tuple[int, ...], *, lasting: bool
) -> Bool[Tensor, "example step ..."]:
    """Mark the entries to set to zero: the chosen cells, or all from their step on."""
    mask = np.zeros((len(chosen), *shape), dtype=bool)
    example, number = np.nonzero(chosen[:, :, 0] >= 0)
    mask[(example, *chosen[example, number].T)] = True
    return torch.from_numpy(np.logical_or.accumulate(mask, axis=1) if lasting else mask)


def _zeros(fired: Sequence[Firing], closed: Bool[Tensor, "example step ..."]) -> dict[str, Edit]:
    """Edits that set the closed entries of each step's activation to zero."""

    def close(activation: Tensor, step: int, name: str) -> Tensor:
        return activation.masked_fill(_entries(closed, step, activation, name), 0)

    return _at_each_step(fired, close)


def _kept_states(
    before: Sequence[Firing],
    after: Sequence[Firing],
    closed: Bool[Tensor, "example step pos"],
) -> dict[str, Edit]:
    """Edits with which closed columns keep the state that they had before the step."""
    states: dict[int, Tensor] = {}

    def remember(activation: Tensor, step: int, name: str) -> Tensor:
        states[step] = activation.clone()  # a step may change it in place
        return activation

    def restore(activation: Tensor, step: int, name: str) -> Tensor:
        entries = _entries(closed, step, activation, name)
        return torch.where(entries, states.pop(step), activation)

    return _at_each_step(before, remember) | _at_each_step(after, restore)


def _entries(
    closed: Bool[Tensor, "example step ..."], step: int, activation: Tensor, name: str
) -> Tensor:
    entries = closed[:, step].to(activation.device)
    # A gate is [batch, pos, d], closed for all d; a pattern [batch, head, query, key].
    entries = entries[..., None] if entries.ndim == 2 else entries[:, None]
    if not broadcasts(entries, activation):
        raise ValueError(
            f"the activation at {name!r} must have the shape {tuple(entries.shape)} of the "
            f"graphs (1 stands for features or heads), got {tuple(activation.shape)}"
        )
    return entries


def _at_each_step(
    fired: Sequence[Firing], edit: Callable[[Tensor, int, str], Tensor]
) -> dict[str, Edit]:
    """Edits by hook from a function of the activation, the step and the hook's name."""
    steps = {firing: step for step, firing in enumerate(fired)}

    def edit_firing(activation: Tensor, number: int, name: str) -> Tensor:
        if (name, number) not in steps:
            raise RuntimeError(f"hook {name!r} must fire as often as for the first example")
        return edit(activation, steps[name, number], name)

    return {name: partial(edit_firing, name=name) for name, _ in fired}


def _outcomes(
    answers: Sequence[Int[np.ndarray, " example"]],
    right: Bool[np.ndarray, " example"],
    chosen: Sequence[Int64[np.ndarray, "example cut index"]],
) -> dict[str, Any]:
    """Whether each condition changes the answer of the run without a cut, the first one."""
    hits = []
    for answer, cells in zip(answers[1:], chosen, strict=True):
        changed, done = answer != answers[0], (cells >= 0).all(axis=(1, 2))
        hits.append([np.where(done, changed, -1), np.where(done & right, changed, -1)])
    hit = np.array(hits, dtype=np.int8)
    dims = ("condition", "outcome")
    rates = interval_variables(
        "rate", exact_rates(hit), dims, long_name="share of examples whose answer changes"
    )
    return {
        "hit": ((*dims, "example"), hit, {"long_name": "the cut has the outcome"}),
        **rates,
        "trials": (dims, (hit >= 0).sum(axis=2), {"long_name": "examples that were tried"}),
        "right": ("example", right, {"long_name": "the answer without a cut is right"}),
    }


def _changes(
    values: Float[np.ndarray, "run metric example"],
    chosen: Sequence[Int64[np.ndarray, "example cut index"]],
    *,
    seed: int,
) -> dict[str, Any]:
    """Metrics of each condition, and their changes against the run without a cut, the first one."""
    done = np.stack([(cells >= 0).all(axis=(1, 2)) for cells in chosen])
    trials = np.moveaxis(np.broadcast_to(done[:, None], values[1:].shape), -1, 0)
    changes = np.where(done[:, None], values[1:] - values[:1], np.nan)
    value, change = (
        bootstrap_ratio(np.where(trials, np.moveaxis(part, -1, 0), 0), trials, seed=seed)
        for part in (values[1:], changes)
    )
    dims = ("condition", "metric")
    about = {"long_name": "change of the metric of each example"}
    return {
        **interval_variables("value", value, dims, long_name="mean of the metric with the cut"),
        **interval_variables("change", change, dims, long_name="change of the metric by the cut"),
        "example_change": ((*dims, "example"), changes, about),
    }


def _cells_dataset(
    chosen: Mapping[str, Int64[np.ndarray, "example cut index"]], graphs: xr.Dataset
) -> xr.Dataset:
    index = np.stack(
        [
            np.pad(cells, ((0, 0), (0, 0), (0, 3 - cells.shape[2])), constant_values=-1)
            for cells in chosen.values()
        ]
    )
    dims = ("condition", "cut", "example")
    index = index.transpose(3, 0, 2, 1)
    result = xr.Dataset(
        {
            "cut_step": (dims, index[0], {"long_name": "step of the cut"}),
            "cut_pos": (dims, index[1], {"long_name": "column whose gate or reading is cut"}),
            "cut_key_pos": (dims, index[2], {"long_name": "column that is read, -1 for gates"}),
        },
        coords={"condition": list(chosen)},
        attrs=graphs.attrs,
    )
    result["condition"].attrs["long_name"] = "what is cut"
    return result


def _firing_of_each_step(model: HookedModel, inputs: Inputs, pattern: str) -> list[Firing]:
    """The firings of the hooks, in order: one of each hook, or those of a hook that all share."""
    return firings(model, take_rows(inputs, slice(1)), [pattern])


def _check_answers(answers: Tensor, rows: slice) -> Tensor:
    checked = check_answer(answers, rows.stop - rows.start)
    if checked.ndim != 1:
        raise ValueError(f"answer must return one number per example, got {tuple(checked.shape)}")
    return checked


def _check_arguments(
    fired: Mapping[str, Sequence[Firing]],
    inputs: Inputs,
    graphs: xr.Dataset,
    answers: tuple[Callable[[Any], Tensor] | None, Tensor | None],
    metrics: Mapping[str, Metric],
    sizes: tuple[int, int],
) -> None:
    examples, steps = graphs.sizes["example"], graphs.sizes["step"]
    for name, firings_of_hook in fired.items():
        if len(firings_of_hook) != steps:
            names = [hook for hook, _ in firings_of_hook]
            raise ValueError(
                f"{name} must match one hook per step, {steps} in the graphs, or one that fires in "
                f"each, got {len(names)}: {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}"
            )
    if count_examples("inputs", inputs) != examples:
        raise ValueError(
            f"inputs must have the {examples} examples of the graphs, "
            f"got {count_examples('inputs', inputs)}"
        )
    answer, targets = answers
    check_scored({"answer": answer, "targets": targets}, metrics)
    if targets is not None and targets.shape != (examples,):
        raise ValueError(f"targets must have the shape ({examples},), got {tuple(targets.shape)}")
    if targets is not None:
        check_integers("targets", targets)
    if min(sizes) < 1:
        raise ValueError(f"cuts and batch_size must be at least 1, got {sizes[0]} and {sizes[1]}")
