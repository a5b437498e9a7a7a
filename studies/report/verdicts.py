"""The claims of a study with their verdicts, and what speaks against comparing conditions."""

from __future__ import annotations

import numpy as np
import xarray as xr
from rich.box import SIMPLE
from rich.table import Column
from rich.table import Table as RichTable

from studies.engine.claims import NOT_RUN, UNDECIDED
from studies.report.table import short


def render_claims(result: xr.DataTree) -> RichTable | None:
    """The claims that were run, with effect, interval and verdict; None if there are none."""
    claims = result["claims"].to_dataset()
    run = [n for n in range(claims.sizes["claim"]) if claims["verdict"][n].item() != NOT_RUN]
    if not run:
        return None
    left = claims.sizes["claim"] - len(run)
    rule = "Difference: mean over seeds, paired, with its 95% interval; verdicts by Holm's method."
    missing = f" {left} further claims ask for settings that were not run." if left else ""
    table = RichTable(
        Column("claim (source)", min_width=36),
        Column("difference", no_wrap=True),
        Column("seeds", justify="right"),
        "verdict",
        title="Claims",
        caption=rule + missing,
        caption_justify="left",
        box=SIMPLE,
    )
    before = None
    for number in run:
        one = claims.isel(claim=number)
        statement, context = one["statement"].item(), one["context"].item()
        cells = (effect_in_words(one), f"{one['n_pairs'].item():.0f}", verdict_in_words(one))
        said = f"{statement} ({one['source'].item()})"
        if said != before:
            table.add_section()
            table.add_row(said, *(("", "", "") if context else cells))
        if context:
            table.add_row(f"  {context}", *cells)
        before = said
    return table


def effect_in_words(one: xr.Dataset) -> str:
    """A claim's mean difference and its interval."""
    effect, low, high = (one[name].item() for name in ("effect", "effect_low", "effect_high"))
    if not np.isfinite(effect):
        return ""
    ends = f" [{short(low)}, {short(high)}]" if np.isfinite(low) else ""
    return short(effect) + ends


def verdict_in_words(one: xr.Dataset) -> str:
    """A claim's verdict, with its reason or what would decide it."""
    verdict, needed = one["verdict"].item(), one["seeds_needed"].item()
    if reason := one["reason"].item():
        return f"{verdict}: {reason}"
    if verdict == UNDECIDED and one["n_pairs"].item() < 2:
        return f"{verdict}: one seed"
    if verdict == UNDECIDED and np.isfinite(needed):
        return f"{verdict}: {needed:.0f} seeds would decide at this spread"
    return str(verdict)


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
