"""Setups of stored texts and pairs, trained on small files in published layouts."""

import random
from functools import partial

import numpy as np
import pytest

import tasks
from studies import engine
from studies.engine import Resources, read_result, run
from studies.setups.quasi_attention import signs
from studies.setups.ranking import ranking
from studies.setups.stored_texts import StoredPairsSetup, StoredTextSetup

TRAINING = engine.TrainingConfig(
    n_steps=4, batch_size=4, learning_rate=1e-3, warmup_steps=0, evaluate_every=2
)
SIZES = {"model": "coda", "d_model": 8, "n_heads": 2, "training": TRAINING, "n_validation": 6}
WORDS = ["who", "what", "rain", "sun", "moon", "falls", "shines", "never", "often", "it"]


def sentence(generator):
    return " ".join(generator.choices(WORDS, k=generator.randint(1, 7)))


def write_pairs(folder):
    """TrecQA: five questions in each split, with three answers."""
    generator = random.Random(0)
    for split in ("train", "dev", "test"):
        lines = []
        for number in range(5):
            lines += [f"<QApairs id='{number}'>", "<question>", sentence(generator), "</question>"]
            for kind in ("positive", "negative", "negative"):
                lines += [f"<{kind}>", sentence(generator), f"</{kind}>"]
            lines.append("</QApairs>")
        (folder / f"{split}.xml").write_text("\n".join(lines))


def write_texts(folder):
    """Trees of the treebank."""
    generator = random.Random(0)
    for split in ("train", "dev", "test"):
        lines = []
        for number in range(20):
            words = " ".join(f"(2 {word})" for word in sentence(generator).split())
            lines.append(f"({number % 5} {words} (2 .))")
        (folder / f"{split}.txt").write_text("\n".join(lines))


def pairs(folder):
    write_pairs(folder)
    task = tasks.PairsConfig(name="trecqa", path=str(folder), min_count=1)
    return StoredPairsSetup(**SIZES, task=task, alignment="networks", dropout=0.1)


def texts(folder):
    write_texts(folder)
    task = tasks.ClassificationConfig(name="sst5", path=str(folder), min_count=1)
    return StoredTextSetup(**SIZES, task=task, d_mlp=8, n_layers=2, gate_centring="matrix")


@pytest.mark.parametrize("make", [pairs, texts])
def test_a_study_of_stored_texts_runs(make, tmp_path):
    (data := tmp_path / "data").mkdir()
    setup = make(data)
    study = engine.Study(
        name="stored",
        question="Does it run?",
        setup=setup,
        grids=({"model": ("softmax", "coda"), "seed": (0,)},),
        presets={"laptop": engine.Preset(changes="signs.n=8")},
        measures={"signs": signs, "ranking": partial(ranking, n=50)},
        table=engine.Table(
            title="Right answers",
            rows=(engine.Row("test", engine.metric("accuracy", "test")),),
            caption="Share of right answers.",
        ),
    )
    folder = run(study, "laptop", [], resources=Resources(root=tmp_path / "runs", workers=1))
    result = read_result(folder / "result.nc")
    scores = result["scores"].to_dataset().sel(group="all")
    assert set(scores["split"].to_numpy()) == {"valid", "test"}
    assert np.isfinite(scores["accuracy"]).all()
    majority = 2 / 3 if make is pairs else 1 / 5
    assert scores["accuracy_chance"].sel(split="test").to_numpy() == pytest.approx(majority)
    assert (result["signs"]["share"].sel(split="test") >= 0).any()
    if make is pairs:
        score = result["ranking"]["reciprocal_rank"].sel(split="test")
        assert ((score > 1 / 3 - 1e-9) & (score <= 1)).all()
    else:
        assert "ranking" not in result.children


def test_missing_data_fail_before_training(tmp_path):
    setup = pairs(tmp_path)
    for file in tmp_path.iterdir():
        file.unlink()
    with pytest.raises(FileNotFoundError, match="Fetch it from any of its copies"):
        setup.prepare()
