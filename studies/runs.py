"""Run folders: where a study puts what it made, so that nothing is lost or made twice."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
LIBRARIES = ("modscope", "torch", "transformer-lens", "numpy", "scipy", "scikit-learn", "xarray")


class RunError(RuntimeError):
    """A run folder cannot be used: it is locked, not writable, or of another config."""


def plain(config: object) -> Any:
    """A config as JSON values: nested dataclasses become dicts, tuples lists."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {
            field.name: plain(getattr(config, field.name)) for field in dataclasses.fields(config)
        }
    if isinstance(config, dict):
        return {key: plain(value) for key, value in config.items()}
    if isinstance(config, (tuple, list)):
        return [plain(value) for value in config]
    return config


def config_hash(config: object) -> str:
    """Twelve hexadecimal digits that name a config together with the version of the code."""
    text = json.dumps({"config": plain(config), "version": package_version()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def package_version() -> str:
    """The version of modscope: that of the installed package, else of this checkout."""
    try:
        return version("modscope")
    except PackageNotFoundError:
        import tomllib

        text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
        return tomllib.loads(text)["project"]["version"]


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, then rename it: `path` is old or new, never half.

    Raises:
        RunError: the file cannot be written (no space, no permission); what was there stays.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(
            dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix
        )
        os.close(handle)
        temporary = Path(name)
        write(temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        # mkstemp makes files that only their owner may read.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write_json(path: Path, content: object) -> None:
    """Write `content` as indented JSON, atomically."""
    text = json.dumps(plain(content), indent=2) + "\n"
    write_atomically(path, lambda place: place.write_text(text))


def open_folder(folder: Path, config: object, *, fresh: bool = False) -> Path:
    """Make or reopen the folder of a run; its `config.json` must be that of this run.

    Args:
        fresh: move an earlier run out of the way, to `NAME.old-K`.

    Raises:
        RunError: the folder belongs to another config, or cannot be written.
    """
    if fresh and folder.exists():
        number = 1
        while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
            number += 1
        folder.rename(aside)
    identity = {"version": package_version(), "config": plain(config)}
    place = folder / "config.json"
    if not place.exists():
        write_json(place, identity)
    elif json.loads(place.read_text()) != identity:
        raise RunError(f"{folder} holds a run of another config: see {place}")
    return folder


@contextmanager
def locked(folder: Path, *, name: str = ".lock", wait: bool = False) -> Iterator[None]:
    """Keep a folder to this process; the system lets go of it when the process dies.

    Args:
        name: of the file that is locked, for a part of the folder.
        wait: until a process that holds it lets go.

    Raises:
        RunError: another process holds it, and `wait` is false.
    """
    if os.name != "posix":
        yield
        return
    import fcntl

    with (folder / name).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            raise RunError(f"another process is at work in {folder}") from error
        yield


def provenance(config: object, *, seed: object, device: str) -> dict[str, str | int]:
    """The netCDF attributes that say how a result was made."""
    versions = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            versions[library] = package_version() if library == "modscope" else "not installed"
    return {
        "schema_version": SCHEMA_VERSION,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": json.dumps(plain(config)),
        "config_hash": config_hash(config),
        "git_commit": git_commit(),
        "versions": json.dumps(versions),
        "seed": json.dumps(plain(seed)),
        "device": device,
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def git_commit() -> str:
    """The checkout's commit, with `+changes` if files differ from it; `unknown` outside git."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return commit + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
