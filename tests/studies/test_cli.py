import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

from studies import cli
from studies.engine import read_result
from studies.zoo import all_studies
from tests.studies.engine.toy import TOY

ROOT = Path(__file__).parents[2]
OWN = """
from dataclasses import replace
import torch
from tests.studies.engine import toy
from studies.engine import main
import tasks
STUDY = replace(toy.TOY, name="own", grids=({"model": ("mlp", "linear")},))
INPUTS = torch.randn(3, 4)
good = torch.nn.Sequential(torch.nn.Linear(4, 4))
class Mixing(torch.nn.Linear):  # an example depends on the others
    def forward(self, x):
        return super().forward(x - x.mean(0))
mixing = Mixing(4, 4)
class Drawing:  # another batch each time
    splits = ("train",)
    def batch(self, split, index, size, device="cpu"):
        x = torch.randn(size, 1)
        return tasks.Batch(x, x, x < 9, {"x": x.clone()})
if __name__ == "__main__":
    main(STUDY)
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A study of one's own, and the folder of its run."""
    folder = tmp_path_factory.mktemp("own")
    file = folder / "own_study.py"
    file.write_text(OWN)
    words = ("training.n_steps=4", "training.evaluate_every=2", "training.keep_at=2")
    status, printed = modscope("run", file, "--out", folder, "--workers", 1, *words)
    assert status == 0, printed
    (made,) = folder.glob("own-*")
    return file, made


def modscope(*words):
    """The exit status, and what is printed, with single spaces."""
    done = CliRunner().invoke(cli.app, list(map(str, words)), env={"COLUMNS": "140"})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, " ".join(done.output.split())


