"""Execution of studies: what is computed, what is loaded from disk, and changes of code."""

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from math import isnan, nan
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
import xarray as xr
from safetensors.torch import load_file

from studies.engine import (
    Metric,
    Resources,
    RunError,
    Selection,
    TrainingError,
    fingerprints,
    read_result,
    run,
)
from studies.engine.cells import Cell
from studies.engine.checkpoints import read_log
from studies.engine.execution import Run
from studies.engine.folders import locked
from studies.engine.jobs import measure_cell, run_job
from tests.studies.command_line import command_line
from tests.studies.engine.toy import SAMPLERS, TOY, Largest, LargestConfig, ToySetup

matplotlib.use("agg")
ROOT = Path(__file__).parents[3]

MECHANISM = """
from torch import nn

class Net(nn.Module):
    def __init__(self, generator):
        super().__init__()
        from torch.random import fork_rng
        import torch
        with fork_rng():
            torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
            self.out = nn.Linear(4, 4)

    def forward(self, x):
        return 1.0 * self.out(x)
"""

STUDY = '''
"""A study in a file of its own."""
import time
from dataclasses import dataclass
import matplotlib.pyplot as plt
import xarray as xr
from NAME_mechanism import Net
from studies.engine import Setup, Study, TrainingConfig, main
from tests.studies.engine.toy import Largest, LargestConfig

@dataclass(frozen=True, kw_only=True)
class Mine(Setup):
    """A setup.

    Args:
        pause: seconds that a batch takes.
    """
    pause: float = 0.0

    def sampler(self):
        return Largest(LargestConfig())

    def build(self, generator):
        return Net(generator)

    def loss(self, model, batch, step):
        time.sleep(self.pause)
        return super().loss(model, batch, step)

def norm(trained):
    """The size of the weights."""
    value = 2.0 * float(trained.model.out.weight.detach().norm())
    return xr.Dataset({"norm": ((), value, {"long_name": "norm"})})

def picture(result):
    figure, axis = plt.subplots()
    axis.plot(result["norm"]["norm"])
    return figure

TRAINING = TrainingConfig(n_steps=20, batch_size=8, learning_rate=0.01, evaluate_every=5)
STUDY = Study(
    name="mine",
    question="Is it mine?",
    setup=Mine(model="net", training=TRAINING, n_validation=50),
    grids=({"seed": (0, 1)},),
    measures={"norm": norm},
    views={"picture": picture},
)
if __name__ == "__main__":
    main(STUDY)
'''


class StudyFolder:
    """A folder with the files of a study and its mechanism, to edit and run in this process."""

    def __init__(self, path, name):
        self.path, self.name = path, name
        self.study_file = path / f"{name}.py"
        self.mechanism = path / f"{name}_mechanism.py"
        self.mechanism.write_text(MECHANISM)
        self.study_file.write_text(STUDY.replace("NAME", name))

    def edit(self, file, before, after):
        text = file.read_text()
        assert before in text
        file.write_text(text.replace(before, after))

    def study(self):
        fingerprints.forget()
        importlib.invalidate_caches()
        for key in (self.name, f"{self.name}_mechanism"):
            sys.modules.pop(key, None)
        return importlib.import_module(self.name).STUDY

    def run(self, *changes, **resources):
        resources = Resources(root=self.path / "runs", **resources)
        run = Run(self.study().plan("laptop", changes), resources)
        return run, run.finish()

    def result(self, *changes, **resources):
        return read_result(self.run(*changes, **resources)[1] / "result.nc")


@pytest.fixture
def folder(tmp_path, monkeypatch, request):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield StudyFolder(tmp_path, f"mine_{abs(hash(request.node.name)) % 10**8}")
    fingerprints.forget()


def modification_times(root):
    return {p: p.stat().st_mtime_ns for p in root.rglob("*") if p.is_file() and p.name != ".lock"}


