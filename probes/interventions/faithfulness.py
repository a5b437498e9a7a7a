"""Faithfulness: how much of the clean run a circuit of the strongest edges recovers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import xarray as xr
from jaxtyping import Int
from torch import Tensor
from transformer_lens.tools.analysis.attribution_patching import Node, faithfulness

from probes.capturing.hooking import HookedModel, evaluating
from probes.checking import checked
from probes.interventions.answers import Metric
from probes.interventions.attribution import check_pairs, of_example, ranked_edges
from probes.progress import progress
from probes.statistics.intervals import bootstrap_ratio, interval_variables

_CIRCUITS = ("empty", "random", "strongest", "complete")
# Gaps of the metric, as a share of its value, that are no rounding errors.
_RESOLVED = 1e-6

_Circuit = Sequence[tuple[Node, Node]]


@checked
def measure_faithfulness(
    model: HookedModel,
    clean: Int[Tensor, "example pos"],
    corrupted: Int[Tensor, "example pos"],
    attribution: xr.Dataset,
    *,
    metric: Metric,
    sizes: Sequence[int] = (10, 100),
    draws: int = 5,
    resamples: int = 1000,
    seed: int = 0,
) -> xr.Dataset:
    """Measure how much of the clean metric circuits of the strongest and of random edges recover.

    In the clean run, all edges outside the circuit get the corrupted values, by
    `transformer_lens.tools.analysis.faithfulness`, pair by pair. Recovered is

        (metric of the circuit - corrupted metric) / (clean metric - corrupted metric),

    with sums over examples above and below, so that pairs with a small difference do not dominate.
    Where the interval of the gap (the mean of clean minus corrupted) contains 0, recovered means
    nothing: choose a metric that is larger in clean runs, such as a logit of the clean answer.

    The complete circuit recovers 1 and the empty one 0, if TransformerLens' edges account for all
    that the model computes. A random circuit of few edges seldom has a path from the embedding to
    the logits and recovers little; with more edges the control is stricter.

    It takes 2 + `sizes` * (1 + `draws`) calls for each pair, each up to a second for 1,000 edges.

    Args:
        model: the TransformerBridge of the attribution.
        clean: tokens [example, pos], with the positions of the attribution; preferably of other
            examples than those that the edges were ranked on.
        corrupted: the paired tokens, of the same shape.
        attribution: result of `attribute`.
        metric: function of the model's output and the examples (a slice) to floats [example]. It
            gets one example at a time.
        sizes: numbers of edges of the circuits.
        draws: number of random circuits of each size, drawn from all edges.
        resamples: number of bootstrap resamples.
        seed: seed of the random circuits and of the bootstrap.

    Returns:
        - `recovered, recovered_low, recovered_high` [circuit, size]: circuit "empty", "random" (the
          mean over draws), "strongest" or "complete"; 1 is all of the gap, below 0 and above 1 are
          possible; NaN without a gap.
        - `recovered_by_draw` [draw, size]: that of each random circuit.
        - `gap, gap_low, gap_high`: mean clean minus corrupted metric, in the unit of the metric.

        Intervals: percentile bootstrap 95% over examples. Attribute `without_gap`: number of pairs
        whose metrics are equal, which are left out.

    Raises:
        TypeError: the model is no TransformerBridge, or tokens are not integers.
        ValueError: tokens are not [example, pos] of the same shape, or not in the vocabulary; the
            attribution has no edges or other positions; a number is out of range; or the metric is
            not one finite number for each example.

    Example:
        >>> found = attribute(bridge, clean[:1], corrupted[:1], metric=metric)
        >>> measured = measure_faithfulness(
        ...     bridge, clean[1:], corrupted[1:], found, metric=metric, sizes=[2], draws=1
        ... )
        >>> measured["recovered"].sel(circuit="strongest").values.round(3)  # by two edges
        array([1.])
    """
    examples = check_pairs(model, clean, corrupted)
    ranked = ranked_edges(attribution, clean.shape[1])
    _check_numbers(sizes, draws, len(ranked))
    generator = np.random.default_rng(seed)
    circuits: list[_Circuit] = [[], ranked]
    for size in sizes:
        circuits.append(ranked[:size])
        for _ in range(draws):
            chosen = generator.choice(len(ranked), size, replace=False)
            circuits.append([ranked[i] for i in chosen])
    gains, gaps = np.zeros((examples, len(circuits))), np.zeros(examples)
    with evaluating(model):
        for i in progress(range(examples), "measure faithfulness"):
            pair, scalar = (clean[i : i + 1], corrupted[i : i + 1]), of_example(metric, i)
            values = [float(scalar(model(tokens))) for tokens in pair]
            if abs(values[0] - values[1]) <= _RESOLVED * max(map(abs, values)):
                continue
            for number, circuit in enumerate(circuits):
                result = faithfulness(model, *pair, scalar, circuit)
                gaps[i] = result.full_metric - result.corrupt_metric
                gains[i, number] = result.recovered * gaps[i]
    by_size = gains[:, 2:].reshape(examples, len(sizes), 1 + draws)
    empty, complete = (np.repeat(gains[:, i : i + 1], len(sizes), axis=1) for i in range(2))
    parts = np.stack([empty, by_size[..., 1:].mean(-1), by_size[..., 0], complete], axis=1)
    ratio = partial(bootstrap_ratio, resamples=resamples, seed=seed)
    by_draw = bootstrap_ratio(np.moveaxis(by_size[..., 1:], -1, 1), gaps, resamples=0).estimate
    about = {"long_name": "share of the gap that a random circuit recovers", "units": "1"}
    return xr.Dataset(
        {
            **interval_variables(
                "recovered",
                ratio(parts, gaps),
                ("circuit", "size"),
                long_name="share of the gap that the circuit recovers",
                units="1",
            ),
            "recovered_by_draw": (("draw", "size"), by_draw, about),
            **interval_variables(
                "gap", ratio(gaps), (), long_name="mean clean minus corrupted metric"
            ),
        },
        coords={"circuit": list(_CIRCUITS), "size": list(sizes), "draw": np.arange(draws)},
        attrs={
            "examples": examples,
            "without_gap": int((gaps == 0).sum()),
            "edges": len(ranked),
            "seed": seed,
            "interval": "percentile bootstrap 95% over examples",
        },
    )


def _check_numbers(sizes: Sequence[int], draws: int, n_edges: int) -> None:
    if not sizes or not all(1 <= size <= n_edges for size in sizes):
        raise ValueError(
            f"sizes must be one or more numbers in 1..{n_edges} (all edges), got {list(sizes)}"
        )
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
