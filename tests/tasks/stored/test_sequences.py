"""Sequence to sequence, on tiny files of both formats."""

import json
import random

import pytest
import torch

from tasks.stored.sequences import Sequences, SequencesConfig

WORDS = ["sum", "the", "of", "numbers", "áéí", "狐", "longest", "given,", "array\u2028", "b"]
SIZES = {"train": 40, "valid": 9, "test": 11}


def line(generator, most):
    return " ".join(generator.choices(WORDS, k=generator.randint(1, most)))


def pairs(split):
    generator = random.Random(split)
    return [(line(generator, 6), line(generator, 9)) for _ in range(SIZES[split])]


@pytest.fixture
def parallel(tmp_path):
    return write_parallel(tmp_path)


def write_parallel(tmp_path):
    """Write files in the format of IWSLT'15 and return their folder."""
    for split, name in {"train": "train", "valid": "tst2012", "test": "tst2013"}.items():
        for side, texts in zip(("en", "vi"), zip(*pairs(split), strict=True), strict=True):
            (tmp_path / f"{name}.{side}").write_text("\n".join(texts) + "\n")
    (tmp_path / "dict.en-vi").write_text("the same as vocab")
    return tmp_path


TREES = [
    (["reduce", ["filter", "a", "even"], "0", "+"], "reduce ( filter a even ) 0 +"),
    (["len", [["x"], "y"]], "len ( ( x ) y )"),
    (["a", 3], "a 3"),
]


@pytest.fixture
def programs(tmp_path):
    """Files in the format of AlgoLisp."""
    for name in ("train", "dev", "test"):
        rows = [
            {"text": ["given", "an", "array"], "short_tree": tree, "args": {}} for tree, _ in TREES
        ]
        text = "\n".join(json.dumps(row) for row in rows) + "\n"
        (tmp_path / f"metaset3.{name}.jsonl").write_text(text)
    return tmp_path


def translation(path, **changes):
    arguments = {"source": "en", "target": "vi", "vocabulary_size": 300} | changes
    return Sequences(SequencesConfig(path=str(path), **arguments))


CONTRACT_EXAMPLES = {"iwslt15": lambda folder: translation(write_parallel(folder))}


def lisp(path, **changes):
    arguments = {"source": "text", "target": "short_tree"} | changes
    return Sequences(SequencesConfig(path=str(path), **arguments))


@pytest.mark.parametrize("split", Sequences.SPLITS)
def test_lines_are_read_side_by_side(parallel, split):
    task = translation(parallel)
    expected = pairs(split)
    assert task.size(split) == len(expected)
    batch = task.batch(split, 0, len(expected))
    source, given = batch.inputs
    assert sorted(batch.latents["row"].tolist()) == list(range(len(expected)))
    assert (source.dtype, given.dtype, batch.targets.dtype) == (torch.int64,) * 3
    assert max(int(ids.max()) for ids in (source, batch.targets)) < task.vocabulary_size <= 300
    for i, row in enumerate(batch.latents["row"].tolist()):
        assert (task.decode(source[i]), task.decode(batch.targets[i])) == expected[row]
        read, written = (int(batch.latents[f"{x}_length"][i]) for x in ("source", "target"))
        assert (source[i] > 2).tolist() == [at < read for at in range(source.shape[1])]
        width = batch.targets.shape[1]
        assert batch.mask[i].tolist() == [at <= written for at in range(width)]
        # What comes before each target, from the mark 1 on; at the end the mark 2.
        assert given[i, 0] == 1
        assert torch.equal(given[i, 1 : written + 1], batch.targets[i, :written])
        assert batch.targets[i, written] == 2
        assert not given[i, written + 1 :].any()
        assert not batch.targets[i, written + 1 :].any()
    assert batch.mask[:, -1].any()
    assert (source[:, -1] > 0).any()
    assert torch.equal(
        task.batch(split, 3, 4).targets, translation(parallel).batch(split, 3, 4).targets
    )


