"""Data that comes with installed packages: what needs no network, written where tasks read it."""

from pathlib import Path
from typing import Any, cast

import numpy as np

from tasks.cache import written_at_once

# With ~, so that settings are the same on every machine.
PYTHON_HELP = "~/.cache/modscope/python_help.txt"
BUNDLED_IMAGES = "~/.cache/modscope/images"


def write_python_help(path: Path) -> None:
    """Write the texts of Python's `help()` on its language: half a megabyte, mostly English.

    A file that is there stays; another version of Python has other texts.

    Raises:
        FileNotFoundError: there is none, and it cannot be written.
    """
    from pydoc_data.topics import topics

    if path.exists():
        return
    text = "\n".join(topics[name] for name in sorted(topics))
    try:
        with written_at_once(path) as part:
            part.write_text(text)
    except OSError as error:
        raise FileNotFoundError(f"cannot write {path}: {error.strerror or error}") from error


def write_digits(folder: Path) -> None:
    """Write scikit-learn's handwritten digits, 8 x 8 pixels, the last 297 of them as `test`.

    A folder that is there stays.

    Args:
        folder: where `datasets.load_from_disk` shall find them.
    """
    if folder.exists():
        return
    import datasets
    from sklearn.datasets import load_digits

    found = cast(Any, load_digits())
    names = [str(name) for name in found.target_names]
    kinds = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
    )
    images = (found.images * (255 / 16)).astype(np.uint8)
    parts = datasets.DatasetDict()
    for split, rows in (("train", slice(None, 1500)), ("test", slice(1500, None))):
        columns = {"image": list(images[rows]), "label": found.target[rows].tolist()}
        parts[split] = datasets.Dataset.from_dict(columns, features=kinds)
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        with written_at_once(folder) as part:
            parts.save_to_disk(str(part))
    except OSError:
        # Another process may have been faster.
        if not folder.exists():
            raise
    finally:
        if shown:
            datasets.enable_progress_bars()
