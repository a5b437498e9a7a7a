"""Claims, and the single rule that decides them from intervals over seeds.

Differences are paired by seed (and by draw of the data). Their mean has Student's t interval, and
p-values are corrected by Holm's method over all comparisons of a result: those of the claims of
papers together, and those of our own, so that a claim of ours that is added later does not change
what is said of a paper. Fewer than three seeds never decide a claim: two that agree say little
about where a third would lie. A claim of more is also contradicted by a difference that is shown to
be too small to count; without that, no number of seeds would contradict it where nothing differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float

import probes
from studies.engine.fairness import STILL_IMPROVES, Fairness, TrainedIf
from studies.engine.readings import Condition, Reading, conditions_of, pairs_of, varied
from studies.engine.results import described
from studies.engine.setup import Metric

HOLDS, CONTRADICTED, UNDECIDED = "holds", "contradicted", "undecided"
NOT_COMPARABLE, NOT_RUN = "not comparable", "not run"
VERDICTS = (HOLDS, CONTRADICTED, UNDECIDED, NOT_COMPARABLE, NOT_RUN)

Paired = Float[np.ndarray, "2 pair"]

LEVEL = 0.05
"""Significance level of all comparisons of a study with papers' claims together, and with ours."""
OURS = "ours"
"""What the source of a claim of no paper begins with."""
FEWEST_PAIRS = 3
"""The smallest number of pairs that can decide a comparison."""
LEAST_SHARE = 0.1
"""The smallest difference that counts, as a share of what a model lacks (or has, if less)."""


@dataclass(frozen=True)
class Claim:
    """The claim that a reading of one condition exceeds, or equals, another condition or a number.

    It holds if reading(of) - reading(exceeds) is greater than `margin`, and is contradicted if it
    is smaller; with `equals` it holds if the difference lies within +-margin. All other
    coordinates are the same on both sides: each combination of their values is one comparison.

    A claim of more, without a margin, is also contradicted by a difference that is too small to
    count. This is so for metrics with a best value (`Metric.best`), where the better condition
    makes up for less than `LEAST_SHARE` of what the other lacks, or of what it has if that is less.

    A metric that still improved in the last fifth of training is not said to miss a number.

    Args:
        statement: the claim, in our words.
        source: paper with its table, figure or section; or "ours", "ours, after a paper".
        reading: the number that is compared. If lower is better, the worse condition exceeds.
        of: coordinates of the condition, such as `{"model": "hyla"}`.
        exceeds: coordinates of the other condition, or a number.
        equals: the same, for a claim of equality; give either `exceeds` or `equals`.
        margin: the smallest difference that counts; with `equals` the largest that does not. A
            negative one makes a claim of "not worse, or by less than that".
        of_learning: whether the claim is about the success of training itself, so that an
            untrained condition is a valid outcome and not a reason to refuse the comparison.
        trained: what shows that the answers that are compared were learned at all; where no side
            meets it, there is nothing to compare.
        no_gain: whether the claim is that the other condition gains nothing over this one, or less
            than a negative `margin`, so that it needs room for a gain (see `Metric.best`). If lower
            is better, the sides change places here too.

    Raises:
        ValueError: both or none of `exceeds` and `equals` are given, `margin` is not positive with
            `equals`, or not negative with `no_gain`.
    """

    statement: str
    source: str
    reading: Reading
    of: Mapping[str, Any]
    exceeds: Mapping[str, Any] | float | None = None
    equals: Mapping[str, Any] | float | None = None
    margin: float = 0.0
    of_learning: bool = False
    trained: TrainedIf | None = None
    no_gain: bool = False

    def __post_init__(self):
        if (self.exceeds is None) == (self.equals is None):
            raise ValueError(
                f"either exceeds or equals must be given, got exceeds={self.exceeds!r} and "
                f"equals={self.equals!r} in {self.statement!r}"
            )
        if self.equals is not None and self.margin <= 0:
            raise ValueError(f"margin must be greater than 0 with equals, got {self.margin}")
        if self.no_gain and self.margin >= 0:
            raise ValueError(f"margin must be less than 0 with no_gain, got {self.margin}")

    @property
    def other(self) -> Mapping[str, Any] | float:
        """The other side of the comparison: coordinates of a condition, or a number."""
        return self.exceeds if self.exceeds is not None else self.equals  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class Comparison:
    """A claim at one combination of values of the other coordinates.

    Attributes:
        claim: the claim.
        context: the combination in words; "" if nothing else varies.
        differences: the difference for each pair of cells; empty if it was not run.
        reason: why the conditions are not comparable; "" if they are.
        sides: numbers of the conditions that are compared: one, if the claim has a number.
        least: the smallest difference that counts, for each pair; empty if any does.
    """

    claim: Claim
    context: str = ""
    differences: Float[np.ndarray, " pair"] = field(default_factory=lambda: np.array([]))
    reason: str = ""
    sides: tuple[int, ...] = ()
    least: Float[np.ndarray, " pair"] = field(default_factory=lambda: np.array([]))

    def p(self) -> float:
        """The p-value of `probes.paired_test`; NaN if the conditions are not comparable."""
        return np.nan if self.reason else self._p_of(self._tested())

    def _p_of(self, differences: np.ndarray) -> float:
        equal = self.claim.equals is not None
        return probes.paired_test(differences, self.claim.margin, equal=equal)

    def _tested(self) -> np.ndarray:
        """What is tested against the margin: differences, or what they lack to count.

        At most one of the two questions, whether there are any and whether they are too small, can
        be answered wrongly with yes, so that no correction is due.
        """
        if len(self.least) < FEWEST_PAIRS or self.differences.mean() >= self.least.mean():
            return self.differences
        are_there = self.differences.mean() > 0 and self._p_of(self.differences) < LEVEL
        return self.differences if are_there else self.differences - self.least

    def verdict(self, p: float) -> str:
        """One of `VERDICTS`, from the corrected p-value."""
        if self.reason:
            return NOT_COMPARABLE
        if len(self.differences) == 0:
            return NOT_RUN
        if not p < LEVEL or len(self.differences) < FEWEST_PAIRS:
            return UNDECIDED
        mean, margin = self._tested().mean(), self.claim.margin
        holds = mean > margin if self.claim.equals is None else abs(mean) < margin
        return HOLDS if holds else CONTRADICTED

    def seeds_needed(self, level: float) -> float:
        """The number of seeds that would decide at this spread; see `probes.pairs_needed`."""
        margin, equal = self.claim.margin, self.claim.equals is not None
        needed = (
            probes.pairs_needed(differences, margin, equal=equal, level=level)
            for differences in (self.differences, self._tested())
        )
        return max(min(needed), FEWEST_PAIRS)


