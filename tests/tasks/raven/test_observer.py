"""The ideal observer: compared with enumeration; limiting cases and calibration."""

from fractions import Fraction
from functools import cache
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks import IdealObserver, Raven, RavenConfig, raven_ceilings
from tests.tasks.raven import raven_reference as reference

GOLDEN = np.load(Path(__file__).parents[2] / "golden" / "sraven_samples.npz")


def encode(values):
    """Return the model's inputs of values [batch, 3, 3, K], for F = 8."""
    inputs = torch.nn.functional.one_hot(values.flatten(1), 8).float()
    inputs[:, -values.shape[-1] :] = 0
    return inputs


def assert_matches_enumeration(task, split, prior_split, n_examples):
    config = task.config
    batch = task.batch(split, 0, n_examples)
    observation = IdealObserver(task, prior_split).observe(batch.inputs)
    combinations = [tuple(rules) for rules in task.combinations(prior_split).tolist()]
    prior = reference.prior_of(combinations, config.rule_order)
    anything = dict.fromkeys(np.ndindex(*[8] * config.n_features), Fraction(1))
    shown = batch.inputs.argmax(-1).view(-1, 3, 3, config.n_features).tolist()
    explained = 0
    for i in range(n_examples):
        permuted = task.is_permuted(prior_split)
        exact = reference.posterior(shown[i], prior, permuted, config.n_values)
        is_example = observation.example == i
        assert {tuple(c) for c in observation.candidate[is_example].tolist()} == set(exact)
        for answer, weight in zip(
            observation.candidate[is_example].tolist(),
            observation.weight[is_example].tolist(),
            strict=True,
        ):
            assert weight == pytest.approx(float(exact[tuple(answer)]), rel=1e-12)
        assert observation.ambiguous[i] == (len(exact) > 1)
        unprejudiced = reference.posterior(shown[i], anything, permuted, config.n_values)
        assert observation.n_answers_by_any_rules[i] == len(unprejudiced)
        explained += bool(exact)
    return explained


@pytest.mark.parametrize("rule_order", ["random", "sorted"])
@pytest.mark.parametrize("split", ["id", "ood", "id_unpermuted", "ood_unpermuted"])
def test_posterior_is_that_of_enumeration(split, rule_order):
    task = Raven(RavenConfig(n_features=2, n_values=4, rule_order=rule_order))
    assert assert_matches_enumeration(task, split, split, 30) == 30


def test_posterior_of_instances_of_the_other_side():
    task = Raven(RavenConfig(n_features=2, n_values=3))
    # With three values, much can be explained by several rules: some of it by the wrong side's.
    assert 0 < assert_matches_enumeration(task, "ood", "train", 40) < 40


def test_posterior_of_three_features():
    task = Raven(RavenConfig(n_features=3, n_values=3))
    assert assert_matches_enumeration(task, "id", "id", 2) == 2


def test_one_feature_has_no_correspondence_to_find():
    task = Raven(RavenConfig(n_features=1, n_values=5, cover_rules=False))
    for split in ("id", "id_unpermuted"):
        assert assert_matches_enumeration(task, split, split, 60) == 60


def test_one_feature_by_hand():
    # 0 1 1 / 2 1 3 / 4 1 ?: a sum, and nothing else.
    task = Raven(RavenConfig(n_features=1, cover_rules=False, ood_fraction=1 / 8))
    values = torch.tensor([[[0, 1, 1], [2, 1, 3], [4, 1, 0]]])[..., None]
    for split in task.SPLITS:
        observation = IdealObserver(task, split).observe(encode(values))
        if [5] in task.combinations(split).tolist():
            assert observation.answer.tolist() == [[5]]
            assert observation.probability.tolist() == [1]
        else:
            assert observation.answer.tolist() == [[-1]]
            assert observation.probability.tolist() == [0]


def test_chunks_do_not_show():
    task = Raven(RavenConfig(n_features=2))
    inputs = task.batch("id", 0, 1_100).inputs
    observer = IdealObserver(task, "id")
    whole = observer.observe(inputs)
    parts = [observer.observe(part).posterior for part in inputs.split(100)]
    assert torch.allclose(whole.posterior, torch.cat(parts), atol=1e-14)


