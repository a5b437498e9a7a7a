"""Claims, and the one rule by which they are decided: from intervals over seeds.

Differences are paired by seed (and by draw of the data); their mean has Student's t interval, and
p-values are corrected by Holm's method over all comparisons of a study. One seed decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float
from scipy import stats

import probes
from studies.engine.fairness import Fairness
from studies.engine.readings import Condition, Reading, conditions_of, pairs_of, varied

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
    """A claim under one combination of what else varies, and what was measured.

    Attributes:
        claim: which.
        context: the combination, "" if nothing else varies.
        differences: by pair of cells.
        reason: why it cannot be compared, "" if it can.
        p: two-sided, that the mean difference is at the margin; of `equals`, that it is beyond.
    """

    claim: Claim
    context: str
    differences: Float[np.ndarray, " pair"]
    reason: str
    p: float = np.nan
    p_holm: float = np.nan
    verdict: str = NOT_RUN
    seeds_needed: float = np.nan


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
    for row in rows:
        row.verdict = _verdict(row)
        row.seeds_needed = _seeds_needed(row, len(tested))
    return _as_dataset(rows)


def holm(p_values: Sequence[float]) -> Float[np.ndarray, " n"]:
    """p-values corrected for their number by Holm's step-down method (Holm 1979)."""
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p, kind="stable")
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    return corrected


def _comparisons(result: xr.DataTree, claim: Claim, fairness: Fairness) -> list[Comparison]:
    conditions = conditions_of(result)
    values = claim.reading.values(result)
    mine = [one for one in conditions if one.matches(claim.of) and _known(values, one)]
    if isinstance(claim.other, Mapping):
        theirs = [one for one in conditions if one.matches(claim.other) and _known(values, one)]
        named = {*claim.of, *claim.other}
        both = [(a, b) for a in mine for b in theirs if a is not b and _alike(a, b, named)]
    else:
        named, both = {*claim.of}, [(one, None) for one in mine]
    told = [name for name in varied(result) if name not in named]
    found = []
    for first, second in both:
        place = {name: _first(first, second, name) for name in told}
        context = ", ".join(f"{name} {value}" for name, value in place.items() if value is not None)
        differences = _differences(result, values, first, second, claim)
        reason = fairness.against(first, second, of_learning=claim.of_learning)
        found.append(Comparison(claim, context, differences, reason))
    return found or [Comparison(claim, "", np.array([]), "")]


def _known(values: np.ndarray, condition: Condition) -> bool:
    return len(condition.cells) > 0 and bool(np.isfinite(values[condition.cells]).any())


def _alike(first: Condition, second: Condition, but: set[str]) -> bool:
    rest = {name: value for name, value in first.values.items() if name not in but}
    known = {name: value for name, value in rest.items() if value is not None}
    return second.matches(known)


def _first(first: Condition, second: Condition | None, name: str) -> Any:
    value = first.values[name]
    return value if value is not None or second is None else second.values[name]


def _differences(
    result: xr.DataTree,
    values: np.ndarray,
    first: Condition,
    second: Condition | None,
    claim: Claim,
) -> np.ndarray:
    mine = dict(zip(pairs_of(result, first.cells), values[first.cells], strict=True))
    if second is None:
        theirs = dict.fromkeys(mine, float(claim.other))  # pyright: ignore[reportArgumentType]
    else:
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
    found: Any = stats.ttest_1samp(x, 0, alternative=alternative)
    return float(found.pvalue)


def _verdict(row: Comparison) -> str:
    if row.reason:
        return NOT_COMPARABLE
    if len(row.differences) == 0:
        return NOT_RUN
    if not row.p_holm < LEVEL:
        return UNDECIDED
    mean, margin = row.differences.mean(), row.claim.margin
    if row.claim.equals is None:
        return HOLDS if mean > margin else CONTRADICTED
    return HOLDS if abs(mean) < margin else CONTRADICTED


def _seeds_needed(row: Comparison, n_tested: int) -> float:
    """The seeds that would decide it, were their mean and spread those seen; NaN if decided."""
    x = row.differences
    if row.verdict != UNDECIDED or len(x) < 2:
        return np.nan
    distance, spread = abs(abs(x.mean()) - row.claim.margin), x.std(ddof=1)
    if row.claim.equals is None:
        distance = abs(x.mean() - row.claim.margin)
    level = LEVEL / max(1, n_tested)
    n = np.arange(len(x) + 1, MOST_SEEDS + 1)
    enough = distance > stats.t.isf(level / 2, n - 1) * spread / np.sqrt(n)
    return float(n[enough.argmax()]) if enough.any() else np.inf


def _as_dataset(rows: list[Comparison]) -> xr.Dataset:
    intervals = [probes.over_seeds(row.differences) for row in rows]
    text = {
        "statement": ("what is claimed", [row.claim.statement for row in rows]),
        "source": ("where it is claimed", [row.claim.source for row in rows]),
        "context": ("what else varies, and its value here", [row.context for row in rows]),
        "reading": ("what is compared", [row.claim.reading.label for row in rows]),
        "verdict": (f"one of: {', '.join(VERDICTS)}", [row.verdict for row in rows]),
        "reason": ("why conditions are not comparable", [row.reason for row in rows]),
    }
    numbers = {
        "effect": ("mean difference over seeds", [float(one.estimate) for one in intervals]),
        "effect_low": ("mean difference, lower 95% bound", [float(one.low) for one in intervals]),
        "effect_high": ("mean difference, upper 95% bound", [float(one.high) for one in intervals]),
        "margin": ("difference that counts", [row.claim.margin for row in rows]),
        "n_pairs": ("pairs of models with the same seed", [len(row.differences) for row in rows]),
        "p": ("p-value of a paired t-test", [row.p for row in rows]),
        "p_holm": ("p-value, corrected by Holm's method", [row.p_holm for row in rows]),
        "seeds_needed": ("seeds that would decide it", [row.seeds_needed for row in rows]),
    }
    data = {
        name: ("claim", np.array(values), {"long_name": about})
        for name, (about, values) in (text | numbers).items()
    }
    coords = {"claim": ("claim", np.arange(len(rows)), {"long_name": "number of the comparison"})}
    attrs = {
        "rule": "differences paired by seed, Student's t, 95%; Holm-corrected over the study",
        "level": LEVEL,
    }
    return xr.Dataset(data, coords=coords, attrs=attrs)
