"""Fuzzy logic: compared with plain loops and with the authors' data."""

from itertools import combinations
from math import comb
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.fuzzy_logic import FuzzyLogic, FuzzyLogicConfig

CONTRACT_EXAMPLES = {"": lambda folder: FuzzyLogic(FuzzyLogicConfig())}

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "fuzzy_logic.npz")
SIZES = [(4, 2), (5, 3), (3, 2)]


def task_of(**changes):
    return FuzzyLogic(FuzzyLogicConfig(**changes))


def value(point, literals):
    """Evaluate Zadeh's logic: or is the maximum, and the minimum, not 1 - x."""
    terms = []
    for literal in literals:
        term = 1.0
        for x, stands in zip(point, literal, strict=True):
            term = min(term, x if stands else 1 - x)
        terms.append(term)
    return max(terms)


def numbers(literals):
    """Return the terms' numbers: binary digits, the first variable's first."""
    return tuple(int("".join(str(bit) for bit in literal), 2) for literal in literals)


@pytest.mark.parametrize(("n_variables", "n_terms"), SIZES)
@pytest.mark.parametrize("side", ["train", "ood"])
def test_golden_targets_follow_from_inputs_and_terms(n_variables, n_terms, side):
    name = f"{n_variables}var{n_terms}term"
    task = task_of(n_variables=n_variables, n_terms=n_terms)
    points, targets, literals = (
        GOLDEN[f"{name}.{side}.{part}"] for part in ("inputs", "targets", "latents")
    )
    actual = task.solve(torch.from_numpy(points), torch.from_numpy(literals))
    np.testing.assert_array_equal(actual, targets[..., 0])
    # The authors' functions are of the terms that these splits have.
    known = {numbers(row) for row in literals.tolist()}
    seen = range(task.config.n_seen)
    assert all(all((term in seen) == (side == "train") for term in row) for row in known)


@pytest.mark.parametrize(("n_variables", "n_terms"), SIZES)
def test_golden_batches_are_laid_out_alike(n_variables, n_terms):
    name = f"{n_variables}var{n_terms}term.batch"
    x, y, base, literals = (
        torch.from_numpy(GOLDEN[f"{name}.{part}"]) for part in ("x", "y", "base_mse", "latents")
    )
    config = FuzzyLogicConfig(n_variables=n_variables, n_terms=n_terms, n_examples=16)
    task = FuzzyLogic(config)
    ours = task.batch("train", 0, 16)
    assert ours.inputs.shape == x.shape
    assert ours.targets.shape == y.shape
    assert ours.latents["literals"].shape == literals.shape
    values = task.solve(x[..., :-1], literals)
    assert torch.equal(x[..., :-1, -1], values[:, :-1])
    assert not x[:, -1, -1].any()
    assert torch.equal(values[:, -1:], y)
    np.testing.assert_allclose(values.var(1, correction=0), base[:, 0], rtol=1e-5)


@pytest.mark.parametrize(("n_variables", "n_terms"), SIZES)
def test_golden_splits(n_variables, n_terms):
    name = f"{n_variables}var{n_terms}term"
    task = task_of(n_variables=n_variables, n_terms=n_terms)
    np.testing.assert_array_equal(task.conjunctions, GOLDEN[f"{name}.conjunctions_all"])
    sides = {split: [tuple(row) for row in task.combinations(split)] for split in task.splits}
    total, *counts = GOLDEN[f"{name}.counts_total_train_test_ood"]
    assert [len(sides[split]) for split in ("train", "test", "ood")] == counts
    assert sides["id"] == sides["train"]
    assert not set(sides["train"]) & set(sides["test"])
    n_seen = 2**n_variables * 3 // 4
    assert sorted(sides["train"] + sides["test"]) == list(combinations(range(n_seen), n_terms))
    assert comb(n_seen, n_terms) == total
    golden = GOLDEN[f"{name}.terms_idx_out_dist_seed2024"]
    np.testing.assert_array_equal(task.combinations("ood"), golden)
    # What is held out of the same terms is drawn: by another generator than the authors'.
    authors_terms = np.concatenate(
        [GOLDEN[f"{name}.terms_idx_{side}_seed2024"] for side in ("train", "test")]
    )
    assert sorted(map(tuple, authors_terms.tolist())) == sorted(sides["train"] + sides["test"])