def test_posterior_is_a_distribution_and_its_summaries_agree():
    task = Raven(RavenConfig(n_features=2))
    observation = IdealObserver(task, "id").observe(task.batch("id", 0, 500).inputs)
    dense = observation.posterior
    assert torch.allclose(dense.sum(-1), torch.ones(500, dtype=torch.float64))
    assert torch.equal(dense.amax(-1), observation.probability)
    code = observation.answer[:, 0] * 8 + observation.answer[:, 1]
    assert torch.equal(dense.gather(1, code[:, None])[:, 0], observation.probability)
    grid = dense.view(-1, 8, 8)
    marginals = torch.stack([grid.sum(2), grid.sum(1)], 1)
    assert torch.allclose(observation.marginals, marginals)
    assert torch.allclose(observation.feature_ceiling, marginals.amax(-1))
    assert torch.equal(observation.ambiguous, (dense > 0).sum(-1) > 1)
    assert (observation.n_answers_by_any_rules >= (dense > 0).sum(-1)).all()
    assert observation.n_examples == 500


@pytest.mark.parametrize("split", ["id", "ood", "id_unpermuted"])
def test_its_probability_is_its_hit_rate(split):
    task = Raven(RavenConfig(n_features=2))
    batch = task.batch(split, 1, 10_000)
    observation = IdealObserver(task, split).observe(batch.inputs)
    right = (observation.answer == batch.targets).all(-1).double()
    difference = right - observation.probability
    assert abs(difference.mean()) < 3 * difference.std() / len(batch) ** 0.5
    # Where it is not sure, it knows how unsure it is.
    unsure = observation.probability < 0.95
    assert unsure.sum() > 50
    assert abs(difference[unsure].mean()) < 3 * difference[unsure].std() / unsure.sum() ** 0.5
    # What happened is never impossible.
    true = batch.targets[observation.example] == observation.candidate
    assert torch.equal(observation.example[true.all(-1)], torch.arange(len(batch)))


def test_the_prior_matters():
    task = Raven(RavenConfig(n_features=2))
    batch = task.batch("ood", 0, 2_000)
    hits = {}
    for split in ("train", "ood"):
        observation = IdealObserver(task, split).observe(batch.inputs)
        hits[split] = (observation.answer == batch.targets).all(-1).double().mean().item()
    # Who takes the held-out combinations for impossible can hardly ever be right.
    assert hits["ood"] > 0.95
    assert hits["train"] < 0.1


def test_the_ceiling_has_an_error_that_shrinks():
    task = Raven(RavenConfig(n_features=2))
    small, large = (IdealObserver(task, "id").ceiling(n) for n in (500, 8_000))
    assert large.n_instances == 8_000
    assert large.accuracy_se < small.accuracy_se
    assert abs(small.accuracy - large.accuracy) < 4 * small.accuracy_se
    assert task.chance < large.accuracy <= large.feature_accuracy <= 1
    assert large.ambiguous <= large.ambiguous_by_any_rules
    assert large.ambiguous_by_any_rules == pytest.approx(0.086, abs=0.015)


@pytest.mark.parametrize(("name", "split"), [("perm", "id"), ("noperm", "id_unpermuted")])
def test_golden_instances_are_possible(name, split):
    # The authors' own split is not ours: here, all combinations but one are expected.
    everything = RavenConfig(ood_fraction=1 / 330, cover_rules=False, rule_order="sorted")
    task = Raven(everything)
    excluded = task.combinations("ood").tolist()
    for side in ("train", "ood"):
        values = torch.from_numpy(GOLDEN[f"{name}.{side}.instances"]).long()
        rules = torch.from_numpy(GOLDEN[f"{name}.{side}.latents"]).long()
        kept = torch.tensor([rule not in excluded for rule in rules.tolist()])
        assert kept.double().mean() > 0.95
        values = values[kept]
        observation = IdealObserver(task, split).observe(encode(values))
        true = (values[:, 2, 2][observation.example] == observation.candidate).all(-1)
        assert torch.equal(observation.example[true], torch.arange(len(values)))
        assert (observation.answer == values[:, 2, 2]).all(-1).double().mean() > 0.85


