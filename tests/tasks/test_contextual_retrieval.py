"""Contextual retrieval: compared with plain loops and with the authors' data."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.contextual_retrieval import ContextualRetrieval, ContextualRetrievalConfig

CONTRACT_EXAMPLES = {"": lambda folder: ContextualRetrieval(ContextualRetrievalConfig())}

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "contextual_retrieval_data.npz")
SAMPLES = sorted(name.removesuffix(".inputs") for name in GOLDEN if name.endswith(".inputs"))
SIZES = [(1, 4), (2, 2), (2, 3), (2, 4), (3, 2), (3, 3)]


def task_of(**changes):
    return ContextualRetrieval(ContextualRetrievalConfig(**changes))


def solve(objects, n_searches, n_retrievals, coefficients):
    """Return targets, winners and retrieved features, by plain loops."""
    targets, winners, actual = [], [], []
    for i, me in enumerate(objects):
        winners.append([])
        actual.append([])
        for s in range(n_searches):
            others = [j for j in range(len(objects)) if j != i]
            nearest = min(others, key=lambda j: abs(objects[j][s] - me[s]))
            start = n_searches + n_retrievals + s * n_retrievals
            preferred = [v for v in range(n_retrievals) if me[start + v] == 1]
            assert len(preferred) == 1
            winners[i].append(nearest)
            actual[i].append(objects[nearest][n_searches + preferred[0]])
        targets.append(sum(c * value for c, value in zip(coefficients, actual[i], strict=True)))
    return targets, winners, actual


@pytest.mark.parametrize("name", SAMPLES)
def test_golden_labels_follow_from_the_inputs(name):
    inputs = torch.from_numpy(GOLDEN[f"{name}.inputs"])
    task = task_of(coefficients="one" if name.endswith("nocoeff") else "published")
    targets, latents = task.solve(inputs)
    np.testing.assert_allclose(targets, GOLDEN[f"{name}.labels"], atol=1e-12)
    # The authors keep which objects win some search, by whom they are found.
    wins = torch.zeros(64, 10, 10).scatter_(2, latents["winner"], 1)
    np.testing.assert_array_equal(wins, GOLDEN[f"{name}.searches"])
    # Objects of one set have different combinations, of the right side where some are held out.
    actual = {tuple(v) for v in latents["preference"].flatten(0, 1).tolist()}
    assert len({tuple(v) for v in latents["preference"][0].tolist()}) > 1
    if name.startswith("ood"):
        side = name.split(".")[-1]
        assert actual == {tuple(v) for v in GOLDEN[f"ood_2s4r.{side}_combos"].tolist()}
        split = {"train": "train", "test": "ood"}[side]
        assert actual == {tuple(v) for v in task.combinations(split).tolist()}
    else:
        assert len(actual) == 16


@pytest.mark.parametrize(("searches", "retrievals"), SIZES)
def test_golden_combinations(searches, retrievals):
    task = task_of(n_searches=searches, n_retrievals=retrievals)
    for split, side in {"train": "train", "id": "train", "ood": "test"}.items():
        golden = GOLDEN[f"ood_{searches}s{retrievals}r.{side}_combos"]
        np.testing.assert_array_equal(task.combinations(split), golden)


@pytest.mark.parametrize(("searches", "retrievals"), [*SIZES, (2, 10), (4, 8), (4, 16)])
def test_a_fifth_is_held_out_and_every_preference_is_known(searches, retrievals):
    task = task_of(n_searches=searches, n_retrievals=retrievals)
    train, ood = ([tuple(v) for v in task.combinations(s).tolist()] for s in ("train", "ood"))
    # Cut as the authors do: 80% of the list that has the even places first.
    every = list(product(range(retrievals), repeat=searches))
    even_first = every[::2] + every[1::2]
    n_train = 4 * len(every) // 5
    assert train == sorted(even_first[:n_train])
    assert ood == sorted(even_first[n_train:])
    known = {(s, v) for combination in train for s, v in enumerate(combination)}
    assert (len(known) == searches * retrievals) == (searches > 1)


@pytest.mark.parametrize(("searches", "retrievals"), [(1, 2), (2, 4), (4, 16)])
@pytest.mark.parametrize("coefficients", ["drawn", "published", "one"])
def test_batches_agree_with_loops(searches, retrievals, coefficients):
    sizes = {"n_searches": searches, "n_retrievals": retrievals}
    task = task_of(coefficients=coefficients, n_objects=7, **sizes)
    assert task.n_features == searches + retrievals + searches * retrievals
    for split in task.splits:
        batch = task.batch(split, 0, 20)
        assert batch.inputs.shape == (20, 7, task.n_features)
        assert batch.targets.shape == batch.mask.shape == (20, 7)
        assert batch.inputs.dtype == batch.targets.dtype == torch.float32
        assert batch.mask.all()
        for i in range(20):
            expected = solve(batch.inputs[i].tolist(), searches, retrievals, task.coefficients)
            np.testing.assert_allclose(batch.targets[i], expected[0], atol=1e-5)
            assert batch.latents["winner"][i].tolist() == expected[1]
            np.testing.assert_array_equal(batch.latents["retrieved"][i], expected[2])
        targets, latents = task.solve(batch.inputs)
        assert torch.equal(targets, batch.targets)
        for name, latent in latents.items():
            assert torch.equal(latent, batch.latents[name]), name
        # The number of a combination is its place in the list of all.
        every = np.indices((retrievals,) * searches).reshape(searches, -1).T
        np.testing.assert_array_equal(
            every[batch.latents["combination"]], batch.latents["preference"]
        )


def test_splits_have_their_combinations_in_equal_shares():
    task = task_of()
    numbers = {}
    for split in task.splits:
        batch = task.batch(split, 0, 3000)
        count = batch.latents["combination"].flatten().bincount(minlength=16)
        numbers[split] = set(count.nonzero()[:, 0].tolist())
        listed = {int(4 * v[0] + v[1]) for v in task.combinations(split)}
        assert numbers[split] == listed
        expected = 30_000 / len(listed)
        chi_squared = ((count[sorted(listed)] - expected) ** 2 / expected).sum()
        assert chi_squared < len(listed) + 5 * (2 * len(listed)) ** 0.5
    assert numbers["train"] == numbers["id"]
    assert not numbers["train"] & numbers["ood"]
    assert numbers["all"] == set(range(16))
    # The same combinations, but other objects.
    assert not torch.equal(task.batch("train", 0, 4).inputs, task.batch("id", 0, 4).inputs)


def test_training_on_all_combinations_changes_that_split_alone():
    some, every = task_of(), task_of(trained_on="all")
    assert every.combinations("train").tolist() == [list(v) for v in np.ndindex(4, 4)]
    assert set(every.batch("train", 0, 500).latents["combination"].flatten().tolist()) == {
        *range(16)
    }
    for split in ("id", "ood", "all"):
        np.testing.assert_array_equal(every.combinations(split), some.combinations(split))
        assert torch.equal(every.batch(split, 3, 5).inputs, some.batch(split, 3, 5).inputs)
        assert torch.equal(every.batch(split, 3, 5).targets, some.batch(split, 3, 5).targets)


def test_batches_are_those_of_earlier_versions():
    batch = task_of(seed=3).batch("ood", 1, 2)
    np.testing.assert_allclose(batch.targets[0, :3], [-0.646223, -0.122918, 1.143758], atol=1e-6)


@pytest.mark.parametrize("n_searches", range(1, 7))
def test_the_authors_weights(n_searches):
    for seed in (0, 1):
        task = task_of(coefficients="published", n_searches=n_searches, n_retrievals=2, seed=seed)
        np.testing.assert_array_equal(task.coefficients, GOLDEN["coeffs"][:n_searches])


def test_features_are_standard_normal():
    drawn = task_of().batch("train", 3, 4000).inputs[..., :6].flatten(0, 1).double()
    n = len(drawn)
    assert (drawn.mean(0).abs() < 5 / n**0.5).all()
    covariance = drawn.T @ drawn / n
    assert (covariance - torch.eye(6)).abs().max() < 5 * (2 / n) ** 0.5
    assert (drawn**4).mean() == pytest.approx(3, abs=5 * (96 / drawn.numel()) ** 0.5)


def test_nothing_but_the_weights_depends_on_the_weights():
    drawn, one = task_of(), task_of(coefficients="one")
    first, second = drawn.batch("ood", 5, 8), one.batch("ood", 5, 8)
    assert torch.equal(first.inputs, second.inputs)
    assert one.coefficients.tolist() == [1, 1]
    np.testing.assert_allclose(
        first.targets, first.latents["retrieved"].numpy() @ drawn.coefficients, atol=1e-6
    )
    np.testing.assert_allclose(second.targets, second.latents["retrieved"].sum(-1), atol=1e-6)
    weights = np.array([task_of(seed=seed).coefficients for seed in range(300)])
    assert np.abs(weights).max() < 1
    assert np.abs(weights.mean()) < 5 / (3 * 600) ** 0.5
    assert weights.var() == pytest.approx(1 / 3, abs=0.06)


def test_no_batch_depends_on_what_was_asked_for_before():
    task, fresh = task_of(seed=4), task_of(seed=4)
    for split in task.splits:
        task.batch(split, 0, 3)
    late = task.batch("train", 2**40, 5)
    assert torch.equal(late.inputs, fresh.batch("train", 2**40, 5).inputs)
    assert not torch.equal(late.inputs, task_of(seed=5).batch("train", 2**40, 5).inputs)


def test_score():
    task = task_of(n_objects=2)
    batch = task.batch("id", 0, 2)
    off = torch.tensor([[0.0, 0.5], [-2.0, 1.0]])
    for output in (batch.targets + off, (batch.targets + off)[..., None]):
        scores = task.score(output, batch)
        np.testing.assert_allclose(scores["absolute_error"], off.abs(), atol=1e-6)
        np.testing.assert_allclose(scores["squared_error"], off**2, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"output must have shape \(2, 2\) or \(2, 2, 1\), got \(2,\)"
    ):
        task.score(torch.zeros(2), batch)


@pytest.mark.parametrize(
    "changes",
    [{}, {"n_objects": 3}, {"n_searches": 4, "n_retrievals": 2, "n_objects": 4}],
)
def test_baseline_is_the_error_of_answering_nothing(changes):
    for coefficients in ("drawn", "one"):
        task = task_of(coefficients=coefficients, **changes)
        for split in ("id", "ood", "all"):
            batch = task.batch(split, 0, 20_000)
            for name, error in task.score(torch.zeros_like(batch.targets), batch).items():
                # Objects of one set are not independent, sets are.
                means = error.double().mean(1).numpy()
                spread = means.std() / len(means) ** 0.5
                assert task.baseline(split)[name] == pytest.approx(means.mean(), abs=5 * spread)


def test_baseline_by_hand():
    # Two objects: both searches find the other one. Held out is (1, 1): the same number twice.
    task = task_of(n_objects=2, n_retrievals=2, coefficients="one")
    assert task.combinations("ood").tolist() == [[1, 1]]
    assert task.baseline("ood")["squared_error"] == pytest.approx(4)
    assert task.baseline("ood")["absolute_error"] == pytest.approx(2 * (2 / np.pi) ** 0.5)
    # Trained on: (0, 0), (0, 1) and (1, 0).
    assert task.baseline("train")["squared_error"] == pytest.approx((4 + 2 + 2) / 3)
    single = task_of(n_searches=1)
    assert single.baseline("id")["squared_error"] == pytest.approx(single.coefficients[0] ** 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_objects": 1}, r"n_objects must be an integer from 2 to 1000, got 1"),
        ({"n_searches": 0}, r"n_searches must be an integer from 1 to 6, got 0"),
        ({"n_retrievals": 1}, r"n_retrievals must be an integer from 2 to .*, got 1"),
        (
            {"n_searches": 4, "n_retrievals": 32},
            r"n_retrievals must make at most 1000000 combinations, got 32 with n_searches=4",
        ),
        ({"coefficients": "two"}, r"coefficients must be one of drawn, published, one, got 'two'"),
        ({"trained_on": "ood"}, r"trained_on must be one of familiar, all, got 'ood'"),
        ({"seed": -1}, r"seed must be .*, got -1"),
    ],
)
def test_a_bad_config_says_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        ContextualRetrievalConfig(**arguments)


def test_bad_arguments():
    task = task_of()
    for call in (task.combinations, task.baseline, lambda split: task.batch(split, 0, 1)):
        with pytest.raises(
            ValueError, match=r"split must be one of train, id, ood, all, got 'odd'"
        ):
            call("odd")
    with pytest.raises(ValueError, match=r"index must be .*, got -1"):
        task.batch("id", -1, 1)
    with pytest.raises(ValueError, match=r"size must be .*, got 0"):
        task.batch("id", 0, 0)
    with pytest.raises(ValueError, match=r"inputs must have shape \(batch, .*, got \(1, 10, 13\)"):
        task.solve(torch.zeros(1, 10, 13))


# Counterfactuals


@pytest.mark.parametrize("name", ["preference", "search_feature", "retrieval_feature"])
def test_targets_follow_from_the_objects_that_are_set(name):
    task = task_of(n_searches=3, n_retrievals=2, n_objects=6)
    base, source = (task.batch("all", index, 40) for index in (0, 1))
    exchanged = torch.arange(6)[:, None] == 2
    given = torch.where(exchanged, source.latents[name], base.latents[name])
    wanted = task.counterfactual(base, {name: given})
    for i in range(40):
        targets, winners, retrieved = solve(wanted.inputs[i].tolist(), 3, 2, task.coefficients)
        assert wanted.targets[i].tolist() == pytest.approx(targets, abs=1e-6)
        assert wanted.latents["winner"][i].tolist() == winners
        np.testing.assert_allclose(wanted.latents["retrieved"][i], retrieved)
    assert torch.equal(wanted.inputs[:, :2], base.inputs[:, :2])
    assert torch.equal(wanted.inputs[:, 3:], base.inputs[:, 3:])
    assert (wanted.inputs[:, 2] != base.inputs[:, 2]).any(1).float().mean() > 0.5
    order = [tuple(row) for row in product(range(2), repeat=3)]
    preferences = wanted.latents["preference"].tolist()
    numbers = [[order.index(tuple(preferred)) for preferred in row] for row in preferences]
    assert wanted.latents["combination"].tolist() == numbers


def test_winners_and_what_is_retrieved_are_set_in_between():
    task = task_of(coefficients="one")
    base = task.batch("id", 0, 20)
    winner = base.latents["winner"].clone()
    winner[:, 3, 1] = 7
    wanted = task.counterfactual(base, {"winner": winner})
    assert torch.equal(wanted.inputs, base.inputs)
    preferred = base.latents["preference"][:, 3, 1]
    retrieved = base.inputs[torch.arange(20), 7, 2 + preferred]
    assert torch.equal(wanted.latents["retrieved"][:, 3, 1], retrieved)
    expected = base.latents["retrieved"][:, 3, 0] + retrieved
    torch.testing.assert_close(wanted.targets[:, 3], expected)
    others = torch.arange(10) != 3
    assert torch.equal(wanted.targets[:, others], base.targets[:, others])
    wanted = task.counterfactual(base, {"retrieved": base.latents["retrieved"] + 1})
    torch.testing.assert_close(wanted.targets, base.targets + 2)