@pytest.mark.parametrize("split", FuzzyLogic.SPLITS)
@pytest.mark.parametrize(
    "changes", [{}, {"n_variables": 5, "n_terms": 3, "n_examples": 7}, {"n_terms": 1}]
)
def test_batches_agree_with_loops(split, changes):
    task = task_of(**changes)
    for batch in (task.batch(split, 2, 30), task.fixed_query(split, 2, 30)):
        assert batch.inputs.dtype == batch.targets.dtype == torch.float32
        assert batch.inputs.shape == (30, task.config.n_examples, task.n_features)
        assert batch.mask.shape == batch.targets.shape == (30, 1)
        assert batch.mask.all()
        latents = {name: values.tolist() for name, values in batch.latents.items()}
        for i, sequence in enumerate(batch.inputs.double().tolist()):
            literals = latents["literals"][i]
            values = [value(point, literals) for *point, _ in sequence]
            np.testing.assert_allclose(latents["values"][i], values, atol=1e-6)
            np.testing.assert_allclose([row[-1] for row in sequence[:-1]], values[:-1], atol=1e-6)
            assert sequence[-1][-1] == 0
            assert batch.targets[i, 0] == pytest.approx(values[-1], abs=1e-6)
            assert latents["variance"][i] == pytest.approx(np.var(values), rel=1e-4)
            terms = latents["terms"][i]
            assert tuple(terms) == numbers(literals) == tuple(sorted(set(terms)))
            row = task.combinations(split)[latents["combination"][i]]
            assert row.tolist() == terms


def test_a_fixed_query_changes_the_query_alone():
    task = task_of()
    plain, fixed = (make("test", 4, 50) for make in (task.batch, task.fixed_query))
    assert torch.equal(plain.inputs[:, :-1], fixed.inputs[:, :-1])
    assert torch.equal(plain.latents["terms"], fixed.latents["terms"])
    assert (fixed.inputs[:, -1, :-1] == torch.from_numpy(task.query)).all()
    assert plain.inputs[:, -1, 0].unique().numel() == 50
    # It is the same in every split and for every length, and differs between seeds.
    long = task_of(n_examples=96)
    assert torch.equal(long.fixed_query("ood", 0, 1).inputs[0, -1], fixed.inputs[0, -1])
    assert not np.array_equal(task_of(seed=1).query, task.query)


def test_the_query_of_some_examples_of_a_batch_can_be_fixed():
    task = task_of()
    plain, fixed = task.batch("ood", 3, 20), task.fixed_query("ood", 3, 20)
    part = task.with_fixed_query(plain[5:9])
    assert torch.equal(part.inputs, fixed.inputs[5:9])
    assert torch.equal(part.targets, fixed.targets[5:9])
    assert all(torch.equal(part.latents[name], fixed.latents[name][5:9]) for name in fixed.latents)
    # The batch that it was made of is left as it was.
    assert torch.equal(plain.inputs, task.batch("ood", 3, 20).inputs)


def test_points_are_uniform_and_combinations_equally_frequent():
    task = task_of(n_examples=4)
    batch = task.batch("train", 0, 33_000)
    points = batch.inputs[..., :-1].double()
    n = points[..., 0].numel()
    assert (points.mean((0, 1)) - 0.5).abs().max() < 5 / (12 * n) ** 0.5
    assert points.var((0, 1)).numpy() == pytest.approx(1 / 12, rel=0.02)
    counts = batch.latents["combination"].bincount(minlength=33)
    assert ((counts - 1000).abs() < 5 * 1000**0.5).all()


@pytest.mark.parametrize(("held_out", "n_test"), [(0.3, 19), (0.5, 33), (0.7, 46)])
def test_the_share_that_is_held_out(held_out, n_test):
    task = task_of(held_out=held_out)
    assert len(task.combinations("test")) == n_test
    assert len(task.combinations("train")) == 66 - n_test
    # The length of sequences changes nothing, the seed does.
    sides = [
        task_of(held_out=held_out, **changes).combinations("test").tolist()
        for changes in ({"n_examples": 96}, {"seed": 1})
    ]
    assert [side == task.combinations("test").tolist() for side in sides] == [True, False]


def test_known_terms_are_all_in_train():
    """With the default sizes, `test` has new combinations, but no new terms."""
    for seed in range(5):
        for held_out in (0.3, 0.5):
            task = task_of(held_out=held_out, seed=seed)
            assert set(task.combinations("train").ravel()) == set(range(12))


@pytest.mark.parametrize(
    ("changes", "alone"),
    [({"seed": 89}, [2]), ({"seed": 9, "held_out": 0.7}, [3]), ({"n_terms": 1, "seed": 0}, None)],
)
def test_a_draw_can_leave_terms_in_test_alone(changes, alone):
    """What the docstring of `FuzzyLogic` says of some seeds, and of single terms."""
    task = task_of(**changes)
    missing = np.setdiff1d(task.combinations("test"), task.combinations("train"))
    wanted = task.combinations("test").ravel() if alone is None else alone
    assert missing.tolist() == list(wanted)