def judge(
    result: xr.DataTree,
    claims: Sequence[Claim],
    fairness: Fairness,
    metrics: Mapping[str, Metric] | None = None,
) -> xr.Dataset:
    """Decide all claims of a study.

    Args:
        result: with the groups that the claims' readings need.
        claims: the claims of the study.
        fairness: which conditions are trained, and how they were tuned.
        metrics: those of the setup, by name.

    Returns:
        Dataset [claim], one row per comparison: `statement`, `source`, `context`, `reading`,
        `effect` with its interval over seeds, `margin`, `least`, `n_pairs`, `p`, `p_holm`,
        `verdict`, `reason`, `seeds_needed`, and the numbers of the conditions, `first` and
        `second`, -1 for none.
    """
    rows = [row for claim in claims for row in _comparisons(result, claim, fairness, metrics or {})]
    p = np.array([row.p() for row in rows])
    corrected, levels = np.full_like(p, np.nan), np.full_like(p, LEVEL)
    is_ours = np.array([row.claim.source.startswith(OURS) for row in rows], bool)
    for family in (is_ours, ~is_ours):
        corrected[family] = probes.holm(p[family])
        levels[family] /= max(1, np.isfinite(p[family]).sum())
    verdicts = [row.verdict(p) for row, p in zip(rows, corrected, strict=True)]
    needed = [
        row.seeds_needed(level) if verdict == UNDECIDED else np.nan
        for row, verdict, level in zip(rows, verdicts, levels, strict=True)
    ]
    intervals = [probes.over_seeds(row.differences) for row in rows]
    columns = {
        "statement": ("what is claimed", [row.claim.statement for row in rows]),
        "source": ("where it is claimed", [row.claim.source for row in rows]),
        "context": ("what else varies, and its value here", [row.context for row in rows]),
        "reading": ("what is compared", [row.claim.reading.label for row in rows]),
        "verdict": (f"one of: {', '.join(VERDICTS)}", verdicts),
        "reason": ("why conditions are not comparable", [row.reason for row in rows]),
        "effect": ("mean difference over seeds", [mean.estimate for mean in intervals]),
        "effect_low": ("mean difference, lower 95% bound", [mean.low for mean in intervals]),
        "effect_high": ("mean difference, upper 95% bound", [mean.high for mean in intervals]),
        "margin": ("margin of the claim", [row.claim.margin for row in rows]),
        "least": (
            "smallest difference that counts, mean over seeds; NaN where any does",
            [row.least.mean() if len(row.least) else np.nan for row in rows],
        ),
        "n_pairs": ("pairs of models with the same seed", [len(row.differences) for row in rows]),
        "p": ("p-value of a paired t-test", p),
        "p_holm": ("p-value, corrected by Holm's method", corrected),
        "seeds_needed": ("seeds that would decide it", needed),
        "first": ("number of the condition of the claim", [(*row.sides, -1)[0] for row in rows]),
        "second": ("number of the other one", [(*row.sides, -1, -1)[1] for row in rows]),
    }
    return xr.Dataset(
        described("claim", columns),
        coords=described("claim", {"claim": ("number of the comparison", range(len(rows)))}),
        attrs={
            "rule": "differences paired by seed, Student's t, 95%; Holm-corrected over the study, "
            "claims of papers and ours apart",
            "level": LEVEL,
        },
    )


