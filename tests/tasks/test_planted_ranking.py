"""Planted ranking: compared with plain loops; neither question nor answer alone tells the label."""

from itertools import combinations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from tasks.planted_ranking import PlantedRanking, PlantedRankingConfig

CONTRACT_EXAMPLES = {"": lambda folder: PlantedRanking(PlantedRankingConfig())}


def task_of(**changes):
    return PlantedRanking(PlantedRankingConfig(**changes))


def read(word):
    """What a word does, and to which concept."""
    if word.startswith("f"):
        return "filler", int(word[1:])
    if word.endswith("?"):
        return "asks", int(word[1:-1])
    return {"+": "affirms", "-": "denies"}[word[0]], int(word[2:])


@pytest.mark.parametrize("split", PlantedRanking.SPLITS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_concepts": 6, "n_asked": 2, "n_others": 3, "n_answers": 3, "most_fillers": 0},
        {"n_concepts": 8, "n_asked": 4, "n_others": 1, "n_answers": 2, "held_out": 0.5},
    ],
)
def test_labels_and_signs_follow_from_the_words(split, changes):
    task = task_of(**changes)
    config, batch = task.config, task.batch(split, 1, 201)
    latents = {name: values.tolist() for name, values in batch.latents.items()}
    known, kinds = set(map(tuple, task.combinations(split).tolist())), set()
    best = {}
    for i in range(201):
        a, b = task.words(batch, i)
        assert (len(a), len(b)) == (latents["length_a"][i], latents["length_b"][i])
        assert (batch.inputs[0][i] > 0).tolist() == [
            at < len(a) for at in range(batch.inputs[0].shape[1])
        ]
        question, answer = ([read(word) for word in text] for text in (a, b))
        asked = {concept for what, concept in question if what == "asks"}
        assert tuple(sorted(asked)) in known
        assert task.combinations(split)[latents["combination"][i]].tolist() == sorted(asked)
        total = 0
        for row, (what, concept) in enumerate(question):
            for column, (does, other) in enumerate(answer):
                sign = 0
                if what == "asks" and concept == other:
                    sign = {"affirms": 1, "denies": -1}.get(does, 0)
                assert latents["sign"][i][row][column] == sign
                total += sign
        assert batch.targets[i, 0] == (total == config.n_asked)
        about = [concept for what, concept in answer if what != "filler"]
        assert len(about) == len(set(about)) == config.n_asked + config.n_others
        assert total == config.n_asked - latents["kind"][i] % 3 * (
            2 if latents["kind"][i] == 1 else 0.5
        )
        kinds.add(latents["kind"][i])
        best.setdefault(latents["question"][i], []).append((total, tuple(sorted(asked))))
    assert kinds == {0, 1, 2}
    for number, answers in best.items():
        totals = [total for total, _ in answers]
        assert totals[0] == config.n_asked > max([*totals[1:], 0])
        assert len({asked for _, asked in answers}) == 1
        assert len(answers) == min(config.n_answers, 201 - number * config.n_answers)


def test_splits_share_out_all_sets_of_concepts():
    task = task_of(n_concepts=8)
    train, ood = (set(map(tuple, task.combinations(split).tolist())) for split in ("train", "ood"))
    assert train | ood == set(combinations(range(8), 3))
    assert not train & ood
    assert len(ood) == 14
    assert np.array_equal(task.combinations("id"), task.combinations("train"))
    assert task_of(n_concepts=8, seed=1).combinations("ood").tolist() != sorted(map(list, ood))


@pytest.mark.parametrize("split", ["id", "ood"])
def test_neither_side_alone_tells_the_label(split):
    task = task_of(n_answers=2)
    bags, labels = {}, {}
    for name, index in (("train", 0), (split, 1)):
        batch = task.batch(name, index, 8000)
        a, b = (
            torch.nn.functional.one_hot(text, task.vocabulary_size).sum(1)[:, 1:].double().numpy()
            for text in batch.inputs
        )
        denials = b[:, 40:60].sum(1, keepdims=True)
        # What each asked concept's words say of it.
        rule = (a[:, :20] * (b[:, 20:40] - b[:, 40:60])).sum(1, keepdims=True)
        bags[name] = {"a": a, "b": np.hstack([b, denials]), "both": np.hstack([a, b]), "rule": rule}
        labels[name] = batch.targets[:, 0].numpy()
    for side in ("a", "b", "both", "rule"):
        model = LogisticRegression(max_iter=200).fit(bags["train"][side], labels["train"])
        accuracy = model.score(bags[split][side], labels[split])
        assert accuracy == 1 if side == "rule" else abs(accuracy - 0.5) < 5 * 0.5 / 8000**0.5


def test_answers_have_as_many_denials():
    task = task_of()
    batch = task.batch("train", 0, 20_000)
    denials = ((batch.inputs[1] > 40) & (batch.inputs[1] <= 60)).sum(1)
    kinds = batch.latents["kind"]
    for kind in range(3):
        assert denials[kinds == kind].unique().tolist() == [1, 2]
        assert denials[kinds == kind].float().mean() == pytest.approx(1.5, abs=0.03)
    assert (kinds == 0).float().mean() == 1 / 4 == 1 - task.chance("id")


def test_score_and_groups():
    task = task_of()
    batch = task.batch("id", 0, 40)
    logits = torch.nn.functional.one_hot(batch.targets, 2).double()
    logits[:4] *= -1
    assert task.score(logits, batch)["correct"].tolist() == [0] * 4 + [1] * 36
    groups = torch.stack(list(task.groups(batch).values()))
    assert (groups.sum(0) == 1).all()
    assert torch.equal(groups[0], batch.targets[:, 0].bool())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_concepts": 3}, "n_concepts must be an integer from 4 to 1000, got 3"),
        ({"n_asked": 11}, "n_asked must be an integer from 2 to 10, got 11"),
        ({"n_concepts": 1000, "n_asked": 4}, "n_asked must make at most 1000000 sets"),
        ({"n_others": 17}, "n_others must be an integer from 1 to 16, got 17"),
        ({"n_answers": 1}, "n_answers must be an integer from 2 to 100, got 1"),
        ({"held_out": 0.0}, "held_out must leave items on both sides"),
        ({"most_fillers": -1}, "most_fillers must be an integer from 0 to 100, got -1"),
    ],
)
def test_a_bad_config_says_what_is_allowed(changes, message):
    with pytest.raises(ValueError, match=message):
        task_of(**changes)
