"""Papers as data: the settings of their experiments, what they report, and our presets for them.

`studies/papers/AUTHOR_YEAR.toml` is the table of a paper, with

- `citation`;
- `experiments`: rows of names, the study and the preset that repeat them, and the settings that
  pick their cells: `["sraven/{softmax,hyla}", "raven_latent_code", "paper", "model={0}"]`. Braces
  list alternatives, `{0}` stands for the first one; `n_heads=2,4` allows any of the values;
- `absent`: rows of names of experiments that no preset repeats, and the reason;
- `figures`: rows of a figure, a study, and its views that draw the figure:
  `["Figure 4", "raven_latent_code", "scaling"]`;
- `undrawn`: rows of a figure and the reason why no view draws it;
- `reported`: rows of the name of an experiment, metric (of another measure than `scores` with its
  name: `decoding/bleu`), split (with a group: `ood/depth 7`), value, source, and where they are
  reported the spread over seeds and the number of seeds; those of absent experiments are kept for
  the record, with the paper's names of metrics and splits;
- `settings`: blocks of `experiments` (one or several names, in which `*` matches any text), the
  `source`, and values by the name of the setting. A list means that all of its values are run,
  "0.1 to 0.9" a range, and "not given" takes back what an earlier block says. Of several blocks
  with a setting the last one counts.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from studies.engine import settings

PAPERS = Path(__file__).parents[1] / "papers"
"""The folder that holds the tables."""


@dataclass(frozen=True)
class Reported:
    """A number that a paper reports.

    Attributes:
        experiment: name of the experiment.
        metric, split, group: the score that it corresponds to, see `Setup.scores`.
        value: as reported.
        settings: settings of the reported model, as on the command line, such as
            `"model=hyla n_layers=2"`; for a group of settings the name of its class.
        source: table, figure or section.
        spread: over seeds, as reported; None if it is not.
        n_seeds: number of seeds; None if it is not reported.
    """

    experiment: str
    metric: str
    split: str
    group: str
    value: float
    settings: str
    source: str
    spread: float | None = None
    n_seeds: int | None = None

    def is_of(self, config: object) -> bool:
        """Whether the number applies to a config, which then has all of `settings`."""
        return has_settings(config, self.settings)


class Sourced(NamedTuple):
    """The value of a setting in a paper, and the table, section or file that gives it."""

    value: Any
    source: str


@dataclass(frozen=True)
class Experiment:
    """An experiment of a paper.

    Attributes:
        name: such as `"ctl-forward/ndr"`.
        study, preset: the study and the preset that repeat it.
        condition: the settings of its cells, as for `Reported`.
        settings: the paper's settings by name; a list means that all its values are run.
    """

    name: str
    study: str
    preset: str
    condition: str
    settings: Mapping[str, Sourced]


@dataclass(frozen=True)
class Paper:
    """The table of one paper.

    Attributes:
        citation: authors, year and title.
        experiments: the experiments that a preset repeats.
        absent: the reason for each experiment without a preset, by name.
        reported: the reported numbers of `experiments`, and of `absent` ones, without settings.
        figures: the study and the names of its views that draw a figure, by the figure.
        undrawn: the reason why no view draws a figure, by the figure.
    """

    citation: str
    experiments: tuple[Experiment, ...]
    absent: Mapping[str, str]
    reported: tuple[Reported, ...]
    figures: Mapping[str, tuple[str, ...]]
    undrawn: Mapping[str, str]


@functools.cache
def read_paper(name: str) -> Paper:
    """Read the table of a paper, such as `read_paper("csordas_2021")`.

    Raises:
        FileNotFoundError: there is no such table.
        ValueError: a row is about an experiment that the table does not name.
    """
    table = tomllib.loads((PAPERS / f"{name}.toml").read_text())
    rows = [
        (name, study, preset, condition.format(*choices))
        for names, study, preset, condition in table["experiments"]
        for name, choices in _expand(names)
    ]
    blocks = [_read_block(block) for block in table["settings"]]
    absent = {name: why for names, why in table["absent"] for name, _ in _expand(names)}
    _check_names(
        [name for name, *_ in rows],
        [pattern for patterns, _ in blocks for pattern in patterns],
        [name for name, *_ in table["reported"] if name not in absent],
    )
    experiments = tuple(Experiment(*row, _settings_of(row[0], blocks)) for row in rows)
    return Paper(
        citation=table["citation"],
        experiments=experiments,
        absent=absent,
        reported=tuple(_numbers(table["reported"], experiments)),
        figures={figure: tuple(study_and_views) for figure, *study_and_views in table["figures"]},
        undrawn=dict(table["undrawn"]),
    )


@functools.cache
def reported(paper: str, study: str) -> tuple[Reported, ...]:
    """The numbers of a paper for a study, such as `reported("mittal_2021", "images")`.

    Raises:
        FileNotFoundError: there is no table of the paper.
        ValueError: the table has no experiment for the study.
    """
    experiments = read_paper(paper).experiments
    names = {experiment.name for experiment in experiments if experiment.study == study}
    if not names:
        studies = ", ".join(dict.fromkeys(experiment.study for experiment in experiments))
        raise ValueError(f"study must be one of {studies}, got {study!r}")
    return tuple(number for number in read_paper(paper).reported if number.experiment in names)


def with_reported(
    data: xr.Dataset, cells: Sequence[Sequence[Reported]], measure: str = "scores"
) -> xr.Dataset:
    """Add reported numbers to a measure, in place, as variables `{metric}_paper`.

    Args:
        data: Dataset [cell, split, group], or without groups.
        cells: the reported numbers of each cell.
        measure: name of the measure, which metrics of others than `scores` start with, such as
            `decoding/bleu`.
    """
    for position, numbers in enumerate(cells):
        for number in numbers:
            of, _, metric = number.metric.rpartition("/")
            # Small presets may lack some of the paper's splits.
            if (of or "scores") != measure or number.split not in data["split"]:
                continue
            name, attrs = f"{metric}_paper", data[metric].attrs
            if name not in data:
                data[name] = xr.full_like(data[metric], np.nan, dtype=float)
                long_name = f"{attrs['long_name']}, paper"
                about = {"long_name": long_name, "units": attrs.get("units")}
                data[name].attrs = {key: value for key, value in about.items() if value}
            labels = {"split": number.split, "group": number.group}
            labels = {dim: label for dim, label in labels.items() if dim in data[name].dims}
            data[name].loc[{"cell": data["cell"][position]} | labels] = number.value
    return data


def has_settings(config: object, text: str) -> bool:
    """Whether a config has settings such as `"model=hyla task=RavenConfig n_layers=2,3"`."""
    pairs = (setting.split("=") for setting in text.split())
    return all(_has_value(config, path, value) for path, value in pairs)


def _has_value(config: object, path: str, text: str) -> bool:
    """Whether a config has a setting with one of the values that a text stands for."""
    if not settings.has(config, path):
        return False
    value = settings.get(config, path)
    if is_dataclass(value):
        return type(value).__name__ == text
    return value in settings.parse(config, path, text)


def _expand(pattern: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The names that a pattern with braces stands for, each with the alternatives chosen."""
    parts = re.split(r"\{(.*?)\}", pattern)
    literals, alternatives = parts[::2], [part.split(",") for part in parts[1::2]]
    for choices in product(*alternatives):
        pairs = zip(literals, (*choices, ""), strict=True)
        yield "".join(literal + choice for literal, choice in pairs), choices


