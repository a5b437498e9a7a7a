"""The whole question about a router's control flow: is what is drawn true, and does it compute?"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import xarray as xr
from torch import Tensor

from probes.capturing.hooking import HookedModel
from probes.capturing.inputs import Inputs, slices, take_examples
from probes.control_flow.capture import capture_control_flow
from probes.control_flow.cutting import cut
from probes.control_flow.graphs import extract_control_flow
from probes.control_flow.matching import match_control_flow
from probes.control_flow.scores import score_control_flow
from probes.control_flow.updates import GateThreshold

_CUTS = {"one step": False, "lasting": True}


def examine_control_flow(
    model: HookedModel,
    inputs: Inputs,
    truth: xr.Dataset,
    *,
    untrained: HookedModel,
    answer: Callable[[Any], Tensor],
    thresholds: Mapping[str, GateThreshold],
    attention_threshold: float = 0.1,
    routes: int | None = None,
    seed: int = 0,
    batch_size: int = 256,
) -> xr.Dataset:
    """Make graphs of gates and of changes, score them with all controls, and cut them.

    In turn `capture_control_flow`, `extract_control_flow`, `score_control_flow` beside
    `match_control_flow` of an untrained model, and `cut`, for one step and lasting.

    Args:
        model: whose blocks have `hook_gate`, `hook_resid_pre`, `hook_resid_post` and
            `attn.hook_pattern`.
        inputs: what it is called with.
        truth: of `score_control_flow`, with `depth`, `target` [example], the right answers,
            `readout`, and `valid` [example, pos].
        untrained: the same model with random weights.
        answer: from the model's output to the answers, integers [example].
        thresholds: by what makes a node, "gate" or "change", from which value on it is one: the
            `gate_threshold` of `extract_control_flow`.
        attention_threshold: least weight of a read.
        routes: see `score_control_flow`.
        seed: of permutations, bootstrap and cuts.
        batch_size: examples per forward pass.

    Returns:
        Coordinate `nodes`: what makes a node.

        - of `score_control_flow` by depth and `correct` (whether the answer is right), without
          what is of single examples: `score` [nodes, control, depth, correct, metric], ...
        - of `cut`: `rate, rate_low, rate_high, trials` [nodes, cut, condition, outcome], where
          `cut` is "one step" or "lasting".

    Raises:
        KeyError: an unknown hook, or `truth` lacks a variable.
        TypeError, ValueError: as these functions.

    Example:
        ::

            examine_control_flow(
                model,
                batch.inputs,
                tasks.column_dataflow(batch),
                untrained=initial_model,
                answer=lambda logits: logits[:, 0].argmax(-1),
                thresholds={"gate": (0.1, 0.2), "change": 0.2},
            )
    """
    examples = [
        _Examples(take_examples(inputs, part))
        for part in slices(truth.sizes["example"], batch_size)
    ]
    columns = capture_control_flow(model, examples, answer=answer)
    control = capture_control_flow(untrained, examples, answer=answer)
    valid, target = truth["valid"], truth["target"].to_numpy()
    right = columns["answer"].to_numpy() == target
    known = truth.assign(correct=("example", right))
    found = []
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
            known,
            untrained=match_control_flow(graphs, control[nodes], control["attention"], valid),
            by=("depth", "correct"),
            routes=routes,
            seed=seed,
        )
        rates = [
            cut(
                model,
                inputs,
                graphs,
                readout=truth["readout"],
                gates="blocks.*.hook_gate",
                attention="blocks.*.attn.hook_pattern",
                answer=answer,
                targets=torch.from_numpy(target),
                lasting=lasting,
                seed=seed,
                batch_size=batch_size,
            )[["rate", "rate_low", "rate_high", "trials"]]
            for lasting in _CUTS.values()
        ]
        cuts = xr.concat(rates, xr.Variable("cut", list(_CUTS), {"long_name": "how long"}))
        both = [scores.drop_dims("example"), cuts]
        found.append(xr.merge(both, combine_attrs="override"))
    about = {"long_name": "what makes a node"}
    dim = xr.Variable("nodes", list(thresholds), about)
    whole: Any = xr.concat(found, dim, combine_attrs="drop_conflicts")
    return whole


@dataclass(frozen=True)
class _Examples:
    inputs: Inputs
    latents: dict[str, Tensor] = field(default_factory=dict)
