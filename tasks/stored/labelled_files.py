"""Reading of labelled texts, from their authors' files or from Hugging Face's formats."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from tasks.stored.opening import Table, how_to_fetch, open_stored, require_splits
from tasks.stored.published import (
    Reader,
    cell_of,
    read_comma_separated,
    read_json_lines,
    tab_reader,
)

OWN = "own"
"""The name of data sets of the user's own, whose columns and labels are settings."""

THREE_FILES = {"train": ("train",), "valid": ("dev", "valid", "validation"), "test": ("test",)}
THREE_STORED = {"train": "train", "valid": "validation", "test": "test"}
"""The usual names of the files of splits, and Hugging Face's names of splits."""

_NO_LABEL = ("-", "", "-1", "None")


@dataclass(frozen=True, kw_only=True)
class Format:
    """The format of a data set.

    Attributes:
        texts: for each text of an example, the possible names of its column.
        label: the possible names of the column of the label.
        classes: the names of the labels; integer labels are indices.
        group: the possible names of the column that groups examples, empty if there is none.
        readers: the reader of files with each suffix; the first suffix that occurs counts.
        files: for each split, alternative words of which one must be in the file's name.
        stored: Hugging Face's name of each split.
        hub: the data set's name on Hugging Face's hub, None if it is not there.
        subset: the name of the subset on the hub.
        origin: where its authors publish it.
        layout: what to copy from the origin; None: the files.
    """

    texts: tuple[tuple[str, ...], ...]
    label: tuple[str, ...]
    classes: tuple[str, ...]
    group: tuple[str, ...] = ()
    readers: Mapping[str, Reader]
    files: Mapping[str, tuple[str, ...]]
    stored: Mapping[str, str]
    hub: str | None
    subset: str | None = None
    origin: str
    layout: str | None = None

    def with_columns(self, columns: tuple[str, ...]) -> "Format":
        """Return the format with other columns: those of the texts, of the label and the group."""
        n = len(self.texts)
        label, readers = (columns[n],), dict(self.readers)
        if ".tsv" in readers:
            readers[".tsv"] = tab_reader(columns, label)
        texts = tuple((name,) for name in columns[:n])
        return replace(self, texts=texts, label=label, group=columns[n + 1 :], readers=readers)


def own_format(n_texts: int) -> Format:
    """Return the format of a user's own data set, whose columns and labels are set later."""
    return Format(
        texts=((),) * n_texts,
        label=(),
        classes=(),
        readers={
            ".jsonl": read_json_lines,
            ".tsv": tab_reader((), ()),
            ".csv": read_comma_separated,
        },
        files=THREE_FILES,
        stored=THREE_STORED,
        hub=None,
        origin="where you have it",
    )


class Example(NamedTuple):
    """One row: its texts, its class index, its group, and its number in the stored split."""

    texts: tuple[str, ...]
    label: int
    group: str | None
    row: int


def read_labelled(name: str, path: Path | None, format_: Format) -> dict[str, list[Example]]:
    """Return the examples of each split that have a label.

    Args:
        name: the data set's name in errors.
        path: a folder with the authors' files, the output of `save_to_disk`, or parquet files;
            None: Hugging Face's cache, or its hub.
        format_: the format of the data set.

    Raises:
        FileNotFoundError: the data set is missing; says what to fetch and where to put it.
        ValueError: the data has another format.
    """
    if path is not None and not path.is_dir():
        raise FileNotFoundError(_how_to_get(name, path, format_))
    files = None
    if path is not None:
        found = (split_files(path, suffix, format_.files) for suffix in format_.readers)
        files = next(filter(None, found), None)
    if files is not None:
        rows = {split: format_.readers[file.suffix](file) for split, file in files.items()}
    elif path is not None and not any(path.iterdir()):
        raise FileNotFoundError(_how_to_get(name, path, format_))
    else:
        tables = open_stored(
            name,
            folder=path,
            setting="path",
            place="FOLDER",
            hub=format_.hub,
            subset=format_.subset,
        )
        require_splits(name, tables, format_.stored.values())
        rows = {
            split: _read_table(tables[stored], stored) for split, stored in format_.stored.items()
        }
    examples = {split: list(_examples(of_split, format_)) for split, of_split in rows.items()}
    if empty := [split for split, of_split in examples.items() if not of_split]:
        raise ValueError(f"{name} must have labelled examples in {', '.join(empty)}, got none")
    return examples


def _read_table(table: Table, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location and the cells of each row of a table."""
    number = 0
    for columns in table.iter(batch_size=1000):
        for cells in zip(*columns.values(), strict=True):
            yield f"row {number} of {name}", dict(zip(columns, cells, strict=True))
            number += 1


def _how_to_get(name: str, path: Path, format_: Format) -> str:
    layout = format_.layout or describe_files(" or ".join(format_.readers), format_.files)
    fetch = "" if format_.hub is None else how_to_fetch(format_.hub, format_.subset, str(path))
    return (
        f"path must be a folder with {name}, got {str(path)!r}. Fetch it from {format_.origin}, "
        f"and put there {layout}{fetch and '; or, '}{fetch}"
    )


def describe_files(suffix: str, files: Mapping[str, tuple[str, ...]]) -> str:
    """Describe the files that `split_files` accepts, for errors."""
    return f"its {suffix} files: " + ", ".join(
        f"one of {split} with {' or '.join(map(repr, names))} in its name"
        for split, names in files.items()
    )


def split_files(
    folder: Path, suffix: str, files: Mapping[str, tuple[str, ...]]
) -> dict[str, Path] | None:
    """Return the file of each split, or None if the folder has no files with the suffix.

    Args:
        folder: the folder of the files.
        suffix: the suffix of the files.
        files: for each split, alternative words of which one must be in the file's name.

    Raises:
        ValueError: a split has no file, or several.
    """
    candidates = sorted(file for file in folder.iterdir() if file.suffix == suffix)
    if not candidates:
        return None
    file_of_split = {}
    for split, names in files.items():
        # `dev` must be a word: not a part of `devious`.
        words = [re.compile(rf"(?<![a-z]){re.escape(name)}(?![a-z])", re.I) for name in names]
        matches = [file for file in candidates if any(word.search(file.stem) for word in words)]
        if len(matches) != 1:
            raise ValueError(
                f"{folder} must have one file for {split}, with {' or '.join(map(repr, names))} in "
                f"its name, got {len(matches)} of {', '.join(file.name for file in candidates)}"
            )
        file_of_split[split] = matches[0]
    return file_of_split


def _examples(rows: Iterator[tuple[str, dict[str, Any]]], format_: Format) -> Iterator[Example]:
    for number, (location, row) in enumerate(rows):
        label = cell_of(row, format_.label, location)
        if str(label) in _NO_LABEL:
            continue
        if isinstance(label, int) and 0 <= label < len(format_.classes):
            class_index = label
        elif str(label) in format_.classes:
            class_index = format_.classes.index(str(label))
        else:
            raise ValueError(
                f"the label of {location} must be one of {', '.join(format_.classes)}, got "
                f"{label!r}"
            )
        yield Example(
            texts=tuple(str(cell_of(row, names, location)) for names in format_.texts),
            label=class_index,
            group=str(cell_of(row, format_.group, location)) if format_.group else None,
            row=number,
        )
