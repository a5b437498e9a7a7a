"""Text output on the claims of a study: verdicts, and notes on the fairness of comparisons."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from rich.box import SIMPLE
from rich.table import Column
from rich.table import Table as RichTable

from studies.engine.claims import CONTRADICTED, NOT_RUN, UNDECIDED
from studies.engine.readings import pairs_name
from studies.report.table import short


def render_claims(result: xr.DataTree) -> RichTable | None:
    """A table of the claims that were run, with effect, interval and verdict; None without any."""
    claims = result["claims"].to_dataset().to_dataframe()
    run = claims[claims["verdict"] != NOT_RUN]
    if run.empty:
        return None
    n_not_run = len(claims) - len(run)
    pairs = pairs_name(result)
    rule = (
        f"Difference: mean over {pairs}, paired, with its 95% interval; verdicts by Holm's method."
    )
    missing = ""
    if n_not_run:
        missing = f" {n_not_run} further claims ask for settings that were not run."
    table = RichTable(
        Column("claim (source)", min_width=26),
        Column("difference", no_wrap=True),
        Column(pairs, justify="right"),
        "verdict",
        title="Claims",
        caption=rule + missing,
        caption_justify="left",
        box=SIMPLE,
    )
    previous = None
    for _, comparison in run.iterrows():
        cells = (
            _format_effect(comparison),
            f"{comparison.n_pairs:.0f}",
            _format_verdict(comparison, pairs),
        )
        claim = f"{comparison.statement} ({comparison.source})"
        if claim != previous:
            table.add_section()
            table.add_row(claim, *(("", "", "") if comparison.context else cells))
        if comparison.context:
            table.add_row(f"  {comparison.context}", *cells)
        previous = claim
    return table


def _format_effect(comparison: Any) -> str:
    """The mean difference of a comparison with its interval; "" if it is NaN."""
    if not np.isfinite(comparison.effect):
        return ""
    interval = ""
    if np.isfinite(comparison.effect_low):
        interval = f" [{short(comparison.effect_low)}, {short(comparison.effect_high)}]"
    return short(comparison.effect) + interval


def _format_verdict(comparison: Any, pairs: str) -> str:
    """The verdict of a comparison, with its reason or the number of pairs that would decide."""
    verdict = comparison.verdict
    if comparison.reason:
        return f"{verdict}: {comparison.reason}"
    if small := too_small(comparison):
        return f"{verdict}: {small}"
    if verdict == UNDECIDED and comparison.n_pairs < 2:
        return f"{verdict}: one seed"
    if verdict == UNDECIDED and np.isfinite(comparison.seeds_needed):
        return f"{verdict}: {comparison.seeds_needed:.0f} {pairs} would decide at this spread"
    return verdict


def too_small(comparison: Any) -> str:
    """Which difference would have counted, if that there is less contradicts a claim; else ""."""
    if comparison.verdict == CONTRADICTED and comparison.effect_high > 0 < comparison.least:
        return f"less than {short(comparison.least)}"
    return ""


def render_fairness(result: xr.DataTree) -> list[str]:
    """Notes on conditions that are not trained, still improve, or have a tuned value to doubt."""
    fairness = result["fairness"].to_dataset()
    notes = []
    for flag, value, note in (
        ("trained", 0, "not trained"),
        ("still_improving", 1, "still improving at the end of training"),
        ("at_edge", 1, "best tuned value at the edge of those tried"),
    ):
        labels = fairness["label"].to_numpy()[fairness[flag].to_numpy() == value]
        if len(labels):
            notes.append(f"{note}: {'; '.join(map(str, labels))}")
    tied = fairness["values_tied"].to_numpy() > 1
    if tied.any():
        labels = "; ".join(map(str, fairness["label"].to_numpy()[tied]))
        notes.append(f"tuned values with equal scores, of which the first counts: {labels}")
    return notes
