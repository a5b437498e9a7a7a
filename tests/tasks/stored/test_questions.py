"""SearchQA and Quasar-T, from small files in their layouts."""

import gzip
import json
from zipfile import ZipFile

import pytest
import torch

from tasks.stored.questions import Questions, QuestionsConfig
from tasks.stored.words import PAD

FACTS = [
    ("Which city has the tower?", ["Rome is old.", "The Eiffel Tower of Paris!"], "Paris"),
    ("Who wrote it?", ["It was Jane Austen's work.", "jane AUSTEN wrote it"], "Jane Austen"),
    ("How many?", ["There are 3,000 of them."], "3,000"),
    ("What colour?", ["No answer here"], "blue"),
]
"""Question, contexts, answer; the last one has no span."""


def write_search_lines(folder):
    for split in ("train", "val", "test"):
        lines = [
            " ".join(f"<s> {context} </s>" for context in contexts)
            + f" ||| {question} ||| {answer}"
            for question, contexts, answer in FACTS
        ]
        (folder / f"{split}.txt").write_text("\n".join([*lines, "<s> x </s> |||  ||| none"]))


def write_search_results(folder):
    for split in ("train", "val", "test"):
        (folder / split).mkdir()
        for number, (question, contexts, answer) in enumerate(FACTS):
            results = [{"url": "u", "snippet": text, "title": None} for text in contexts]
            results.insert(1, {"url": "u", "snippet": None})
            row = {"question": question, "answer": answer, "search_results": results, "value": 200}
            (folder / split / f"{number:06}.json").write_text(json.dumps(row))


def write_zips(folder):
    write_search_results(folder)
    for split in ("train", "val", "test"):
        with ZipFile(folder / f"{split}.zip", "w") as archive:
            for file in sorted((folder / split).iterdir()):
                archive.write(file, f"{split}/{file.name}")
                archive.writestr(f"__MACOSX/._{file.name}", b"\x00")
                file.unlink()
        (folder / split).rmdir()


def write_quasar(folder, suffix=".json.gz"):
    opened = gzip.open if suffix.endswith(".gz") else open
    for name in ("questions", "contexts/short", "contexts/long"):
        (folder / name).mkdir(parents=True)
    for split in ("train", "dev", "test"):
        rows = {
            "questions": [
                {"uid": f"q{n}", "question": question, "answer": answer, "tags": ["1tok"]}
                for n, (question, _, answer) in enumerate(FACTS)
            ]
        }
        for length, more in (("short", []), ("long", [[0.1, "And blue is more."]])):
            rows[f"contexts/{length}"] = [
                {"uid": f"q{n}", "contexts": [[2.5, text] for text in contexts] + more}
                for n, (_, contexts, _) in reversed(list(enumerate(FACTS)))
            ]
        for name, of_name in rows.items():
            kind = "questions" if name == "questions" else "contexts"
            with opened(folder / name / f"{split}_{kind}{suffix}", "wt") as file:
                file.writelines(json.dumps(row) + "\n" for row in of_name)


def write_own(folder):
    for split in ("train", "dev", "test"):
        rows = [
            {"question": question, "contexts": contexts, "answers": [answer, "Rome"]}
            for question, contexts, answer in FACTS
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))


WRITERS = {
    "searchqa lines": ("searchqa", write_search_lines),
    "searchqa folders": ("searchqa", write_search_results),
    "searchqa zips": ("searchqa", write_zips),
    "quasar-t": ("quasar-t", write_quasar),
    "quasar-t plain": ("quasar-t", lambda folder: write_quasar(folder, ".jsonl")),
}


def task_at(folder, name, **changes):
    return Questions(QuestionsConfig(name=name, path=str(folder), **{"min_count": 1} | changes))


def own_task(folder):
    write_own(folder)
    return task_at(folder, "own")


CONTRACT_EXAMPLES = {"own": own_task}


def logits_of(batch, spans):
    logits = torch.full((len(batch), 2, batch.inputs[0].shape[1]), -5.0)
    for row, (start, end) in enumerate(spans):
        logits[row, 0, start] = logits[row, 1, end] = 5.0
    return logits.masked_fill((batch.inputs[0] == PAD)[:, None], -torch.inf)


@pytest.mark.parametrize(("name", "write"), WRITERS.values(), ids=WRITERS)
def test_every_layout_has_the_same_questions(name, write, tmp_path):
    write(tmp_path)
    task = task_at(tmp_path, name)
    assert [task.size(split) for split in task.SPLITS] == [3, 4, 4]
    batch = task.batch("train", 0, 3)
    by_question = {}
    for i in range(3):
        passage, question = task.words(batch, i)
        start, end = batch.targets[i].tolist()
        by_question[question[0]] = passage[start : end + 1], batch.latents["n_spans"][i].item()
        assert len(passage) == batch.latents["length_passage"][i]
    assert by_question == {
        "which": (["paris"], 1),
        # "austen's" is one word, so that the second context has the first span.
        "who": (["jane", "austen"], 1),
        "how": (["3", ",", "000"], 1),
    }
    batch = task.batch("valid", 0, 4)
    assert batch.mask.all(1).sum() == 3
    assert (batch.latents["start"][~batch.mask[:, 0]] == -1).all()
    assert sorted(batch.latents["number"].tolist()) == [4, 5, 6, 7]


