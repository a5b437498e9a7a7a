"""What a decoder reports: scores with intervals by control, split, cell and metric."""

from collections.abc import Mapping, Sequence

import numpy as np
import xarray as xr
from jaxtyping import Float

from probes.decoding.cells import Tables, cell_coordinates
from probes.statistics.intervals import Interval, interval_variables

Metrics = Float[np.ndarray, "draw task metric"]
"""The metrics of each task that is fitted to the same code: the probe's, the control task's."""


class Report:
    """Collects scores and their intervals, cell by cell."""

    def __init__(self, sources: Mapping[str, Tables], metrics: Sequence[str]) -> None:
        trained = sources["probe"]
        self.controls = ["probe", "shuffled", *(name for name in sources if name != "probe")]
        self.splits = list(trained.tests)
        self.metrics = list(metrics)
        self.cells = cell_coordinates(trained.fit)
        self.sizes = tuple(len(values) for values in self.cells.values())
        self.penalty = np.zeros((len(self.controls), *self.sizes))
        shape = (len(self.splits), *self.sizes)
        self._scores = np.zeros((3, len(self.controls), *shape, len(self.metrics)))
        self._selectivity = np.zeros((3, *shape))

    def choose(self, control: str, place: tuple[int, ...], penalty: float) -> None:
        """Record the penalty that cross-validation chose."""
        self.penalty[(self.controls.index(control), *place)] = penalty

    def record(
        self, tasks: Sequence[str], split: str, place: tuple[int, ...], scores: Interval
    ) -> None:
        """Record the scores [task, metric] of one cell, as `with_difference` leaves them."""
        at = (self.splits.index(split), *place)
        parts = np.stack(scores)
        for row, task in enumerate(tasks):
            self._scores[(slice(None), self.controls.index(task), *at)] = parts[:, row]
        if len(tasks) > 1:
            self._selectivity[(slice(None), *at)] = parts[:, -1, 0]

    def dataset(self, about: str) -> xr.Dataset:
        """Scores, and selectivity in the first metric."""
        grid = tuple(self.cells)
        selective = f"{self.metrics[0]} of the probe minus that of the control task"
        return xr.Dataset(
            {
                **interval_variables(
                    "score",
                    Interval(*self._scores),
                    ("control", "split", *grid, "metric"),
                    long_name=about,
                ),
                **interval_variables(
                    "selectivity",
                    Interval(*self._selectivity),
                    ("split", *grid),
                    long_name=selective,
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
    """The scores of each task and, as one more task, those of the first minus the last."""
    return np.concatenate([scores, scores[:, :1] - scores[:, -1:]], axis=1)


def decoding_attrs(
    about: str, trained: Tables, *, seed: int, folds: int, resamples: int
) -> dict[str, str | int]:
    """Attributes that say what a result was computed from."""
    return {
        "long_name": about,
        "samples_fit": len(trained.fit.label),
        "examples_fit": trained.fit.examples,
        **{f"samples_{name}": len(table.label) for name, table in trained.tests.items()},
        **{f"examples_{name}": table.examples for name, table in trained.tests.items()},
        "seed": seed,
        "folds": folds,
        "interval": f"percentile bootstrap over examples, 95%, {resamples} resamples",
    }
