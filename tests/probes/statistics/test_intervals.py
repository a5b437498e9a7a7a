import doctest
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import scipy
import xarray as xr

import probes
from probes import Interval, bootstrap, bootstrap_ratio, interval_variables, over_seeds
from probes.statistics.intervals import exact_rates

N = 200


def clustered(seed, samples, *, n_clusters, within):
    """Parts and wholes [example, sample] and the clusters; the true ratio is 0.7."""
    rng = np.random.default_rng(seed)
    cluster = np.arange(N) % n_clusters
    common = rng.standard_normal((n_clusters, samples))[cluster]
    noise = within * rng.standard_normal((N, samples))
    wholes = rng.integers(1, 6, size=(N, samples)).astype(float)
    return wholes * (0.7 + 0.1 * (common + noise)), wholes, cluster


def share_covered(interval):
    return ((interval.low <= 0.7) & (interval.high >= 0.7)).mean()


def test_intervals_cover_the_truth_only_if_clusters_are_known():
    parts, wholes, cluster = clustered(1, 400, n_clusters=50, within=0.5)
    # Of 400, 95% with a standard deviation of 1.1%: outside of 0.9..0.98 has a chance below 1e-2.
    assert 0.9 <= share_covered(bootstrap_ratio(parts, wholes, clusters=cluster)) <= 0.98
    assert share_covered(bootstrap_ratio(parts, wholes)) < 0.8
    parts, wholes, _ = clustered(2, 400, n_clusters=N, within=0.5)
    assert 0.9 <= share_covered(bootstrap_ratio(parts, wholes)) <= 0.98


def test_a_lower_confidence_covers_less():
    parts, wholes, _ = clustered(3, 400, n_clusters=N, within=0.5)
    assert 0.44 <= share_covered(bootstrap_ratio(parts, wholes, confidence=0.5)) <= 0.56


@pytest.mark.parametrize("with_clusters", [False, True])
def test_equals_a_plain_loop(with_clusters):
    parts, wholes, cluster = clustered(0, 3, n_clusters=60, within=1)
    clusters = (7 - 3 * cluster) if with_clusters else None
    result = bootstrap_ratio(parts, wholes, clusters=clusters, resamples=150, seed=5)
    members = [np.flatnonzero(cluster == c) for c in reversed(range(60))]
    if not with_clusters:
        members = [[example] for example in range(N)]
    rng, ratios = np.random.default_rng(5), []
    for _ in range(150):
        above, below = [0.0] * 3, [0.0] * 3
        for drawn in rng.integers(len(members), size=len(members)):
            for example in members[drawn]:
                for column in range(3):
                    above[column] += parts[example, column]
                    below[column] += wholes[example, column]
        ratios.append([a / b for a, b in zip(above, below, strict=True)])
    np.testing.assert_allclose(result.estimate, parts.sum(0) / wholes.sum(0), rtol=1e-12)
    for end, percent in ((result.low, 2.5), (result.high, 97.5)):
        np.testing.assert_allclose(end, np.percentile(ratios, percent, axis=0), rtol=1e-10)


@pytest.mark.parametrize("method", ["percentile", "basic"])
def test_equals_scipy(method):
    parts, wholes, _ = clustered(0, 4, n_clusters=N, within=1)

    def statistic(numerator, denominator, axis):
        return numerator.sum(axis) / denominator.sum(axis)

    options = {"method": method, "confidence_level": 0.9, "n_resamples": 500, "batch": 20}
    reference = scipy.stats.bootstrap(
        (parts, wholes), statistic, paired=True, vectorized=True, axis=0, rng=3, **options
    ).confidence_interval
    result = bootstrap(
        lambda weights: (weights @ parts) / (weights @ wholes),
        (N,),
        method=method,
        resamples=500,
        confidence=0.9,
        seed=3,
    )
    np.testing.assert_allclose(result.low, reference.low, rtol=1e-10)
    np.testing.assert_allclose(result.high, reference.high, rtol=1e-10)


def test_a_ratio_of_sums_is_no_mean_of_ratios():
    parts, wholes = np.array([9.0, 0.0]), np.array([9.0, 1.0])
    assert bootstrap_ratio(parts, wholes).estimate == 0.9
    assert bootstrap_ratio(parts / wholes).estimate == 0.5


