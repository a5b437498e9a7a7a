"""Presets named after papers have the papers' settings, or name their departures."""

import functools
import math

import pytest

from studies.engine.papers import PAPERS, Sourced, has_settings, read_paper
from tests.contracts.test_studies import STUDIES
from tests.studies.papers.facts import FACTS, facts_of

BY_NAME = {parameter.values[0].name: parameter.values[0] for parameter in STUDIES}


def setup_of(study, preset):
    """The setup of a preset, which need not be that of its study."""
    return BY_NAME[study].presets[preset].setup or BY_NAME[study].setup


EXPERIMENTS = {
    experiment.name: experiment
    for path in sorted(PAPERS.glob("*.toml"))
    for experiment in read_paper(path.stem).experiments
    if experiment.settings and type(setup_of(experiment.study, experiment.preset)) in FACTS
}


@functools.cache
def plan_of(study, preset):
    return BY_NAME[study].plan(preset)


@functools.cache
def differences(name):
    """The settings in which the cells of an experiment differ from the paper, with both values."""
    experiment = EXPERIMENTS[name]
    plan = plan_of(experiment.study, experiment.preset)
    cells = [cell for cell in plan.cells if has_settings(cell, experiment.condition)]
    assert cells, f"preset {experiment.preset} has no cells with {experiment.condition}"
    facts = [facts_of(cell, plan) for cell in cells]
    unknown = set(experiment.settings).difference(*facts)
    assert not unknown, f"no fact is named {', '.join(sorted(unknown))}"
    compared = {
        key: (sourced, {_hashable(fact[key]) for fact in facts})
        for key, sourced in experiment.settings.items()
    }
    return {key: pair for key, pair in compared.items() if not agrees(*pair)}


def agrees(sourced, built):
    """Whether the values in all cells are the paper's: one, all of a list, or a range's ends."""
    value = sourced.value
    if isinstance(value, list):
        return built in ({_hashable(value)}, set(value))
    if isinstance(value, str) and " to " in value:
        return {min(built), max(built)} == set(map(float, value.split(" to ")))
    return all(same(value, other) for other in built)


def same(value, other):
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=1e-6)
    # True == 1 in Python.
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _hashable(value):
    return tuple(value) if isinstance(value, list | tuple) else value


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_preset_has_the_settings_of_the_paper_or_names_its_departures(name):
    experiment = EXPERIMENTS[name]
    departures = BY_NAME[experiment.study].presets[experiment.preset].departures
    unnamed = {key: pair for key, pair in differences(name).items() if key not in departures}
    assert unnamed == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "preset"), sorted({(e.study, e.preset) for e in EXPERIMENTS.values()})
)
def test_every_departure_is_one(study, preset):
    names = [e.name for e in EXPERIMENTS.values() if (e.study, e.preset) == (study, preset)]
    different = set().union(*(differences(name) for name in names))
    assert set(BY_NAME[study].presets[preset].departures) == different


@pytest.mark.parametrize(
    ("value", "built", "expected"),
    [
        (4, {4}, True),
        (4, {4, 5}, False),
        (0.1, {0.1 + 1e-12}, True),
        (True, {1}, False),
        ([1, 5], {(1, 5)}, True),
        ([1, 5], {1, 5}, True),
        ([1, 5], {1}, False),
        ("0.1 to 0.9", {0.1, 0.5, 0.9}, True),
        ("0.1 to 0.9", {0.1, 0.5}, False),
        ("none", {"none"}, True),
    ],
)
def test_values_of_cells_are_compared_with_the_table(value, built, expected):
    assert agrees(Sourced(value, "Table 1"), built) is expected
