"""The ledger: every claim of the papers, with what stored results say about it.

A claim of a paper rests on claims of studies, each of which has one or several comparisons. It
holds if all of them do, and is contradicted if one of them is; `PaperClaim.holds_if` can ask for
most or any of them instead, and `PaperClaim.some` for any comparison of one part. Where several
files have the same comparison of two conditions, those count in which most values of tuned settings
were tried: a rate that suits one side is no fair comparison. Of these the one with the most draws
of the data counts, then that with the most pairs, whatever it says: networks that share their data
say nothing about other data.

Comparisons are decided within their file. What is left of the verdicts if p-values are corrected
over all files of a study stands beside them.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

import probes
from studies.engine.claims import (
    CONTRADICTED,
    HOLDS,
    LEVEL,
    NOT_COMPARABLE,
    NOT_RUN,
    UNDECIDED,
    VERDICTS,
)
from studies.engine.paper_claims import Claimed, PaperClaim
from studies.engine.readings import conditions_of, pairs_of
from studies.engine.remedies import CORES, devices_of
from studies.engine.results import config_of, described

COUNTS = {verdict: f"n_{verdict.replace(' ', '_')}" for verdict in VERDICTS}
"""The names of the numbers of comparisons, by verdict."""

LONG_NAMES = {
    "paper": "table of the paper",
    "id": "name of its claim",
    "claimed": "the claim, in our words",
    "file": "result file",
    "study": "study",
    "statement": "claim of the study that it rests on",
    "context": "what else varies, and its value here",
    "verdict": f"one of: {', '.join(VERDICTS)}",
    "verdict_over_files": "the verdict, if p-values are corrected over all files of a study",
    "p": "p-value of a paired t-test",
    "reason": "why conditions are not comparable",
    "effect": "mean difference over seeds",
    "effect_low": "mean difference, lower 95% bound",
    "effect_high": "mean difference, upper 95% bound",
    "least": "smallest difference that counts, mean over seeds; NaN where any does",
    "n_pairs": "pairs of models with the same seed and draw of the data",
    "superseded_by": "file with the same comparison beside which this one does not count: it has "
    "more values of tuned settings, or as many and more draws of the data, or then more pairs",
    "seeds_needed": "seeds that would decide it at this spread",
    "minutes": "minutes that the missing seeds take, at the measured speed",
    "pair_minutes": "minutes that a pair of models takes, at the measured speed",
    "machine": "on what: the machine that the models of the file were trained on",
    "parameters": "parameters of the larger of both models",
    "updates": "updates of training, the larger number",
    "examples": "examples of training, the larger number",
    "lacks": "what is missing to decide the claim",
    "n_comparisons": "comparisons that were run",
    **{name: f"comparisons: {verdict}" for verdict, name in COUNTS.items()},
    "n_parts": "claims of studies that it rests on",
}
COPIED = ("statement", "context", "verdict", "reason", "effect", "effect_low", "effect_high")
COPIED += ("least", "n_pairs", "p", "seeds_needed")


def ledger(
    results: Mapping[str, xr.DataTree],
    papers: Mapping[str, Claimed],
    remedies: Mapping[tuple[str, str], str],
) -> xr.DataTree:
    """The verdict on every claim of some papers, from results.

    Args:
        results: results by the name of their file.
        papers: claims of papers by name.
        remedies: by study and statement, what would run a claim (see `remedies_of`).

    Returns:
        A tree with two groups. `claims` [claim]: `paper`, `id`, `claimed`, `verdict`,
        `verdict_over_files`, the numbers of comparisons by verdict, `n_parts`, `lacks`.
        `comparisons` [comparison]: those that were run, once for each claim of a paper that rests
        on them, with their study, file, effect, sizes, and the minutes that a decision would take;
        with an empty `paper` and `id` those that no claim of a paper rests on.
    """
    settings = _settings_of(results.values())
    tables = [
        _comparisons_of(file, result, settings[result.attrs["study"]])
        for file, result in results.items()
    ]
    # The columns of empty tables have other types, which others would take.
    found = pd.concat([one for one in tables if len(one)] or tables, ignore_index=True)
    # Models of a single update are there to be counted: what they have not learned is no finding.
    counted = (found.updates <= 1) & (found.verdict == NOT_COMPARABLE)
    found = found.drop(index=np.flatnonzero(counted)).reset_index(drop=True)
    found["superseded_by"] = _superseded(found)
    statements = list(zip(found.study, found.statement, strict=True))
    resting = [
        (name, claim, np.array([claim.rests_on(*statement) for statement in statements]))
        for name, paper in papers.items()
        for claim in paper.claims
    ]
    was_run, of_papers = found.verdict != NOT_RUN, np.any([rests for *_, rests in resting], 0)
    found["verdict_over_files"] = _over_files(found, of_papers)
    entries, used = [], []
    for name, claim, rests in resting:
        entries.append({"paper": name} | _entry(claim, found[rests], remedies))
        used.append(found[rests & was_run].assign(paper=name, id=claim.id))
    used.append(found[~of_papers & was_run].assign(paper="", id=""))
    comparisons = pd.concat(used, ignore_index=True).drop(columns=["compared", "tried", "draws"])
    groups = {
        "claims": _dataset("claim", pd.DataFrame(entries)),
        "comparisons": _dataset("comparison", comparisons),
    }
    return xr.DataTree.from_dict(groups)


def verdict_of(claim: PaperClaim, parts: Mapping[str, Sequence[str]]) -> str:
    """The verdict on a claim of a paper.

    Args:
        claim: the claim.
        parts: the verdicts of all comparisons of each claim of a study that it rests on.

    Example:
        >>> verdict_of(claim, {"A is better than B": ["holds", "undecided"]})
        'undecided'
    """
    everything = [verdict for verdicts in parts.values() for verdict in verdicts]
    counts = Counter(everything)
    compared = counts[HOLDS] + counts[CONTRADICTED] + counts[UNDECIDED]
    if compared == 0:
        return NOT_COMPARABLE if counts[NOT_COMPARABLE] else NOT_RUN
    # A part that nobody ran, or that cannot be compared, is not known to hold, nor not to.
    if claim.holds_if == "most":
        open_parts = sum(set(verdicts) <= {NOT_RUN, NOT_COMPARABLE} for verdicts in parts.values())
        n = compared + open_parts
        if counts[HOLDS] > n / 2:
            return HOLDS
        return CONTRADICTED if counts[CONTRADICTED] >= n / 2 else UNDECIDED
    if claim.holds_if == "any":
        if counts[HOLDS]:
            return HOLDS
        return CONTRADICTED if counts[CONTRADICTED] == len(everything) else UNDECIDED
    if counts[CONTRADICTED]:
        return CONTRADICTED
    holds = all(set(verdicts) & {HOLDS} for verdicts in parts.values())
    return HOLDS if holds and not counts[UNDECIDED] else UNDECIDED


def _entry(claim: PaperClaim, rows: Any, remedies: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    """The row of a claim of a paper, from the comparisons that it rests on."""
    rows = rows[rows.superseded_by == ""]

    def parts_by(column: str) -> dict[str, list[str]]:
        grouped = rows.groupby(["study", "statement"], sort=False)[column]
        # That a file lacks a comparison says nothing where another has it.
        found = {
            part: [one for one in verdicts if one != NOT_RUN] or [NOT_RUN]
            for part, verdicts in grouped
        }
        any_of_them = replace(claim, holds_if="any")
        for part, verdicts in found.items():
            if claim.is_of_some(part[1]):
                found[part] = [verdict_of(any_of_them, {part[1]: verdicts})]
        # Also those of studies without a result.
        known = {part: [NOT_RUN] for part in remedies if claim.rests_on(*part)}
        return {
            f"{study}: {statement} ({remedies.get((study, statement), 'no preset has it')})": one
            for (study, statement), one in (known | found).items()
        }

    parts = parts_by("verdict")
    counts = Counter(rows.verdict)
    missing = [part for part, verdicts in parts.items() if set(verdicts) == {NOT_RUN}]
    lacks = [claim.lacks, "not run: " + "; ".join(missing) if missing else ""]
    if missing or not parts:
        lacks.insert(0, claim.needs)
    return {
        "id": claim.id,
        "claimed": claim.statement,
        "verdict": verdict_of(claim, parts),
        "verdict_over_files": verdict_of(claim, parts_by("verdict_over_files")),
        "n_comparisons": len(rows) - counts[NOT_RUN],
        **{name: counts[verdict] for verdict, name in COUNTS.items()},
        "n_parts": len(parts),
        "lacks": "; ".join(filter(None, lacks)),
    }


def _settings_of(results: Iterable[xr.DataTree]) -> dict[str, dict[str, str]]:
    """By study, the settings by which comparisons differ: coordinate to path in the setup.

    How models are trained is not among them: of two trainings, that with more seeds counts.
    """
    settings: dict[str, dict[str, str]] = {}
    for result in results:
        axes = json.loads(result.attrs["axes"])
        settings.setdefault(result.attrs["study"], {}).update(
            (name, path)
            for name, path in axes["coordinates"].items()
            if name not in axes["pairs"] + axes["tuned"] and not path.startswith("training.")
        )
    return settings


def _compared(result: xr.DataTree, settings: Mapping[str, str]) -> list[str]:
    """By the number of the condition, its settings, also those that the file does not vary."""
    setup = config_of(result)["setup"]
    fixed = {
        name: functools.reduce(lambda part, key: part.get(key, {}), path.split("."), setup)
        for name, path in settings.items()
    }

    def text(value: Any) -> str:
        # Conditions have whole numbers where settings have floats, such as 10.0.
        return f"{value:g}" if isinstance(value, (int, float)) else str(value)

    return [
        ", ".join(text(condition.values.get(name, value)) for name, value in fixed.items())
        for condition in conditions_of(result)
    ]


def _comparisons_of(file: str, result: xr.DataTree, settings: Mapping[str, str]) -> pd.DataFrame:
    """The comparisons of a result, with sizes and times."""
    claims = result["claims"].to_dataset().to_dataframe()
    fairness = result["fairness"].to_dataset()
    table = claims.loc[:, list(COPIED)].assign(file=file, study=result.attrs["study"])
    sides = list(zip(claims["first"], claims["second"], strict=True))
    compared = _compared(result, settings)
    table["compared"] = [" > ".join(compared[i] for i in pair if i >= 0) for pair in sides]
    for name in ("parameters", "updates", "examples"):
        values = fairness[name].to_numpy()
        table[name] = [max((values[i] for i in pair if i >= 0), default=np.nan) for pair in sides]
    tried = fairness["values_tried"].to_numpy()
    # With a number nothing is compared that was tuned for one side.
    table["tried"] = [min(tried[i] for i in pair) if min(pair) >= 0 else 1 for pair in sides]
    # A draw of the data is a setting of its own, or follows from the seed.
    of_seed = config_of(result).get("where", {}).get("seed", {})
    draws = [
        {(*drawn, str(of_seed.get(str(seed)))) for seed, *drawn in pairs_of(result, one.cells)}
        for one in conditions_of(result)
    ]
    compared_draws = [[draws[i] for i in pair if i >= 0] for pair in sides]
    table["draws"] = [len(set.intersection(*of)) if of else 1 for of in compared_draws]
    table.loc[table.verdict == NOT_COMPARABLE, ["tried", "draws"]] = 1
    seconds = fairness["seconds"].to_numpy() * tried
    per_seed = np.array([sum(seconds[i] for i in pair if i >= 0) for pair in sides])
    missing = (claims["seeds_needed"] - claims["n_pairs"]).to_numpy()
    devices = devices_of(result)
    if devices == {"cpu"}:
        pair_minutes, machine = per_seed / 60 / CORES, f"{CORES} cores"
    else:
        # Which of its models were trained on which is not in a result.
        machine = "a GPU and a CPU" if "cpu" in devices else "a GPU"
        pair_minutes = per_seed / 60
    return table.assign(minutes=missing * pair_minutes, pair_minutes=pair_minutes, machine=machine)


def _superseded(found: pd.DataFrame) -> list[str]:
    """The file beside which each comparison does not count; "" if it counts."""
    # Where networks were not trained, more of them say no more.
    found = found.assign(pairs=found.n_pairs.where(found.verdict != NOT_COMPARABLE, 0))
    order = ["tried", "draws", "pairs"]
    best = found.sort_values(order, kind="stable", ascending=False)
    same = ["study", "statement", "compared"]
    most = best.groupby(same)[[*order, "file"]].transform("first").reindex(found.index)
    counts = (found[order] == most[order]).all(axis=1)
    return most.file.where(~counts, "").tolist()


def _over_files(found: pd.DataFrame, of_papers: np.ndarray) -> list[str]:
    """Verdicts, if p-values are corrected over all comparisons of a study that count.

    Args:
        found: all comparisons.
        of_papers: [comparison], on which a claim of a paper rests; others are corrected apart.
    """
    decided = found.verdict.isin([HOLDS, CONTRADICTED])
    tested = found.p.where((decided | (found.verdict == UNDECIDED)) & (found.superseded_by == ""))
    corrected = tested.groupby([found.study, of_papers]).transform(
        lambda p_values: probes.holm(p_values.to_numpy())
    )
    return found.verdict.where(~(decided & (corrected >= LEVEL)), UNDECIDED).tolist()


def _dataset(dim: str, table: pd.DataFrame) -> xr.Dataset:
    """A table as a dataset whose variables have long names."""
    columns = {str(name): (LONG_NAMES[str(name)], table[name].to_numpy()) for name in table}
    # netCDF has no objects: text is text, and the rest are numbers.
    columns = {
        name: (about, values.astype(str) if values.dtype == object else values)
        for name, (about, values) in columns.items()
    }
    number = {dim: (f"number of the {dim}", range(len(table)))}
    return xr.Dataset(described(dim, columns), coords=described(dim, number))


def rows_of(ledger: xr.DataTree) -> Iterator[tuple[Any, Any]]:
    """The claims of a ledger, each with the comparisons that it rests on."""
    claims = ledger["claims"].to_dataset().to_dataframe()
    comparisons = ledger["comparisons"].to_dataset().to_dataframe()
    for _, claim in claims.iterrows():
        mine = (comparisons.paper == claim.paper) & (comparisons.id == claim.id)
        yield claim, comparisons[mine]
