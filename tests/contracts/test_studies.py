"""Contracts that hold for every study, and broken studies that show that breaches are detected."""

import importlib
from dataclasses import replace
from pathlib import Path

import cloudpickle
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


def test_studies_have_different_names():
    names = [parameter.values[0].name for parameter in STUDIES]
    assert len(set(names)) == len(names) > 0


@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES)
def test_no_study_breaks_data_hygiene(study, tmp_path, monkeypatch):
    assert breaches(study, "smoke", tmp_path, monkeypatch) == []


@pytest.mark.parametrize("study", STUDIES)
def test_every_preset_selects_in_distribution_or_names_its_protocol(study):
    for preset in ("laptop", *study.presets):
        for setup in study.plan(preset).cells:
            selection = setup.selection
            assert setup.splits[selection.split] == "in" or selection.protocol


@pytest.mark.parametrize("study", STUDIES)
def test_every_study_has_presets_a_question_and_sources_of_its_claims(study):
    assert "smoke" in study.presets
    # What only chooses settings has no claims, and is not of a paper's size.
    assert "paper" in study.presets or not study.claims
    assert all(claim.source for claim in study.claims)
    assert study.question.endswith("?")


@pytest.mark.parametrize("study", STUDIES)
def test_views_can_be_sent_to_the_workers_that_draw(study):
    for name, view in study.views.items():
        assert callable(cloudpickle.loads(cloudpickle.dumps(view))), name


def test_the_toy_study_has_no_breaches(tmp_path, monkeypatch):
    assert breaches(TOY, "laptop", tmp_path, monkeypatch) == []


class TrainsOnTest(ToySetup):
    def loss(self, model, batch, step):
        return super().loss(model, self.sampler().batch("ood", step + 5, 16), step)


class IgnoresTheSeed(ToySetup):
    def build(self, generator):
        return super().build(torch.Generator().manual_seed(7))


class SharesOneModel(ToySetup):
    built = {}  # noqa: RUF012

    def build(self, generator):
        return self.built.setdefault(self.seed, super().build(generator))


def mean_of(batch):
    return xr.Dataset({"x": ((), float(batch.inputs.mean()), {"long_name": "x"})})


def measures_validation_examples(trained):
    return mean_of(trained.task.batch("id", 0, 50))


def measures_training_examples(trained):
    return mean_of(trained.task.batch("train", 3, 50))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"setup": TrainsOnTest(**vars(TOY.setup))}, "training draws batches by itself"),
        ({"setup": TrainsOnTest(**vars(TOY.setup))}, "more than the validation examples of ood"),
        ({"setup": IgnoresTheSeed(**vars(TOY.setup))}, "both seeds have the same weights"),
        ({"setup": SharesOneModel(**vars(TOY.setup))}, "untrained model has the trained model's"),
        (
            {"measures": {"x": measures_validation_examples}},
            "measure x sees the validation examples of id",
        ),
        ({"measures": {"x": measures_validation_examples}}, "measure x draws batches by itself"),
        ({"measures": {"x": measures_training_examples}}, "measure x draws from train"),
    ],
)
def test_breaches_are_detected(changes, message, tmp_path, monkeypatch):
    study = replace(TOY, **({"measures": {}, "along_training": ()} | changes))
    assert message in "; ".join(breaches(study, "laptop", tmp_path, monkeypatch))


def test_selection_out_of_distribution_needs_a_protocol():
    class SelectsOutOfDistribution(ToySetup):
        selection = Selection("ood", "accuracy")

    with pytest.raises(ValueError, match="must not be chosen by 'ood'"):
        SelectsOutOfDistribution(**vars(TOY.setup))
    protocol = Selection("ood", "accuracy", protocol="Someone 2020, section 3")
    SelectsOutOfDistribution.selection = protocol
    assert SelectsOutOfDistribution(**vars(TOY.setup)).selection == protocol