@cache
def answers_of(shown):
    """Return the last values with which the eight shown ones, row by row, obey some rule."""
    rows = [shown[:3], shown[3:6]]
    fitting = [rule for rule in reference.ALL_RULES if reference.obeys(rule, rows, 8)]
    complete = ([*rows, (*shown[6:], value)] for value in range(8))
    return {grid[2][2] for grid in complete for r in fitting if reference.obeys(r, grid, 8)}


def count_answers(panels, permuted):
    """Return the number of answers that any rules explain, by trying all correspondences.

    Args:
        panels: [3][3][K] values as the columns list them; the last panel is not read.
        permuted: whether every column may have an order of its own.
    """
    n_features = len(panels[0][0])
    orders = [*permutations(range(n_features))] if permuted else [tuple(range(n_features))]
    found = set()
    for first, second in product(orders, repeat=2):
        by_token = [
            answers_of(
                tuple(
                    panels[row][column][(first[token], second[token], token)[column]]
                    for row in range(3)
                    for column in range(3)
                )[:8]
            )
            for token in range(n_features)
        ]
        found |= set(product(*by_token))
    return len(found)


@pytest.mark.parametrize(
    ("name", "split", "share"), [("perm", "id", 0.269), ("noperm", "id_unpermuted", 0.14)]
)
def test_ambiguous_instances_of_the_reference_are_those_of_a_literal_recount(name, split, share):
    """200 of its instances on each side, of four features; standard error of the share: 2.2%."""
    task = Raven(RavenConfig(rule_order="sorted", cover_rules=False))
    is_ambiguous = []
    for side in ("train", "ood"):
        values = torch.from_numpy(GOLDEN[f"{name}.{side}.instances"]).long()
        observation = IdealObserver(task, split).observe(encode(values))
        recounted = [count_answers(panels, name == "perm") for panels in values.tolist()]
        assert observation.n_answers_by_any_rules.tolist() == recounted
        is_ambiguous += [count > 1 for count in recounted]
    assert np.mean(is_ambiguous) == pytest.approx(share, abs=0.05)


def test_a_repeated_value_is_no_distribute_three():
    """The reference's check takes it for one, and would count a second answer."""
    rows = (0, 1, 3), (3, 0, 1)
    assert answers_of((*rows[0], *rows[1], 1, 0)) == {3}
    assert answers_of((*rows[0], *rows[1], 0, 0)) == set()
    grid = torch.tensor([[*map(list, rows), [0, 0, 0]]])[..., None]
    task = Raven(RavenConfig(n_features=1, cover_rules=False))
    observation = IdealObserver(task, "id").observe(encode(grid))
    assert observation.n_answers_by_any_rules.tolist() == [0]


def test_bad_inputs():
    task = Raven(RavenConfig(n_features=2))
    with pytest.raises(ValueError, match="must be one of train"):
        IdealObserver(task, "test")
    observer = IdealObserver(task, "id")
    inputs = task.batch("id", 0, 4).inputs
    with pytest.raises(ValueError, match=r"must have shape \(batch, 18, 8\), got \(4, 17, 8\)"):
        observer.observe(inputs[:, 1:])
    with pytest.raises(ValueError, match="one-hot"):
        observer.observe(inputs * 0.5)
    with pytest.raises(ValueError, match="one-hot"):
        observer.observe(inputs.roll(2, 1))
    with pytest.raises(ValueError, match="n_instances must be at least 2, got 1"):
        observer.ceiling(1)


def test_ceilings_of_several_splits_are_those_of_each():
    config = RavenConfig(n_features=2)
    actual = raven_ceilings(config, ("id", "ood"), 60)
    for split in ("id", "ood"):
        alone = IdealObserver(Raven(config), split).ceiling(60)
        here = actual.sel(split=split)
        for name, value in here.data_vars.items():
            assert value.attrs["long_name"]
            assert float(value) == getattr(alone, str(name))
    assert actual.attrs == {"instances": 60}
    actual["accuracy"][:] = 0
    assert (raven_ceilings(config, ("ood",), 60)["accuracy"] > 0).all()
    with pytest.raises(ValueError, match="split"):
        raven_ceilings(config, ("id", "odd"), 60)