def test_help_imports_nothing_heavy():
    script = """
import sys
from studies.cli import app
sys.argv = ["modscope", "--help"]
try:
    app()
finally:
    assert not {"torch", "xarray", "matplotlib", "transformer_lens"} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for command in ("list", "run", "show", "check", "--install-completion"):
        assert command in done.stdout


def test_list_has_all_studies_with_questions_and_presets():
    status, printed = modscope("list")
    assert status == 0
    for name, study in all_studies().items():
        assert name in printed
        assert all(word in printed for word in study.question.split())
        assert all(preset in printed for preset in study.presets)


def test_a_study_is_known_by_its_file_and_by_its_name():
    assert cli.file_of("modular_routing") == (ROOT / "studies" / "modular_routing.py", [])
    path, words = cli.file_of("scan")
    assert path == ROOT / "studies" / "compositional_benchmarks.py"
    assert words == ["--study", "scan"]
    assert cli.complete_study("co") == [
        "coda_composition",
        "compositional_benchmarks",
        "contextual_retrieval",
    ]


def test_run_and_show_pass_settings_to_the_study(tmp_path):
    words = ("--preset", "smoke", "--out", tmp_path, "training.n_steps=7")
    for command in (("run", "triangles", "--show"), ("show", "triangles")):
        status, printed = modscope(*command, *words)
        assert status == 0
        assert f"folder: {tmp_path}/triangles-" in printed
        assert "training.n_steps 7 " in printed


def test_the_run_of_a_file_records_the_command_of_a_script(own):
    result = read_result(own[1] / "result.nc")
    assert result.attrs["command"].startswith("own_study.py --workers 1 training.n_steps=4")


def test_show_prints_the_table_of_a_result(own):
    file, made = own
    status, printed = modscope("show", made, "--study", file)
    assert status == 0
    assert TOY.question in printed
    assert "Claims" in printed
    of_study = printed
    status, printed = modscope("show", made / "result.nc")
    assert status == 0
    # Without the study there is its stored summary.
    for reading in (name for name in TOY.table.readings() if "accuracy" in name):
        assert reading in printed
    assert printed != of_study


def test_check_finds_nothing_wrong(own):
    status, printed = modscope("check", f"{own[0]}:good", "--inputs", "INPUTS")
    assert status == 0, printed
    assert "nothing is broken" in printed


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mixing --inputs INPUTS", "the output of example 0, passed alone, differs"),
        ("Drawing", "must leave the global random state of torch alone"),
        ("good", "--inputs must name what good is called with"),
        ("god", "NAME must be defined in"),
        ("STUDY", "splits"),
    ],
)
def test_check_says_what_is_wrong(own, name, message):
    status, printed = modscope("check", *f"{own[0]}:{name}".split())
    assert status == 1
    assert message in printed


def test_check_of_results(own, tmp_path):
    assert modscope("check", own[1])[0] == 0
    damaged = tmp_path / "damaged.nc"
    damaged.write_bytes(b"no netCDF")
    status, printed = modscope("check", damaged)
    assert status == 1
    assert "must be a netCDF file" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run raven_latent", "got 'raven_latent'; nearest: raven_latent_code"),
        ("run none.py", "got 'none.py'; there is no such file"),
        ("run triangles --preset huge", "preset must be one of laptop, smoke"),
        ("show runs/none.nc", "a result must be a file or the folder of a run"),
        ("check none", "WHAT must be FILE.py:NAME or a result file, got 'none'"),
        ("check none.py:x", "FILE must be a Python file, got none.py"),
    ],
)
def test_wrong_words_are_errors(words, message):
    status, printed = modscope(*words.split())
    assert status == 1
    assert message in printed


def test_a_result_is_of_the_study_that_made_it(own):
    status, printed = modscope("show", own[1], "--study", ROOT / "studies" / "zoo.py")
    assert status == 1
    assert "must have the study own" in printed
    status, printed = modscope("show", own[1], "--preset", "smoke")
    assert status == 1
    assert "options of a result must be --study FILE.py" in printed


def test_view_makes_pages_of_one_and_of_many_results(own, tmp_path):
    pytest.importorskip("vl_convert", reason="no vl_convert: pip install '.[dev]'")
    file, made = own
    status, printed = modscope("view", made, "--study", file)
    assert status == 0, printed
    assert (made / "report.html").as_posix() in printed
    of_study = (made / "report.html").read_text()
    status, _ = modscope("view", made / "result.nc", "--to", tmp_path / "page.html")
    assert status == 0
    # Without the study there is its stored summary, and the address of the result is another one.
    without = (tmp_path / "page.html").read_text()
    assert TOY.question in without
    assert 'href="result.nc"' in of_study
    assert f'{made.name}/result.nc"' in without
    status, printed = modscope("view", made.parent)
    assert status == 0, printed
    index = (made.parent / "index.html").read_text()
    assert f'href="{made.name}/report.html"' in index
    # Not the files of measures.
    assert index.count("<tr data-text") == 1


def test_view_needs_a_result(tmp_path):
    status, printed = modscope("view", tmp_path)
    assert status == 1
    assert "RESULT must have results in it" in printed
    status, printed = modscope("view", tmp_path / "none.nc")
    assert status == 1
    assert "a result must be a file or the folder of a run" in printed


@pytest.mark.parametrize("place", ["file", "folder"])
def test_a_module_that_comes_before_a_package_is_named(tmp_path, place):
    shadow = tmp_path / "tasks.py" if place == "file" else tmp_path / "tasks" / "__init__.py"
    shadow.parent.mkdir(exist_ok=True)
    shadow.write_text("")
    (tmp_path / "mine.py").write_text("from studies import engine")
    script = [sys.executable, str(tmp_path / "mine.py")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.run(script, capture_output=True, text=True, env=environment)
    assert process.stderr.strip().endswith(
        f"ImportError: {shadow} comes before modscope's package 'tasks' and has its name: "
        "rename it, or run from another folder"
    )
    (tmp_path / "mine.py").rename(tmp_path / "other.py")
    with mock.patch.object(sys, "path", list(sys.path)):
        status, printed = modscope("run", tmp_path / "other.py")
    assert status == 1
    assert "comes before modscope's package 'tasks'" in printed


def test_a_folder_of_the_same_name_without_modules_is_no_package(tmp_path):
    (tmp_path / "probes").mkdir()
    script = [sys.executable, "-c", "import studies, probes; print(probes.__file__)"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    process = subprocess.run(script, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert process.stdout.strip() == str(ROOT / "probes" / "__init__.py"), process.stderr
