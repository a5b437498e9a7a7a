"""The page of the ledger: every claim of the papers with its verdict, and every comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from studies.engine.claims import LEAST_SHARE, NOT_COMPARABLE, NOT_RUN, UNDECIDED, VERDICTS
from studies.engine.fairness import NOT_TRAINED, STILL_IMPROVES
from studies.engine.ledger import COUNTS, rows_of
from studies.engine.remedies import CORES
from studies.report.table import count, short
from studies.report.verdicts import too_small

MANY_PAIRS = 100
"""From here on, it is the smallness of the difference that leaves a comparison undecided."""

INTRODUCTION = f"""# The claims of the papers

Written by `python -m studies.ledger` from the result files beside this page; [claims.nc](claims.nc)
holds the same as data. A claim of a paper rests on claims of our studies, each with one or several
comparisons (at other widths, splits, layers ...). It holds if each of these claims was tried, none
of its comparisons is undecided and all that can be compared hold; it is contradicted if one
comparison is. Of a claim about most cases most must hold, of one about a part any. Where several
files have the same comparison, however the models were trained, those of two models count for which
most learning rates were tried, of these the one with the most draws of the data, and then that with
the most pairs. A comparison is decided by the differences of pairs of models with the same seed and
data (Student's t, corrected by Holm's method over a result file, claims of papers and ours apart; a
second look at a comparison, with more seeds, is not corrected for), with three pairs or more. That
something is better is also contradicted where the difference is shown to be less than
{LEAST_SHARE:.0%} of what the other lacks (of a loss, of wrong answers; or of right ones, if they
are fewer): "less than" such a number. Conditions that are not trained or not tuned
alike are not comparable. All sizes are ours, and smaller than the papers': a verdict is about these
sizes. Times: minutes that the missing pairs would take on the machine that trained the others, at
the measured speed (for what has not learned: all its models anew, for twice as long, which may or
may not be enough); for what was not run, a lower bound on {CORES} cores: the updates of the models
of that preset, at the speed of the smaller models that were run.
"""

OWN = "Controls and questions that no paper has; comparisons as above."


def ledger_page(ledger: xr.DataTree, citations: Mapping[str, str]) -> str:
    """The page of a ledger in Markdown.

    Args:
        ledger: see `studies.engine.ledger.ledger`.
        citations: authors, year and title of each paper.
    """
    entries = list(rows_of(ledger))
    parts = [INTRODUCTION, *_counts(entries, citations), *_over_files(entries)]
    for paper, citation in citations.items():
        mine = [(claim, rows) for claim, rows in entries if claim.paper == paper]
        parts += [f"\n## {citation}\n", *_table(_HEADINGS, map(_claim_row, mine))]
        tried = pd.concat([rows for _, rows in mine])
        if len(tried):
            parts += [f"\n<details><summary>All {len(tried)} comparisons</summary>\n"]
            parts += _table(_COMPARISON_HEADINGS, (_comparison_row(row) for row in _each(tried)))
            parts += ["\n</details>"]
    comparisons = ledger["comparisons"].to_dataset().to_dataframe()
    own = comparisons[comparisons.paper == ""]
    if len(own):
        parts += [f"\n## Claims of our own\n\n{OWN}\n"]
        parts += _table(
            _COMPARISON_HEADINGS[1:], (_comparison_row(row)[1:] for row in _each(pd.DataFrame(own)))
        )
    return "\n".join(parts) + "\n"


_HEADINGS = ("claim", "verdict", "comparisons", "what would decide it")
_COMPARISON_HEADINGS = ("of", "comparison", "difference", "pairs", "size", "verdict", "file")

Entry = tuple[Any, Any]
"""A claim, and its comparisons: rows of pandas' tables, whose columns pyright does not know."""


def _counts(entries: Iterable[Entry], citations: Mapping[str, str]) -> Iterator[str]:
    """The number of claims by paper and verdict."""
    counts = Counter((claim.paper, claim.verdict) for claim, _ in entries)
    rows = [
        (citation.partition(",")[0], *(counts[paper, verdict] for verdict in VERDICTS))
        for paper, citation in citations.items()
    ]
    totals = [sum(column) for column in zip(*(row[1:] for row in rows), strict=True)]
    yield from _table(("paper", *VERDICTS), [*rows, ("all", *totals)])


def _over_files(entries: Iterable[Entry]) -> Iterator[str]:
    """The claims that a correction over all files of a study would leave undecided."""
    claims = [claim for claim, _ in entries]
    weaker = [f"`{one.id}`" for one in claims if one.verdict_over_files != one.verdict]
    if weaker:
        yield (
            f"\nIf p-values were corrected over all files of a study that count, {len(weaker)} of "
            f"these verdicts would be other ones: {', '.join(weaker)}."
        )