def _comparisons(
    result: xr.DataTree, claim: Claim, fairness: Fairness, metrics: Mapping[str, Metric]
) -> list[Comparison]:
    """The comparisons of a claim, at all combinations of the other coordinates.

    A claim about conditions that were not run has a single, empty comparison.
    """
    values, other = claim.reading.values(result), claim.other
    measured = [
        condition
        for condition in conditions_of(result)
        if np.isfinite(values[condition.cells]).any()
    ]
    firsts = [condition for condition in measured if condition.matches(claim.of)]
    if isinstance(other, Mapping):
        compared = {*claim.of, *other}
        seconds = [condition for condition in measured if condition.matches(other)]
        sides = [
            (first, second)
            for first in firsts
            for second in seconds
            if first is not second and _agree(first, second, ignore=compared)
        ]
    else:
        compared, sides = set(claim.of), [(first, None) for first in firsts]
    shared = [name for name in varied(result) if name not in compared]
    comparisons = []
    for first, second in sides:
        context = _context((first, second), shared)
        pairs = _paired(result, values, first, second or float(other))  # pyright: ignore[reportArgumentType]
        differences = pairs[0] - pairs[1]
        metric = metrics.get(claim.reading.metric or "")
        of_two = metric if second is not None else None
        reason = (
            fairness.objections(first, second, of_learning=claim.of_learning)
            or _not_learned(result, claim, (first, second))
            or _no_contest(claim, differences)
            or _at_the_best(claim, of_two, pairs)
            or _only_bounds(result, claim, (first, second), differences)
            or _may_come_to_it(claim, metric, first, differences, fairness)
        )
        numbers = tuple(side.number for side in (first, second) if side is not None)
        least = _least(claim, of_two, pairs)
        comparisons.append(Comparison(claim, context, differences, reason, numbers, least))
    return comparisons or [Comparison(claim)]


def _not_learned(result: xr.DataTree, claim: Claim, sides: Sequence[Condition | None]) -> str:
    """Why there is nothing to compare: no side has learned these answers; "" if one has."""
    if claim.trained is None:
        return ""
    met = [claim.trained.met_by(result, side.cells) for side in sides if side is not None]
    return f"no side has learned {claim.trained.group}" if set(met) == {False} else ""


def _no_contest(claim: Claim, differences: np.ndarray) -> str:
    """Why differences cannot decide a claim of more: none has a sign, as where all are perfect."""
    alike = len(differences) >= FEWEST_PAIRS and not differences.any()
    return "no pair differs" if _is_of_more(claim) and alike else ""


