"""Claims, and the one rule by which they are decided: from intervals over seeds.

Differences are paired by seed (and by draw of the data); their mean has Student's t interval, and
p-values are corrected by Holm's method over all comparisons of a study. One seed decides nothing,
nor do two: that they agree says little of how far a third would be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float

import probes
from studies.engine.fairness import Fairness
from studies.engine.readings import Condition, Reading, conditions_of, pairs_of, shown, varied
from studies.engine.results import described

HOLDS, CONTRADICTED, UNDECIDED = "holds", "contradicted", "undecided"
NOT_COMPARABLE, NOT_RUN = "not comparable", "not run"
VERDICTS = (HOLDS, CONTRADICTED, UNDECIDED, NOT_COMPARABLE, NOT_RUN)

LEVEL = 0.05
"""Of all comparisons of a study together."""
FEWEST_PAIRS = 3
"""That decide anything."""


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


@dataclass(frozen=True)
class Comparison:
    """A claim under one combination of what else varies.

    Attributes:
        claim: which.
        context: the combination, "" if nothing else varies.
        differences: by pair of cells.
        reason: why it cannot be compared, "" if it can.
    """

    claim: Claim
    context: str = ""
    differences: Float[np.ndarray, " pair"] = field(default_factory=lambda: np.array([]))
    reason: str = ""

    def p(self) -> float:
        """See `probes.paired_test`; NaN if it cannot be compared."""
        claim = self.claim
        if self.reason:
            return np.nan
        return probes.paired_test(self.differences, claim.margin, equal=claim.equals is not None)

    def verdict(self, p: float) -> str:
        """One of `VERDICTS`, by the corrected p-value."""
        if self.reason:
            return NOT_COMPARABLE
        if len(self.differences) == 0:
            return NOT_RUN
        if not p < LEVEL or len(self.differences) < FEWEST_PAIRS:
            return UNDECIDED
        mean, margin = self.differences.mean(), self.claim.margin
        holds = mean > margin if self.claim.equals is None else abs(mean) < margin
        return HOLDS if holds else CONTRADICTED

    def seeds_needed(self, level: float) -> float:
        """See `probes.pairs_needed`."""
        claim = self.claim
        equal = claim.equals is not None
        needed = probes.pairs_needed(self.differences, claim.margin, equal=equal, level=level)
        return max(needed, FEWEST_PAIRS)


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
    p = np.array([row.p() for row in rows])
    corrected = probes.holm(p)
    level = LEVEL / max(1, np.isfinite(p).sum())
    verdicts = [row.verdict(p) for row, p in zip(rows, corrected, strict=True)]
    needed = [
        row.seeds_needed(level) if verdict == UNDECIDED else np.nan
        for row, verdict in zip(rows, verdicts, strict=True)
    ]
    intervals = [probes.over_seeds(row.differences) for row in rows]
    columns = {
        "statement": ("what is claimed", [row.claim.statement for row in rows]),
        "source": ("where it is claimed", [row.claim.source for row in rows]),
        "context": ("what else varies, and its value here", [row.context for row in rows]),
        "reading": ("what is compared", [row.claim.reading.label for row in rows]),
        "verdict": (f"one of: {', '.join(VERDICTS)}", verdicts),
        "reason": ("why conditions are not comparable", [row.reason for row in rows]),
        "effect": ("mean difference over seeds", [one.estimate for one in intervals]),
        "effect_low": ("mean difference, lower 95% bound", [one.low for one in intervals]),
        "effect_high": ("mean difference, upper 95% bound", [one.high for one in intervals]),
        "margin": ("difference that counts", [row.claim.margin for row in rows]),
        "n_pairs": ("pairs of models with the same seed", [len(row.differences) for row in rows]),
        "p": ("p-value of a paired t-test", p),
        "p_holm": ("p-value, corrected by Holm's method", corrected),
        "seeds_needed": ("seeds that would decide it", needed),
    }
    return xr.Dataset(
        described("claim", columns),
        coords=described("claim", {"claim": ("number of the comparison", range(len(rows)))}),
        attrs={
            "rule": "differences paired by seed, Student's t, 95%; Holm-corrected over the study",
            "level": LEVEL,
        },
    )


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
