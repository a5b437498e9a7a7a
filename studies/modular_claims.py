"""The claims of Ostapenko et al. 2022, each checked against what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from studies.outliers import without_outliers

Row = dict[str, Any]
"""A condition and the figures that were measured under it."""

CONDITION = (
    "model",
    "objective",
    "selection_bottleneck",
    "functional_bottleneck",
    "module_keys",
    "pool",
    "n_layers",
    "n_operators",
    "n_points",
)
"""What tells conditions apart; a condition's cells differ in learning rate and seed."""

FULL = 0.95
"""Specialization that counts as full, in the mean over layers."""
LOW = 0.05
"""Loss that counts as low, as a share of that of a constant answer."""
FAR = 0.1
"""Share of a loss below which another is far below it."""
SAME = 2.0
"""Factor within which two losses are the same."""

ROUTERS = ("cross_attention", "concatenation", "encoder")
MODULAR = ("structural_oracle", *ROUTERS)
TASK = ("n_operators", "n_points")
NOT_RUN = "not run"
MOST_SHOWN = 8
"""Conditions whose figures are told; there may be hundreds."""


@dataclass(frozen=True)
class Claim:
    """One claim, what was measured, and whether it holds."""

    statement: str
    measured: str
    verdict: str


@dataclass(frozen=True)
class Check:
    """How a claim is checked: among conditions that are alike but for `varied`.

    Attributes:
        statement: the claim.
        varied: a name of `CONDITION`.
        needs: the values of `varied` that must all have been run.
        judge: the rows by their value of `varied` -> whether it holds, and the figures.
        of: which rows it is about.
    """

    statement: str
    varied: str
    needs: tuple[str | int, ...]
    judge: Callable[[dict[Any, Row]], tuple[bool, str]]
    of: Callable[[Row], bool] = lambda row: True


def cells_of(result: xr.DataTree) -> list[Row]:
    """A row for each cell: its condition, and the figures that claims are about.

    `id`, `ood`: losses; `id_share`, `ood_share`: as shares of a constant answer's; of the choices
    on `id`, `specialization`, `collapse`, `collapse_attainable` (all layers pooled) and
    `specialization_by_layer` (mean over layers); on `ood`, the losses `best_sample`, `best_task`,
    `routed`, `mean`, and `null_sample`, `null_task` of untrained modules. NaN where there are no
    modules.
    """
    losses = result["losses"].to_dataset()
    figures: dict[str, xr.DataArray] = {}
    for split in ("id", "ood"):
        one = losses.sel(split=split)
        figures |= {split: one["loss"], f"{split}_share": one["loss"] / one["constant"]}
    if "specialization" in result.children:
        scores = result["specialization"].to_dataset().sel(split="id", control="observed")
        pooled = scores.sel(layer="pooled")
        figures |= {
            name: pooled[name] for name in ("specialization", "collapse", "collapse_attainable")
        }
        layers = scores["specialization"].sel(layer=scores["layer"] != "pooled")
        figures["specialization_by_layer"] = layers.mean("layer")
        searched = result["oracle"].to_dataset().sel(split="ood")["loss"]
        trained, untrained = (searched.sel(control=name) for name in ("trained", "untrained"))
        figures |= {
            "best_sample": trained.sel(path="sample"),
            "best_task": trained.sel(path="task"),
            "routed": trained.sel(path="routed"),
            "mean": trained.sel(path="mean"),
            "null_sample": untrained.sel(path="sample"),
            "null_task": untrained.sel(path="task"),
        }
    values = {
        name: figure.reindex(cell=losses["cell"]).to_numpy() for name, figure in figures.items()
    }
    told = {name: losses[name].to_numpy() for name in (*CONDITION, "learning_rate", "seed")}
    return [
        {name: column[cell].item() for name, column in (told | values).items()}
        for cell in range(losses.sizes["cell"])
    ]


def selected_cells(cells: Sequence[Row]) -> list[Row]:
    """The cells whose learning rate has the lowest loss on `id`, in the mean over seeds."""
    chosen = []
    for group in _grouped(cells, CONDITION):
        rates = _grouped(group, ("learning_rate",))
        chosen += min(rates, key=lambda rows: np.mean([row["id"] for row in rows]))
    return chosen


def mean_over_seeds(cells: Sequence[Row]) -> list[Row]:
    """One row for each condition, with the means of the figures."""
    rows = []
    for group in _grouped(cells, CONDITION):
        figures = [name for name in group[0] if name not in (*CONDITION, "learning_rate", "seed")]
        means = {name: float(np.mean([row[name] for row in group])) for name in figures}
        rows.append({name: group[0][name] for name in CONDITION} | means)
    return rows


