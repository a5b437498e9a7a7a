import pytest
from typer import Typer
from typer.testing import CliRunner

from studies.engine import folders
from studies.engine.worklist import Options, jobs_left, run_of
from studies.paper_gpu import ENTRIES, main

every_entry = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)


@every_entry
def test_entries_have_the_papers_settings_and_are_trained_fast(entry, tmp_path):
    options = Options(root=tmp_path, device="cuda", changes=["training.precision=bf16"])
    cells = run_of(entry, options).cells
    paper = entry.study.plan(entry.preset).cells
    steps = {cell.training.n_steps for cell in paper}
    for cell in cells:
        training = cell.setup.training
        assert training.compile
        assert training.precision == "bf16"
        assert training.n_steps in steps or training.schedule == "stable"
        assert training.n_steps % training.evaluate_every == 0 or training.n_steps > 100_000
        # A checkpoint comes often enough for a call of a few minutes.
        assert training.evaluate_every <= 5000
        assert training.batch_size in {each.training.batch_size for each in paper}
        assert cell.setup.models() == paper[0].models()


@every_entry
def test_a_rehearsal_has_the_same_models_in_groups_of_the_same_kind(entry, tmp_path):
    models = []
    for tiny in (False, True):
        run = run_of(entry, Options(root=tmp_path, device="cpu", tiny=tiny))
        models.append({cell.setup.model for cell in run.cells})
        sizes = {len(group) for job in jobs_left(run, entry) for group in job}
        assert (max(sizes) > 1) == (entry.together > 1)
        assert max(sizes) <= entry.together
        if tiny:
            assert max(cell.setup.training.n_steps for cell in run.cells) <= 20
    assert models[0] <= models[1]


def test_the_curve_of_more_instances_shares_its_constant_part(tmp_path):
    (curve,) = (entry for entry in ENTRIES if "stable" in entry.changes)
    run = run_of(curve, Options(root=tmp_path, device="cpu"))
    jobs = jobs_left(run, curve)
    assert len(jobs) == len({cell.setup.model for cell in run.cells})
    assert all(len(job) == 4 for job in jobs)


def test_the_command_says_what_is_left_and_ends_well_when_there_is_no_time(tmp_path):
    app = Typer()
    app.command()(main)
    words = ["--tiny", "--device", "cpu", "--out", str(tmp_path), "--minutes", "1e-6"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "Raven (not begun)" in " ".join(done.output.split())
    (call,) = folders.read_json(tmp_path / "paper_gpu.json")["calls"]
    assert [each["entry"] for each in call["entries"]] == [entry.name for entry in ENTRIES]
    assert not (tmp_path / "models").exists()


def test_the_list_can_be_shown_and_wrong_arguments_are_refused(tmp_path):
    app = Typer()
    app.command()(main)
    shown = CliRunner().invoke(app, ["--show", "--device", "cpu", "--out", str(tmp_path)])
    assert shown.exit_code == 0
    assert "python studies/raven_latent_code.py --preset paper model=softmax" in shown.output
    for words, message in (
        (["training.nothing=1"], "training.nothing"),
        (["--minutes", "0"], "minutes must be greater than 0, got 0.0"),
        (["--device", "cuda:99"], "device must be available here"),
    ):
        done = CliRunner().invoke(app, ["--out", str(tmp_path), "--device", "cpu", *words])
        assert done.exit_code == 1
        assert message in " ".join(done.output.split())
