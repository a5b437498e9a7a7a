"""Whether conditions can be compared: what they cost, whether they are trained and tuned alike."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

from studies.engine.readings import Condition, conditions_of, metric, varied

STILL = 0.02
"""Share of the whole improvement that the last fifth of training must have for it to go on."""


@dataclass(frozen=True, kw_only=True)
class TrainedIf:
    """When a condition counts as trained: its metric in distribution, in the mean over seeds.

    Args:
        split: in distribution.
        metric: of the setup.
        reaches: the value that it must be as good as.
        share_of: a reference of the metric, such as "chance", of which `reaches` is a multiple.

    Example:
        `TrainedIf(split="id", metric="accuracy", reaches=0.9)`
    """

    split: str = "id"
    metric: str = "accuracy"
    reaches: float
    share_of: str | None = None


@dataclass(frozen=True)
class Fairness:
    """The verdicts on conditions.

    Attributes:
        conditions: all of them.
        data: [condition], see `assess`.
    """

    conditions: Sequence[Condition]
    data: xr.Dataset

    def against(
        self, first: Condition, second: Condition | None, *, of_learning: bool = False
    ) -> str:
        """Why a claim about one or two conditions is not decided; "" if nothing speaks against.

        Args:
            first: a condition.
            second: what it is compared with, if it is one.
            of_learning: whether being trained is what is claimed.
        """
        rows = [self._row(one) for one in (first, second) if one is not None]
        reasons = []
        if not of_learning:
            untrained = [row for row in rows if row["trained"].item() == 0]
            reasons += [f"{row['label'].item()} is not trained" for row in untrained]
        tried = [row["values_tried"].item() for row in rows]
        if len(set(tried)) > 1:
            reasons.append(f"tuned unequally: {tried[0]:.0f} against {tried[1]:.0f} settings")
        return "; ".join(reasons)

    def _row(self, condition: Condition) -> xr.Dataset:
        number = next(n for n, one in enumerate(self.conditions) if one.values == condition.values)
        return self.data.isel(condition=number)


def assess(result: xr.DataTree, trained: TrainedIf | None) -> Fairness:
    """What speaks for and against comparing the conditions of a result.

    Args:
        result: with the groups `scores`, `training` and `costs`.
        trained: when a condition counts as trained; None: that is not judged.

    Returns:
        With, for each condition: `parameters`, `operations` (of a forward pass for one example, as
        tested), `operations_in_training`, `depth` and `depth_in_training` (blocks, or steps),
        `updates` and `examples` of training, `values_tried` of the tuned settings, `at_edge`
        (whether the chosen value is the least or greatest that was tried), `still_improving`,
        `trained` (-1: not judged), `n_seeds`.
    """
    conditions = conditions_of(result)
    tuned = json.loads(result.attrs["axes"])["tuned"]
    scores, training = result["scores"].to_dataset(), result["training"].to_dataset()
    costs = result["costs"].to_dataset()
    rows = []
    for one in conditions:
        cells = one.cells
        row = {
            name: float(costs[name].isel(cell=cells).mean())
            for name in (
                "parameters",
                "operations",
                "operations_in_training",
                "depth",
                "depth_in_training",
            )
        }
        row["updates"] = float(training["updates"].isel(cell=cells).mean())
        row["examples"] = float(
            (training["updates"] * training["batch_size"]).isel(cell=cells).mean()
        )
        row |= _tuning(scores, one, tuned)
        gains = training["late_gain"].to_numpy()[cells]
        row["still_improving"] = float(np.nan_to_num(gains).mean() > STILL)
        row["trained"] = _is_trained(result, cells, trained)
        row["n_seeds"] = float(len(cells))
        rows.append(row)
    data = xr.Dataset(
        {
            name: ("condition", np.array([row[name] for row in rows]), {"long_name": about})
            for name, about in ABOUT.items()
        },
        coords={"condition": np.arange(len(rows))},
    )
    shown = varied(result)
    labels = [one.label(shown) for one in conditions]
    data["label"] = ("condition", labels, {"long_name": "values of the axes"})
    if trained is not None:
        data.attrs["trained_if"] = json.dumps(trained.__dict__)
    return Fairness(conditions, data)


ABOUT = {
    "parameters": "trained parameters",
    "operations": "floating-point operations of a forward pass, one example, as tested",
    "operations_in_training": "operations of a forward pass, one example, in training",
    "depth": "blocks or steps, as tested",
    "depth_in_training": "blocks or steps, in training",
    "updates": "updates of training",
    "examples": "examples of training",
    "values_tried": "values of the tuned settings that were tried",
    "at_edge": "1: the chosen value is the least or greatest of those tried",
    "still_improving": "1: the selecting metric improved in the last fifth of training",
    "trained": "1: reaches what counts as trained, 0: does not, -1: not judged",
    "n_seeds": "models with the chosen values",
}


def late_gain(values: np.ndarray) -> float:
    """The share of the whole improvement that came in the last fifth of training.

    Args:
        values: the selecting metric at each evaluation, higher being better, NaN behind the end.
    """
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return np.nan
    best = np.maximum.accumulate(values)
    before = best[max(0, int(0.8 * len(values) + 1e-9) - 1)]
    whole = best[-1] - values[0]
    return float((best[-1] - before) / whole) if whole > 0 else 0.0


def _tuning(scores: xr.Dataset, one: Condition, tuned: Sequence[str]) -> dict[str, float]:
    if not tuned:
        return {"values_tried": 1.0, "at_edge": 0.0}
    names = [name for name in one.values if name in scores.coords]
    same = np.ones(scores.sizes["cell"], dtype=bool)
    for name in names:
        column = scores[name].to_numpy()
        same &= (
            column == column[one.cells[0]]
            if column.dtype.kind != "f"
            else np.isclose(column, column[one.cells[0]], equal_nan=True)
        )
    tried = {tuple(scores[name].to_numpy()[cell] for name in tuned) for cell in same.nonzero()[0]}
    at_edge = False
    for name in tuned:
        values = np.unique(scores[name].to_numpy()[same])
        chosen = scores[name].to_numpy()[one.cells[0]]
        at_edge |= len(values) > 1 and bool(chosen in (values[0], values[-1]))
    return {"values_tried": float(len(tried)), "at_edge": float(at_edge)}


def _is_trained(result: xr.DataTree, cells: np.ndarray, trained: TrainedIf | None) -> float:
    if trained is None:
        return -1.0
    value = metric(trained.metric, trained.split).values(result)[cells].mean()
    bound = trained.reaches
    if trained.share_of is not None:
        known = metric(f"{trained.metric}_{trained.share_of}", trained.split).values(result)
        bound *= known[cells].mean()
    better = result["scores"][trained.metric].attrs.get("better", "higher")
    return float(value >= bound if better == "higher" else value <= bound)
