"""Measures of models with columns on expressions: control flow, heads, timing, drawn examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import xarray as xr
from torch import nn

import probes
import tasks
from studies import engine
from studies.setups.expressions import (
    GATED,
    N_PAPERS_ARGUMENTS,
    PAPERS_LISTOPS,
    ROUTERS,
    ExpressionSetup,
)
from tasks import Batch, ListOpsConfig, TableLookupConfig

NODES = {"gate": (0.1, 0.2), "change": 0.2}
"""Criteria for a node of the graph, with thresholds (see `probes.extract_control_flow`).

`gate`: the gate's mean over channels (many of which stay closed) exceeds 0.2, until it falls below
0.1; untrained gates are at 0.05. `change`: the relative change of the state exceeds the threshold.
"""

LEAST_READ = 0.5
"""The smallest attention weight of a read; a head of geometric attention rarely has two such keys.
"""

CHANGES, READS = (0.05, 0.1, 0.2, 0.4), (0.1, 0.25, 0.5, 0.75)
"""Thresholds of nodes and of reads, around those of the graphs."""


def control_flow(trained: engine.Trained, n: int = 1000) -> xr.Dataset | None:
    """Whether graphs of columns and attention match the dataflow, and whether answers need them.

    Of models without gates, a node is a change of a column's state, and a cut keeps the state.

    Args:
        trained: the trained model and its untrained control.
        n: number of examples, spread over all depths.
    """
    setup = trained.setup
    if setup.model not in ROUTERS:
        return None
    is_gated = setup.model in GATED
    batch, truth = examples_with_truth(trained, n)
    return probes.examine_control_flow(
        trained.model,
        batch.inputs,
        truth,
        untrained=trained.untrained,
        answer=most_probable,
        thresholds=NODES if is_gated else {"change": NODES["change"]},
        gates="blocks.*.hook_gate" if is_gated else None,
        attention_threshold=LEAST_READ,
        routes=_routes(setup),
        seed=trained.seed,
        batch_size=setup.evaluation_batch_size,
    )


def sensitivity(trained: engine.Trained, n: int = 200) -> xr.Dataset | None:
    """How well graphs of changes match the dataflow at other thresholds of nodes and of reads.

    Args:
        trained: the trained model.
        n: number of examples, spread over all depths.
    """
    setup = trained.setup
    if setup.model not in ROUTERS:
        return None
    batch, truth = examples_with_truth(trained, n)
    columns = columns_of(setup, trained.model, batch)
    return probes.sweep_thresholds(
        columns["change"],
        columns["attention"],
        truth["valid"],
        truth,
        gate_thresholds=CHANGES,
        attention_thresholds=READS,
        routes=_routes(setup),
        resamples=100,
        seed=trained.seed,
    )


def heads(trained: engine.Trained, n: int = 200) -> xr.Dataset | None:
    """Which heads join arguments and operations, copy results, or read the answer.

    Args:
        trained: the trained model and its untrained control.
        n: number of examples, spread over all depths.
    """
    setup = trained.setup
    if setup.model not in ROUTERS:
        return None
    batch, truth = examples_with_truth(trained, n)
    attention, untrained = (
        columns_of(setup, model, batch)["attention"] for model in (trained.model, trained.untrained)
    )
    return probes.score_heads(attention, truth, untrained=untrained, seed=trained.seed)


def timing(trained: engine.Trained, n: int = 1000) -> xr.Dataset | None:
    """The step at which operations are done, by depth and by length, in right answers.

    Args:
        trained: the trained model and its untrained control.
        n: number of examples, spread over all depths.
    """
    setup = trained.setup
    if setup.model not in ROUTERS:
        return None
    batch, truth = examples_with_truth(trained, n)
    results = {}
    for control, model in (("trained", trained.model), ("untrained", trained.untrained)):
        columns = columns_of(setup, model, batch, with_attention=False)
        is_used = (columns["answer"] == truth["target"]) | (control == "untrained")
        change = columns["change"].where(is_used, 0.0)
        results[control] = probes.score_timing(change >= NODES["change"], truth)
    return _by_control(results)


def reads(trained: engine.Trained, n: int = 200) -> xr.Dataset | None:
    """Where columns read, by habit or by content, how sharply, and until which step.

    Args:
        trained: the trained model and its untrained control.
        n: number of examples, spread over all depths.
    """
    setup = trained.setup
    if setup.model not in ROUTERS:
        return None
    batch, truth = examples_with_truth(trained, n)
    results = {}
    for control, model in (("trained", trained.model), ("untrained", trained.untrained)):
        columns = columns_of(setup, model, batch)
        results[control] = probes.score_reads(
            columns["attention"],
            columns["change"] >= NODES["change"],
            truth,
            sharp=LEAST_READ,
            seed=trained.seed,
        )
    return _by_control(results)


def drawn(trained: engine.Trained, n: int = 2) -> xr.Dataset | None:
    """Attention and gates of a few examples, of which maps and graphs are drawn and exported.

    `change`, `attention` and, with gates, `gate`, see `probes.capture_control_flow`; `gates`
    [example, step, pos, channel], NaN without gates; and `tokens`, `target`, `answer`, `depth`
    [example].

    Args:
        trained: the trained model.
        n: examples of the largest depth in training, and of the largest of all.
    """
    setup, task = trained.setup, trained.task
    if setup.model not in ROUTERS:
        return None
    batch = drawn_examples(trained, n)
    data = columns_of(setup, trained.model, batch)
    if setup.model in GATED:
        every_gate = probes.Quantity("blocks.*.hook_gate", ("example", "pos", "channel"))
        gates = probes.capture(trained.model, [batch], {"gates": every_gate})
        data["gates"] = gates["gates"].rename(layer="step")
    else:
        # The cells of a result are joined along all dims, so none may lack one.
        data["gates"] = data["change"].expand_dims(channel=1, axis=-1) * float("nan")
    data["gates"].attrs["long_name"] = "gates"
    words = [f"BOS {' '.join(task.words(batch, i))} EOS" for i in range(len(batch))]
    texts = {
        "tokens": ("tokens of the columns", words),
        "target": ("right answer", [task.answers[i] for i in batch.targets[:, 0]]),
        "answer": ("the model's answer", [task.answers[i] for i in data["answer"].to_numpy()]),
        "depth": ("depth of the expression", batch.latents["depth"].cpu().numpy()),
    }
    # Three digits take little room when compressed.
    kept = data.drop_vars("answer").round(3)
    for dim in ("example", "head", "channel"):
        kept = kept.assign_coords({dim: (dim, range(kept.sizes[dim]), {"long_name": dim})})
    return kept.assign({k: ("example", v, {"long_name": a}) for k, (a, v) in texts.items()})


def _routes(setup: ExpressionSetup) -> int | None:
    """How many columns an edge of a graph may pass through, see `probes.score_control_flow`."""
    return None if isinstance(setup.task, TableLookupConfig) else 1


def _by_control(results: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """The same measure of the trained model and of its control, [control, ...]."""
    dim = xr.Variable("control", list(results), {"long_name": "which model"})
    joined: Any = xr.concat(list(results.values()), dim, join="outer")
    return joined


def examples_of_all_depths(trained: engine.Trained, n: int) -> Batch:
    """About `n` examples of all splits, with about equally many of each depth."""
    parts = [trained.batch(split, n) for split in trained.setup.splits]
    return tasks.spread_over_depths(parts, n)


def examples_with_truth(trained: engine.Trained, n: int) -> tuple[Batch, xr.Dataset]:
    """`examples_of_all_depths`, and the true dataflow between their columns."""
    batch = examples_of_all_depths(trained, n)
    return batch, tasks.column_dataflow(batch, readout=trained.setup.readout)


def drawn_examples(trained: engine.Trained, n: int) -> Batch:
    """`n` examples each of the largest depth in training and of all; and the paper's own one.

    The last only where its five arguments and its length are those of training.
    """
    task = trained.setup.task
    batch = examples_of_all_depths(trained, n * task.ood_depths[1])
    depths = torch.tensor([task.train_depth, task.ood_depths[1]], device=batch.inputs.device)
    parts = [batch[torch.isin(batch.latents["depth"], depths)]]
    if (
        isinstance(task, ListOpsConfig)
        and task.max_arguments >= N_PAPERS_ARGUMENTS
        and task.max_length >= len(PAPERS_LISTOPS.split())
    ):
        parts.append(trained.task.examples_of([PAPERS_LISTOPS]).to(trained.device))
    return tasks.spread_over_depths(parts, sum(map(len, parts)) * task.ood_depths[1])


def columns_of(
    setup: ExpressionSetup, model: nn.Module, batch: Batch, *, with_attention: bool = True
) -> xr.Dataset:
    """Changes and attention of all columns, and gates of models with gates, at every step.

    Args:
        setup: the settings of the model.
        model: a model of `ROUTERS`.
        batch: the examples.
        with_attention: whether attention is kept, which takes much memory.
    """
    return probes.capture_control_flow(
        cast(Any, model),
        batch.parts(setup.evaluation_batch_size),
        answer=most_probable,
        gates="blocks.*.hook_gate" if setup.model in GATED else None,
        attention="blocks.*.attn.hook_pattern" if with_attention else None,
    )


def most_probable(logits: Any) -> Any:
    """The most probable answer of each example: [example]."""
    return logits[:, 0].argmax(-1)
