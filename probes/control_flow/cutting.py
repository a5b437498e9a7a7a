"""Is the drawn control flow the one that computes? Close gates and cut attention, on it and off."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Int, Int64
from torch import Tensor

from probes.capturing.hooking import HookedModel, check_model, evaluating, resolve_hooks
from probes.capturing.inputs import (
    Inputs,
    call,
    check_answer,
    count_examples,
    slices,
    take_examples,
)
from probes.control_flow.graphs import NO_HEAD, column_numbers, newest_update
from probes.statistics.intervals import exact_rates, interval_variables

NODE_CONDITIONS = ("node on the path", "node off the path", "no node")
EDGE_CONDITIONS = ("edge on the path", "edge off the path", "no edge")
OUTCOMES = ("changed", "broken")


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
    """Set random gates, or attention weights, to zero and see whether the answer changes.

    A graph is a claim about causes: what is not an ancestor of the read-out column's last node
    has no way to the answer. "On the path" are that node, its ancestors, and the reads by them.
    So closing a gate on the path should change the answer, and one off the path should not. Cells
    outside the graph are the plain control; their gates and weights are small already, so that a
    low rate there says little. Conditions, each a forward pass of its own in which `cuts` random
    cells per example are set to zero together:

    - "node on the path", "node off the path": the gate of an update node, at that step and column.
    - "no node": the gate of a valid column at a step where it does not update.
    - "edge on the path", "edge off the path": the attention from the reading to the read column at
      the reading step, in all heads.
    - "no edge": the attention of an update node on the path to a valid other column that it does
      not read.

    A network that computes a column again and again recovers from one closed gate. With `lasting`
    a cut holds from its step to the last one, and what would reach a later node on the path is
    not taken for a control: nodes off the path and cells without a node then lie behind the last
    node on the path of their column, edges off the path behind that of the reading column, and
    what is not read is not read later on the path either.

    Args:
        model: an eager HookedRootModule or TransformerBridge, that runs as many steps as the
            graphs have.
        inputs: what the model is called with, the examples of the graphs in their order.
        graphs: of `extract_control_flow`, made of the same hooks.
        readout: [example] int, the column that the answer is read from.
        gates: glob of the gates' hooks, one per step (`blocks.*.hook_gate`), each
            [batch, pos, d] (d may be 1; all are closed).
        attention: glob of the attention's hooks, one per step (`blocks.*.attn.hook_pattern`),
            each [batch, head, query_pos, key_pos].
        answer: from the model's output to the answers, integers [batch].
        targets: the right answers.
        cuts: cells per example and condition. An example that has fewer is left out there.
        lasting: whether a cut holds until the last step.
        seed: of the choice.
        batch_size: examples per forward pass; the choice does not depend on it.

    Returns:
        Coordinates `condition`, `outcome`: "changed" (the answer is another one than without the
        cut) and "broken" (it was right and is now wrong).

        - `hit` [condition, outcome, example] int8: 0 or 1; -1 where the example has too few such
          cells, or, for "broken", was wrong without the cut.
        - `rate, rate_low, rate_high` [condition, outcome]: the share of hits among the others and
          its exact 95% interval (Clopper-Pearson); NaN without examples. `trials` their number.
        - `right` [example]: the answer without a cut is right.
        - `cut_step`, `cut_pos`, `cut_key_pos` [condition, cut, example]: what was cut, -1 where
          nothing was, and for `cut_key_pos` where a gate was.

    Raises:
        KeyError: an unknown hook; the message lists the nearest.
        TypeError: a model that cannot be hooked, answers that are not integers.
        ValueError: a compiled model, sizes that do not fit, read-out columns that are not valid,
            numbers out of range.
        RuntimeError: a hook did not fire exactly once in a forward pass.
    """
    check_model(model)
    hooks = {"gates": resolve_hooks(model, gates), "attention": resolve_hooks(model, attention)}
    _check_arguments(hooks, inputs, graphs, targets, cuts, batch_size)
    column = column_numbers("readout", readout, graphs["valid"].to_numpy())
    network = _Graph.of(graphs, column)
    generators = {
        condition: np.random.default_rng([seed, number])
        for number, condition in enumerate((*NODE_CONDITIONS, *EDGE_CONDITIONS))
    }
    places: dict[str, list[np.ndarray]] = {condition: [] for condition in generators}
    answers: dict[str, list[Tensor]] = {condition: [] for condition in generators}
    plain: list[Tensor] = []
    with evaluating(model):
        for part in slices(len(targets), batch_size):
            batch = take_examples(inputs, part)
            size = part.stop - part.start
            check = partial(_check_answers, examples=size)
            plain.append(check(answer(call(model, batch))))
            for condition, generator in generators.items():
                cells = network.cells(condition, part, lasting=lasting)
                chosen = _choose(cells, cuts, generator)
                kind = "gates" if condition in NODE_CONDITIONS else "attention"
                closed = _closed(chosen, cells.shape[1:], lasting=lasting)
                output = _run_cut(model, batch, hooks[kind], closed)
                answers[condition].append(check(answer(output)))
                places[condition].append(chosen)
    unpatched = torch.cat(plain).numpy()
    right = unpatched == targets.cpu().numpy()
    chosen = {condition: np.concatenate(parts) for condition, parts in places.items()}
    hits = np.stack(
        [
            _hits(torch.cat(answers[condition]).numpy(), unpatched, right, chosen[condition])
            for condition in generators
        ]
    )
    return _dataset(hits, right, chosen, graphs, lasting=lasting, seed=seed)


@dataclass(frozen=True)
class _Graph:
    """The graphs as masks.

    Attributes:
        update: the column updates at the step.
        on_path: the update node is the read-out column's last, or an ancestor of it.
        valid: the column is real.
        reads: example, step, target and source column of each read, without its head.
    """

    update: Bool[np.ndarray, "example step pos"]
    on_path: Bool[np.ndarray, "example step pos"]
    valid: Bool[np.ndarray, "example pos"]
    reads: Int[np.ndarray, "index edge"]

    @classmethod
    def of(cls, graphs: xr.Dataset, readout: Int[np.ndarray, " example"]) -> "_Graph":
        table = ("edge_example", "target_step", "target_pos", "source_pos")
        read = graphs["head"].to_numpy() != NO_HEAD
        return cls(
            graphs["update"].to_numpy(),
            _ancestors(graphs, readout),
            graphs["valid"].to_numpy(),
            np.stack([graphs[name].to_numpy()[read] for name in table]),
        )

    def cells(
        self, condition: str, part: slice, *, lasting: bool
    ) -> Bool[np.ndarray, "example step ..."]:
        """What a condition may cut: [example, step, pos], or for edges [..., query, key]."""
        update, on_path, valid = self.update[part], self.on_path[part], self.valid[part]
        # Where a control may lie: a lasting cut must not reach a node on the path.
        free = np.ones_like(on_path)
        if lasting:
            free = ~np.logical_or.accumulate(on_path[:, ::-1], axis=1)[:, ::-1]
        if condition == "node on the path":
            return on_path
        if condition == "node off the path":
            return update & ~on_path & free
        if condition == "no node":
            return ~update & valid[:, None] & free
        example, step, target, source = self.reads
        inside = (example >= part.start) & (example < part.stop)
        reads = np.zeros((*update.shape, update.shape[2]), dtype=bool)
        reads[example[inside] - part.start, step[inside], target[inside], source[inside]] = True
        if condition == "edge on the path":
            return reads & on_path[..., None]
        if condition == "edge off the path":
            return reads & ~on_path[..., None] & free[..., None]
        others = valid[:, None, None, :] & ~np.eye(update.shape[2], dtype=bool)
        if lasting:
            # A column that is not read now may be read at a later step, by a node on the path.
            read_on_path = reads & on_path[..., None]
            reads = np.logical_or.accumulate(read_on_path[:, ::-1], axis=1)[:, ::-1] | reads
        return on_path[..., None] & others & ~reads


def _ancestors(
    graphs: xr.Dataset, readout: Int[np.ndarray, " example"]
) -> Bool[np.ndarray, "example step pos"]:
    """Which update nodes lead to the read-out column's last node, with that node."""
    update = graphs["update"].to_numpy()
    examples, steps, width = update.shape
    rows = np.arange(examples)
    # A place for the input (step -1) in front, so that an edge from there needs no exception.
    reached = np.zeros((examples, steps + 1, width), dtype=bool)
    reached[rows, newest_update(update)[rows, -1, readout] + 1, readout] = True
    example, target_step, target, source_step, source = (
        graphs[name].to_numpy()
        for name in ("edge_example", "target_step", "target_pos", "source_step", "source_pos")
    )
    for step in reversed(range(steps)):
        here = np.flatnonzero(target_step == step)
        here = here[reached[example[here], step + 1, target[here]]]
        reached[example[here], source_step[here] + 1, source[here]] = True
    return reached[:, 1:]


