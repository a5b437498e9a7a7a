"""Measures of the control-flow study: what a router's columns do, as a graph, and should do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
import xarray as xr
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import probes
from studies.engine import Trained
from studies.setups.expressions import GATED
from tasks import Batch, TableLookupConfig

NODES = {"gate": (0.1, 0.2), "change": 0.2}
"""What makes a node of the graph, with its threshold (see `probes.extract_control_flow`).

`gate`: the gate is open, averaged over channels, of which many stay closed: an update begins at
0.2 and lasts down to 0.1 (untrained gates are at 0.05). `change`: the state changes by this share,
|h' - h| / (|h'| + |h|). A gate that stays open while the update repeats what the column holds is a
node of the first kind, not of the second.
"""

LEAST_READ = 0.5
"""The smallest weight of a read: geometric attention gives it to one key of a head, hardly to two.
"""


def spread_over_depths(trained: Trained, n: int) -> Batch:
    """About `n` examples of all splits in one batch, about equally many of each depth."""
    parts = [trained.batch(split, n) for split in trained.setup.splits]

    def join(tensors: list[Tensor]) -> Tensor:
        if tensors[0].ndim == 1:
            return torch.cat(tensors)
        # Splits differ in their widths.
        padding = 0 if tensors[0].dtype == torch.bool else -1
        return pad_sequence([one for some in tensors for one in some], True, padding)

    latents = {name: join([part.latents[name] for part in parts]) for name in parts[0].latents}
    inputs, targets, mask = (
        join([getattr(part, name) for part in parts]) for name in ("inputs", "targets", "mask")
    )
    each = [(latents["depth"] == depth).nonzero()[:, 0] for depth in latents["depth"].unique()]
    chosen = torch.cat([places[: max(1, n // len(each))] for places in each])
    return Batch(inputs, targets, mask, latents)[cast(Any, chosen)]


def true_dataflow(batch: Batch, readout: Literal["first", "last"]) -> xr.Dataset:
    """The true computation over a model's columns, as `probes.score_control_flow` takes it.

    Column 0 is the mark before the first token, and that after the last one stands behind the
    sequence. The mark that is read out takes the root's value, one level later.
    """
    latents = {name: values.cpu().numpy() for name, values in batch.latents.items()}
    n, width = batch.inputs.shape
    rows, root, inner = np.arange(n), latents["root"] + 1, latents["edges"]
    end = latents["length"] + 1 if readout == "last" else np.zeros_like(root)
    last = np.stack([root, end], -1)[:, None]
    used = np.concatenate([latents["edge_used"], np.ones((n, 1), dtype=bool)], axis=1)

    level, group = (np.full((n, width + 2), -1) for _ in range(2))
    group[:, 1:-1] = latents["node"]
    example, node = np.nonzero(latents["node_token"] >= 0)
    level[example, latents["node_token"][example, node] + 1] = latents["node_depth"][example, node]
    level[rows, end] = level[rows, root] + 1
    group[rows, end] = latents["node"].max(1) + 1
    edges = np.concatenate([np.where(inner >= 0, inner + 1, -1), last], axis=1)
    return xr.Dataset(
        {
            "edges": (("example", "edge", "end"), edges),
            "used": (("example", "edge"), used),
            "level": (("example", "pos"), level),
            "group": (("example", "pos"), group),
            "readout": ("example", end),
            "root": ("example", root),
            "depth": ("example", latents["depth"]),
        }
    )


def capture_columns(model: Any, batch: Batch, at_once: int) -> xr.Dataset:
    """What the graphs are made of, and the answers.

    `gate`, `change` [example, step, pos]; `attention` [example, step, head, query_pos, key_pos];
    `valid` [example, pos]; `answer`, `correct` [example].
    """
    before = torch.empty(0)

    def remember(h: Tensor) -> Tensor:
        nonlocal before
        before = h
        return h.norm(dim=-1)

    def change(h: Tensor) -> Tensor:
        whole = h.norm(dim=-1) + before.norm(dim=-1)
        return (h - before).norm(dim=-1) / whole.clamp(min=1e-12)

    column, weights = ("example", "pos"), ("example", "head", "query_pos", "key_pos")
    about = "gate, averaged over channels", "share by which the step changes the state"
    quantities = {
        "gate": probes.Quantity("blocks.*.hook_gate", column, lambda g: g.mean(-1), about[0]),
        "norm": probes.Quantity("blocks.*.hook_resid_pre", column, remember),
        "change": probes.Quantity("blocks.*.hook_resid_post", column, change, about[1]),
        "attention": probes.Quantity("blocks.*.attn.hook_pattern", weights),
        "answer": probes.Quantity(None, ("example",), lambda logits: logits[:, 0].argmax(-1)),
    }
    data = probes.capture(model, batch.parts(at_once), quantities).rename(layer="step")
    last = batch.latents["length"].cpu().numpy() + 1
    valid = np.arange(data.sizes["pos"]) <= last[:, None]
    right = data["answer"].to_numpy() == batch.targets[:, 0].cpu().numpy()
    kept = data[["gate", "change", "attention", "answer"]]
    return kept.assign(valid=(column, valid), correct=("example", right))


def graphs_of(
    columns: xr.Dataset, nodes: str, *, as_dense_as: xr.Dataset | None = None
) -> xr.Dataset:
    """The graphs whose nodes are of this kind, one of `NODES`.

    Args:
        columns: see `capture_columns`.
        nodes: the kind.
        as_dense_as: graphs of a trained model, of the same examples. An untrained one's gates are
            nearly closed and its attention is spread: at the usual thresholds its graphs would be
            empty, and no control. They become the quantiles at which the same shares of cells are
            nodes, and of attention weights are read.
    """
    values, attention, valid = (columns[name] for name in (nodes, "attention", "valid"))
    threshold, least = NODES[nodes], LEAST_READ
    if as_dense_as is not None:
        update, real = as_dense_as["update"].to_numpy(), valid.to_numpy()
        cells = np.broadcast_to(real[:, None], values.shape)
        threshold = float(np.quantile(values.to_numpy()[cells], 1 - update[cells].mean()))
        pairs = real[:, :, None] & real[:, None, :] & ~np.eye(real.shape[1], dtype=bool)
        weights = attention.to_numpy()[np.broadcast_to(pairs[:, None, None], attention.shape)]
        candidates = update.sum() * columns.sizes["head"] * (real.sum(1).mean() - 1)
        reads = (as_dense_as["head"].to_numpy() >= 0).sum()
        least = float(np.quantile(weights, 1 - reads / max(candidates, 1)))
    return probes.extract_control_flow(
        values, attention, valid, gate_threshold=cast(Any, threshold), attention_threshold=least
    )


@dataclass(frozen=True)
class ControlFlow:
    """Whether graphs of gates and attention are the true dataflow, and whether they compute.

    Args:
        n: examples, spread over all depths.
    """

    n: int = 1000

    def __call__(self, trained: Trained) -> xr.Dataset | None:
        """`score` [nodes, control, depth, correct, metric], see `probes.score_control_flow`.

        Of the examples of a depth, with right or wrong answers, the means of `done` [nodes,
        control, depth, correct, step] and `operations` [nodes, depth, correct, level]. `rate`,
        `trials` [nodes, cut, condition, outcome], see `probes.cut`.
        """
        setup = trained.setup
        if setup.model not in GATED:
            return None
        batch = spread_over_depths(trained, self.n)
        columns, control = (
            capture_columns(model, batch, setup.at_once)
            for model in (trained.model, trained.untrained)
        )
        truth = true_dataflow(batch, setup.readout).assign(correct=columns["correct"])
        parts = []
        for nodes in NODES:
            graphs = graphs_of(columns, nodes)
            scored = probes.score_control_flow(
                graphs,
                truth,
                untrained=graphs_of(control, nodes, as_dense_as=graphs),
                by=("depth", "correct"),
                routes=None if isinstance(setup.task, TableLookupConfig) else 1,
                seed=trained.seed,
            )
            cuts = [
                probes.cut(
                    trained.model,
                    batch.inputs,
                    graphs,
                    readout=truth["readout"],
                    gates="blocks.*.hook_gate",
                    attention="blocks.*.attn.hook_pattern",
                    answer=lambda logits: logits[:, 0].argmax(-1),
                    targets=batch.targets[:, 0].cpu(),
                    lasting=lasting,
                    seed=trained.seed,
                )[["rate", "rate_low", "rate_high", "trials"]].assign_coords(cut=cut)
                for cut, lasting in (("one step", False), ("lasting", True))
            ]
            both = [means_by_depth(scored), xr.concat(cuts, "cut")]
            parts.append(xr.merge(both, combine_attrs="override").assign_coords(nodes=nodes))
        return cast(xr.Dataset, xr.concat(parts, "nodes", combine_attrs="drop_conflicts"))


def means_by_depth(scored: xr.Dataset) -> xr.Dataset:
    """Scores without those of single examples, whose series become means over their groups."""
    depth, correct = (
        (scored[f"example_{name}"].astype(str) == scored[name]) | (scored[name] == "all")
        for name in ("depth", "correct")
    )
    weight = (depth & correct).astype(float)
    weight /= weight.sum("example")
    found = scored.drop_dims("example")
    for name, of in (("done", "done_per_step"), ("operations", "operations_per_level")):
        found[name] = xr.dot(scored[of], weight, dim="example").assign_attrs(scored[of].attrs)
    return found


@dataclass(frozen=True)
class Drawn:
    """Gates and attention of some examples, of which graphs are drawn and exported.

    Args:
        n: examples of the deepest depth of training, and of each depth beyond.
    """

    n: int = 2

    def __call__(self, trained: Trained) -> xr.Dataset | None:
        """See `capture_columns`; and `tokens`, `target`, `answer`, `depth` [example]."""
        setup, task = trained.setup, trained.task
        if setup.model not in GATED:
            return None
        batch = spread_over_depths(trained, self.n * setup.task.ood_depths[1])
        batch = batch[cast(Any, batch.latents["depth"] >= setup.task.train_depth)]
        data = capture_columns(trained.model, batch, setup.at_once)
        tokens = [[task.vocabulary[i] for i in ids if i >= 0] for ids in batch.inputs.tolist()]
        texts = {
            "tokens": ("tokens of the columns", [f"BOS {' '.join(one)} EOS" for one in tokens]),
            "target": ("right answer", [task.answers[i] for i in batch.targets[:, 0].tolist()]),
            "answer": ("the model's answer", [task.answers[i] for i in data["answer"].to_numpy()]),
            "depth": ("depth of the expression", batch.latents["depth"].cpu().numpy()),
        }
        kept = data[["gate", "change", "attention"]].assign_coords(example=range(len(batch)))
        return kept.assign({k: ("example", v, {"long_name": a}) for k, (a, v) in texts.items()})
