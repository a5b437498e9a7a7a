"""Reading of questions with retrieved contexts, in the layouts that their authors chose."""

import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

from tasks.stored.published import cell_of, read_json_lines, read_lines

SPLIT_WORDS = {"train": "train", "valid": "(?:dev|val|valid|validation)", "test": "test"}
"""For each split a pattern of the words that stand for it in the names of files."""

_SNIPPET = re.compile(r"<s>(.*?)</s>", re.S)
_JSON = (".json", ".jsonl", ".json.gz", ".jsonl.gz")


class Question(NamedTuple):
    """A question, its contexts in the order of retrieval, and the right answers."""

    question: str
    contexts: tuple[str, ...]
    answers: tuple[str, ...]


Reader = Callable[[Path, str, str], list[Question] | None]
"""Reads a split from a folder, with long or short contexts; None if it has another layout."""


@dataclass(frozen=True)
class Layout:
    """Where a data set comes from, and how its files are read.

    Attributes:
        readers: alternatives, of which the first that finds its files counts.
        origin: where its authors publish it.
        files: what to copy from there.
    """

    readers: tuple[Reader, ...]
    origin: str
    files: str


def read_questions(name: str, folder: Path, contexts: str) -> dict[str, list[Question]]:
    """Return the questions of each split of a data set.

    Args:
        name: one of `LAYOUTS`.
        folder: the folder with its files.
        contexts: `short` or `long`, for data sets that have both.

    Raises:
        FileNotFoundError: the folder, or a split in it, is missing; says what to fetch.
        ValueError: a file has another layout.
    """
    layout, found = LAYOUTS[name], {}
    for split in SPLIT_WORDS:
        parts = [reader(folder, split, contexts) for reader in layout.readers]
        questions = next((part for part in parts if part is not None), None)
        if questions is None:
            raise FileNotFoundError(
                f"path must be a folder with {name}, got {str(folder)!r}, which has no {split}. "
                f"Fetch it from {layout.origin}, and put there {layout.files}"
            )
        if not questions:
            raise ValueError(f"{name} must have questions in {split}, got none in {folder}")
        found[split] = questions
    return found


def _file_of(folder: Path, split: str, suffixes: tuple[str, ...], after: str = "") -> Path | None:
    """The file or folder whose name is the split, what comes after it, and one of the suffixes."""
    pattern = re.compile(f"{SPLIT_WORDS[split]}{after}(?:{'|'.join(map(re.escape, suffixes))})")
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    matches = [file for file in files if pattern.fullmatch(file.name)]
    if len(matches) > 1:
        names = ", ".join(file.name for file in matches)
        raise ValueError(f"{folder} must have one file for {split}, got {names}")
    return matches[0] if matches else None


def _question(
    location: str, question: Any, contexts: list[Any], answers: list[Any]
) -> Question | None:
    """A checked question; None if its text is empty, as a few of SearchQA are."""
    texts = [question, *contexts, *answers]
    if not all(isinstance(text, str) for text in texts) or not answers:
        raise ValueError(
            f"{location} must have texts as question, contexts and answers, and an answer, got "
            f"{texts!r:.200}"
        )
    return Question(question, tuple(contexts), tuple(answers)) if question.strip() else None


def _kept(questions: Iterator[Question | None]) -> list[Question]:
    return [question for question in questions if question is not None]


def read_snippet_lines(folder: Path, split: str, contexts: str) -> list[Question] | None:
    """Read SearchQA as lines `<s> snippet </s> ... ||| question ||| answer` (.txt)."""
    file = _file_of(folder, split, (".txt",))
    return None if file is None else _kept(_snippet_lines(file))


def _snippet_lines(file: Path) -> Iterator[Question | None]:
    for location, line in read_lines(file):
        parts = [part.strip() for part in line.split("|||")]
        snippets = [snippet.strip() for snippet in _SNIPPET.findall(parts[0])]
        if len(parts) != 3 or not snippets or not parts[2]:
            raise ValueError(
                f"{location} must be snippets, each between <s> and </s>, then ||| question ||| "
                f"answer, got {line!r:.200}"
            )
        yield _question(location, parts[1], snippets, parts[2:])


def read_search_results(folder: Path, split: str, contexts: str) -> list[Question] | None:
    """Read SearchQA as a folder or a .zip of one JSON file for each question."""
    place = _file_of(folder, split, ("",)) or _file_of(folder, split, (".zip",))
    if place is None:
        return None
    files = _zipped(place) if place.suffix == ".zip" else _in_folder(place)
    return _kept(_search_results(files))


