"""Small data sets in the formats of published ones, which examples read from the current folder."""

import json
from pathlib import Path

FILES = {"train": "train", "valid": "dev", "test": "test"}


def write(folder, rows, name="{}.jsonl"):
    """Write rows as JSON lines, the same for each split, to files with this pattern of names."""
    Path(folder).mkdir()
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    for split in FILES.values():
        Path(folder, name.format(split)).write_text(text, encoding="utf-8")


def of_pairs():
    """SNLI, with a pair without label."""
    labels = {"Somebody sleeps.": "entailment", "He dreams.": "neutral", "He runs.": "-"}
    labels |= {"Nobody sleeps.": "contradiction"}
    names = ("sentence1", "sentence2", "gold_label")
    rows = [dict(zip(names, ("A man sleeps.", *row), strict=True)) for row in labels.items()]
    write("snli_1.0", 2 * rows, "snli_1.0_{}.jsonl")
    return {}


def of_texts():
    """Reviews, some good, some bad."""
    rows = [("A good film.", "good"), ("A bad film.", "bad"), ("Not bad!", "good")]
    write("reviews", 2 * [dict(zip(("text", "label"), row, strict=True)) for row in rows])
    return {}


def of_questions():
    """A question with two contexts, of which the second has the answer."""
    contexts = ["Hamlet is a play.", "William Shakespeare wrote Hamlet."]
    question = {"question": "Who wrote Hamlet?", "answers": ["William Shakespeare"]}
    write("trivia", [question | {"contexts": contexts}])
    return {}


def of_programs():
    """AlgoLisp: the sum of the elements of an array."""
    problem = {"text": "add up the elements of a", "short_tree": ["reduce", "a", "0", "+"]}
    tests = [{"input": {"a": [1, 2, 3]}, "output": 6}, {"input": {"a": []}, "output": 0}]
    write("algolisp", [problem | {"args": {"a": "int[]"}, "tests": tests}], "metaset3.{}.jsonl")
    return {}
