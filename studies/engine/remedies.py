"""What it would take to run a claim that no result has: the preset, the models, the time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from studies.engine.claims import FEWEST_PAIRS, Claim
from studies.engine.setup import Setup
from studies.engine.study import Study

CORES = 2
"""Cores of the machine for which times are given."""


@dataclass(frozen=True)
class Remedy:
    """The models of a preset that a claim compares, with as many seeds as a decision needs.

    Attributes:
        preset: name of the preset.
        n_models: how many models these are.
        n_steps: updates of all of them together.
        seeds: the number of seeds, if the preset has fewer than a decision needs; otherwise None.
    """

    preset: str
    n_models: int
    n_steps: int
    seeds: int | None = None

    def __str__(self) -> str:
        seeds = "" if self.seeds is None else f" with {self.seeds} seeds"
        return f"preset `{self.preset}`{seeds}: {self.n_models} models"


def remedy(study: Study, claim: Claim) -> Remedy | None:
    """The models that would decide a claim with the fewest updates; None if no preset has them.

    Example:
        `remedy(STUDY, STUDY.claims[5])`: `Remedy("variants", 30, 240000)`
    """
    return _fewest_updates(_planned(study), claim)


Planned = Mapping[str, Sequence[tuple[Setup, Mapping[str, Any]]]]
"""The cells of each preset, with their settings and coordinates."""


def _planned(study: Study) -> Planned:
    """The cells of all presets of a study but that of the smallest test."""
    plans = (study.plan(preset) for preset in ("laptop", *study.presets) if preset != "smoke")
    return {
        plan.preset: [(cell, {**vars(cell), **plan.coordinates(cell)}) for cell in plan.cells]
        for plan in plans
    }


def _fewest_updates(planned: Planned, claim: Claim) -> Remedy | None:
    """The models that would decide a claim with the fewest updates."""
    found = (_compared(preset, cells, claim) for preset, cells in planned.items())
    return min(filter(None, found), key=lambda remedy: remedy.n_steps, default=None)


def _compared(
    preset: str, cells: Sequence[tuple[Setup, Mapping[str, Any]]], claim: Claim
) -> Remedy | None:
    """The models of a preset that a claim compares, if it has models for each side."""
    other = claim.other if isinstance(claim.other, Mapping) else claim.of
    sides = [
        {
            cell
            for cell, values in cells
            if _has(values, [*claim.reading.requires, *((k, (v,)) for k, v in side.items())])
        }
        for side in (claim.of, other)
    ]
    if not all(sides):
        return None
    models = set.union(*sides)
    for name in claim.reading.varies:
        if len({values.get(name) for cell, values in cells if cell in models}) < 2:
            return None
    steps = sum(cell.training.n_steps for cell in models)
    n_seeds = min(len({cell.seed for cell in side}) for side in sides)
    if n_seeds >= FEWEST_PAIRS:
        return Remedy(preset, len(models), steps)
    times = math.ceil(FEWEST_PAIRS / n_seeds)
    return Remedy(preset, times * len(models), times * steps, FEWEST_PAIRS)


def _has(values: Mapping[str, Any], allowed: Iterable[tuple[str, tuple[Any, ...]]]) -> bool:
    """Whether all settings are there with an allowed value, or None, which does not apply."""
    return all(name in values and values[name] in (None, *options) for name, options in allowed)


def devices_of(result: xr.DataTree) -> set[str]:
    """The kinds of devices that models of a result were trained on: `cpu`, `cuda`."""
    # Results that do not name devices are older than the attribute, and all of a CPU.
    return set(json.loads(result.attrs.get("devices_of_training", '["cpu"]')))


def seconds_per_step(results: Iterable[xr.DataTree]) -> Mapping[str, float]:
    """The measured seconds of an update on a CPU, by study: the mean over its conditions."""
    times: dict[str, list[float]] = {}
    for result in results:
        if devices_of(result) != {"cpu"}:
            continue
        fairness = result["fairness"].to_dataset()
        each = (fairness["seconds"] / fairness["updates"]).to_numpy()
        times.setdefault(result.attrs["study"], []).extend(each[np.isfinite(each)].tolist())
    return {study: float(np.mean(each)) for study, each in times.items() if each}


def remedies_of(
    studies: Mapping[str, Study], results: Iterable[xr.DataTree]
) -> Iterator[tuple[tuple[str, str], str]]:
    """By study and statement: in words, what would run a claim, and how long on `CORES` cores.

    Times are those of updates of the models that were run, which are the smallest: a lower bound.
    """
    per_step = seconds_per_step(results)
    for name, study in studies.items():
        planned = _planned(study)
        for claim in study.claims:
            if (found := _fewest_updates(planned, claim)) is None:
                continue
            hours = found.n_steps * per_step.get(name, float("nan")) / 3600 / CORES
            time = f", at least {_in_words(hours)}" if np.isfinite(hours) else ""
            yield (name, claim.statement), f"{found}{time}"


def _in_words(hours: float) -> str:
    return f"{60 * hours:.0f} min" if hours < 1 else f"{hours:,.0f} h"