def test_words_are_the_tokens_of_both_sides(parallel):
    task = translation(parallel)
    batch = task.batch("test", 0, 11)
    for i in range(11):
        target, source = task.words(batch, i)
        assert (len(target), len(source)) == (batch.targets.shape[1], batch.inputs[0].shape[1])
        end = target.index("<eos>")
        assert end == batch.latents["target_length"][i]
        assert not any(target[end + 1 :])
        for words, ids in ((target[:end], batch.targets[i]), (source, batch.inputs[0][i])):
            # Some tokens are parts of a letter.
            if not any("\ufffd" in word for word in words):
                assert "".join(words) == task.decode(ids)


def test_both_sides_change_places(parallel):
    there, back = translation(parallel), translation(parallel, source="vi", target="en")
    first, second = (task.batch("test", 0, 11) for task in (there, back))
    texts = [there.decode(row) for row in first.inputs[0]]
    assert sorted(texts) == sorted(back.decode(row) for row in second.targets)


def test_programs_are_written_with_parentheses(programs):
    task = lisp(programs)
    batch = task.batch("test", 0, 3)
    for i, row in enumerate(batch.latents["row"].tolist()):
        assert task.decode(batch.inputs[0][i]) == "given an array"
        assert task.decode(batch.targets[i]) == TREES[row][1]


def test_long_examples_are_left_out(parallel):
    whole = translation(parallel)
    batch = whole.batch("valid", 0, 9)
    longest = torch.maximum(batch.latents["source_length"], batch.latents["target_length"])
    limit = int(longest.median())
    task = translation(parallel, max_length=limit)
    kept = set(batch.latents["row"][longest < limit].tolist())
    assert 0 < len(kept) < 9
    actual = task.batch("valid", 0, task.size("valid"))
    assert set(actual.latents["row"].tolist()) == kept
    assert (task.n_left_out("valid"), whole.n_left_out("valid")) == (9 - len(kept), 0)
    assert actual.targets.shape[1] <= limit
    shortest = int(longest.min())
    message = rf"max_length must be at least {shortest + 1}, .* of valid, got {shortest}"
    with pytest.raises(ValueError, match=message):
        translation(parallel, max_length=shortest).batch("valid", 0, 1)


def test_score(parallel):
    task = translation(parallel)
    batch = task.batch("test", 0, 11)
    answers = batch.targets.clone()
    answers[~batch.mask] = 7
    assert (task.score(answers, batch)["correct"] == 1).all()
    answers[0, 0] += 1
    scores = task.score(answers, batch)
    assert scores["correct"].tolist() == [0] + [1] * 10
    n = int(batch.latents["target_length"][0]) + 1
    assert scores["token_correct"][0] == pytest.approx(1 - 1 / n)


def test_a_missing_data_set_says_what_to_fetch(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError) as caught:
            translation(path).batch("train", 0, 1)
        message = str(caught.value)
        assert ".jsonl files or files that end with .en and .vi" in message
        assert "https://nlp.stanford.edu/projects/nmt" in message
        assert "metaset3.train.jsonl" in message
        assert "one of valid with 'dev' or 'valid' or 'validation' or 'tst2012'" in message


def test_files_of_another_format_are_errors(parallel, programs):
    file = programs / "metaset3.dev.jsonl"
    file.write_text('{"text": "a"}\n')
    with pytest.raises(
        ValueError, match=r"line 1 of .*dev.jsonl must have the field 'short_tree', got .* text"
    ):
        lisp(programs).batch("train", 0, 1)
    for file in parallel.glob("*.jsonl"):
        file.unlink()
    with (parallel / "tst2012.vi").open("a") as lines:
        lines.write("one more\n")
    with pytest.raises(ValueError, match=r"tst2012.en and .*tst2012.vi must have .* got 9 and 10"):
        translation(parallel).batch("train", 0, 1)
    (parallel / "tst2013.en").unlink()
    with pytest.raises(ValueError, match=r"one file for test, with 'test' or 'tst2013' .* got 0"):
        translation(parallel).batch("train", 0, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": ""}, r"source must be a non-empty string, got ''"),
        ({"target": "en"}, r"target must differ from source, got 'en'"),
        ({"vocabulary_size": 258}, r"vocabulary_size must be .*, got 258"),
        ({"max_length": 0}, r"max_length must be .*, got 0"),
        ({"seed": -1}, r"seed must be .*, got -1"),
    ],
)
def test_a_bad_config_says_what_is_allowed(changes, message):
    with pytest.raises(ValueError, match=message):
        translation("x", **changes)
