import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import mechanisms
from studies.modular_claims import MODULAR
from studies.modular_routing import (
    MODELS,
    ModularModel,
    closing_table,
    objective_of,
    operations_of,
    presets,
    run,
    task_of,
    temperature_at,
)
from studies.running import Resources, load_model_config
from studies.runs import RunError
from studies.settings import override
from studies.training import load_weights

SCRIPT = Path(__file__).parents[2] / "studies" / "modular_routing.py"
SMOKE = ["models=cross_attention,monolithic", "selection_bottlenecks=false,true", "seeds=0"]
STUDY = override(presets()["smoke"], SMOKE)
ENVIRONMENT = os.environ | {"COLUMNS": "120", "OMP_NUM_THREADS": "1"}


def command(*words):
    return [sys.executable, str(SCRIPT), "--preset", "smoke", "--workers", "1", *words]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    done = subprocess.run(
        command(*SMOKE, "--out", str(out)),
        capture_output=True,
        text=True,
        timeout=300,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = out.glob("modular_routing-*")
    return folder, done.stdout


@pytest.fixture(scope="module")
def result(smoke):
    with xr.open_datatree(smoke[0] / "result.nc", engine="h5netcdf") as tree:
        return tree.load()


def test_the_command_prints_the_tables_and_where_the_files_are(smoke):
    folder, printed = smoke
    for text in (
        "Losses and routing",
        "The paper's claims",
        "cross attention, with bottleneck",
        "monolithic",
    ):
        assert text in printed
    assert str(folder) in printed
    assert {path.suffix for path in folder.iterdir() if path.is_file()} == {
        ".json",
        ".nc",
        ".png",
        ".pdf",
    }


def test_the_result_tells_what_it_is(result):
    assert json.loads(result.attrs["config"])["study"]["seeds"] == [0]
    cells = result["losses"]["cell"]
    assert cells["model"].to_numpy().tolist() == [*["cross_attention"] * 2, "monolithic"]
    assert cells["selection_bottleneck"].to_numpy().tolist() == [0, 1, 0]
    assert result["specialization"].sizes["cell"] == 2
    # No coordinate makes xarray take an array for something else.
    assert np.isfinite(np.log10(result["losses"]["loss"])).all()
    for group in result.subtree:
        for name, variable in group.variables.items():
            assert variable.attrs.get("long_name"), (group.path, name)


def test_losses_are_those_of_the_best_checkpoint(smoke, result):
    for number, cell in enumerate(STUDY.trained_models()):
        task, model = task_of(cell.task), cell.build().eval()
        load_weights(model, smoke[0].parent / "models" / cell.folder_name / "best.safetensors")
        for split in ("id", "ood"):
            size = task.size(split) if split == "id" else min(STUDY.n_test, task.size(split))
            batch = task.batch(split, 0, size)
            with torch.no_grad():
                loss = (model(batch.inputs) - batch.targets).square().mean().item()
            one = result["losses"].to_dataset().isel(cell=number).sel(split=split)
            assert one["loss"] == pytest.approx(loss, rel=1e-4)
            assert one["loss_low"] < one["loss"] < one["loss_high"]
            assert one["constant"] == pytest.approx(task.baseline(split))


def test_paths_are_in_their_order(result):
    loss = result["oracle"]["loss"].sel(control="trained")
    assert (loss.sel(path="sample") <= loss.sel(path=["task", "routed", "mean"])).all()
    regret = result["oracle"]["regret"].sel(control="trained").sum("layer")
    gap = loss.sel(path="routed") - loss.sel(path="sample")
    assert np.allclose(regret, gap, rtol=1e-4)
    assert (result["adaptation"]["routed"] >= result["adaptation"]["oracle"] * 0).all()
    same = result["oracle"]["loss"].sel(control="trained", path="task", split="ood")
    assert np.allclose(result["adaptation"]["oracle"], same, rtol=1e-5)


def test_choices_add_up(result):
    scores = result["specialization"].to_dataset()
    activation = scores["activation"].sel(split="ood").sum("module")
    assert np.allclose(activation, 1)
    seen = scores["seen"].sel(split="ood", layer=["0", "1"]).sum("operation")
    assert (seen == min(STUDY.n_test, task_of(STUDY.tasks()[0]).size("ood"))).all()


def test_a_finished_run_is_not_run_again(smoke):
    folder, _ = smoke
    before = {path: path.stat().st_mtime_ns for path in folder.parent.rglob("*") if path.is_file()}
    assert run(STUDY, resources=Resources(root=folder.parent)) == folder
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_a_killed_sweep_goes_on_where_it_was(smoke, result, tmp_path):
    words = command(*SMOKE, "--out", str(tmp_path))
    process = subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=-3)
    deadline = time.monotonic() + 120
    while not (done := list(tmp_path.glob("modular_routing-*/models/*.nc"))):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    first = {path: path.stat().st_mtime_ns for path in done}
    assert not list(tmp_path.glob("modular_routing-*/result.nc"))
    finished = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert first == {path: path.stat().st_mtime_ns for path in first}
    (path,) = tmp_path.glob("modular_routing-*/result.nc")
    with xr.open_datatree(path, engine="h5netcdf") as tree:
        for group in result.subtree:
            again = tree[group.path].to_dataset()
            xr.testing.assert_identical(again.drop_attrs(), group.to_dataset().drop_attrs())


