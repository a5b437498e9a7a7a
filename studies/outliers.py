"""Outliers among the seeds of one condition."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float
from scipy import stats


def without_outliers(
    values: Float[np.ndarray, " n"], *, significance: float = 0.05
) -> Bool[np.ndarray, " n"]:
    """Which values are kept by Grubbs' test (Grubbs 1950, two-sided), repeated until none goes.

    The farthest value goes if |value - mean| / s exceeds (n - 1) / sqrt(n) * sqrt(t^2 / (n - 2 +
    t^2)), with t the upper critical value of Student's t with n - 2 degrees of freedom at
    significance / (2 n). Fewer than three values are all kept. Values that are not finite are not.
    """
    kept = np.isfinite(values)
    while (n := int(kept.sum())) > 2:
        inside = values[kept]
        spread = inside.std(ddof=1)
        # Differences in the last bits are none.
        if spread <= 1e-12 * np.abs(inside).max():
            break
        distance = np.where(kept, np.abs(values - inside.mean()), -np.inf)
        t = stats.t.isf(significance / (2 * n), n - 2)
        critical = (n - 1) / np.sqrt(n) * np.sqrt(t**2 / (n - 2 + t**2))
        if distance.max() / spread <= critical:
            break
        kept[distance.argmax()] = False
    return kept
