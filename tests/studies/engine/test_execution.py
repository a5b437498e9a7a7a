"""What is run, what is taken from disk, and what is noticed when code changes."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from studies.engine import (
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
    """Mine.

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


class Folder:
    """A study and its mechanism in files of a folder, edited and run again in this process."""

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
        work = Run(self.study().plan("laptop", changes), resources)
        return work, work.finish()

    def result(self, *changes, **resources):
        return read_result(self.run(*changes, **resources)[1] / "result.nc")


@pytest.fixture
def folder(tmp_path, monkeypatch, request):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield Folder(tmp_path, f"mine_{abs(hash(request.node.name)) % 10**8}")
    fingerprints.forget()


def stamps(root):
    return {p: p.stat().st_mtime_ns for p in root.rglob("*") if p.is_file() and p.name != ".lock"}


def same_numbers(first, second):
    for group in first.subtree:
        for name, values in group.data_vars.items():
            if values.dtype.kind == "f" and name not in ("seconds",):
                np.testing.assert_array_equal(values, second[group.path][name])


def test_a_finished_run_is_taken_from_disk_and_says_so(folder):
    folder.run()
    before = stamps(folder.path / "runs")
    work, _ = folder.run()
    assert work.taken_from_disk
    assert stamps(folder.path / "runs") == before


def test_comments_change_nothing(folder):
    folder.run()
    folder.edit(folder.mechanism, "class Net", "# A comment.\nclass Net")
    folder.edit(folder.study_file, "The size of", "How large")
    assert folder.run()[0].taken_from_disk


def test_an_edited_mechanism_is_noticed_after_the_run(folder):
    first = folder.result()
    folder.edit(folder.mechanism, "1.0 * self", "3.0 * self")
    with pytest.raises(RunError) as error:
        folder.run()
    for word in (f"{folder.name}_mechanism.py", "--fresh", "--accept-code"):
        assert word in str(error.value)
    # Taken as it is: the model is the old one, what is measured is new, and the result says so.
    accepted = folder.result(accept_code=True)
    assert set(json.loads(accepted.attrs["accepted_code"])) == set(first["norm"]["cell"].values)
    assert json.loads(first.attrs["accepted_code"]) == {}
    np.testing.assert_array_equal(accepted["norm"]["norm"], first["norm"]["norm"])
    anew = folder.result(fresh=True)
    assert json.loads(anew.attrs["accepted_code"]) == {}
    assert (anew["norm"]["norm"].to_numpy() != first["norm"]["norm"].to_numpy()).all()
    assert list((folder.path / "runs" / "models").glob("*.old-1"))


def test_an_edited_mechanism_is_noticed_in_the_middle_of_a_run(folder, monkeypatch):
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
    assert [one["step"] for one in written["codes"]] == [0, 10]


def test_code_that_changes_while_a_study_runs_is_noticed(folder):
    study = folder.study()
    work = Run(study.plan(), Resources(root=folder.path / "runs"))
    code = work.cells[0].code()
    folder.edit(folder.mechanism, "1.0 * self", "3.0 * self")
    fingerprints.forget()
    from studies.engine.execution import work as job

    with pytest.raises(RunError, match="code was changed while the study ran"):
        job(work.cells[0], code, 0, threads=1)


def test_an_edited_measure_is_computed_anew_and_the_models_stay(folder):
    first = folder.result()
    models = {p: t for p, t in stamps(folder.path / "runs").items() if p.suffix == ".safetensors"}
    folder.edit(folder.study_file, "2.0 * float", "6.0 * float")
    second = folder.result()
    np.testing.assert_allclose(second["norm"]["norm"], 3 * first["norm"]["norm"])
    after = stamps(folder.path / "runs")
    assert {p: after[p] for p in models} == models


def test_an_edited_picture_is_drawn_anew_and_nothing_else_is_computed(folder):
    _, path = folder.run()
    before = stamps(folder.path / "runs")
    folder.edit(folder.study_file, "axis.plot(", "axis.bar(range(2), ")
    work, _ = folder.run()
    assert not work.taken_from_disk
    after = stamps(folder.path / "runs")
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
    first, models = folder.result("seed=0"), stamps(folder.path / "runs" / "models")
    folder.edit(folder.study_file, before, after)
    second = folder.result("seed=0")
    assert not second[group][name].equals(first[group][name])
    assert stamps(folder.path / "runs" / "models") == models


