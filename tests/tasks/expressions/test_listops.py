"""ListOps: compared with a reference and the authors' results, and properties of the sampler."""

import json
import statistics
import zipfile
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.expressions.listops import (
    LISTOPS_OPERATORS,
    ListOps,
    ListOpsConfig,
    describe_listops,
    network_order,
    operate,
)
from tests.tasks.batches import FEW_NESTED, full_batch
from tests.tasks.expressions.expression_reference import (
    check_latents,
    distinct,
    parse_prefix,
    reduce,
)

CONTRACT_EXAMPLES = {
    "": lambda folder: ListOps(
        ListOpsConfig(**FEW_NESTED),
        cache=None,
    )
}

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "ndr_listops_ops.json").read_text())
SMALL = {"n_train": 3_000, "n_id": 500, "n_valid": 100, "n_ood": 12}
TINY = {
    **{"n_train": 500, "n_id": 50, "n_valid": 40, "n_ood": 40},
    **{"train_depth": 2, "valid_depths": (3, 3), "ood_depths": (4, 4)},
}
VOCABULARY = (*"0123456789", "[SM", "[MIN", "[MAX", "[MED", "]")


@pytest.fixture(scope="module")
def task():
    return ListOps(ListOpsConfig(**SMALL), cache=None)


def describe(*texts):
    """Return the batch of some texts."""
    tokens = np.full((len(texts), 50), -1)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text.split())] = [VOCABULARY.index(token) for token in text.split()]
    return describe_listops(tokens).take(torch.arange(len(texts)), "cpu")


# Semantics


def test_golden_operations():
    """All of the authors' cases, with ties: results, depths and dependency depths."""
    symbols = [10 + LISTOPS_OPERATORS.index(case["op"]) for case in GOLDEN]
    counts = np.array([len(case["values"]) for case in GOLDEN])
    values = np.array([pad(case["values"]) for case in GOLDEN])
    result, selected = operate(np.array(symbols), values, counts)
    assert result.tolist() == [case["result"] for case in GOLDEN]
    below = np.array([pad(case["dep_depths"]) for case in GOLDEN])
    dependency = 1 + np.where(selected, below, 0).max(1)
    assert dependency.tolist() == [case["dependency_depth"] for case in GOLDEN]
    assert len(GOLDEN) == 1200
    for case, chosen in zip(GOLDEN, selected.tolist(), strict=True):
        assert reduce(case["op"], case["values"]) == (
            case["result"],
            [i for i, is_chosen in enumerate(chosen) if is_chosen],
        )


def pad(values):
    return values + [0] * (5 - len(values))


@pytest.mark.parametrize("deeper", ["dep_depths", "depths"])
def test_golden_operations_as_whole_expressions(deeper):
    """Expressions with the golden values and depths of arguments have the golden results."""
    cases = [
        case
        for case in GOLDEN
        if len(written(case, deeper).split()) <= 50 and min(case[deeper]) >= 1
    ]
    assert len(cases) > 300
    batch = describe(*(written(case, deeper) for case in cases))
    assert batch.targets[:, 0].tolist() == [case["result"] for case in cases]
    if deeper == "depths":
        depths = [case["depth"] for case in cases]
        assert batch.latents["nesting_depth"].tolist() == depths
    else:
        depths = [case["dependency_depth"] for case in cases]
        assert batch.latents["depth"].tolist() == depths


def written(case, deeper):
    """Write each argument as a chain of sums with zero of the required depth."""
    arguments = []
    for value, depth in zip(case["values"], case[deeper], strict=True):
        text = str(value)
        for _ in range(depth):
            text = f"[SM {text} 0 ]"
        arguments.append(text)
    return f"[{case['op']} {' '.join(arguments)} ]"


