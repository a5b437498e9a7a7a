"""How much the scores of control-flow graphs depend on the thresholds that define the graphs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from probes.checking import checked
from probes.control_flow.graphs import NO_HEAD, extract_control_flow
from probes.control_flow.scores import score_control_flow
from probes.progress import progress

_SCORES = ("score", "above_chance", "above_habit")


@checked
def sweep_thresholds(
    gates: xr.DataArray,
    attention: xr.DataArray,
    valid: xr.DataArray,
    truth: xr.Dataset,
    *,
    gate_thresholds: Sequence[float],
    attention_thresholds: Sequence[float],
    routes: int | None = None,
    permutations: int = 5,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Score control-flow graphs at every pair of thresholds.

    A score at one pair of thresholds may be the best of many. The maximum of the result over
    thresholds, chosen on the examples on which it is reported, is optimistic.

    Args:
        gates: what defines nodes, [example, step, pos] in 0..1: `gate` or `change` of
            `capture_control_flow`.
        attention: [example, step, head, query_pos, key_pos].
        valid: [example, pos] bool.
        truth: see `score_control_flow`.
        gate_thresholds: see `gate_threshold` of `extract_control_flow`; numbers in (0, 1].
        attention_thresholds: smallest attention weights of a read, above 0.
        routes, permutations, resamples, seed: see `score_control_flow`.

    Returns:
        Coordinates `gate_threshold` and `attention_threshold`.

        - `score`, `above_chance`, `above_habit` [gate_threshold, attention_threshold, ...] with
          their intervals (`_low`, `_high`), as in `score_control_flow`.
        - `nodes` and `reads` [gate_threshold, attention_threshold]: update nodes, and edges that
          are no copies, of an example, on average.

    Raises:
        ValueError: there is no threshold, one is out of range, or as in `extract_control_flow` and
            `score_control_flow`.

    Example:
        >>> columns = capture_control_flow(model, batches, answer=answer)
        >>> sweep_thresholds(
        ...     columns["change"],
        ...     columns["attention"],
        ...     truth["valid"],
        ...     truth,
        ...     gate_thresholds=[0.1, 0.2, 0.4],
        ...     attention_thresholds=[0.1, 0.3, 0.5],
        ... )["score"].sel(metric="f1")
    """
    if not gate_thresholds or not attention_thresholds:
        raise ValueError(
            "gate_thresholds and attention_thresholds must name at least one threshold each, got "
            f"{list(gate_thresholds)} and {list(attention_thresholds)}"
        )

    def score_at(gate_threshold: float, attention_threshold: float) -> xr.Dataset:
        graphs = extract_control_flow(
            gates,
            attention,
            valid,
            gate_threshold=gate_threshold,
            attention_threshold=attention_threshold,
        )
        options: Any = {"permutations": permutations, "resamples": resamples, "seed": seed}
        scores = score_control_flow(graphs, truth, routes=routes, **options)
        counts = {
            "nodes": (int(graphs["update"].sum()), "update nodes of an example"),
            "reads": (int((graphs["head"] != NO_HEAD).sum()), "edges of an example, no copies"),
        }
        kept = scores[[f"{name}{end}" for name in _SCORES for end in ("", "_low", "_high")]]
        return kept.assign(
            {
                name: ((), count / graphs.sizes["example"], {"long_name": f"{about}, mean"})
                for name, (count, about) in counts.items()
            }
        )

    along_reads, along_nodes = (
        xr.Variable(name, np.array(values, float), {"long_name": about})
        for name, values, about in (
            ("attention_threshold", attention_thresholds, "smallest attention weight of a read"),
            ("gate_threshold", gate_thresholds, "smallest gate of a node"),
        )
    )
    rows = [
        xr.concat([score_at(gate, weight) for weight in attention_thresholds], along_reads)
        for gate in progress(gate_thresholds, "thresholds")
    ]
    result: Any = xr.concat(rows, along_nodes)
    return result
