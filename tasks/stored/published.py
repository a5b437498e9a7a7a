"""Readers of labelled texts in the layouts that their authors chose."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

Rows = Iterator[tuple[str, dict[str, Any]]]
Reader = Callable[[Path], Rows]
"""Yields the location of each row, for errors, and its cells by column."""

_QUESTION, _ANSWERS = "question", {"positive": "1", "negative": "0"}
_CANDIDATES = ("Ground Truth Utterance", *(f"Distractor_{number}" for number in range(9)))


def read_lines(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the location and the text of each line; Unicode line separators do not end lines.

    Raises:
        ValueError: the file is not UTF-8.
    """
    with _opened(file, newline="\n") as lines:
        for number, line in enumerate(lines):
            yield f"line {number + 1} of {file}", line.rstrip("\r\n")


@contextmanager
def _opened(file: Path, newline: str | None = None) -> Iterator[TextIO]:
    """Open a text; one that is not UTF-8 is an error that names the file."""
    try:
        with file.open(encoding="utf-8", newline=newline) as text:
            yield text
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} must be UTF-8, got {error}") from error


def read_json_lines(file: Path) -> Rows:
    """Yield the object of each line, or of each item of a single JSON array (Dialogue NLI).

    Raises:
        ValueError: a line is not a JSON object, or the file not an array of such.
    """
    with _opened(file) as text:
        is_array = text.read(100).lstrip().startswith("[")
    for location, row in _items(file) if is_array else _json_lines(file):
        if not isinstance(row, dict):
            raise ValueError(f"{location} must be a JSON object, got {type(row).__name__}")
        yield location, row


def _json_lines(file: Path) -> Iterator[tuple[str, Any]]:
    for location, line in read_lines(file):
        try:
            yield location, json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{location} must be JSON, got {line!r:.200}: {error}") from error