def assert_same_numbers(first, second):
    for group in first.subtree:
        for name, values in group.data_vars.items():
            if values.dtype.kind == "f" and name not in ("seconds",):
                np.testing.assert_array_equal(values, second[group.path][name])


def test_a_finished_run_is_loaded_from_disk(folder):
    folder.run()
    before = modification_times(folder.path / "runs")
    run, _ = folder.run()
    assert run.taken_from_disk
    assert modification_times(folder.path / "runs") == before


def test_edited_comments_and_docstrings_change_nothing(folder):
    folder.run()
    folder.edit(folder.mechanism, "class Net", "# A comment.\nclass Net")
    folder.edit(folder.study_file, "The size of", "How large")
    assert folder.run()[0].taken_from_disk


def test_an_edited_mechanism_is_detected_after_the_run(folder):
    first = folder.result()
    folder.edit(folder.mechanism, "1.0 * self", "3.0 * self")
    with pytest.raises(RunError) as error:
        folder.run()
    for word in (f"{folder.name}_mechanism.py", "--fresh", "--accept-code"):
        assert word in str(error.value)
    # Accepted: the old model is measured again, and the result records its code.
    accepted = folder.result(accept_code=True)
    assert set(json.loads(accepted.attrs["accepted_code"])) == set(first["norm"]["cell"].values)
    assert json.loads(first.attrs["accepted_code"]) == {}
    np.testing.assert_array_equal(accepted["norm"]["norm"], first["norm"]["norm"])
    fresh = folder.result(fresh=True)
    assert json.loads(fresh.attrs["accepted_code"]) == {}
    assert (fresh["norm"]["norm"].to_numpy() != first["norm"]["norm"].to_numpy()).all()
    assert list((folder.path / "runs" / "models").glob("*.old-1"))


def test_a_measure_that_is_edited_while_models_train_is_that_of_the_start(folder):
    helper = folder.path / f"{folder.name}_helper.py"
    helper.write_text("FACTOR = 2.0\n")
    # Imported where it is used, as lazy packages are.
    late = f"from {folder.name}_helper import FACTOR\n    value = FACTOR"
    folder.edit(folder.study_file, "value = 2.0", late)
    edit = f'if step == 12: open({str(helper)!r}, "w").write("FACTOR = 5.0\\n")'
    folder.edit(folder.study_file, "time.sleep(self.pause)", edit)
    first = folder.result()["norm"]["norm"]
    assert helper.read_text() == "FACTOR = 5.0\n"
    sys.modules.pop(helper.stem)
    run, path = folder.run()
    assert not run.taken_from_disk
    np.testing.assert_allclose(read_result(path / "result.nc")["norm"]["norm"], 2.5 * first)


def test_a_view_that_is_edited_while_models_train_is_drawn_again(folder):
    helper = folder.path / f"{folder.name}_helper.py"
    helper.write_text("FACTOR = 2.0\n")
    imported = f"import xarray as xr\nfrom {folder.name}_helper import FACTOR"
    folder.edit(folder.study_file, "import xarray as xr", imported)
    folder.edit(folder.study_file, 'result["norm"]["norm"])', 'FACTOR * result["norm"]["norm"])')
    edit = f'if step == 12: open({str(helper)!r}, "w").write("FACTOR = 5.0\\n")'
    folder.edit(folder.study_file, "time.sleep(self.pause)", edit)
    folder.run()
    sys.modules.pop(helper.stem)
    again, _ = folder.run()
    assert not again.taken_from_disk


