"""Answers that are compared with outcomes."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from probes.checking import shape_of
from probes.statistics.intervals import bootstrap_ratio, interval_variables

Metric = Callable[[Any, slice], Tensor]
"""Maps the model's output and the examples it is for to floats [example]."""


def check_scored(scored: Mapping[str, object], metrics: Mapping[str, Metric]) -> None:
    """Check that answers come with what they are compared with, or that there are metrics.

    Args:
        scored: both arguments by name, None where they are not passed.
        metrics: the metrics.

    Raises:
        ValueError: one is passed without the other, or there is nothing to measure.
    """
    given = [name for name, value in scored.items() if value is not None]
    if len(given) == 1 or not (given or metrics):
        raise ValueError(
            f"{' and '.join(scored)} must be passed together, or metrics, got "
            f"{f'only {given[0]}' if given else 'neither'}"
        )


def check_outcomes(outcomes: Mapping[str, Tensor], examples: int) -> None:
    """Check that there are outcomes, each with integers for this number of examples.

    Raises:
        TypeError: an outcome does not hold integers.
        ValueError: there is none, or one has another number of examples.
    """
    if not outcomes:
        raise ValueError("outcomes must name at least one outcome, got an empty mapping")
    for name, outcome in outcomes.items():
        if outcome.ndim == 0 or len(outcome) != examples:
            raise ValueError(
                f"outcomes[{name!r}] must have {examples} examples, "
                f"got shape {tuple(outcome.shape)}"
            )
        check_integers(f"outcomes[{name!r}]", outcome)


def check_integers(name: str, answers: Tensor) -> None:
    """Raise a TypeError if answers that others are compared with are floats: few would be equal."""
    if answers.is_floating_point() or answers.is_complex():
        raise TypeError(f"{name} must hold integers, got {answers.dtype}")


def hits_of(
    answers: Int[Tensor, "example ..."], outcomes: Mapping[str, Tensor]
) -> Int[np.ndarray, "outcome example"]:
    """Whether each answer is the outcome, in all its entries; -1 in an outcome matches anything.

    Raises:
        ValueError: an outcome has another shape than the answers.
    """
    for name, outcome in outcomes.items():
        if outcome.shape != answers.shape:
            raise ValueError(
                f"outcomes[{name!r}] must have the shape of the answers, "
                f"{tuple(answers.shape)}, got {tuple(outcome.shape)}"
            )
    candidates = [outcome.cpu() for outcome in outcomes.values()]
    equal = [(answers == candidate) | (candidate == -1) for candidate in candidates]
    return np.stack(
        [matches.reshape(len(matches), -1).all(dim=1).numpy() for matches in equal]
    ).astype(np.int8)


def check_metric(name: str, values: Tensor, rows: slice) -> Float[np.ndarray, " example"]:
    """Check the values of a metric for some examples.

    Raises:
        ValueError: they are not one finite number for each example.
    """
    examples = rows.stop - rows.start
    if not isinstance(values, Tensor) or values.shape != (examples,):
        raise ValueError(
            f"{name} must return a tensor [{examples} examples], got {shape_of(values)}"
        )
    array = values.detach().double().cpu().numpy()
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite, got NaN or infinity")
    return array


def measure(
    metrics: Mapping[str, Metric], output: Any, rows: slice
) -> Float[np.ndarray, "metric example"]:
    """Apply metrics to the output for some examples.

    Raises:
        ValueError: a metric is not one finite number for each example.
    """
    values = [
        check_metric(f"metrics[{name!r}]", metric(output, rows), rows)
        for name, metric in metrics.items()
    ]
    return np.array(values).reshape(len(metrics), rows.stop - rows.start)


def metric_variables(
    values: Float[np.ndarray, "... run metric example"],
    dims: tuple[str, ...],
    *,
    resamples: int,
    seed: int,
) -> dict[str, Any]:
    """Means of metrics and their changes against the first run, with intervals.

    Args:
        values: of the dims `dims` and `example`; the last of `dims` is `metric`, the one before it
            is that of the runs, of which the first one is without intervention.
        dims: their names.
        resamples, seed: of the bootstrap.
    """
    columns = np.moveaxis(values, -1, 0)
    value, change = (
        bootstrap_ratio(part, resamples=resamples, seed=seed)
        for part in (columns, columns - columns[..., :1, :])
    )
    about = {"long_name": "metric of each example"}
    return {
        **interval_variables("value", value, dims, long_name="mean of the metric"),
        **interval_variables("change", change, dims, long_name="change against no intervention"),
        "example_value": ((*dims, "example"), values, about),
    }
