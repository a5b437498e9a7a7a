from itertools import product

import numpy as np
import pytest
import torch

from probes import mean_by_labels

SIZES = {"first": 3, "second": 4}


def random_scores(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = {name: torch.randint(size, shape, generator=generator) for name, size in SIZES.items()}
    return torch.rand(shape, generator=generator), labels


def test_means_equal_those_of_a_loop_over_combinations():
    values, labels = random_scores(50, 7)
    means = mean_by_labels(values, labels, SIZES)
    assert means.dims == ("first", "second")
    for first, second in product(range(3), range(4)):
        here = (labels["first"] == first) & (labels["second"] == second)
        mean = np.mean(values[here].tolist())
        assert means.sel(first=first, second=second).item() == pytest.approx(mean)


def test_only_the_label_that_decides_shows_differences():
    _, labels = random_scores(2000)
    means = mean_by_labels(labels["first"].float(), labels, SIZES)
    assert np.allclose(means, np.arange(3)[:, None])
    assert np.allclose(mean_by_labels(torch.ones(2000), labels, SIZES), 1)


def test_combinations_that_do_not_occur_have_no_mean():
    labels = {"first": torch.tensor([0, 0, 2]), "second": torch.tensor([1, 1, 3])}
    means = mean_by_labels(torch.tensor([1.0, 3.0, 5.0]), labels, SIZES)
    expected = np.full((3, 4), np.nan)
    expected[0, 1], expected[2, 3] = 2, 5
    np.testing.assert_array_equal(means, expected)
    square = mean_by_labels(torch.tensor([1.0, 3.0, 5.0]), labels, 4)
    np.testing.assert_array_equal(square[:3], expected)
    assert np.isnan(square[3]).all()


@pytest.mark.parametrize(
    ("labels", "sizes", "error", "message"),
    [
        ({}, {}, ValueError, "at least one name"),
        ({"a": torch.zeros(2).long()}, {"b": 2}, ValueError, "the same names, got a and b"),
        ({"a": torch.zeros(2)}, {"a": 2}, TypeError, "integers, got torch.float32"),
        ({"a": torch.zeros(3).long()}, {"a": 2}, ValueError, r"shape of values, \(2,\), got \(3,"),
        ({"a": torch.tensor([0, 2])}, {"a": 2}, ValueError, r"in 0..1, got 0..2"),
        ({"a": torch.tensor([0, -1])}, {"a": 2}, ValueError, r"in 0..1, got -1..0"),
    ],
)
def test_invalid_input_is_refused(labels, sizes, error, message):
    with pytest.raises(error, match=message):
        mean_by_labels(torch.ones(2), labels, sizes)