def _at_the_best(claim: Claim, metric: Metric | None, pairs: Paired) -> str:
    """Why pairs cannot decide a claim: one verdict would take values beyond the metric's best.

    A gain that is denied could not have been seen, or one that is predicted is impossible, where
    what it is measured from lacks less than that.
    """
    if metric is None or metric.best is None or pairs.size == 0:
        return ""
    # Where lower values are better the worse side exceeds, so that they change places.
    of, other = pairs.mean(1)[:: metric.sign()]
    start, gain = (of, -claim.margin) if claim.no_gain else (other, claim.margin)
    if claim.equals is not None:
        # What is to be equalled may be a value with a gain, and so beyond the best one itself.
        start, gain = pairs[1].mean(), -claim.margin
    needed = start + metric.sign() * gain
    if metric.sign() * (metric.best - needed) >= 0:
        return ""
    return f"no room for the gain: it takes {needed:.4g}, the best is {metric.best:g}"


def _only_bounds(
    result: xr.DataTree,
    claim: Claim,
    sides: Sequence[Condition | None],
    differences: np.ndarray,
) -> str:
    """Why differences cannot decide a claim: true values, above lower bounds, could turn it round.

    What seems to hold would not if the second side is greater than its bound; what seems to be
    contradicted would not if the first is.
    """
    if claim.reading.at_least is None or len(differences) == 0:
        return ""
    is_bound, (first, second) = claim.reading.at_least(result), sides
    unsafe = (second,) if differences.mean() > claim.margin else (first,)
    if claim.equals is not None:
        unsafe = sides
    labels = [one.label(varied(result)) for one in unsafe if one and is_bound[one.cells].any()]
    return "; ".join(f"{label} has no more than a lower bound" for label in labels)


def _may_come_to_it(
    claim: Claim,
    metric: Metric | None,
    first: Condition,
    differences: np.ndarray,
    fairness: Fairness,
) -> str:
    """Why it cannot be said that a number is not reached: the metric still improves towards it."""
    if metric is None or not isinstance(claim.exceeds, int | float) or len(differences) == 0:
        return ""
    lacks = metric.sign() * (claim.margin - differences.mean())
    state = fairness.data.isel(condition=first.number)
    improves = state["still_improving"].item() == 1
    return f"{state['label'].item()} {STILL_IMPROVES}" if lacks > 0 and improves else ""


def _is_of_more(claim: Claim) -> bool:
    return claim.equals is None and claim.margin == 0


def _least(claim: Claim, metric: Metric | None, pairs: Paired) -> np.ndarray:
    """The smallest differences [pair] that count; none where any does."""
    if not _is_of_more(claim) or metric is None or metric.best is None:
        return np.array([])
    # The first exceeds the second, so it is worse where lower values are better.
    worse = pairs[0] if metric.better == "lower" else pairs[1]
    # Where hardly anything is right, a small gain is large for what there is.
    return LEAST_SHARE * np.minimum(np.abs(metric.best - worse), np.abs(worse))


def _agree(first: Condition, second: Condition, *, ignore: set[str]) -> bool:
    """Whether two conditions have the same values; None (does not apply) equals every value."""
    values = {k: v for k, v in first.values.items() if k not in ignore and v is not None}
    return second.matches(values)


def _context(conditions: Sequence[Condition | None], names: Sequence[str]) -> str:
    """The values that two conditions share, such as "width 8", where they apply to either."""
    parts = []
    for name in names:
        values = [condition.values[name] for condition in conditions if condition is not None]
        if applicable := [value for value in values if value is not None]:
            parts.append(f"{name} {applicable[0]}")
    return ", ".join(parts)


def _paired(
    result: xr.DataTree, values: np.ndarray, first: Condition, second: Condition | float
) -> Paired:
    """Finite values of two conditions, or of one and a number, at the same seeds and draws."""
    firsts = dict(zip(pairs_of(result, first.cells), values[first.cells], strict=True))
    seconds = dict.fromkeys(firsts, second)
    if isinstance(second, Condition):
        seconds = dict(zip(pairs_of(result, second.cells), values[second.cells], strict=True))
    both = [[side[pair] for pair in firsts if pair in seconds] for side in (firsts, seconds)]
    pairs = np.array(both, float)
    return pairs[:, np.isfinite(pairs).all(0)]
