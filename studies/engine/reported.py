"""Numbers reported by papers: one CSV file per paper, with the settings behind each number."""

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
"""The folder that holds the CSV files."""


@dataclass(frozen=True)
class Reported:
    """A number that a paper reports.

    Attributes:
        experiment: the paper's experiment, in our words.
        metric, split, group: the score that it corresponds to, see `Setup.scores`.
        value: as reported.
        settings: settings of the reported model, as on the command line, such as
            `"model=hyla n_layers=2"`; for a group of settings the name of its class.
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
        """Whether the number applies to a config, which then has all of `settings`."""
        pairs = (setting.split("=") for setting in self.settings.split())
        return all(_has_value(config, path, text) for path, text in pairs)


@functools.cache
def reported(paper: str, experiment: str) -> tuple[Reported, ...]:
    """The numbers of an experiment of a paper, such as `reported("mittal_2021", "images")`.

    Raises:
        FileNotFoundError: there is no file for the paper.
        ValueError: the file has no such experiment.
    """
    rows = _rows(paper)
    numbers = tuple(row for row in rows if row.experiment == experiment)
    if not numbers:
        experiments = ", ".join(dict.fromkeys(row.experiment for row in rows))
        raise ValueError(f"experiment must be one of {experiments}, got {experiment!r}")
    return numbers


@functools.cache
def _rows(paper: str) -> list[Reported]:
    with (PAPERS / f"{paper}.csv").open(newline="") as file:
        lines: list[dict[str, Any]] = [
            row | {"value": float(row["value"])} for row in csv.DictReader(file)
        ]
    return [Reported(**line) for line in lines]


def with_reported(scores: xr.Dataset, cells: Sequence[Sequence[Reported]]) -> xr.Dataset:
    """Add reported numbers to scores, in place, as variables `{metric}_paper`.

    Args:
        scores: Dataset [cell, split, group].
        cells: the reported numbers of each cell.
    """
    for cell, numbers in zip(scores["cell"].to_numpy(), cells, strict=True):
        for number in numbers:
            # Small presets may lack some of the paper's splits.
            if number.split not in scores["split"]:
                continue
            name, attrs = f"{number.metric}_paper", scores[number.metric].attrs
            if name not in scores:
                scores[name] = xr.full_like(scores[number.metric], np.nan, dtype=float)
                long_name = f"{attrs['long_name']}, paper"
                scores[name].attrs = {"long_name": long_name, "units": attrs["units"]}
            labels = {"cell": cell, "split": number.split, "group": number.group}
            scores[name].loc[labels] = number.value
    return scores


def _has_value(config: object, path: str, text: str) -> bool:
    """Whether a config has a setting with the value that a text stands for."""
    if not settings.has(config, path):
        return False
    value = settings.get(config, path)
    if is_dataclass(value):
        return type(value).__name__ == text
    return settings.parse(config, path, text) == (value,)