def _in_folder(folder: Path) -> Iterator[tuple[str, bytes]]:
    for file in sorted(folder.glob("*.json")):
        yield str(file), file.read_bytes()


def _zipped(file: Path) -> Iterator[tuple[str, bytes]]:
    with ZipFile(file) as archive:
        for name in sorted(archive.namelist()):
            # macOS adds files of its own.
            if name.endswith(".json") and "__MACOSX" not in name:
                yield f"{name} in {file}", archive.read(name)


def _search_results(files: Iterator[tuple[str, bytes]]) -> Iterator[Question | None]:
    for location, content in files:
        row = _parsed(location, content)
        results = cell_of(row, ("search_results",), location)
        if not isinstance(results, list) or not all(isinstance(one, dict) for one in results):
            raise ValueError(f"search_results of {location} must be objects, got {results!r:.200}")
        # Some results have no snippet.
        snippets = [snippet for one in results if (snippet := one.get("snippet"))]
        question, answer = (cell_of(row, (name,), location) for name in ("question", "answer"))
        yield _question(location, question, snippets, [answer])


def _parsed(location: str, content: bytes) -> dict[str, Any]:
    try:
        row = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{location} must be JSON, got {content!r:.200}: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{location} must be a JSON object, got {type(row).__name__}")
    return row


def read_quasar(folder: Path, split: str, contexts: str) -> list[Question] | None:
    """Read Quasar-T: JSON lines `questions/SPLIT_questions` and `contexts/short/SPLIT_contexts`.

    A line has a `uid`, and `question` and `answer`, or `contexts`: pairs of a score and a text.
    """
    questions = _file_of(folder / "questions", split, _JSON, "_questions")
    retrieved = _file_of(folder / "contexts" / contexts, split, _JSON, "_contexts")
    if questions is None or retrieved is None:
        return None
    by_uid = {cell_of(row, ("uid",), at): (at, row) for at, row in _rows(retrieved)}
    return _kept(_quasar(questions, by_uid))


def _quasar(
    file: Path, retrieved: Mapping[str, tuple[str, dict[str, Any]]]
) -> Iterator[Question | None]:
    for location, row in _rows(file):
        uid = cell_of(row, ("uid",), location)
        if uid not in retrieved:
            raise ValueError(f"{location} must have contexts, got none with the uid {uid!r}")
        place, of_question = retrieved[uid]
        pairs = cell_of(of_question, ("contexts",), place)
        if not isinstance(pairs, list) or not all(
            isinstance(pair, list) and len(pair) == 2 for pair in pairs
        ):
            raise ValueError(
                f"contexts of {place} must be pairs of a score and a text, got {pairs!r:.200}"
            )
        question, answer = (cell_of(row, (name,), location) for name in ("question", "answer"))
        yield _question(location, question, [text for _, text in pairs], [answer])


def read_own(folder: Path, split: str, contexts: str) -> list[Question] | None:
    """Read JSON lines (`SPLIT.jsonl`) with `question`, `contexts` and `answers`."""
    file = _file_of(folder, split, _JSON)
    return None if file is None else _kept(_own(file))


def _own(file: Path) -> Iterator[Question | None]:
    for location, row in _rows(file):
        question, *lists = (
            cell_of(row, (name,), location) for name in ("question", "contexts", "answers")
        )
        if not all(isinstance(values, list) for values in lists):
            raise ValueError(
                f"contexts and answers of {location} must be lists, got {lists!r:.200}"
            )
        yield _question(location, question, *lists)


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The location and the object of each line of a file, which may be compressed."""
    if file.suffix != ".gz":
        yield from read_json_lines(file)
        return
    with gzip.open(file) as lines:
        for number, line in enumerate(lines):
            location = f"line {number + 1} of {file}"
            yield location, _parsed(location, line)


LAYOUTS: Mapping[str, Layout] = {
    "searchqa": Layout(
        (read_snippet_lines, read_search_results),
        "https://github.com/nyu-dl/dl4ir-searchQA",
        "train.txt, val.txt and test.txt, or train, val and test with one JSON file for each "
        "question, as folders or .zip files",
    ),
    "quasar-t": Layout(
        (read_quasar,),
        "http://curtis.ml.cmu.edu/datasets/quasar (its folder quasar-t)",
        "questions/train_questions.json.gz, ..., contexts/short/train_contexts.json.gz, ... and "
        "contexts/long/..., compressed or not",
    ),
    "own": Layout(
        (read_own,),
        "where you have it",
        "train.jsonl, dev.jsonl and test.jsonl, whose lines have question, contexts and answers",
    ),
}
"""The data sets by name."""