def _read_block(block: dict[str, Any]) -> tuple[list[str], dict[str, Sourced]]:
    """The patterns of a block of settings, and its values by their dotted names."""
    patterns, source = block.pop("experiments"), block.pop("source", "")
    values = {name: Sourced(value, source) for name, value in _flat(block)}
    return [patterns] if isinstance(patterns, str) else patterns, values


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _settings_of(
    name: str, blocks: Sequence[tuple[list[str], dict[str, Sourced]]]
) -> dict[str, Sourced]:
    """The settings of an experiment: of each the last value, without those that are not given."""
    values: dict[str, Sourced] = {}
    for patterns, block in blocks:
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            values |= block
    return {key: sourced for key, sourced in values.items() if sourced.value != "not given"}


def _check_names(names: Sequence[str], patterns: Sequence[str], reported: Sequence[str]) -> None:
    unknown = [pattern for pattern in patterns if not any(fnmatchcase(n, pattern) for n in names)]
    unknown += [name for name in reported if name not in names]
    if unknown:
        raise ValueError(f"experiments must be some of {', '.join(names)}, got {unknown[0]!r}")


def _numbers(rows: Sequence[Any], experiments: Sequence[Experiment]) -> Iterator[Reported]:
    """The reported numbers of experiments, from the rows of a table."""
    conditions = {experiment.name: experiment.condition for experiment in experiments}
    for name, metric, place, value, source, *spread_and_seeds in rows:
        split, _, group = place.partition("/")
        condition = conditions.get(name, "")
        yield Reported(
            name, metric, split, group or "all", value, condition, source, *spread_and_seeds
        )
