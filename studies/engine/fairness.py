"""Fairness: what each condition costs, and whether conditions are trained and tuned alike."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import xarray as xr

from studies.engine.readings import Condition, conditions_of, metric, pairs_of, varied
from studies.engine.results import described

NOT_TRAINED, STILL_IMPROVES = "is not trained", "still improves"
"""Reasons not to compare a condition, after its label: what it has learned is not all there is."""

STILL_IMPROVING = 0.02
"""A condition still improves if more than this share of its total improvement came in the last
fifth of training."""


@dataclass(frozen=True, kw_only=True)
class TrainedIf:
    """The criterion for a trained condition: a bound on a metric, averaged over seeds.

    Args:
        split: a split in distribution; without it, nothing is judged.
        metric: one of the setup's metrics.
        reaches: the bound; the metric must be at least as good.
        share_of: a reference of the metric, such as "chance"; the bound is then `reaches` times
            the reference.
        group: a group of examples.

    Example:
        `TrainedIf(split="id", metric="accuracy", reaches=0.9)`
    """

    split: str = "id"
    metric: str = "accuracy"
    reaches: float
    share_of: str | None = None
    group: str = "all"

    def met_by(self, result: xr.DataTree, cells: np.ndarray) -> bool | None:
        """Whether cells meet it; None if it is not judged, as in a preset with other splits."""
        if self.split not in result["scores"]["split"]:
            return None
        value = metric(self.metric, self.split, self.group).values(result)[cells].mean()
        bound = self.reaches
        if self.share_of is not None:
            reference = metric(f"{self.metric}_{self.share_of}", self.split, self.group)
            bound *= reference.values(result)[cells].mean()
        better = result["scores"][self.metric].attrs.get("better", "higher")
        return bool(value >= bound if better == "higher" else value <= bound)


@dataclass(frozen=True)
class Fairness:
    """The assessment of all conditions of a result.

    Attributes:
        data: Dataset [condition]; see `assess`.
    """

    data: xr.Dataset

    def objections(
        self, first: Condition, second: Condition | None, *, of_learning: bool = False
    ) -> str:
        """The reasons not to compare two conditions, or a condition with a number; "" if none.

        Args:
            first: a condition.
            second: the other condition; None if `first` is compared with a number.
            of_learning: whether the claim is about training itself, so that untrained conditions
                are no objection.
        """
        numbers = [condition.number for condition in (first, second) if condition is not None]
        data = self.data.isel(condition=numbers)
        untrained = data["label"].to_numpy()[data["trained"].to_numpy() == 0]
        reasons = [] if of_learning else [f"{label} {NOT_TRAINED}" for label in untrained]
        n_tried = data["values_tried"].to_numpy()
        if len(set(n_tried)) > 1:
            reasons.append(f"tuned unequally: {n_tried[0]:.0f} against {n_tried[1]:.0f} settings")
        return "; ".join(reasons)


def assess(result: xr.DataTree, trained: TrainedIf | None) -> Fairness:
    """Assess costs, training and tuning of all conditions of a result.

    Args:
        result: with the groups `scores`, `training` and `costs`.
        trained: the criterion for a trained condition; None: not judged.

    Returns:
        For each condition: `parameters`, `operations` (of a forward pass for one example, as
        tested), `operations_in_training`, `depth` and `depth_in_training` (blocks, or steps),
        `updates`, `examples` and `seconds` of training, `values_tried` (number of values of the
        tuned settings), `values_tied` (those as good as the chosen one on validation, itself
        included), `at_edge` (1 if the chosen value is the smallest or largest tried),
        `still_improving`, `trained` (-1: not judged), `n_seeds`, `label`.
    """
    conditions, label_names = conditions_of(result), varied(result)
    tuned = json.loads(result.attrs["axes"])["tuned"]
    tuning = [_tuning(result, condition, tuned) for condition in conditions]
    n_tried, at_edge = np.array(tuning, dtype=float).T
    costs, training = (result[name].to_dataset() for name in ("costs", "training"))

    def mean(values: xr.DataArray) -> list[float]:
        return [float(values.isel(cell=condition.cells).mean()) for condition in conditions]

    columns = {
        str(name): (values.attrs.get("long_name", name), mean(values))
        for name, values in costs.data_vars.items()
    }
    columns |= {
        "updates": ("updates of training", mean(training["updates"])),
        "examples": ("examples of training", mean(training["updates"] * training["batch_size"])),
        "seconds": ("seconds of training", mean(training["seconds"].max("train_step"))),
        "values_tried": ("values of the tuned settings that were tried", n_tried),
        "values_tied": (
            "values of the tuned settings with the best score, of which the first counts",
            [float(_tied(result, condition, tuned)) for condition in conditions],
        ),
        "at_edge": ("1: the chosen value is the least or greatest of those tried", at_edge),
        "still_improving": (
            "1: the selecting metric improved in the last fifth of training",
            [float(gain > STILL_IMPROVING) for gain in mean(training["late_gain"].fillna(0))],
        ),
        "trained": (
            "1: reaches what counts as trained, 0: does not, -1: not judged",
            [_is_trained(result, condition.cells, trained) for condition in conditions],
        ),
        "n_seeds": (
            "models with the chosen values",
            [float(len(condition.cells)) for condition in conditions],
        ),
        "label": (
            "values of the axes",
            [condition.label(label_names) for condition in conditions],
        ),
    }
    data = xr.Dataset(described("condition", columns), {"condition": range(len(conditions))})
    if trained is not None:
        data.attrs["trained_if"] = json.dumps(asdict(trained))
    return Fairness(data)


def late_gain(values: np.ndarray) -> float:
    """The share of the total improvement that came in the last fifth of training.

    Args:
        values: the selecting metric at each evaluation; higher is better; NaN after the end.

    Returns:
        A number in [0, 1]; NaN for fewer than two evaluations.
    """
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return np.nan
    best = np.maximum.accumulate(values)
    before = best[max(0, int(0.8 * len(values) + 1e-9) - 1)]
    total = best[-1] - values[0]
    return float((best[-1] - before) / total) if total > 0 else 0.0


def _tuning(result: xr.DataTree, condition: Condition, tuned: Sequence[str]) -> tuple[int, bool]:
    """The number of values tried for the tuned settings, and whether the chosen is at an edge."""
    columns = [result["scores"][name].to_numpy() for name in tuned]
    # As text, because settings that do not apply are NaN, which is not equal to itself.
    n_tried = len({tuple(repr(column[cell]) for column in columns) for cell in condition.tried})
    at_edge = False
    for column in columns:
        values = np.unique(column[condition.tried])
        at_edge |= len(values) > 1 and bool(column[condition.cells[0]] in values[[0, -1]])
    return n_tried, at_edge


def _tied(result: xr.DataTree, condition: Condition, tuned: Sequence[str]) -> int:
    """How many tried values have the mean validation score of the chosen one, over shared seeds."""
    columns = [result["scores"][name].to_numpy() for name in tuned]
    scores: dict[tuple[str, ...], dict[tuple[object, ...], float]] = {}
    pairs = pairs_of(result, condition.tried)
    values = result["training"]["validation"].to_numpy().tolist()
    for cell, pair in zip(condition.tried.tolist(), pairs, strict=True):
        # As text, because settings that do not apply are NaN, which is not equal to itself.
        tried = tuple(repr(column[cell]) for column in columns)
        scores.setdefault(tried, {})[pair] = values[cell]
    chosen = scores[tuple(repr(column[condition.cells[0]]) for column in columns)]
    shared = [[pair for pair in of_one if pair in chosen] for of_one in scores.values()]
    return sum(
        bool(both) and bool(np.isclose(np.mean([chosen[p] - of_one[p] for p in both]), 0))
        for both, of_one in zip(shared, scores.values(), strict=True)
    )


def _is_trained(result: xr.DataTree, cells: np.ndarray, trained: TrainedIf | None) -> float:
    is_met = None if trained is None else trained.met_by(result, cells)
    return -1.0 if is_met is None else float(is_met)
