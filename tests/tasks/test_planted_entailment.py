"""Planted entailment: labels from the words, and neither text alone tells them."""

from itertools import pairwise

import pytest
import torch
from sklearn.linear_model import LogisticRegression

from tasks.planted_entailment import PlantedEntailment
from tasks.planted_texts import PlantedTextsConfig

CONTRACT_EXAMPLES = {"": lambda folder: PlantedEntailment(PlantedTextsConfig())}


def label_of(hypothesis, premise):
    """The label by plain reading: what is stated must not be denied, and must be affirmed."""
    stated = {word[:-1] for word in hypothesis if word.endswith("?")}
    if any(f"-{concept}" in premise for concept in stated):
        return "contradiction"
    return "entailment" if all(f"+{concept}" in premise for concept in stated) else "neutral"


@pytest.mark.parametrize("split", PlantedEntailment.SPLITS)
@pytest.mark.parametrize(
    "changes", [{}, {"n_concepts": 8, "n_asked": 4, "n_others": 1, "held_out": 0.5}]
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
        stated = sorted(int(word[1:-1]) for word in hypothesis if word.endswith("?"))
        assert tuple(stated) in known
    assert torch.equal(batch.latents["kind"], batch.targets[:, 0])


def test_labels_are_equally_frequent():
    task = PlantedEntailment(PlantedTextsConfig())
    counts = task.batch("id", 0, 9000).targets[:, 0].bincount()
    assert len(counts) == 3
    assert (counts / 9000 - 1 / 3).abs().max() < 5 * (2 / 9 / 9000) ** 0.5
    assert task.chance("id") == 1 / 3


@pytest.mark.parametrize("side", [0, 1])
def test_neither_text_alone_tells_the_label(side):
    task = PlantedEntailment(PlantedTextsConfig())
    bags, labels = [], []
    for index in (0, 1):
        batch = task.batch("id", index, 6000)
        words = torch.nn.functional.one_hot(batch.inputs[side], task.vocabulary_size)
        bags.append(words.sum(1)[:, 1:].double().numpy())
        labels.append(batch.targets[:, 0].numpy())
    model = LogisticRegression(max_iter=200).fit(bags[0], labels[0])
    assert abs(model.score(bags[1], labels[1]) - 1 / 3) < 5 * (2 / 9 / 6000) ** 0.5


def test_the_words_of_a_text_are_in_random_order():
    task = PlantedEntailment(PlantedTextsConfig(most_fillers=0))
    texts = task.batch("id", 0, 200).inputs[0].tolist()
    assert any(first > second for text in texts for first, second in pairwise(text))
