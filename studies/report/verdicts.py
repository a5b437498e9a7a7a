"""The claims of a study with their verdicts, and what speaks against comparing conditions."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from rich.box import SIMPLE
from rich.table import Column
from rich.table import Table as RichTable

from studies.engine.claims import NOT_RUN, UNDECIDED
from studies.report.table import short


def render_claims(result: xr.DataTree) -> RichTable | None:
    """The claims that were run, with effect, interval and verdict; None if there are none."""
    claims = result["claims"].to_dataset().to_dataframe()
    run = claims[claims["verdict"] != NOT_RUN]
    if run.empty:
        return None
    left = len(claims) - len(run)
    rule = "Difference: mean over seeds, paired, with its 95% interval; verdicts by Holm's method."
    missing = f" {left} further claims ask for settings that were not run." if left else ""
    table = RichTable(
        Column("claim (source)", min_width=26),
        Column("difference", no_wrap=True),
        Column("seeds", justify="right"),
        "verdict",
        title="Claims",
        caption=rule + missing,
        caption_justify="left",
        box=SIMPLE,
    )
    before = None
    for _, one in run.iterrows():
        cells = (effect_in_words(one), f"{one.n_pairs:.0f}", verdict_in_words(one))
        said = f"{one.statement} ({one.source})"
        if said != before:
            table.add_section()
            table.add_row(said, *(("", "", "") if one.context else cells))
        if one.context:
            table.add_row(f"  {one.context}", *cells)
        before = said
    return table


def effect_in_words(one: Any) -> str:
    """A claim's mean difference and its interval."""
    if not np.isfinite(one.effect):
        return ""
    known = np.isfinite(one.effect_low)
    ends = f" [{short(one.effect_low)}, {short(one.effect_high)}]" if known else ""
    return short(one.effect) + ends


def verdict_in_words(one: Any) -> str:
    """A claim's verdict, with its reason or what would decide it."""
    if one.reason:
        return f"{one.verdict}: {one.reason}"
    if one.verdict == UNDECIDED and one.n_pairs < 2:
        return f"{one.verdict}: one seed"
    if one.verdict == UNDECIDED and np.isfinite(one.seeds_needed):
        return f"{one.verdict}: {one.seeds_needed:.0f} seeds would decide at this spread"
    return one.verdict


def render_fairness(result: xr.DataTree) -> list[str]:
    """Lines about conditions that are not trained, still improve, or sit at a grid's edge."""
    fairness = result["fairness"].to_dataset()
    notes = []
    for flag, value, about in (
        ("trained", 0, "not trained"),
        ("still_improving", 1, "still improving at the end of training"),
        ("at_edge", 1, "best tuned value at the edge of those tried"),
    ):
        labels = fairness["label"].to_numpy()[fairness[flag].to_numpy() == value]
        if len(labels):
            notes.append(f"{about}: {'; '.join(map(str, labels))}")
    return notes
