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
import tasks
from studies.raven_figures import figures
from studies.raven_latent_code import closing_table, latent_code, presets, run
from studies.running import Resources, run_side_by_side
from studies.runs import RunError
from studies.settings import override

SCRIPT = Path(__file__).parents[2] / "studies" / "raven_latent_code.py"
TINY = override(
    presets()["smoke"],
    [
        "mechanisms=hyla",
        "training.n_steps=30",
        "training.evaluate_every=10",
        "n_decode=60",
    ],
)


def command(*words, out):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"COLUMNS": "120"},
    )


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    done = command("--preset", "smoke", out=out)
    assert done.returncode == 0, done.stderr
    (folder,) = out.glob("raven_latent_code-*")
    return folder, done.stdout


@pytest.fixture(scope="module")
def result(smoke):
    with xr.open_datatree(smoke[0] / "result.nc", engine="h5netcdf") as tree:
        return tree.load()


def test_the_smoke_run_ends_in_a_table_and_says_where_the_files_are(smoke):
    folder, printed = smoke
    for word in ("softmax", "linear", "hyla", "decoded, ood", "control", "chance"):
        assert word in printed
    assert str(folder) in printed


def test_the_result_says_how_it_was_made(result, smoke):
    attrs = result.attrs
    assert attrs["schema_version"] == 1
    assert attrs["config_hash"] == smoke[0].name.removeprefix("raven_latent_code-")
    assert json.loads(attrs["config"])["study"]["task"]["n_features"] == 2
    assert "raven_latent_code.py --preset smoke" in attrs["command"]
    for name in ("created_at", "git_commit", "versions", "seed", "device"):
        assert attrs[name]


def test_every_variable_has_a_name_and_an_interval_or_a_reason(result):
    for group in result.children.values():
        for name, variable in group.data_vars.items():
            assert variable.attrs.get("long_name"), (group.name, name)
        for name, coordinate in group.coords.items():
            assert coordinate.attrs.get("long_name"), (group.name, name)
    decoding = result["decoding"]
    assert (decoding["score_low"] <= decoding["score"]).all()
    assert (decoding["score"] <= decoding["score_high"]).all()
    assert set(decoding["control"].to_numpy()) == {"probe", "shuffled", "untrained"}
    assert set(result["accuracy"]["split"].to_numpy()) == {
        "id",
        "ood",
        "id_unpermuted",
        "ood_unpermuted",
    }
    assert list(result["accuracy"]["model"].to_numpy()) == ["hyla", "softmax", "linear"]


def test_the_figures_are_drawn_from_the_file_alone(result, smoke):
    drawn = figures(result)
    assert set(drawn) == {"accuracy", "decoding", "confusion", "projection", "interchange"}
    for name in drawn:
        for kind in ("png", "pdf"):
            assert (smoke[0] / f"{name}.{kind}").stat().st_size > 1000
    (axis, _) = drawn["accuracy"].axes
    labels = axis.get_legend_handles_labels()[1]
    assert {"softmax attention", "HYLA", "ideal observer", "chance"} <= set(labels)


def test_accuracies_stay_below_the_ideal_observer_and_numbers_are_of_the_best_checkpoint(result):
    accuracy = result["accuracy"].to_dataset()
    assert (accuracy["accuracy_low"] <= accuracy["ceiling"]).all()
    assert float(accuracy["chance"].sel(metric="all_features")) == 1 / 64


def test_a_finished_study_is_not_run_again(smoke):
    folder = smoke[0]

    def written():
        weights = folder.parent.glob("models/*/*.safetensors")
        return {path: path.stat().st_mtime_ns for path in (*folder.rglob("*"), *weights)}

    before = written()
    assert any(path.suffix == ".safetensors" for path in before)
    done = command("--preset", "smoke", out=folder.parent)
    assert done.returncode == 0
    assert written() == before


def numbers(tree):
    return {
        (name, variable): tree[name][variable].to_numpy()
        for name in tree.children
        for variable in tree[name].data_vars
    }


def same_numbers(first, second):
    first, second = numbers(first), numbers(second)
    return first.keys() == second.keys() and all(
        np.array_equal(first[key], second[key], equal_nan=True) for key in first
    )


