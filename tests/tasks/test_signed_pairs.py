"""Signed pairs: compared with plain loops; neither A nor B alone determines the label."""

from itertools import combinations, product

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from tasks.signed_pairs import SignedPairs, SignedPairsConfig

CONTRACT_EXAMPLES = {"": lambda folder: SignedPairs(SignedPairsConfig())}


def task_of(**changes):
    return SignedPairs(SignedPairsConfig(**changes))


def read(config, a, b):
    """Decode ids: (key, polarity) of A, (key, value) of B, and the size of the vocabulary."""
    tokens = [("pad", 0)]
    tokens += [(key, sign) for key in range(config.n_keys) for sign in (1, -1)]
    sizes = [*range(-config.n_values, 0), *range(1, config.n_values + 1)]
    tokens += [(key, size) for key in range(config.n_keys) for size in sizes]
    return [tokens[token] for token in a], [tokens[token] for token in b], len(tokens)


@pytest.mark.parametrize("split", SignedPairs.SPLITS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_a": 2, "n_b": 2, "n_values": 1},
        {"n_keys": 3, "n_a": 2, "n_b": 5, "margin": 3},
        {"n_keys": 4, "n_a": 3, "n_b": 9, "n_values": 7, "held_out": 0.5},
    ],
)
def test_labels_follow_from_the_tokens(split, changes):
    """Reference: look the key up, add or subtract, compare with 0."""
    task = task_of(**changes)
    config = task.config
    batch = task.batch(split, 1, 200)
    latents = {name: values.tolist() for name, values in batch.latents.items()}
    n_counting = set()
    for i in range(200):
        a, b, size = read(config, *(part[i].tolist() for part in batch.inputs))
        assert size == task.vocabulary_size
        assert (len(a), len(b)) == (config.n_a, config.n_b)
        polarity = dict(a)
        assert len(polarity) == config.n_a
        total = sum(polarity.get(key, 0) * value for key, value in b)
        assert latents["total"][i] == total
        assert abs(total) >= config.margin
        assert batch.targets[i, 0] == (total > 0)
        sign = [[polarity[key] if key == other else 0 for other, _ in b] for key in polarity]
        assert latents["sign"][i] == sign
        assert list(zip(latents["key_a"][i], latents["polarity"][i], strict=True)) == a
        assert list(zip(latents["key_b"][i], latents["value"][i], strict=True)) == b
        known = task.combinations(split)[latents["combination"][i]].tolist()
        assert known == sorted(batch.inputs[0][i].tolist())
        n_counting.add(sum(key in polarity for key, _ in b))
    assert n_counting == {(config.n_b + 1) // 2}
    assert batch.mask.all()
    assert batch.targets.dtype == batch.inputs[0].dtype == batch.inputs[1].dtype == torch.int64


@pytest.mark.parametrize(("n_keys", "n_a"), [(8, 3), (3, 2), (4, 3)])
def test_splits_share_out_all_sets_of_tokens(n_keys, n_a):
    task = task_of(n_keys=n_keys, n_a=n_a)
    train, ood = (set(map(tuple, task.combinations(split).tolist())) for split in ("train", "ood"))
    every = {
        tuple(1 + 2 * key + negative for key, negative in zip(keys, signs, strict=True))
        for keys in combinations(range(n_keys), n_a)
        for signs in product((0, 1), repeat=n_a)
    }
    assert train | ood == every
    assert not train & ood
    assert len(ood) == task.config.n_ood == len(every) // 8 * 2
    assert task.combinations("id").tolist() == task.combinations("train").tolist()
    # The opposite polarities are always on the same side.
    for side in (train, ood):
        assert {tuple((token - 1 ^ 1) + 1 for token in tokens) for tokens in side} == side
    assert task_of(n_keys=n_keys, n_a=n_a, seed=1).combinations("ood").tolist() != sorted(ood)


def test_every_token_of_a_is_known_in_train():
    assert set(task_of().combinations("train").ravel()) == set(range(1, 17))
    for seed in range(20):  # the first draw of seed 7 leaves a token in `ood` alone
        task = task_of(n_keys=4, n_a=2, held_out=0.7, seed=seed)
        assert set(task.combinations("train").ravel()) == set(range(1, 9))


def bags(tokens, size):
    return torch.nn.functional.one_hot(tokens, size).sum(1).double().numpy()


@pytest.mark.parametrize("split", ["id", "ood"])
def test_neither_side_alone_tells_the_label(split):
    """Bags of tokens of A, B and both are at chance; a linear model of the signed values is not."""
    task = task_of()
    train, test = task.batch("train", 0, 8000), task.batch(split, 0, 8000)
    seen = {}
    for batch in (train, test):
        a, b = (bags(part, task.vocabulary_size) for part in batch.inputs)
        net = batch.latents["sign"].sum(1) * batch.latents["value"]
        seen[batch] = {
            **{"a": a, "b": b, "both": np.hstack([a, b])},
            **{"sum of b": batch.latents["value"].sum(1, keepdim=True).double().numpy()},
            "rule": net.double().numpy(),
        }
    labels = [batch.targets[:, 0].numpy() for batch in (train, test)]
    for name in seen[train]:
        model = LogisticRegression(max_iter=200).fit(seen[train][name], labels[0])
        accuracy = model.score(seen[test][name], labels[1])
        if name == "rule":
            assert accuracy > 0.99
        else:
            assert abs(accuracy - 0.5) < 5 * 0.5 / 8000**0.5, name


def test_ignoring_and_subtracting_matter():
    """Accuracy is low if A is not used to ignore or to subtract."""
    batch = task_of().batch("id", 0, 8000)
    sign, value = batch.latents["sign"].sum(1), batch.latents["value"]
    label = batch.targets[:, 0].bool()
    without = {
        "ignoring": torch.where(sign == 0, 1, sign),
        "subtracting": sign.abs(),
    }
    right = {name: ((s * value).sum(1) > 0) == label for name, s in without.items()}
    assert right["ignoring"].double().mean() < 0.8
    assert abs(right["subtracting"].double().mean() - 0.5) < 0.05


def test_labels_and_values_are_balanced():
    batch = task_of(margin=4).batch("ood", 0, 20_000)
    assert batch.targets.double().mean() == pytest.approx(0.5, abs=5 * 0.5 / 20_000**0.5)
    counts = batch.latents["value"].unique(return_counts=True)[1].double()
    assert torch.allclose(counts, counts.flip(0), rtol=0.05)
    places = (batch.latents["sign"] != 0).any(1).double().mean(0)
    assert torch.allclose(places, torch.tensor(0.5, dtype=places.dtype), atol=0.02)
    others = batch.latents["key_b"].flatten().bincount(minlength=8).double()
    assert torch.allclose(others, others.mean(), rtol=0.15)


def test_batches_depend_on_the_config_and_their_number_alone():
    late = task_of().batch("train", 2**40, 5)
    assert torch.equal(late.inputs[1], task_of().batch("train", 2**40, 5).inputs[1])
    assert not torch.equal(late.inputs[1], task_of(seed=1).batch("train", 2**40, 5).inputs[1])


@pytest.mark.parametrize("split", SignedPairs.SPLITS)
def test_words_tell_the_planted_signs(split):
    task = task_of()
    batch = task.batch(split, 0, 20)
    for example in range(20):
        a_words, b_words = task.words(batch, example)
        signs = [
            [int(f"{a_word[-1]}1") if a_word[:-1] == b_word.split()[0] else 0 for b_word in b_words]
            for a_word in a_words
        ]
        assert batch.latents["sign"][example].tolist() == signs
        total = sum(
            row[j] * int(b_word.split()[1]) for row in signs for j, b_word in enumerate(b_words)
        )
        assert batch.latents["total"][example] == total


def test_words_of_many_keys_have_numbers_behind_the_letters():
    task = task_of(n_keys=40, n_a=2, n_b=200)
    batch = task.batch("train", 0, 1)
    _, asked = task.words(batch, 0)
    keys = {
        key: word.split()[0]
        for key, word in zip(batch.latents["key_b"][0].tolist(), asked, strict=True)
    }
    assert {keys[key] for key in keys if key >= 26} == {f"k{key}" for key in keys if key >= 26}
    assert keys.get(25, "z") == "z"
    assert len(set(keys.values())) == len(keys) > 20


def test_score():
    task = task_of()
    batch = task.batch("id", 0, 40)
    logits = torch.nn.functional.one_hot(batch.targets, 2).double()
    assert (task.score(logits, batch)["correct"] == 1).all()
    assert (task.score(-logits, batch)["correct"] == 0).all()
    with pytest.raises(ValueError, match=r"logits must have shape \(40, 1, 2\), got \(40, 2\)"):
        task.score(logits[:, 0], batch)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_keys": 2}, r"n_keys must be an integer from 3 to 1000, got 2"),
        ({"n_a": 1}, r"n_a must be an integer from 2 to 7, got 1"),
        (
            {"n_keys": 40, "n_a": 6},
            r"n_a must make at most 1000000 sets of tokens, got 6 with n_keys=40",
        ),
        ({"n_b": 1}, r"n_b must be .*, got 1"),
        ({"n_values": 0}, r"n_values must be .*, got 0"),
        ({"margin": 5}, r"margin must be an integer from 1 to 4, got 5"),
        ({"held_out": 0.001}, r"held_out must .* got 0.001, which holds out 0 of the 448 sets"),
        ({"held_out": 1.0}, r"held_out must leave .*, got 1.0"),
        (
            {"n_keys": 4, "n_a": 2, "held_out": 0.95},
            r"held_out must leave all 8 tokens of A .*, got 0.95, which leaves 2 sets of 2",
        ),
        ({"seed": 2**32}, r"seed must be .*, got 4294967296"),
    ],
)
def test_a_bad_config_says_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        SignedPairsConfig(**arguments)


