"""Presets that train in half precision: each of their conditions does so, in small."""

import json
from dataclasses import replace

import pytest
import torch

import tasks
from studies import compositional_benchmarks, language_modelling
from studies.engine.cells import Cell
from studies.setups.text import TextSetup
from tests.contracts.test_studies import STUDIES

BF16 = {
    (study.name, preset): study
    for study in (parameter.values[0] for parameter in STUDIES)
    for preset in study.presets
    if any(cell.training.precision == "bf16" for cell in study.plan(preset).cells)
}


def in_small(setup, path):
    """The setup with other sizes, a text of its own, and few steps."""
    training = replace(
        setup.training,
        n_steps=4,
        batch_size=8,
        n_parts=min(2, setup.training.n_parts),
        warmup_steps=1,
        evaluate_every=2,
    )
    task = tasks.TextConfig(path=str(path), vocabulary_size=270, length=16)
    sizes = {"d_model": 16, "d_mlp": 64, "n_heads": 2, "n_layers": 2, "n_validation": 4}
    return replace(setup, **sizes, task=task, training=training, seed=0)


def conditions():
    """The conditions of all such presets, and all mechanisms of the language study."""
    cells = [
        (name, cell)
        for (name, preset), study in BF16.items()
        for cell in study.plan(preset).cells
        if cell.seed == 0
    ]
    base = language_modelling.STUDY.plan("paper-c4").cells[0]
    for positions in ("relative", "rotary"):
        base = replace(base, positions=positions)
        cells += [("language_modelling", replace(base, model=name)) for name in base.models()]
    labels = [f"{name}: {cell.model}, {getattr(cell, 'positions', '')}" for name, cell in cells]
    return [pytest.param(cell, id=label) for label, (_, cell) in zip(labels, cells, strict=True)]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text("It was a bright cold day in April, and so on.\n" * 80)
    with pytest.MonkeyPatch.context() as patch:
        # Nothing is left in the user's cache.
        patch.setattr("tasks.stored.text.save_arrays", lambda *_: None)
        yield path


def test_the_presets_of_texts_train_in_half_precision():
    names = {language_modelling.STUDY.name, compositional_benchmarks.TEXT.name}
    assert {name for name, _ in BF16} == names
    # The text of `in_small` fits their setups only.
    assert all(isinstance(study.setup, TextSetup) for study in BF16.values())


@pytest.mark.parametrize("setup", conditions())
def test_a_few_steps_are_those_of_single_precision(setup, text, tmp_path):
    losses, half = {}, in_small(setup, text)
    assert half.training.precision == "bf16"
    for precision in ("bf16", "float32"):
        cell = replace(half, training=replace(half.training, precision=precision))
        trained = Cell(cell, root=tmp_path / precision)
        trained.train()
        log = [json.loads(line) for line in (trained.folder / "log.jsonl").read_text().splitlines()]
        losses[precision] = torch.tensor([entry["loss"] for entry in log])
    assert losses["bf16"].isfinite().all()
    torch.testing.assert_close(losses["bf16"], losses["float32"], rtol=0.02, atol=0)
