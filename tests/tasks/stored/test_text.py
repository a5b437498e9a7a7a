"""Language modelling: windows compared with the text, and formats of texts."""

import math
import random

import datasets
import numpy as np
import pytest
import torch

from tasks.stored import opening
from tasks.stored.text import Text, TextConfig
from tests.tasks.batches import full_batch

CONTRACT_EXAMPLES = {
    "": lambda folder: Text(TextConfig(path=__file__, held_out=0.2, length=8), cache=None),
    "words": lambda folder: Text(
        TextConfig(
            path=__file__, held_out=0.2, tokens="words", vocabulary_size=500, length=8, context=5
        ),
        cache=None,
    ),
}

LINE = "Füchse, 狐 und 🦊: the quick brown fox, the quicker one & the quickest.\n"
WORDS = ["the", "fox", "über", "狐", "jumps", "123", "\n", "\n\n", "=", "lazy", "🦊", "dog's"]
TINY = {"vocabulary_size": 300, "length": 16}


def prose(n_words, seed):
    return " ".join(random.Random(seed).choices(WORDS, k=n_words)) + "\n"


TEXTS = {"train": LINE + prose(2000, 0), "valid": prose(300, 1), "test": prose(301, 2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write three files like WikiText's."""
    folder = tmp_path_factory.mktemp("text")
    for split, text in TEXTS.items():
        (folder / f"wiki.{split}.raw").write_bytes(text.encode())
    return folder


@pytest.fixture(scope="module")
def task(folder):
    return Text(TextConfig(path=str(folder), **TINY), cache=None)


def counted(batch):
    """Return the unmasked targets in the order of the text."""
    return batch.targets[batch.mask]


# Tokens and counts


@pytest.mark.parametrize("split", ["valid", "test"])
def test_all_targets_together_are_the_text(task, split):
    assert task.decode(counted(full_batch(task, split))) == TEXTS[split]


@pytest.mark.parametrize("split", Text.SPLITS)
def test_counts_are_those_of_the_text(task, split):
    text = TEXTS[split]
    assert task.n_bytes(split) == len(text.encode())
    assert task.n_words(split) == len(text.split())
    assert task.n_lines(split) == text.count("\n")
    if split != "train":
        batch = full_batch(task, split)
        assert batch.latents["n_bytes"].sum() == len(text.encode())
        assert batch.mask.sum() == task.n_tokens(split)
        assert not batch.latents["n_bytes"][~batch.mask].any()


def test_bytes_of_each_token(task):
    """ASCII tokens have as many bytes as characters."""
    batch = full_batch(task, "valid")
    texts = [task.decode([token]) for token in counted(batch).tolist()]
    sizes = batch.latents["n_bytes"][batch.mask].tolist()
    pairs = [(text, n) for text, n in zip(texts, sizes, strict=True) if text.isascii()]
    assert len(pairs) > 100
    assert all(len(text) == n for text, n in pairs)
    assert len({n for _, n in pairs}) > 2


def test_the_most_frequent_pairs_are_merged(tmp_path):
    """For `xyxyxy xyxyxy ...`, first `xy`, then `xyxy` is merged."""
    path = tmp_path / "text"
    path.write_text("xyxyxy " * 100)
    task = Text(TextConfig(path=str(path), vocabulary_size=259, length=4), cache=None)
    assert task.vocabulary_size == 259
    assert [task.decode([token]) for token in (256, 257)] == ["xy", "xyxy"]
    tokens = [task.decode([token]) for token in counted(full_batch(task, "test")).tolist()]
    assert tokens[:6] == [" ", "xyxy", "xy", " ", "xyxy", "xy"]


def test_a_small_text_has_few_pairs(tmp_path):
    path = tmp_path / "text"
    path.write_text("abcdefghijklm nopqrstuvwxyz 012345 678")
    task = Text(TextConfig(path=str(path), held_out=0.2, length=2), cache=None)
    assert task.vocabulary_size == 257
    assert task.decode(range(97, 257)).count("�") > 100


@pytest.mark.parametrize("ending", ["\n", "", " ", "\r\n"])
def test_a_single_file_is_cut_in_three(tmp_path, ending):
    """No text is lost or repeated, no word is cut, and the shares are as configured."""
    text = LINE + prose(3000, 3).strip() + ending
    path = tmp_path / "mine"
    path.write_bytes(text.encode())
    task = Text(TextConfig(path=str(path), held_out=0.1, **TINY), cache=None)
    valid, test = (task.decode(counted(full_batch(task, split))) for split in ("valid", "test"))
    assert text.endswith(valid + test)
    train = text.removesuffix(valid + test)
    assert task.n_bytes("train") == len(train.encode())
    assert task.n_words("train") + len(valid.split()) + len(test.split()) == len(text.split())
    for split in ("valid", "test"):
        assert task.n_bytes(split) / len(text.encode()) == pytest.approx(0.1, abs=0.005)


def test_long_texts_are_encoded_block_by_block(tmp_path):
    """Blocks preserve the text; the second text has a word that is longer than a block."""
    for text in (prose(60_000, 4), "the" * 80_000 + " end", "fox" + " 🦊🦊🦊" * 20_000):
        for split in Text.SPLITS:
            (tmp_path / f"{split}.txt").write_text(text if split == "valid" else TEXTS[split])
        task = Text(TextConfig(path=str(tmp_path), **TINY), cache=None)
        assert task.n_bytes("valid") > 3 * 2**16
        assert task.decode(counted(full_batch(task, "valid"))) == text


# Windows


@pytest.mark.parametrize("split", Text.SPLITS)
def test_targets_are_the_next_tokens(task, split):
    batch = task.batch(split, 1, 5)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert batch.inputs.shape == batch.targets.shape == (5, 16)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    tokens = torch.from_numpy(task._sequence(split)[1:].astype(np.int64))
    for targets, position in zip(batch.targets, batch.latents["position"], strict=True):
        assert torch.equal(targets, tokens[position : position + 16])


@pytest.mark.parametrize("split", ["valid", "test"])
def test_each_token_of_an_evaluated_text_is_a_target_once(task, split):
    batch = full_batch(task, split)
    places = (batch.latents["position"][:, None] + torch.arange(16))[batch.mask]
    assert places.tolist() == list(range(task.n_tokens(split)))
    assert batch.inputs[0, 0] == task.start == task.vocabulary_size - 1
    # Behind the end there is nothing.
    assert not batch.mask.all()
    assert (batch.targets[~batch.mask] == task.start).all()
    assert (counted(batch) != task.start).all()
    again = task.batch(split, 1, task.size(split))
    assert torch.equal(again.inputs, batch.inputs)


def test_an_epoch_of_train(task):
    """No token is a target twice; fewer than two windows' tokens are left out, others each time."""
    size, n_tokens = task.size("train"), task.n_tokens("train")
    firsts = []
    for epoch in range(5):
        batch = task.batch("train", epoch, size)
        assert batch.mask.all()
        places = (batch.latents["position"][:, None] + torch.arange(16)).flatten()
        assert places.unique().numel() == places.numel() > n_tokens - 2 * 16
        assert 0 <= places.min() < 16
        assert places.max() < n_tokens
        firsts.append(batch.latents["position"])
    assert len({int(first.min()) for first in firsts}) > 1
    orders = {tuple((first // 16).tolist()) for first in firsts}
    assert len(orders) == 5
    assert list(firsts[0]) != sorted(firsts[0])


def test_batches_of_any_size_are_the_same_stream(task):
    size = task.size("train")
    long = task.batch("train", 0, 3 * size)
    short = [task.batch("train", index, 7) for index in range(3 * size // 7)]
    actual = torch.cat([batch.inputs for batch in short])
    assert torch.equal(actual, long.inputs[: len(actual)])


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 16, 17, 499, 500])
def test_all_lengths_that_fit(folder, length):
    task = Text(TextConfig(path=str(folder), vocabulary_size=300, length=length), cache=None)
    for split in task.splits:
        batch = full_batch(task, split)
        assert batch.inputs.shape == (task.size(split), length)
        left_out = task.n_tokens(split) - batch.mask.sum()
        assert 0 <= left_out < (2 * length if split == "train" else 1)
    assert task.batch("train", 0, 20 * task.size("train")).mask.all()


def test_the_seed_chooses_the_windows(folder):
    first, again, other = (
        Text(TextConfig(path=str(folder), seed=seed, **TINY), cache=None) for seed in (1, 1, 2)
    )
    assert torch.equal(first.batch("train", 0, 9).inputs, again.batch("train", 0, 9).inputs)
    assert not torch.equal(first.batch("train", 0, 9).inputs, other.batch("train", 0, 9).inputs)
    assert torch.equal(first.batch("test", 0, 9).inputs, other.batch("test", 0, 9).inputs)


# Words


@pytest.fixture(scope="module")
def words(folder):
    config = TextConfig(path=str(folder), tokens="words", vocabulary_size=10_000, length=16)
    return Text(config, cache=None)


def split_words(text):
    """Words and line ends, in order."""
    return text.replace("\n", " \n ").split(" ")


@pytest.mark.parametrize("split", Text.SPLITS)
def test_words_are_what_white_space_separates_and_line_ends(words, split):
    known = set(split_words(TEXTS["train"])) - {""}
    expected = [w if w in known else "<unk>" for w in split_words(TEXTS[split]) if w]
    tokens = words._sequence(split)[1:].tolist()
    assert [words.decode([token]) for token in tokens] == expected
    assert words.vocabulary_size == len(known) + 2  # <unk> and the start token
    assert words.n_tokens(split) == words.n_words(split) + words.n_lines(split)
    n_spaces = words.n_words(split)
    assert words.n_bytes(split) == len("".join(expected).encode()) + n_spaces


def test_perplexity_of_words_is_per_token(words):
    batch = full_batch(words, "test")
    shape = (*batch.targets.shape, words.vocabulary_size)
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    figures = words.figures(logits, batch, "test")
    ratio = {name: (one.sum() / other.sum()).item() for name, (one, other) in figures.items()}
    assert ratio["perplexity"] == pytest.approx(ratio["token_perplexity"], rel=1e-5)


def test_the_most_frequent_words_are_kept(tmp_path):
    path = tmp_path / "text"
    path.write_text("c a b a b a d " * 20)
    config = TextConfig(path=str(path), tokens="words", vocabulary_size=4, length=4)
    task = Text(config, cache=None)
    words = task.decode(task._sequence("train")[1:8].tolist())
    assert task.vocabulary_size == 4
    assert words == "<unk> a b a b a <unk>"


def test_vocabularies_beyond_16_bits(tmp_path):
    """The ids of 70,000 words are different, and take four bytes each."""
    text = " ".join(f"w{number}" for number in range(70_000))
    for split in Text.SPLITS:
        (tmp_path / f"{split}.txt").write_text(text)
    config = TextConfig(path=str(tmp_path), tokens="words", vocabulary_size=267_744, length=8)
    task = Text(config, cache=None)
    assert task.vocabulary_size == 70_002
    sequence = task._sequence("valid")
    assert sequence.dtype == np.uint32
    assert sequence[0] == task.start == 70_001
    assert len(set(sequence.tolist())) == 70_001
    assert task.decode(task.batch("valid", 0, 2).targets[1].tolist()) == " ".join(
        f"w{number}" for number in range(8, 16)
    )


# Context


@pytest.mark.parametrize("context", [1, 5, 15])
def test_every_token_is_a_target_once_after_its_context(folder, task, context):
    other = Text(TextConfig(path=str(folder), context=context, **TINY), cache=None)
    tokens = task._sequence("valid").astype(np.int64)
    batch = full_batch(other, "valid")
    assert len(batch) == math.ceil(task.n_tokens("valid") / (16 - context))
    places = batch.latents["position"][:, None] + torch.arange(16)
    assert places[batch.mask].tolist() == list(range(task.n_tokens("valid")))
    for row in range(len(batch)):
        counted = batch.mask[row].nonzero()[:, 0]
        # A target is preceded by `context` tokens or by all of the text.
        assert counted[0] + 1 >= min(context, places[row, counted[0]] + 1)
        for column in counted.tolist():
            position = places[row, column]
            assert batch.targets[row, column] == tokens[position + 1]
            before = batch.inputs[row, : column + 1].numpy()
            assert np.array_equal(before, tokens[position - column : position + 1])
    assert batch.latents["n_bytes"].sum() == task.n_bytes("valid")
    # Training windows have none.
    assert torch.equal(other.batch("train", 1, 9).inputs, task.batch("train", 1, 9).inputs)
    assert other.batch("train", 1, 9).mask.all()


# Scores


def test_scores_are_those_of_a_loop(task):
    last = task.batch("valid", task.size("valid") - 1, 1)
    assert not last.mask.all()
    logits = torch.randn(1, 16, task.vocabulary_size, generator=torch.Generator().manual_seed(0))
    logits[0, [0, -1], last.targets[0, [0, -1]]] = 50
    actual = task.score(logits, last)
    for place in range(16):
        row, target = logits[0, place].double().tolist(), int(last.targets[0, place])
        loss = math.log(sum(math.exp(logit) for logit in row)) - row[target]
        counts = bool(last.mask[0, place])
        assert actual["loss"][0, place] == pytest.approx(loss * counts, abs=1e-4)
        assert actual["correct"][0, place] == (counts and max(row) == row[target])
    assert actual["correct"].sum() >= 1


def test_scores_of_another_shape(task):
    with pytest.raises(
        ValueError, match=r"logits must have shape \(1, 16, 300\), got \(1, 16, 9\)"
    ):
        task.score(torch.zeros(1, 16, 9), task.batch("test", 0, 1))


def test_the_baseline_is_that_of_a_loop(task):
    counts = [1] * task.vocabulary_size
    for token in task._sequence("train")[1:].tolist():
        counts[token] += 1
    losses = [
        -math.log(counts[token] / sum(counts)) for token in task._sequence("test")[1:].tolist()
    ]
    assert task.baseline("test") == pytest.approx(sum(losses) / len(losses))
    assert task.baseline("train") < math.log(task.vocabulary_size)


def test_figures_are_per_token_byte_and_word(task):
    """Sums over windows agree with sums over the whole text."""
    generator = torch.Generator().manual_seed(0)
    batch = full_batch(task, "test")
    logits = torch.randn(*batch.targets.shape, task.vocabulary_size, generator=generator)
    actual = task.figures(logits, batch, "test")
    assert all(len(part) == len(whole) == len(batch) for part, whole in actual.values())
    ratio = {name: (one.sum() / other.sum()).item() for name, (one, other) in actual.items()}
    right = logits.log_softmax(-1).gather(-1, batch.targets[..., None])[..., 0]
    total = -right[batch.mask].double().sum().item()
    text = TEXTS["test"]
    n_tokens = int(batch.mask.sum())
    best = (logits.argmax(-1) == batch.targets)[batch.mask].double().mean().item()
    expected = {
        "loss": total / n_tokens,
        "accuracy": best,
        "bits_per_byte": total / math.log(2) / len(text.encode()),
        "perplexity": total / (len(text.split()) + text.count("\n")),
        "token_perplexity": total / n_tokens,
    }
    assert ratio == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match=r"split must be .*, got 'tset'"):
        task.figures(logits, batch, "tset")


def test_figures_of_the_baseline_are_those_of_a_model_that_predicts_it(task):
    counts = np.bincount(task._sequence("train")[1:], minlength=task.vocabulary_size) + 1
    batch = full_batch(task, "test")
    shape = (*batch.targets.shape, task.vocabulary_size)
    logits = torch.from_numpy(np.log(counts / counts.sum())).expand(shape)
    actual = task.figures(logits, batch, "test")
    expected = {name: (one.sum() / other.sum()).item() for name, (one, other) in actual.items()}
    del expected["accuracy"]
    for name in ("perplexity", "token_perplexity"):
        expected[name] = math.exp(expected[name])
    assert task.baseline_figures("test") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("wrong", [-1, 300])
def test_ids_out_of_the_vocabulary_are_errors(task, wrong):
    assert task.decode([task.start]) == ""
    with pytest.raises(ValueError, match=f"ids must be an integer from 0 to 299, got {wrong}"):
        task.decode([65, wrong])


# Hugging Face's formats


@pytest.fixture
def _no_network(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(opening, "_hub_responds", lambda: False)


def rows(text):
    """Return a table like the hub's: lines with line ends, empty lines without."""
    lines = text.removesuffix("\n").split("\n")
    return datasets.Dataset.from_dict({"text": [f"{line}\n" if line else "" for line in lines]})


@pytest.mark.usefixtures("_no_network")
@pytest.mark.parametrize("format", ["save_to_disk", "parquet"])
def test_stored_data_sets_are_the_same_text(tmp_path, task, format):
    names = {"train": "train", "validation": "valid", "test": "test"}
    stored = datasets.DatasetDict(
        {stored_split: rows(TEXTS[split]) for stored_split, split in names.items()}
    )
    folder = tmp_path / "stored"
    if format == "save_to_disk":
        stored.save_to_disk(folder)
    else:
        folder.mkdir()
        for split, table in stored.items():
            table.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    actual = Text(TextConfig(path=str(folder), **TINY), cache=None)
    for split in task.splits:
        assert np.array_equal(actual._sequence(split), task._sequence(split))
    assert actual.n_lines("valid") == task.n_lines("valid")


@pytest.mark.usefixtures("_no_network")
def test_a_data_set_without_a_split(tmp_path):
    datasets.DatasetDict(train=rows("a\n"), test=rows("b\n")).save_to_disk(tmp_path / "stored")
    task = Text(TextConfig(path=str(tmp_path / "stored")), cache=None)
    with pytest.raises(ValueError, match="must have the splits validation, got train, test"):
        task.size("train")


# Missing data


@pytest.mark.usefixtures("_no_network")
def test_a_missing_wikitext_says_what_to_fetch():
    task = Text(TextConfig(), cache=None)
    fetch = r"load_dataset\('Salesforce/wikitext', 'wikitext-103-raw-v1'\).save_to_disk\('FOLDER'\)"
    with pytest.raises(FileNotFoundError, match=rf"(?s){fetch}.*set path to it"):
        task.batch("train", 0, 1)


def test_a_missing_path_says_what_to_put_there(tmp_path):
    path = str(tmp_path / "nothing")
    task = Text(TextConfig(path=path, name="wikitext-2-raw-v1"), cache=None)
    fetch = rf"load_dataset\('Salesforce/wikitext', 'wikitext-2-raw-v1'\).save_to_disk\('{path}'\)"
    with pytest.raises(
        FileNotFoundError, match=rf"(?s)must exist, got .*nothing'.*a text file, a folder.*{fetch}"
    ):
        task.vocabulary_size  # noqa: B018


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train.txt": "a", "test.txt": "b"}, r"'valid' in its name, got 0"),
        (dict.fromkeys(("train.txt", "my train.txt", "valid.txt"), "a"), r"'train' .* got 2"),
        (
            {"train.txt": "a b", "valid.txt": "", "test.txt": "c"},
            "the text of valid must not be empty",
        ),
        (
            {"train.txt": "a b", "valid.txt": "\xff", "test.txt": "c"},
            "must be UTF-8, got from byte 0 on",
        ),
        (
            {"train.txt": "ab c", "valid.txt": "a", "test.txt": "c"},
            r"length must be at most .*, got 16",
        ),
    ],
)
def test_bad_texts_are_errors(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    task = Text(TextConfig(path=str(tmp_path), **TINY), cache=None)
    with pytest.raises(ValueError, match=message):
        task.batch("train", 0, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "wikitext"}, r"name must be one of wikitext-103-raw-v1, .*, got 'wikitext'"),
        ({"path": ""}, "path must be .*, got ''"),
        ({"held_out": 0.5}, "held_out must be .*, got 0.5"),
        ({"held_out": 0}, "held_out must be .*, got 0"),
        ({"vocabulary_size": 257}, "vocabulary_size must be an integer from 258 to .*, got 257"),
        ({"tokens": "words", "vocabulary_size": 2}, "vocabulary_size must be .* from 3 .*, got 2"),
        ({"tokens": "letters"}, "tokens must be one of byte_pairs, words, got 'letters'"),
        ({"length": 9, "context": 9}, "context must be an integer from 0 to 8, got 9"),
        ({"length": 0}, "length must be .*, got 0"),
        ({"seed": -1}, "seed must be .*, got -1"),
    ],
)
def test_a_bad_config_says_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        TextConfig(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("training", 0, 1),
            "split must be one of train, valid, test, got 'training'; nearest: 'train'",
        ),
        (("test", -1, 1), "index must be .*, got -1"),
        (("test", 0, 0), "size must be .*, got 0"),
    ],
)
def test_a_bad_batch_says_what_is_allowed(task, arguments, message):
    with pytest.raises(ValueError, match=message):
        task.batch(*arguments)