def test_what_a_study_adds_is_made_with_the_models_on_disk(tmp_path):
    def export(result, folder):
        (folder / "exported.txt").write_text(result.attrs["study"])

    changes, resources = ["model=mlp"], Resources(root=tmp_path)
    plain = replace(TOY, tuned=(), along_training=())
    folder = run(plain, changes=changes, resources=resources)
    first = read_result(folder / "result.nc")
    models = modification_times(tmp_path / "models")
    for more in (
        {"tuned": TOY.tuned},
        {"along_training": ("weights",)},
        {"export": export},
        {"question": "Which is not?"},
    ):
        plain = replace(plain, **more)
        again = Run(plain.plan("laptop", changes), resources)
        if "along_training" in more:
            with pytest.raises(RunError, match="not measured, or by other code: weights"):
                Run(again.plan, replace(resources, redraw=True)).finish()
        assert again.finish() == folder
        assert not again.taken_from_disk, more
    changed = modification_times(tmp_path / "models")
    assert {path.suffix for path in changed if changed[path] != models.get(path)} == {".nc"}
    assert (folder / "exported.txt").read_text() == "toy"
    last = read_result(folder / "result.nc")
    assert last.attrs["question"] == "Which is not?"
    assert last["weights_along_training"].sizes["train_step"] == 2
    assert "weights_along_training" not in first.children


def test_an_edited_mechanism_is_detected_when_a_run_is_resumed(folder, monkeypatch):
    study = folder.study()

    def stop(self, model, batch, step):
        if step == 12:
            raise KeyboardInterrupt
        return super(type(self), self).loss(model, batch, step)

    monkeypatch.setattr(type(study.setup), "loss", stop)
    with pytest.raises(KeyboardInterrupt):
        Run(study.plan(), Resources(root=folder.path / "runs")).finish()
    monkeypatch.undo()
    sys.path.insert(0, str(folder.path))
    (last,) = folder.path.glob("runs/models/*/last.safetensors")
    kept = last.read_bytes()
    folder.edit(folder.mechanism, "1.0 * self", "3.0 * self")
    with pytest.raises(RunError, match="was trained with other code"):
        folder.run()
    assert last.read_bytes() == kept
    result = folder.result(accept_code=True)
    assert len(json.loads(result.attrs["accepted_code"])) == 1
    written = json.loads((last.parent / "config.json").read_text())
    assert [record["step"] for record in written["codes"]] == [0, 10]
    # It is not to be accepted again, and results go on to say so.
    assert folder.run()[0].taken_from_disk
    redrawn = folder.result(redraw=True)
    assert redrawn.attrs["accepted_code"] == result.attrs["accepted_code"]


def test_code_that_changes_while_a_study_runs_is_detected(folder):
    study = folder.study()
    run = Run(study.plan(), Resources(root=folder.path / "runs"))
    code = run.cells[0].code()
    folder.edit(folder.mechanism, "1.0 * self", "3.0 * self")
    fingerprints.forget()
    with pytest.raises(RunError, match="code was changed while the study ran"):
        run_job([[run.cells[0]]], [code], 0, threads=1)
    of_measures = run.cells[0].code_of_measures()
    folder.edit(folder.study_file, "2.0 * float", "6.0 * float")
    fingerprints.forget()
    with pytest.raises(RunError, match=f"code was changed while the study ran: {folder.name}.py"):
        measure_cell(run.cells[0], of_measures, threads=1)


def test_an_edited_measure_is_recomputed_and_the_models_stay(folder):
    first = folder.result()
    models = {
        p: t
        for p, t in modification_times(folder.path / "runs").items()
        if p.suffix == ".safetensors"
    }
    folder.edit(folder.study_file, "2.0 * float", "6.0 * float")
    second = folder.result()
    np.testing.assert_allclose(second["norm"]["norm"], 3 * first["norm"]["norm"])
    after = modification_times(folder.path / "runs")
    assert {p: after[p] for p in models} == models


def test_an_edited_view_is_redrawn_and_nothing_else_is_computed(folder):
    _, path = folder.run()
    before = modification_times(folder.path / "runs")
    folder.edit(folder.study_file, "axis.plot(", "axis.bar(range(2), ")
    run, _ = folder.run()
    assert not run.taken_from_disk
    after = modification_times(folder.path / "runs")
    assert after[path / "picture.png"] != before[path / "picture.png"]
    assert all(after[p] == before[p] for p in before if "models" in p.parts)


