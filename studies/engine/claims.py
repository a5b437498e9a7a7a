"""Claims, and the one rule by which they are decided: from intervals over seeds.

Differences are paired by seed (and by draw of the data); their mean has Student's t interval, and
p-values are corrected by Holm's method over all comparisons of a study. One seed decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float
from scipy import stats

import probes
from studies.engine.fairness import Fairness
from studies.engine.readings import Condition, Reading, conditions_of, pairs_of, shown, varied
from studies.engine.results import described

HOLDS, CONTRADICTED, UNDECIDED = "holds", "contradicted", "undecided"
NOT_COMPARABLE, NOT_RUN = "not comparable", "not run"
VERDICTS = (HOLDS, CONTRADICTED, UNDECIDED, NOT_COMPARABLE, NOT_RUN)

LEVEL = 0.05
"""Of all comparisons of a study together."""

MOST_SEEDS = 1000


@dataclass(frozen=True)
class Claim:
    """That one condition exceeds another, or a number, in something that is read.

    It holds if reading(of) - reading(exceeds) is greater than `margin`, and is contradicted if it
    is smaller; with `equals` it holds if the difference lies within +-margin. All else that varies
    is the same on both sides: each combination is a comparison of its own.

    Args:
        statement: the claim, in our words.
        source: paper with its table, figure or section; or "ours".
        reading: what is compared. Of errors, the greater one is that of the worse condition.
        of: coordinates of the condition, such as `{"model": "hyla"}`.
        exceeds: coordinates of another condition, or a number.
        equals: in place of `exceeds`.
        margin: by how much.
        of_learning: whether it is about how well training succeeds, so that a condition that is not
            trained is its outcome and no reason against it.

    Raises:
        ValueError: both or none of `exceeds` and `equals` are given, or `margin` is negative.
    """

    statement: str
    source: str
    reading: Reading
    of: Mapping[str, Any]
    exceeds: Mapping[str, Any] | float | None = None
    equals: Mapping[str, Any] | float | None = None
    margin: float = 0.0
    of_learning: bool = False

    def __post_init__(self):
        if (self.exceeds is None) == (self.equals is None):
            raise ValueError(f"give either exceeds or equals: {self.statement!r}")
        if self.margin < 0 or (self.equals is not None and self.margin == 0):
            raise ValueError(
                f"margin must be at least 0, and greater with equals, got {self.margin}"
            )

    @property
    def other(self) -> Mapping[str, Any] | float:
        """What it is compared with."""
        return self.exceeds if self.exceeds is not None else self.equals  # pyright: ignore[reportReturnType]


@dataclass
class Comparison:
    """A claim under one combination of what else varies.

    Attributes:
        claim: which.
        context: the combination, "" if nothing else varies.
        differences: by pair of cells.
        reason: why it cannot be compared, "" if it can.
        p: two-sided, that the mean difference is at the margin; of `equals`, that it is beyond.
        p_holm: the same, corrected for the number of comparisons.
    """

    claim: Claim
    context: str = ""
    differences: Float[np.ndarray, " pair"] = field(default_factory=lambda: np.array([]))
    reason: str = ""
    p: float = np.nan
    p_holm: float = np.nan

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`."""
        if self.reason:
            return NOT_COMPARABLE
        if len(self.differences) == 0:
            return NOT_RUN
        if not self.p_holm < LEVEL:
            return UNDECIDED
        mean, margin = self.differences.mean(), self.claim.margin
        holds = mean > margin if self.claim.equals is None else abs(mean) < margin
        return HOLDS if holds else CONTRADICTED

    def seeds_needed(self, n_tested: int) -> float:
        """The seeds that would decide it, were mean and spread those seen; NaN if decided."""
        x = self.differences
        if self.verdict != UNDECIDED or len(x) < 2:
            return np.nan
        effect = x.mean() if self.claim.equals is None else abs(x.mean())
        distance, spread = abs(effect - self.claim.margin), x.std(ddof=1)
        n = np.arange(len(x) + 1, MOST_SEEDS + 1)
        critical = stats.t.isf(LEVEL / max(1, n_tested) / 2, n - 1)
        enough = distance > critical * spread / np.sqrt(n)
        return float(n[enough.argmax()]) if enough.any() else np.inf


