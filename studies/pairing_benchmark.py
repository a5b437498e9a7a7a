"""What the studies of compositional attention's benchmarks share: measures, claims, presets."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr

import probes
from studies.engine import (
    ALL,
    Claim,
    Preset,
    Reading,
    Row,
    Study,
    Table,
    Trained,
    TrainedIf,
    TrainingConfig,
    constant,
    count,
    metric,
    percent,
    read,
)
from studies.engine.study import Grid
from studies.report import comparisons, plots
from studies.report.curves import training_curves
from studies.setups.pairing import MODELS, PairingSetup
from studies.setups.text import perplexity_in_words
from studies.views.value_scores import value_scores as drawn_value_scores

MITTAL, N_EXAMPLES = "Mittal et al. 2021", 2000

TINY: dict[str, Any] = {
    "d_model": 16,
    "d_mlp": 16,
    "n_layers": 2,
    "n_heads": 2,
    "training.n_steps": 4,
    "training.batch_size": 8,
    "training.warmup_steps": 1,
    "training.evaluate_every": 2,
    "n_validation": 20,
    "scores.n_test": 60,
}
"""The preset `smoke`."""

DEPARTURES = {
    "training.warmup_steps": "1000 everywhere; the authors' code has none, for text 4000",
    "training.clip": "1 everywhere; the authors' code has none, for SCAN 5",
    "dropout": "as in earlier runs of this study; the authors' code has .1, for ESBN's tasks none",
    "d_selection": "that of a head but for ESBN's tasks and text; the authors have 16 or 32",
    "training.n_steps": "ours but for Sort-of-CLEVR, and triangles: half of them, of twice the "
    "batch",
    "seed": "5, for text 1; the authors have 3 to 10",
}
"""What differs from the paper in the preset `paper`."""


def value_scores(trained: Trained) -> xr.Dataset | None:
    """Which retrievals searches choose, on the last split: mean value scores by layer and group.

    `value_scores` [layer, group, token, search, retrieval], of all tokens and of the last one (of a
    network of patches the last layer's others go nowhere). Of all tokens, and also `_untrained`:
    `tightness`, the mean of each search's greatest share; `difference` between groups, the mean
    total variation distance.
    """
    setup = trained.setup
    if setup.model != "compositional" or setup.n_retrievals < 2:
        return None
    batches = list(trained.batches(list(setup.splits)[-1], N_EXAMPLES))
    means = _mean_value_scores(setup, trained.model, batches)
    data: dict[str, Any] = {"value_scores": means.assign_attrs(long_name="mean value score")}
    untrained = _mean_value_scores(setup, trained.untrained, batches)
    for end, found in (("", means), ("_untrained", untrained)):
        whole = found.sel(token="all")
        kinds = whole.isel(group=[n for n, kind in enumerate(_kinds(whole)) if kind])
        apart = abs(kinds - kinds.rename(group="other")).sum("retrieval").mean() / 2
        n = max(2, kinds.sizes["group"])
        data[f"tightness{end}"] = whole.sel(group=ALL).max("retrieval").mean()
        data[f"difference{end}"] = apart * n / (n - 1)
        data[f"tightness{end}"].attrs["long_name"] = "mean greatest share of a search"
        data[f"difference{end}"].attrs["long_name"] = "total variation distance between groups"
    return xr.Dataset(data)


def _mean_value_scores(setup: PairingSetup, model: Any, batches: list[Any]) -> xr.DataArray:
    quantity = probes.Quantity(
        "blocks.*.attn.hook_value_scores",
        dims=("example", "token", "search", "retrieval"),
        reduce=lambda scores: torch.stack([scores.mean(1), scores[:, -1]], 1),
        long_name="value scores",
    )
    scores = probes.capture(model, batches, {"scores": quantity})["scores"]
    known = [{ALL: batch.mask.any(1)} | setup.groups(batch) for batch in batches]
    of_groups = [torch.cat([one[name].cpu() for one in known]).numpy() for name in known[0]]
    member = xr.DataArray(np.stack(of_groups).astype(float), dims=("group", "example"))
    means = xr.dot(member, scores, dim="example") / member.sum("example")
    numbers = {dim: np.arange(means.sizes[dim]) for dim in ("search", "retrieval")}
    return means.assign_coords({"group": list(known[0]), "token": ["all", "last"], **numbers})


def _kinds(data: xr.DataArray) -> list[bool]:
    """Which groups are no part of another one, which has a colon in its name."""
    return [name != ALL and ":" not in name for name in data["group"].to_numpy()]


def grids(retrievals: tuple[int, ...], n_seeds: int = 1, *of_task: Grid) -> tuple[Grid, ...]:
    """Both models, with numbers of retrievals and seeds, for each grid of settings of the task."""
    models = {"model": MODELS, "n_retrievals": retrievals, "seed": tuple(range(n_seeds))}
    return tuple({**one, **models} for one in of_task or ({},))


def training(
    steps: int, batch: int, rate: float, *, warmup: int = 200, evaluations: int = 10, **more: Any
) -> TrainingConfig:
    """How models are trained: the same everywhere but for these."""
    return TrainingConfig(
        n_steps=steps,
        batch_size=batch,
        learning_rate=rate,
        weight_decay=0.0,
        warmup_steps=warmup,
        evaluate_every=max(1, steps // evaluations),
        clip=1.0,
        **more,
    )


def benchmark(
    name: str,
    question: str,
    *,
    setup: PairingSetup,
    laptop: tuple[Grid, ...],
    smoke: tuple[tuple[Grid, ...], Mapping[str, Any]],
    paper: tuple[tuple[Grid, ...], Mapping[str, Any]],
    departures: Mapping[str, str] | None = None,
    columns: Mapping[str, tuple[str, str]],
    further: Mapping[str, tuple[str, str, str]] | None = None,
    source: str,
    trained: TrainedIf,
    claims: tuple[Claim, ...] = (),
    views: Mapping[str, Any] | None = None,
    n_test: int = 10_000,
    metric_name: str = "accuracy",
    conditions: Literal["columns", "rows"] = "columns",
) -> Study:
    """One benchmark's study.

    Args:
        name: its name for `--study`.
        question: in one sentence.
        setup, laptop: the settings at laptop size, and their grids.
        smoke, paper: grids and settings of the other presets.
        departures: of the preset `paper` from the paper, beside `DEPARTURES`.
        columns: what it is about: split and group by name.
        further: what the table shows beside them: metric, split and group by name.
        source: the paper's table.
        trained: when a model counts as trained.
        claims: further ones; that compositional attention is better is one of each column.
        views: further ones.
        n_test: examples of each split at laptop size.
        metric_name: the metric that it is about.
        conditions: of the table.
    """
    of, better = {"model": "compositional"}, setup.metrics[metric_name].sign()
    readings = {label: metric(metric_name, *place) for label, place in columns.items()}
    known = {
        kind: {label: metric(f"{metric_name}_{kind}", *place) for label, place in columns.items()}
        for kind in ("chance", "frequencies", "paper")
    }
    also = {label: metric(*place) for label, place in (further or {}).items()}
    shown = percent if setup.metrics[metric_name].percent else perplexity_in_words
    parameters, operations = read("costs", "parameters"), read("costs", "operations")
    measures = {} if name == "scan" else {"value_scores": value_scores}
    return Study(
        name=name,
        question=question,
        setup=setup,
        grids=laptop,
        presets={
            "laptop": Preset(changes={"scores.n_test": n_test}),
            "smoke": Preset(grids=smoke[0], changes=TINY | dict(smoke[1])),
            "paper": Preset(
                grids=paper[0],
                changes={"scores.n_test": 10_000, **paper[1]},
                departures=DEPARTURES | dict(departures or {}),
            ),
        },
        measures=measures,
        trained=trained,
        claims=(
            *(
                Claim(
                    statement=f"Compositional attention is better: {label}",
                    source=f"{MITTAL}, {source}",
                    reading=reading if better > 0 else constant(0) - reading,
                    of=of,
                    exceeds={"model": "multi_head"},
                    of_learning=setup.splits.get(columns[label][0]) == "in",
                )
                for label, reading in readings.items()
            ),
            Claim(
                statement="Both have as many parameters, within 5%",
                source=f"{MITTAL}, B.5",
                reading=Reading("log of parameters", lambda r: np.log(parameters.values(r))),
                of=of,
                equals={"model": "multi_head"},
                margin=float(np.log(1.05)),
                of_learning=True,
            ),
            *claims,
        ),
        table=Table(
            title=f"Multi-head and compositional attention: {name.replace('_', ' ')}",
            conditions=conditions,
            rows=(
                *(Row(label, reading, shown) for label, reading in (readings | also).items()),
                *(
                    Row(f"{label}, {kind}", reading, shown, spread=False)
                    for kind, some in known.items()
                    for label, reading in some.items()
                ),
                Row("weights", parameters, count, spread=False),
                Row("MFLOP", operations / 1e6, lambda value: f"{value:.1f}", spread=False),
            ),
            caption=CAPTION,
        ),
        views={
            "training": partial(training_curves, metric=metric_name, log=shown is not percent),
            "loss": partial(
                comparisons.lines,
                group="training",
                variable="training_loss",
                along="train_step",
                ylabel="training loss",
            ),
            "scores": partial(
                comparisons.intervals,
                readings=readings,
                marks={
                    label: {kind: some[label] for kind, some in known.items()} for label in columns
                },
            ),
            **{
                f"value_scores_R{n}": partial(drawn_value_scores, n_retrievals=n)
                for n in (2, 3, 4, 8)
                if measures
            },
        }
        | dict(views or {}),
    )


CAPTION = (
    "Accuracies in percent. R: retrievals, of as many searches as there are heads. Chance: the "
    "best guess of who sees the question, but no picture; frequencies: those of tokens. Paper: its "
    "figures for this attention, at its sizes and with its training. MFLOP: of one forward pass, "
    "for one example."
)


def by_group(*groups: str) -> Any:
    """Accuracy on the test examples of some groups over training."""
    return partial(
        comparisons.lines,
        group="training",
        variable="accuracy",
        along="train_step",
        panels="group",
        select={"split": "test", "group": groups},
        ylabel="right, validation",
    )


def over(setting: str, readings: Mapping[str, Reading], rows: str | None = None) -> Any:
    """Accuracies against a setting of the task; `rows`: another one."""
    return partial(plots.against, readings=readings, setting=setting, rows=rows, ylabel="accuracy")


def fewer(few: int, many: int, reading: Reading, source: str) -> Claim:
    """That few retrievals are better than many."""
    return Claim(
        statement=f"{few} retrievals are better than {many}",
        source=f"{MITTAL}, {source}",
        reading=reading,
        of={"model": "compositional", "n_retrievals": few},
        exceeds={"model": "compositional", "n_retrievals": many},
    )


def more_than_untrained(statement: str, what: str, source: str) -> Claim:
    """That value scores are tighter, or differ more between groups, than before training."""
    reading = read("value_scores", what) - read("value_scores", f"{what}_untrained")
    return Claim(
        statement=statement,
        source=f"{MITTAL}, {source}",
        reading=reading,
        of={"model": "compositional"},
        exceeds=0.0,
    )