@pytest.mark.parametrize(
    ("before", "after", "group", "name"),
    [
        ("margin=0.1", "margin=0.2", "claims", "margin"),
        (
            'Row("x", metric("accuracy", "id"))',
            'Row("x", 1 - metric("accuracy", "id"))',
            "summary",
            "mean",
        ),
    ],
)
def test_an_edited_claim_or_table_is_in_the_next_result(folder, before, after, group, name):
    folder.edit(folder.study_file, "import Setup,", "import Claim, Row, Setup, Table, metric,")
    more = """
    claims=(Claim("c", "ours", metric("accuracy", "id"), of={}, exceeds=0.0, margin=0.1),),
    table=Table(title="t", rows=(Row("x", metric("accuracy", "id")),)),
    views="""
    folder.edit(folder.study_file, "views=", more)
    first, models = folder.result("seed=0"), modification_times(folder.path / "runs" / "models")
    folder.edit(folder.study_file, before, after)
    second = folder.result("seed=0")
    assert not second[group][name].equals(first[group][name])
    assert modification_times(folder.path / "runs" / "models") == models


def test_a_measure_can_be_recomputed_without_training(folder):
    folder.run()
    before = modification_times(folder.path / "runs")
    folder.run(anew=("norm",))
    after = modification_times(folder.path / "runs")
    changed = {p.name.partition("-")[0] for p in after if after[p] != before.get(p)}
    assert {"norm", "result.nc"} <= changed
    assert not {"scores", "costs", "best.safetensors", "last.safetensors"} & changed
    with pytest.raises(ValueError, match="--measure must be one of scores, costs, norm, got size"):
        folder.run(anew=("size",))


def killed(*_, **__):
    raise KeyboardInterrupt


def test_measures_that_are_newer_than_a_result_are_in_the_next_one(folder, monkeypatch):
    """As after a kill between both, and where another study has measured the same models."""
    # What no digest of code shows, such as a file that a measure reads.
    folder.edit(folder.study_file, "value = 2.0 *", "value = len(__import__('os').listdir('.')) *")
    path = folder.path / "seen"
    path.mkdir()
    monkeypatch.chdir(path)
    assert folder.result("seed=0")["norm"]["norm"] == 0
    (path / "file").write_text("")
    with monkeypatch.context() as patch:
        patch.setattr(Run, "assemble", killed)
        with pytest.raises(KeyboardInterrupt):
            folder.run("seed=0", anew=("norm",))
    run, _ = folder.run("seed=0")
    assert not run.taken_from_disk
    assert read_result(run.folder / "result.nc")["norm"]["norm"] > 0
    assert folder.run("seed=0")[0].taken_from_disk


