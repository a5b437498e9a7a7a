"""The source distribution and the wheel, built and tried outside of the checkout."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PACKAGES = ("mechanisms", "tasks", "probes", "studies")
# Stored results and the templates of their pages belong to the checkout.
LEFT_OUT = ("studies/results/", "studies/pages/")


def git(tree, *words):
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *author, *words], cwd=tree, check=True)


def build(kind, tree, to):
    """The file that the build backend makes of a tree."""
    script = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(to)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tree, check=True, capture_output=True, text=True
    )
    return to / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that is built from the source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("release")
    tree = folder / "tree"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("*.nc"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    git(tree, "init", "--quiet")
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", "all")
    git(tree, "tag", "v9.8.7")
    with tarfile.open(build("sdist", tree, folder)) as source:
        source.extractall(folder / "source", filter="data")
    (unpacked,) = (folder / "source").iterdir()
    with zipfile.ZipFile(build("wheel", unpacked, folder)) as built:
        built.extractall(folder / "site")
    return folder / "site"


def run(wheel, tmp_path, *words):
    """What Python prints that finds the packages in the wheel, in another folder."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(wheel), "COLUMNS": "140"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_file_of_the_packages_is_in_the_wheel(wheel):
    def files(root):
        found = {path for package in PACKAGES for path in (root / package).rglob("*.*")}
        names = {path.relative_to(root).as_posix() for path in found if path.is_file()}
        return {name for name in names if "__pycache__" not in name}

    expected = {name for name in files(ROOT) if not name.startswith(LEFT_OUT)}
    assert files(wheel) == expected
    assert {"mechanisms/py.typed", "studies/papers/tay_2019.toml"} <= expected
    assert any(name.endswith(".safetensors") for name in expected)


def test_the_version_is_that_of_the_tag_and_the_command_is_there(wheel):
    (metadata,) = wheel.glob("*.dist-info")
    assert message_from_string((metadata / "METADATA").read_text())["Version"] == "9.8.7"
    assert "modscope = studies.cli:app" in (metadata / "entry_points.txt").read_text()


def test_a_study_and_the_zoo_are_used_from_the_wheel(wheel, tmp_path):
    script = """
import mechanisms
from studies import cli
print(cli.__file__)
mechanisms.load("zoo:raven-softmax-k2-seed0")
cli.app()  # the command `modscope`
"""
    words = ("run", "triangles", "--preset", "smoke", "--workers", "1", "--out", "made")
    printed = run(wheel, tmp_path, "-c", script, *words)
    assert str(wheel) in printed
    (made,) = (tmp_path / "made").glob("triangles-*")
    assert {"result.nc", "report.html"} <= {path.name for path in made.iterdir()}
