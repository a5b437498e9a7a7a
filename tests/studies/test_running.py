import functools
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import xarray as xr

from studies.running import (
    Resources,
    _one_model,
    describe_coordinates,
    join_cells,
    merge,
    over_seeds,
    percent,
    run_models,
    run_side_by_side,
)
from studies.runs import RunError, locked
from studies.training import TrainingError

ROOT = Path(__file__).parents[2]
STUDIES = ROOT / "studies"


def analysis(accuracy, steps=(10, 20), **more):
    training = xr.Dataset(
        {"accuracy": ("train_step", [accuracy + step for step in steps])},
        coords={"train_step": list(steps)},
    )
    return xr.DataTree.from_dict({"training": training, **more})


def test_every_value_stands_at_the_place_of_its_model():
    places = [
        {"model": model, "seed": seed} for model, seed in [("z", 3), ("a", 3), ("z", 1), ("a", 1)]
    ]
    merged = merge([analysis(number) for number in range(4)], places)
    data = merged["training"].to_dataset()
    for number, place in enumerate(places):
        assert data["accuracy"].sel(place).to_numpy().tolist() == [number + 10, number + 20]
    # In the order in which they came, not sorted.
    assert data["model"].to_numpy().tolist() == ["z", "a"]
    assert data["seed"].to_numpy().tolist() == [3, 1]


def test_what_a_model_lacks_is_missing_in_the_result():
    places = [{"model": "a", "seed": 0}, {"model": "b", "seed": 1}]
    merged = merge([analysis(1), analysis(2, steps=(20, 30))], places)
    data = merged["training"]["accuracy"]
    assert data["train_step"].to_numpy().tolist() == [10, 20, 30]
    assert data.sel(model="a", seed=0).to_numpy().tolist()[:2] == [11, 21]
    assert data.sel(model="b", seed=1).to_numpy().tolist()[1:] == [22, 32]
    assert data.sel(model="a", seed=0, train_step=30).isnull()
    assert data.sel(model="a", seed=1).isnull().all()
    assert data.sel(model="b", seed=0).isnull().all()


def test_models_with_other_labels_share_those_that_they_have():
    """One model is never wrong."""
    labels = (["False", "True", "all"], ["True", "all"])
    trees = [
        xr.DataTree.from_dict(
            {"flow": xr.Dataset({"f1": ("correct", range(len(one)))}, {"correct": one})}
        )
        for one in labels
    ]
    merged = merge(trees, [{"model": "a"}, {"model": "b"}])["flow"].to_dataset()
    assert merged["correct"].to_numpy().tolist() == labels[0]
    assert merged["f1"].sel(model="a").to_numpy().tolist() == [0, 1, 2]
    assert merged["f1"].sel(model="b", correct=labels[1]).to_numpy().tolist() == [0, 1]
    assert merged["f1"].sel(model="b", correct="False").isnull()


def test_what_is_missing_stays_missing_in_a_file(tmp_path):
    trees = []
    for number in range(2):
        data = xr.Dataset(
            {
                "trials": ("x", [number, 7]),
                "right": ("x", [True, False]),
                "token": ("x", ["a", "b"]),
            }
        )
        xr.DataTree.from_dict({"cuts": data}).to_netcdf(
            tmp_path / f"{number}.nc", engine="h5netcdf"
        )
        trees.append(xr.load_datatree(tmp_path / f"{number}.nc", engine="h5netcdf"))
    merge(trees, [{"model": "a", "seed": 0}, {"model": "b", "seed": 1}]).to_netcdf(
        tmp_path / "merged.nc", engine="h5netcdf"
    )
    merged = xr.load_datatree(tmp_path / "merged.nc", engine="h5netcdf")["cuts"]
    assert merged["trials"].sel(model="b", seed=1).to_numpy().tolist() == [1, 7]
    assert merged["right"].sel(model="b", seed=1).to_numpy().tolist() == [True, False]
    assert merged["token"].sel(model="b", seed=1).to_numpy().tolist() == ["a", "b"]
    assert merged["trials"].sel(model="b", seed=0).isnull().all()
    assert merged["right"].sel(model="b", seed=0).isnull().all()


def test_a_group_holds_only_the_models_that_have_it():
    graph = xr.Dataset({"f1": ((), 0.5)}, attrs={"routes": 1, "seed": 7})
    other = xr.Dataset({"f1": ((), 0.25)}, attrs={"routes": 1, "seed": 8})
    trees = [analysis(0), analysis(1, graph=graph), analysis(2), analysis(3, graph=other)]
    merged = merge(trees, [{"model": model} for model in "dcba"])
    assert merged["training"]["model"].to_numpy().tolist() == ["d", "c", "b", "a"]
    assert merged["graph"]["model"].to_numpy().tolist() == ["c", "a"]
    assert merged["graph"]["f1"].to_numpy().tolist() == [0.5, 0.25]
    # An attribute on which they do not agree says nothing of the whole.
    assert merged["graph"].attrs == {"routes": 1}


def test_as_many_places_as_trees():
    with pytest.raises(ValueError, match="shorter"):
        merge([analysis(0), analysis(1)], [{"model": "a"}])


