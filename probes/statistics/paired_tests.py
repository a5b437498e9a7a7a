"""Tests of paired differences, such as those of two models over seeds, and their power."""

from typing import Any

import numpy as np
from jaxtyping import Float

from probes.checking import checked


@checked
def paired_test(
    differences: Float[np.ndarray, " pair"], margin: float = 0.0, *, equal: bool = False
) -> float:
    """Test the mean of paired differences against a margin by Student's t test.

    Args:
        differences: differences of independent pairs.
        margin: the mean under the null hypothesis; with `equal`, the bound of the equivalence
            region, greater than 0.
        equal: whether to ask if the mean lies between -margin and margin. The p-value is then twice
            the smaller of two: that of the mean lying inside (two one-sided tests, Schuirmann
            1987), and that of its lying outside. So a mean at the margin is taken for one of them
            as seldom as without `equal`.

    Returns:
        The two-sided p-value in [0, 1]; NaN for fewer than two differences. If all differences are
        the same it is 1 where they equal the margin, else 0.

    Raises:
        ValueError: differences are not finite or not one-dimensional, or the margin is invalid.

    Example:
        >>> round(paired_test(numpy.array([0.06, 0.05, 0.08]), 0.02), 3)
        0.039
    """
    x = _check_differences(differences, margin, equal=equal)
    if len(x) < 2:
        return np.nan
    if not equal:
        return _t_test(x, margin, "two-sided")
    inside = max(_t_test(x, -margin, "greater"), _t_test(x, margin, "less"))
    outside = min(_t_test(x, margin, "greater"), _t_test(x, -margin, "less"))
    return min(1.0, 2 * min(inside, outside))


@checked
def pairs_needed(
    differences: Float[np.ndarray, " pair"],
    margin: float = 0.0,
    *,
    equal: bool = False,
    level: float = 0.05,
    most: int = 1000,
) -> float:
    """Estimate how many pairs make a `paired_test` significant at the observed mean and spread.

    Args:
        differences, margin, equal: as in `paired_test`.
        level: significance level of the two-sided test, in (0, 1).
        most: the largest number of pairs to consider.

    Returns:
        A number larger than that of the differences; infinite if `most` pairs do not suffice; NaN
        for fewer than two differences.

    Raises:
        ValueError: as in `paired_test`, or the level is out of range.

    Example:
        >>> pairs_needed(numpy.array([0.1, 0.3, -0.1]))
        18.0
    """
    # Imported here because scipy.stats takes a second to import.
    from scipy import stats

    if not 0 < level < 1:
        raise ValueError(f"level must be in (0, 1), got {level}")
    x = _check_differences(differences, margin, equal=equal)
    if len(x) < 2:
        return np.nan
    distance = abs((abs(x.mean()) if equal else x.mean()) - margin)
    if distance <= _rounding(x, margin):
        return np.inf
    n = np.arange(len(x) + 1, most + 1)
    enough = distance > stats.t.isf(level / 2, n - 1) * x.std(ddof=1) / np.sqrt(n)
    return float(n[enough.argmax()]) if enough.any() else np.inf


@checked
def holm(p_values: Float[np.ndarray, " test"]) -> Float[np.ndarray, " test"]:
    """Correct p-values for multiple testing by Holm's step-down method (Holm 1979).

    Args:
        p_values: in [0, 1]; NaN (not tested) stays NaN and is not counted.

    Raises:
        ValueError: `p_values` has not one dim, or a number outside of [0, 1].

    Example:
        >>> holm(numpy.array([0.01, 0.04, numpy.nan])).tolist()
        [0.02, 0.04, nan]
    """
    corrected = np.array(p_values, dtype=float)
    if corrected.ndim != 1:
        raise ValueError(f"p_values must have one dim, got shape {corrected.shape}")
    tested = np.flatnonzero(~np.isnan(corrected))
    if (wrong := (corrected[tested] < 0) | (corrected[tested] > 1)).any():
        raise ValueError(f"p_values must be in [0, 1], got {corrected[tested][wrong][0]:g}")
    order = tested[np.argsort(corrected[tested], kind="stable")]
    steps = corrected[order] * np.arange(len(order), 0, -1)
    corrected[order] = np.minimum(1, np.maximum.accumulate(steps))
    return corrected


def _check_differences(differences: Any, margin: float, *, equal: bool) -> np.ndarray:
    x = np.asarray(differences, dtype=float)
    if x.ndim != 1 or not np.isfinite(x).all():
        raise ValueError(f"differences must be finite and one-dimensional, got {x}")
    if not np.isfinite(margin) or (equal and margin <= 0):
        allowed = "greater than 0 with equal" if equal else "finite"
        raise ValueError(f"margin must be {allowed}, got {margin}")
    return x


def _rounding(x: np.ndarray, margin: float) -> float:
    """The largest distance of differences, or of one from the margin, that may be rounding."""
    return 1e-12 * max(np.abs(x).max(), abs(margin))


def _t_test(x: np.ndarray, margin: float, alternative: Any) -> float:
    from scipy import stats

    distances, rounding = x - margin, _rounding(x, margin)
    # Identical differences have no spread: t is infinite, or undefined at 0.
    if np.ptp(x) <= rounding:
        distance = -distances[0] if alternative == "less" else distances[0]
        distance = abs(distance) if alternative == "two-sided" else distance
        return 0.0 if distance > rounding else 1.0
    return float(stats.ttest_1samp(distances, 0, alternative=alternative).pvalue)  # pyright: ignore[reportAttributeAccessIssue]
