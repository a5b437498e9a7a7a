"""The study of generated texts."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from studies.engine import Resources, read_result, run
from studies.text_generation import ALGOLISP, TRANSLATION
from tests.tasks.algolisp.test_problems import write_problems
from tests.tasks.stored.test_sequences import write_parallel

pytestmark = pytest.mark.slow

STUDIES = {"translation": TRANSLATION, "algolisp": ALGOLISP}
TINY = (
    *("d_model=8", "n_heads=2", "d_mlp=8", "n_layers=1", "seed=0", "n_validation=2"),
    *("training.n_steps=2", "training.keep_at=1,2", "training.evaluate_every=1"),
    *("training.batch_size=4", "scores.n_test=9", "signs.n=4"),
)


def result_of(study, preset, changes, folder):
    resources = Resources(root=folder, workers=1)
    folder = run(replace(study, views={}), preset, changes, resources=resources)
    return read_result(folder / "result.nc")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return {
        name: result_of(study, "smoke", [], tmp_path_factory.mktemp(name))
        for name, study in STUDIES.items()
    }


@pytest.mark.parametrize(
    ("name", "words", "undrawn"),
    [
        ("translation", ["CoDA", "BLEU, ood", "aligned", "M<0"], ["tuning", "ablation"]),
        ("algolisp", ["CoDA", "right, ood", "solved, id"], ["tuning"]),
    ],
)
def test_the_table_and_every_view_are_drawn(name, words, undrawn, results):
    study, result = STUDIES[name], results[name]
    console = Console(width=120)
    with console.capture() as capture:
        console.print(study.table.render(result))
    for word in words:
        assert word in capture.get()
    drawn = {view: draw(result) for view, draw in study.views.items()}
    assert [view for view, figure in drawn.items() if figure is None] == undrawn
    for figure in filter(None, drawn.values()):
        figure.savefig(io.BytesIO(), dpi=30)


def test_the_best_head_on_id_is_read_on_ood(results):
    translated = results["translation"]
    share = translated["alignment"]["share"].sel(control="observed", target="aligned")
    reading = TRANSLATION.table.rows[7].reading
    assert TRANSLATION.table.rows[7].label == "aligned"
    for cell, value in enumerate(reading.values(translated)):
        known = share.isel(cell=cell).stack(head_of=("layer", "head")).to_numpy()
        on_id, on_ood = known
        assert value == on_ood[np.argmax(on_id)]


@pytest.mark.parametrize("name", STUDIES)
def test_some_preset_has_the_models_of_every_claim(name):
    study = STUDIES[name]
    known = []
    for preset in ("laptop", *study.presets):
        plan = study.plan(preset)
        known += [plan.coordinates(cell) for cell in plan.cells]
    for claim in study.claims:
        for side in (claim.of, claim.other):
            assert isinstance(side, float) or any(
                all(one.get(key, "") in (value, None) for key, value in side.items())
                for one in known
            ), claim.statement


def test_the_tables_of_the_paper_have_all_their_rows():
    numbers = {"laptop": 2 * 4 * 3, "ablation": (8 + 2) * 4 * 3, "paper": 2 * 3}
    numbers |= {
        "centring": 3 * (4 * 3 + 4),
        "paper-iwslt": 2 * 3,
        "paper-iwslt-ablation": (8 + 2) * 3,
    }
    assert {name: len(TRANSLATION.plan(name).cells) for name in numbers} == numbers
    numbers = {"laptop": 2 * 4 * 3, "paper": 2 * 3, "paper-algolisp": 2 * 3}
    assert {name: len(ALGOLISP.plan(name).cells) for name in numbers} == numbers


# Published data


def test_sentences_of_iwslt_are_translated_from_files_to_bleu(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    write_parallel(data)
    changes = [
        *TINY,
        "decoding.n=6",
        "decoding.averaged=2",
        f"task.path={data}",
        "task.vocabulary_size=300",
    ]
    result = result_of(TRANSLATION, "paper-iwslt", changes, tmp_path)
    scores = result["decoding"]
    assert scores["split"].to_numpy().tolist() == ["valid", "test"]
    assert (scores["bleu"] >= 0).all()
    assert "alignment" not in result.children
    paper = scores["bleu_paper"].sel(search="beam")
    models = scores["model"].to_numpy().tolist()
    # On the development set plain CoDA alone is in Tables 8 and 9.
    for split, known in (
        ("test", {"softmax": 28.43, "coda": 29.84}),
        ("valid", {"softmax": np.nan, "coda": 27.8}),
    ):
        expected = [known[model] for model in models]
        np.testing.assert_array_equal(paper.sel(split=split), expected)


def test_published_programs_are_written_from_files_to_tests(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    write_problems(data, n=6)
    changes = [*TINY, "execution.n=4", f"task.path={data}", "task.vocabulary_size=300"]
    result = result_of(ALGOLISP, "paper-algolisp", changes, tmp_path)
    assert result["execution"]["split"].to_numpy().tolist() == ["valid", "test"]
    assert ((result["execution"]["solved"] >= 0) & (result["execution"]["solved"] <= 1)).all()
    scores = result["scores"]
    paper = scores["accuracy_paper"].sel(split="test", group="all").to_numpy().tolist()
    expected = {"softmax": 0.968, "coda": 0.977}
    assert paper == [expected[model] for model in scores["model"].to_numpy().tolist()]


@pytest.mark.parametrize(
    ("study", "preset", "source"),
    [
        (TRANSLATION, "paper-iwslt", r"nlp\.stanford\.edu/projects/nmt"),
        (ALGOLISP, "paper-algolisp", r"metaset3\.train\.jsonl"),
    ],
)
def test_missing_data_are_told_before_training(study, preset, source, tmp_path):
    setup = study.plan(preset, [f"task.path={tmp_path}"]).cells[0]
    with pytest.raises(FileNotFoundError, match=source):
        setup.prepare()


def test_the_rate_of_the_paper_preset_is_tensor2tensors():
    """0.1 min(step / warmup, 1) / sqrt(max(step, warmup))."""
    training = TRANSLATION.plan("paper-iwslt").setup.training
    for step in (1, 8000, 16_000, 50_000):
        expected = 0.1 * min(step / 16_000, 1) / max(step, 16_000) ** 0.5
        assert training.learning_rate_at(step - 1) == pytest.approx(expected)
    assert training.keep_at == tuple(1000 * k for k in range(43, 51))
    training = ALGOLISP.plan("paper-algolisp").setup.training
    for step in (1, 8000, 100_000):
        expected = 2 * 128**-0.5 * min(step * 8000**-1.5, step**-0.5)
        assert training.learning_rate_at(step - 1) == pytest.approx(expected)


# Settings


@pytest.mark.parametrize(
    ("study", "preset"),
    [
        *((TRANSLATION, preset) for preset in ("laptop", "smoke", "ablation", "paper")),
        *((ALGOLISP, preset) for preset in ("laptop", "smoke", "paper")),
    ],
)
def test_models_of_every_preset_learn_from_a_batch(study, preset):
    kinds = {(one.model, one.composition): one for one in study.plan(preset).cells}
    for setup in kinds.values():
        small = replace(setup, d_model=4 * setup.n_heads, n_layers=1)
        batch = small.sampler().batch("train", 0, 3)
        loss = small.loss(small.build(torch.Generator().manual_seed(0)), batch, 0)
        assert torch.isfinite(loss)
