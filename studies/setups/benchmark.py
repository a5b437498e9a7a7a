"""What the benchmarks of compositional attention share: a measure, claims, the table, views."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

import probes
from studies import engine
from studies.engine import ALL, Claim, Preset, Reading, Row, metric, read
from studies.engine.study import Grid
from studies.report import panels, plots
from studies.report.panels import CONDITIONS, values, values_of
from studies.setups.pairing import MODELS, PairingSetup
from studies.setups.scan import ScanSetup
from studies.setups.text import perplexity_in_words

MITTAL, N_EXAMPLES = "Mittal et al. 2021", 2000
COMPOSITIONAL, MULTI_HEAD = {"model": "compositional"}, {"model": "multi_head"}

TINY = (
    "d_model=16 d_mlp=16 n_layers=2 n_heads=2 scores.n_test=60 training.n_steps=4 "
    "training.batch_size=8 training.warmup_steps=1 training.evaluate_every=2"
)
DEPARTURES = {
    "training.warmup_steps": "1000 everywhere; the authors' code has none, for text 4000",
    "training.clip": "1 everywhere; the authors' code has none, for SCAN 5",
    "dropout": "as in earlier runs of this study; the authors' code has .1, for ESBN's tasks none",
    "d_selection": "that of a head but for ESBN's tasks and text; the authors have 16 or 32",
    "training.n_steps": "ours but for Sort-of-CLEVR, and triangles: half of them, of twice the "
    "batch",
    "seed": "5, for text 1; the authors have 3 to 10",
}
"""How the `paper` presets of all benchmarks depart from the paper."""

CAPTION = (
    "Accuracies in percent. R: retrievals, of as many searches as there are heads. Chance: the "
    "best answer to the question without the picture; frequencies: predicting token frequencies. "
    "Paper: what the paper reports for this attention, at its sizes and with its training. MFLOP: "
    "one forward pass of one example."
)


def grids(*retrievals: int, seeds: int = 1, of_task: Sequence[Grid] = ({},)) -> tuple[Grid, ...]:
    """Both models with these numbers of retrievals and seeds, for each grid of task settings."""
    models = {"model": MODELS, "n_retrievals": retrievals, "seed": tuple(range(seeds))}
    return tuple({**grid, **models} for grid in of_task)


def small(n_steps: int, batch_size: int, learning_rate: float, **sizes: Any) -> dict[str, Any]:
    """Settings at laptop size: training, and model sizes, which `sizes` extends or overrides."""
    training = engine.TrainingConfig(
        n_steps=n_steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        weight_decay=0.0,
        warmup_steps=200,
        evaluate_every=n_steps // 10,
        clip=1.0,
    )
    defaults = {"model": "multi_head", "d_model": 64, "d_mlp": 128, "n_layers": 2, "n_heads": 4}
    return {**defaults, "training": training, **sizes}


def smoke(changes: str, grids: tuple[Grid, ...]) -> Preset:
    """A preset of tiny models."""
    return Preset(changes=f"{TINY} {changes}", grids=grids)


def paper(changes: str, grids: tuple[Grid, ...], **departures: str) -> Preset:
    """The paper's settings, with further departures beside `DEPARTURES`."""
    common = "scores.n_test=10000 training.warmup_steps=1000"
    return Preset(changes=f"{common} {changes}", grids=grids, departures=DEPARTURES | departures)