def cell(values, low=None, high=None):
    values = np.array(values, dtype=float)
    parts = {
        "rate": values,
        "rate_low": values - 0.1 if low is None else np.array(low),
        "rate_high": values + 0.1 if high is None else np.array(high),
    }
    return xr.Dataset({name: ("seed", part) for name, part in parts.items()})


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (cell([0.5], [0.42], [0.61]), "50.0 [42-61]"),
        (cell([0.2, 0.6, 0.7]), "50.0 [20-70]"),
        (cell([np.nan, 0.25], [np.nan, 0.2], [np.nan, 0.3]), "25.0 [20-30]"),
        (cell([np.nan]), ""),
        (cell([]), ""),
    ],
    ids=["the interval of one seed", "the range of several", "one of two", "missing", "no seed"],
)
def test_percent(data, expected):
    assert percent(data, "rate") == expected


def test_coordinates_get_names_and_keep_those_that_they_have():
    deep = xr.Dataset(
        {"x": (("step", "pos"), np.zeros((2, 2)))},
        coords={"step": ("step", [0, 1], {"long_name": "step, from 0"}), "pos": [0, 1]},
    )
    tree = xr.DataTree.from_dict({"a": xr.Dataset(coords={"seed": [0]}), "b/c/d": deep})
    describe_coordinates(tree, {"seed": "seed of the weights", "step": "another"})
    assert tree["a"]["seed"].attrs == {"long_name": "seed of the weights"}
    assert tree["b/c/d"]["step"].attrs == {"long_name": "step, from 0"}
    assert tree["b/c/d"]["pos"].attrs == {"long_name": "pos"}


# Several at once. What jobs do, they write down: they run in other processes.


def note(folder, text):
    with (folder / "notes").open("a") as file:
        file.write(f"{text}\n")


def notes(folder):
    return Counter((folder / "notes").read_text().split("\n")[:-1])


def works(folder, name, *, seconds=0.0):
    note(folder, name)
    time.sleep(seconds)
    return folder / name


def raises(folder, name, *, error):
    note(folder, name)
    raise error


def dies(folder, name, *, times):
    note(folder, name)
    if notes(folder)[name] <= times:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    return folder / name


@pytest.fixture(scope="module")
def scheduler():
    """The address of a scheduler with two workers, and the repository as their directory."""
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        memory_limit=None,
        dashboard_address=None,
        silence_logs=50,
        scheduler_kwargs={"allowed_failures": 1},
    ) as cluster:
        yield cluster.scheduler_address


def test_a_process_that_dies_costs_only_its_job(tmp_path):
    work = [functools.partial(works, tmp_path, f"work {n}", seconds=0.1) for n in range(20)]
    jobs = [functools.partial(dies, tmp_path, "death", times=1), *work]
    names = ["death", *(f"work {n}" for n in range(20))]
    assert run_side_by_side(jobs, 2) == [tmp_path / name for name in names]
    assert notes(tmp_path) == {"death": 2} | dict.fromkeys(names[1:], 1)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TrainingError("not finite"), TrainingError),
        (RunError("not finite"), RunError),
        (UnicodeError("not finite"), ValueError),
        (KeyError("not finite"), RuntimeError),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_an_error_waits_until_the_others_are_done(error, kind, scheduler, tmp_path):
    jobs = [
        functools.partial(works, tmp_path, "a"),
        functools.partial(raises, tmp_path, "b", error=error),
        functools.partial(raises, tmp_path, "c", error=ValueError()),
        *[functools.partial(works, tmp_path, name, seconds=0.2) for name in "defg"],
    ]
    message = r"model b: .*not finite.* \(2 of 7 failed\)"
    with pytest.raises(kind, match=message) as caught:
        run_side_by_side(
            jobs, 1, scheduler=scheduler, names=[f"model {name}" for name in "abcdefg"]
        )
    assert type(caught.value) is kind
    assert isinstance(caught.value.__cause__, type(error))
    # The traceback leads into the job.
    assert any(
        entry.name == "raises"
        for entry in pytest.ExceptionInfo.from_exception(caught.value.__cause__).traceback
    )
    assert notes(tmp_path) == dict.fromkeys("abcdefg", 1)


def test_a_job_that_always_dies_is_given_up_and_no_other_is(scheduler, tmp_path):
    jobs = [
        functools.partial(dies, tmp_path, "death", times=99),
        *[functools.partial(works, tmp_path, name, seconds=2) for name in "abc"],
    ]
    with pytest.raises(RunError, match=r"^job 0: its process died 2 times.* \(1 of 4 failed\)"):
        run_side_by_side(jobs, 1, scheduler=scheduler)
    assert notes(tmp_path) == {"death": 2} | dict.fromkeys("abc", 1)


@dataclass(frozen=True)
class Model:
    name: str
    task: None = None

    @property
    def folder_name(self):
        return self.name