def test_a_killed_study_ends_in_the_same_result(tmp_path):
    whole = run(TINY, resources=Resources(root=tmp_path / "whole"))
    words = ["--preset", "smoke", "mechanisms=hyla", "training.n_steps=30", "n_decode=60"]
    words += ["training.evaluate_every=10", "--out", str(tmp_path / "killed")]
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *words], stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while not list((tmp_path / "killed").glob("models/*/last.safetensors")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not list((tmp_path / "killed").glob("raven*/result.nc"))
    again = run(TINY, resources=Resources(root=tmp_path / "killed"))
    assert again.name == whole.name
    with (
        xr.open_datatree(whole / "result.nc", engine="h5netcdf") as one,
        xr.open_datatree(again / "result.nc", engine="h5netcdf") as two,
    ):
        assert same_numbers(one, two)


def test_a_checkpoint_is_analysed_without_training(tmp_path, smoke):
    (model,) = smoke[0].parent.glob("models/hyla-*/")
    done = command("--preset", "smoke", "--checkpoint", str(model), out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(tmp_path.glob("models/hyla-*/last.safetensors"))
    (path,) = tmp_path.glob("raven*/result.nc")
    with (
        xr.open_datatree(path, engine="h5netcdf") as ours,
        xr.open_datatree(smoke[0] / "result.nc", engine="h5netcdf") as theirs,
    ):
        ours = ours["decoding"]["score"].sel(model="hyla").load()
        assert np.array_equal(ours, theirs["decoding"]["score"].sel(model="hyla"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preset", "huge"], "preset must be one of smoke, laptop, paper, got 'huge'"),
        (["training.n_step=3"], "unknown setting 'training.n_step'; nearest are training.n_steps"),
        (["mechanisms=hila"], "mechanisms must be among"),
        (["n_decode=20000"], "n_decode must be at most 10000, got 20000"),
        (["task.n_features=0"], "n_features=0"),
        (["task.n_values=2"], "n_values=2"),
        (["task.ood_fraction=0.001"], "ood_fraction=0.001"),
        (["--checkpoint", "nowhere"], "nowhere is no run folder of a RavenModel"),
    ],
)
def test_wrong_input_gets_a_clear_error(words, message, tmp_path):
    done = command("--preset", "smoke", *words, out=tmp_path)
    assert done.returncode == 1
    assert message in " ".join(done.stdout.split())
    assert "Traceback" not in done.stdout + done.stderr


def test_a_checkpoint_of_another_task_or_damaged_is_refused(tmp_path, smoke):
    (model,) = smoke[0].parent.glob("models/hyla-*/")
    other = override(presets()["smoke"], ["task.n_features=3"])
    with pytest.raises(RunError, match="was trained on"):
        run(other, resources=Resources(root=tmp_path), checkpoints=(model,))
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.json", "log.jsonl"):
        (copy / name).write_bytes((model / name).read_bytes())
    (copy / "best.safetensors").write_bytes((model / "best.safetensors").read_bytes()[:-64])
    with pytest.raises(RunError, match="damaged"):
        run(presets()["smoke"], resources=Resources(root=tmp_path), checkpoints=(copy,))


@pytest.mark.parametrize("name", presets())
def test_every_preset_builds_its_models(name):
    study = presets()[name]
    for model_config in study.models():
        model = model_config.build()
        task = tasks.Raven(model_config.task)
        batch = task.batch("train", 0, 2)
        logits = model(batch.inputs)
        assert set(task.score(logits, batch)) == {"accuracy", "feature_accuracy"}


def test_the_paper_preset_is_the_papers():
    study = presets()["paper"]
    assert (study.n_layers, study.d_model, study.n_heads, study.d_head) == (4, 128, 16, 4)
    assert (study.d_mlp, study.task.n_features, study.attention_dropout) == (256, 4, 0.1)
    training = study.training
    assert training.n_steps * training.batch_size == 20_000_000
    assert training.warmup_steps == 1000


def test_the_latent_code_is_read_where_the_docstring_says():
    """Entry [h, q, k] of the pattern is its own address."""
    n_pos = 18
    address = torch.arange(3 * n_pos * n_pos).view(1, 3, n_pos, n_pos)
    code = latent_code(2)(address)
    assert code.shape == (1, 2, 2, 3)
    for feature in range(2):
        for key, panel in enumerate((6, 7)):
            for head in range(3):
                expected = (head * n_pos + 16 + feature) * n_pos + 2 * panel + feature
                assert code[0, feature, key, head] == expected


def test_seeds_are_a_dimension_and_the_table_gives_their_range(tmp_path):
    study = replace(TINY, seeds=(0, 1), training=replace(TINY.training, n_steps=10))
    folder = run(study, resources=Resources(root=tmp_path))
    with xr.open_datatree(folder / "result.nc", engine="h5netcdf") as tree:
        tree.load()
    assert list(tree["accuracy"]["seed"].to_numpy()) == [0, 1]
    assert closing_table(tree).row_count > 5
    assert len(figures(tree)) == 5


def test_two_processes_train_together_and_one_writes(tmp_path):
    pytest.importorskip("accelerate")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    launch += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(SCRIPT)]
    words = ["--preset", "smoke", "--workers", "1", "--out", str(tmp_path)]
    settings = ["mechanisms=softmax", "training.n_steps=10", "training.evaluate_every=10"]
    done = subprocess.run(
        [*launch, *words, *settings],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("results and figures") == 1
    (path,) = tmp_path.glob("raven*/result.nc")
    with xr.open_datatree(path, engine="h5netcdf") as tree:
        assert tree["training"]["train_step"].to_numpy().tolist() == [10]


def test_jobs_keep_their_order():
    jobs = [lambda number=number: Path(str(number)) for number in range(3)]
    assert run_side_by_side(jobs, 1) == [Path("0"), Path("1"), Path("2")]


def test_mechanisms_are_those_of_the_package():
    assert set(presets()["laptop"].mechanisms) <= set(mechanisms.ATTENTION_VARIANTS)