def summary(cells: Sequence[Row]) -> xr.Dataset:
    """Means over seeds, of all and of those that Grubbs' test keeps, for each condition."""
    groups = _grouped(cells, CONDITION)
    told = (*CONDITION, "learning_rate")
    figures = [name for name in groups[0][0] if name not in (*told, "seed")]
    abouts = {
        "mean": "mean over seeds",
        "mean_filtered": "mean over the seeds that Grubbs' test keeps",
        "lowest": "least of the seeds",
        "highest": "greatest of the seeds",
        "outliers": "seeds that Grubbs' test drops",
    }
    found = {name: np.full((len(groups), len(figures)), np.nan) for name in abouts}
    for row, group in enumerate(groups):
        for column, figure in enumerate(figures):
            values = np.array([cell[figure] for cell in group], dtype=float)
            if not np.isfinite(values).all():
                continue
            kept = without_outliers(values)
            for name, value in (
                ("mean", values.mean()),
                ("mean_filtered", values[kept].mean()),
                ("lowest", values.min()),
                ("highest", values.max()),
                ("outliers", (~kept).sum()),
            ):
                found[name][row, column] = value
    result = xr.Dataset(
        {
            name: (("condition", "figure"), values, {"long_name": abouts[name]})
            for name, values in found.items()
        }
    )
    told_values = {name: ("condition", [group[0][name] for group in groups]) for name in told}
    return result.assign_coords({"figure": figures} | told_values)


def check_claims(cells: Sequence[Row]) -> list[Claim]:
    """Every claim, in the mean over seeds, under all conditions that it is about.

    Args:
        cells: of the learning rates that count, see `selected_cells`.
    """
    means = mean_over_seeds(cells)
    return [_checked(means, check) for check in CHECKS]


def as_dataset(claims: Sequence[Claim]) -> xr.Dataset:
    """The claims as they are stored in a result."""
    abouts = {
        "measured": "what was measured",
        "verdict": "whether it holds, or under how many conditions",
    }
    data = xr.Dataset(coords={"claim": [claim.statement for claim in claims]})
    for name, about in abouts.items():
        data[name] = ("claim", [getattr(one, name) for one in claims], {"long_name": about})
    return data