def train(model, *, root, device, position):
    """Four steps with a checkpoint after each; model `b` is killed in its third one, once."""
    folder = root / "models" / model.name
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        for step in range(4):
            checkpoint = folder / f"step{step}"
            if not checkpoint.exists():
                note(root, f"{model.name} {step}")
                if model.name == "b" and step == 2 and notes(root)["b 2"] == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.05)
                checkpoint.touch()
    return folder


def analyse(model, folder, device):
    note(folder.parents[1], f"analysis of {model.name}")
    steps = xr.Dataset({"steps": len(list(folder.glob("step*")))})
    return xr.DataTree.from_dict({"training": steps})


def test_a_study_runs_on_a_schedulers_workers(scheduler, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def study():
        return run_models(
            "study",
            identity=[*"abc"],
            models=[Model(name) for name in "abc"],
            train=train,
            analyse=analyse,
            assemble=lambda trees: merge(trees, [{"model": name} for name in "abc"]),
            figures=lambda result: {},
            seed=0,
            # Not a path that the workers would find as it is.
            resources=Resources(root=Path("runs"), scheduler=scheduler),
        )

    folder = study()
    with xr.open_datatree(folder / "result.nc", engine="h5netcdf") as result:
        assert result["training"]["model"].to_numpy().tolist() == [*"abc"]
        assert result["training"]["steps"].to_numpy().tolist() == [4, 4, 4]
    once = [f"{name} {step}" for name in "abc" for step in range(4)]
    once += [f"analysis of {name}" for name in "abc"]
    # It went on from its checkpoint.
    assert notes(tmp_path / "runs") == dict.fromkeys(once, 1) | {"b 2": 2}

    (folder / "result.nc").unlink()
    assert study() == folder
    assert notes(tmp_path / "runs") == dict.fromkeys(once, 1) | {"b 2": 2}


def test_a_model_that_two_workers_are_given_is_made_once(scheduler, tmp_path):
    job = functools.partial(
        _one_model,
        Model("a"),
        train=functools.partial(train, root=tmp_path, position=0),
        analyse=analyse,
        folder=None,
        place=tmp_path / "study" / "a.nc",
        device="cpu",
        threads=1,
    )
    assert run_side_by_side([job] * 3, 1, scheduler=scheduler) == [tmp_path / "study" / "a.nc"] * 3
    assert notes(tmp_path) == dict.fromkeys(["a 0", "a 1", "a 2", "a 3", "analysis of a"], 1)


def test_a_scheduler_that_is_not_there(tmp_path):
    with pytest.raises(RunError, match="there is no dask scheduler at 'nowhere'"):
        run_side_by_side([functools.partial(works, tmp_path, "a")], 1, scheduler="nowhere")


def test_workers_end_with_a_process_that_is_killed(tmp_path):
    script = f"""
import functools, pathlib
from studies.running import run_side_by_side
from tests.studies.test_running import works
if __name__ == "__main__":
    job = functools.partial(works, pathlib.Path({str(tmp_path)!r}), "a", seconds=100)
    run_side_by_side([job, job], 2)
"""
    (tmp_path / "script.py").write_text(script)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, str(tmp_path / "script.py")], env=environment)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "notes").exists() or notes(tmp_path)["a"] < 2:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        workers = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
    assert len(workers) >= 2
    assert not psutil.wait_procs(workers, timeout=20)[1]


@pytest.mark.parametrize("name", ["coda_composition", "ndr_control_flow"])
def test_help_and_single_runs_import_nothing_that_they_do_not_need(name):
    script = f"""
import sys, runpy
sys.argv = ["study", "--help"]
try:
    runpy.run_path({str(STUDIES / f"{name}.py")!r}, run_name="__main__")
except SystemExit:
    pass
from pathlib import Path
from studies.running import run_side_by_side
assert run_side_by_side([Path], 2) == run_side_by_side([Path, Path], 1)[:1] == [Path()]
assert not {{"transformer_lens", "dask", "distributed"}} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60
    )
    assert "--preset" in done.stdout


def test_over_seeds_is_the_mean_and_the_ends_of_each_condition():
    figures = {"right": np.array([0.1, 0.5, 0.3, 0.9]), "loss": np.array([4.0, 1.0, 2.0, 3.0])}
    found = over_seeds(figures, [[0, 2], [1], [3]])
    assert found["figure"].to_numpy().tolist() == ["right", "loss"]
    np.testing.assert_allclose(found["mean"], [[0.2, 3.0], [0.5, 1.0], [0.9, 3.0]])
    np.testing.assert_allclose(found["lowest"], [[0.1, 2.0], [0.5, 1.0], [0.9, 3.0]])
    np.testing.assert_allclose(found["highest"], [[0.3, 4.0], [0.5, 1.0], [0.9, 3.0]])


def test_a_setting_with_the_name_of_a_variable_is_told():
    @dataclass
    class Cell:
        task: str = "task"
        folder_name: str = "cell"
        condition: tuple = ()

    tree = analysis(0.5)
    with pytest.raises(ValueError, match=r"names of variables of training: accuracy"):
        join_cells([tree], [Cell(condition={"accuracy": 1, "seed": 0})])
    assert join_cells([tree], [Cell(condition={"seed": 3})])["training"]["seed"].item() == 3
