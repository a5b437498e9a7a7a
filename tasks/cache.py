"""Arrays that take long to make, kept in files."""

import os
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np


@contextmanager
def written_at_once(path: Path) -> Iterator[Path]:
    """Give a path to write a file or a folder to, which in the end becomes `path`: all or nothing.

    Raises:
        OSError: there is no place for it, or `path` is a folder that is not empty.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder) / path.name
        yield part
        os.replace(part, path)


def save_arrays(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """Write a file at once or not at all; without a place for it, say so and go on."""
    try:
        with written_at_once(path) as part:
            np.savez(part, allow_pickle=False, **arrays)
    except OSError as error:
        warnings.warn(
            f"{path} could not be written, so it is made anew each time: {error}", stacklevel=2
        )


def load_arrays(path: Path) -> dict[str, np.ndarray] | None:
    """Return what a file holds, or None if there is none or it is damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:  # compares check sums
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None