def _grouped(rows: Sequence[Row], names: Sequence[str]) -> list[list[Row]]:
    """Rows with the same values of `names`, in the order of their first occurrence."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(groups.values())


def _alike(means: Sequence[Row], varied: str) -> Iterator[dict[Any, Row]]:
    """Rows that differ in `varied` alone, by its value."""
    for group in _grouped(means, [name for name in CONDITION if name != varied]):
        yield {row[varied]: row for row in group}


def _beside_one_another(means: Sequence[Row]) -> Iterator[dict[Any, Row]]:
    """The networks that are compared under each condition, by model.

    What a network has no variants of counts under every one: the monolithic network has its task
    alone, and the structural oracle no selection bottleneck.
    """
    others = [name for name in CONDITION if name not in ("model", "selection_bottleneck")]
    oracles = {
        tuple(row[name] for name in others): row
        for row in means
        if row["model"] == "structural_oracle"
    }
    monolithic = {
        tuple(row[name] for name in TASK): row for row in means if row["model"] == "monolithic"
    }
    routers = [row for row in means if row["model"] in ROUTERS]
    for group in _grouped(routers, (*others, "selection_bottleneck")):
        rows = {row["model"]: row for row in group}
        if oracle := oracles.get(tuple(group[0][name] for name in others)):
            rows["structural_oracle"] = oracle
        if single := monolithic.get(tuple(group[0][name] for name in TASK)):
            rows["monolithic"] = single
        yield rows


def _checked(means: Sequence[Row], check: Check) -> Claim:
    rows = [row for row in means if check.of(row)]
    compared = _beside_one_another(rows) if check.varied == "model" else _alike(rows, check.varied)
    groups = [group for group in compared if set(check.needs) <= set(group)]
    if not groups:
        return Claim(check.statement, "", NOT_RUN)
    verdicts = [check.judge(group) for group in groups]
    held = sum(holds for holds, _ in verdicts)
    # Each is told by what it does not share with the others.
    first = [group[check.needs[-1]] for group in groups]
    names = [name for name in CONDITION if len({row[name] for row in first}) > 1]
    names = [name for name in names if name != check.varied]
    shown = [
        ", ".join(in_words(name, row[name]) for name in names) + (": " if names else "") + text
        for row, (_, text) in list(zip(first, verdicts, strict=True))[:MOST_SHOWN]
    ]
    if len(verdicts) > len(shown):
        shown.append("...")
    if held in (0, len(verdicts)):
        verdict = "holds" if held else "does not hold"
    else:
        verdict = f"holds in {held} of {len(verdicts)}"
    return Claim(check.statement, "; ".join(shown), verdict)


def in_words(name: str, value: Any) -> str:
    """A setting as a word or two."""
    if name == "selection_bottleneck":
        return "with bottleneck" if value else "without"
    shorts = {"n_operators": "|S| = ", "n_points": "C = ", "n_layers": "L = "}
    return f"{shorts.get(name, '')}{value}".replace("_", " ")


def _only_the_oracle(rows: dict[str, Row]) -> tuple[bool, str]:
    reached = [
        name
        for name in MODULAR
        if rows[name]["specialization_by_layer"] >= FULL and rows[name]["ood_share"] <= LOW
    ]
    text = ", ".join(
        f"{name} {rows[name]['specialization_by_layer']:.2f} / {rows[name]['ood']:.2g}"
        for name in MODULAR
    )
    return reached == ["structural_oracle"], text


def _modular_beats_monolithic(rows: dict[str, Row]) -> tuple[bool, str]:
    losses = {name: rows[name]["ood"] for name in (*MODULAR, "monolithic")}
    text = ", ".join(f"{name} {loss:.2g}" for name, loss in losses.items())
    return all(losses[name] < losses["monolithic"] for name in MODULAR), text


def _best_path_far_below(best: str, null: str) -> Callable[[dict[str, Row]], tuple[bool, str]]:
    def judge(rows: dict[str, Row]) -> tuple[bool, str]:
        found = {name: rows[name] for name in ROUTERS}
        text = ", ".join(
            f"{name} {row[best]:.2g} of {row['routed']:.2g} (untrained {row[null]:.2g})"
            for name, row in found.items()
        )
        far = (row[best] <= FAR * row["routed"] and row[best] < row[null] for row in found.values())
        return all(far), text

    return judge


def _bottleneck_specializes(rows: dict[int, Row]) -> tuple[bool, str]:
    without, with_it = (rows[flag]["specialization"] for flag in (0, 1))
    return with_it > without, f"{without:.2f} to {with_it:.2f}"


def _all_paths_lower(rows: dict[str, Row]) -> tuple[bool, str]:
    sampled, every = rows["sampled"]["id"], rows["all_paths"]["id"]
    expected = rows["sampled"]["model"] in ROUTERS
    return (every < sampled) == expected, f"{sampled:.2g} to {every:.2g}"


def _falls_with_operators(rows: dict[int, Row]) -> tuple[bool, str]:
    three, five = rows[3]["ood"], rows[5]["ood"]
    return five < three, f"{three:.2g} to {five:.2g}"


def _functional_same(rows: dict[str, Row]) -> tuple[bool, str]:
    oracle, attention = rows["oracle"]["ood"], rows["attention"]["ood"]
    same = max(oracle, attention) <= SAME * min(oracle, attention)
    return same, f"{oracle:.2g} and {attention:.2g}"


def _functional_collapse(rows: dict[str, Row]) -> tuple[bool, str]:
    oracle, none = rows["oracle"]["collapse"], rows["none"]["collapse"]
    return none < oracle / 2, f"collapse {oracle:.2f} to {none:.2f}"


def _only_the_encoder(rows: dict[str, Row]) -> tuple[bool, str]:
    shares = {name: rows[name]["id_share"] for name in ROUTERS}
    text = ", ".join(f"{name} {100 * share:.1f}%" for name, share in shares.items())
    low = [name for name, share in shares.items() if share <= LOW]
    return low == ["encoder"], f"ID loss of a constant answer's: {text}"


def _has_paths(row: Row) -> bool:
    """Whether it composes operations: with one layer, no module was trained on a held-out one."""
    return row["n_layers"] > 1


CHECKS = (
    Check(
        "Only the structural oracle reaches full specialization and low OOD loss",
        "model",
        MODULAR,
        _only_the_oracle,
        of=_has_paths,
    ),
    Check(
        "Every modular network beats the monolithic one on OOD loss",
        "model",
        (*MODULAR, "monolithic"),
        _modular_beats_monolithic,
    ),
    Check(
        "The best path of each sample is far below the routed one on OOD loss",
        "model",
        ROUTERS,
        _best_path_far_below("best_sample", "null_sample"),
        of=_has_paths,
    ),
    Check(
        "So is the best path of each task, chosen and scored on different samples",
        "model",
        ROUTERS,
        _best_path_far_below("best_task", "null_task"),
        of=_has_paths,
    ),
    Check(
        "The selection bottleneck raises the encoder's specialization",
        "selection_bottleneck",
        (0, 1),
        _bottleneck_specializes,
        of=lambda row: row["model"] == "encoder",
    ),
    Check(
        "All paths lower the ID loss, except for the structural oracle",
        "objective",
        ("sampled", "all_paths"),
        _all_paths_lower,
    ),
    Check("OOD loss falls from |S| = 3 to 5", "n_operators", (3, 5), _falls_with_operators),
    Check(
        "Functional bottlenecks: oracle and attention give the same OOD loss",
        "functional_bottleneck",
        ("oracle", "attention"),
        _functional_same,
    ),
    Check(
        "Without functional bottleneck modules collapse",
        "functional_bottleneck",
        ("oracle", "none"),
        _functional_collapse,
    ),
    Check(
        "With one layer only the encoder can route (no other has a low ID loss)",
        "model",
        ROUTERS,
        _only_the_encoder,
        of=lambda row: row["n_layers"] == 1,
    ),
)
"""The claims, in the order in which they are told."""
