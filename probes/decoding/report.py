"""Results of a decoder: scores with intervals by control, split, cell and metric."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float

from probes.decoding.cells import Tables, cell_coordinates
from probes.statistics.intervals import (
    Interval,
    bootstrap,
    bootstrap_draws,
    interval_variables,
)

Metrics = Float[np.ndarray, "draw task metric"]
"""Metrics of each task that is fitted on the same code: the probe and its control tasks."""


class Report:
    """Collects scores and their intervals cell by cell."""

    def __init__(
        self,
        sources: Mapping[str, Tables],
        metrics: Sequence[str],
        *,
        tasks: Sequence[str] = ("shuffled",),
        joined: bool,
        draws: bool,
        resamples: int,
        seed: int,
    ) -> None:
        trained = sources["probe"]
        self._resampling: Any = {"resamples": resamples, "seed": seed}
        self.controls = ["probe", *tasks, *(name for name in sources if name != "probe")]
        self.splits = list(trained.tests)
        self.metrics = list(metrics)
        self.cells = cell_coordinates(trained.fit, joined=joined)
        self.sizes = tuple(len(values) for values in self.cells.values())
        self.penalty = np.zeros((len(self.controls), *self.sizes))
        shape = (len(self.splits), *self.sizes)
        self._scores = np.zeros((3, len(self.controls), *shape, len(self.metrics)))
        self._draws = np.zeros((*self._scores.shape[1:], resamples)) if draws else None
        self._selectivity = np.zeros((3, *shape))

    def set_penalty(self, control: str, index: tuple[int, ...], penalty: float) -> None:
        """Store the penalty that cross-validation chose."""
        self.penalty[(self.controls.index(control), *index)] = penalty

    def set_scores(
        self,
        tasks: Sequence[str],
        split: str,
        index: tuple[int, ...],
        scores: Callable[[Float[np.ndarray, "draw example"]], Metrics],
        n_examples: int,
    ) -> None:
        """Store the scores of one cell, with their intervals over examples.

        Args:
            tasks: the probe, and control tasks that were fitted on the same code; the last one is
                that of selectivity.
            split, index: what was decoded.
            scores: the scores of each task, for weights of the examples.
            n_examples: number of examples.
        """
        position = (self.splits.index(split), *index)

        def statistic(weights: np.ndarray) -> Metrics:
            return with_difference(scores(weights))

        interval = bootstrap(statistic, (n_examples,), **self._resampling)
        stacked = np.stack(interval)
        for number, task in enumerate(tasks):
            self._scores[(slice(None), self.controls.index(task), *position)] = stacked[:, number]
        if len(tasks) > 1:
            self._selectivity[(slice(None), *position)] = stacked[:, -1, 0]
        if self._draws is not None:
            draws = bootstrap_draws(statistic, (n_examples,), **self._resampling)
            for number, task in enumerate(tasks):
                self._draws[(self.controls.index(task), *position)] = draws[number]

    def dataset(self, long_name: str) -> xr.Dataset:
        """Make the dataset of scores, and of selectivity in the first metric."""
        cell_dims = tuple(self.cells)
        difference = f"{self.metrics[0]} of the probe minus that under the last control task"
        result = xr.Dataset(
            {
                **interval_variables(
                    "score",
                    Interval(*self._scores),
                    ("control", "split", *cell_dims, "metric"),
                    long_name=long_name,
                ),
                **interval_variables(
                    "selectivity",
                    Interval(*self._selectivity),
                    ("split", *cell_dims),
                    long_name=difference,
                ),
            },
            coords={
                "control": self.controls,
                "split": self.splits,
                **self.cells,
                "metric": self.metrics,
            },
        )
        if self._draws is not None:
            # A chain of draws, as ArviZ has them.
            result["score_draws"] = (
                ("chain", "draw", "control", "split", *cell_dims, "metric"),
                np.moveaxis(self._draws, -1, 0)[None],
                {"long_name": f"{long_name}, bootstrap draws"},
            )
        return result


def with_difference(scores: Metrics) -> Metrics:
    """Append the scores of the first task minus those of the last as one more task."""
    return np.concatenate([scores, scores[:, :1] - scores[:, -1:]], axis=1)


def decoding_attrs(
    long_name: str, trained: Tables, *, seed: int, folds: int, resamples: int
) -> dict[str, str | int]:
    """Make the attributes that describe the data and settings of a result."""
    return {
        "long_name": long_name,
        "samples_fit": len(trained.fit.label),
        "examples_fit": trained.fit.n_examples,
        **{f"samples_{name}": len(table.label) for name, table in trained.tests.items()},
        **{f"examples_{name}": table.n_examples for name, table in trained.tests.items()},
        "seed": seed,
        "folds": folds,
        "interval": f"percentile bootstrap over examples, 95%, {resamples} resamples",
    }