def test_wholes_serve_all_columns():
    parts, _, _ = clustered(0, 6, n_clusters=N, within=1)
    parts, whole = parts.reshape(N, 2, 3), np.arange(1.0, N + 1)
    full = bootstrap_ratio(parts, np.broadcast_to(whole[:, None, None], parts.shape))
    assert full.low.shape == (2, 3)
    for wholes in (whole, whole[:, None], whole[:, None, None]):
        np.testing.assert_allclose(bootstrap_ratio(parts, wholes), full, rtol=1e-12)
    ones = bootstrap_ratio(parts, np.ones(N))
    np.testing.assert_allclose(bootstrap_ratio(parts), ones, rtol=1e-12)
    np.testing.assert_allclose(ones.estimate, parts.mean(0), rtol=1e-12)


def test_a_transform_acts_on_the_estimate_and_the_ends():
    parts, wholes, _ = clustered(0, 2, n_clusters=N, within=1)
    plain = bootstrap_ratio(parts, wholes)
    grown = bootstrap_ratio(parts, wholes, transform=np.exp)
    np.testing.assert_allclose(grown, np.exp(plain), rtol=1e-4)
    turned = bootstrap_ratio(parts, wholes, transform=lambda ratio: 1 - ratio)
    estimate, low, high = plain
    np.testing.assert_allclose(turned, (1 - estimate, 1 - high, 1 - low), rtol=1e-10)


def test_an_empty_group_is_nan_and_a_rare_one_is_not():
    # A group of 2 in 20: one resample in eight has none of it.
    member = np.zeros((20, 3))
    member[:, 0] = 1
    member[3:5, 1] = 1
    right = np.arange(20)[:, None] % 2 * member
    result = bootstrap_ratio(right, member)
    assert np.isnan([values[2] for values in result]).all()
    assert result.estimate[:2].tolist() == [0.5, 0.5]
    assert (result.low[1], result.high[1]) == (0, 1)
    # A ratio with denominator 0 is NaN, not infinite.
    assert np.isnan(bootstrap_ratio(np.ones(5), np.zeros(5))).all()


def test_draws_are_those_of_the_seed_whatever_is_scored():
    parts, wholes, _ = clustered(0, 5, n_clusters=N, within=1)
    every = bootstrap_ratio(parts, wholes, seed=1)
    for column in range(5):
        alone = bootstrap_ratio(parts[:, column], wholes[:, column], seed=1)
        np.testing.assert_allclose(alone, [values[column] for values in every], rtol=1e-12)
    assert (bootstrap_ratio(parts, wholes, seed=2).low != every.low).all()


def test_one_example_or_cluster_has_no_interval():
    for result in (
        bootstrap_ratio(np.array([[2.0, 3.0]])),
        bootstrap_ratio(np.array([[1.0, 3.0], [3.0, 3.0]]), clusters=np.array([4, 4])),
    ):
        assert result.estimate.tolist() == [2, 3]
        assert np.isnan([result.low, result.high]).all()


def test_without_resamples_there_is_the_estimate_alone():
    parts = np.random.default_rng(0).random((20, 3))
    result, reference = (
        bootstrap_ratio(parts, parts**2, resamples=0),
        bootstrap_ratio(parts, parts**2),
    )
    np.testing.assert_array_equal(result.estimate, reference.estimate)
    assert np.isnan([result.low, result.high]).all()
    assert np.isfinite([reference.low, reference.high]).all()


def test_memory_does_not_grow_with_resamples():
    parts = np.random.default_rng(0).random((20_000, 2))
    tracemalloc.start()
    bootstrap_ratio(parts, parts, resamples=2)
    before = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    bootstrap_ratio(parts, parts, resamples=400)
    after = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # All weights at once would be 64 MB.
    assert after < before + 8e6


def test_two_sizes_are_drawn_independently():
    rng = np.random.default_rng(0)
    values = rng.standard_normal((60, 1)) + 2 * rng.standard_normal((1, 40))

    def mean(rows, columns):
        return np.einsum("di,ij,dj->d", rows, values, columns) / values.size

    result = bootstrap(mean, (60, 40), resamples=4000)
    spread = math.sqrt(values.mean(1).var() / 60 + values.mean(0).var() / 40)
    assert result.estimate == pytest.approx(values.mean())
    assert result.high - result.low == pytest.approx(2 * 1.96 * spread, rel=0.05)
    assert np.isnan(bootstrap(lambda a, b: a.sum(1) + b.sum(1), (60, 1)).low)


