import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import tasks
from studies.contextual_retrieval import (
    MOST_COMBINATIONS,
    RetrievalModel,
    assemble,
    errors_by_combination,
    errors_of_objects,
    mean_errors,
    presets,
    run,
)
from studies.costs import costs_of
from studies.running import Resources, load_model_config
from studies.runs import RunError
from studies.settings import override
from studies.training import load_weights

SCRIPT = Path(__file__).parents[2] / "studies" / "contextual_retrieval.py"
SMOKE = ["mechanisms=multi_head,compositional", "seeds=0,3"]
STUDY = override(presets()["smoke"], SMOKE)


def command(*words):
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--preset", "smoke", "--workers", "1", *words],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"COLUMNS": "80", "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    done = command(*SMOKE, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = out.glob("contextual_retrieval-*")
    return folder, done.stdout


@pytest.fixture(scope="module")
def result(smoke):
    with xr.open_datatree(smoke[0] / "result.nc", engine="h5netcdf") as tree:
        return tree.load()


def test_the_command_prints_the_tables_and_where_the_files_are(smoke):
    folder, printed = smoke
    for text in ("Mean absolute error", "Claims", "multi-head", "compositional", "of 2"):
        assert text in printed
    assert max(map(len, printed.splitlines())) <= max(80, len(str(folder)) + 30)
    assert str(folder) in printed


def test_the_result_tells_what_it_is(result):
    assert json.loads(result.attrs["config"])["study"]["seeds"] == [0, 3]
    cells = result["errors"]["cell"]
    assert cells["model"].to_numpy().tolist() == ["multi_head"] * 2 + ["compositional"] * 2
    assert cells["seed"].to_numpy().tolist() == [0, 3, 0, 3]
    assert result["pairing"].sizes["cell"] == result["forcing"].sizes["cell"] == 2
    for group in result.subtree:
        for name, variable in group.variables.items():
            assert variable.attrs.get("long_name"), (group.path, name)


def test_errors_are_those_of_the_best_checkpoint(smoke, result):
    for number, cell in enumerate(STUDY.trained_models()):
        task, model = tasks.ContextualRetrieval(cell.task), cell.build().eval()
        load_weights(model, smoke[0].parent / "models" / cell.folder_name / "best.safetensors")
        found = result["errors"].to_dataset().isel(cell=number)
        for split in ("id", "ood"):
            batch = task.batch(split, 1, STUDY.n_test)
            with torch.no_grad():
                error = (model(batch.inputs)[..., 0] - batch.targets).abs()
            one = found.sel(split=split)
            assert one["error"] == pytest.approx(error.mean().item(), rel=1e-4)
            assert one["error_low"] < one["error"] < one["error_high"]
            assert one["constant"] == pytest.approx(task.baseline(split)["absolute_error"])
            for combination in batch.latents["combination"].unique().tolist():
                mean = error[batch.latents["combination"] == combination].mean().item()
                shown = result["combinations"].to_dataset().isel(cell=number)
                shown = shown.sel(combination=combination)
                assert shown["error"] == pytest.approx(mean, rel=1e-4)
                assert shown["held_out"] == (split == "ood")


def test_the_training_that_is_shown_is_that_of_the_log(smoke, result):
    cell = STUDY.trained_models()[0]
    log = smoke[0].parent / "models" / cell.folder_name / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    shown = result["training"]["error"].isel(cell=0)
    assert shown["train_step"].to_numpy().tolist() == [line["step"] for line in lines] == [10, 20]
    assert np.allclose(shown.sel(split="ood"), [line["ood/error"] for line in lines])


def test_the_summary_is_over_seeds(result):
    means = result["summary"].to_dataset()
    errors = result["errors"]["error"].sel(split="ood").to_numpy()
    for place, of_model in enumerate((errors[:2], errors[2:])):
        one = means.sel(figure="ood").isel(condition=place)
        assert one["mean"] == pytest.approx(of_model.mean())
        assert (one["lowest"], one["highest"]) == (of_model.min(), of_model.max())
    assert np.isnan(means["mean"].sel(figure="agreement_ood")[0])


def test_pairing_and_forcing_look_at_the_same_error(result):
    none = result["forcing"]["mean_error"].sel(condition="none").to_numpy()
    ood = result["errors"].to_dataset().sel(split="ood")["error"].to_numpy()[2:]
    assert np.allclose(none, ood, rtol=1e-4)
    activation = result["pairing"]["activation"]
    assert np.allclose(activation.sum("model_retrieval").max(), 1)
    assert result["forcing"]["condition"].to_numpy().tolist()[-1] == "familiar"


def test_a_finished_run_is_not_run_again(smoke):
    before = (smoke[0] / "result.nc").stat().st_mtime_ns
    resources = Resources(root=smoke[0].parent)
    assert run(STUDY, resources=resources) == smoke[0]
    assert (smoke[0] / "result.nc").stat().st_mtime_ns == before


def test_sizes_can_differ_in_what_is_kept_of_them():
    study = override(STUDY, ["mechanisms=multi_head,compositional", "sizes=2x2,1x300", "seeds=0"])
    cells = study.trained_models()
    trees = []
    for cell in cells:
        task, model = tasks.ContextualRetrieval(cell.task), cell.build().eval()
        batches = {split: task.batch(split, 0, 20) for split in ("id", "ood")}
        errors = errors_of_objects(cell, model, batches)
        found = {
            "errors": mean_errors(cell, errors),
            "costs": costs_of(model, batches["id"].inputs),
        }
        if cell.task.n_combinations <= MOST_COMBINATIONS:
            found["combinations"] = errors_by_combination(cell, batches, errors)
        trees.append(xr.DataTree.from_dict(found))
    assembled = assemble(cells, trees)
    assert assembled["combinations"].sizes["cell"] == 2
    assert assembled["summary"].sizes["condition"] == 4


def test_trained_models_can_be_analysed_alone(smoke, tmp_path):
    cell = STUDY.trained_models()[2]
    place = smoke[0].parent / "models" / cell.folder_name
    assert load_model_config(place, RetrievalModel, STUDY.tasks()) == cell
    folder = run(STUDY, resources=Resources(root=tmp_path), checkpoints=(place,))
    with xr.open_datatree(folder / "result.nc", engine="h5netcdf") as tree:
        assert tree["errors"].sizes["cell"] == 1
    other = override(STUDY, ["seeds=7"])
    with pytest.raises(RunError, match="was trained on"):
        run(other, resources=Resources(root=tmp_path), checkpoints=(place,))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("sizes=2by4", "sizes must be such as 2x4"),
        ("d_models=7", "d_models must be multiples of 2"),
        ("seeds=1,1", "seeds must be different"),
        ("mechanisms=linear", "mechanisms"),
        ("n_test=3", "n_test must be at least 10"),
    ],
)
def test_wrong_settings_are_told(setting, message):
    with pytest.raises(ValueError, match=message):
        override(presets()["smoke"], [setting])


def test_the_paper_preset_is_the_papers():
    paper = presets()["paper"]
    assert len(paper.trained_models()) == 3 * 5 * 2 * 3
    assert (paper.training.n_steps, paper.training.batch_size) == (100_000, 256)
    assert paper.training.learning_rate_at(50_000) == 1e-4
    largest = paper.trained_models()[-1]
    assert (largest.task.n_retrievals, largest.d_model) == (16, 512)
    assert largest.build()(torch.zeros(1, 10, 4 + 16 + 64)).shape == (1, 10, 1)
