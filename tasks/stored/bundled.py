"""Data sets that come with installed packages, written to folders that tasks can read."""

import ast
import hashlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np

from tasks.cache import write_atomically

# With ~, so that configs are the same on every machine.
PYTHON_HELP = "~/.cache/modscope/python_help.txt"
PACKAGE_DOCS = "~/.cache/modscope/package_docs.txt"
BUNDLED_IMAGES = "~/.cache/modscope/images"

_DOCUMENTED = ("networkx", "numpy", "scipy", "sklearn")
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def write_python_help(path: Path) -> None:
    """Write the topics of Python's `help()` to a text file: half a megabyte, mostly English.

    An existing file is kept; the texts depend on the version of Python.

    Raises:
        FileNotFoundError: the file does not exist and cannot be written.
    """
    from pydoc_data.topics import topics

    if not path.exists():
        _write(path, "\n".join(topics[name] for name in sorted(topics)))


def write_package_docs(path: Path) -> None:
    """Write the docstrings of NetworkX, NumPy, SciPy and scikit-learn to a text file: 12 megabytes.

    Each one is there once. They are in an arbitrary but fixed order, so that the end of the text is
    like its beginning. An existing file is kept; the texts depend on the versions of the packages.

    Raises:
        FileNotFoundError: the file does not exist and cannot be written.
    """
    if path.exists():
        return
    found = set()
    for package in _DOCUMENTED:
        for folder in cast(Any, find_spec(package)).submodule_search_locations:
            found |= {text for file in Path(folder).rglob("*.py") for text in _docstrings(file)}
    _write(
        path, "\n\n".join(sorted(found, key=lambda text: hashlib.sha256(text.encode()).digest()))
    )


def _docstrings(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, _WITH_DOCSTRING) and (text := ast.get_docstring(node)):
            yield text


def _write(path: Path, text: str) -> None:
    try:
        with write_atomically(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FileNotFoundError(f"cannot write {path}: {error.strerror or error}") from error


def write_digits(folder: Path) -> None:
    """Write scikit-learn's handwritten digits, 8 x 8 pixels, with the last 297 as `test`.

    Args:
        folder: a folder for `datasets.load_from_disk`; an existing one is kept.
    """
    if folder.exists():
        return
    import datasets
    from sklearn.datasets import load_digits

    digits = cast(Any, load_digits())
    names = [str(name) for name in digits.target_names]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
    )
    images = (digits.images * (255 / 16)).astype(np.uint8)
    splits = datasets.DatasetDict()
    for split, rows in (("train", slice(None, 1500)), ("test", slice(1500, None))):
        columns = {"image": list(images[rows]), "label": digits.target[rows].tolist()}
        splits[split] = datasets.Dataset.from_dict(columns, features=features)
    were_enabled = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        with write_atomically(folder) as temporary:
            splits.save_to_disk(str(temporary))
    except OSError:
        # Another process may have written it in the meantime.
        if not folder.exists():
            raise
    finally:
        if were_enabled:
            datasets.enable_progress_bars()
