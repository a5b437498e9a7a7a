import json
from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from studies.engine import Claim, Preset, above_least, metric
from studies.engine.remedies import Remedy, remedies_of, remedy, seconds_per_step
from tests.studies.engine import toy
from tests.studies.engine.synthetic import two_models

OOD = metric("accuracy", "ood")
WIDE, NARROW = {"width": 16}, {"width": 4}
MLPS = {"model": ("mlp",), "seed": (0, 1, 2)}


def study_with(*claims, **presets):
    return replace(toy.TOY, presets={"smoke": Preset(), **presets}, claims=claims)


def claim_of(reading=OOD, of=WIDE, exceeds=NARROW):
    return Claim("Wider is better", "P", reading, of, exceeds)


WIDTHS = Preset(changes="training.n_steps=50", grids=({**MLPS, "width": (4, 8, 16)},))
LONGER = Preset(changes="training.n_steps=500", grids=({**MLPS, "width": (4, 16)},))
ONE_SIDE = Preset(changes="training.n_steps=5", grids=({**MLPS, "width": (8, 16)},))


def test_the_preset_with_both_sides_and_the_fewest_updates_is_found():
    study = study_with(longer=LONGER, widths=WIDTHS, one_side=ONE_SIDE)
    # Two of three widths, with three seeds.
    assert remedy(study, claim_of()) == Remedy("widths", 6, 300)
    assert remedy(study, claim_of(exceeds=0.5)) == Remedy("one_side", 3, 15)
    assert remedy(study, claim_of(exceeds={"width": 32})) is None
    assert remedy(study, claim_of(of={"depth": 2})) is None


def test_a_decision_needs_three_seeds():
    one = replace(ONE_SIDE, grids=({"model": ("mlp",), "seed": (0,), "width": (4, 16)},))
    found = remedy(study_with(one=one), claim_of())
    assert found == Remedy("one", 6, 30, 3)
    assert str(found) == "preset `one` with 3 seeds: 6 models"


def test_a_small_test_run_decides_nothing():
    study = replace(study_with(), presets={"smoke": WIDTHS})
    assert remedy(study, claim_of()) is None


def test_only_models_count_that_the_reading_reads():
    linear = {"model": ("mlp", "linear"), "seed": (0, 1, 2), "task.n": (3, 4)}
    study = study_with(both=Preset(changes="training.n_steps=50", grids=(linear,)))
    of = {"of": {"n": 4}, "exceeds": {"n": 3}}
    assert remedy(study, claim_of(OOD, **of)) == Remedy("both", 12, 600)
    assert remedy(study, claim_of(OOD.among(["linear"]), **of)) == Remedy("both", 6, 300)
    # A difference of readings needs what each of them does; settings may be no axes.
    some = metric("accuracy", "id") - OOD.among(["mlp"], dropout=0.1)
    assert remedy(study, claim_of(some, **of)) == Remedy("both", 6, 300)
    assert remedy(study, claim_of(OOD.among(["mlp"], dropout=0.2), **of)) is None


def judged(study, seconds):
    result = two_models([0.8, 0.8, 0.8], [0.5, 0.6, 0.7])
    training = result["training"].to_dataset()
    times = training["seconds"].copy(data=np.full((6, 3), seconds))
    result["training"] = xr.DataTree(training.assign(seconds=times))
    for name, data in study.judge(result).items():
        result[name] = xr.DataTree(data)
    result.attrs["study"] = study.name
    return result


def test_a_reading_over_sizes_needs_a_preset_with_several():
    wider = Claim("Wider is better", "P", above_least(OOD, "width"), {}, 0.0)
    one = replace(ONE_SIDE, grids=({**MLPS, "width": (8,)},))
    assert remedy(study_with(one=one, longer=LONGER), wider) == Remedy("longer", 6, 3000)
    assert remedy(study_with(one=one), wider) is None
    half = replace(wider, reading=wider.reading / 2.0)
    assert remedy(study_with(one=one), half) is None


@pytest.fixture
def study():
    return study_with(claim_of(), widths=WIDTHS, longer=LONGER)


def test_times_are_those_of_the_updates_that_were_measured(study):
    # 100 updates in 3600 seconds; 300 updates on two cores.
    results = [judged(study, 3600.0)]
    assert seconds_per_step(results) == {study.name: pytest.approx(36.0)}
    words = dict(remedies_of({study.name: study}, results))
    key = (study.name, "Wider is better")
    assert words == {key: "preset `widths`: 6 models, at least 2 h"}
    words = dict(remedies_of({study.name: study}, [judged(study, 360.0)]))
    assert words[key] == "preset `widths`: 6 models, at least 9 min"


@pytest.mark.parametrize(("seconds", "devices"), [(np.nan, ["cpu"]), (60.0, ["cuda"])])
def test_without_a_time_measured_on_a_cpu_none_is_given(study, seconds, devices):
    result = judged(study, seconds)
    result.attrs["devices_of_training"] = json.dumps(devices)
    assert seconds_per_step([result]) == {}
    words = dict(remedies_of({study.name: study}, [result]))
    assert words[study.name, "Wider is better"] == "preset `widths`: 6 models"
