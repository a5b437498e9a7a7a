"""Negated sentiment: compared with plain loops over the words."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from tasks.negated_sentiment import NegatedSentiment, NegatedSentimentConfig

CONTRACT_EXAMPLES = {"": lambda folder: NegatedSentiment(NegatedSentimentConfig())}


def task_of(**changes):
    return NegatedSentiment(NegatedSentimentConfig(**changes))


@pytest.mark.parametrize("split", NegatedSentiment.SPLITS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_polar": 4, "n_values": 1, "n_negators": 1, "words": (1, 1), "share_negated": 1.0},
        {"clauses": (2, 5), "words": (1, 6), "margin": 2, "held_out": 0.25, "share_polar": 1.0},
    ],
)
def test_labels_follow_from_the_words(split, changes):
    task = task_of(**changes)
    config, batch = task.config, task.batch(split, 1, 300)
    latents = {name: values.tolist() for name, values in batch.latents.items()}
    names = {}
    n_clauses, n_words, negated = set(), set(), set()
    for i in range(300):
        words, ids = task.words(batch, i), batch.inputs[i].tolist()
        assert len(words) == latents["length"][i]
        assert not any(ids[len(words) :])
        total, negator, in_clause, clauses = 0, -1, 0, 1
        for at, word in enumerate(words):
            names.setdefault(ids[at], word)
            assert names[ids[at]] == word
            expected = (0, 0, -1)
            if word == ",":
                n_words.add(in_clause)
                negator, in_clause, clauses = -1, 0, clauses + 1
            elif word.startswith("not"):
                assert negator == -1
                negator = at
            else:
                in_clause += 1
                value = int(word[-2:]) if word.startswith("p") else 0
                effect = 0 if not value else 1 if negator < 0 else -1
                expected = (effect, value, negator)
                total += effect * value
                if effect < 0:
                    negated.add(ids[at])
            assert (
                tuple(latents[name][i][at] for name in ("effect", "value", "negator")) == expected
            )
        n_words.add(in_clause)
        n_clauses.add(clauses)
        assert not word.startswith("not")
        assert latents["total"][i] == total
        assert abs(total) >= config.margin
        assert batch.targets[i, 0] == (total > 0)
        assert latents["n_negated"][i] == latents["effect"][i].count(-1)
        new = [
            ids[at] in task.held_out and latents["effect"][i][at] < 0 for at in range(len(words))
        ]
        assert any(new) == (split == "ood")
    assert (min(n_clauses), max(n_clauses)) == config.clauses
    assert (min(n_words), max(n_words)) == config.words
    assert len(negated) > len(task.held_out) / 2
    assert batch.mask.all()


def test_polar_words_are_balanced():
    task = task_of(n_polar=10, n_values=3)
    values = task.values[task.values != 0]
    assert sorted(values) == sorted(-values)
    assert set(np.abs(values)) == {1, 2, 3}
    held_out = task.values[task.held_out]
    assert len(held_out) == 4 == len(set(task.held_out))
    assert held_out.sum() == 0
    assert not np.array_equal(task.held_out, task_of(n_polar=10, n_values=3, seed=1).held_out)


def test_every_polar_word_is_known_in_train_and_half_are_negated():
    task = task_of()
    batch = task.batch("train", 0, 5000)
    effect = batch.latents["effect"]
    first = 2 + task.config.n_negators
    polar = set(range(first, first + task.config.n_polar))
    assert set(batch.inputs[effect == 1].tolist()) == polar
    assert set(batch.inputs[effect == -1].tolist()) == polar - set(task.held_out.tolist())
    other = task.batch("ood", 0, 5000)
    assert set(other.inputs[other.latents["effect"] == -1].tolist()) == polar


@pytest.mark.parametrize("split", NegatedSentiment.SPLITS)
def test_labels_are_as_often_positive(split):
    batch = task_of().batch(split, 3, 20_000)
    assert batch.targets.double().mean() == pytest.approx(0.5, abs=4 * 0.5 / 20_000**0.5)


def test_negation_matters():
    """Bags of words do not do, a linear model of the effects does."""
    task = task_of()
    bags, rules, labels = {}, {}, {}
    for split in ("train", "id", "ood"):
        batch = task.batch(split, 0, 6000)
        hot = torch.nn.functional.one_hot(batch.inputs, task.vocabulary_size).double()
        bags[split] = hot.sum(1)[:, 1:].numpy()
        rules[split] = (batch.latents["effect"][..., None] * hot).sum(1).numpy()
        labels[split] = batch.targets[:, 0].numpy()
    for features, least, most in ((bags, 0.5, 0.8), (rules, 0.97, 1.0)):
        model = LogisticRegression(max_iter=500).fit(features["train"], labels["train"])
        assert least < model.score(features["id"], labels["id"]) <= most
    model = LogisticRegression(max_iter=500).fit(bags["train"], labels["train"])
    assert model.score(bags["ood"], labels["ood"]) < model.score(bags["id"], labels["id"]) - 0.05


def test_score_and_groups():
    task = task_of()
    batch = task.batch("id", 0, 40)
    logits = torch.nn.functional.one_hot(batch.targets, 2).double()
    logits[:4] *= -1
    assert task.score(logits, batch)["correct"].tolist() == [0] * 4 + [1] * 36
    assert (torch.stack(list(task.groups(batch).values())).sum(0) == 1).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_polar": 5}, "n_polar must be even, got 5"),
        ({"n_values": 0}, "n_values must be an integer from 1 to 12, got 0"),
        ({"n_polar": 4, "margin": 3}, "n_values must be an integer from 1 to 2, got 3"),
        ({"n_polar": 400, "n_values": 101}, "n_values must be an integer from 1 to 100, got 101"),
        ({"clauses": (3, 2)}, "clauses must be a pair"),
        ({"words": (0, 2)}, "words must be a pair"),
        ({"share_negated": 0}, "share_negated must be above 0, got 0"),
        ({"share_polar": 1.5}, "share_polar must be a number from 0.01 to 1, got 1.5"),
        ({"share_polar": 1e-12}, "share_polar must be a number from 0.01 to 1, got 1e-12"),
        ({"margin": 4}, "margin must be an integer from 1 to 3, got 4"),
        ({"held_out": 0.05}, "held_out must leave items on both sides"),
    ],
)
def test_a_bad_config_says_what_is_allowed(changes, message):
    with pytest.raises(ValueError, match=message):
        task_of(**changes)


def test_sentences_that_cannot_have_the_margin_are_refused():
    """Each is one word; those that are negated in `ood` only may all have the value 1."""
    changes = {"n_polar": 4, "n_values": 2, "margin": 2, "clauses": (1, 1), "words": (1, 1)}
    tasks = [task_of(**changes, seed=seed) for seed in range(10)]
    values = [set(abs(task.values[task.held_out])) for task in tasks]
    assert tasks[values.index({2})].batch("ood", 0, 5).latents["total"].abs().eq(2).all()
    with pytest.raises(ValueError, match=r"margin must be smaller.* split 'ood'.*, got 2"):
        tasks[values.index({1})].batch("ood", 0, 5)
