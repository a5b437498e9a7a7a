"""Fact questions: answers, support and signs against a solver that reads the words."""

from itertools import chain

import numpy as np
import pytest
import torch

from tasks.fact_questions import FactQuestions, FactQuestionsConfig

CONTRACT_EXAMPLES = {"": lambda folder: FactQuestions(FactQuestionsConfig())}
CHANGES = [
    {},
    {"n_paragraphs": 3, "n_facts": 3, "n_entities": 12, "n_relations": 4, "held_out": 0.5},
    {"two_facts": 1.0, "n_paragraphs": 6},
    {"two_facts": 0},
]


def task_of(**changes):
    return FactQuestions(FactQuestionsConfig(**changes))


def read_facts(words):
    """The facts of a passage: positions of subject, relation and object, by paragraph."""
    paragraphs, position = [], 0
    while position < len(words):
        if words[position] == "¶":
            paragraphs.append([])
            position += 1
            continue
        fact = []
        for part in ("name", "relation", "name"):
            length = 1
            if part == "name":
                assert words[position].startswith("e")
                length += int(words[position][1:]) % 2
                if length == 2:
                    assert words[position + 1] == f"f{words[position][1:]}"
            else:
                assert words[position].startswith("r")
            fact.append(list(range(position, position + length)))
            position += length
        paragraphs[-1].append(fact)
    return paragraphs


def solve(passage, question):
    """The facts that a question needs, and the words of its relations in their order."""
    relations = [word for word in question if word.startswith("r")]
    name = question[len(relations) :]
    facts = [fact for paragraph in read_facts(passage) for fact in paragraph]
    needed = []
    for relation in reversed(relations):
        (fact,) = (
            fact
            for fact in facts
            if [passage[i] for i in fact[0]] == name and passage[fact[1][0]] == relation
        )
        needed.append(fact)
        name = [passage[i] for i in fact[2]]
    return needed, relations[::-1], name


@pytest.mark.parametrize("split", FactQuestions.SPLITS)
@pytest.mark.parametrize("changes", CHANGES)
def test_answers_and_what_supports_them_are_those_of_a_solver(split, changes):
    task = task_of(**changes)
    batch = task.batch(split, 1, 150)
    latents = {name: values.tolist() for name, values in batch.latents.items()}
    combinations = set(map(tuple, task.combinations(split).tolist()))
    for i in range(150):
        passage, question = task.words(batch, i)
        assert batch.inputs[0][i].bool().sum() == len(passage)
        assert batch.inputs[0][i, : len(passage)].all()
        needed, relations, name = solve(passage, question)
        answer = needed[-1][2]
        assert batch.targets[i].tolist() == [answer[0], answer[-1]]
        assert latents["hops"][i] == len(needed)
        assert f"e{latents['answer'][i]}" == name[0]
        numbers = [int(relation[1:]) for relation in relations]
        assert latents["relation"][i] == [*numbers, -1][:2]
        assert f"e{latents['subject'][i]}" == question[len(relations)]
        if len(needed) == 2:
            pair = tuple(numbers)
            assert pair in combinations
            assert tuple(task.combinations(split)[latents["combination"][i]]) == pair
            assert f"e{latents['bridge'][i]}" == passage[needed[1][0][0]]
        else:
            assert split != "ood"
            assert latents["combination"][i] == latents["bridge"][i] == -1
        places = [-1] * batch.inputs[0].shape[1]
        for number, fact in enumerate(chain(*read_facts(passage))):
            for position in chain(*fact):
                places[position] = number
        assert latents["fact"][i] == places
        support = [0] * batch.inputs[0].shape[1]
        signs = np.zeros((len(support), 4), int)
        for number, fact in enumerate(needed):
            for position in chain(*fact):
                support[position] = number + 1
            signs[fact[1][0], len(needed) - 1 - number] = 1
        for word in range(len(needed), len(question)):
            signs[needed[0][0][word - len(needed)], word] = 1
        assert latents["support"][i] == support
        assert np.array_equal(latents["sign"][i], signs)


@pytest.mark.parametrize("changes", CHANGES)
def test_passages_are_as_documented(changes):
    task = task_of(**changes)
    config, batch = task.config, task.batch("train", 0, 200)
    links = 0
    for i in range(200):
        words, question = task.words(batch, i)
        paragraphs = read_facts(words)
        assert len(paragraphs) == config.n_paragraphs
        subjects = [{words[fact[0][0]] for fact in facts} for facts in paragraphs]
        assert all(len(one) == 1 for one in subjects)
        assert len(set.union(*subjects)) == config.n_paragraphs
        others = []
        for facts in paragraphs:
            assert len({words[fact[1][0]] for fact in facts}) == len(facts) == config.n_facts
            for fact in facts:
                assert fact[2] != fact[0]
                others.append(words[fact[2][0]])
        fresh = [name for name in others if name not in set.union(*subjects)]
        assert len(set(fresh)) == len(fresh)
        links += len(others) - len(fresh)
        # The relation alone does not determine the answer.
        same = [facts for facts in paragraphs if question[0] in {words[f[1][0]] for f in facts}]
        assert len(same) >= 2
    share = links / (200 * config.n_paragraphs * config.n_facts)
    n_forced = batch.latents["hops"].double().mean() - 1
    expected = 0.5 + 0.5 * n_forced / (config.n_paragraphs * config.n_facts)
    assert abs(share - expected) < 0.06


