"""Text classification, on tiny files in each of the formats."""

import json
from collections import Counter

import datasets
import pytest
import torch

from tasks.stored import opening
from tasks.stored.classification import Classification, ClassificationConfig
from tests.tasks.batches import full_batch


def rows_of(n, labels):
    """Return distinct texts of shared words, with labels."""
    return [
        (f"Review {' '.join(f'{i:05b}')}, <br /> it is GOOD!", (i + i // 7) % labels)
        for i in range(n)
    ]


IMDB = {split: rows_of(n, 2) for split, n in {"train": 20, "test": 8}.items()}
SST = {split: rows_of(n, 5) for split, n in {"train": 20, "valid": 10, "test": 15}.items()}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def no_network(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(opening, "_hub_responds", lambda: False)


def folders(path):
    for split, rows in IMDB.items():
        for i, (text, label) in enumerate(rows):
            file = path / split / ("neg", "pos")[label] / f"{i}_{label}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        (path / split / "labeledBow.feat").write_text("0 1:2")
    (path / "train" / "unsup").mkdir()
    (path / "train" / "unsup" / "0_0.txt").write_text("nobody knows")


def columns(split):
    return dict(zip(("text", "label"), zip(*IMDB[split], strict=True), strict=True))


def hub(path):
    features = datasets.Features(
        text=datasets.Value("string"), label=datasets.ClassLabel(names=["neg", "pos"])
    )
    splits = {split: datasets.Dataset.from_dict(columns(split), features) for split in IMDB}
    unknown = datasets.Dataset.from_dict({"text": ["nobody knows"], "label": [-1]}, features)
    datasets.DatasetDict(**splits, unsupervised=unknown).save_to_disk(path)


def parquet(path):
    for split in IMDB:
        table = datasets.Dataset.from_dict(columns(split))
        table.to_parquet(path / f"{split}-00000-of-00001.parquet")


def glue(path):
    """Files in the format of SST-2, whose test labels are not public."""
    for split, rows in {"train": IMDB["train"], "dev": IMDB["test"]}.items():
        lines = ["sentence\tlabel", *(f"{text}\t{label}" for text, label in rows)]
        (path / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    (path / "test.tsv").write_text("index\tsentence\n0\tnobody knows\n")


def fine(path):
    for split, rows in SST.items():
        lines = [
            json.dumps({"text": text, "label": label, "label_text": "so so"})
            for text, label in rows
        ]
        name = {"valid": "dev"}.get(split, split)
        (path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def leaves(text):
    """A tree over the words of a text, each of them neutral."""
    *first, last = text.replace("(", "-LRB-").replace(")", "-RRB-").split()
    tree = f"(2 {last})"
    for word in reversed(first):
        tree = f"(3 (2 {word}) {tree})"
    return tree


def trees(path):
    for split, rows in SST.items():
        # The class of the sentence is that of the whole tree.
        lines = [f"({label}" + leaves(text)[2:] for text, label in rows]
        (path / f"{'dev' if split == 'valid' else split}.txt").write_text("\n".join(lines) + "\n")


def own(path):
    for split, rows in SST.items():
        lines = [json.dumps({"review": text, "stars": f"*{label}"}) for text, label in rows]
        (path / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


FORMS = {folders: "imdb", hub: "imdb", parquet: "imdb", glue: "sst2", fine: "sst5", trees: "sst5"}


def task_of(path, name, **changes):
    arguments = {"n_valid": 5, "min_count": 1} | changes
    return Classification(ClassificationConfig(name=name, path=str(path), **arguments))


def small_imdb(folder):
    folders(folder)
    return task_of(folder, "imdb", n_valid=7)


CONTRACT_EXAMPLES = {"imdb": small_imdb}


def words_of(text):
    for mark in ",!</>":
        text = text.replace(mark, f" {mark} ")
    return " ".join(text.lower().split())


def contents(task, split):
    batch = full_batch(task, split)
    return [
        (task.decode(words), label)
        for words, label in zip(batch.inputs, batch.targets[:, 0].tolist(), strict=True)
    ]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_text_is_read_with_its_label(folder, form):
    form(folder)
    task = task_of(folder, FORMS[form])
    known = SST if form in (fine, trees) else IMDB
    stored = {
        split: {(words_of(text), label) for text, label in rows} for split, rows in known.items()
    }
    actual = {split: contents(task, split) for split in task.splits}
    assert sorted(actual["test"]) == sorted(stored["test"])
    if known is SST:
        assert sorted(actual["train"]) == sorted(stored["train"])
        assert sorted(actual["valid"]) == sorted(stored["valid"])
    else:
        assert sorted(actual["train"] + actual["valid"]) == sorted(stored["train"])
        assert len(actual["valid"]) == 5
    assert len(task.classes) == (5 if known is SST else 2)
    for split in task.splits:
        batch = task.batch(split, 1, 4)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert torch.equal(batch.latents["length"], (batch.inputs != 0).sum(1))
        assert torch.equal(batch.latents["label"], batch.targets[:, 0])
        assert batch.mask.all()
        assert torch.equal(batch.inputs, task_of(folder, FORMS[form]).batch(split, 1, 4).inputs)
    counts = Counter(label for _, label in actual["test"])
    assert task.chance("test") == pytest.approx(max(counts.values()) / counts.total())


def test_two_classes_of_the_treebank_leave_out_neutral_sentences(folder):
    trees(folder)
    task = task_of(folder, "sst2_trees")
    expected = [(words_of(text), label > 2) for text, label in SST["valid"] if label != 2]
    assert sorted(contents(task, "valid")) == sorted(expected)


def test_own_columns_and_labels(folder):
    own(folder)
    stars = tuple(f"*{number}" for number in range(5))
    task = task_of(folder, "own", columns=("review", "stars"), labels=stars)
    assert task.classes == stars
    assert sorted(contents(task, "test")) == sorted(
        (words_of(t), label) for t, label in SST["test"]
    )
    with pytest.raises(
        ValueError, match=r"the label of line \d+ of .* must be one of .*, got '\*4'"
    ):
        task_of(folder, "own", columns=("review", "stars"), labels=stars[:4]).batch("test", 0, 1)
    with pytest.raises(ValueError, match="must have a column text, got the columns review, stars"):
        task_of(folder, "own", columns=("text", "stars"), labels=stars).batch("test", 0, 1)


@pytest.mark.parametrize("line", ["good film 3", "(5 (2 good))", "(3 (2 good)", "(3 )"])
def test_what_is_no_tree_is_an_error(folder, line):
    trees(folder)
    (folder / "dev.txt").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"line 1 of .*dev.txt must be a tree such as"):
        task_of(folder, "sst5").batch("valid", 0, 1)


def test_valid_is_held_out_of_train_by_the_seed(folder):
    parquet(folder)

    def rows(split, **changes):
        task = task_of(folder, "imdb", **changes)
        return set(full_batch(task, split).latents["row"].tolist())

    assert rows("train") | rows("valid") == set(range(20))
    assert not rows("train") & rows("valid")
    assert rows("valid", seed=1) != rows("valid") == rows("valid", max_length=3)
    assert rows("valid", n_valid=6) > rows("valid")


def test_rows_of_classes_are_those_of_the_files(folder):
    folders(folder)
    task = task_of(folder, "imdb")
    batch = task.batch("test", 0, 8)
    files = [text for name in (0, 1) for text, label in IMDB["test"] if label == name]
    for words, row in zip(batch.inputs, batch.latents["row"].tolist(), strict=True):
        assert task.decode(words) == words_of(files[row])


def test_long_texts_are_cut(folder):
    fine(folder)
    batch = task_of(folder, "sst5", max_length=2).batch("train", 0, 20)
    assert batch.inputs.shape == (20, 2)
    assert batch.latents["length"].unique().tolist() == [2]


def test_score(folder):
    fine(folder)
    task = task_of(folder, "sst5")
    batch = task.batch("test", 0, 15)
    logits = torch.nn.functional.one_hot(batch.targets, 5).double()
    logits[:6] *= -1
    assert task.score(logits, batch)["correct"].tolist() == [0] * 6 + [1] * 9


def test_a_missing_data_set_says_what_to_fetch(tmp_path):
    missing = str(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError) as caught:
        task_of(missing, "imdb").batch("train", 0, 1)
    message = str(caught.value)
    assert "Fetch it from https://ai.stanford.edu/~amaas/data/sentiment, and put there" in message
    assert f"datasets.load_dataset('stanfordnlp/imdb').save_to_disk({missing!r})" in message
    with pytest.raises(FileNotFoundError, match=r"load_dataset\('stanfordnlp/sst2'\)"):
        Classification(ClassificationConfig(name="sst2")).batch("train", 0, 1)


def test_holding_out_everything(folder):
    parquet(folder)
    with pytest.raises(ValueError, match=r"n_valid must be an integer from 1 to 19, got 20"):
        task_of(folder, "imdb", n_valid=20).batch("train", 0, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "sst"}, r"name must be one of imdb, sst2, sst5, sst2_trees, own, got 'sst'"),
        ({"name": "own", "path": "x"}, "columns must be given with name='own', got None"),
        (
            {"name": "own", "columns": ("a", "b"), "labels": ("x", "y")},
            "path must be given with name='own', got None",
        ),
        ({"name": "sst2_trees"}, "path must be a folder for name='sst2_trees', got None"),
        ({"name": "imdb", "columns": ("text",)}, r"columns must be 2 different names, got"),
        ({"name": "imdb", "labels": ("a", "a")}, r"labels must be 2 to 1000 different names, got"),
        ({"name": "imdb", "path": 3}, r"path must be None or a path, got 3"),
        ({"name": "imdb", "n_valid": 0}, r"n_valid must be .*, got 0"),
        ({"name": "imdb", "min_count": 0}, r"min_count must be .*, got 0"),
        ({"name": "imdb", "vocabulary_size": 2}, r"vocabulary_size must be .*, got 2"),
        ({"name": "imdb", "max_length": 0}, r"max_length must be .*, got 0"),
        ({"name": "imdb", "seed": -1}, r"seed must be .*, got -1"),
    ],
)
def test_a_bad_config_says_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        ClassificationConfig(**arguments)
