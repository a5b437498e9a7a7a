import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from studies.engine import folders
from studies.engine.folders import (
    RunError,
    config_hash,
    git_commits,
    library_versions,
    locked,
    read_json,
    set_aside,
    write_atomically,
    write_json,
)


@dataclass(frozen=True)
class Config:
    size: int = 1
    names: tuple[str, ...] = ("a",)


@dataclass(frozen=True)
class Other:
    size: int = 1
    names: tuple[str, ...] = ("a",)


def test_only_equal_configs_have_equal_hashes():
    assert config_hash(Config()) == config_hash(Config())
    assert config_hash(Config()) != config_hash(Config(size=2))
    assert config_hash(Config()) != config_hash(Other())


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "result.nc"
    write_atomically(path, lambda temporary: temporary.write_text("old"))

    def fail_halfway(temporary):
        temporary.write_text("ne")
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match=r"cannot write .*result.nc: No space left"):
        write_atomically(path, fail_halfway)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_earlier_runs_are_kept_under_numbered_names(tmp_path):
    for number in (1, 2):
        write_json(tmp_path / "run" / "config.json", {"number": number})
        set_aside(tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())
    kept = [json.loads((tmp_path / f"run.old-{n}" / "config.json").read_text()) for n in (1, 2)]
    assert kept == [{"number": 1}, {"number": 2}]
    set_aside(tmp_path / "run")
    assert not (tmp_path / "run.old-3").exists()


def test_a_kill_while_a_run_is_set_aside_leaves_no_measure_of_another_model(tmp_path, monkeypatch):
    names = ("best.safetensors", "config.json", "costs-a.nc", "last.safetensors", "log.jsonl")
    rename, left = Path.rename, []

    def note_and_rename(path, to):
        left.append({each.name for each in path.parent.iterdir()})
        return rename(path, to)

    for name in names:
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / name).write_text("")
    monkeypatch.setattr(Path, "rename", note_and_rename)
    set_aside(tmp_path / "run")
    assert left[0] == {*names}
    for files in left:
        # A model that is not trained is trained; one that is trained is measured.
        assert "last.safetensors" in files or "costs-a.nc" not in files
        assert "best.safetensors" in files or "last.safetensors" not in files
        assert "config.json" in files


def test_a_folder_stays_locked_while_an_earlier_run_is_set_aside(tmp_path):
    folder = tmp_path / "run"
    with locked(folder):
        write_json(folder / "config.json", {})
        set_aside(folder)
        with pytest.raises(RunError, match="another process"), locked(folder):
            pass


def test_a_folder_can_be_locked_only_once_at_a_time(tmp_path):
    with locked(tmp_path), pytest.raises(RunError, match="another process"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match="cannot write"), locked(tmp_path / "file" / "run"):
        pass


def test_an_error_under_the_lock_is_not_one_of_the_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"words\.txt"), locked(tmp_path / "run"):
        (tmp_path / "words.txt").read_text()
    with locked(tmp_path / "run"):
        pass


def test_damaged_json_is_an_error_and_a_missing_file_is_empty(tmp_path):
    assert read_json(tmp_path / "none.json") == {}
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RunError, match=r"config.json is damaged"):
        read_json(tmp_path / "config.json")


def test_versions_and_commits(tmp_path):
    assert library_versions()["torch"].startswith("2.")
    assert git_commits({"study": tmp_path}) == {"study": "unknown"}


def test_the_commit_is_that_at_which_the_process_began(tmp_path):
    def git(*arguments):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    git("init")
    git("commit", "--allow-empty", "--message", "first")
    before = git_commits({"study": tmp_path})
    assert len(before["study"]) == 40
    (tmp_path / "file").write_text("changed")
    assert git_commits({"study": tmp_path}) == before
    folders._commit_of.cache_clear()
    assert git_commits({"study": tmp_path}) == {"study": f"{before['study']}+changes"}


def test_the_command_line_has_no_paths(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/a/study.py", "--out", "/b", "seed=1", "--out=/c", "d_mlp=2"])
    assert folders.command_line() == "study.py seed=1 d_mlp=2"