def test_a_checkpoint_is_analysed_without_training(smoke, result, tmp_path):
    cell = STUDY.trained_models()[1]
    place = smoke[0].parent / "models" / cell.folder_name
    folder = run(STUDY, resources=Resources(root=tmp_path), checkpoints=(place,))
    with xr.open_datatree(folder / "result.nc", engine="h5netcdf") as tree:
        one = tree["oracle"].to_dataset().drop_attrs()
        expected = result["oracle"].to_dataset().sel(cell=[cell.folder_name]).drop_attrs()
        xr.testing.assert_identical(one, expected)
        assert closing_table(tree)
    other = override(STUDY, ["n_operators=5"])
    with pytest.raises(RunError, match="was trained on"):
        load_model_config(place, ModularModel, other.tasks())


# The grid


def test_the_paper_has_a_cell_for_each_condition_that_differs():
    study = presets()["paper"]
    cells = study.trained_models()
    # Three routers with and without bottleneck, the structural oracle, both objectives; and one
    # network without modules.
    conditions = (3 * 2 + 1) * 2 + 1
    assert len(cells) == conditions * 5 * 6 * 5
    assert len({cell.folder_name for cell in cells}) == len(cells)
    first = next(cell for cell in cells if cell.router == "encoder")
    network = first.build().config
    assert (network.n_modules, network.pool.d_mlp, network.pool.depth) == (30, 300, 2)
    single = next(cell for cell in cells if cell.router == "monolithic")
    assert single.build().config.d_mlp == 9000
    training = study.sizes.training
    assert (study.learning_rates, training.batch_size, training.weight_decay) == ((3e-4,), 256, 0)


@pytest.mark.parametrize("name", presets())
def test_every_preset_builds_its_networks(name):
    cells = presets()[name].trained_models()
    kinds = {}
    for cell in cells:
        kinds.setdefault(tuple(list(cell.condition.items())[:7]), cell)
    for cell in kinds.values():
        task = task_of(replace(cell.task, n_operators=3, n_points=150))
        small = replace(cell, task=task.config, sizes=presets()["smoke"].sizes)
        batch = task.batch("id", 0, 4)
        loss = objective_of(small, small.build().train(), batch, 0)
        assert loss.isfinite()
        loss.backward()


def test_the_objective_is_that_of_the_cell():
    cells = {
        (cell.router, cell.objective): cell
        for cell in override(presets()["smoke"], ["objectives=sampled,all_paths"]).trained_models()
    }
    assert set(cells) == {(m, o) for m in MODULAR for o in ("sampled", "all_paths")} | {
        ("monolithic", "sampled")
    }
    for (router, objective), cell in cells.items():
        model, batch = cell.build().eval(), task_of(cell.task).batch("train", 0, 16)
        found = objective_of(cell, model, batch, 0)
        if objective == "all_paths":
            expected = mechanisms.all_paths_loss(model, batch.inputs, batch.targets)
        else:
            expected = (model(batch.inputs) - batch.targets).square().mean()
        assert torch.allclose(found, expected), router


def test_the_temperature_falls_geometrically():
    sizes = replace(presets()["smoke"].sizes, temperature=4.0, final_temperature=1.0)
    sizes = replace(sizes, training=replace(sizes.training, n_steps=101))
    assert [temperature_at(sizes, step) for step in (0, 50, 100)] == pytest.approx([4, 2, 1])


def test_a_network_of_one_layer_has_to_perform_combinations():
    cell = next(c for c in presets()["one_layer"].trained_models() if c.router == "encoder")
    names = operations_of(cell)
    assert len(names) == 25
    assert names[:2] == ("add, add", "add, subtract")
    assert operations_of(replace(cell, n_layers=2)) == task_of(cell.task).operations


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("models=router", "models must be among structural_oracle, .*got router"),
        ("objectives=mean", "objectives must be among sampled, all_paths, got mean"),
        ("n_layers=3", "n_layers must be 1 or 2"),
        ("seeds=1,1", "seeds must be different from one another"),
        ("keys=", "keys must be different from one another"),
        ("n_test=3", "n_test must be at least 10, got 3"),
        ("n_operators=16", "n_operators=16: allowed"),
        ("sizes.n_module=3", "unknown setting 'sizes.n_module'; nearest are sizes.n_modules"),
    ],
)
def test_wrong_settings_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        override(presets()["smoke"], [setting]).trained_models()


def test_all_models_are_known():
    assert (*MODULAR, "monolithic") == MODELS
