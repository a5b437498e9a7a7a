"""Run folders: atomic writes, locks, hashes, and the provenance that results record."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from filelock import FileLock, Timeout

from studies.engine.settings import plain

REPORT = "report.html"
"""The page of a result, in the folder of a run."""

LOCK = ".lock"
"""The file in a folder that a process holds while it works there."""

LIBRARIES = ("modscope", "torch", "transformer-lens", "numpy", "scipy", "scikit-learn", "xarray")


LAST = "last.safetensors"
"""The checkpoint whose log says whether a model is trained."""


class RunError(RuntimeError):
    """A run cannot go on: its folder is locked, not writable, or of another config or code."""


def config_hash(config: object) -> str:
    """The hash of a config: twelve hexadecimal digits."""
    text = json.dumps(plain(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a temporary file with `write`, then rename it to `path`, which is never half written.

    Raises:
        RunError: the file cannot be written (no space, no permission); an old file stays.
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
    """The content of a JSON file; empty if there is no file.

    Raises:
        RunError: the content is not JSON.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}") from error


def set_aside(folder: Path) -> None:
    """Move what an earlier run left in a folder, all but its lock, to `NAME.old-K`."""
    found = [path for path in folder.iterdir() if path.name != LOCK] if folder.exists() else []
    if not found:
        return
    number = 1
    while (backup := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    backup.mkdir()
    # After a kill, what stays is taken neither for measures of a model that is trained anew, nor,
    # without its config, for that of the current code.
    order = {".nc": 0, ".safetensors": 1, ".json": 3}
    for path in sorted(found, key=lambda path: (order.get(path.suffix, 2), path.name != LAST)):
        path.rename(backup / path.name)


@contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Lock a folder, which is made if needed; the lock ends when this process dies.

    Args:
        folder: the folder.
        wait: whether to wait for another process that holds the lock.

    Raises:
        RunError: another process holds the lock and `wait` is False; or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = FileLock(folder / LOCK, timeout=-1 if wait else 0).acquire()
    except Timeout as error:
        raise RunError(f"another process is using {folder}") from error
    except OSError as error:
        raise RunError(f"cannot write {folder}: {error.strerror or error}") from error
    # Errors of what is done under the lock are not those of the folder.
    with held:
        yield


def now() -> str:
    """The current time in UTC, as ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def library_versions() -> dict[str, str]:
    """The versions of Python, modscope and its main libraries."""
    versions = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            versions[library] = "not installed"
    return versions


def command_line() -> str:
    """The command line of this process, without paths: the script's name, and no `--out`."""
    arguments = iter(sys.argv[1:])
    kept = [Path(sys.argv[0]).name]
    for argument in arguments:
        if argument == "--out":
            next(arguments, None)
        elif not argument.startswith("--out="):
            kept.append(argument)
    return " ".join(kept)


def git_commits(folders: Mapping[str, Path]) -> dict[str, str]:
    """The git commit of each folder when this process first asked for it, by name.

    A commit ends in `+changes` if files differ from it, and is `unknown` outside of git. Folders
    at the same commit are listed once, under the first name.
    """
    commits: dict[str, str] = {}
    for name, folder in folders.items():
        commit = _commit_of(folder)
        if commit not in commits.values() or commit == "unknown":
            commits[name] = commit
    return commits


# Code is loaded once: what is changed or committed later is not what this process runs.
@functools.cache
def _commit_of(folder: Path) -> str:
    git = functools.partial(
        subprocess.run, cwd=folder, capture_output=True, text=True, check=True, timeout=10
    )
    try:
        commit = git(["git", "rev-parse", "HEAD"]).stdout.strip()
        return commit + ("+changes" if git(["git", "status", "--porcelain"]).stdout else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
