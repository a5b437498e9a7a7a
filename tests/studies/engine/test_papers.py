"""Tables of papers: how they are read, and where results show their numbers."""

import pytest
import xarray as xr

from studies import engine
from studies.engine import papers, settings
from studies.engine.papers import PAPERS, Reported, read_paper, with_reported
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


def test_numbers_of_other_measures_are_added_there():
    coords = {"cell": ["a", "b"], "split": ["id", "ood"], "search": ["greedy", "beam"]}
    about = {"long_name": "BLEU"}
    data = xr.Dataset({"bleu": (tuple(coords), [[[1, 1], [1, 1]]] * 2, about)}, coords)
    numbers = [[Reported("toy", "decoding/bleu", "ood", "all", 30.0, "", "Table 1")], [number("")]]
    assert "bleu_paper" not in with_reported(data.copy(), numbers, "other")
    paper = with_reported(data.copy(), numbers, "decoding")["bleu_paper"]
    assert paper.sel(cell="a", split="ood").to_numpy().tolist() == [30.0, 30.0]
    assert int(paper.notnull().sum()) == 2
    assert paper.attrs == {"long_name": "BLEU, paper"}


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


def test_an_unknown_study_is_an_error():
    with pytest.raises(ValueError, match=r"study must be one of .*images.*, got 'image'"):
        engine.reported("mittal_2021", "image")


TABLE = """
citation = "Someone 2020"
experiments = [["{far,near}/{a,b}", "toy", "paper", "size={0} model={1}"]]
absent = [["{far,near}/c", "too large"]]
figures = [["Figure 2", "toy", "accuracy", "training"]]
undrawn = [["Figure 1", "a drawing"]]
reported = [
    ["far/a", "accuracy", "ood/deep", 0.5, "Table 1", 0.1, 3],
    ["near/b", "loss", "id", 2, "text"],
    ["near/c", "BLEU", "test", 3, "text"],
]

[[settings]]
experiments = "*"
source = "Table 2"
task.n = 4
model.dropout.mlp = 0.1

[[settings]]
experiments = ["*/b", "near/*"]
source = "Table 3"
task.n = [5, 6]
training.n_steps = 7

[[settings]]
experiments = "near/b"
model.dropout.mlp = "not given"
"""


@pytest.fixture
def read(tmp_path, monkeypatch):
    """A function that reads a table from its text."""
    monkeypatch.setattr(papers, "PAPERS", tmp_path)

    def read_text(text):
        (tmp_path / "someone_2020.toml").write_text(text)
        return read_paper.__wrapped__("someone_2020")

    return read_text


def test_the_last_block_of_settings_about_an_experiment_counts(read):
    paper = read(TABLE)
    settings = {
        experiment.name: {name: tuple(value) for name, value in experiment.settings.items()}
        for experiment in paper.experiments
    }
    first, second = (4, "Table 2"), ([5, 6], "Table 3")
    steps, dropout = (7, "Table 3"), (0.1, "Table 2")
    assert settings == {
        "far/a": {"task.n": first, "model.dropout.mlp": dropout},
        "far/b": {"task.n": second, "model.dropout.mlp": dropout, "training.n_steps": steps},
        "near/a": {"task.n": second, "model.dropout.mlp": dropout, "training.n_steps": steps},
        "near/b": {"task.n": second, "training.n_steps": steps},
    }


def test_names_in_braces_stand_for_several_experiments(read):
    paper = read(TABLE)
    assert [(e.name, e.study, e.preset, e.condition) for e in paper.experiments] == [
        ("far/a", "toy", "paper", "size=far model=a"),
        ("far/b", "toy", "paper", "size=far model=b"),
        ("near/a", "toy", "paper", "size=near model=a"),
        ("near/b", "toy", "paper", "size=near model=b"),
    ]
    assert paper.absent == {"far/c": "too large", "near/c": "too large"}
    assert paper.figures == {"Figure 2": ("toy", "accuracy", "training")}
    assert paper.undrawn == {"Figure 1": "a drawing"}
    assert paper.reported == (
        Reported("far/a", "accuracy", "ood", "deep", 0.5, "size=far model=a", "Table 1", 0.1, 3),
        Reported("near/b", "loss", "id", "all", 2, "size=near model=b", "text"),
        Reported("near/c", "BLEU", "test", "all", 3, "", "text"),
    )


@pytest.mark.parametrize("name", ["far/c", "far/A", "fur/*"])
def test_a_table_is_about_its_own_experiments(name, read):
    message = rf"experiments must be some of far/a, .*, got '{name}'".replace("*'", r"\*'")
    with pytest.raises(ValueError, match=message):
        read(TABLE.replace('"near/b"\n', f'"{name}"\n'))
    if name == "far/A":
        with pytest.raises(ValueError, match=message):
            read(TABLE.replace('"far/a"', f'"{name}"'))


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


@pytest.mark.parametrize("path", sorted(PAPERS.glob("*.toml")), ids=lambda path: path.stem)
def test_figures_are_drawn_by_views_of_studies(path):
    views = {study.name: study.views for study in (parameter.values[0] for parameter in STUDIES)}
    paper = read_paper(path.stem)
    for study, *names in paper.figures.values():
        assert names
        assert set(names) <= set(views[study])
    assert not set(paper.figures) & set(paper.undrawn)


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
    tables = [read_paper(path.stem) for path in PAPERS.glob("*.toml")]
    of_cells = [n for table in tables for n in table.reported if n.experiment not in table.absent]
    # Ostapenko et al. give these of one run each, on data that they do not name.
    of_one_run = [n for n in of_cells if n.metric in ("specialization", "collapse")]
    assert len(of_one_run) == 4
    assert n_reported == len(of_cells) - len(of_one_run)
