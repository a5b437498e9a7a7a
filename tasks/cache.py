"""Arrays that take long to compute, kept in files."""

import os
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

DEFAULT_CACHE = (
    Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "modscope"
)
"""The folder of cached expressions and tokens by default."""


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or folder, which is renamed to `path` at the end.

    Raises:
        OSError: the temporary path cannot be created, or `path` is a folder that is not empty.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        temporary = Path(folder) / path.name
        yield temporary
        os.replace(temporary, path)


def save_arrays(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """Write arrays to a file atomically; where that fails, warn and continue."""
    try:
        with write_atomically(path) as temporary:
            np.savez(temporary, allow_pickle=False, **arrays)
    except OSError as error:
        warnings.warn(
            f"{path} could not be written, so its contents are recomputed each time: {error}",
            stacklevel=2,
        )


def load_arrays(path: Path) -> dict[str, np.ndarray] | None:
    """Return the arrays of a file, or None where it is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:  # verifies the checksums
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None
