import json
from dataclasses import dataclass

import pytest

from studies.runs import (
    RunError,
    config_hash,
    locked,
    open_folder,
    provenance,
    write_atomically,
    write_json,
)


@dataclass(frozen=True)
class Config:
    size: int = 1
    names: tuple[str, ...] = ("a",)


def test_equal_configs_have_equal_hashes_and_others_do_not():
    assert config_hash(Config()) == config_hash(Config())
    assert config_hash(Config()) == config_hash({"names": ["a"], "size": 1})
    assert config_hash(Config()) != config_hash(Config(size=2))


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "result.nc"
    write_atomically(path, lambda place: place.write_text("old"))

    def half(place):
        place.write_text("ne")
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match=r"cannot write .*result.nc: No space left"):
        write_atomically(path, half)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_folders_keep_to_their_config(tmp_path):
    folder = open_folder(tmp_path / "run", Config())
    (folder / "log.jsonl").write_text("kept")
    assert open_folder(folder, Config()) == folder
    with pytest.raises(RunError, match="another config"):
        open_folder(folder, Config(size=2))
    open_folder(folder, Config(size=2), fresh=True)
    assert (tmp_path / "run.old-1" / "log.jsonl").read_text() == "kept"
    assert json.loads((folder / "config.json").read_text())["config"]["size"] == 2


def test_a_folder_is_locked_once(tmp_path):
    with locked(tmp_path), pytest.raises(RunError, match="another process"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_provenance_is_fit_for_netcdf():
    attrs = provenance(Config(), seed=(0, 1), device="cpu")
    assert set(attrs) == {
        "schema_version",
        "created_at",
        "config",
        "config_hash",
        "git_commit",
        "versions",
        "seed",
        "device",
        "command",
    }
    assert all(isinstance(value, str | int) for value in attrs.values())
    assert json.loads(str(attrs["config"])) == {"size": 1, "names": ["a"]}
    assert json.loads(str(attrs["versions"]))["torch"].startswith("2.")


def test_json_is_readable(tmp_path):
    write_json(tmp_path / "a.json", Config())
    assert json.loads((tmp_path / "a.json").read_text()) == {"size": 1, "names": ["a"]}
