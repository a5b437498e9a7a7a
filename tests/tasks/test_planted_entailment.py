"""Planted entailment: labels from the words, and neither text alone tells them."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from tasks.planted_entailment import PlantedEntailment
from tasks.planted_texts import PlantedTextsConfig

CONTRACT_EXAMPLES = {"": lambda folder: PlantedEntailment(PlantedTextsConfig())}


def concept_of(word):
    return int(word.strip("+-?c").split(".")[0])


def synonym_of(word):
    return int(word.strip("?").split(".")[1])


def label_of(hypothesis, premise):
    """The label by plain reading: what is stated must not be denied, and must be affirmed."""
    stated = {concept_of(word) for word in hypothesis if word.endswith("?")}
    said = {(word[0], concept_of(word)) for word in premise if not word.startswith("f")}
    if any(("-", concept) in said for concept in stated):
        return "contradiction"
    return "entailment" if all(("+", concept) in said for concept in stated) else "neutral"


@pytest.mark.parametrize("split", PlantedEntailment.SPLITS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_concepts": 8, "n_asked": 4, "n_others": 1, "held_out": 0.5},
        {"n_concepts": 8, "n_synonyms": 3},
    ],
)
def test_labels_follow_from_the_words(split, changes):
    task = PlantedEntailment(PlantedTextsConfig(**changes))
    batch = task.batch(split, 2, 300)
    known = set(map(tuple, task.combinations(split).tolist()))
    for i in range(300):
        hypothesis, premise = task.words(batch, i)
        label = task.classes[batch.targets[i, 0]]
        assert label == label_of(hypothesis, premise)
        total = {"entailment": 0, "contradiction": 2, "neutral": 1}[label]
        assert batch.latents["sign"][i].sum() == task.config.n_asked - total
        stated = sorted(concept_of(word) for word in hypothesis if word.endswith("?"))
        assert tuple(stated) in known
    assert torch.equal(batch.latents["kind"], batch.targets[:, 0])


def test_pairs_of_synonyms_are_shared_out():
    """Of three words each: training has all pairs of other numbers, `ood` those of the same one."""
    task = PlantedEntailment(PlantedTextsConfig(n_concepts=6, n_asked=2, n_synonyms=3))
    pairs = {}
    for split in task.splits:
        batch = task.batch(split, 0, 2000)
        found = pairs.setdefault(split, set())
        for i in range(2000):
            hypothesis, premise = task.words(batch, i)
            for row, column in batch.latents["sign"][i].nonzero().tolist():
                assert concept_of(hypothesis[row]) == concept_of(premise[column])
                found.add((hypothesis[row], premise[column]))
    for split, found in pairs.items():
        same = {synonym_of(a) == synonym_of(b) for a, b in found}
        assert same == {split == "ood"}
        n_concepts = len(np.unique(task.combinations(split)))
        # Affirmed and denied.
        assert len(found) == n_concepts * 2 * (3 if split == "ood" else 6)


def test_training_asks_for_every_concept():
    for seed in range(20):  # the first draw of seed 10 leaves a concept in `ood` alone
        config = PlantedTextsConfig(n_concepts=4, n_asked=2, n_others=1, held_out=0.5, seed=seed)
        assert set(PlantedEntailment(config).combinations("train").ravel()) == set(range(4))
    with pytest.raises(ValueError, match=r"leave all 4 concepts .* got 0.9, which leaves 1 sets"):
        PlantedTextsConfig(n_concepts=4, n_asked=2, n_others=1, held_out=0.9)


def test_two_synonyms_are_refused():
    with pytest.raises(ValueError, match="n_synonyms must be 1 or an integer from 3 to 20, got 2"):
        PlantedTextsConfig(n_synonyms=2)


def test_labels_are_equally_frequent():
    task = PlantedEntailment(PlantedTextsConfig())
    counts = task.batch("id", 0, 9000).targets[:, 0].bincount()
    assert len(counts) == 3
    assert (counts / 9000 - 1 / 3).abs().max() < 5 * (2 / 9 / 9000) ** 0.5
    assert task.chance("id") == 1 / 3


@pytest.mark.parametrize("side", [0, 1])
def test_words_of_one_text_alone_do_not_tell_the_label(side):
    task = PlantedEntailment(PlantedTextsConfig())
    bags, labels = [], []
    for index in (0, 1):
        batch = task.batch("id", index, 6000)
        words = torch.nn.functional.one_hot(batch.inputs[side], task.vocabulary_size)
        bags.append(words.sum(1)[:, 1:].double().numpy())
        labels.append(batch.targets[:, 0].numpy())
    model = LogisticRegression(max_iter=200).fit(bags[0], labels[0])
    assert abs(model.score(bags[1], labels[1]) - 1 / 3) < 5 * (2 / 9 / 6000) ** 0.5


def test_a_set_that_a_premise_affirms_leaves_a_trace_of_the_held_out_ones():
    """What the docstring of `PlantedTexts` says of `train`, `id` and `ood`."""
    config = PlantedTextsConfig()
    task = PlantedEntailment(config)
    of_training = {tuple(row) for row in task.combinations("train").tolist()}

    def share_of_training(split, kind):
        batch = task.batch(split, 0, 3000)
        found = []
        for sign, words in zip(batch.latents["kind"].tolist(), batch.inputs[1], strict=True):
            n = config.n_concepts
            concepts = (words - 1) // config.n_synonyms
            affirmed = sorted((concepts[(n <= concepts) & (concepts < 2 * n)] - n).tolist())
            if sign == kind and len(affirmed) == config.n_asked:
                found.append(tuple(affirmed) in of_training)
        return sum(found) / len(found)

    assert share_of_training("id", 0) == 1
    assert share_of_training("ood", 0) == 0
    for split in ("id", "ood"):
        for kind in (1, 2):
            assert 0.65 < share_of_training(split, kind) < 0.85


def test_the_words_of_a_text_are_in_random_order():
    task = PlantedEntailment(PlantedTextsConfig(most_fillers=0))
    texts = task.batch("id", 0, 200).inputs[0].tolist()
    assert any(first > second for text in texts for first, second in pairwise(text))