def test_pairs_of_relations_are_held_out_and_each_relation_is_known_in_both_places():
    for changes in CHANGES:
        task = task_of(**changes)
        train, ood = (task.combinations(split) for split in ("train", "ood"))
        assert np.array_equal(train, task.combinations("id"))
        assert not set(map(tuple, train.tolist())) & set(map(tuple, ood.tolist()))
        n = task.config.n_relations
        assert len(train) + len(ood) == n**2
        for side in (train, ood):
            for place in range(2):
                counts = np.bincount(side[:, place], minlength=n)
                assert counts.min() == counts.max() > 0


def test_splits_are_disjoint():
    task = task_of()
    examples = []
    for split in task.SPLITS:
        texts = torch.cat(task.batch(split, 0, 2000).inputs, 1)
        examples.append(set(map(tuple, texts.tolist())))
        assert len(examples[-1]) == 2000
    assert len(set.union(*examples)) == 6000


def test_support_does_not_depend_on_its_place():
    """Needed facts are as often in each quarter of the passage."""
    batch = task_of().batch("id", 0, 4000)
    first = (batch.latents["support"] == 1).int().argmax(1) / batch.inputs[0].bool().sum(1)
    assert np.allclose(np.histogram(first, 4, (0, 1))[0] / 4000, 0.25, atol=0.04)


@pytest.mark.parametrize("split", ["id", "ood"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"n_paragraphs": 3, "two_facts": 0.2}, {"n_paragraphs": 6, "n_facts": 4, "two_facts": 1}],
)
def test_chance_is_the_share_of_facts_with_the_object_that_is_asked_for(split, changes):
    task = task_of(**changes)
    batch = task.batch(split, 0, 4000)
    shares = []
    for i in range(4000):
        passage, question = task.words(batch, i)
        name = solve(passage, question)[2]
        facts = chain.from_iterable(read_facts(passage))
        shares.append(np.mean([[passage[j] for j in fact[2]] == name for fact in facts]))
    error = np.std(shares) / 4000**0.5
    assert error < 0.003
    assert abs(task.chance(split) - np.mean(shares)) < 3 * error


def test_scores_are_those_of_the_words():
    task = task_of()
    batch = task.batch("id", 0, 64)
    passage, targets = batch.inputs[0], batch.targets
    logits = torch.full((64, 2, passage.shape[1]), -5.0)
    logits[torch.arange(64)[:, None], torch.arange(2), targets] = 5.0
    scores = task.score(logits, batch)
    assert all((values == 1).all() for values in scores.values())
    # One word before or after: half of a name of two words, or more than the answer.
    shifted = logits.clone()
    start = targets[:, 0]
    shifted[torch.arange(64), 1] = -5.0
    shifted[torch.arange(64), 1, start] = 5.0
    scores = task.score(shifted, batch)
    is_long = targets[:, 1] > start
    assert (scores["start"] == 1).all()
    assert torch.equal(scores["end"], (~is_long).float())
    assert torch.equal(scores["exact_match"], (~is_long).float())
    torch.testing.assert_close(scores["f1"], torch.where(is_long, 2 / 3, 1.0))
    with pytest.raises(ValueError, match=r"logits must have shape \(64, 2, 44\)"):
        task.score(logits[..., 1:], batch)


def test_another_place_of_the_answer_is_an_exact_match():
    """As where answers are found by their words: the place counts for the targets alone."""
    task = task_of()
    batch = task.batch("id", 0, 500)
    logits = torch.full((500, 2, batch.inputs[0].shape[1]), -5.0)
    moved = []
    for i in range(500):
        words, _ = task.words(batch, i)
        start, end = batch.targets[i].tolist()
        places = [p for p, word in enumerate(words) if word == words[start] and p != start]
        if places:
            moved.append(i)
            logits[i, 0, places[0]] = logits[i, 1, places[0] + end - start] = 5.0
    scores = task.score(logits, batch)
    assert len(moved) > 100
    assert (scores["exact_match"][moved] == 1).all()
    assert (scores["start"][moved] == 0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_entities": 11}, "n_entities must be an integer from 12"),
        ({"n_relations": 2}, "n_relations must be an integer from 3"),
        ({"n_paragraphs": 2}, "n_paragraphs must be an integer from 3"),
        ({"held_out": 0.1}, "held_out must leave items on both sides of the split"),
        ({"two_facts": 1.1}, "two_facts must be a number from 0 to 1"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        FactQuestionsConfig(**changes)
