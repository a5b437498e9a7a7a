import doctest
import importlib

import numpy as np
import pytest
import torch
from scipy import stats

import mechanisms
from probes import holm, paired_test, pairs_needed

RNG = np.random.default_rng(0)


def test_the_test_is_that_of_paired_samples():
    first, second = RNG.normal(size=(2, 6))
    expected = stats.ttest_rel(first, second).pvalue
    assert paired_test(first - second) == pytest.approx(expected)
    assert paired_test(first - second, 0.3) == pytest.approx(
        stats.ttest_rel(first, second + 0.3).pvalue
    )


def test_without_an_effect_p_values_are_even_and_with_one_they_are_small():
    even = [paired_test(RNG.normal(size=5)) for _ in range(600)]
    assert stats.kstest(even, "uniform").pvalue > 0.01
    assert np.median([paired_test(RNG.normal(1, 0.3, size=5)) for _ in range(100)]) < 0.01


def test_equality_is_two_one_sided_tests():
    x = np.array([0.01, -0.02, 0.03, 0.0])
    above = stats.ttest_1samp(x, -0.05, alternative="greater").pvalue
    below = stats.ttest_1samp(x, 0.05, alternative="less").pvalue
    assert paired_test(x, 0.05, equal=True) == pytest.approx(2 * max(above, below))
    # Far outside of the margin it is small too; at the margin it is not.
    assert paired_test(x + 0.5, 0.05, equal=True) < 1e-4
    assert paired_test(x - x.mean() + 0.05, 0.05, equal=True) == pytest.approx(1)


@pytest.mark.parametrize("equal", [False, True])
def test_a_mean_at_the_margin_is_taken_for_one_beside_it_as_seldom_as_the_level_says(equal):
    x = np.random.default_rng(0).normal(0.3, 0.05, size=(2000, 5))
    decided = np.mean([paired_test(row, 0.3, equal=equal) < 0.05 for row in x])
    assert decided == pytest.approx(0.05, abs=0.015)


def test_identical_differences_have_p_0_or_1():
    assert paired_test(np.full(3, 0.2)) == 0
    assert paired_test(np.full(3, 0.2), 0.2) == 1
    assert paired_test(np.zeros(3), 0.1, equal=True) == 0
    assert np.isnan(paired_test(np.array([0.3])))


@pytest.mark.parametrize("x", [[0.3 - 0.2] * 3, [0.9 - 0.8, 1 - 0.9, 1 - 0.9, 0.9 - 0.8]])
def test_rounding_is_no_distance_from_the_margin(x):
    assert paired_test(np.array(x), 0.1) == 1
    assert paired_test(-np.array(x), 0.1, equal=True) == 1
    assert paired_test(1e-9 * np.array(x), 1e-10) == 1
    assert pairs_needed(np.array(x), 0.1) == np.inf
    # A distance that is small, but no rounding, counts.
    assert paired_test(np.array(x), 0.1 + 1e-9) == 0
    assert pairs_needed(np.array(x), 0.1 + 1e-9) == len(x) + 1


@pytest.mark.parametrize(("margin", "equal"), [(0.0, False), (0.4, False), (0.4, True)])
def test_pairs_needed_is_the_smallest_number_that_decides(margin, equal):
    x = np.array([0.1, 0.3, -0.1, 0.05])
    needed = int(pairs_needed(x, margin, equal=equal, level=0.01))

    def p(n):
        # As many differences with the same mean and spread.
        like = np.resize([1.0, -1.0], n) if n % 2 == 0 else np.append(np.resize([1, -1], n - 1), 0)
        return paired_test(x.mean() + x.std(ddof=1) * like / like.std(ddof=1), margin, equal=equal)

    assert needed > len(x)
    assert p(needed) < 0.01 <= p(needed - 1)


def test_no_number_of_pairs_is_enough_without_an_effect():
    assert pairs_needed(np.array([0.1, -0.1])) == np.inf
    assert np.isnan(pairs_needed(np.array([0.1])))


def test_holm_by_hand():
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(holm([0.5, 0.9]), [1.0, 1.0])
    np.testing.assert_allclose(holm([0.5, np.nan, 0.01]), [0.5, np.nan, 0.02])
    assert len(holm([])) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: paired_test(np.ones((2, 2))), "differences must be finite and one-dimensional"),
        (lambda: paired_test([0.1, np.nan]), "differences must be finite and one-dimensional"),
        (lambda: paired_test([0.1, 0.2], np.inf), "margin must be finite, got inf"),
        (lambda: paired_test([0.1, 0.2], equal=True), "margin must be greater than 0 with equal"),
        (lambda: pairs_needed([0.1, 0.2], level=1), r"level must be in \(0, 1\), got 1"),
        (lambda: holm([0.5, 1.5]), r"p_values must be in \[0, 1\], got 1.5"),
    ],
)
def test_invalid_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", ["statistics.paired_tests", "costs"])
def test_examples_in_docstrings_are_right(name):
    module = importlib.import_module(f"probes.{name}")
    names = {"numpy": np, "torch": torch, "mechanisms": mechanisms}
    failed, tried = doctest.testmod(module, extraglobs=names)
    assert tried >= 2
    assert failed == 0