# The cache


def test_the_cache_gives_what_was_made(folder, tmp_path, task, monkeypatch):
    config = TextConfig(path=str(folder), **TINY)
    cache = tmp_path / "new" / "cache"
    first = Text(config, cache=cache)
    assert torch.equal(first.batch("train", 1, 9).inputs, task.batch("train", 1, 9).inputs)
    (path,) = cache.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(Text, "_encode", None)
        # Neither where the text lies nor how it is cut into windows changes the tokens.
        copy = tmp_path / "copy"
        copy.mkdir()
        for split, text in TEXTS.items():
            (copy / f"{split}.txt").write_bytes(text.encode())
        again = Text(TextConfig(path=str(copy), vocabulary_size=300, length=9), cache=cache)
        assert again.decode(counted(full_batch(again, "test"))) == TEXTS["test"]
        assert again.n_words("train") == task.n_words("train")
        with pytest.raises(TypeError):
            Text(TextConfig(path=str(folder), vocabulary_size=301), cache=cache).size("test")
    (copy / "valid.txt").write_text("other\n")
    other = Text(TextConfig(path=str(copy), **TINY), cache=cache)
    assert other.decode(counted(full_batch(other, "valid"))) == "other\n"
    assert len(list(cache.iterdir())) == 2
    path.write_bytes(path.read_bytes()[:-100])
    mended = Text(config, cache=cache)
    assert torch.equal(mended.batch("test", 0, 9).inputs, task.batch("test", 0, 9).inputs)
    assert len(list(cache.iterdir())) == 2


def test_without_a_place_to_write_it_goes_on(folder, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.warns(UserWarning, match="could not be written"):
        assert Text(TextConfig(path=str(folder), **TINY), cache=blocked).size("valid") > 1
