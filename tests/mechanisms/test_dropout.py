import numpy as np
import pytest
import torch
from scipy.stats import chi2

from mechanisms.dropout import dropout, dropout_mask

ONES = torch.ones(1000, 1003)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_entries_are_zero_with_the_probability_and_the_mean_is_kept(p):
    torch.manual_seed(0)
    mask = dropout_mask(ONES.shape, p, ONES)
    share = float((mask == 0).double().mean())
    # Five standard errors; p is rounded to 2^-16.
    assert abs(share - p) < 5 * np.sqrt(p * (1 - p) / mask.numel()) + 2**-16
    assert len(mask.unique()) == 2
    rounded = round(p * 2**16) / 2**16
    assert float(mask.max()) * (1 - rounded) == pytest.approx(1, rel=1e-6)


def test_neighbours_that_share_a_random_number_are_independent():
    torch.manual_seed(1)
    dropped = (dropout_mask((250_000, 4), 0.3, ONES) == 0).long()
    counts = torch.bincount(dropped @ torch.tensor([1, 2, 4, 8]), minlength=16).double()
    n_dropped = torch.tensor([bin(number).count("1") for number in range(16)])
    expected = 250_000 * 0.3**n_dropped * 0.7 ** (4 - n_dropped)
    assert float(((counts - expected).square() / expected).sum()) < chi2.ppf(1 - 1e-6, 15)


def test_the_gradient_is_dropped_alike_and_the_seed_repeats_the_mask():
    x = torch.randn(7, 5, 3, requires_grad=True)
    torch.manual_seed(2)
    out = dropout(x, 0.4, True)
    torch.manual_seed(2)
    mask = dropout_mask(x.shape, 0.4, x)
    assert torch.equal(out, x * mask)
    out.sum().backward()
    assert torch.equal(x.grad, mask)
    assert not torch.equal(dropout(x, 0.4, True), out)


def test_nothing_is_dropped_in_evaluation_or_without_probability():
    before = torch.get_rng_state()
    assert dropout(ONES, 0.5, False) is ONES
    assert dropout(ONES, 0.0, True) is ONES
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_precision_and_shape_stay(dtype):
    for shape in ((), (1,), (3,), (2, 0, 4), (5, 2)):
        out = dropout(torch.ones(shape, dtype=dtype), 0.5, True)
        assert out.dtype == dtype
        assert out.shape == shape
        assert ((out == 0) | (out == 2)).all()


def test_smallest_and_largest_probabilities_do_not_become_none_and_all():
    torch.manual_seed(3)
    assert 1 <= int((dropout(ONES, 1e-7, True) == 0).sum()) < 100
    kept = dropout(ONES, 1 - 1e-7, True)
    assert kept.isfinite().all()
    assert 1 <= int((kept != 0).sum()) < 100
