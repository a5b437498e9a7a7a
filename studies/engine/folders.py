"""Run folders: where a study puts what it made, so that nothing is lost or made twice."""

from __future__ import annotations

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

from filelock import FileLock, Timeout

from studies.engine.settings import plain

LIBRARIES = ("modscope", "torch", "transformer-lens", "numpy", "scipy", "scikit-learn", "xarray")


class RunError(RuntimeError):
    """A run folder cannot be used: it is locked, not writable, or of another config or code."""


def config_hash(config: object) -> str:
    """Twelve hexadecimal digits that name a config."""
    text = json.dumps(plain(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def package_version() -> str:
    """The version of modscope: that of the installed package, else of this checkout."""
    try:
        return version("modscope")
    except PackageNotFoundError:
        import tomllib

        text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
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
    text = json.dumps(content, indent=2) + "\n"
    write_atomically(path, lambda place: place.write_text(text))


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
    """Keep a folder to this process; the system lets go of it when the process dies.

    Args:
        folder: made if it is not there.
        wait: until a process that holds it lets go.

    Raises:
        RunError: another process holds it, and `wait` is false; or it cannot be made.
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
    """The versions of Python and of the libraries that numbers hang on."""
    versions = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            versions[library] = package_version() if library == "modscope" else "not installed"
    return versions


def command_line() -> str:
    """How this process was called, without folders."""
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])


def git_commit(folder: Path) -> str:
    """The commit of the checkout that a folder is in, with `+changes` if files differ from it.

    `unknown` outside git.
    """

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=10
        )
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return commit + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def git_commits(folders: dict[str, Path]) -> dict[str, str]:
    """`git_commit` by name; folders of one repository under the first name alone."""
    commits: dict[str, str] = {}
    for name, folder in folders.items():
        commit = git_commit(folder)
        if commit not in commits.values() or commit == "unknown":
            commits[name] = commit
    return commits
