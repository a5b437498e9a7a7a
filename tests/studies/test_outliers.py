import numpy as np
import pytest

from studies.outliers import without_outliers

# Two-sided critical values at 5%, from published tables of Grubbs' test.
CRITICAL = {3: 1.1543, 4: 1.4812, 5: 1.7150, 6: 1.8871, 8: 2.1266, 10: 2.2900, 20: 2.7082}


def with_distance(n, distance):
    """n values of which the last is `distance` standard deviations from the mean."""
    rest = np.resize([-1.0, 1.0], n - 1) + np.linspace(0, 0.1, n - 1)

    def found(last):
        values = np.append(rest, last)
        return abs(last - values.mean()) / values.std(ddof=1)

    low, high = 1.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if found(middle) < distance else (low, middle)
    return np.append(rest, low)


@pytest.mark.parametrize("n", [n for n in CRITICAL if n > 3])
def test_the_critical_distance_is_that_of_the_tables(n):
    inside, outside = (with_distance(n, CRITICAL[n] + d) for d in (-0.002, 0.002))
    assert without_outliers(inside).all()
    assert without_outliers(outside).tolist() == [True] * (n - 1) + [False]


def test_of_three_values_only_a_near_tie_leaves_an_outlier():
    # The greatest distance that three values allow is 2 / sqrt(3) = 1.15470.
    assert without_outliers(np.array([0.0, 0.1, 1.0])).all()
    assert without_outliers(np.array([0.0, 1e-4, 1.0])).tolist() == [True, True, False]


def test_it_is_repeated_until_none_goes():
    values = np.array([1.0, 1.1, 0.9, 1.05, 0.95, 50.0, 9000.0])
    assert without_outliers(values).tolist() == [True] * 5 + [False] * 2


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 100.0], [2.0, 2.0, 2.0, 2.0]])
def test_few_or_equal_values_are_kept(values):
    assert without_outliers(np.array(values)).all()


def test_values_that_are_not_finite_are_dropped():
    assert without_outliers(np.array([1.0, np.nan, 1.1, np.inf])).tolist() == [1, 0, 1, 0]


def test_equal_values_up_to_rounding_have_no_outlier():
    assert without_outliers(np.array([0.1 + 0.2, 0.3, 0.3, 0.3])).all()