def judge(result: xr.DataTree, claims: Sequence[Claim], fairness: Fairness) -> xr.Dataset:
    """The verdicts of all claims of a study: [claim], a row for each comparison.

    Args:
        result: with the groups that claims read.
        claims: what is claimed.
        fairness: which conditions are trained, and how they were tuned.

    Returns:
        `statement`, `source`, `context`, `effect` with its interval over seeds, `n_pairs`, `p`,
        `p_holm`, `verdict`, `reason`, `seeds_needed`.
    """
    rows = [one for claim in claims for one in _comparisons(result, claim, fairness)]
    for row in rows:
        row.p = _p_value(row)
    tested = [row for row in rows if np.isfinite(row.p)]
    for row, p in zip(tested, holm([row.p for row in tested]), strict=True):
        row.p_holm = p
    intervals = [probes.over_seeds(row.differences) for row in rows]
    columns = {
        "statement": ("what is claimed", [row.claim.statement for row in rows]),
        "source": ("where it is claimed", [row.claim.source for row in rows]),
        "context": ("what else varies, and its value here", [row.context for row in rows]),
        "reading": ("what is compared", [row.claim.reading.label for row in rows]),
        "verdict": (f"one of: {', '.join(VERDICTS)}", [row.verdict for row in rows]),
        "reason": ("why conditions are not comparable", [row.reason for row in rows]),
        "effect": ("mean difference over seeds", [one.estimate for one in intervals]),
        "effect_low": ("mean difference, lower 95% bound", [one.low for one in intervals]),
        "effect_high": ("mean difference, upper 95% bound", [one.high for one in intervals]),
        "margin": ("difference that counts", [row.claim.margin for row in rows]),
        "n_pairs": ("pairs of models with the same seed", [len(row.differences) for row in rows]),
        "p": ("p-value of a paired t-test", [row.p for row in rows]),
        "p_holm": ("p-value, corrected by Holm's method", [row.p_holm for row in rows]),
        "seeds_needed": (
            "seeds that would decide it",
            [row.seeds_needed(len(tested)) for row in rows],
        ),
    }
    return xr.Dataset(
        described("claim", columns),
        coords=described("claim", {"claim": ("number of the comparison", range(len(rows)))}),
        attrs={
            "rule": "differences paired by seed, Student's t, 95%; Holm-corrected over the study",
            "level": LEVEL,
        },
    )


def holm(p_values: Sequence[float]) -> Float[np.ndarray, " n"]:
    """p-values corrected for their number by Holm's step-down method (Holm 1979)."""
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p, kind="stable")
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    return corrected


def _comparisons(result: xr.DataTree, claim: Claim, fairness: Fairness) -> list[Comparison]:
    """A claim under all combinations of what else varies; an empty one if none was run."""
    values, other = claim.reading.values(result), claim.other
    measured = [one for one in conditions_of(result) if np.isfinite(values[one.cells]).any()]
    mine = [one for one in measured if one.matches(claim.of)]
    if isinstance(other, Mapping):
        named = {*claim.of, *other}
        theirs = [one for one in measured if one.matches(other)]
        both = [(a, b) for a in mine for b in theirs if a is not b and _alike(a, b, named)]
    else:
        named, both = set(claim.of), [(one, None) for one in mine]
    rest = [name for name in varied(result) if name not in named]
    return [
        Comparison(
            claim,
            _context((first, second), rest),
            _differences(result, values, first, second or float(other)),  # pyright: ignore[reportArgumentType]
            fairness.against(first, second, of_learning=claim.of_learning),
        )
        for first, second in both
    ] or [Comparison(claim)]


def _alike(first: Condition, second: Condition, but: set[str]) -> bool:
    """Whether all values agree `but` some; one that does not apply agrees with every value."""
    values = {k: v for k, v in first.values.items() if k not in but and v is not None}
    return second.matches(values)


def _context(conditions: Sequence[Condition | None], names: Sequence[str]) -> str:
    """The values that two conditions share, where they apply to either."""
    parts = []
    for name in names:
        values = [one.values[name] for one in conditions if one is not None]
        if applicable := [value for value in values if value is not None]:
            parts.append(f"{name} {shown(applicable[0])}")
    return ", ".join(parts)


def _differences(
    result: xr.DataTree, values: np.ndarray, first: Condition, second: Condition | float
) -> np.ndarray:
    """Between cells of the same seed and draw of the data; or to a number."""
    mine = dict(zip(pairs_of(result, first.cells), values[first.cells], strict=True))
    theirs = dict.fromkeys(mine, second)
    if isinstance(second, Condition):
        theirs = dict(zip(pairs_of(result, second.cells), values[second.cells], strict=True))
    differences = np.array([mine[pair] - theirs[pair] for pair in mine if pair in theirs])
    return differences[np.isfinite(differences)]


def _p_value(row: Comparison) -> float:
    """Of a t-test of the differences; of `equals` the greater of two one-sided ones."""
    x, margin = row.differences, row.claim.margin
    if row.reason or len(x) < 2:
        return np.nan
    if row.claim.equals is None:
        return _t_test(x - margin, "two-sided")
    inside = max(_t_test(x + margin, "greater"), _t_test(x - margin, "less"))
    outside = min(_t_test(x - margin, "greater"), _t_test(x + margin, "less"))
    return min(inside, outside)


def _t_test(x: np.ndarray, alternative: Any) -> float:
    # Differences that are all the same leave no doubt, or, at 0, no evidence.
    if np.ptp(x) <= 1e-12 * np.abs(x).max():
        holds = {"two-sided": x[0] != 0, "greater": x[0] > 0, "less": x[0] < 0}[alternative]
        return 0.0 if holds else 1.0
    return float(stats.ttest_1samp(x, 0, alternative=alternative).pvalue)  # pyright: ignore[reportAttributeAccessIssue]
