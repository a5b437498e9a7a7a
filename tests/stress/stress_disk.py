"""Folders that are full, read-only, shared, removed or from the future: clear errors, no losses."""

import os
import shutil
import subprocess
import sys
import time

import pytest

from tests.stress.processes import ENVIRONMENT, LONGEST, run_until
from tests.stress.stress_kills import of_run
from tests.studies.engine.test_execution import StudyFolder

MOUNTS = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@pytest.fixture
def study(tmp_path):
    return str(StudyFolder(tmp_path, "own_study").study_file)


@pytest.fixture
def expected(study, tmp_path):
    return of_run(finish(study, tmp_path / "undisturbed"))


@pytest.fixture
def mount(tmp_path):
    """A folder in memory of half a megabyte."""
    folder = tmp_path / "mount"
    folder.mkdir()
    remount(folder, "size=512k", new=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def remount(folder, options, *, new=False):
    options = options if new else f"remount,{options}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)


def words(study, out):
    return [study, "--out", str(out), "--workers", "1", "pause=0.05"]


def finish(study, out):
    run_until(words(study, out), out.parent / "log")
    return out


def start(study, out):
    return subprocess.Popen(
        [sys.executable, *words(study, out)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def fails(study, out):
    """The message of a run that must end by itself with an error."""
    process = start(study, out)
    printed, _ = process.communicate(timeout=120)
    message = printed[printed.rfind("error:") :]
    assert process.returncode not in (0, None), printed
    assert "Traceback" not in printed
    assert len(message) <= LONGEST
    return " ".join(message.replace(str(out.parent), "FOLDER").split())


@MOUNTS
def test_a_full_disk(study, expected, mount, record):
    (mount / "filler").write_bytes(b"0" * 450_000)
    message = fails(study, mount / "out")
    assert "No space left on device" in message
    (mount / "filler").unlink()
    remount(mount, "size=200m")
    assert of_run(finish(study, mount / "out")) == expected
    record("full disk, then one with room", message, "identical")


@MOUNTS
def test_a_read_only_folder(study, expected, mount, record):
    remount(mount, "size=200m")
    finish(study, mount / "out")
    remount(mount, "ro")
    run_until([*words(study, mount / "out"), "--show"], mount.parent / "log")
    message = fails(study, mount / "new")
    assert "Read-only file system" in message
    remount(mount, "rw")
    assert of_run(mount / "out") == expected
    record("read-only folder", message, "named")


def test_two_runs_on_one_folder(study, expected, tmp_path, record):
    out = tmp_path / "shared"
    processes = [start(study, out) for _ in range(2)]
    printed = [process.communicate(timeout=300)[0] for process in processes]
    codes = sorted(process.returncode for process in processes)
    assert codes[0] == 0, printed
    assert not any("Traceback" in text for text in printed)
    assert of_run(finish(study, out)) == expected
    record("two runs on one folder at once: exit statuses", f"{codes[0]}, {codes[1]}", "identical")


def test_a_folder_that_is_removed_in_the_middle(study, expected, tmp_path, record):
    out = tmp_path / "removed"
    process = start(study, out)
    while not list(out.glob("models/*/last.safetensors")):
        assert process.poll() is None
        time.sleep(0.05)
    shutil.rmtree(out, ignore_errors=True)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode != 0 or (list(out.glob("*/result.nc")))
    assert "Traceback" not in printed, printed
    shutil.rmtree(out, ignore_errors=True)
    assert of_run(finish(study, out)) == expected
    record(
        "folder removed in the middle: exit status", str(process.returncode), "run anew: identical"
    )


def test_a_clock_that_is_set_back(study, expected, tmp_path, record):
    out, tomorrow = tmp_path / "future", time.time() + 86_400
    run_until(words(study, out), tmp_path / "log", 8)
    for path in out.rglob("*"):
        os.utime(path, (tomorrow, tomorrow))
    assert of_run(finish(study, out)) == expected
    record("files from the future, as after a clock is set back", "identical", "identical")
