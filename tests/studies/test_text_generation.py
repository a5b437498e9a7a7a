"""The study of generated texts."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from studies.engine import Resources, read_result, run
from studies.text_generation import TRANSLATION
from tests.tasks.stored.test_sequences import write_parallel

STUDIES = {"translation": TRANSLATION}
TINY = (
    *("d_model=8", "n_heads=2", "d_mlp=8", "n_layers=1", "seed=0", "n_validation=2"),
    *("training.n_steps=2", "training.keep_at=1,2", "training.evaluate_every=1"),
    *("training.batch_size=4", "scores.n_test=9", "signs.n=4", "decoding.averaged=2"),
)


def result_of(study, preset, changes, folder):
    resources = Resources(root=folder, workers=1)
    folder = run(replace(study, views={}), preset, changes, resources=resources)
    return read_result(folder / "result.nc")


@pytest.fixture(scope="module")
def translated(tmp_path_factory):
    return result_of(TRANSLATION, "smoke", [], tmp_path_factory.mktemp("smoke"))


def test_the_table_and_every_view_are_drawn(translated):
    console = Console(width=120)
    with console.capture() as capture:
        console.print(TRANSLATION.table.render(translated))
    for word in ("CoDA", "BLEU, ood", "aligned", "M<0"):
        assert word in capture.get()
    drawn = {name: view(translated) for name, view in TRANSLATION.views.items()}
    assert [name for name, figure in drawn.items() if figure is None] == ["ablation"]
    for figure in filter(None, drawn.values()):
        figure.savefig(io.BytesIO(), dpi=30)


def test_the_best_head_on_id_is_read_on_ood(translated):
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
    numbers = {"laptop": 2 * 3 * 3, "ablation": (8 + 2) * 3 * 3, "paper": 2 * 3}
    numbers |= {"paper-iwslt": 2 * 3, "paper-iwslt-ablation": (8 + 2) * 3}
    assert {name: len(TRANSLATION.plan(name).cells) for name in numbers} == numbers


# Published data


def test_sentences_of_iwslt_are_translated_from_files_to_bleu(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    write_parallel(data)
    changes = [*TINY, "decoding.n=6", f"task.path={data}", "task.vocabulary_size=300"]
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


def test_missing_sentences_are_told_before_training(tmp_path):
    setup = TRANSLATION.plan("paper-iwslt", [f"task.path={tmp_path}"]).cells[0]
    with pytest.raises(FileNotFoundError, match=r"nlp\.stanford\.edu/projects/nmt"):
        setup.prepare()


def test_the_rate_of_the_paper_preset_is_tensor2tensors():
    """0.1 min(step / warmup, 1) / sqrt(max(step, warmup))."""
    training = TRANSLATION.plan("paper-iwslt").setup.training
    for step in (1, 8000, 16_000, 50_000):
        expected = 0.1 * min(step / 16_000, 1) / max(step, 16_000) ** 0.5
        assert training.learning_rate_at(step - 1) == pytest.approx(expected)
    assert training.keep_at == tuple(1000 * k for k in range(43, 51))


# Settings


@pytest.mark.parametrize("preset", ["laptop", "smoke", "ablation", "paper"])
def test_models_of_every_preset_learn_from_a_batch(preset):
    kinds = {(one.model, one.composition): one for one in TRANSLATION.plan(preset).cells}
    for setup in kinds.values():
        small = replace(setup, d_model=4 * setup.n_heads, n_layers=1)
        batch = small.sampler().batch("train", 0, 3)
        loss = small.loss(small.build(torch.Generator().manual_seed(0)), batch, 0)
        assert torch.isfinite(loss)