def test_medians_are_those_of_the_standard_library():
    for n in (2, 3, 4, 5):
        every = np.array([pad(list(values)) for values in product(range(0, 10, 2), repeat=n)])
        symbols, counts = np.full(len(every), 13), np.full(len(every), n)
        result, selected = operate(symbols, every, counts)
        for values, median, chosen in zip(every[:, :n].tolist(), result, selected, strict=True):
            assert median == int(statistics.median(values))
            # The chosen values are the middle ones, whichever of equal ones stands for them.
            middle = sorted({sorted(values)[(n - 1) // 2], sorted(values)[n // 2]})
            assert sorted({values[i] for i in np.flatnonzero(chosen)}) == middle
            assert chosen.sum() == 2 - n % 2


def test_the_network_sorts():
    values = np.array(list(product(range(5), repeat=5)))
    order = network_order(values)
    assert np.array_equal(np.take_along_axis(values, order, 1), np.sort(values, 1))
    assert np.array_equal(np.sort(order, 1), np.tile(np.arange(5), (len(values), 1)))


def test_pruning_by_hand():
    batch = describe(
        "[MIN 3 [MAX 1 2 ] ]", "[MIN 1 [MAX 1 2 ] ]", "[SM 1 [MIN 0 [SM 5 5 ] ] ]", "7"
    )
    assert batch.targets[:, 0].tolist() == [2, 1, 1, 7]
    assert batch.latents["depth"].tolist() == [2, 1, 2, 0]
    assert batch.latents["nesting_depth"].tolist() == [2, 2, 3, 0]
    # Edges in the order of the arguments' tokens: for the first, 3, MAX, 1, 2.
    assert batch.latents["edges"][0, :5].tolist() == [[1, 0], [2, 0], [3, 2], [4, 2], [-1, -1]]
    used = batch.latents["edge_used"]
    assert used[0, :5].tolist() == [False, True, False, True, False]
    # The maximum is selected by nobody: what it selects itself is not used either.
    assert used[1, :5].tolist() == [True, False, False, False, False]
    # Of two zeros the first is the minimum, so the sum below goes unused.
    assert used[2, :6].tolist() == [True, True, True, False, False, False]
    assert not used[3].any()
    assert (batch.latents["edges"][3] == -1).all()
    assert batch.latents["root"].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("split", ListOps.SPLITS)
def test_latents_are_those_of_a_recursive_reading(task, split):
    batch = full_batch(task, split)[:200]
    for i in range(len(batch)):
        root = parse_prefix(task.text(batch, i).split())
        check_latents(batch, i, root)
        assert batch.latents["depth"][i] == root.dependency_depth
        assert batch.latents["nesting_depth"][i] == root.depth
        for node in root.all():
            assert len(node.arguments) in (0, 2, 3, 4, 5)
    assert batch.inputs.shape[1] == 50


def test_the_longest_and_the_widest_expressions_fit():
    texts = [
        "[SM " * 16 + "1 2 ] " + "3 ] " * 15,
        " ".join(["[SM"] * 8 + ["1"] * 5 + ["]"] + ["2 2 2 2 ]"] * 7),
    ]
    batch = describe(*texts)
    for i, text in enumerate(texts):
        assert len(text.split()) in (49, 50)
        check_latents(batch, i, parse_prefix(text.split()))
    assert (batch.latents["node"][1].max() + 1, batch.latents["node_token"].shape[1]) == (41, 41)


# Properties of the sampler


def test_equal_numbers_of_each_dependency_depth(task):
    for split, depths in {
        "train": range(6),
        "id": range(1, 6),
        "valid": [6],
        "ood": [7, 8],
    }.items():
        batch = full_batch(task, split)
        counts = Counter(batch.latents["depth"].tolist())
        assert counts == dict.fromkeys(depths, task.size(split) // len(depths))
        assert counts == task.config.counts(split)
        assert (batch.latents["nesting_depth"] >= batch.latents["depth"]).all()
    config = ListOpsConfig()
    assert sum(config.counts("train").values()) == config.n_train == 1_000_000
    deeper = full_batch(task, "train").latents
    assert (deeper["nesting_depth"] > deeper["depth"]).double().mean() > 0.1


def test_train_and_id_are_disjoint_and_evaluation_has_no_repeats(task):
    texts = {split: distinct(task, split) for split in task.splits}
    assert not set(texts["id"]) & set(texts["train"])
    for split in ("id", "valid", "ood"):
        assert len(set(texts[split])) == task.size(split)
    # Short ones are what would be drawn on both sides: of the 400 with two digits each side
    # has its own.
    short = {split: {text for text in texts[split] if text.count(" ") == 3} for split in texts}
    assert len(short["train"]) > 50
    assert len(short["id"]) > 5


def test_operators_digits_and_numbers_of_arguments_are_uniform():
    task = ListOps(ListOpsConfig(**TINY | {"n_train": 4_000}), cache=None)
    batch = full_batch(task, "train")
    flat = batch[:2000]
    flat = flat.inputs[flat.latents["nesting_depth"] == 1]
    assert_uniform(flat[:, 0].bincount()[10:])
    assert_uniform(flat[flat < 10][flat[flat < 10] >= 0].bincount())
    assert_uniform(((flat >= 0).sum(1) - 2).bincount()[2:])


@pytest.mark.parametrize("most", [2, 3])
def test_operations_may_have_fewer_arguments(most):
    task = ListOps(ListOpsConfig(**TINY | {"n_train": 4_000}, max_arguments=most), cache=None)
    batch = full_batch(task, "train")
    flat = batch.inputs[batch.latents["nesting_depth"] == 1]
    assert_uniform(((flat >= 0).sum(1) - 2).bincount()[2:])
    for split in ListOps.SPLITS:
        some = full_batch(task, split)[:50]
        for i in range(len(some)):
            for node in parse_prefix(task.text(some, i).split()).all():
                assert len(node.arguments) in (0, *range(2, most + 1))


def test_expressions_of_the_papers_settings_are_what_they_were_before_there_were_others():
    task = ListOps(ListOpsConfig(**TINY), cache=None)
    text = "[SM [MIN 4 9 2 9 ] [MIN [MIN 4 4 [MED 6 7 8 6 3 ] 3 3 ] 3 8 7 7 ] ]"
    assert task.text(task.batch("valid", 0, 4), 2) == text


def assert_uniform(counts):
    """Assert that chi-squared is at most five standard deviations above its mean."""
    expected = counts.sum() / len(counts)
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    freedom = len(counts) - 1
    assert chi_squared <= freedom + 5 * (2 * freedom) ** 0.5


def test_the_seed_chooses_the_expressions():
    first, again, other = (
        distinct(ListOps(ListOpsConfig(**TINY, seed=seed), cache=None), "valid")
        for seed in (1, 1, 2)
    )
    assert first == again != other


# The cache


def test_the_cache_gives_what_was_made(tmp_path, monkeypatch):
    config = ListOpsConfig(**TINY)
    without = ListOps(config, cache=None).batch("train", 1, 400)
    folder = tmp_path / "new" / "folder"
    first = ListOps(config, cache=folder).batch("train", 1, 400)
    (path,) = folder.iterdir()
    assert path.name.startswith("listops-")
    assert path.name.endswith("-train.npz")
    made = path.stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr(ListOps, "_generate", None)
        second = ListOps(config, cache=folder).batch("train", 1, 400)
        with pytest.raises(TypeError):
            ListOps(ListOpsConfig(**TINY, seed=1), cache=folder).batch("train", 1, 400)
    assert path.stat().st_mtime_ns == made
    for batch in (first, second):
        assert torch.equal(batch.inputs, without.inputs)
        assert torch.equal(batch.targets, without.targets)
        assert batch.latents.keys() == without.latents.keys()
        for name, values in without.latents.items():
            assert torch.equal(batch.latents[name], values)
            assert batch.latents[name].dtype == values.dtype


@pytest.mark.parametrize(
    "damage", ["empty", "shorter", "other bits", "no archive", "lacks targets"]
)
def test_a_damaged_file_is_made_again(damage, tmp_path):
    config = ListOpsConfig(**TINY)
    expected = ListOps(config, cache=tmp_path).batch("valid", 0, 40)
    (path,) = tmp_path.iterdir()
    whole_file = path.read_bytes()
    if damage == "lacks targets":
        np.savez(path, allow_pickle=False, inputs=np.zeros((3, 50), np.int8))
    else:
        middle = len(whole_file) // 2
        flipped = bytes(255 - byte for byte in whole_file[middle : middle + 64])
        path.write_bytes(
            {
                "empty": b"",
                "shorter": whole_file[:middle],
                "other bits": whole_file[:middle] + flipped + whole_file[middle + 64 :],
                "no archive": b"text",
            }[damage]
        )
    again = ListOps(config, cache=tmp_path).batch("valid", 0, 40)
    assert torch.equal(again.inputs, expected.inputs)
    assert torch.equal(again.latents["edges"], expected.latents["edges"])
    with np.load(path) as file, zipfile.ZipFile(path) as archive:
        assert file["inputs"].shape == (40, 50)
        assert archive.testzip() is None
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_place_to_write_it_goes_on(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.warns(UserWarning, match="could not be written"):
        assert ListOps(ListOpsConfig(**TINY), cache=blocked).size("valid") == 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_train": 4}, "n_train must be an integer from 6 to .*, got 4"),
        ({"n_valid": 0}, "n_valid must be .*, got 0"),
        ({"train_depth": 0}, "train_depth must be .*, got 0"),
        ({"valid_depths": [6, 6]}, r"valid_depths must be a pair .*, got \[6, 6\]"),
        ({"ood_depths": (6, 8)}, r"ood_depths must be .* 7 <= first .*, got \(6, 8\)"),
        ({"nested": -0.1}, "nested must be .*, got -0.1"),
        ({"max_length": 24}, "max_length must be an integer from 25 to 120, got 24"),
        ({"max_arguments": 6}, "max_arguments must be an integer from 2 to 5, got 6"),
        ({"seed": 2**32}, "seed must be .*, got 4294967296"),
    ],
)
def test_a_bad_config_says_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        ListOpsConfig(**arguments)


def test_the_names(task):
    assert task.vocabulary == VOCABULARY
    assert task.answers == tuple("0123456789")
    assert task.chance == 0.1
