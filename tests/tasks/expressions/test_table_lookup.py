"""Table lookup: compared with a reference and the authors' data, and properties of the sampler."""

import json
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.expressions.table_lookup import TableLookup, TableLookupConfig, look_up
from tests.tasks.expressions.expression_reference import check_latents, distinct, parse_tables

CONTRACT_EXAMPLES = {
    "": lambda folder: TableLookup(
        TableLookupConfig(n_compositions=101, n_id=31, n_valid=31, n_ood=31)
    )
}

GOLDEN = json.loads(
    (Path(__file__).parents[2] / "golden" / "ndr_ctl_reversed0_arg_last.json").read_text()
)
SMALL = {
    "n_symbols": 5,
    "n_tables": 4,
    "n_lone": 1,
    "train_depth": 3,
    "valid_depths": (4, 4),
    "ood_depths": (5, 6),
    "n_compositions": 200,
    "lone_repeats": 2,
    "n_id": 20,
    "n_valid": 30,
    "n_ood": 50,
}


def tables_of(task):
    """Table name -> {symbol name: symbol name}."""
    letters = task.vocabulary[len(task.answers) :]
    return {
        letter: {task.answers[i]: task.answers[j] for i, j in enumerate(row)}
        for letter, row in zip(letters, task.tables.tolist(), strict=True)
    }


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("split", TableLookup.SPLITS)
def test_latents_are_those_of_a_walk_through_the_tables(direction, split):
    task = TableLookup(TableLookupConfig(direction=direction))
    batch, tables = task.batch(split, 2, 100), tables_of(task)
    for i in range(len(batch)):
        tokens = task.text(batch, i).split()
        root = parse_tables(tokens, tables, backward=direction == "backward")
        check_latents(batch, i, root)
        assert batch.latents["depth"][i] == root.depth == len(tokens) - 1
    assert batch.inputs.shape[1] == {"valid": 9, "ood": 11}.get(split, 6)
    assert batch.mask.all()


def test_the_written_form():
    for direction, last in (("forward", "h"), ("backward", "101")):
        task = TableLookup(TableLookupConfig(direction=direction))
        assert task.vocabulary[:9] == (*(f"{i:03b}" for i in range(8)), "a")
        assert task.vocabulary[-1] == "k"
        assert len(task.vocabulary) == 19
        text = task.text(task.batch("ood", 0, 1), 0).split()
        assert len(text) in (10, 11)
        assert (text[-1] in task.answers) == (last in task.answers)


def test_both_directions_have_the_same_sequences_mirrored():
    tasks = [TableLookup(TableLookupConfig(direction=d)) for d in ("forward", "backward")]
    assert np.array_equal(tasks[0].tables, tasks[1].tables)
    for split in TableLookup.SPLITS:
        first, second = (task.batch(split, 1, 64) for task in tasks)
        assert torch.equal(first.targets, second.targets)
        for i in range(64):
            assert tasks[0].text(first, i).split() == tasks[1].text(second, i).split()[::-1]


def test_tables_are_bijections():
    tables = TableLookup(TableLookupConfig(n_symbols=12, n_tables=20, n_lone=6)).tables
    assert np.array_equal(np.sort(tables, 1), np.tile(np.arange(12), (26, 1)))
    assert len({tuple(row) for row in tables.tolist()}) == 26


def test_the_train_split_is_the_papers():
    task = TableLookup(TableLookupConfig())
    assert task.size("train") == GOLDEN["split_sizes"]["train"] == 53_704
    assert task.chance == 1 / 8
    actual = Counter(distinct(task, "train"))
    by_depth = {d: {t: n for t, n in actual.items() if t.count(" ") == d} for d in range(1, 6)}
    singles = {f"{s} {t}" for s, t in product(task.answers, task.vocabulary[8:])}
    assert set(by_depth[1]) == singles
    assert all(n == (31 if text[-1] in "jk" else 1) for text, n in by_depth[1].items())
    counts = GOLDEN["counts_by_type_and_depth"]["train"]
    assert sum(by_depth[1].values()) == counts["basic"]["1"]
    compositions = [by_depth[d] for d in range(2, 6)]
    assert sum(map(len, compositions)) == sum(counts["iid"].values()) == 53_136
    assert all(n == 1 for part in compositions for n in part.values())
    assert not any(letter in text for part in compositions for text in part for letter in "jk")
    # All that there are of depths 2 and 3, but for a tenth; then as many of either depth.
    assert [len(part) for part in compositions] == [648 - 64, 5832 - 583, 23_651, 23_652]


