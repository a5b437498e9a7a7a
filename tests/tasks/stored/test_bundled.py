"""Bundled data sets: compared with the packages that they come with."""

import datasets
import numpy as np
import pytest
from sklearn.datasets import load_digits

import tasks
from tasks.stored import bundled


def test_the_text_that_comes_with_python_is_written_once(tmp_path):
    place = tmp_path / "cache" / "help.txt"
    bundled.write_python_help(place)
    text = place.read_text()
    assert len(text) > 100_000
    assert text.count(" the ") > 1000
    place.write_text("mine")
    bundled.write_python_help(place)
    assert place.read_text() == "mine"
    assert [path.name for path in place.parent.iterdir()] == ["help.txt"]


def test_the_documentation_of_packages_is_written_once(tmp_path, monkeypatch):
    folder = tmp_path / "packages" / "made_up"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text('"""A package.\n\n    Indented."""\nX = "no docstring"\n')
    (folder / "more.py").write_text(
        'class A:\n    """Of a class."""\n    async def f(self):\n        """Of a function."""\n'
        'def g():\n    """Of a function."""\n'
    )
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setattr(bundled, "_DOCUMENTED", ("made_up",))
    place = tmp_path / "cache" / "docs.txt"
    bundled.write_package_docs(place)
    expected = ["A package.\n\nIndented.", "Of a class.", "Of a function."]
    texts = place.read_text()
    assert sorted(texts.replace("\n\nIndented", "+").split("\n\n")) == [
        text.replace("\n\nIndented", "+") for text in expected
    ]
    place.write_text("mine")
    bundled.write_package_docs(place)
    assert place.read_text() == "mine"


def test_a_text_that_cannot_be_written_is_missing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError, match=r"cannot write .*help.txt: .*xist"):
        bundled.write_python_help(tmp_path / "file" / "help.txt")
    monkeypatch.setattr(bundled, "_DOCUMENTED", ())
    with pytest.raises(FileNotFoundError, match=r"cannot write .*docs.txt: .*xist"):
        bundled.write_package_docs(tmp_path / "file" / "docs.txt")


def test_digits_are_those_of_scikit_learn_and_are_written_once(tmp_path):
    place = tmp_path / "images" / "digits"
    bundled.write_digits(place)
    stored, known = datasets.load_from_disk(str(place)), load_digits()
    assert {split: len(rows) for split, rows in stored.items()} == {"train": 1500, "test": 297}
    assert stored["train"].features["label"].names == [str(digit) for digit in range(10)]
    for split, first in (("train", 0), ("test", 1500)):
        for row in (0, 7, 296):
            # Sixteen shades become those of a byte.
            pixels = np.asarray(stored[split][row]["image"], int)
            assert np.abs(pixels - known.images[first + row] * 255 / 16).max() < 1
            assert stored[split][row]["label"] == known.target[first + row]
    assert [path.name for path in place.parent.iterdir()] == ["digits"]
    before = sorted((path, path.stat().st_mtime_ns) for path in place.rglob("*"))
    bundled.write_digits(place)
    assert sorted((path, path.stat().st_mtime_ns) for path in place.rglob("*")) == before


def test_tasks_write_what_they_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.stored.text.PYTHON_HELP", str(tmp_path / "help.txt"))
    monkeypatch.setattr("tasks.stored.image_sources.BUNDLED_IMAGES", str(tmp_path / "images"))
    text = tasks.TextConfig(path=str(tmp_path / "help.txt"), vocabulary_size=258, length=64)
    assert tasks.Text(text, cache=None).n_bytes("train") > 100_000
    monkeypatch.setattr("tasks.stored.text.PACKAGE_DOCS", str(tmp_path / "docs.txt"))
    monkeypatch.setattr(bundled, "_DOCUMENTED", ("networkx.generators",))
    docs = tasks.TextConfig(path=str(tmp_path / "docs.txt"), vocabulary_size=258, length=64)
    assert tasks.Text(docs, cache=None).n_bytes("train") > 100_000
    images = {"folder": str(tmp_path / "images"), "n_valid": 100, "image_size": 8}
    task = tasks.Images(tasks.ImagesConfig(sources=("digits",), **images))
    assert [task.size(split) for split in task.splits] == [1400, 100, 297]
    other = tasks.Images(tasks.ImagesConfig(sources=("birds",), **images))
    with pytest.raises(FileNotFoundError, match="there is no birds in"):
        other.size("train")
