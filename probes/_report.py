"""What a decoder reports: scores with intervals by control, split, cell and metric."""

from collections.abc import Mapping, Sequence

import numpy as np
import xarray as xr
from jaxtyping import Float

from probes._cells import Tables, cell_coordinates

_BOUNDS = (0.025, 0.975)
_PARTS = {"": "", "_low": ", lower 95% bound", "_high": ", upper 95% bound"}


class Report:
    """Collects point estimates and bootstrap draws, cell by cell."""

    def __init__(self, sources: Mapping[str, Tables], metrics: Sequence[str]) -> None:
        trained = sources["probe"]
        self.controls = ["probe", "shuffled", *(name for name in sources if name != "probe")]
        self.splits = list(trained.tests)
        self.metrics = list(metrics)
        self.cells = cell_coordinates(trained.fit)
        self.sizes = tuple(len(values) for values in self.cells.values())
        self.penalty = np.zeros((len(self.controls), *self.sizes))
        shape = (len(self.controls), len(self.splits), *self.sizes, len(self.metrics))
        self._scores = np.zeros((len(_PARTS), *shape))
        self._draws: dict[tuple[str, str, tuple[int, ...]], np.ndarray] = {}

    def choose(self, control: str, place: tuple[int, ...], penalty: float) -> None:
        """Record the penalty that cross-validation chose."""
        self.penalty[(self.controls.index(control), *place)] = penalty

    def record(
        self,
        control: str,
        split: str,
        place: tuple[int, ...],
        score: Float[np.ndarray, " metric"],
        draws: Float[np.ndarray, "resample metric"],
    ) -> None:
        """Record the scores of one cell, of the whole split and of its resamples."""
        at = (self.controls.index(control), self.splits.index(split), *place)
        self._scores[(slice(None), *at)] = [score, *np.quantile(draws, _BOUNDS, axis=0)]
        self._draws[control, split, place] = draws[:, 0]

    def dataset(self, about: str) -> xr.Dataset:
        """Scores and selectivity (in the first metric; probe and control resampled together)."""
        selectivity = np.zeros((len(_PARTS), len(self.splits), *self.sizes))
        selectivity[0] = self._scores[0, 0, ..., 0] - self._scores[0, 1, ..., 0]
        for (control, split, place), draws in self._draws.items():
            if control == "probe":
                difference = draws - self._draws["shuffled", split, place]
                at = (self.splits.index(split), *place)
                selectivity[(slice(1, None), *at)] = np.quantile(difference, _BOUNDS)
        grid = tuple(self.cells)
        result = xr.Dataset(
            coords={
                "control": self.controls,
                "split": self.splits,
                **self.cells,
                "metric": self.metrics,
            }
        )
        selective = f"{self.metrics[0]} of the probe minus that of the control task"
        for part, (suffix, bound) in enumerate(_PARTS.items()):
            result[f"score{suffix}"] = (
                ("control", "split", *grid, "metric"),
                self._scores[part],
                {"long_name": f"{about}{bound}"},
            )
            result[f"selectivity{suffix}"] = (
                ("split", *grid),
                selectivity[part],
                {"long_name": f"{selective}{bound}"},
            )
        return result


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
