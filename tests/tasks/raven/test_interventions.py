"""Answers of other rules, compared with the reference implementation; correspondences."""

import pytest
import torch

from tasks import Raven, RavenConfig, raven_correspondence, raven_last_row, raven_pairs
from tests.tasks.raven import raven_reference as reference


@pytest.fixture(scope="module")
def batches():
    task = Raven(RavenConfig(n_features=2, seed=1))
    return task, *(task.batch("ood_unpermuted", index, 400) for index in (0, 1))


def test_answers_and_conditions_are_those_of_plain_python(batches):
    task, base, source = batches
    actual = raven_pairs(task, base, source, 400)
    expected = {"other_rule": [], "same_rule": []}
    for pair in range(400):
        feature = pair % 2
        grid = base.latents["values"][pair, :, :, feature].tolist()
        rules = [batch.latents["rule"][pair, feature].item() for batch in (base, source)]
        own, other = (reference.answer_by_rule(rule, grid, 8) for rule in rules)
        assert own == grid[2][2]
        if rules[0] == rules[1]:
            expected["same_rule"].append((pair, feature, own, own))
        elif other is not None and other != own:
            expected["other_rule"].append((pair, feature, other, own))
    for condition, pairs in actual.items():
        numbers, features, others, owns = map(torch.tensor, zip(*expected[condition], strict=True))
        assert len(numbers) > 20
        assert torch.equal(pairs.base, base.inputs[numbers])
        assert torch.equal(pairs.source, source.inputs[numbers])
        each = torch.arange(len(numbers))
        for name, answers in (("source_rule", others), ("base_rule", owns)):
            assert torch.equal(pairs.answers[name][each, features], answers)
            assert (pairs.answers[name][each, 1 - features] == -1).all()


def test_queries_and_keys_are_the_tokens_of_the_feature_in_the_last_row(batches):
    task, base, source = batches
    pairs = raven_pairs(task, base, source, 400)["same_rule"]
    values = base.latents["values"].flatten(1)  # token by token, as the columns have one order
    chosen = (base.latents["rule"] == source.latents["rule"])[
        torch.arange(400), torch.arange(400) % 2
    ].nonzero()[:, 0]
    rows = base.latents["values"][chosen, 2, :, chosen % 2]
    places = torch.cat([pairs.keys, pairs.query[:, None]], 1)
    assert torch.equal(values[chosen].gather(1, places), rows)


def test_no_more_pairs_than_asked_for_and_the_first_of_them(batches):
    task, base, source = batches
    few, many = (raven_pairs(task, base, source, n) for n in (7, 400))
    for condition in ("other_rule", "same_rule"):
        assert len(few[condition].base) == 7
        assert torch.equal(few[condition].base, many[condition].base[:7])


@pytest.mark.parametrize("n_features", [1, 3])
def test_the_last_row_is_read_in_the_order_of_panels(n_features):
    query, keys = raven_last_row(n_features)
    tokens = torch.arange(9 * n_features).view(3, 3, n_features)
    assert torch.equal(query, tokens[2, 2])
    assert torch.equal(keys, tokens[2, :2].T)


def test_bad_batches_are_refused(batches):
    task, base, source = batches
    with pytest.raises(ValueError, match="as many instances as base, 400, got 399"):
        raven_pairs(task, base, task.batch("id_unpermuted", 0, 399), 5)
    with pytest.raises(ValueError, match="base must be of an unpermuted split"):
        raven_pairs(task, task.batch("id", 0, 400), source, 5)
    with pytest.raises(ValueError, match="source must be of an unpermuted split"):
        raven_pairs(task, base, task.batch("id", 0, 400), 5)


@pytest.mark.parametrize("n_features", [1, 2, 4])
def test_corresponding_tokens_have_the_same_feature(n_features):
    task = Raven(RavenConfig(n_features=n_features, cover_rules=False))
    batch = task.batch("ood", 0, 50)
    order = batch.latents["permutation"]
    where = raven_correspondence(order)
    assert where.shape == (50, n_features, 3)
    shown = batch.inputs.argmax(-1).view(50, 3, 3, n_features)
    for i in range(50):
        for token in range(n_features):
            for column in range(3):
                other = int(where[i, token, column])
                feature = order[i, 2, token]
                assert order[i, column, other] == feature
                # So the values are those of one feature.
                value = batch.latents["values"][i, 0, column, feature]
                assert shown[i, 0, column, other] == value
    assert (where[:, :, 2] == torch.arange(n_features)).all()
    unpermuted = raven_correspondence(task.batch("ood_unpermuted", 0, 5).latents["permutation"])
    assert (unpermuted == torch.arange(n_features)[:, None]).all()
