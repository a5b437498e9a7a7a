"""Control-flow analysis of a model: capture, graphs, scores with controls, and interventions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import xarray as xr
from torch import Tensor

from probes.capturing.hooking import HookedModel
from probes.capturing.inputs import Inputs, slices, take_rows
from probes.checking import checked
from probes.control_flow.capture import capture_control_flow
from probes.control_flow.cutting import cut
from probes.control_flow.graphs import extract_control_flow
from probes.control_flow.matching import match_control_flow
from probes.control_flow.scores import score_control_flow
from probes.control_flow.updates import GateThreshold

_CUTS: dict[str, dict[str, Any]] = {
    "one step": {},
    "lasting": {"lasting": True},
    "lasting, matched": {"lasting": True, "matched": True},
}


@checked
def examine_control_flow(
    model: HookedModel,
    inputs: Inputs,
    truth: xr.Dataset,
    *,
    untrained: HookedModel,
    answer: Callable[[Any], Tensor],
    thresholds: Mapping[str, GateThreshold],
    gates: str | None = "blocks.*.hook_gate",
    attention: str = "blocks.*.attn.hook_pattern",
    before: str = "blocks.*.hook_resid_pre",
    after: str = "blocks.*.hook_resid_post",
    attention_threshold: float = 0.1,
    routes: int | None = None,
    seed: int = 0,
    batch_size: int = 256,
) -> xr.Dataset:
    """Extract control-flow graphs from gates and state changes, score them, and cut them.

    Applies `capture_control_flow`, `extract_control_flow`, `score_control_flow` with
    `match_control_flow` of an untrained model, and `cut` (one step; lasting; lasting with matched
    controls).

    Args:
        model: an eager HookedRootModule or TransformerBridge, such as any looped transformer.
        inputs: inputs of the model.
        truth: `truth` of `score_control_flow`, with `depth` and `target` (the correct answers)
            [example], `readout`, and `valid` [example, pos].
        untrained: the same model with random weights.
        answer: maps the model's output to answers, integers [example].
        thresholds: `gate_threshold` of `extract_control_flow` by quantity that defines nodes,
            "gate" or "change".
        gates, attention, before, after: hooks of gates, attention and column states, see
            `capture_control_flow`. With `gates=None`, for models without gates, nodes are defined
            by "change" alone, and a column that is cut keeps its state.
        attention_threshold: smallest attention weight of a read.
        routes: see `score_control_flow`.
        seed: seed of permutations, bootstrap and cuts.
        batch_size: examples per forward pass.

    Returns:
        Coordinate `nodes`: the quantity that defines nodes.

        - of `score_control_flow` by depth and `correct` (the answer is correct), without variables
          of single examples: `score` [nodes, control, depth, correct, metric], ...
        - of `cut`: `rate, rate_low, rate_high, trials` [nodes, cut, condition, outcome], where
          `cut` is "one step", "lasting" or "lasting, matched"; and `reads` [nodes, cut, condition],
          how many nodes read the columns that were cut, on average.

    Raises:
        KeyError: an unknown hook, or `truth` lacks a variable.
        TypeError, ValueError: as in these functions; or nodes are defined by the gates of a model
            without.

    Example:
        >>> examine_control_flow(
        ...     model,
        ...     batch.inputs,
        ...     tasks.column_dataflow(batch),
        ...     untrained=initial_model,
        ...     answer=lambda logits: logits[:, 0].argmax(-1),
        ...     thresholds={"gate": (0.1, 0.2), "change": 0.2},
        ... )
    """
    quantities = ("change",) if gates is None else ("gate", "change")
    if not thresholds or not {*thresholds} <= {*quantities}:
        raise ValueError(
            f"thresholds must be of {' or '.join(quantities)} with gates={gates!r}, "
            f"got {list(thresholds)}"
        )
    examples = [
        _Examples(take_rows(inputs, rows)) for rows in slices(truth.sizes["example"], batch_size)
    ]
    columns, control = (
        capture_control_flow(
            each,
            examples,
            answer=answer,
            gates=gates,
            attention=attention,
            before=before,
            after=after,
        )
        for each in (model, untrained)
    )
    valid, target = truth["valid"], truth["target"].to_numpy()
    correct = columns["answer"].to_numpy() == target
    labelled_truth = truth.assign(correct=("example", correct))
    results = []
    for nodes, threshold in thresholds.items():
        graphs = extract_control_flow(
            columns[nodes],
            columns["attention"],
            valid,
            gate_threshold=threshold,
            attention_threshold=attention_threshold,
        )
        scores = score_control_flow(
            graphs,
            labelled_truth,
            untrained=match_control_flow(graphs, control[nodes], control["attention"], valid),
            by=("depth", "correct"),
            routes=routes,
            seed=seed,
        )
        rates = []
        for options in _CUTS.values():
            found = cut(
                model,
                inputs,
                graphs,
                readout=truth["readout"],
                gates=(before, after) if gates is None else gates,
                attention=attention,
                answer=answer,
                targets=torch.from_numpy(target),
                seed=seed,
                batch_size=batch_size,
                **options,
            )
            times_read = found["cut_reads"].where(found["cut_reads"] >= 0)
            found["reads"] = times_read.mean(["cut", "example"], keep_attrs=True)
            rates.append(found[["rate", "rate_low", "rate_high", "trials", "reads"]])
        cuts = xr.concat(rates, xr.Variable("cut", list(_CUTS), {"long_name": "how long"}))
        parts = [scores.drop_dims("example"), cuts]
        results.append(xr.merge(parts, combine_attrs="override"))
    attrs = {"long_name": "what makes a node"}
    nodes_dim = xr.Variable("nodes", list(thresholds), attrs)
    joined: Any = xr.concat(results, nodes_dim, combine_attrs="drop_conflicts")
    return joined


@dataclass(frozen=True)
class _Examples:
    inputs: Inputs
    latents: dict[str, Tensor] = field(default_factory=dict)