def test_score():
    task = task_of()
    batch = task.batch("id", 0, 2)
    off = torch.tensor([[0.0], [0.1]])
    for output in (batch.targets + off, (batch.targets + off)[:, 0]):
        scores = task.score(output, batch)
        np.testing.assert_allclose(scores["squared_error"], [0, 0.01], atol=1e-6)
        spread = np.var(batch.latents["values"][1].double().numpy())
        np.testing.assert_allclose(scores["r2"], [1, 1 - 0.01 / spread], atol=1e-4)
    with pytest.raises(
        ValueError, match=r"output must have shape \(2,\) or \(2, 1\), got \(2, 2\)"
    ):
        task.score(torch.zeros(2, 2), batch)


def test_r2_of_the_mean_is_zero_on_average():
    """The squared error of predicting a sequence's mean is its variance on average."""
    task = task_of(n_examples=16)
    batch = task.batch("id", 0, 20_000)
    scores = task.score(batch.latents["values"].mean(1), batch)
    error, variance = scores["squared_error"].mean(), batch.latents["variance"].mean()
    assert 1 - error / variance == pytest.approx(0, abs=0.05)
    # And the point asked for is one of them: the examples before it give an average that is off
    # by (N + 1) / (N - 1) of the variance, as for any sample.
    before = task.score(batch.latents["values"][:, :-1].mean(1), batch)["squared_error"].mean()
    assert before / variance == pytest.approx((16 / 15) ** 2, abs=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_variables": 2}, r"n_variables must be an integer from 3 to 8, got 2"),
        ({"n_terms": 5}, r"n_terms must be an integer from 1 to 4, got 5"),
        (
            {"n_variables": 7, "n_terms": 6},
            r"n_terms must make at most .*, got 6 with n_variables=7",
        ),
        ({"n_examples": 1}, r"n_examples must be .*, got 1"),
        (
            {"held_out": 0.01},
            r"held_out must .* got 0.01, which holds out 0 of the 66 combinations",
        ),
        ({"held_out": 1}, r"held_out must leave .* got 1, which holds out 66 of the 66"),
        ({"seed": 0.5}, r"seed must be .*, got 0.5"),
    ],
)
def test_a_bad_config_says_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        FuzzyLogicConfig(**arguments)


def test_an_unknown_split_is_an_error():
    with pytest.raises(ValueError, match=r"split must be one of train, id, test, ood, got 'valid'"):
        task_of().batch("valid", 0, 1)


# Counterfactuals


def test_another_term_gives_the_values_of_the_other_function():
    task = task_of(n_terms=3, n_examples=8)
    base, source = (task.batch("train", index, 200) for index in (0, 1))
    exchanged = torch.arange(3) == 1
    terms = torch.where(exchanged, source.latents["terms"], base.latents["terms"])
    wanted = task.counterfactual(base, {"terms": terms})
    sides = [task.combinations(split).tolist() for split in ("train", "test", "ood")]
    places = set()
    for i in range(200):
        literals = task.conjunctions[terms[i]].tolist()
        assert wanted.latents["literals"][i].tolist() == literals
        expected = [value(point, literals) for point in base.inputs[i, :, :-1].tolist()]
        assert wanted.latents["values"][i].tolist() == pytest.approx(expected, abs=1e-6)
        assert wanted.inputs[i, :, -1].tolist() == pytest.approx([*expected[:-1], 0], abs=1e-6)
        assert wanted.targets[i].tolist() == pytest.approx(expected[-1:], abs=1e-6)
        row = sorted(terms[i].tolist())
        where = [side.index(row) for side in sides if row in side]
        assert wanted.latents["combination"][i].tolist() == (where or [-1])[0]
        places |= {j for j, side in enumerate(sides) if row in side} or {-1}
    assert places == {0, 1, -1}  # known, held out, a term twice
    assert torch.equal(wanted.inputs[..., :-1], base.inputs[..., :-1])
    variance = torch.from_numpy(wanted.latents["values"].numpy().var(1))
    assert torch.equal(wanted.latents["variance"], variance)


def test_values_and_literals_are_set_in_between():
    task = task_of()
    base = task.batch("id", 0, 50)
    values = base.latents["values"].clone()
    values[:, -1] = 0.25
    wanted = task.counterfactual(base, {"values": values})
    assert (wanted.targets == 0.25).all()
    assert torch.equal(wanted.inputs, base.inputs)
    assert torch.equal(wanted.latents["literals"], base.latents["literals"])
    values[:, 3] = 0.75
    assert (task.counterfactual(base, {"values": values}).inputs[:, 3, -1] == 0.75).all()
    literals = base.latents["literals"].clone()
    literals[:, 0, 2] = 1 - literals[:, 0, 2]
    wanted = task.counterfactual(base, {"literals": literals})
    assert torch.equal(wanted.latents["terms"], base.latents["terms"])
    for i in range(50):
        expected = value(base.inputs[i, -1, :-1].tolist(), literals[i].tolist())
        assert wanted.targets[i].item() == pytest.approx(expected, abs=1e-6)
