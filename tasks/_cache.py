"""Arrays that take long to make, kept in files."""

import os
import tempfile
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np


def save_arrays(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """Write a file at once or not at all; without a place for it, say so and go on."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            part = Path(folder) / path.name
            np.savez(part, allow_pickle=False, **arrays)
            os.replace(part, path)
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
