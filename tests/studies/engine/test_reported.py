"""Numbers reported by papers: which settings they apply to, and where results show them."""

import csv

import pytest
import xarray as xr

from studies import engine
from studies.engine import settings
from studies.engine.reported import PAPERS, Reported, with_reported
from tests.contracts.test_studies import STUDIES
from tests.studies.engine import toy


def number(settings_text, value=0.5, split="ood"):
    return Reported("toy", "accuracy", split, "all", value, settings_text, "Table 1")


def test_a_number_applies_to_models_with_its_settings():
    setup = toy.TOY.setup
    assert number("").is_of(setup)
    training = f"training.n_steps={setup.training.n_steps} training.clip={setup.training.clip}"
    assert number(f"model={setup.model} {training}").is_of(setup)
    assert number("training=TrainingConfig").is_of(setup)
    assert not number("training=MluConfig").is_of(setup)
    assert not number("model=another").is_of(setup)
    assert not number("task.n_features=4").is_of(setup)
    assert not number(f"model={setup.model} training.n_steps=1").is_of(setup)


def test_reported_numbers_are_added_to_scores():
    coords = {"cell": ["a", "b"], "split": ["id", "ood"], "group": ["all", "near"]}
    attrs = {"long_name": "share of right answers", "units": "1"}
    scores = xr.Dataset({"accuracy": (tuple(coords), [[[1, 1], [1, 1]]] * 2, attrs)}, coords)
    assert "accuracy_paper" not in with_reported(scores.copy(), [[], []])
    # Small presets may lack some of the paper's splits, here "far".
    numbers = [[], [number(""), number("", split="far")]]
    paper = with_reported(scores.copy(), numbers)["accuracy_paper"]
    assert paper.sel(cell="b", split="ood", group="all") == 0.5
    assert int(paper.notnull().sum()) == 1
    assert paper.attrs == {"long_name": "share of right answers, paper", "units": "1"}


def test_a_changed_number_is_in_the_next_result(tmp_path, monkeypatch):
    setup = toy.TOY.setup
    monkeypatch.setattr(type(setup), "reported", (number("", 0.25),))
    resources = engine.Resources(root=tmp_path)

    def reported_in(folder):
        scores = engine.read_result(folder / "result.nc")["scores"]
        return set(scores["accuracy_paper"].sel(split="ood", group="all").to_numpy().tolist())

    assert reported_in(engine.run(toy.TOY, resources=resources)) == {0.25}
    monkeypatch.setattr(type(setup), "reported", (number("", 0.75),))
    assert reported_in(engine.run(toy.TOY, resources=resources)) == {0.75}


def test_an_unknown_experiment_is_an_error():
    with pytest.raises(ValueError, match=r"experiment must be one of .*images.*, got 'image'"):
        engine.reported("mittal_2021", "image")


def with_settings(cell, settings_text):
    """The cell with settings given as text; None if it does not have them."""
    pairs = [setting.split("=") for setting in settings_text.split()]
    try:
        values = {
            path: settings.parse(cell, path, text)[0]
            for path, text in pairs
            if not text.endswith("Config")
        }
        return settings.put(cell, values)
    except ValueError:
        return None


def test_every_reported_number_applies_to_some_cell():
    """A misspelt setting would match no cell, so that no result would show the number."""
    cells = {}
    for study in (parameter.values[0] for parameter in STUDIES):
        for preset in {"laptop", *study.presets}:
            cell = study.plan(preset).cells[0]
            cells[type(cell), type(getattr(cell, "task", None))] = cell
    unmatched, n_reported = set(), 0
    for setup_class in {setup_class for setup_class, _ in cells}:
        n_reported += len(setup_class.reported)
        own_cells = [cell for cell in cells.values() if type(cell) is setup_class]
        for reported in setup_class.reported:
            candidates = (with_settings(cell, reported.settings) for cell in own_cells)
            if not any(cell is not None and reported.is_of(cell) for cell in candidates):
                unmatched.add(reported)
    assert unmatched == set()
    n_in_files = sum(len(list(csv.DictReader(path.open()))) for path in PAPERS.glob("*.csv"))
    assert n_reported == n_in_files
