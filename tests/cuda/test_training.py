"""Training on the device, in every precision and compiled: a killed run goes on, studies run."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tasks
from studies.engine import TrainingConfig
from studies.engine.cells import Cell, train_together
from studies.engine.checkpoints import read_log
from studies.engine.examples import Examples
from studies.engine.trained import initial_model
from studies.setups.latent_code import FuzzySetup, RavenSetup
from tests.contracts.test_studies import STUDIES
from tests.studies.engine.toy import TOY

SIZES = {"n_layers": 2, "d_model": 16, "n_heads": 4, "d_head": 4, "d_mlp": 16, "n_validation": 100}
TRAINING = TrainingConfig(
    n_steps=8,
    batch_size=16,
    learning_rate=3e-3,
    weight_decay=0.1,
    warmup_steps=2,
    evaluate_every=2,
    clip=1.0,
)
RAVEN = RavenSetup(
    model="hyla", task=tasks.RavenConfig(n_features=2, seed=4), training=TRAINING, **SIZES
)
FUZZY = FuzzySetup(model="hyla", n_points=8, training=TRAINING, **SIZES)
PRECISIONS = ("float32", "tf32", "bf16")


def cell_with(root, device, setup, *, dropout=0.1, **changes):
    """A cell of a small transformer, with changes of `TrainingConfig`."""
    training = replace(setup.training, **changes)
    setup = replace(setup, attention_dropout=dropout, training=training)
    return Cell(setup, root=root, device=device)


def weights_of(cell):
    tensors = load_file(cell.folder / "last.safetensors")
    return {name: x.flatten() for name, x in tensors.items() if name.startswith("model/")}


def draw_until(step):
    """A method of `Examples` in whose call for this step the process is interrupted."""
    draw = Examples.train

    def interrupted(self, at, size):
        if at == step:
            raise KeyboardInterrupt
        return draw(self, at, size)

    return interrupted


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.usefixtures("quick_compilation")
def test_a_killed_run_goes_on_and_ends_as_a_whole_one(precision, compiled, device, tmp_path):
    settings = {"precision": precision, "compile": compiled}
    whole, parts = (cell_with(tmp_path / name, device, RAVEN, **settings) for name in ("a", "b"))
    whole.train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Examples, "train", draw_until(step=5))
        with pytest.raises(KeyboardInterrupt):
            parts.train()
    assert [entry["step"] for entry in read_log(parts.folder)] == [2, 4]
    parts.train()
    assert [entry["step"] for entry in read_log(parts.folder)] == [2, 4, 6, 8]
    assert all(np.isfinite(entry["loss"]) for entry in read_log(whole.folder))
    expected, actual = weights_of(whole), weights_of(parts)
    if device == "cpu":
        assert all(torch.equal(actual[name], x) for name, x in expected.items())
    # On a GPU sums may be added in another order, and Adam scales what is close to 0 up.
    expected, actual = (
        torch.cat([x.flatten() for x in each.values()]) for each in (expected, actual)
    )
    assert expected.dtype == torch.float32
    assert (actual - expected).norm() < 0.01 * expected.norm()


@pytest.mark.usefixtures("quick_compilation")
def test_losses_agree_in_every_precision_and_compiled(device, tmp_path):
    losses = {}
    for precision in PRECISIONS:
        for compiled in (False, True):
            settings = {"n_steps": 3, "evaluate_every": 1, "learning_rate": 1e-3}
            settings |= {"precision": precision, "compile": compiled}
            # No dropout: a compiled model may draw other masks. Not Raven: in its blank tokens,
            # which are 0 before training, the last bits of the first steps count.
            cell = cell_with(tmp_path, device, FUZZY, dropout=0.0, **settings)
            cell.train()
            losses[precision, compiled] = [entry["loss"] for entry in read_log(cell.folder)]
    for name, loss in losses.items():
        assert np.allclose(loss, losses["float32", False], rtol=0.03), name


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.usefixtures("quick_compilation")
def test_seeds_trained_as_one_batched_model_end_as_alone(optimizer, compiled, device, tmp_path):
    moves = []
    for size in (1, 2):
        settings = {"optimizer": optimizer, "warmup_steps": 0, "compile": compiled and size == 2}
        cells = [
            cell_with(tmp_path / f"{size}", device, replace(FUZZY, seed=n), dropout=0.0, **settings)
            for n in (0, 1)
        ]
        for first in range(0, 2, size):
            train_together(cells[first : first + size])
        moves.append(list(map(moved, cells)))
    for alone, together in zip(*moves, strict=True):
        assert (together - alone).norm() < 0.1 * alone.norm()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.usefixtures("quick_compilation")
def test_seeds_with_dropout_are_trained_as_one_batched_model(compiled, device, tmp_path):
    setups = [replace(RAVEN, seed=seed) for seed in (0, 1)]
    cells = [cell_with(tmp_path, device, setup, compile=compiled) for setup in setups]
    train_together(cells)
    for cell in cells:
        losses = [entry["loss"] for entry in read_log(cell.folder)]
        assert np.isfinite(losses).all()
        assert len(set(losses)) == len(losses)


@pytest.mark.parametrize("model", ["hyla", "softmax"])
def test_a_compiled_model_is_one_graph(model, device):
    # Each break costs some of the speed, and CUDA graphs end there.
    batch = Examples(RAVEN, device).train(0, 4)
    setup = replace(RAVEN, model=model, attention_dropout=0.1)
    trained = setup.build(torch.Generator().manual_seed(0)).to(device).train()
    explained = torch._dynamo.explain(trained)(batch.inputs)
    torch._dynamo.reset()
    assert explained.graph_break_count == 0


def moved(cell):
    """How far training has moved all weights."""
    before = {f"model/{k}": x for k, x in initial_model(cell.setup, "cpu").state_dict().items()}
    return torch.cat([x - before[name].flatten() for name, x in weights_of(cell).items()])


def test_a_cell_is_trained_evaluated_and_measured(device, tmp_path):
    cell = cell_of(TOY, "laptop", tmp_path, device)
    cell.train()
    cell.measure()
    result = cell.load()
    assert cell.finished
    assert cell.provenance()["device"] == device
    assert np.isfinite(result["training"]["training_loss"]).all()


def cell_of(study, preset, root, device):
    """The first cell of a study, in few steps, with all measures."""
    plan = study.plan(preset, ["training.n_steps=4", "training.evaluate_every=2"])
    return Cell(plan.cells[0], root=root, device=device, measures=plan.measures)


@pytest.mark.cuda
@pytest.mark.parametrize("study", STUDIES)
def test_every_study_trains_and_measures_on_cuda(study, tmp_path):
    """On the CPU, the tests of each study do this."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    cell = cell_of(study, "smoke", tmp_path, "cuda")
    cell.train()
    cell.measure()
    assert set(cell.load()) >= {"scores", "training", "costs"}