def test_basic_ends_are_mirrored_in_the_given_estimate():
    values = np.random.default_rng(0).exponential(size=(50, 2))
    estimate = np.array([1.0, 2.0])

    def mean(weights):
        return weights @ values / 50

    plain = bootstrap(mean, (50,))
    basic = bootstrap(mean, (50,), estimate=estimate, method="basic")
    np.testing.assert_allclose(plain.estimate, values.mean(0))
    np.testing.assert_array_equal(basic.estimate, estimate)
    np.testing.assert_allclose(basic.low, 2 * estimate - plain.high)
    np.testing.assert_allclose(basic.high, 2 * estimate - plain.low)


def test_undefined_resamples_are_left_out_or_make_the_ends_undefined():
    def first(weights):
        """Undefined in about a third of the resamples."""
        return np.where(weights[:, 0] > 0, weights[:, 0], np.nan)

    assert bootstrap(first, (30,)).low == 1
    assert np.isnan(bootstrap(first, (30,), skipna=False)[1:]).all()


def test_over_seeds_is_student_t_without_the_missing():
    values = np.array([[0.81, 0.9, np.nan, 0.93, 0.7], [1, 2, 3, 4, 5]])
    result = over_seeds(values, confidence=0.9)
    for row, number in enumerate((4, 5)):
        defined = values[row][~np.isnan(values[row])]
        mean = sum(defined) / number
        deviation = math.sqrt(sum((value - mean) ** 2 for value in defined) / (number - 1))
        half_width = scipy.stats.t.ppf(0.95, number - 1) * deviation / math.sqrt(number)
        expected = (mean, mean - half_width, mean + half_width)
        np.testing.assert_allclose([end[row] for end in result], expected, rtol=1e-12)
        reference = scipy.stats.ttest_1samp(defined, 0).confidence_interval(0.9)
        np.testing.assert_allclose([result.low[row], result.high[row]], reference, rtol=1e-12)
    # By the table: 2.776 is the 97.5% quantile with 4 degrees of freedom.
    assert over_seeds(values[1]).high - 3 == pytest.approx(2.776 * math.sqrt(2.5 / 5), rel=1e-3)


def test_one_seed_has_a_mean_and_no_interval():
    result = over_seeds(np.array([[0.5, np.nan], [np.nan, np.nan]]))
    np.testing.assert_array_equal(result.estimate, [0.5, np.nan])
    assert np.isnan([result.low, result.high]).all()
    assert over_seeds(np.array([0.25])).estimate == 0.25
    assert np.isnan(over_seeds(np.array([])).estimate)
    same = over_seeds(np.array([2.0, 2.0]))
    assert same == (2, 2, 2)


def test_exact_rates_are_those_of_clopper_and_pearson():
    hits = np.array([[1, 1, 0, 1, 1, -1, 0], [0] * 7, [-1] * 7])
    result = exact_rates(hits)
    np.testing.assert_allclose(result.estimate, [4 / 6, 0, np.nan])
    for row, (right, tried) in enumerate(((4, 6), (0, 7))):
        reference = scipy.stats.binomtest(right, tried).proportion_ci(0.95, method="exact")
        np.testing.assert_allclose([result.low[row], result.high[row]], reference, atol=1e-9)
    assert np.isnan([result.low[2], result.high[2]]).all()


def test_interval_variables_have_names_and_attributes():
    interval = Interval(np.array([0.5, 0.6]), np.array([0.4, 0.5]), np.array([0.6, 0.7]))
    data = xr.Dataset(
        interval_variables("loss", interval, ("split",), long_name="test loss", units="nats")
        | interval_variables("rate", interval, "split", long_name="rate", confidence=0.999)
    )
    assert list(data) == ["loss", "loss_low", "loss_high", "rate", "rate_low", "rate_high"]
    for values, name in zip(interval, ("loss", "loss_low", "loss_high"), strict=True):
        np.testing.assert_array_equal(data[name], values)
        assert data[name].dims == ("split",)
    assert data["loss"].attrs == {"long_name": "test loss", "units": "nats"}
    assert data["loss_low"].attrs == {"long_name": "test loss, lower 95% bound", "units": "nats"}
    assert data["loss_high"].attrs["long_name"] == "test loss, upper 95% bound"
    assert data["rate"].attrs == {"long_name": "rate"}
    assert data["rate_low"].attrs == {"long_name": "rate, lower 99.9% bound"}
    number = bootstrap_ratio(np.arange(3.0))
    assert xr.Dataset(interval_variables("mean", number, (), long_name="mean"))["mean_low"] < 1