def test_an_unknown_split_is_an_error():
    with pytest.raises(
        ValueError, match=r"split must be one of train, id, ood, got 'oob'; nearest: 'ood'"
    ):
        task_of().batch("oob", 0, 1)


# Counterfactuals


@pytest.mark.parametrize("name", ["key_a", "polarity", "key_b", "value"])
def test_labels_follow_from_the_tokens_that_are_set(name):
    task = task_of(margin=2)
    base, source = (task.batch("id", index, 300) for index in (0, 1))
    width = base.latents[name].shape[1]
    exchanged = torch.arange(width) == torch.arange(300)[:, None] % width
    given = torch.where(exchanged, source.latents[name], base.latents[name])
    wanted = task.counterfactual(base, {name: given})
    sides = [task.combinations(split).tolist() for split in ("train", "ood")]
    sums, known = set(), set()
    for i in range(300):
        a, b, _ = read(task.config, *(part[i].tolist() for part in wanted.inputs))
        total = sum(p * value for key, p in a for other, value in b if key == other)
        assert wanted.latents["total"][i] == total
        assert wanted.targets[i, 0] == (total > 0)
        assert wanted.mask[i, 0] == (abs(total) >= 2)
        sums.add(abs(total) >= 2)
        row = sorted(wanted.inputs[0][i].tolist())
        where = [side.index(row) for side in sides if row in side]
        assert wanted.latents["combination"][i].tolist() == (where or [-1])[0]
        known.add(tuple(row in side for side in sides))
    assert sums == {True, False}
    assert (len(known) > 1) == (name in ("key_a", "polarity"))
    assert torch.equal(wanted.latents[name], given)


def test_signs_and_totals_are_set_in_between():
    task = task_of()
    base = task.batch("id", 0, 100)
    total = -base.latents["total"]
    wanted = task.counterfactual(base, {"total": total})
    assert torch.equal(wanted.targets, 1 - base.targets)
    assert all(map(torch.equal, wanted.inputs, base.inputs))
    sign = base.latents["sign"].clone()
    sign[:, 1, 4] = 1
    wanted = task.counterfactual(base, {"sign": sign})
    expected = torch.einsum("nab,nb->n", sign, base.latents["value"])
    assert torch.equal(wanted.latents["total"], expected)
    assert torch.equal(wanted.targets[:, 0], (expected > 0).long())
    assert torch.equal(wanted.mask[:, 0], expected != 0)
    assert all(map(torch.equal, wanted.inputs, base.inputs))
    assert (expected != base.latents["total"]).any()
    with pytest.raises(ValueError, match=r"polarity'\] must be -1 or 1 where .* got 0"):
        task.counterfactual(base, {"polarity": torch.zeros_like(base.latents["polarity"])})
    with pytest.raises(ValueError, match=r"value'\] must be integers from -4 to 4 but 0 .* got 0"):
        task.counterfactual(base, {"value": torch.zeros_like(base.latents["value"])})