def _items(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        with _opened(file) as text:
            items = json.load(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} must be a JSON array, got {error}") from error
    for number, item in enumerate(items):
        yield f"item {number} of {file}", item


def tab_reader(columns: tuple[str, ...], label: tuple[str, ...]) -> Reader:
    """Make a reader of lines with cells between tabs.

    Args:
        columns: the columns of a file without a header.
        label: possible names of the column of the label; a first line that has one is a header.
    """

    def read(file: Path) -> Rows:
        names = columns
        for number, (location, line) in enumerate(read_lines(file)):
            cells = line.split("\t")
            if number == 0 and set(cells) & set(label):
                names = tuple(cells)
                continue
            if len(cells) != len(names):
                raise ValueError(
                    f"{location} must have {len(names)} columns, separated by tabs "
                    f"({', '.join(names) or 'named in the first line'}), got {len(cells)}"
                )
            yield location, dict(zip(names, cells, strict=True))

    return read


def read_comma_separated(file: Path) -> Rows:
    """Yield the cells of each row of a csv file, whose first line names the columns.

    Raises:
        ValueError: a row has too few or too many cells.
    """
    with _opened(file, newline="") as lines:
        rows = csv.DictReader(lines, restkey="")
        for row in rows:
            location = f"line {rows.line_num} of {file}"
            if "" in row or None in row.values():
                names = rows.fieldnames or ()
                raise ValueError(
                    f"{location} must have {len(names)} cells ({', '.join(names)}), got others"
                )
            yield location, row


def read_ubuntu(file: Path) -> Rows:
    """Yield context, response and label (1 or 0) of the Ubuntu dialogue corpus 2.0 (.csv).

    Training files have the columns Context, Utterance and Label. The others have the right response
    and nine distractors: each is a row, and `group` is the number of the context.

    Raises:
        ValueError: as for `read_comma_separated`, or a column is missing.
    """
    for number, (location, row) in enumerate(read_comma_separated(file)):
        context = {"context": cell_of(row, ("Context",), location), "group": str(number)}
        if "Label" in row:
            label = row["Label"].removesuffix(".0")
            utterance = cell_of(row, ("Utterance",), location)
            yield location, context | {"response": utterance, "label": label}
            continue
        for candidate, name in enumerate(_CANDIDATES):
            response = cell_of(row, (name,), location)
            yield location, context | {"response": response, "label": str(int(candidate == 0))}


def read_ubuntu_turns(file: Path) -> Rows:
    """Yield context, response and label of the first Ubuntu corpus as Xu et al. prepared it (.txt).

    A line has the label, the turns of the context and the response between tabs. `group` is the
    number of the context: successive lines with the same turns belong together.

    Raises:
        ValueError: a line has fewer than three cells.
    """
    last, group = None, -1
    for location, line in read_lines(file):
        label, *turns = line.split("\t")
        if len(turns) < 2:
            raise ValueError(
                f"{location} must have a label, turns and a response, separated by tabs, got "
                f"{len(turns) + 1} cells"
            )
        context = " ".join(turns[:-1])
        group += context != last
        last = context
        yield (
            location,
            {"context": context, "response": turns[-1], "label": label, "group": str(group)},
        )


def read_trec_qa(file: Path) -> Rows:
    """Yield question, answer, label (1 or 0) and the question's id of TrecQA (.xml).

    The layout of Wang et al. 2007 is no XML. `<QApairs id='...'>` begins a question; after
    `<question>`, `<positive>` and `<negative>` the first line has the words, between tabs; the
    others, such as parts of speech, are passed over.

    Raises:
        ValueError: an answer comes before its question, or there is no question in the file.
    """
    question, pair, tag = None, None, None
    for location, line in read_lines(file):
        line = line.strip()
        if match := re.fullmatch(r"<QApairs\s+id=['\"](.*)['\"]>", line):
            question, pair = None, match[1]
        elif match := re.fullmatch(r"<(question|positive|negative)>", line):
            tag = match[1]
        elif tag is not None:
            words = line.replace("\t", " ")
            if tag == _QUESTION:
                question = words
            elif question is None or pair is None:
                raise ValueError(
                    f"{location} must come after <QApairs> and <question>, got an answer"
                )
            else:
                yield (
                    location,
                    {"question": question, "answer": words, "label": _ANSWERS[tag], "id": pair},
                )
            tag = None
    if pair is None:
        raise ValueError(f"{file} must have questions (<QApairs id='...'>), got none")


def tree_reader(classes: tuple[tuple[str, ...], ...]) -> Reader:
    """Make a reader of the trees of the Stanford Sentiment Treebank (.txt), one in a line.

    `(3 (2 It) (4 (2 's) (4 good)))` is the sentence "It 's good" of class 3.

    Args:
        classes: for each label that is yielded the classes of the treebank, "0" to "4", that it
            stands for. Sentences of others are left out.
    """
    labels = {name: str(label) for label, names in enumerate(classes) for name in names}

    def read(file: Path) -> Rows:
        for location, line in read_lines(file):
            match = re.match(r"\(([0-4]) ", line)
            words = re.findall(r"\([0-4] ([^()\s]+)\)", line)
            if match is None or not words or line.count("(") != line.count(")"):
                raise ValueError(
                    f"{location} must be a tree such as (3 (2 It) (4 works)), got {line!r:.200}"
                )
            if match[1] in labels:
                text = " ".join(words).replace("-LRB-", "(").replace("-RRB-", ")")
                yield location, {"text": text, "label": labels[match[1]]}

    return read


def cell_of(row: dict[str, Any], names: tuple[str, ...], location: str) -> Any:
    """Return the cell of the first of some columns that a row has.

    Raises:
        ValueError: it has none of them.
    """
    for name in names:
        if name in row:
            return row[name]
    raise ValueError(
        f"{location} must have a column {' or '.join(names)}, got the columns {', '.join(row)}"
    )
