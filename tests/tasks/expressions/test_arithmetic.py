"""Arithmetic: compared with Python's, and properties of the sampler."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.common import Key
from tasks.expressions.arithmetic import Arithmetic, ArithmeticConfig
from tasks.expressions.trees import held_out
from tests.tasks.batches import FEW_NESTED, full_batch
from tests.tasks.expressions.expression_reference import check_latents, distinct, parse_infix

CONTRACT_EXAMPLES = {"": lambda folder: Arithmetic(ArithmeticConfig(**FEW_NESTED))}

SMALL = {"n_train": 6_000, "n_id": 1_000, "n_valid": 200, "n_ood": 400}


@pytest.fixture(scope="module")
def task():
    return Arithmetic(ArithmeticConfig(**SMALL))


@pytest.fixture(scope="module")
def texts(task):
    return {split: distinct(task, split) for split in task.splits}


@pytest.mark.parametrize("split", Arithmetic.SPLITS)
def test_answers_are_those_of_python(task, texts, split):
    batch = full_batch(task, split)
    expected = [eval(text) % 10 for text in (task.text(batch, i) for i in range(len(batch)))]
    assert batch.targets[:, 0].tolist() == expected
    assert batch.inputs.shape[1] == 49
    assert batch.latents["length"].tolist() == (batch.inputs >= 0).sum(1).tolist()
    assert batch.latents["edge_used"].sum(1).tolist() == [
        2 * (text.count("+") + text.count("*")) for text in texts_of(task, batch)
    ]


def texts_of(task, batch):
    return [task.text(batch, i) for i in range(len(batch))]


@pytest.mark.parametrize("split", Arithmetic.SPLITS)
def test_latents_are_those_of_a_recursive_reading(task, split):
    batch = task.batch(split, 1, 150)
    for i, text in enumerate(texts_of(task, batch)):
        root = parse_infix(list(text))
        check_latents(batch, i, root)
        assert batch.latents["depth"][i] == root.depth


@settings(deadline=None, max_examples=10)
@given(
    seed=st.integers(0, 2**32 - 1),
    nested=st.sampled_from([0, 0.5, 1.0]),
    side=st.sampled_from(["balanced", "right"]),
    max_length=st.integers(30, 60),
    split=st.sampled_from(Arithmetic.SPLITS),
)
def test_any_task_is_read_alike(seed, nested, side, max_length, split):
    sizes = {"n_train": 8, "n_id": 4, "n_valid": 3, "n_ood": 3}
    depths = {"train_depth": 2, "valid_depths": (3, 3), "ood_depths": (4, 4)}
    config = ArithmeticConfig(
        **sizes, **depths, seed=seed, nested=nested, side=side, max_length=max_length
    )
    task = Arithmetic(config)
    batch = task.batch(split, 0, 4)
    for i, text in enumerate(texts_of(task, batch)):
        assert len(text) <= max_length
        check_latents(batch, i, parse_infix(list(text)))


def test_equal_numbers_of_each_depth(task):
    for split, depths in {
        "train": range(6),
        "id": range(2, 6),
        "valid": [6],
        "ood": [7, 8],
    }.items():
        counts = Counter(full_batch(task, split).latents["depth"].tolist())
        assert counts == dict.fromkeys(depths, task.size(split) // len(depths))
        assert counts == task.config.counts(split)
    assert task.batch("ood", 0, 40).latents["depth"].bincount().tolist()[7:] == [20, 20]
    config = ArithmeticConfig()
    assert sum(config.counts("train").values()) == 100_000
    assert set(config.counts("train").values()) == {16_666, 16_667}


def test_train_and_id_are_disjoint_and_evaluation_has_no_repeats(task, texts):
    assert not set(texts["id"]) & set(texts["train"])
    for split in ("id", "valid", "ood"):
        assert len(set(texts[split])) == task.size(split)
    # All that there are of depth 0, and nearly all of depth 1: none of them can be held out.
    assert {text for text in texts["train"] if len(text) == 1} == set("0123456789")
    shallow = {text for text in texts["train"] if len(text) == 5}
    assert 190 <= len(shallow) <= 200


def test_the_hash_holds_out_a_tenth_of_the_sequences(task):
    tokens = full_batch(task, "ood").inputs.numpy()
    shares = []
    for seed in range(20):
        held = held_out(tokens, Key(ArithmeticConfig(seed=seed)))
        shares.append(held.mean())
    assert sum(shares) / 20 == pytest.approx(0.1, abs=5 * (0.09 / 8000) ** 0.5)


def sides(task):
    """Return, for each operation with sides of unequal depth, whether the right one is deeper."""
    batch = full_batch(task, "train")
    actual = []
    for text in set(texts_of(task, batch)):
        for node in parse_infix(list(text)).all():
            if node.arguments and node.arguments[0].depth != node.arguments[1].depth:
                actual.append(node.arguments[1].depth > node.arguments[0].depth)
    return actual


def test_the_deeper_side():
    few = {"n_train": 2_000}
    actual = sides(Arithmetic(ArithmeticConfig(**few)))
    assert len(actual) > 1500
    assert sum(actual) / len(actual) == pytest.approx(0.5, abs=5 * 0.5 / len(actual) ** 0.5)
    assert all(sides(Arithmetic(ArithmeticConfig(**few, side="right"))))


def test_the_other_side_is_an_operation_as_often_as_it_should():
    # Depth 2 and 3, of which nothing is too long. Of depth 3, the other side's operation has
    # depth 1 or 2 with equal probability.
    task = Arithmetic(ArithmeticConfig(n_train=12_000, train_depth=3, valid_depths=(4, 4)))
    batch = full_batch(task, "train")
    other = {2: Counter(), 3: Counter()}
    for text, depth in zip(texts_of(task, batch), batch.latents["depth"].tolist(), strict=True):
        if depth >= 2:
            left, right = (node.depth for node in parse_infix(list(text)).arguments)
            assert max(left, right) == depth - 1
            other[depth][min(left, right)] += 1
    for depth, expected in {2: {0: 0.8, 1: 0.2}, 3: {0: 0.8, 1: 0.1, 2: 0.1}}.items():
        for shallower, share in expected.items():
            actual = other[depth][shallower] / other[depth].total()
            assert actual == pytest.approx(share, abs=5 * (share * (1 - share) / 3_000) ** 0.5)


def test_symbols_and_digits_are_uniform(task):
    counts = full_batch(task, "ood").inputs.flatten()
    counts = counts[counts >= 0].bincount(minlength=14)
    for part in (counts[:10], counts[10:12]):
        expected = part.sum() / len(part)
        chi_squared = ((part - expected) ** 2 / expected).sum().item()
        freedom = len(part) - 1
        assert chi_squared < freedom + 5 * (2 * freedom) ** 0.5


def test_the_seed_chooses_the_expressions():
    first, again, other = (
        distinct(Arithmetic(ArithmeticConfig(**SMALL, seed=seed)), "valid") for seed in (1, 1, 2)
    )
    assert first == again != other


def test_too_many_distinct_expressions_are_an_error(monkeypatch):
    monkeypatch.setattr("tasks.expressions.trees._FRUITLESS_CHUNKS", 2)
    config = ArithmeticConfig(
        train_depth=2, valid_depths=(3, 3), ood_depths=(4, 4), n_id=3_000, nested=0
    )
    with pytest.raises(ValueError, match=r"expressions of id/depth 2 must be at most .* got 3000"):
        Arithmetic(config).size("id")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_train": 5}, "n_train must be an integer from 6 to .*, got 5"),
        ({"n_id": 0}, "n_id must be .*, got 0"),
        ({"n_ood": 1.5}, "n_ood must be .*, got 1.5"),
        ({"train_depth": 1}, "train_depth must be .*, got 1"),
        ({"valid_depths": (5, 6)}, r"valid_depths must be .* 6 <= first .*, got \(5, 6\)"),
        ({"ood_depths": (7,)}, r"ood_depths must be a pair .*, got \(7,\)"),
        ({"nested": 1.5}, "nested must be a number from 0 to 1, got 1.5"),
        ({"nested": float("nan")}, "nested must be .*, got nan"),
        ({"nested": 1.0}, r"nested must be below 1 .* got 1.0: .* of depth 8 then has 61 tokens"),
        ({"side": "left"}, "side must be one of balanced, right, got 'left'"),
        ({"max_length": 32}, "max_length must be an integer from 33 to 120, got 32"),
        ({"seed": -1}, "seed must be .*, got -1"),
    ],
)
def test_a_bad_config_says_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        ArithmeticConfig(**arguments)


def test_a_batch_has_the_tokens_named_by_the_vocabulary(task):
    assert task.vocabulary == tuple("0123456789+*()")
    assert task.answers == tuple("0123456789")
    assert task.chance == 0.1
    batch = task.batch("valid", 0, 1)
    ids = [task.vocabulary.index(token) for token in task.text(batch, 0)]
    padding = [-1] * (49 - len(ids))
    assert torch.equal(batch.inputs, torch.tensor([ids + padding]))


@pytest.mark.parametrize("split", ["id", "valid", "ood"])
def test_zero_is_the_most_frequent_answer(task, split):
    shares = full_batch(task, split).targets[:, 0].bincount(minlength=10) / task.size(split)
    assert shares.argmax() == 0
    assert 0.2 < shares[0] < 0.33
    assert shares[1:].max() < 0.15


def test_the_shortest_expressions_without_literals_beside_operations_just_fit():
    sizes = {"n_train": 200, "n_id": 5, "n_valid": 5, "n_ood": 5}
    depths = {"train_depth": 2, "valid_depths": (3, 3), "ood_depths": (4, 4)}
    with pytest.raises(ValueError, match="shortest expression of depth 4 then has 29 tokens"):
        ArithmeticConfig(**sizes, **depths, nested=1, max_length=28)
    task = Arithmetic(ArithmeticConfig(**sizes, **depths, nested=1, max_length=29))
    assert task.batch("ood", 0, 5).latents["length"].tolist() == [29] * 5
