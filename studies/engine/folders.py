"""Run folders: where a study puts what it made, so that nothing is lost or made twice."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from filelock import FileLock, Timeout

from studies.engine.settings import plain

LIBRARIES = ("modscope", "torch", "transformer-lens", "numpy", "scipy", "scikit-learn", "xarray")


class RunError(RuntimeError):
    """A run folder cannot be used: it is locked, not writable, or of another config or code."""


def config_hash(config: object) -> str:
    """Twelve hexadecimal digits that name a config."""
    text = json.dumps(plain(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, then rename it: `path` is old or new, never half.

    Raises:
        RunError: the file cannot be written (no space, no permission); what was there stays.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}-") as folder:
            temporary = Path(folder, path.name)
            write(temporary)
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            temporary.replace(path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


def write_json(path: Path, content: object) -> None:
    """Write `content` as indented JSON, atomically."""
    write_atomically(path, lambda to: to.write_text(json.dumps(content, indent=2) + "\n"))


def read_json(path: Path) -> dict:
    """What a JSON file holds; empty if there is none.

    Raises:
        RunError: it is no JSON.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}") from error


def set_aside(folder: Path) -> None:
    """Move an earlier run out of the way, to `NAME.old-K`."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    if folder.exists():
        folder.rename(aside)


@contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Keep a folder, new or not, to this process; the system lets go of it when the process dies.

    Raises:
        RunError: another process holds it, and no `wait` is asked for; or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=-1 if wait else 0):
            yield
    except Timeout as error:
        raise RunError(f"another process is at work in {folder}") from error
    except OSError as error:
        raise RunError(f"cannot write {folder}: {error.strerror or error}") from error


def now() -> str:
    """The time, in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def library_versions() -> dict[str, str]:
    """The versions of Python, of modscope (installed, or this checkout) and of its libraries."""
    versions = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            versions[library] = "not installed"
    if versions["modscope"] == "not installed":
        checkout = Path(__file__).parents[2] / "pyproject.toml"
        versions["modscope"] = tomllib.loads(checkout.read_text())["project"]["version"]
    return versions


def command_line() -> str:
    """How this process was called, without folders."""
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])


def git_commits(folders: Mapping[str, Path]) -> dict[str, str]:
    """The commits of the checkouts that folders are in, by name, those of one under the first.

    With `+changes` if files differ from it; `unknown` outside git.
    """
    commits: dict[str, str] = {}
    for name, folder in folders.items():
        git = functools.partial(
            subprocess.run, cwd=folder, capture_output=True, text=True, check=True, timeout=10
        )
        try:
            commit = git(["git", "rev-parse", "HEAD"]).stdout.strip()
            commit += "+changes" if git(["git", "status", "--porcelain"]).stdout else ""
        except (OSError, subprocess.SubprocessError):
            commit = "unknown"
        if commit not in commits.values() or commit == "unknown":
            commits[name] = commit
    return commits
