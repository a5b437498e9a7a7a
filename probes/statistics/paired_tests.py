"""Tests of paired differences, of two models over seeds, say: p-values, and the pairs they need."""

from typing import Any

import numpy as np
from jaxtyping import Float


def paired_test(
    differences: Float[np.ndarray, " pair"], margin: float = 0.0, *, equal: bool = False
) -> float:
    """The two-sided p-value of Student's t test of differences against a margin.

    Args:
        differences: of independent pairs.
        margin: that the mean difference is compared with; with `equal` its size is, greater than 0.
        equal: whether the question is if the mean lies between -margin and margin. The p-value is
            then that of the two one-sided tests (Schuirmann 1987) that it lies within, or of those
            that it lies outside, whichever is less: a small one says that it is one of the two.

    Returns:
        In [0, 1]; NaN for fewer than two differences. 0 where all are the same and not at the
        margin, 1 where they are all at it.

    Raises:
        ValueError: differences of more than one dim or not finite, a margin that cannot be.

    Example:
        >>> round(paired_test(numpy.array([0.06, 0.05, 0.08]), 0.02), 3)
        0.039
    """
    x = _differences(differences, margin, equal=equal)
    if len(x) < 2:
        return np.nan
    if not equal:
        return _t_test(x - margin, "two-sided")
    inside = max(_t_test(x + margin, "greater"), _t_test(x - margin, "less"))
    outside = min(_t_test(x - margin, "greater"), _t_test(x + margin, "less"))
    return min(inside, outside)


def pairs_needed(
    differences: Float[np.ndarray, " pair"],
    margin: float = 0.0,
    *,
    equal: bool = False,
    level: float = 0.05,
    most: int = 1000,
) -> float:
    """How many pairs would bring a `paired_test` below a level, were mean and spread those seen.

    Args:
        differences, margin, equal: see `paired_test`.
        level: of the two-sided test, in (0, 1).
        most: pairs that are thought of.

    Returns:
        More than there are differences; infinite if `most` would not do; NaN for fewer than two
        differences, which say nothing of the spread.

    Raises:
        ValueError: as of `paired_test`, or a level out of range.

    Example:
        >>> pairs_needed(numpy.array([0.1, 0.3, -0.1]))
        18.0
    """
    # Imported here: scipy.stats takes a second.
    from scipy import stats

    if not 0 < level < 1:
        raise ValueError(f"level must be in (0, 1), got {level}")
    x = _differences(differences, margin, equal=equal)
    if len(x) < 2:
        return np.nan
    distance = abs((abs(x.mean()) if equal else x.mean()) - margin)
    n = np.arange(len(x) + 1, most + 1)
    enough = distance > stats.t.isf(level / 2, n - 1) * x.std(ddof=1) / np.sqrt(n)
    return float(n[enough.argmax()]) if enough.any() else np.inf


def holm(p_values: Float[np.ndarray, " test"]) -> Float[np.ndarray, " test"]:
    """p-values corrected for their number by Holm's step-down method (Holm 1979).

    Args:
        p_values: in [0, 1]; NaN for what was not tested, which stays and does not count.

    Example:
        >>> holm(numpy.array([0.01, 0.04, numpy.nan])).tolist()
        [0.02, 0.04, nan]
    """
    corrected = np.array(p_values, dtype=float)
    tested = np.flatnonzero(~np.isnan(corrected))
    order = tested[np.argsort(corrected[tested], kind="stable")]
    steps = corrected[order] * np.arange(len(order), 0, -1)
    corrected[order] = np.minimum(1, np.maximum.accumulate(steps))
    return corrected


def _differences(differences: Any, margin: float, *, equal: bool) -> np.ndarray:
    x = np.asarray(differences, dtype=float)
    if x.ndim != 1 or not np.isfinite(x).all():
        raise ValueError(f"differences must be finite, with one dim, got {x}")
    if not np.isfinite(margin) or (equal and margin <= 0):
        allowed = "greater than 0 with equal" if equal else "finite"
        raise ValueError(f"margin must be {allowed}, got {margin}")
    return x


def _t_test(x: np.ndarray, alternative: Any) -> float:
    from scipy import stats

    # Differences that are all the same leave no doubt, or, at 0, no evidence.
    if np.ptp(x) <= 1e-12 * np.abs(x).max():
        holds = {"two-sided": x[0] != 0, "greater": x[0] > 0, "less": x[0] < 0}[alternative]
        return 0.0 if holds else 1.0
    return float(stats.ttest_1samp(x, 0, alternative=alternative).pvalue)  # pyright: ignore[reportAttributeAccessIssue]
