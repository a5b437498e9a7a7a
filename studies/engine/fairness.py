"""Whether conditions can be compared: what they cost, whether they are trained and tuned alike."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import xarray as xr

from studies.engine.readings import Condition, conditions_of, metric, varied
from studies.engine.results import described

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
    """The verdicts on conditions: `data` [condition], see `assess`."""

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
        data = self.data.isel(condition=[one.number for one in (first, second) if one is not None])
        untrained = data["label"].to_numpy()[data["trained"].to_numpy() == 0]
        reasons = [] if of_learning else [f"{label} is not trained" for label in untrained]
        tried = data["values_tried"].to_numpy()
        if len(set(tried)) > 1:
            reasons.append(f"tuned unequally: {tried[0]:.0f} against {tried[1]:.0f} settings")
        return "; ".join(reasons)


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
    conditions, shown = conditions_of(result), varied(result)
    tuned = json.loads(result.attrs["axes"])["tuned"]
    n_tried, at_edge = np.array([_tried(result, one, tuned) for one in conditions], dtype=float).T
    costs, training = (result[name].to_dataset() for name in ("costs", "training"))

    def mean(values: xr.DataArray) -> list[float]:
        return [float(values.isel(cell=one.cells).mean()) for one in conditions]

    columns = {
        str(name): (values.attrs.get("long_name", name), mean(values))
        for name, values in costs.data_vars.items()
    }
    columns |= {
        "updates": ("updates of training", mean(training["updates"])),
        "examples": ("examples of training", mean(training["updates"] * training["batch_size"])),
        "values_tried": ("values of the tuned settings that were tried", n_tried),
        "at_edge": ("1: the chosen value is the least or greatest of those tried", at_edge),
        "still_improving": (
            "1: the selecting metric improved in the last fifth of training",
            [float(gain > STILL) for gain in mean(training["late_gain"].fillna(0))],
        ),
        "trained": (
            "1: reaches what counts as trained, 0: does not, -1: not judged",
            [_is_trained(result, one.cells, trained) for one in conditions],
        ),
        "n_seeds": ("models with the chosen values", [float(len(one.cells)) for one in conditions]),
        "label": ("values of the axes", [one.label(shown) for one in conditions]),
    }
    data = xr.Dataset(described("condition", columns), {"condition": range(len(conditions))})
    if trained is not None:
        data.attrs["trained_if"] = json.dumps(asdict(trained))
    return Fairness(data)


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


def _tried(result: xr.DataTree, one: Condition, tuned: Sequence[str]) -> tuple[int, bool]:
    """How many values of the tuned settings were tried, and whether the chosen is at an edge."""
    columns = [result["scores"][name].to_numpy() for name in tuned]
    n_tried = len({tuple(column[cell] for column in columns) for cell in one.tried})
    at_edge = False
    for column in columns:
        values = np.unique(column[one.tried])
        at_edge |= len(values) > 1 and bool(column[one.cells[0]] in values[[0, -1]])
    return n_tried, at_edge


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
