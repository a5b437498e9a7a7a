"""The study of readers: what its presets train, and what a small run ends in."""

import io

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from studies.engine import Resources, read_result, run
from studies.engine.papers import read_paper
from studies.open_domain_question_answering import STUDY
from studies.setups.question_answering import StoredQuestionsSetup
from tests.tasks.stored.test_questions import write_quasar

pytestmark = pytest.mark.slow

TINY = "d_model=8 d_embed=6 n_factors=2 n_layers=2 training.n_steps=2 training.evaluate_every=2"


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    resources = Resources(root=tmp_path_factory.mktemp("qa"), workers=1)
    return read_result(run(STUDY, "smoke", [], resources=resources) / "result.nc")


def test_the_table_and_every_view_are_drawn(result):
    console = Console(width=160)
    with console.capture() as capture:
        console.print(STUDY.table.render(result))
    for word in (
        "CoDA",
        "softmax attention",
        "exact match, id",
        "first fact, untrained",
        "M < -0.1",
    ):
        assert word in capture.get()
    figures = {name: view(result) for name, view in STUDY.views.items()}
    # One rate was tried.
    assert figures.pop("tuning") is None
    for name, figure in figures.items():
        file = io.BytesIO()
        assert figure is not None, name
        figure.savefig(file, dpi=40)
        assert np.asarray(Image.open(file)).std() > 1, name


def test_the_result_has_what_is_looked_at_in_each_model(result):
    coda = result["scores"]["model"] == "coda"
    known = result["saturation"]["saturated"].notnull()
    known = known.any([dim for dim in known.dims if dim != "cell"])
    assert known.to_numpy().tolist() == coda.to_numpy().tolist()
    assert result["pointing"]["share"].sizes["passage_layer"] == 2
    assert result["signs"]["place"].to_numpy().tolist() == ["Q1", "Q2", "core"]
    # No pair is to be subtracted.
    assert "matched" in result["signs"]
    claims = result["claims"].to_dataset().set_index(claim="statement")["verdict"]
    for statement, verdict in claims.to_series().items():
        published = statement.startswith(("On Quasar-T", "On SearchQA"))
        assert verdict in (("not run",) if published else ("undecided", "not comparable")), (
            statement
        )


def test_every_preset_trains_both_models_alike():
    numbers = {
        "laptop": 2 * 3 * 3,
        "smoke": 2,
        "ablation": (2 * 2 + 2) * 3 * 3,
        "paper": 2 * 3 * 3,
        "paper-quasar-t": 2 * 3 * 3,
        "paper-searchqa": 2 * 3 * 3,
    }
    for preset, number in numbers.items():
        cells = STUDY.plan(preset).cells
        assert len(cells) == number
        by_model = {
            name: {(c.seed, c.training, c.projection) for c in cells if c.model == name}
            for name in ("softmax", "coda")
        }
        assert by_model["softmax"] == by_model["coda"]


def test_the_papers_numbers_stand_beside_those_of_its_data():
    for preset, em in (("paper-quasar-t", {0.386, 0.413}), ("paper-searchqa", {0.568, 0.572})):
        cells = STUDY.plan(preset).cells
        assert {n.value for c in cells for n in c.paper() if n.metric == "exact_match"} == em
    assert not any(cell.paper() for cell in STUDY.plan("paper").cells)
    names = {e.name for e in read_paper("tay_2019").experiments if e.study == STUDY.name}
    assert len(names) == 4


def test_a_preset_of_published_data_runs_and_decides_its_claims(tmp_path):
    """On few questions in the layout of Quasar-T."""
    write_quasar(tmp_path / "data")
    changes = [
        *TINY.split(),
        f"task.path={tmp_path / 'data'}",
        "task.min_count=1",
        "training.batch_size=2",
        "training.learning_rate=0.001",
        "seed=0",
        "n_validation=2",
    ]
    resources = Resources(root=tmp_path / "runs", workers=1)
    folder = run(STUDY, "paper-quasar-t", changes, resources=resources)
    found = read_result(folder / "result.nc")
    assert found["scores"]["split"].to_numpy().tolist() == ["valid", "test"]
    paper = found["scores"]["exact_match_paper"].sel(split="test", group="all")
    assert sorted(paper.to_numpy()) == [0.386, 0.413]
    verdicts = dict(
        zip(found["claims"]["statement"].values, found["claims"]["verdict"].values, strict=True)
    )
    assert verdicts["On Quasar-T CoDA in DecaProp matches more answers exactly"] == "undecided"
    assert verdicts["On SearchQA CoDA in DecaProp matches more answers exactly"] == "not run"
    assert all(verdict == "not run" for name, verdict in verdicts.items() if "generated" in name), (
        verdicts
    )
    assert isinstance(STUDY.presets["paper-quasar-t"].setup, StoredQuestionsSetup)