def test_splits_are_disjoint_and_balanced():
    task = TableLookup(TableLookupConfig())
    texts = {split: distinct(task, split) for split in task.splits}
    for split, sizes in {
        "id": {2: 64, 3: 583, 4: 676, 5: 677},
        "valid": {6: 1000, 7: 1000, 8: 1000},
        "ood": {9: 1000, 10: 1000},
    }.items():
        assert len(set(texts[split])) == len(texts[split]) == task.size(split)
        assert not set(texts[split]) & set(texts["train"])
        assert Counter(text.count(" ") for text in texts[split]) == sizes
        assert sizes == task.config.counts(split)
    for prefix in (6, 60, 300):
        depths = Counter(text.count(" ") for text in texts["valid"][:prefix])
        assert set(depths.values()) == {prefix // 3}


def test_sampling_by_depth_shows_every_depth_equally_often():
    task = TableLookup(TableLookupConfig(sampling="depth"))
    uniform = TableLookup(TableLookupConfig())
    depth = task.batch("train", 7, 500).latents["depth"]
    assert depth.bincount().tolist() == [0, 100, 100, 100, 100, 100]
    assert uniform.batch("train", 7, 500).latents["depth"].bincount()[1] < 20
    # Within a depth the stream has epochs: the 584 pairs of tables come once each.
    pairs = Counter()
    for index in range(584):
        batch = task.batch("train", index, 5)
        pairs.update(task.text(batch, i) for i in range(5) if batch.latents["depth"][i] == 2)
    assert len(pairs) == 584
    assert set(pairs.values()) == {1}


@settings(deadline=None, max_examples=15)
@given(
    n_symbols=st.integers(2, 64),
    n_tables=st.integers(2, 20),
    direction=st.sampled_from(["forward", "backward"]),
    seed=st.integers(0, 2**32 - 1),
    split=st.sampled_from(TableLookup.SPLITS),
)
def test_any_task_walks_its_tables(n_symbols, n_tables, direction, seed, split):
    changes = {"n_symbols": n_symbols, "n_tables": n_tables, "n_compositions": 10, "n_id": 1}
    config = TableLookupConfig(**SMALL | changes, direction=direction, seed=seed)
    task = TableLookup(config)
    batch, tables = task.batch(split, 1, 7), tables_of(task)
    for i in range(7):
        tokens = task.text(batch, i).split()
        check_latents(batch, i, parse_tables(tokens, tables, backward=direction == "backward"))


def test_a_small_task_uses_up_what_there_is():
    room = {"n_id": 10, "n_compositions": 5 * (16 + 64) - 10}
    task = TableLookup(TableLookupConfig(**SMALL | room))
    together = distinct(task, "train") + distinct(task, "id")
    several = {text for text in together if text.count(" ") > 1}
    every = {
        " ".join((symbol, *tables))
        for depth in (2, 3)
        for symbol in task.answers
        for tables in product("abcd", repeat=depth)
    }
    assert several == every
    with pytest.raises(
        ValueError, match="n_compositions must be an integer from 1 to 390, got 391"
    ):
        TableLookupConfig(**SMALL | {"n_id": 10, "n_compositions": 391})


def test_the_seed_chooses_tables_and_sequences():
    first, again, other = (TableLookup(TableLookupConfig(**SMALL, seed=seed)) for seed in (3, 3, 4))
    assert np.array_equal(first.tables, again.tables)
    assert not np.array_equal(first.tables, other.tables)
    assert distinct(first, "ood") == distinct(again, "ood") != distinct(other, "ood")


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_golden_answers(split):
    """The authors' tables on the authors' sequences give the authors' answers."""
    samples = GOLDEN["sets"][split]
    tokens = np.full((len(samples), 11), -1)
    for row, sample in zip(tokens, samples, strict=True):
        row[: len(sample["ids"])] = sample["ids"]
    ours = look_up(tokens, np.array(GOLDEN["tables"]), "backward")
    labels = [GOLDEN["vocab_out"][sample["label"]] for sample in samples]
    assert ours.targets.tolist() == labels
    assert ours.latents["depth"].tolist() == [sample["depth"] for sample in samples]
    assert GOLDEN["vocab_in"] == {
        name: i for i, name in enumerate(TableLookup(TableLookupConfig()).vocabulary)
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"direction": "forwards"}, r"direction must be .*, got 'forwards'; nearest: 'forward'"),
        ({"sampling": "depths"}, "sampling must be one of uniform, depth, got 'depths'"),
        ({"n_symbols": 1}, "n_symbols must be .*, got 1"),
        ({"n_tables": 27}, "n_tables must be .*, got 27"),
        ({"n_lone": 18}, "n_lone must be an integer from 0 to 17, got 18"),
        ({"train_depth": 1}, "train_depth must be .*, got 1"),
        ({"valid_depths": (5, 8)}, r"valid_depths must be .* 6 <= first .*, got \(5, 8\)"),
        ({"valid_depths": (8, 6)}, r"valid_depths must be .*, got \(8, 6\)"),
        ({"valid_depths": 6}, "valid_depths must be a pair .*, got 6"),
        ({"ood_depths": (8, 10)}, r"ood_depths must be .* 9 <= first .*, got \(8, 10\)"),
        (
            {"n_tables": 26, "n_lone": 0, "ood_depths": (9, 16)},
            r"ood_depths must be .*, got \(9, 16\)",
        ),
        (
            {"n_tables": 1},
            "n_symbols and n_tables must make at least 10 .* got 8 and 1, which make 8",
        ),
        ({"n_id": 54_000}, "n_id must be an integer from 1 to 53134, got 54000"),
        ({"n_compositions": 529_361}, r"n_compositions must be .* to 529360, got 529361"),
        ({"n_valid": 0}, "n_valid must be .*, got 0"),
        ({"n_ood": 2.0}, "n_ood must be .*, got 2.0"),
        ({"lone_repeats": -1}, "lone_repeats must be .*, got -1"),
        ({"seed": True}, "seed must be .*, got True"),
    ],
)
def test_a_bad_config_says_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        TableLookupConfig(**arguments)