def test_a_measure_can_be_computed_anew_without_training(folder):
    folder.run()
    before = stamps(folder.path / "runs")
    folder.run(anew=("norm",))
    after = stamps(folder.path / "runs")
    changed = {p.name.partition("-")[0] for p in after if after[p] != before.get(p)}
    assert {"norm", "result.nc"} <= changed
    assert not {"scores", "costs", "best.safetensors", "last.safetensors"} & changed
    with pytest.raises(ValueError, match="--measure must be one of scores, costs, norm, got size"):
        folder.run(anew=("size",))


def test_redrawing_needs_no_training_and_trains_nothing(folder):
    with pytest.raises(RunError, match="--redraw needs all models and measures on disk; 2 of 2"):
        folder.run(redraw=True)
    _, path = folder.run()
    (path / "result.nc").unlink()
    before = stamps(folder.path / "runs")
    folder.run(redraw=True)
    after = stamps(folder.path / "runs")
    assert {p.name for p in after if after[p] != before.get(p)} == {
        "config.json", "result.nc", "picture.png", "picture.pdf",
    }  # fmt: skip


def test_the_backend_of_matplotlib_stays_what_it_was(folder):
    matplotlib.use("svg")
    try:
        _, path = folder.run("seed=0")
        assert matplotlib.get_backend() == "svg"
    finally:
        matplotlib.use("agg")
    assert (path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_models_are_found_again_by_studies_with_other_settings_of_measures(folder):
    folder.run("seed=0")
    work, _ = folder.run("seed=0,1", "scores.n_test=100")
    steps = [Cell(cell.setup, root=folder.path / "runs").made()["at"] for cell in work.cells]
    assert len(steps) == 2
    assert len(list(folder.path.glob("runs/models/*"))) == 2


def test_a_killed_run_ends_in_the_same_result(folder):
    whole = folder.result()
    words = [sys.executable, str(folder.study_file), "--out", str(folder.path / "killed")]
    words += ["--workers", "2", "pause=0.05"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, env=environment, start_new_session=True,
                               stderr=subprocess.DEVNULL)  # fmt: skip
    deadline = time.monotonic() + 120
    while len(list((folder.path / "killed").glob("models/*/last.safetensors"))) < 1:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not list((folder.path / "killed").glob("mine-*/result.nc"))
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (path,) = (folder.path / "killed").glob("mine-*/result.nc")
    same_numbers(whole, read_result(path))


def test_the_command_line_shows_runs_and_refuses(folder, monkeypatch):
    monkeypatch.chdir(folder.path)
    study = folder.study()
    status, shown = command_line(study, words=["--show"])
    assert status == 0
    for word in (
        "training.n_steps",
        "number of updates",
        "pause",
        "seconds that a batch takes",
        "2 cells",
        "measure norm: The size of the weights",
        "folder: runs/mine-",
    ):
        assert word in shown  # fmt: skip
    assert not (folder.path / "runs").exists()
    for words, message in (
        (["sed=0"], "unknown setting 'sed'"),
        (["--preset", "huge"], "preset must be one of laptop, got 'huge'"),
        (["--redraw"], "--redraw needs all models"),
    ):
        status, refused = command_line(study, words=words)
        assert status == 1
        assert message in " ".join(refused.split())
    words = ["seed=0", "--workers", "1"]
    assert "accuracy, ood" in command_line(study, words=words)[1]
    _, again = command_line(study, words=words)
    assert "taken from disk: trained 20" in again
    # Output that no terminal shows has room for tables.
    assert max(map(len, again.splitlines())) > 80


def trained_alone(setup, folder):
    """A cell's log and curves, and what a measure receives of it."""
    seen = []
    cell = Cell(setup, root=folder, measures={"look": seen.append})
    cell.train()
    curves = cell.measured()["training"].to_dataset()
    return read_log(cell.folder), curves, seen[0], cell.folder


def of_checkpoint(folder, name):
    tensors = load_file(folder / f"{name}.safetensors")
    return {k.removeprefix("model/"): t for k, t in tensors.items() if k.startswith("model/")}


def same_weights(model, weights):
    own = model.state_dict()
    return own.keys() == weights.keys() and all(torch.equal(own[k], weights[k]) for k in own)


@pytest.mark.parametrize(
    ("metric", "best_of", "rate", "final"), [("accuracy", max, 0.9, 0.1), ("loss", min, 3.0, 1.0)]
)
def test_a_measure_sees_the_checkpoint_that_is_best_in_distribution(
    metric, best_of, rate, final, tmp_path
):
    class Chosen(ToySetup):
        selection = Selection("id", metric)

    changes = {"learning_rate": rate, "final_learning_rate": final, "keep_at": (10, 20, 30, 40)}
    training = replace(TOY.setup.training, **changes)
    steps = {"id": [], "ood": []}
    for seed in range(3):
        setup = Chosen(**vars(TOY.setup) | {"training": training, "seed": seed})
        log, curves, seen, folder = trained_alone(setup, tmp_path)
        for split, some in steps.items():
            some.append(best_of(log, key=lambda entry: entry[f"{split}/{metric}"])["step"])
        best = steps["id"][-1]
        assert seen.step == curves["best_step"] == best
        assert curves["validation"] == best_of(entry[f"id/{metric}"] for entry in log)
        assert same_weights(seen.model, of_checkpoint(folder, f"step-{best}"))
        assert not seen.model.training
    # Neither the last one nor that which is best out of distribution would be the same.
    assert set(steps["id"]) != {40}
    assert steps["id"] != steps["ood"]


def test_training_begins_with_the_untrained_model_of_the_seed(tmp_path):
    still = replace(TOY.setup.training, learning_rate=0.0)
    setup = replace(TOY.setup, training=still, seed=1)
    _, _, seen, _ = trained_alone(setup, tmp_path)
    first = setup.build(torch.Generator().manual_seed(1))
    assert same_weights(seen.untrained, first.state_dict())
    assert same_weights(seen.model, first.state_dict())
    assert not seen.untrained.training


def test_dropout_is_of_the_seed(tmp_path):
    """Seeds whose weights and examples are the same differ by dropout, and by nothing else."""

    class Alike(ToySetup):
        def build(self, generator):
            return super().build(torch.Generator().manual_seed(7))

    SAMPLERS[LargestConfig(n=5)] = OneSeed(LargestConfig(n=5))
    for dropout, same in ((0.0, True), (0.5, False)):
        changes = {"dropout": dropout, "task": LargestConfig(n=5)}
        setups = [Alike(**vars(TOY.setup) | changes | {"seed": seed}) for seed in (0, 1)]
        first, second = (trained_alone(setup, tmp_path)[3] for setup in setups)
        assert same == all(
            torch.equal(one, other)
            for one, other in zip(
                of_checkpoint(first, "last").values(),
                of_checkpoint(second, "last").values(),
                strict=True,
            )
        )


class OneSeed(Largest):
    """Training examples that all seeds share."""

    def batch(self, split, index, size, device="cpu"):
        return super().batch(split, index % 2**20, size, device)


def test_a_loss_or_gradient_that_is_not_finite_stops_and_keeps_the_checkpoint(tmp_path):
    class Poisoned(type(TOY.setup)):
        def loss(self, model, batch, step):
            value = super().loss(model, batch, step)
            # The root is finite at 0, its gradient is not.
            return value + (value * 0).sqrt() if step == 19 else value

    setup = Poisoned(**vars(TOY.setup))
    with pytest.raises(TrainingError, match="a gradient is not finite after a step between 10 and"):
        run(replace(TOY, setup=setup), changes=["model=mlp", "seed=0"],
            resources=Resources(root=tmp_path))  # fmt: skip
    (folder,) = (tmp_path / "models").iterdir()
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log] == [10]


def test_two_processes_train_the_models_that_one_would_and_one_writes(tmp_path):
    pytest.importorskip("accelerate")
    script = tmp_path / "script.py"
    script.write_text("from tests.studies.engine.toy import TOY\n"
                      "from studies.engine import main\n"
                      "main(TOY)\n")  # fmt: skip
    changes = ["model=linear", "seed=0", "training.n_steps=10", "training.evaluate_every=10"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    launch += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(script)]
    words = ["--workers", "1", "--out", str(tmp_path / "two"), *changes]
    environment = {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*launch, *words], capture_output=True, text=True, timeout=200,
        env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("results and figures") == 1
    run(TOY, changes=changes, resources=Resources(root=tmp_path / "one"))
    one, two = (
        load_file(next((tmp_path / number).glob("models/*/last.safetensors")))
        for number in ("one", "two")
    )
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)
