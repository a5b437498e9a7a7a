"""Numbers that papers report: whose settings they are of, and where results show them."""

import csv

import pytest
import xarray as xr

from studies import engine
from studies.engine import settings
from studies.engine.reported import PAPERS, Reported, with_reported
from tests.contracts.test_studies import STUDIES
from tests.studies.engine import toy


def number(text, value=0.5, split="ood"):
    return Reported("toy", "accuracy", split, "all", value, text, "Table 1")


def test_a_number_is_of_models_with_its_settings():
    setup = toy.TOY.setup
    assert number("").is_of(setup)
    own = f"training.n_steps={setup.training.n_steps} training.clip={setup.training.clip}"
    assert number(f"model={setup.model} {own}").is_of(setup)
    assert number("training=TrainingConfig").is_of(setup)
    assert not number("training=MluConfig").is_of(setup)
    assert not number("model=another").is_of(setup)
    assert not number("task.n_features=4").is_of(setup)
    assert not number(f"model={setup.model} training.n_steps=1").is_of(setup)


def test_what_is_reported_stands_beside_scores():
    coords = {"cell": ["a", "b"], "split": ["id", "ood"], "group": ["all", "near"]}
    about = {"long_name": "share of right answers", "units": "1"}
    scores = xr.Dataset({"accuracy": (tuple(coords), [[[1, 1], [1, 1]]] * 2, about)}, coords)
    assert "accuracy_paper" not in with_reported(scores.copy(), [[], []])
    # The task of the smallest presets need not have all of the paper's splits.
    found = with_reported(scores.copy(), [[], [number(""), number("", split="far")]])
    paper = found["accuracy_paper"]
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


def reached(cell, settings_of_one):
    """The cell with settings that are given as text; None where it has no such settings."""
    pairs = [one.split("=") for one in settings_of_one.split()]
    try:
        values = {
            path: settings.parse(cell, path, text)[0]
            for path, text in pairs
            if not text.endswith("Config")
        }
        return settings.put(cell, values)
    except ValueError:
        return None


def test_every_number_can_be_reached_by_settings():
    """A setting that is misspelt would match nothing, and no column would show the number."""
    cells = {}
    for study in (parameter.values[0] for parameter in STUDIES):
        for preset in {"laptop", *study.presets}:
            cell = study.plan(preset).cells[0]
            cells[type(cell), type(getattr(cell, "task", None))] = cell
    missed, n_known = set(), 0
    for setup in {setup for setup, _ in cells}:
        n_known += len(setup.reported)
        for one in setup.reported:
            found = (reached(cell, one.settings) for cell in cells.values() if type(cell) is setup)
            if not any(cell is not None and one.is_of(cell) for cell in found):
                missed.add(one)
    assert missed == set()
    written = sum(len(list(csv.DictReader(path.open()))) for path in PAPERS.glob("*.csv"))
    assert n_known == written