def value_scores(trained: engine.Trained) -> xr.Dataset | None:
    """Which retrieval each search chooses on the last split: mean value scores by layer and group.

    `value_scores` [layer, group, token, search, retrieval], averaged over all tokens and for the
    last token alone (in a patch transformer only the class token of the last layer is read). Over
    all tokens, and with `_untrained` for the untrained model: `tightness`, the mean of each
    search's greatest share; `difference`, the mean total variation distance between groups.
    """
    setup = trained.setup
    if setup.model != "compositional" or setup.n_retrievals < 2:
        return None
    batches, data = list(trained.batches(list(setup.splits)[-1], N_EXAMPLES)), {}
    for end, model in (("", trained.model), ("_untrained", trained.untrained)):
        measured = probes.measure_value_scores(
            model, batches, lambda batch: {ALL: batch.mask.any(1)} | setup.groups(batch)
        )
        data.setdefault("value_scores", measured["value_scores"])
        all_tokens = measured.sel(token="all")
        data[f"tightness{end}"] = all_tokens["tightness"].sel(group=ALL).mean(keep_attrs=True)
        groups = [name for name in measured["group"].to_numpy()[1:] if ":" not in name]
        distance = all_tokens["distance"].sel(group=groups, other_group=groups)
        # The mean includes the zero distances of groups to themselves.
        n = max(2, len(groups))
        data[f"difference{end}"] = (distance.mean() * n / (n - 1)).assign_attrs(distance.attrs)
    return xr.Dataset(data)


def drawn_value_scores(result: xr.DataTree, *, n_retrievals: int) -> Figure | None:
    """Mean value scores by layer (rows) and group (columns), of the first cell with `n_retrievals`.

    The last row shows the last token in the last layer (the class token where there is one), from
    which the answer is read. None without such a cell.
    """
    if "value_scores" not in result.children:
        return None
    data = result["value_scores"].to_dataset()
    matching = (data["n_retrievals"] == n_retrievals) & data["tightness"].notnull()
    if not matching.any():
        return None
    cell = data.isel(cell=int(matching.to_numpy().argmax()))
    shown = cell["value_scores"].isel(retrieval=slice(n_retrievals)).dropna("group", how="all")
    shown = shown.sel(group=[name for name in shown["group"].to_numpy() if ":" not in name])
    layers = [f"layer {layer}" for layer in shown["layer"].to_numpy()]
    last = shown.sel(token="last").isel(layer=[-1])
    rows = xr.concat([shown.sel(token="all"), last], "layer", coords="minimal", compat="override")
    rows = rows.assign_coords(layer=[*layers, f"{layers[-1]}, last token"])
    figure, axes = panels.grid(*map(len, (rows["layer"], rows["group"])), width=1.5, height=1.5)
    image = probes.draw_value_scores(axes, rows, highest=float(cell["value_scores"].max()))
    title = f"mean value score, seed {int(cell['seed'])}"
    figure.colorbar(image, ax=axes, shrink=0.6, label=title)
    return figure


VALUE_SCORE_VIEWS = {
    f"value_scores_R{n}": partial(drawn_value_scores, n_retrievals=n) for n in (2, 3, 4, 8)
}
PARAMETERS, MFLOP = read("costs", "parameters"), read("costs", "operations") / 1e6
AS_MANY_PARAMETERS = Claim(
    "Both have as many parameters, within 5%",
    f"{MITTAL}, B.5",
    Reading("log of parameters", lambda result: np.log(PARAMETERS.values(result))),
    of=COMPOSITIONAL,
    equals=MULTI_HEAD,
    margin=float(np.log(1.05)),
    of_learning=True,
)


over_training = partial(plots.lines, along="train_step", lines=CONDITIONS)


def by_group(*groups: str) -> Any:
    """A view: test accuracy of groups over training."""
    data = values("training", "accuracy", split="test", group=groups)
    return partial(over_training, data=data, columns="group", ylabel="right, validation")


def fewer(few: int, many: int, reading: Reading, source: str) -> Claim:
    """The claim that few retrievals are better than many."""
    of, exceeds = (COMPOSITIONAL | {"n_retrievals": n} for n in (few, many))
    statement = f"{few} retrievals are better than {many}"
    return Claim(statement, f"{MITTAL}, {source}", reading, of=of, exceeds=exceeds)