def test_scores_are_those_of_texts(tmp_path):
    write_own(tmp_path)
    task = task_at(tmp_path, "own")
    batch = task.batch("test", 0, 4)
    spans = {}
    for i in range(4):
        passage, question = task.words(batch, i)
        word = {"which": "rome", "who": "wrote", "how": "of", "what": "no"}[question[0]]
        position = passage.index(word)
        before = {"which": 0, "who": 2, "how": 3, "what": 0}[question[0]]
        spans[i] = (position - before, position)
        assert position >= before
    scores = task.score(logits_of(batch, spans.values()), batch)
    found = {
        task.words(batch, i)[1][0]: (scores["exact_match"][i].item(), scores["f1"][i].item())
        for i in range(4)
    }
    # "Rome" is a further right answer; "jane AUSTEN wrote", "3,000 of", and none at all.
    assert found["which"] == (1, 1)
    assert found["who"] == pytest.approx((0, 0.8))
    assert found["how"] == pytest.approx((0, 2 / 3))
    assert found["what"] == (0, 0)
    right = task.score(logits_of(batch, batch.targets.tolist()), batch)
    assert right["exact_match"].sum() == right["start"].sum() == right["end"].sum() == 3


def test_contexts_and_words_are_cut(tmp_path):
    write_quasar(tmp_path)
    short = task_at(tmp_path, "quasar-t", n_contexts=1)
    assert short.size("train") == 1
    assert task_at(tmp_path, "quasar-t", contexts="long").size("train") == 4
    few = task_at(tmp_path, "quasar-t", max_passage=4, max_question=2)
    batch = few.batch("valid", 0, 4)
    assert [text.shape[1] for text in batch.inputs] == [4, 2]
    with pytest.raises(ValueError, match="answers must occur in the first 1 words"):
        task_at(tmp_path, "quasar-t", max_passage=1).size("train")


def test_a_passage_without_words_has_no_answer(tmp_path):
    write_own(tmp_path)
    (tmp_path / "test.jsonl").write_text('{"question": "x", "contexts": [], "answers": ["y"]}\n')
    task = task_at(tmp_path, "own")
    batch = task.batch("test", 0, 1)
    assert task.score(torch.zeros(1, 2, 1), batch)["f1"].tolist() == [0]


def test_missing_files_are_named_with_what_to_fetch(tmp_path):
    for name, words in (("searchqa", "val.txt"), ("quasar-t", "contexts/short/train_contexts")):
        with pytest.raises(FileNotFoundError, match=f"has no train. Fetch it from .*{words}"):
            task_at(tmp_path, name).size("train")
    write_search_lines(tmp_path)
    (tmp_path / "test.txt").unlink()
    with pytest.raises(FileNotFoundError, match="has no test"):
        task_at(tmp_path, "searchqa").size("train")
    with pytest.raises(FileNotFoundError, match="has no train"):
        task_at(tmp_path / "nothing", "own").size("train")


@pytest.mark.parametrize(
    ("name", "file", "content", "message"),
    [
        ("searchqa", "train.txt", "a ||| b ||| c", "line 1 of .*train.txt must be snippets, each"),
        ("searchqa", "train.txt", "<s> a </s> ||| b", "must be snippets"),
        ("searchqa", "train/1.json", "[1]", "1.json must be a JSON object, got list"),
        ("searchqa", "train/1.json", "{", "1.json must be JSON, got"),
        ("searchqa", "train/1.json", '{"question": "a"}', "must have a column search_results"),
        (
            "searchqa",
            "train/1.json",
            '{"question": "a", "answer": "b", "search_results": [3]}',
            "search_results of .* must be objects",
        ),
        ("own", "train.jsonl", '{"question": "a", "contexts": ["b"]}', "column answers"),
        (
            "own",
            "train.jsonl",
            '{"question": "a", "contexts": "b", "answers": ["c"]}',
            "contexts and answers of line 1 .* must be lists",
        ),
        (
            "own",
            "train.jsonl",
            '{"question": "a", "contexts": ["b"], "answers": []}',
            "and an answer, got",
        ),
        ("own", "train.jsonl", "", "own must have questions in train, got none"),
    ],
)
def test_other_layouts_are_errors_that_name_the_place(name, file, content, message, tmp_path):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        task_at(tmp_path, name).size("train")


def test_contexts_of_quasar_must_be_pairs_of_known_questions(tmp_path):
    write_quasar(tmp_path, ".json")
    path = tmp_path / "contexts/short/train_contexts.json"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[1:]))
    with pytest.raises(ValueError, match="must have contexts, got none with the uid 'q3'"):
        task_at(tmp_path, "quasar-t").size("train")
    path.write_text("\n".join([*lines[:-1], '{"uid": "q0", "contexts": ["text"]}']))
    with pytest.raises(ValueError, match="must be pairs of a score and a text"):
        task_at(tmp_path, "quasar-t").size("train")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "squad"}, "name must be one of searchqa, quasar-t, own"),
        ({"path": ""}, "path must be"),
        ({"contexts": "medium"}, "contexts must be one of short, long"),
        ({"max_passage": 0}, "max_passage must be an integer from 1"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        QuestionsConfig(**{"name": "own", "path": "x"} | changes)
