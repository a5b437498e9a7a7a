"""Checkpoint files: the mean of kept weights, against a literal mean, and a full disk."""

import resource
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from studies.engine import RunError
from studies.engine.cells import Cell
from studies.engine.checkpoints import Checkpoints, kept_checkpoints, load_mean_weights
from tests.studies.engine.toy import TOY


def kept(folder, numbers):
    """Files of the weights of a linear layer, filled with numbers, by step."""
    for step, number in numbers.items():
        model = nn.BatchNorm1d(2)
        nn.init.constant_(model.weight, number)
        model.num_batches_tracked.fill_(step)
        tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
        save_file(tensors, folder / f"step-{step}.safetensors")
    return kept_checkpoints(folder)


def test_weights_are_averaged_and_counts_are_the_last_ones(tmp_path):
    files = kept(tmp_path, {100: 5.0, 5: 1.0, 20: 3.0})
    assert list(files) == [5, 20, 100]
    model = nn.BatchNorm1d(2)
    load_mean_weights(model, list(files.values()))
    assert model.weight.tolist() == [3.0, 3.0]
    assert model.num_batches_tracked == 100
    load_mean_weights(model, [files[20], files[100]])
    assert model.weight.tolist() == [4.0, 4.0]


class Tied(nn.Module):
    """An embedding whose weights are those of the output, too."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        self.out.weight = self.embed.weight


def test_tied_weights_are_kept_and_stay_tied(tmp_path):
    model, again = Tied(), Tied()
    Checkpoints(tmp_path, "abc", writes=True).save(model, {}, [{"step": 1}], best=True)
    assert Checkpoints(tmp_path, "abc", writes=True).load(again)[0] == [{"step": 1}]
    assert torch.equal(again.out.weight, model.embed.weight)
    assert again.out.weight is again.embed.weight


def test_files_must_fit_the_model(tmp_path):
    files = list(kept(tmp_path, {1: 1.0, 2: 2.0}).values())
    with pytest.raises(RunError, match=r"step-2.safetensors does not fit the model"):
        load_mean_weights(nn.Linear(2, 2), files)


def test_a_measure_gets_the_mean_of_the_last_kept_weights(tmp_path):
    training = replace(TOY.setup.training, n_steps=6, evaluate_every=3, keep_at=(2, 4, 5, 9))
    found = {}

    def look(trained):
        # The step 9 is after the end of training.
        with pytest.raises(RunError, match=r"mean of 4 checkpoints needs .*keep_at, got 3"):
            trained.averaged(4)
        found["mean"], found["tested"] = trained.averaged(2), trained.model

    cell = Cell(replace(TOY.setup, training=training), root=tmp_path, measures={"look": look})
    cell.train()
    cell.measure()
    files = [load_file(cell.folder / f"step-{step}.safetensors") for step in (4, 5)]
    for name, tensor in found["mean"].state_dict().items():
        first, second = (file[f"model/{name}"] for file in files)
        torch.testing.assert_close(tensor, (first + second) / 2)
        assert not torch.equal(tensor, first)
    assert not found["mean"].training


def test_a_disk_that_is_full_is_an_error_and_the_old_file_stays(tmp_path):
    files, model = Checkpoints(tmp_path, "abc", writes=True), nn.Linear(200, 200)
    files.keep(model, 5)
    before = (tmp_path / "step-5.safetensors").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # As a full disk does, it fails the writing of more bytes.
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(RunError, match=r"cannot write .*step-5.safetensors: .*too large"):
            files.keep(model, 5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "step-5.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["step-5.safetensors"]