def test_a_result_has_its_page_whenever_the_run_was_killed(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_write_report", killed)
        with pytest.raises(KeyboardInterrupt):
            folder.run("seed=0")
    _, path = folder.run("seed=0")
    assert {"result.nc", "report.html"} <= {file.name for file in path.iterdir()}


def test_measures_are_not_removed_where_none_may_be_computed(folder):
    folder.run("seed=0")
    before = modification_times(folder.path)
    with pytest.raises(ValueError, match="redraw, which computes no measure, excludes"):
        folder.run("seed=0", anew=("norm",), redraw=True)
    assert modification_times(folder.path) == before


def test_damaged_measures_and_results_are_made_anew(folder):
    _, path = folder.run()
    measured = next((folder.path / "runs" / "models").rglob("norm-*.nc"))
    whole = measured.read_bytes()
    (path / "result.nc").unlink()
    for left in (len(whole) - 200, 500, 0):
        measured.write_bytes(whole[:left])
        before = folder.result()
        assert measured.stat().st_size == len(whole)
        (path / "result.nc").write_bytes(b"")
    assert_same_numbers(folder.result(), before)


def test_redrawing_needs_complete_cells_and_trains_nothing(folder):
    message = (
        "--redraw needs all models and measures on disk; 2 of 2 .*: its training has not ended"
    )
    with pytest.raises(RunError, match=message):
        folder.run(redraw=True)
    _, path = folder.run()
    (path / "result.nc").unlink()
    before = modification_times(folder.path / "runs")
    folder.run(redraw=True)
    after = modification_times(folder.path / "runs")
    assert {p.name for p in after if after[p] != before.get(p)} == {
        "config.json", "result.nc", "report.html", "picture.png", "picture.pdf",
    }  # fmt: skip


def test_the_backend_of_matplotlib_stays_what_it_was(folder):
    matplotlib.use("svg")
    try:
        _, path = folder.run("seed=0")
        assert matplotlib.get_backend() == "svg"
    finally:
        matplotlib.use("agg")
    assert (path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_studies_with_other_settings_of_measures_share_models(folder):
    folder.run("seed=0")
    run, _ = folder.run("seed=0,1", "scores.n_test=100")
    assert all(cell.provenance() for cell in run.cells)
    assert len(run.cells) == 2
    assert len(list(folder.path.glob("runs/models/*"))) == 2


@pytest.mark.slow
def test_a_killed_run_ends_in_the_same_result(folder):
    uninterrupted = folder.result()
    command = [sys.executable, str(folder.study_file), "--out", str(folder.path / "killed")]
    command += ["--workers", "2", "pause=0.05"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, start_new_session=True, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while len(list((folder.path / "killed").glob("models/*/last.safetensors"))) < 1:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not list((folder.path / "killed").glob("mine-*/result.nc"))
    completed = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=200
    )
    assert completed.returncode == 0, completed.stderr
    (path,) = (folder.path / "killed").glob("mine-*/result.nc")
    assert_same_numbers(uninterrupted, read_result(path))


def test_the_command_line_shows_runs_and_refuses(folder, monkeypatch):
    monkeypatch.chdir(folder.path)
    study = folder.study()
    status, output = command_line(study, words=["--show"])
    assert status == 0
    for text in (
        "training.n_steps",
        "number of training steps",
        "pause",
        "seconds that a batch takes",
        "2 cells",
        "measure norm: The size of the weights",
        "folder: runs/mine-",
    ):
        assert text in output
    assert not (folder.path / "runs").exists()
    for arguments, message in (
        (["sed=0"], "unknown setting 'sed'"),
        (["--preset", "huge"], "preset must be one of laptop, got 'huge'"),
        (["--redraw"], "--redraw needs all models"),
        (["--device", "tpu"], "device must be cpu, cuda, mps or cuda:N, got 'tpu'"),
        (["--device", "cuda:x"], "device must be cpu, cuda, mps or cuda:N, got 'cuda:x'"),
        (["--device", "cuda:99"], "device must be available here, got 'cuda:99', of which torch"),
    ):
        status, output = command_line(study, words=arguments)
        assert status == 1
        assert message in " ".join(output.split())
    arguments = ["seed=0", "--workers", "1"]
    assert "accuracy, ood" in command_line(study, words=arguments)[1]
    _, output = command_line(study, words=arguments)
    assert "taken from disk: trained 20" in output
    # Output to a pipe is wide enough for tables.
    assert max(map(len, output.splitlines())) > 80


def test_what_a_user_can_put_right_ends_the_command_line_without_a_traceback(folder):
    runs = ["seed=0", "--workers", "1", "--out", str(folder.path / "runs")]
    folder.edit(folder.study_file, '{"long_name": "norm"}', "{}")
    status, output = command_line(folder.study(), words=runs)
    assert (status, "measure 'norm': norm has no long_name" in output) == (1, True)
    (last,) = folder.path.glob("runs/models/*/last.safetensors")
    last.write_text("cut off")
    status, output = command_line(folder.study(), words=[*runs, "--show"])
    assert (status, "last.safetensors is damaged" in output) == (1, True)
    folder.edit(
        folder.study_file, "return Largest(", 'raise ValueError("n must be odd")\n        ('
    )
    status, output = command_line(folder.study(), words=runs)
    assert (status, "error: n must be odd" in output) == (1, True)


def train_cell(setup, folder):
    """A cell's log and curves, the argument that its measures get, and its folder."""
    arguments = []
    cell = Cell(setup, root=folder, measures={"look": arguments.append})
    cell.train()
    cell.measure()
    curves = cell.load()["training"].to_dataset()
    return read_log(cell.folder), curves, arguments[0], cell.folder


def weights_in(folder, checkpoint):
    tensors = load_file(folder / f"{checkpoint}.safetensors")
    return {k.removeprefix("model/"): t for k, t in tensors.items() if k.startswith("model/")}


def same_weights(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize(
    ("metric", "best_of", "rate", "final"), [("accuracy", max, 0.9, 0.1), ("loss", min, 3.0, 1.0)]
)
def test_a_measure_gets_the_checkpoint_that_is_best_in_distribution(
    metric, best_of, rate, final, tmp_path
):
    class SelectedByMetric(ToySetup):
        selection = Selection("id", metric)

    changes = {"learning_rate": rate, "final_learning_rate": final, "keep_at": (10, 20, 30, 40)}
    training = replace(TOY.setup.training, **changes)
    steps = {"id": [], "ood": []}
    for seed in range(3):
        setup = SelectedByMetric(**vars(TOY.setup) | {"training": training, "seed": seed})
        log, curves, trained, folder = train_cell(setup, tmp_path)
        for split, best_steps in steps.items():
            best_steps.append(best_of(log, key=lambda entry: entry[f"{split}/{metric}"])["step"])
        best = steps["id"][-1]
        assert trained.step == curves["tested_step"] == best
        assert curves["validation"] == best_of(entry[f"id/{metric}"] for entry in log)
        assert same_weights(trained.model.state_dict(), weights_in(folder, f"step-{best}"))
        assert not trained.model.training
    # The last checkpoint and the best one out of distribution differ from the selected one.
    assert set(steps["id"]) != {40}
    assert steps["id"] != steps["ood"]


def never_defined_before(step):
    """The toy setup, chosen by a metric that is NaN before a step."""

    class Chosen(ToySetup):
        metrics = ToySetup.metrics | {"late": Metric("share of right answers, once defined")}
        selection = Selection("id", "late")
        evaluations = 0

        def scores(self, output, batch, split):
            Chosen.evaluations += split == "id"
            # An evaluation has two batches of the split.
            value = 0.9 - Chosen.evaluations / 100 if Chosen.evaluations / 2 * 10 > step else nan
            late = {"late": (torch.full((len(batch),), value), torch.ones(len(batch)))}
            return super().scores(output, batch, split) | late

    return Chosen(**vars(TOY.setup))


def test_a_selecting_metric_that_is_not_a_number_is_the_worst(tmp_path):
    setup = never_defined_before(20)
    setup = replace(setup, training=replace(setup.training, keep_at=(30,)))
    log, curves, trained, folder = train_cell(setup, tmp_path)
    assert [isnan(entry["id/late"]) for entry in log] == [True, True, False, False]
    assert trained.step == curves["tested_step"] == 30
    assert same_weights(trained.model.state_dict(), weights_in(folder, "step-30"))
    with pytest.raises(RunError, match="id/late is NaN at every evaluation"):
        train_cell(replace(never_defined_before(1000), seed=1), tmp_path)


def test_a_measure_gets_the_last_checkpoint_if_asked_for(tmp_path):
    changes = {"learning_rate": 0.9, "final_learning_rate": 0.1, "checkpoint": "last"}
    steps = []
    for seed in range(3):
        training = replace(TOY.setup.training, keep_at=(40,), **changes)
        log, curves, trained, folder = train_cell(
            replace(TOY.setup, training=training, seed=seed), tmp_path
        )
        assert trained.step == curves["tested_step"] == log[-1]["step"]
        assert curves["validation"] == log[-1]["id/accuracy"]
        assert same_weights(trained.model.state_dict(), weights_in(folder, "step-40"))
        steps.append(max(log, key=lambda entry: entry["id/accuracy"])["step"])
    assert set(steps) != {40}


def test_training_begins_with_the_untrained_model_of_the_seed(tmp_path):
    without_updates = replace(TOY.setup.training, learning_rate=0.0)
    setup = replace(TOY.setup, training=without_updates, seed=1)
    _, _, trained, _ = train_cell(setup, tmp_path)
    initial = setup.build(torch.Generator().manual_seed(1)).state_dict()
    assert same_weights(trained.untrained.state_dict(), initial)
    assert same_weights(trained.model.state_dict(), initial)
    assert not trained.untrained.training


def test_a_model_that_refuses_its_settings_ends_the_run_with_its_reason(tmp_path):
    class Picky(type(TOY.setup)):
        def build(self, generator):
            raise ValueError("width must be even, got 3")

    study = replace(TOY, setup=Picky(**vars(TOY.setup)))
    with pytest.raises(RunError, match="the model cannot be built: width must be even, got 3"):
        run(study, changes=["seed=0"], resources=Resources(root=tmp_path, workers=1))


def test_a_measure_has_random_numbers_of_its_own(tmp_path):
    def draw(trained):
        drawn = [random.random(), np.random.random(), float(torch.rand(()))]  # noqa: NPY002
        return xr.Dataset({"drawn": ("feature", drawn, {"long_name": "random numbers"})})

    def drawn(folder, names, seed=0):
        setup = replace(TOY.setup, seed=seed)
        cell = Cell(setup, root=folder, measures=dict.fromkeys(names, draw))
        cell.train()
        torch.manual_seed(5)
        before = torch.get_rng_state()
        cell.measure()
        assert torch.equal(torch.get_rng_state(), before)
        tree = cell.load()
        return [tuple(tree[name]["drawn"].to_numpy()) for name in names]

    first, second = drawn(tmp_path / "both", ["first", "second"])
    assert drawn(tmp_path / "one", ["second"]) == [second]
    (other,) = drawn(tmp_path / "other", ["second"], seed=1)
    for values in (first, other):
        assert not set(values) & set(second)


def test_a_measure_that_returns_no_dataset_is_named(tmp_path):
    cell = Cell(TOY.setup, root=tmp_path, measures={"norm": lambda trained: xr.DataArray(1.0)})
    cell.train()
    with pytest.raises(TypeError, match=r"measure 'norm' must return .*, got DataArray"):
        cell.measure()


def test_losses_that_depend_on_the_seed_are_not_trained_together(tmp_path):
    class Scaled(ToySetup):
        def loss(self, model, batch, step):
            return super().loss(model, batch, step) * (1 + self.seed)

    study = replace(TOY, setup=Scaled(**vars(TOY.setup)))
    changes = ["model=mlp", "seed=0,1"]
    with pytest.raises(RunError, match=r"must have one loss, .* --together 1"):
        run(study, changes=changes, resources=Resources(root=tmp_path, together=2))
    run(study, changes=changes, resources=Resources(root=tmp_path))


def test_a_split_that_validation_uses_up_is_refused_before_training(tmp_path):
    study = replace(TOY, setup=replace(TOY.setup, task=LargestConfig(size=100)))
    message = "n_validation must be less than the 100 examples of split 'id'.* got 100"
    with pytest.raises(RunError, match=message):
        run(study, changes=["seed=0"], resources=Resources(root=tmp_path))
    with pytest.raises(RunError, match=message):
        # Whichever cell it is.
        run(study, changes=["seed=0", "n_validation=100,20"], resources=Resources(root=tmp_path))
    assert not (tmp_path / "models").exists()


def test_each_task_of_a_study_is_prepared(tmp_path):
    class Missing(ToySetup):
        def prepare(self):
            if self.task.n == 5:
                raise FileNotFoundError("five.txt is missing")

    study = replace(TOY, setup=Missing(**vars(TOY.setup)))
    plan = study.plan("laptop", ["task.n=5,4", "seed=0"])
    with pytest.raises(RunError, match=r"five.txt is missing"):
        Run(plan, Resources(root=tmp_path)).prepare()


def test_what_another_process_uses_is_not_set_aside_nor_removed(tmp_path):
    changes = ["model=mlp", "seed=0"]
    done = run(TOY, changes=changes, resources=Resources(root=tmp_path))
    (cell,) = Run(TOY.plan("laptop", changes), Resources(root=tmp_path)).cells
    files = {path: path.read_bytes() for path in cell.folder.iterdir() if path.is_file()}
    for folder in (done, cell.folder):
        for changed in ({"fresh": True}, {"anew": ("weights",)}):
            with locked(folder), pytest.raises(RunError, match="another process is using"):
                run(TOY, changes=changes, resources=Resources(root=tmp_path, **changed))
            assert {p: p.read_bytes() for p in cell.folder.iterdir() if p.is_file()} == files


def test_dropout_depends_on_the_seed(tmp_path):
    """Seeds with the same initial weights and examples differ only by dropout."""

    class SameWeights(ToySetup):
        def build(self, generator):
            return super().build(torch.Generator().manual_seed(7))

    SAMPLERS[LargestConfig(n=5)] = SameExamples(LargestConfig(n=5))
    for dropout, same in ((0.0, True), (0.5, False)):
        changes = {"dropout": dropout, "task": LargestConfig(n=5)}
        setups = [SameWeights(**vars(TOY.setup) | changes | {"seed": seed}) for seed in (0, 1)]
        folders = [train_cell(setup, tmp_path)[3] for setup in setups]
        assert same == same_weights(*(weights_in(folder, "last") for folder in folders))


class SameExamples(Largest):
    """The task, with the same training examples for all seeds."""

    def batch(self, split, index, size, device="cpu"):
        return super().batch(split, index % 2**20, size, device)


def test_a_loss_or_gradient_that_is_not_finite_stops_and_keeps_the_checkpoint(tmp_path):
    class Poisoned(type(TOY.setup)):
        def loss(self, model, batch, step):
            value = super().loss(model, batch, step)
            # The square root is finite at 0, but its gradient is not.
            return value + (value * 0).sqrt() if step == 19 else value

    setup = Poisoned(**vars(TOY.setup))
    with pytest.raises(TrainingError, match="a gradient is not finite after a step between 10 and"):
        run(replace(TOY, setup=setup), changes=["model=mlp", "seed=0"],
            resources=Resources(root=tmp_path))  # fmt: skip
    (folder,) = (tmp_path / "models").iterdir()
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log] == [10]


@pytest.mark.slow
def test_two_processes_train_the_same_model_as_one_and_one_of_them_writes(tmp_path):
    pytest.importorskip("accelerate")
    script = tmp_path / "script.py"
    # A loss may use more of a model than its `forward`.
    script.write_text("from dataclasses import replace\n"
                      "from tests.studies.engine.toy import TOY\n"
                      "from studies.engine import cross_entropy, main\n"
                      "class Setup(type(TOY.setup)):\n"
                      "    def loss(self, model, batch, step):\n"
                      "        return cross_entropy(model[:](batch.inputs), batch)\n"
                      "main(replace(TOY, setup=Setup(**vars(TOY.setup))))\n")  # fmt: skip
    changes = ["model=linear", "seed=0", "training.n_steps=10", "training.evaluate_every=10"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(script)]
    command += ["--workers", "1", "--out", str(tmp_path / "two"), *changes]
    environment = {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    completed = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=200
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.count("results and figures") == 1
    run(TOY, changes=changes, resources=Resources(root=tmp_path / "one"))
    one, two = (
        load_file(next((tmp_path / number).glob("models/*/last.safetensors")))
        for number in ("one", "two")
    )
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)
