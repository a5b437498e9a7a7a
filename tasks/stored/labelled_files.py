"""Texts with labels, as others have stored them: jsonl, tab-separated, or Hugging Face's."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tasks.stored.opening import Table, how_to_fetch, open_stored, require_splits

_NO_LABEL = ("-", "", "-1", "None")


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a data set is stored.

    Attributes:
        texts: for each text of an example, the names that its column may have.
        label: the names that the column of the label may have.
        classes: what the labels are called; where they are whole numbers, they are indices.
        group: the names of the column that says which examples belong together, if there is one.
        columns: of tab-separated files whose first line does not name them.
        suffix: of the files.
        files: for each split, alternatives of what a file's name must have, between marks.
        stored: what Hugging Face calls the splits.
        hub: the data set's name on Hugging Face's hub, None if it is not known there.
        subset: which part of it.
        origin: where its authors have it.
        layout: what of that is to be put where; None: the files.
    """

    texts: tuple[tuple[str, ...], ...]
    label: tuple[str, ...]
    classes: tuple[str, ...]
    group: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    suffix: str
    files: Mapping[str, tuple[str, ...]]
    stored: Mapping[str, str]
    hub: str | None
    subset: str | None = None
    origin: str
    layout: str | None = None


class Example(NamedTuple):
    """One row: its texts, its class, what it belongs to, and its number in what is stored."""

    texts: tuple[str, ...]
    label: int
    group: str | None
    row: int


def read_labelled(name: str, path: Path | None, format_: Format) -> dict[str, list[Example]]:
    """Return the examples of each split that have a label.

    Args:
        name: what the data set is called in errors.
        path: a folder with the files of its authors, or what `save_to_disk` wrote, or parquet
            files; None: Hugging Face's cache, or its hub.
        format_: how it is stored.

    Raises:
        FileNotFoundError: it is not there; says what to fetch and where to put it.
        ValueError: it is stored in another way.
    """
    if path is not None and not path.is_dir():
        raise FileNotFoundError(_how_to_get(name, path, format_))
    if path is not None and (files := split_files(path, format_.suffix, format_.files)):
        rows = {split: _read_file(file, format_) for split, file in files.items()}
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
            split: _read_table(tables[theirs], theirs) for split, theirs in format_.stored.items()
        }
    found = {split: list(_examples(some, format_)) for split, some in rows.items()}
    if empty := [split for split, some in found.items() if not some]:
        raise ValueError(f"{name} has no labelled examples in {', '.join(empty)}")
    return found


def _read_table(table: Table, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return each row by its columns' names, and where it is."""
    number = 0
    for some in table.iter(batch_size=1000):
        for cells in zip(*some.values(), strict=True):
            yield f"row {number} of {name}", dict(zip(some, cells, strict=True))
            number += 1


def _how_to_get(name: str, path: Path, format_: Format) -> str:
    layout = format_.layout or names_wanted(format_.suffix, format_.files)
    fetch = "" if format_.hub is None else how_to_fetch(format_.hub, format_.subset, str(path))
    return (
        f"path={str(path)!r}: there is no {name}. Fetch it from {format_.origin}, and put there "
        f"{layout}{fetch and '; or, '}{fetch}"
    )


def names_wanted(suffix: str, files: Mapping[str, tuple[str, ...]]) -> str:
    """Return which files `split_files` finds, for errors."""
    return f"its {suffix} files: " + ", ".join(
        f"one of {split} with {' or '.join(map(repr, names))} in its name"
        for split, names in files.items()
    )


def split_files(
    folder: Path, suffix: str, files: Mapping[str, tuple[str, ...]]
) -> dict[str, Path] | None:
    """Return the file of each split, or None if the folder has no files with the suffix.

    Args:
        folder: where they are.
        suffix: how their names end.
        files: for each split, alternatives of what its file's name must have, between marks.

    Raises:
        ValueError: for a split there is none, or there are several.
    """
    every = sorted(file for file in folder.iterdir() if file.suffix == suffix)
    if not every:
        return None
    found = {}
    for split, names in files.items():
        # `dev` is no part of `devious`.
        marks = [re.compile(rf"(?<![a-z]){re.escape(name)}(?![a-z])", re.I) for name in names]
        mine = [file for file in every if any(mark.search(file.stem) for mark in marks)]
        if len(mine) != 1:
            raise ValueError(
                f"{folder} has the files {', '.join(file.name for file in every)}: allowed is, for "
                f"{split}, one with {' or '.join(map(repr, names))} in its name, there are "
                f"{len(mine)}"
            )
        found[split] = mine[0]
    return found


def read_json_lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the object of each line, and where it is.

    Raises:
        ValueError: a line is no JSON object.
    """
    for place, line in read_lines(file):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{place} is {type(row).__name__}: allowed is a JSON object")
        yield place, row


def _read_file(file: Path, format_: Format) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return each row by its columns' names, and where it is."""
    if file.suffix == ".jsonl":
        yield from read_json_lines(file)
        return
    columns = format_.columns
    for number, (place, line) in enumerate(read_lines(file)):
        cells = line.split("\t")
        if number == 0 and set(cells) & set(format_.label):
            columns = tuple(cells)
            continue
        if len(cells) != len(columns):
            raise ValueError(
                f"{place} has {len(cells)} columns: allowed are {len(columns)}, separated by tabs "
                f"({', '.join(columns) or 'named in the first line'})"
            )
        yield place, dict(zip(columns, cells, strict=True))


def read_lines(file: Path) -> Iterator[tuple[str, str]]:
    """Return each line, and where it is; what else ends lines in Unicode does not end any here."""
    with file.open(encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines):
            yield f"line {number + 1} of {file}", line.rstrip("\r\n")


def _examples(rows: Iterator[tuple[str, dict[str, Any]]], format_: Format) -> Iterator[Example]:
    for number, (place, row) in enumerate(rows):
        label = _cell(row, format_.label, place)
        if str(label) in _NO_LABEL:
            continue
        if isinstance(label, int) and 0 <= label < len(format_.classes):
            known = label
        elif str(label) in format_.classes:
            known = format_.classes.index(str(label))
        else:
            raise ValueError(
                f"{place} has the label {label!r}: allowed are {', '.join(format_.classes)}"
            )
        yield Example(
            texts=tuple(str(_cell(row, names, place)) for names in format_.texts),
            label=known,
            group=str(_cell(row, format_.group, place)) if format_.group else None,
            row=number,
        )


def _cell(row: dict[str, Any], names: tuple[str, ...], place: str) -> Any:
    for name in names:
        if name in row:
            return row[name]
    raise ValueError(f"{place} has the columns {', '.join(row)}: allowed is {' or '.join(names)}")