OTHER_QUANTILES = ("signedness/scores.py", "control_flow/matching.py")
"""Modules that take quantiles for a scale and for thresholds."""


def test_only_intervals_computes_interval_ends():
    for path in Path(probes.__file__).parent.rglob("*.py"):
        if path.name != "intervals.py":
            text = path.read_text()
            assert "% bound" not in text, path.name
            taken = "quantile(" in text or "percentile(" in text
            assert taken == path.as_posix().endswith(OTHER_QUANTILES), path


def test_docstring_examples_are_right():
    from probes.statistics import intervals

    exports = {name: getattr(probes, name) for name in probes.__all__}
    failed, tried = doctest.testmod(intervals, extraglobs={**exports, "numpy": np, "xarray": xr})
    assert tried > 5
    assert failed == 0


ONES = np.ones((4, 2))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: bootstrap_ratio(np.float64(1)), ValueError, r"parts must .*got \(\)"),
        (lambda: bootstrap_ratio(np.ones((0, 2))), ValueError, r"parts must .*got \(0, 2\)"),
        (lambda: bootstrap_ratio(np.array(["a"])), TypeError, "parts must hold real numbers.*<U1"),
        (lambda: bootstrap_ratio(ONES, ONES * 1j), TypeError, "wholes must .*complex128"),
        (lambda: bootstrap_ratio(ONES, ONES[:3]), ValueError, r"wholes .*\(4, 2\).*got \(3, 2\)"),
        (lambda: bootstrap_ratio(ONES, ONES[:1]), ValueError, r"wholes .*\(4, 2\).*got \(1, 2\)"),
        (lambda: bootstrap_ratio(ONES[:, 0], ONES), ValueError, r"wholes .*\(4,\).*got \(4, 2\)"),
        (
            lambda: bootstrap_ratio(ONES, clusters=np.ones(4)),
            TypeError,
            "clusters must hold integers, got float64",
        ),
        (
            lambda: bootstrap_ratio(ONES, clusters=np.arange(3)),
            ValueError,
            r"clusters must have the shape \(4,\).*got \(3,\)",
        ),
        (lambda: bootstrap_ratio(ONES, resamples=-1), ValueError, "resamples .*at least 0, got -1"),
        (lambda: bootstrap_ratio(ONES, seed=-1), ValueError, "seed must be at least 0, got -1"),
        (
            lambda: bootstrap_ratio(ONES, confidence=95),
            ValueError,
            r"confidence .*\(0, 1\), got 95",
        ),
        (lambda: bootstrap(np.sum, ()), ValueError, r"sizes must .*got \(\)"),
        (lambda: bootstrap(np.sum, (3, 0)), ValueError, r"sizes must .*got \(3, 0\)"),
        (lambda: bootstrap(np.sum, (3,), method="bca"), ValueError, "method must .*got 'bca'"),
        (
            lambda: bootstrap(lambda weights: weights[:1, 0], (3,)),
            ValueError,
            r"statistic must .*\(1000,\), got \(1,\)",
        ),
        (lambda: over_seeds(np.float64(1)), ValueError, r"values must .*got \(\)"),
        (lambda: over_seeds(np.array(["a"])), TypeError, "values must hold real numbers"),
        (lambda: over_seeds(ONES, confidence=0), ValueError, "confidence must .*got 0"),
        (
            lambda: interval_variables(
                "rate", Interval(ONES, ONES, ONES), ("split",), long_name="rate"
            ),
            ValueError,
            r"interval must hold arrays of the dims \('split',\), got shapes .*\(4, 2\)",
        ),
        (
            lambda: interval_variables(
                "rate", Interval(ONES, ONES, ONES[0]), ("example", "split"), long_name="rate"
            ),
            ValueError,
            "interval must hold arrays",
        ),
    ],
)
def test_invalid_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
