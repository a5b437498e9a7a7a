"""Sentence pairs, on tiny files in each of the formats; rankings compared with a loop."""

import csv
import json
import random
import re

import datasets
import numpy as np
import pytest
import torch

from tasks.stored import opening
from tasks.stored.pairs import Pairs, PairsConfig, score_ranking
from tests.tasks.batches import full_batch

ENTAILMENT = ("entailment", "neutral", "contradiction")
WORDS = ["A", "man", "is", "not", "sleeping", "while", "the", "dog's", "owner", "eats"]


def sentence(generator):
    return " ".join(generator.choices(WORDS, k=generator.randint(1, 9))) + "."


def rows_of(labels, n, seed):
    """Return rows of sentence A, sentence B and label."""
    generator = random.Random(seed)
    return [(sentence(generator), sentence(generator), labels[i % len(labels)]) for i in range(n)]


def write_json(path, rows):
    names = ("sentence1", "sentence2", "gold_label")
    lines = [json.dumps({"pairID": "7", **dict(zip(names, row, strict=True))}) for row in rows]
    path.write_text("\n".join(lines) + "\n")


def write_tabs(path, rows, header=None):
    lines = ["\t".join(map(str, row)) for row in ([header] if header else []) + rows]
    path.write_text("\n".join(lines) + "\n")


def write_array(path, rows):
    names = ("sentence1", "sentence2", "label")
    path.write_text(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=1))


def write_ubuntu(path, seed, is_train):
    """Write contexts with one right response, or with a label; return the pairs."""
    generator = random.Random(seed)
    pairs = []
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        if is_train:
            rows.writerow(["Context", "Utterance", "Label"])
        else:
            distractors = [f"Distractor_{i}" for i in range(9)]
            rows.writerow(["Context", "Ground Truth Utterance", *distractors])
        for i in range(4):
            context = f'{sentence(generator)} "{sentence(generator)}", he said'
            responses = [sentence(generator) for _ in range(1 if is_train else 10)]
            rows.writerow([context, *responses, *([str(float(i % 2))] if is_train else [])])
            right = i % 2 if is_train else 1
            pairs += [(context, text, right * (n == 0)) for n, text in enumerate(responses)]
    return pairs


def write_trec_qa(path, rows):
    lines = []
    for i, (question, answer, label) in enumerate(rows):
        if i == 0 or rows[i - 1][0] != question:
            lines += ["</QApairs>"] * (i > 0) + [f"<QApairs id='{i}.1'>", "<question>"]
            lines += ["\t".join(question.split()), "WP\tNN", "</question>"]
        kind = ("negative", "positive")[label]
        lines += [f"<{kind}>", "\t".join(answer.split()), "NN\t<num>", f"</{kind}>"]
    path.write_text("\n".join([*lines, "</QApairs>"]) + "\n")


WIKI = ["QuestionID", "Question", "DocumentID", "DocumentTitle", "SentenceID", "Sentence", "Label"]


def questions(n, seed):
    """Return rows of WikiQA: three answers to each question."""
    generator = random.Random(seed)
    rows = []
    for i in range(n):
        question = sentence(generator)
        for answer in range(3):
            label = generator.randint(0, 1)
            answer_text = sentence(generator)
            rows.append((f"Q{i}", question, "D1", "Title", f"D1-{answer}", answer_text, label))
    return rows