def learned(statement: str, score: str, source: str) -> Claim:
    """The claim that training raises the `tightness` of value scores or their `difference`."""
    reading = read("value_scores", score) - read("value_scores", f"{score}_untrained")
    return Claim(statement, f"{MITTAL}, {source}", reading, of=COMPOSITIONAL, exceeds=0.0)


def benchmark(
    name: str,
    question: str,
    setup: PairingSetup,
    grids: tuple[Grid, ...],
    presets: Mapping[str, Preset],
    *,
    columns: Mapping[str, tuple[str, str]],
    source: str,
    trained: engine.TrainedIf,
    further: Mapping[str, Reading] | None = None,
    claims: tuple[Claim, ...] = (),
    views: Mapping[str, Any] | None = None,
) -> engine.Study:
    """The study of a benchmark.

    Args:
        name, question, setup, grids, trained: see `engine.Study`.
        presets: beside `laptop`, which scores 10,000 examples unless it is given here.
        columns: split and group of the headline metric (accuracy or perplexity), by label.
        source: the paper's table.
        further: further readings in the table.
        claims: beside "compositional attention is better", claimed for each column.
        views: further views.
    """
    headline = "perplexity" if "perplexity" in setup.metrics else "accuracy"
    about = setup.metrics[headline]
    shown = engine.percent if about.percent else perplexity_in_words
    readings = {label: metric(headline, *where) for label, where in columns.items()}
    references = {
        kind: {label: metric(f"{headline}_{kind}", *where) for label, where in columns.items()}
        for kind in ("chance", "frequencies", "paper")
    }
    better = [
        Claim(
            f"Compositional attention is better: {label}",
            f"{MITTAL}, {source}",
            reading if about.sign() > 0 else engine.constant(0) - reading,
            of=COMPOSITIONAL,
            exceeds=MULTI_HEAD,
            of_learning=setup.splits.get(columns[label][0]) == "in",
        )
        for label, reading in readings.items()
    ]
    # In an encoder-decoder the hooks of attention have other names.
    has_value_scores = not isinstance(setup, ScanSetup)
    return engine.Study(
        name=name,
        question=question,
        setup=setup,
        grids=grids,
        presets={"laptop": Preset(changes="scores.n_test=10000"), **presets},
        measures={"value_scores": value_scores} if has_value_scores else {},
        trained=trained,
        claims=(*better, AS_MANY_PARAMETERS, *claims),
        table=_table(name, grids, shown, readings | dict(further or {}), references),
        views={
            "training": partial(plots.training, metric=headline, log="" if about.percent else "y"),
            "loss": partial(
                over_training,
                data=values("training", "training_loss"),
                columns=None,
                ylabel="training loss",
            ),
            "scores": partial(
                plots.points,
                separate=True,
                readings=readings,
                references={kind: values_of(some) for kind, some in references.items()},
            ),
            **(VALUE_SCORE_VIEWS if has_value_scores else {}),
            **(views or {}),
        },
    )


def _table(
    name: str,
    grids: tuple[Grid, ...],
    shown: Callable[[float], str],
    readings: Mapping[str, Reading],
    references: Mapping[str, Mapping[str, Reading]],
) -> engine.Table:
    """Readings, references by kind and label, and costs."""
    reference_rows = [
        Row(f"{label}, {kind}", reading, shown, spread=False)
        for kind, labelled in references.items()
        for label, reading in labelled.items()
    ]
    return engine.Table(
        title=f"Multi-head and compositional attention: {name.replace('_', ' ')}",
        # With an axis of task settings there are too many conditions for columns.
        conditions="rows" if any("task." in axis for axis in grids[0]) else "columns",
        rows=(
            *(Row(label, reading, shown) for label, reading in readings.items()),
            *reference_rows,
            Row("weights", PARAMETERS, engine.count, spread=False),
            Row("MFLOP", MFLOP, lambda value: f"{value:.1f}", spread=False),
        ),
        caption=CAPTION,
    )