def _choose(
    cells: Bool[np.ndarray, "example step ..."], cuts: int, generator: np.random.Generator
) -> Int64[np.ndarray, "example cut index"]:
    """Random cells of each example, as (step, pos) or (step, query, key); -1 where too few."""
    flat = cells.reshape(len(cells), -1)
    keys = np.where(flat, generator.random(flat.shape), -1)
    if flat.shape[1] < cuts:
        return np.full((len(cells), cuts, cells.ndim - 1), -1)
    best = np.argpartition(keys, -cuts, axis=1)[:, -cuts:]
    index = np.stack(np.unravel_index(best, cells.shape[1:]), axis=-1)
    index[flat.sum(axis=1) < cuts] = -1
    return index


def _closed(
    chosen: Int64[np.ndarray, "example cut index"], shape: tuple[int, ...], *, lasting: bool
) -> Bool[Tensor, "example step ..."]:
    """Where the activations are set to zero: at the chosen entries, or from their step on."""
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
    """One forward pass with these entries of each step's activation set to zero."""
    fired: list[str] = []

    def closer(name: str, step: int) -> Callable[..., Tensor]:
        def hook_function(activation: Tensor, hook: Any) -> Tensor:
            fired.append(name)
            entries = closed[:, step].to(activation.device)
            # A gate is [batch, pos, d], closed for all d; a pattern [batch, head, query, key].
            entries = entries[..., None] if entries.ndim == 2 else entries[:, None]
            fits = activation.ndim == entries.ndim and all(
                size == 1 or size == whole
                for size, whole in zip(entries.shape, activation.shape, strict=True)
            )
            if not fits:
                raise ValueError(
                    f"the activation at {name!r} must broadcast to "
                    f"{tuple(entries.shape)} (1 stands for features or heads), as the graphs say, "
                    f"got {tuple(activation.shape)}"
                )
            return activation.masked_fill(entries, 0)

        return hook_function

    with model.hooks(fwd_hooks=[(name, closer(name, step)) for step, name in enumerate(hooks)]):
        output = call(model, inputs)
    if sorted(fired) != sorted(hooks):
        raise RuntimeError(f"hooks {list(hooks)} must fire once each in a pass, fired: {fired}")
    return output


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
    pairs = ("condition", "outcome")
    about = "share of examples whose answer changes"
    index = np.stack(
        [
            np.pad(c, ((0, 0), (0, 0), (0, 3 - c.shape[2])), constant_values=-1)
            for c in chosen.values()
        ]
    )
    cells = ("condition", "cut", "example")
    index = index.transpose(3, 0, 2, 1)
    result = xr.Dataset(
        {
            "hit": ((*pairs, "example"), hits, {"long_name": "the cut has the outcome"}),
            **interval_variables("rate", exact_rates(hits), pairs, long_name=about),
            "trials": (
                pairs,
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


def _check_answers(answered: Tensor, *, examples: int) -> Tensor:
    checked = check_answer(answered, examples)
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
                f"{name} must match one hook per step, {steps} in the graphs, got {len(matched)}: "
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