@pytest.fixture(autouse=True)
def no_network(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(opening, "_hub_responds", lambda: False)


@pytest.fixture
def write(tmp_path):
    """Write a data set in its authors' format; return its folder, and (A, B, label) by split."""

    def written(name):
        folder = tmp_path / name
        folder.mkdir()
        sizes = {"train": 30, "valid": 10, "test": 12}
        actual = {}
        for seed, (split, n) in enumerate(sizes.items()):
            other = {"train": "train", "valid": "dev", "test": "test"}[split]
            if name == "snli":
                rows = actual[split] = rows_of(ENTAILMENT, n, seed)
                write_json(folder / f"snli_1.0_{other}.jsonl", rows)
                (folder / f"snli_1.0_{other}.txt").write_text("the same once more")
            elif name == "mnli":
                rows = actual[split] = rows_of(ENTAILMENT, n, seed)
                other = {"valid": "dev_matched", "test": "dev_mismatched"}.get(split, other)
                write_json(folder / f"multinli_1.0_{other}.jsonl", rows)
            elif name == "scitail":
                rows = actual[split] = rows_of(("neutral", "entails"), n, seed)
                write_tabs(folder / f"scitail_1.0_{other}.tsv", rows)
            elif name == "dnli":
                rows = actual[split] = rows_of(("positive", "negative", "neutral"), n, seed)
                write_array(folder / f"dialogue_nli_{other}.jsonl", rows)
                (folder / "dialogue_nli_verified_test.jsonl").write_text("[]")
            elif name == "ubuntu":
                actual[split] = write_ubuntu(folder / f"{other}.csv", seed, split == "train")
            elif name == "trecqa":
                rows = actual[split] = [(r[1], r[5], r[6]) for r in questions(n, seed)]
                write_tabs(folder / f"{other}.tsv", rows)
            else:
                rows = questions(n, seed)
                actual[split] = [(r[1], r[5], r[6]) for r in rows]
                write_tabs(folder / f"WikiQA-{other}.tsv", rows, WIKI)
        return folder, actual

    return written


def task_of(folder, name, **changes):
    return Pairs(PairsConfig(name=name, path=str(folder), **{"min_count": 1} | changes))


def small_snli(folder):
    for seed, split in enumerate(("train", "dev", "test")):
        write_json(folder / f"snli_1.0_{split}.jsonl", rows_of(ENTAILMENT, 12, seed))
    return task_of(folder, "snli")


CONTRACT_EXAMPLES = {"snli": small_snli}


def words_of(text):
    """Return a sentence as lower-case words and punctuation."""
    for mark in '.",':
        text = text.replace(mark, f" {mark} ")
    return " ".join(text.lower().split())


NAMES = ("snli", "mnli", "scitail", "dnli", "trecqa", "wikiqa", "ubuntu")


@pytest.mark.parametrize("name", NAMES)
def test_every_pair_is_read_with_its_label(write, name):
    folder, rows = write(name)
    task = task_of(folder, name)
    for split in task.splits:
        batch = full_batch(task, split)
        assert sorted(batch.latents["row"].tolist()) == list(range(len(rows[split])))
        a, b = batch.inputs
        assert (a.dtype, b.dtype, batch.targets.dtype) == (torch.int64,) * 3
        for i, row in enumerate(batch.latents["row"].tolist()):
            first, second, label = rows[split][row]
            assert task.decode(a[i]) == words_of(first)
            assert task.decode(b[i]) == words_of(second)
            assert task.words(batch, i) == (words_of(first).split(), words_of(second).split())
            assert task.classes[batch.targets[i, 0]] == str(label)
            lengths = [len(words_of(text).split()) for text in (first, second)]
            assert [batch.latents[f"length_{side}"][i] for side in "ab"] == lengths
            for side, length in zip((a, b), lengths, strict=True):
                assert (side[i] != 0).tolist() == [at < length for at in range(side.shape[1])]
        assert torch.equal(batch.targets[:, 0], batch.latents["label"])
        assert batch.mask.all()
        counts = np.unique([label for *_, label in rows[split]], return_counts=True)[1]
        assert task.chance(split) == pytest.approx(counts.max() / counts.sum())
        assert torch.equal(task.batch(split, 1, 5).inputs[0], task.batch(split, 1, 5).inputs[0])


@pytest.mark.parametrize("name", ["trecqa", "wikiqa"])
def test_answers_to_one_question_belong_together(write, name):
    folder, rows = write(name)
    task = task_of(folder, name)
    batch = task.batch("test", 0, task.size("test"))
    groups = {}
    for row, question in zip(
        *(batch.latents[x].tolist() for x in ("row", "question")), strict=True
    ):
        groups.setdefault(question, set()).add(row)
    assert set(groups) == set(range(len(groups)))
    asked = {}
    for row, (question, *_) in enumerate(rows["test"]):
        # TrecQA has nothing but the question itself to go by.
        asked.setdefault(question if name == "trecqa" else row // 3, set()).add(row)
    assert sorted(map(sorted, groups.values())) == sorted(map(sorted, asked.values()))


def test_trec_qa_as_published(tmp_path):
    rows = {
        split: [(r[1], r[5], r[6]) for r in questions(6, seed)]
        for seed, split in enumerate(("train", "dev", "test"))
    }
    for split, of_split in rows.items():
        write_trec_qa(tmp_path / f"{split}-less-than-40.manual-edit.xml", of_split)
    task = task_of(tmp_path, "trecqa")
    batch, asked_of = full_batch(task, "test"), {}
    for a, b, label, row, question in zip(
        *batch.inputs,
        batch.targets[:, 0].tolist(),
        *(batch.latents[name].tolist() for name in ("row", "question")),
        strict=True,
    ):
        asked, answer, right = rows["test"][row]
        assert (task.decode(a), task.decode(b)) == (words_of(asked), words_of(answer))
        assert label == right
        asked_of.setdefault(question, set()).add(row // 3)
    assert sorted(map(sorted, asked_of.values())) == [[number] for number in range(6)]


def test_ubuntu_as_a_label_with_turns(tmp_path):
    for split in ("train", "dev", "test"):
        lines = ["1\thi\twhat is it ?\ta kernel", "0\thi\twhat is it ?\tno", "0\thi\tbye now\tno"]
        (tmp_path / f"{split}.txt").write_text("\n".join(lines) + "\n")
    task = task_of(tmp_path, "ubuntu")
    batch = full_batch(task, "valid")[full_batch(task, "valid").latents["row"].argsort()]
    assert [task.decode(a) for a in batch.inputs[0]] == ["hi what is it ?"] * 2 + ["hi bye now"]
    assert [task.decode(b) for b in batch.inputs[1]] == ["a kernel", "no", "no"]
    assert batch.targets[:, 0].tolist() == [1, 0, 0]
    assert batch.latents["question"].tolist() == [0, 0, 1]


OWN = {"columns": ("text", "claim", "truth", "topic"), "labels": ("no", "yes")}


@pytest.mark.parametrize("suffix", [".jsonl", ".tsv", ".csv", "without a header"])
def test_own_columns_and_labels(tmp_path, suffix):
    rows = [("a b", 'c, "d"', "yes", "t1"), ("a", "b", "no", "t2"), ("c", "b", "no", "t1")]
    for split in ("train", "dev", "test"):
        if suffix == ".jsonl":
            lines = [json.dumps(dict(zip(OWN["columns"], row, strict=True))) for row in rows]
            (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
        elif suffix == ".csv":
            with (tmp_path / f"{split}.csv").open("w", newline="") as file:
                csv.writer(file).writerows([OWN["columns"], *rows])
        else:
            header = OWN["columns"] if suffix == ".tsv" else None
            write_tabs(tmp_path / f"{split}.tsv", rows, header)
    task = task_of(tmp_path, "own", **OWN)
    batch = full_batch(task, "test")[full_batch(task, "test").latents["row"].argsort()]
    assert [task.decode(b) for b in batch.inputs[1]] == ['c , " d "', "b", "b"]
    assert task.classes == ("no", "yes")
    assert batch.targets[:, 0].tolist() == [1, 0, 0]
    assert batch.latents["question"].tolist() == [0, 1, 0]


def test_other_labels_of_a_known_data_set(tmp_path):
    for split in ("train", "dev", "test"):
        write_tabs(tmp_path / f"{split}.tsv", [("a", "b", "yes"), ("a", "c", "no")])
    task = task_of(tmp_path, "scitail", labels=("yes", "no"))
    assert task.classes == ("yes", "no")


def test_pairs_without_a_label_are_left_out(write):
    folder, rows = write("snli")
    train = [(a, b, "-" if i % 3 == 0 else label) for i, (a, b, label) in enumerate(rows["train"])]
    write_json(folder / "snli_1.0_train.jsonl", train)
    batch = task_of(folder, "snli").batch("train", 0, 20)
    assert sorted(batch.latents["row"].tolist()) == [i for i in range(30) if i % 3]
    assert "question" not in batch.latents


def test_the_vocabulary_is_of_train_by_frequency(tmp_path):
    """Compared with counts by hand."""
    for split in ("train", "dev", "test"):
        text = "a a a b b c, d" if split == "train" else "a zebra b"
        write_tabs(tmp_path / f"{split}.tsv", [(text, "b c", "neutral")])
    task = task_of(tmp_path, "scitail")
    assert task.vocabulary == ("<pad>", "<unknown>", "a", "b", "c", ",", "d")
    assert task.batch("test", 0, 1).inputs[0].tolist() == [[2, 1, 3]]
    few = task_of(tmp_path, "scitail", min_count=2)
    assert few.vocabulary == ("<pad>", "<unknown>", "a", "b", "c")
    assert task_of(tmp_path, "scitail", vocabulary_size=3).vocabulary == few.vocabulary[:3]
    short = task_of(tmp_path, "scitail", max_length=2).batch("train", 0, 1)
    assert short.inputs[0].tolist() == [[2, 2]]
    assert short.latents["length_a"].tolist() == [2]


@pytest.mark.parametrize("form", ["save_to_disk", "parquet"])
def test_hugging_faces_copy(tmp_path, form):
    """Labels are integers, -1 for none, and columns have other names."""
    features = datasets.Features(
        premise=datasets.Value("string"),
        hypothesis=datasets.Value("string"),
        label=datasets.ClassLabel(names=list(ENTAILMENT)),
    )
    columns = {
        "premise": ["One.", "Two", "Three"],
        "hypothesis": ["x", "y", "z"],
        "label": [2, -1, 0],
    }
    table = datasets.Dataset.from_dict(columns, features)
    made = datasets.DatasetDict(train=table, validation=table, test=table)
    folder = tmp_path / "snli"
    if form == "save_to_disk":
        made.save_to_disk(folder)
    else:
        folder.mkdir()
        for split, table in made.items():
            table.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    task = task_of(folder, "snli")
    batch = task.batch("valid", 0, 2)
    actual = {
        (task.decode(a), task.decode(b), task.classes[label])
        for a, b, label in zip(*batch.inputs, batch.targets[:, 0], strict=True)
    }
    assert actual == {("one .", "x", "contradiction"), ("three", "z", "entailment")}
    assert set(batch.latents["row"].tolist()) == {0, 2}


def test_a_bad_row_of_hugging_faces_copy_is_named(tmp_path):
    good = {"premise": ["a"] * 3, "hypothesis": ["b"] * 3, "label": ["neutral"] * 3}
    bad = good | {"label": ["neutral", "neutral", "maybe"]}
    train, valid = (datasets.Dataset.from_dict(columns) for columns in (good, bad))
    folder = tmp_path / "snli"
    datasets.DatasetDict(train=train, validation=valid, test=train).save_to_disk(folder)
    with pytest.raises(
        ValueError, match=r"^the label of row 2 of validation must be .*, got 'maybe'"
    ):
        task_of(folder, "snli").batch("train", 0, 1)


def test_prefixes_of_valid_and_test_are_balanced(write):
    folder, _ = write("snli")
    label = task_of(folder, "snli").batch("test", 0, 12).latents["label"]
    for n in range(1, 13):
        assert ((label[:n].bincount(minlength=3) - n / 3).abs() <= 1).all()


@pytest.mark.parametrize("name", ["trecqa", "wikiqa", "ubuntu"])
def test_answers_to_one_question_follow_one_another(write, name):
    folder, _ = write(name)
    task = task_of(folder, name)
    for split in ("valid", "test"):
        question = task.batch(split, 0, task.size(split)).latents["question"]
        turns = question.unique_consecutive().tolist()
        assert len(turns) == len(set(turns)) > 1
    # In random order.
    orders = [
        task_of(folder, name, seed=seed).batch("test", 0, 12).latents["row"].tolist()
        for seed in range(4)
    ]
    assert any(order != orders[0] for order in orders)


def test_score(write):
    folder, _ = write("snli")
    task = task_of(folder, "snli")
    batch = task.batch("test", 0, 12)
    logits = torch.nn.functional.one_hot(batch.targets, 3).double()
    logits[:4] *= -1
    assert task.score(logits, batch)["correct"].tolist() == [0] * 4 + [1] * 8
    with pytest.raises(ValueError, match=r"logits must have shape \(12, 1, 3\), got \(12, 1, 2\)"):
        task.score(logits[..., :2], batch)


# Rankings


def ranked(scores, relevant, question):
    """Return average precision and reciprocal rank of each question, by loops."""
    actual = []
    for q_id in sorted(set(question)):
        answers = [(s, r) for s, r, q in zip(scores, relevant, question, strict=True) if q == q_id]
        answers.sort(key=lambda pair: (-pair[0], pair[1]))
        precisions, first, hits = [], None, 0
        for place, (_, right) in enumerate(answers, start=1):
            if right:
                hits += 1
                precisions.append(hits / place)
                first = first or 1 / place
        if precisions:
            actual.append((sum(precisions) / len(precisions), first))
    return tuple(np.array(actual).T)


def recall(scores, relevant, question, k):
    """Return the share of right answers among the first k of each question, by loops."""
    actual = []
    for q_id in sorted(set(question)):
        answers = [(s, r) for s, r, q in zip(scores, relevant, question, strict=True) if q == q_id]
        answers.sort(key=lambda pair: (-pair[0], pair[1]))
        right = [bool(r) for _, r in answers]
        if any(right):
            actual.append(sum(right[:k]) / sum(right))
    return actual


@pytest.mark.parametrize("seed", range(20))
def test_rankings_agree_with_a_loop(seed):
    generator = np.random.default_rng(seed)
    n = 60
    scores = generator.integers(0, 6, n) / 3  # with equal ones
    relevant, question = generator.random(n) < 0.25, generator.integers(-3, 9, n)
    actual = score_ranking(*map(torch.from_numpy, (scores, relevant, question)))
    precision, reciprocal = ranked(scores.tolist(), relevant.tolist(), question.tolist())
    np.testing.assert_allclose(actual["average_precision"], precision)
    np.testing.assert_allclose(actual["reciprocal_rank"], reciprocal)
    for k in (1, 2, 5):
        expected = recall(scores.tolist(), relevant.tolist(), question.tolist(), k)
        np.testing.assert_allclose(actual[f"recall_at_{k}"], expected)


def test_rankings_by_hand():
    # Right, wrong, right: (1 + 2/3) / 2. Wrong, right: 1/2. No right answer: left out.
    scores = torch.tensor([3.0, 2.0, 1.0, 0.1, 0.9, 5.0])
    relevant = torch.tensor([1, 0, 1, 1, 0, 0])
    actual = score_ranking(scores, relevant, torch.tensor([4, 4, 4, 7, 7, 9]))
    assert actual["average_precision"].tolist() == pytest.approx([5 / 6, 1 / 2])
    assert actual["reciprocal_rank"].tolist() == [1, 1 / 2]
    # Saying the same of all answers puts the right ones last.
    same = score_ranking(torch.zeros(4), torch.tensor([1, 0, 0, 0]), torch.zeros(4).long())
    assert same["reciprocal_rank"].tolist() == [1 / 4]


def test_bad_rankings_are_errors():
    with pytest.raises(ValueError, match=r"relevant must be True for some answer"):
        score_ranking(torch.zeros(2), torch.zeros(2), torch.zeros(2).long())
    with pytest.raises(
        ValueError, match=r"must be vectors .* got shapes \[\(2,\), \(3,\), \(2,\)\]"
    ):
        score_ranking(torch.zeros(2), torch.ones(3), torch.zeros(2).long())


# Missing data


def error_of(kind, **arguments):
    with pytest.raises(kind) as caught:
        Pairs(PairsConfig(**arguments)).batch("train", 0, 1)
    return str(caught.value)


def test_a_missing_data_set_says_what_to_fetch(tmp_path):
    missing = str(tmp_path / "nowhere")
    message = error_of(FileNotFoundError, name="mnli", path=missing)
    assert f"with mnli, got {missing!r}. Fetch it from https://cims.nyu.edu" in message
    assert "one of test with 'dev_mismatched' in its name" in message
    assert f"datasets.load_dataset('nyu-mll/multi_nli').save_to_disk({missing!r})" in message
    (tmp_path / "empty").mkdir()
    message = error_of(FileNotFoundError, name="trecqa", path=str(tmp_path / "empty"))
    assert "as lines of question, answer and label, 0 or 1, between tabs (.tsv)" in message
    assert "put there its .xml or .tsv files: one of train with 'train' in its name" in message
    assert "load_dataset" not in message
    message = error_of(FileNotFoundError, name="wikiqa")
    assert "datasets.load_dataset('microsoft/wiki_qa').save_to_disk('FOLDER')" in message


def test_files_of_another_format_are_errors(write, tmp_path):
    folder, rows = write("scitail")
    arguments = {"name": "scitail", "path": str(folder)}
    train = folder / "scitail_1.0_train.tsv"
    write_tabs(train, [("a", "b", "maybe")])
    message = error_of(ValueError, **arguments)
    assert f"the label of line 1 of {train} must be one of entails, neutral, got 'maybe'" in message
    write_tabs(train, [("a", "b", "neutral"), ("a", "b")])
    assert f"line 2 of {train} must have 3 columns" in error_of(ValueError, **arguments)
    write_tabs(train, [("a", "b", "-")])
    assert "must have labelled examples in train, got none" in error_of(ValueError, **arguments)
    write_tabs(folder / "train_too.tsv", rows["train"])
    assert "in its name, got 2" in error_of(ValueError, **arguments)

    folder, rows = write("snli")
    train = folder / "snli_1.0_train.jsonl"
    for text, message in {
        '{"sentence1": "a"': "must be JSON, got",
        "1": "must be a JSON object, got int",
        '{"sentence1": "a", "gold_label": "neutral"}': "a column sentence2 or hypothesis, got",
        '{"sentence1": "a", "sentence2": "b", "gold_label": 3}': ", contradiction, got 3",
    }.items():
        train.write_text(text + "\n")
        actual = error_of(ValueError, name="snli", path=str(folder))
        assert f"line 1 of {train} must" in actual
        assert message in actual
    train.write_text("[1]")
    message = error_of(ValueError, name="snli", path=str(folder))
    assert f"item 0 of {train} must be a JSON object, got int" in message
    train.write_text("[{")
    assert f"{train} must be a JSON array" in error_of(ValueError, name="snli", path=str(folder))
    train.write_bytes(b"\xff")
    assert f"{train} must be UTF-8" in error_of(ValueError, name="snli", path=str(folder))


@pytest.mark.parametrize(
    ("name", "file", "text", "message"),
    [
        (
            "trecqa",
            "train.xml",
            "<QApairs id='1'>\n<positive>\nyes\n",
            "line 3 of .* must come after",
        ),
        ("trecqa", "train.xml", "<question>\nwho\n", "train.xml must have questions"),
        ("ubuntu", "train.csv", "Context,Utterance,Label\nhi,yes\n", "must have 3 cells"),
        ("ubuntu", "train.csv", "Context,Label\nhi,1\n", "must have a column Utterance, got"),
        (
            "ubuntu",
            "train.csv",
            "Context,Utterance,Label\nhi,yes,2\n",
            "must be one of 0, 1, got '2'",
        ),
        ("ubuntu", "train.txt", "1\thi\n", "must have a label, turns and a response"),
        ("dnli", "dialogue_nli_train.jsonl", "[]", "must have labelled examples in train"),
    ],
)
def test_published_files_with_errors(write, name, file, text, message):
    folder, _ = write(name)
    for other in folder.glob("*.tsv"):
        other.unlink()
    for split in ("train", "dev", "test"):
        path = folder / file.replace("train", split)
        if not path.exists() or split == "train":
            path.write_text(text)
    for other in folder.iterdir():
        if other.suffix != path.suffix:
            other.unlink()
    assert re.search(message, error_of(ValueError, name=name, path=str(folder)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "snil"}, r"name must be one of snli, .*, got 'snil'; nearest: 'snli'"),
        ({"name": "snli", "path": ""}, r"path must be None or a path, got ''"),
        (
            {"name": "own", "path": "x", "labels": ("a", "b")},
            "columns must be given with name='own'",
        ),
        ({"name": "snli", "columns": ("a", "b")}, "columns must be 3 to 4 different names, got"),
        ({"name": "trecqa"}, r"path must be a folder for name='trecqa', got None"),
        ({"name": "snli", "min_count": 0}, r"min_count must be .*, got 0"),
        ({"name": "snli", "vocabulary_size": 2}, r"vocabulary_size must be .*, got 2"),
        ({"name": "snli", "max_length": 0}, r"max_length must be .*, got 0"),
        ({"name": "snli", "seed": -1}, r"seed must be .*, got -1"),
    ],
)
def test_a_bad_config_says_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        PairsConfig(**arguments)
