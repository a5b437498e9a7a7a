"""What papers report: a CSV file for each paper, with the settings that each number is of."""

from __future__ import annotations

import csv
import functools
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from studies.engine import settings

PAPERS = Path(__file__).parents[1] / "papers"
"""The folder of the files."""


@dataclass(frozen=True)
class Reported:
    """A number that a paper reports.

    Attributes:
        experiment: which of the paper's, in our words.
        metric, split, group: of which score, see `Setup.scores`.
        value: as reported.
        settings: of the model that it is of, as on the command line; of a group of settings the
            name of its class.
        source: table, figure or section.
    """

    experiment: str
    metric: str
    split: str
    group: str
    value: float
    settings: str
    source: str

    def is_of(self, config: object) -> bool:
        """Whether a config has the settings."""
        pairs = (setting.split("=") for setting in self.settings.split())
        return all(_has(config, path, text) for path, text in pairs)


@functools.cache
def reported(paper: str, experiment: str) -> tuple[Reported, ...]:
    """The numbers of an experiment of a paper, such as `reported("mittal_2021", "images")`.

    Raises:
        FileNotFoundError: there is no such paper.
        ValueError: there is no such experiment in it.
    """
    rows = _rows(paper)
    found = tuple(row for row in rows if row.experiment == experiment)
    if not found:
        known = ", ".join(dict.fromkeys(row.experiment for row in rows))
        raise ValueError(f"experiment must be one of {known}, got {experiment!r}")
    return found


@functools.cache
def _rows(paper: str) -> list[Reported]:
    with (PAPERS / f"{paper}.csv").open(newline="") as file:
        lines: list[dict[str, Any]] = [
            row | {"value": float(row["value"])} for row in csv.DictReader(file)
        ]
    return [Reported(**line) for line in lines]


def with_reported(scores: xr.Dataset, cells: Sequence[Sequence[Reported]]) -> xr.Dataset:
    """Scores [cell, split, group], beside them what papers report of each: `{metric}_paper`."""
    for cell, some in zip(scores["cell"].to_numpy(), cells, strict=True):
        # The task of the smallest presets need not have all of the paper's splits.
        for one in (one for one in some if one.split in scores["split"]):
            name, about = f"{one.metric}_paper", scores[one.metric].attrs
            if name not in scores:
                scores[name] = xr.full_like(scores[one.metric], np.nan, dtype=float)
                long_name = f"{about['long_name']}, paper"
                scores[name].attrs = {"long_name": long_name, "units": about["units"]}
            scores[name].loc[{"cell": cell, "split": one.split, "group": one.group}] = one.value
    return scores


def _has(config: object, path: str, text: str) -> bool:
    if not settings.has(config, path):
        return False
    value = settings.get(config, path)
    if is_dataclass(value):
        return type(value).__name__ == text
    return settings.parse(config, path, text) == (value,)