def _claim_row(entry: Entry) -> tuple[str, ...]:
    claim, rows = entry
    rows = rows[rows.superseded_by == ""]
    counts = {verdict: claim[name] for verdict, name in COUNTS.items() if verdict != NOT_RUN}
    tried = ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n)
    return f"`{claim.id}` {claim.claimed}", f"**{claim.verdict}**", tried, _needs(claim, rows)


def _needs(claim: Any, rows: Any) -> str:
    """What a decision lacks: pairs and time, training, or a run."""
    needs = []
    undecided = rows[rows.verdict == UNDECIDED]
    if claim.verdict == UNDECIDED and len(undecided):
        needs += [_pairs_of(undecided)]
    if claim.verdict in (UNDECIDED, NOT_COMPARABLE):
        needs += _reasons_of(rows[rows.verdict == NOT_COMPARABLE])
    if claim.lacks and claim.verdict in (UNDECIDED, NOT_COMPARABLE, NOT_RUN):
        needs += [claim.lacks]
    return "; ".join(needs)


def _reasons_of(not_comparable: Any) -> Iterator[str]:
    """Why conditions are not comparable, each reason once, as comparisons share conditions.

    Where they have not learned: for how long they were trained, and what twice as long would take.
    """
    longest: dict[str, Any] = {}
    for row in _each(not_comparable):
        for reason in row.reason.split("; "):
            known = longest.get(reason)
            longest[reason] = row if known is None or row.updates > known.updates else known
    for reason, row in sorted(longest.items()):
        if reason.endswith((NOT_TRAINED, STILL_IMPROVES)):
            twice = f"{count(2 * row.n_pairs * row.pair_minutes)} min on {row.machine}"
            yield f"{reason} after {count(row.updates)} updates (twice as many: {twice})"
        else:
            yield reason


def _pairs_of(undecided: Any) -> str:
    """The pairs that undecided comparisons need, and their time."""
    few = undecided[undecided.n_pairs < 2]
    known = undecided[undecided.n_pairs >= 2]
    near = known[known.seeds_needed <= MANY_PAIRS]
    parts = []
    if len(few):
        parts.append(f"more than one pair ({len(few)})")
    if len(near):
        time = _time_of(near, near.minutes)
        parts.append(f"up to {near.seeds_needed.max():.0f} pairs, {time}")
    far = known.drop(index=near.index)
    if len(far):
        # Where there are as many already, it takes at least as many again.
        missing = (MANY_PAIRS - far.n_pairs).where(far.n_pairs < MANY_PAIRS, far.n_pairs)
        time = _time_of(far, missing * far.pair_minutes)
        parts.append(
            f"more than {MANY_PAIRS} pairs, over {time}: differences too small ({len(far)})"
        )
    return ", ".join(parts)


def _time_of(rows: Any, minutes: Any) -> str:
    """The minutes of comparisons in all, by machine."""
    times = minutes.groupby(rows.machine).sum().items()
    return ", ".join(f"{count(of_machine)} min on {machine}" for machine, of_machine in times)


def _comparison_row(row: Any) -> tuple[str, ...]:
    context = f" ({row.context})" if row.context else ""
    because = row.reason or too_small(row)
    reason = f": {because}" if because else ""
    reason += f" (does not count beside {row.superseded_by})" if row.superseded_by else ""
    return (
        f"`{row.id}`",
        row.statement + context,
        difference(row),
        f"{row.n_pairs}",
        f"{count(row.parameters)} weights, {count(row.updates)} updates",
        row.verdict + reason,
        f"[{row.study}]({row.file})",
    )


def difference(row: Any) -> str:
    """The effect of a comparison with its interval: ".046 [-.071; .16]", or "" if it has none."""
    if not np.isfinite(row.effect):
        return ""
    if not np.isfinite(row.effect_low):
        return short(row.effect)
    return f"{short(row.effect)} [{short(row.effect_low)}; {short(row.effect_high)}]"


def _each(table: pd.DataFrame) -> Iterator[Any]:
    return (row for _, row in table.iterrows())


def _table(headings: Iterable[object], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """A table in Markdown, line by line."""
    headings = list(headings)
    for row in (headings, ["---"] * len(headings), *rows):
        cells = (str(cell).replace("|", r"\|") for cell in row)
        yield f"| {' | '.join(cells)} |"
