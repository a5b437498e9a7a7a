import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = sorted(
    path.stem
    for path in (ROOT / "studies").glob("[a-z]*.py")
    if "main(" in path.read_text() and "__main__" in path.read_text()
)


def test_there_are_eight_studies():
    assert len(FILES) == 8


@pytest.mark.parametrize("name", FILES)
def test_help_imports_nothing_that_it_does_not_need(name):
    script = f"""
import sys, runpy
sys.argv = ["study", "--help"]
try:
    runpy.run_path("studies/{name}.py", run_name="__main__")
except SystemExit:
    pass
assert not {{"transformer_lens", "dask", "distributed", "sklearn"}} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for word in ("--preset", "--show", "--measure", "--redraw", "--fresh", "--accept-code"):
        assert word in done.stdout


def test_one_study_of_several_is_chosen_by_its_name():
    words = [sys.executable, "studies/coda_composition.py", "--show", "--preset", "smoke"]
    for study in ("coda_arithmetic", "coda_signed_pairs"):
        done = subprocess.run([*words, "--study", study], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert f"folder: runs/{study}-" in done.stdout
    done = subprocess.run([*words, "--study", "mlu"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "--study must be one of coda_arithmetic, coda_signed_pairs, got 'mlu'" in " ".join(
        done.stdout.split()
    )


def test_the_face_of_the_engine_has_what_it_names():
    engine = importlib.import_module("studies.engine")
    for name in engine.__all__:
        assert getattr(engine, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Stdy'"):
        engine.Stdy  # noqa: B018
