"""Problems of AlgoLisp, and files in the published format."""

import json

import pytest

from tasks.algolisp.interpreter import Definition, read_program
from tasks.algolisp.problems import AlgoLispProblem, read_problems
from tasks.stored.sequences import Sequences, SequencesConfig

SUM = {
    "text": ["you", "are", "given", "an", "array", "a", ".", "find", "its", "sum"],
    "short_tree": ["reduce", "a", "0", "+"],
    "args": {"a": "int[]"},
    "return_type": "int",
    "nodes": ["l1_base"],
    "tags": [],
    "tests": [
        {"input": {"a": [1, 2, 3]}, "output": 6},
        {"input": {"a": []}, "output": 0},
        {"input": {"a": [-4]}, "output": -4},
    ],
}
LARGEST = {
    "text": ["the", "best", "of", "a", "and", "b"],
    "short_tree": ["best", "a", "b"],
    "args": [["a", "int"], ["b", "int"]],
    "return_type": "int",
    "funcs": [
        {
            "name": "best",
            "args": [["x", "int"], ["y", "int"]],
            "return_type": "int",
            "short_tree": ["max", "x", "y"],
        }
    ],
    "tests": [{"input": {"a": 1, "b": 2}, "output": 2}, {"input": {"a": 5, "b": 2}, "output": 5}],
}


def write_problems(folder, n=1, **changes):
    """Write files in the published format, with the problems of each split `n` times."""
    for name, rows in {"train": [SUM, LARGEST], "dev": [LARGEST, SUM], "test": [SUM]}.items():
        lines = [json.dumps(row | changes) for row in rows * n]
        (folder / f"metaset3.{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_published_problems_are_read_with_their_tests_and_functions(tmp_path):
    problems = read_problems(str(write_problems(tmp_path)))
    assert {split: len(some) for split, some in problems.items()} == {
        "train": 2,
        "valid": 2,
        "test": 1,
    }
    summed, largest = problems["train"]
    assert summed.tree == ["reduce", "a", "0", "+"]
    assert summed.tests == [({"a": [1, 2, 3]}, 6), ({"a": []}, 0), ({"a": [-4]}, -4)]
    expected = Definition(name="best", arguments=("x", "y"), tree=["max", "x", "y"])
    assert list(largest.functions) == [expected]
    # Each program solves its problem, and only that.
    assert summed.is_solved_by("reduce a 0 +")
    assert largest.is_solved_by("best a b")
    assert not largest.is_solved_by("reduce a 0 +")


def test_rows_of_sequences_are_the_numbers_of_problems(tmp_path):
    path = str(write_problems(tmp_path))
    config = SequencesConfig(path=path, source="text", target="short_tree", vocabulary_size=300)
    task, problems = Sequences(config), read_problems(path)
    for split in ("train", "valid"):
        batch = task.batch(split, 0, 2)
        for ids, row in zip(batch.targets, batch.latents["row"].tolist(), strict=True):
            assert problems[split][row].is_solved_by(task.decode(ids))
            assert not problems[split][1 - row].is_solved_by(task.decode(ids))


@pytest.mark.parametrize(
    ("text", "n_passed", "solves"),
    [
        ("reduce a 0 +", 3, True),
        ("+ 0 ( reduce ( sort a ) 0 + )", 3, True),  # other programs count too
        ("reduce a 1000000000 min", 1, False),
        ("reduce ( filter a ( partial0 0 < ) ) 0 +", 2, False),
        ("head a", 1, False),
        ("reduce a 0", 0, False),
    ],
)
def test_a_program_must_pass_all_tests(text, n_passed, solves):
    tests = [({"a": [1, 2, 3]}, 6), ({"a": []}, 0), ({"a": [-4]}, -4)]
    problem = AlgoLispProblem(tree="a", tests=tests)
    assert problem.is_solved_by(text) is solves
    assert problem.n_passed(read_program(text)) == n_passed


def test_a_text_that_is_no_program_solves_nothing():
    problem = AlgoLispProblem(tree="a", tests=[({"a": 1}, 1)])
    assert problem.is_solved_by("a")
    assert not problem.is_solved_by("( a")
    assert not problem.is_solved_by("")


def test_missing_files_and_other_formats_are_errors(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=r"metaset3\.train\.jsonl.*got"):
            read_problems(str(path))
    write_problems(tmp_path, tests=[{"input": {"b": 1}, "output": 2}])
    with pytest.raises(ValueError, match=r"line 1 of .*train.jsonl must have short_tree, args"):
        read_problems(str(tmp_path))
