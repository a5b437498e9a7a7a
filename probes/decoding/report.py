"""Results of a decoder: scores with intervals by control, split, cell and metric."""

from collections.abc import Mapping, Sequence

import numpy as np
import xarray as xr
from jaxtyping import Float

from probes.decoding.cells import Tables, cell_coordinates
from probes.statistics.intervals import Interval, interval_variables

Metrics = Float[np.ndarray, "draw task metric"]
"""Metrics of each task that is fitted on the same code: the probe and the control task."""


class Report:
    """Collects scores and their intervals cell by cell."""

    def __init__(
        self, sources: Mapping[str, Tables], metrics: Sequence[str], *, joined: bool
    ) -> None:
        trained = sources["probe"]
        self.controls = ["probe", "shuffled", *(name for name in sources if name != "probe")]
        self.splits = list(trained.tests)
        self.metrics = list(metrics)
        self.cells = cell_coordinates(trained.fit, joined=joined)
        self.sizes = tuple(len(values) for values in self.cells.values())
        self.penalty = np.zeros((len(self.controls), *self.sizes))
        shape = (len(self.splits), *self.sizes)
        self._scores = np.zeros((3, len(self.controls), *shape, len(self.metrics)))
        self._selectivity = np.zeros((3, *shape))

    def set_penalty(self, control: str, index: tuple[int, ...], penalty: float) -> None:
        """Store the penalty that cross-validation chose."""
        self.penalty[(self.controls.index(control), *index)] = penalty

    def set_scores(
        self, tasks: Sequence[str], split: str, index: tuple[int, ...], scores: Interval
    ) -> None:
        """Store the scores [task, metric] of one cell, as returned by `with_difference`."""
        position = (self.splits.index(split), *index)
        stacked = np.stack(scores)
        for number, task in enumerate(tasks):
            self._scores[(slice(None), self.controls.index(task), *position)] = stacked[:, number]
        if len(tasks) > 1:
            self._selectivity[(slice(None), *position)] = stacked[:, -1, 0]

    def dataset(self, long_name: str) -> xr.Dataset:
        """Make the dataset of scores, and of selectivity in the first metric."""
        cell_dims = tuple(self.cells)
        difference = f"{self.metrics[0]} of the probe minus that of the control task"
        return xr.Dataset(
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
