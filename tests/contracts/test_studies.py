"""What holds for every study; and broken copies of one, to see that each rule can break."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xarray as xr

from studies.engine import Selection, Study
from tests.contracts.hygiene import breaches
from tests.studies.engine.toy import TOY, ToySetup

FOLDER = Path(__file__).parents[2] / "studies"


def all_studies():
    for path in sorted(FOLDER.glob("[a-z]*.py")):
        module = importlib.import_module(f"studies.{path.stem}")
        for study in vars(module).values():
            if isinstance(study, Study):
                yield pytest.param(study, id=study.name)


STUDIES = list(all_studies())


def test_names_are_different():
    names = [one.values[0].name for one in STUDIES]
    assert len(set(names)) == len(names) > 0


@pytest.mark.parametrize("study", STUDIES)
def test_examples_are_used_once(study, tmp_path, monkeypatch):
    assert breaches(study, "smoke", tmp_path, monkeypatch) == []


@pytest.mark.parametrize("study", STUDIES)
def test_every_preset_chooses_in_distribution_or_names_its_protocol(study):
    for preset in ("laptop", *study.presets):
        for setup in study.plan(preset).cells:
            selection = setup.selection
            assert setup.splits[selection.split] == "in" or selection.protocol


@pytest.mark.parametrize("study", STUDIES)
def test_every_study_has_its_presets_claims_with_sources_and_documented_settings(study):
    assert {"smoke", "paper"} <= set(study.presets)
    assert all(claim.source for claim in study.claims)
    assert study.question.endswith("?")


def test_the_toy_study_breaks_no_rule(tmp_path, monkeypatch):
    assert breaches(TOY, "laptop", tmp_path, monkeypatch) == []


class TrainsOnTest(ToySetup):
    def loss(self, model, batch, step):
        return super().loss(model, self.sampler().batch("ood", step + 5, 16), step)


class IgnoresTheSeed(ToySetup):
    def build(self, generator):
        return super().build(torch.Generator().manual_seed(7))


class KeepsOneModel(ToySetup):
    kept = {}  # noqa: RUF012

    def build(self, generator):
        return self.kept.setdefault(self.seed, super().build(generator))


def decodes_what_chose(trained):
    batch = trained.task.batch("id", 0, 50)
    return xr.Dataset({"x": ((), float(batch.inputs.mean()), {"long_name": "x"})})


def decodes_training_examples(trained):
    batch = trained.task.batch("train", 3, 50)
    return xr.Dataset({"x": ((), float(batch.inputs.mean()), {"long_name": "x"})})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"setup": TrainsOnTest(**vars(TOY.setup))}, "training draws batches by itself"),
        ({"setup": TrainsOnTest(**vars(TOY.setup))}, "more than the validation examples of ood"),
        ({"setup": IgnoresTheSeed(**vars(TOY.setup))}, "both seeds have the same weights"),
        ({"setup": KeepsOneModel(**vars(TOY.setup))}, "untrained model has the trained model's"),
        ({"measures": {"x": decodes_what_chose}}, "measure x sees the validation examples of id"),
        ({"measures": {"x": decodes_what_chose}}, "measure x draws batches by itself"),
        ({"measures": {"x": decodes_training_examples}}, "measure x draws from train"),
    ],
)
def test_a_broken_copy_is_seen(changes, message, tmp_path, monkeypatch):
    study = replace(TOY, **({"measures": {}, "along_training": ()} | changes))
    assert message in "; ".join(breaches(study, "laptop", tmp_path, monkeypatch))


def test_choosing_out_of_distribution_is_refused():
    class Chooses(ToySetup):
        selection = Selection("ood", "accuracy")

    with pytest.raises(ValueError, match="must not be chosen by 'ood'"):
        Chooses(**vars(TOY.setup))
    Chooses.selection = Selection("ood", "accuracy", protocol="Someone 2020, section 3")
    assert Chooses(**vars(TOY.setup)).selection.protocol


def test_seeds_see_other_training_examples(tmp_path):
    from studies.engine.examples import Examples

    batches = [
        Examples(replace(TOY.setup, seed=seed), "cpu").train(0, 16).inputs for seed in (0, 1)
    ]
    assert not torch.equal(*batches)
