"""What the contextual-retrieval study says: a row for each condition, and the claims, judged.

Of "Compositional Attention" (Mittal et al. 2021) the claims are its section 5.1's, in words of
ours; that a claim holds means that it holds for every seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from studies.running import over_seeds

CONDITION = ("model", "n_searches", "n_retrievals", "d_model")
HOLDS, HOLDS_NOT, NOT_RUN = "holds", "does not hold", "not run"

PAPER = {
    ("multi_head", 2, 4, 64): (0.28, 1.0),
    ("compositional", 2, 4, 64): (0.1, 0.28),
}
"""Its mean absolute errors on ID and OOD, by `CONDITION`."""

Row = dict[str, Any]

FIGURES = {
    "id": "mean absolute error, familiar combinations",
    "ood": "mean absolute error, held-out combinations",
    "id_share": "error on id / that of always answering 0",
    "ood_share": "error on ood / that of always answering 0",
    "agreement_id": "choices that are the preferred retrieval, id",
    "agreement_ood": "choices that are the preferred retrieval, ood",
    "chance_ood": "agreement of choices that heed no preference, ood",
    "entropy_ood": "entropy of value scores / log R, ood",
    "removed_true": "share of the error on ood that the true pairing removes",
    "removed_familiar": "share of the error on ood that its own pairing on id removes",
    "removed_hardened": "share of the error on ood that the model's own choices, hard, remove",
    "removed_random": "share of the error on ood that random choices remove",
    "parameters": "trained parameters",
    "operations": "floating-point operations of a forward pass, one example",
}


def rows_of(result: xr.DataTree) -> list[Row]:
    """A row for each cell: its condition, seed and `FIGURES`, NaN where there is no pairing."""
    errors = result["errors"].to_dataset()
    figures: dict[str, xr.DataArray] = {}
    for split in ("id", "ood"):
        one = errors.sel(split=split)
        figures |= {split: one["error"], f"{split}_share": one["error"] / one["constant"]}
    if "pairing" in result.children:
        pairing = result["pairing"].to_dataset().sel(fitted="id")
        agreement = pairing["agreement"].sel(control="observed", search="pooled")
        figures |= {f"agreement_{split}": agreement.sel(group=split) for split in ("id", "ood")}
        figures["chance_ood"] = pairing["chance"].sel(group="ood", search="pooled")
        figures["entropy_ood"] = pairing["entropy"].sel(group="ood").mean("model_search")
        removed = result["forcing"].to_dataset()["removed"]
        figures |= {
            f"removed_{name}": removed.sel(condition=name)
            for name in ("true", "familiar", "hardened", "random")
        }
    costs = result["costs"].to_dataset()
    figures |= {"parameters": costs["parameters"], "operations": costs["operations"]}
    values = {
        name: figure.reindex(cell=errors["cell"]).to_numpy() for name, figure in figures.items()
    }
    told = {name: errors[name].to_numpy() for name in (*CONDITION, "seed")}
    unknown = dict.fromkeys(FIGURES, np.nan)
    return [
        unknown | {name: column[cell].item() for name, column in (told | values).items()}
        for cell in range(errors.sizes["cell"])
    ]


def summary(rows: list[Row]) -> xr.Dataset:
    """`mean`, `lowest` and `highest` over seeds [condition, figure]."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(tuple(row[name] for name in CONDITION), []).append(number)
    values = {name: np.array([row[name] for row in rows]) for name in FIGURES}
    return over_seeds(values, list(groups.values())).assign_coords(
        {
            name: ("condition", [one[place] for one in groups])
            for place, name in enumerate(CONDITION)
        }
    )


@dataclass(frozen=True)
class Check:
    """A claim about models that differ in nothing else.

    Attributes:
        statement: the claim.
        needs: models that must have been run.
        judge: the rows by model -> whether it holds.
        show: the figures of a row that are told.
    """

    statement: str
    needs: tuple[str, ...]
    judge: Callable[[dict[str, Row]], bool]
    show: tuple[str, ...]


CHECKS = (
    Check(
        "Compositional attention has a lower error than multi-head attention on familiar "
        "combinations",
        ("multi_head", "compositional"),
        lambda by: by["compositional"]["id"] < by["multi_head"]["id"],
        ("id",),
    ),
    Check(
        "It has a lower error on held-out combinations",
        ("multi_head", "compositional"),
        lambda by: by["compositional"]["ood"] < by["multi_head"]["ood"],
        ("ood",),
    ),
    Check(
        "It loses less by the step to held-out combinations",
        ("multi_head", "compositional"),
        lambda by: (
            by["compositional"]["ood"] - by["compositional"]["id"]
            < by["multi_head"]["ood"] - by["multi_head"]["id"]
        ),
        ("id", "ood"),
    ),
    Check(
        "A head for each pair of search and retrieval does not make up for it on held-out "
        "combinations (ours)",
        ("multi_head_pairs", "compositional"),
        lambda by: by["compositional"]["ood"] < by["multi_head_pairs"]["ood"],
        ("ood",),
    ),
    Check(
        "Its searches choose the preferred retrieval on held-out combinations too: more than "
        "half-way from chance to always",
        ("compositional",),
        lambda by: (
            by["compositional"]["agreement_ood"] > (1 + by["compositional"]["chance_ood"]) / 2
        ),
        ("agreement_id", "agreement_ood"),
    ),
    Check(
        "What it still gets wrong there is the pairing: its own pairing on familiar combinations, "
        "forced, removes at least half of the error (ours)",
        ("compositional",),
        lambda by: by["compositional"]["removed_familiar"] >= 0.5,
        ("removed_familiar", "removed_true"),
    ),
)
"""The claims, in the order in which they are told; "ours" are not the paper's."""


def check_claims(rows: list[Row]) -> xr.Dataset:
    """`verdict`, `seeds`, `seeds_for` and `measured` [claim]: over all sizes, widths and seeds."""
    same = ("n_searches", "n_retrievals", "d_model", "seed")
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in same), {})[row["model"]] = row
    told = []
    for check in CHECKS:
        asked = [by for by in groups.values() if all(name in by for name in check.needs)]
        for_it = sum(bool(check.judge(by)) for by in asked)
        verdict = NOT_RUN if not asked else HOLDS if for_it == len(asked) else HOLDS_NOT
        measured = "; ".join(
            f"{name}: "
            + ", ".join(
                f"{shown} {np.mean([by[name][shown] for by in asked]):.2g}" for shown in check.show
            )
            for name in check.needs
            if asked
        )
        told.append((verdict, len(asked), for_it, measured))
    abouts = {
        "verdict": "whether it holds for every seed, size and width",
        "seeds": "comparisons",
        "seeds_for": "comparisons in which it holds",
        "measured": "means over the comparisons",
    }
    return xr.Dataset(
        {
            name: ("claim", np.array(values), {"long_name": about})
            for (name, about), values in zip(abouts.items(), zip(*told, strict=True), strict=True)
        },
        coords={"claim": [check.statement for check in CHECKS]},
    )
