"""Problems of AlgoLisp: a program with tests, and the reader of published ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.algolisp.interpreter import Definition, ProgramError, Tree, read_program, run_program
from tasks.stored.labelled_files import describe_files, split_files
from tasks.stored.published import read_json_lines
from tasks.stored.sequences import SPLIT_FILES


@dataclass(frozen=True, kw_only=True)
class AlgoLispProblem:
    """A program, and tests that another program must pass to solve the same problem.

    Attributes:
        tree: the program.
        tests: pairs of arguments by name and the right value.
        functions: functions that programs may call.

    Example:
        >>> problem = AlgoLispProblem(tree=("+", "a", "1"), tests=[({"a": 2}, 3)])
        >>> problem.is_solved_by("+ 1 a"), problem.n_passed(("+", "a", "a"))
        (True, 0)
    """

    tree: Tree
    tests: Sequence[tuple[Mapping[str, Any], Any]]
    functions: Sequence[Definition] = ()

    def n_passed(self, tree: Tree) -> int:
        """Return the number of tests that a program passes; one that fails passes none of them."""
        return sum(self._passes(tree, *test) for test in self.tests)

    def is_solved_by(self, text: str) -> bool:
        """Return whether a text is a program that passes all tests."""
        try:
            tree = read_program(text)
        except ProgramError:
            return False
        return all(self._passes(tree, *test) for test in self.tests)

    def _passes(self, tree: Tree, arguments: Mapping[str, Any], expected: Any) -> bool:
        try:
            return run_program(tree, arguments, functions=self.functions) == expected
        except ProgramError:
            return False


def read_problems(path: str) -> dict[str, list[AlgoLispProblem]]:
    """Read the problems of AlgoLisp's published files, by split.

    A line is a JSON object with `short_tree`, the program; `args`, the types of its arguments by
    name (or pairs of both); `tests`, objects with `input` and `output`; and perhaps `funcs`,
    functions with `name`, `args` and `short_tree`. `text` and `return_type` are not read here. The
    number of a problem in its list is the latent `row` of `tasks.Sequences`.

    Args:
        path: a folder with a .jsonl file for each of train, dev and test.

    Raises:
        FileNotFoundError: the files are missing.
        ValueError: a line has another format.

    Example:
        >>> problem = read_problems("algolisp")["test"][0]
        >>> problem.is_solved_by("reduce a 0 +"), problem.is_solved_by("len a")
        (True, False)
    """
    folder = Path(path).expanduser()
    files = split_files(folder, ".jsonl", SPLIT_FILES) if folder.is_dir() else {}
    if not files:
        raise FileNotFoundError(
            "path must be a folder with the .jsonl files of AlgoLisp (metaset3.train.jsonl, "
            f".dev.jsonl and .test.jsonl), got {path!r}: put there "
            f"{describe_files('.jsonl', SPLIT_FILES)}"
        )
    return {
        split: [_problem(location, row) for location, row in read_json_lines(file)]
        for split, file in files.items()
    }


def _problem(location: str, row: Mapping[str, Any]) -> AlgoLispProblem:
    try:
        names = _names(row["args"])
        return AlgoLispProblem(
            tree=row["short_tree"],
            tests=[
                ({name: test["input"][name] for name in names}, test["output"])
                for test in row["tests"]
            ],
            functions=[
                Definition(
                    name=function["name"],
                    arguments=_names(function["args"]),
                    tree=function["short_tree"],
                )
                for function in row.get("funcs") or ()
            ],
        )
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{location} must have short_tree, args, and tests with input and output, got the "
            f"fields {', '.join(row)}: {error!r}"
        ) from error


def _names(arguments: Any) -> tuple[str, ...]:
    """The names of arguments, given as an object or as pairs of name and type."""
    if isinstance(arguments, Mapping):
        return tuple(arguments)
    return tuple(name for name, _ in arguments)
