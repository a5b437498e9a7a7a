"""The figures of the benchmarks of compositional attention, drawn from a result alone."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from studies.benchmark_tasks import ALL, METRICS

Condition = tuple[Hashable, ...]
"""What tells models from one another but for their seed: a value for each of `told_by`."""

MULTI_HEAD = "#555555"
RETRIEVALS = ("#4477aa", "#cc6677", "#117733", "#ddaa33", "#66ccee", "#aa4499")
"""Colours of multi-head attention, and of compositional attention, R ascending."""

MOST = 6
"""Tasks that a figure has rows for."""

GRIDS = ("n_withheld", "cutoff")
"""Settings of a task that are numbers, and so an axis."""

SEVERAL = ("rule", "scan", "sources", "text", *GRIDS)
"""Settings of tasks of which a result may have several."""

WORDS = {
    "n_withheld": "withheld objects, of 100",
    "cutoff": "most actions of a command of training",
    "id": "as in training (id)",
    "ood": "beyond training (ood)",
}


@dataclass(frozen=True)
class Column:
    """One figure of every model: a metric in a group of a split."""

    metric: str
    split: str
    group: str
    title: str

    @property
    def place(self) -> dict[str, str]:
        """Where it stands in a dataset."""
        return {"split": self.split, "group": self.group}


def columns_of(scores: xr.Dataset) -> list[Column]:
    """What tables and figures show: the headline on what it is told of, and beside it."""
    headline, splits = scores.attrs["headline"], scores["split"].to_numpy().tolist()
    tested = splits[-1:] if "valid" in splits else splits
    groups = [ALL]
    if scores["task"].to_numpy()[0] in ("sort_of_clevr", "images"):
        # What is a part of another group has a colon in its name.
        groups = [name for name in scores["group"].to_numpy() if name != ALL and ":" not in name]
    titles = [(split, group) for split in tested for group in groups]
    found = [
        Column(headline, split, group, group if group != ALL else f"{headline}, {split}")
        for split, group in titles
    ]
    for beside in ("token_accuracy", "bits_per_byte"):
        if beside in scores:
            title = f"{beside.replace('_', ' ')}, {tested[-1]}"
            found.append(Column(beside, tested[-1], ALL, title))
    return found


def varied(scores: xr.Dataset) -> list[str]:
    """The settings of the task of which the result has several values."""
    present = [name for name in SEVERAL if name in scores.coords]
    return [name for name in present if len(np.unique(scores[name].to_numpy())) > 1]


def cells_by_condition(scores: xr.Dataset) -> dict[Condition, list[int]]:
    """The cells that differ in their seed alone, by (task's settings..., model, retrievals)."""
    names = [*varied(scores), "model", "n_retrievals"]
    keys = zip(*(scores[name].to_numpy().tolist() for name in names), strict=True)
    found: dict[Condition, list[int]] = {}
    for cell, key in enumerate(keys):
        found.setdefault(key, []).append(cell)
    return found


def model_name(condition: Condition) -> str:
    """The attention of a condition, as words."""
    *_, model, n_retrievals = condition
    return f"R = {n_retrievals}" if model == "compositional" else "multi-head"


def as_number(value: float, metric: str) -> str:
    """As tables show it; nothing for NaN."""
    if not np.isfinite(value):
        return ""
    return f"{100 * value:.1f}" if METRICS[metric].percent else f"{value:.4g}"


def mean_and_range(scores: xr.Dataset, column: Column) -> str:
    """Mean over some cells; in brackets the interval of a single one, or the range of several."""
    one = scores.sel(column.place)
    values = one[column.metric].to_numpy()
    values = values[np.isfinite(values)]
    if not values.size:
        return ""
    low, high = values.min(), values.max()
    if values.size == 1:
        low, high = one[f"{column.metric}_low"].max(), one[f"{column.metric}_high"].max()
    if METRICS[column.metric].percent:
        bounds = f"{100 * float(low):.0f}-{100 * float(high):.0f}"
    else:
        bounds = f"{as_number(float(low), column.metric)}-{as_number(float(high), column.metric)}"
    return f"{as_number(values.mean(), column.metric)}\n[{bounds}]"


def figures(result: xr.DataTree) -> dict[str, Figure]:
    """All figures by file name; those that a result has no data for are left out."""
    scores = result["scores"].to_dataset()
    drawn = {"training": training_curves(result)}
    grid = next((name for name in GRIDS if name in varied(scores)), None)
    if grid is None:
        drawn["scores"] = scores_of_models(scores)
    else:
        drawn["scores"] = scores_over_grid(scores, grid)
    if "value_scores" in result.children:
        values = result["value_scores"].to_dataset()
        for number in sorted({*values["n_retrievals"].to_numpy().tolist()} - {1}):
            drawn[f"value_scores_R{number}"] = value_score_maps(values, number)
    return drawn


def scores_of_models(scores: xr.Dataset) -> Figure:
    """A panel for each column: models side by side, each seed a point with its interval.

    Dashes: the paper's figure; dots: chance. Tasks that differ have rows of their own, six at most.
    """
    columns, told = columns_of(scores), varied(scores)
    rows = _rows(scores, told)
    figure, axes = _grid(len(rows), len(columns), width=2.6, height=2.4)
    for (title, cells), line in zip(rows.items(), axes, strict=True):
        some = scores.isel(cell=cells)
        models = _models(some)
        for column, axis in zip(columns, line, strict=True):
            axis.set_title(f"{title}\n{column.title}" if title else column.title, fontsize=8)
            _points(axis, some.sel(column.place), column, models)
            _scale(axis, column.metric)
    marks = [
        Line2D([], [], color="black", ls="--", lw=1, label="the paper, at its size"),
        Line2D([], [], color="#999999", ls=":", lw=1, label="chance"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    _head(figure, scores, "one point for each seed, 95% intervals")
    return figure


def training_curves(result: xr.DataTree) -> Figure:
    """The headline over training, on the split of each of its panels, and the training loss.

    Lines are means over seeds, shaded from the least to the greatest.
    """
    scores, curves = result["scores"].to_dataset(), result["training"].to_dataset()
    headline = scores.attrs["headline"]
    columns = [column for column in columns_of(scores) if column.metric == headline]
    told = varied(scores)
    rows = _rows(scores, told)
    figure, axes = _grid(len(rows), len(columns) + 1, width=2.8, height=2.3)
    steps = curves["train_step"].to_numpy()
    for (title, cells), line in zip(rows.items(), axes, strict=True):
        some = curves.isel(cell=cells)
        panels = [(some[headline].sel(column.place), headline, column.title) for column in columns]
        panels.append((some["loss"], "loss", "training loss"))
        for axis, (values, what, told_of) in zip(line, panels, strict=True):
            axis.set_title(f"{title}\n{told_of}" if title else told_of, fontsize=8)
            if values.isnull().all():
                axis.set_axis_off()
                continue
            for n_retrievals, colour in _models(some).items():
                mine = values.isel(cell=_of_model(some, n_retrievals))
                scale = 100 if what != "loss" and METRICS[what].percent else 1
                low, mean, high = (
                    scale * getattr(mine, how)("cell").to_numpy() for how in ("min", "mean", "max")
                )
                axis.fill_between(steps, low, high, color=colour, alpha=0.2, lw=0)
                axis.plot(steps, mean, color=colour, lw=1.2)
            axis.set_xlabel("training step", fontsize=8)
            _scale(axis, what)
    _legend(figure, _models(scores))
    _head(figure, scores, "means over seeds, shaded from the least to the greatest")
    return figure


def scores_over_grid(scores: xr.Dataset, grid: str) -> Figure:
    """The headline over a setting of the task, a line for each model, with intervals.

    Dashed: the paper's figures; dotted: chance.
    """
    headline = scores.attrs["headline"]
    columns = [column for column in columns_of(scores) if column.metric == headline]
    rows = _rows(scores, [name for name in varied(scores) if name != grid])
    figure, axes = _grid(len(rows), len(columns), width=3.4, height=2.6)
    scale = 100 if METRICS[headline].percent else 1
    for (title, cells), line in zip(rows.items(), axes, strict=True):
        for column, axis in zip(columns, line, strict=True):
            axis.set_title(f"{title}\n{_word(column.split)}".strip(), fontsize=8)
            here = scores.isel(cell=cells).sel(column.place)
            some = here.dropna("cell", subset=[headline])
            if not some.sizes["cell"]:
                axis.set_axis_off()
                continue
            for n_retrievals, colour in _models(some).items():
                one = some.isel(cell=_of_model(some, n_retrievals))
                mean = one[[headline, "paper"]].groupby(grid).mean("cell")
                axis.plot(mean[grid], scale * mean[headline], color=colour, lw=1.2)
                axis.plot(mean[grid], scale * mean["paper"], color=colour, ls="--", lw=1)
                _bars(axis, one[grid].to_numpy(), one, column, colour)
            axis.axhline(scale * float(some["chance"][0]), color="#999999", ls=":", lw=1)
            axis.set_xlabel(WORDS[grid], fontsize=8)
            _scale(axis, headline)
    _legend(figure, _models(scores))
    _head(figure, scores, "points are seeds with 95% intervals; dashed: the paper; dotted: chance")
    return figure


def value_score_maps(values: xr.Dataset, n_retrievals: int) -> Figure:
    """How often each search chooses each retrieval, by layer (rows) and group (columns).

    Of the first cell with so many retrievals. The last row is the last token, the class token where
    there is one, in the last layer: what the answer is read from.
    """
    cells = _of_model(values, n_retrievals)
    one = values["value_scores"].isel(cell=cells[0], retrieval=slice(n_retrievals))
    named = [name for name in one["group"].to_numpy() if ":" not in str(name)]
    groups = [name for name in named if not one.sel(group=name).isnull().all()]
    layers = one["layer"].to_numpy().tolist()
    rows = [*((layer, "all") for layer in layers), (layers[-1], "last")]
    figure, axes = _grid(len(rows), len(groups), width=1.5, height=1.5)
    highest, image = float(one.max()), None
    for row, (layer, token) in enumerate(rows):
        for group, axis in zip(groups, axes[row], strict=True):
            shares = one.sel(layer=layer, token=token, group=group).to_numpy()
            image = axis.imshow(shares, vmin=0, vmax=highest, cmap="viridis", aspect="auto")
            # Beyond these the numbers would touch one another.
            shown = product(*map(range, shares.shape)) if shares.shape[1] <= 6 else ()
            for search, retrieval in shown:
                share = shares[search, retrieval]
                colour = "white" if share < 0.6 * highest else "black"
                told = f"{share:.2f}".removeprefix("0")
                look = {"color": colour, "fontsize": 6, "ha": "center", "va": "center"}
                axis.text(retrieval, search, told, **look)
            axis.set_xticks(range(shares.shape[1]))
            axis.set_yticks(range(shares.shape[0]))
            if row == 0:
                axis.set_title(str(group), fontsize=8)
            if row == len(rows) - 1:
                axis.set_xlabel("retrieval", fontsize=8)
            if group == groups[0]:
                of = f"layer {layer}" if token == "all" else f"layer {layer}, last"
                axis.set_ylabel(f"{of}\nsearch", fontsize=8)
    assert image is not None
    bar = figure.colorbar(image, ax=axes, shrink=0.6)
    bar.set_label("mean value score", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    seed = int(values["seed"][cells[0]])
    told = ", ".join(str(values[name].to_numpy()[cells[0]]) for name in varied(values))
    _head(figure, values, f"seed {seed}, {told}" if told else f"seed {seed}")
    return figure


def _points(
    axis: Axes,
    scores: xr.Dataset,
    column: Column,
    models: dict[int, str],
) -> None:
    """Seeds of every model, with the paper's figure and chance."""
    scale = 100 if METRICS[column.metric].percent else 1
    headline = column.metric == scores.attrs["headline"]
    for place, (n_retrievals, colour) in enumerate(models.items()):
        one = scores.isel(cell=_of_model(scores, n_retrievals))
        n_seeds = one.sizes["cell"]
        _bars(axis, place + 0.12 * (np.arange(n_seeds) - (n_seeds - 1) / 2), one, column, colour)
        theirs = scale * float(one["paper"][0])
        if headline and np.isfinite(theirs):
            axis.plot([place - 0.35, place + 0.35], [theirs] * 2, color="black", ls="--", lw=1)
    chance = scale * float(scores["chance"][0])
    if headline and np.isfinite(chance):
        axis.axhline(chance, color="#999999", ls=":", lw=1)
    axis.set_xticks(range(len(models)), [_short(one) for one in models], fontsize=7)
    axis.set_xlim(-0.6, len(models) - 0.4)


def _bars(axis: Axes, places: np.ndarray, scores: xr.Dataset, column: Column, colour: str) -> None:
    """The figure of each cell, with its interval."""
    scale = 100 if METRICS[column.metric].percent else 1
    values, low, high = (
        scale * scores[f"{column.metric}{side}"].to_numpy() for side in ("", "_low", "_high")
    )
    bars = np.clip([values - low, high - values], 0, None)
    axis.errorbar(places, values, bars, fmt="o", ms=4, color=colour, elinewidth=0.8)


def _rows(scores: xr.Dataset, told: list[str]) -> dict[str, list[int]]:
    """The cells of each of the first tasks, by its settings as words."""
    rows: dict[str, list[int]] = {}
    for cell in range(scores.sizes["cell"]):
        values = [f"{scores[name].to_numpy()[cell]}" for name in told]
        words = [
            f"{name.removeprefix('n_')} {value}" if name in GRIDS else value.replace("_", " ")
            for name, value in zip(told, values, strict=True)
        ]
        rows.setdefault(", ".join(words), []).append(cell)
    return dict(list(rows.items())[:MOST])


def _models(data: xr.Dataset) -> dict[int, str]:
    """The colour of each model: 0 for multi-head attention, else R."""
    present = {*_retrievals(data)}
    numbers = sorted(present - {0})
    colours = dict(zip(numbers, _spread(len(numbers)), strict=True))
    return ({0: MULTI_HEAD} if 0 in present else {}) | colours


def _spread(n: int) -> Iterator[str]:
    for number in range(n):
        yield RETRIEVALS[number % len(RETRIEVALS)]


def _retrievals(data: xr.Dataset) -> list[int]:
    """R of each cell, 0 for multi-head attention."""
    kinds = zip(data["model"].to_numpy(), data["n_retrievals"].to_numpy(), strict=True)
    return [0 if model == "multi_head" else int(number) for model, number in kinds]


def _of_model(data: xr.Dataset, n_retrievals: int) -> list[int]:
    return [cell for cell, one in enumerate(_retrievals(data)) if one == n_retrievals]


def _short(n_retrievals: int) -> str:
    return f"R = {n_retrievals}" if n_retrievals else "multi-head"


def _word(name: str) -> str:
    return WORDS.get(name, name)


def _scale(axis: Axes, metric: str) -> None:
    """The axis of a metric, or of the training `loss`."""
    if metric == "loss":
        axis.set_ylabel("nats", fontsize=8)
    elif METRICS[metric].percent:
        axis.set_ylabel("right, %" if metric == "accuracy" else "right tokens, %", fontsize=8)
        axis.set_ylim(-3, 103)
    else:
        axis.set_ylabel(METRICS[metric].long_name, fontsize=8)
        if METRICS[metric].exponential:
            axis.set_yscale("log")
            axis.tick_params(which="both", labelsize=7)


def _grid(n_rows: int, n_columns: int, *, width: float, height: float) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(width * n_columns + 1, height * n_rows + 1), layout="constrained")
    axes = figure.subplots(n_rows, n_columns, squeeze=False)
    for axis in axes.flat:
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(figure: Figure, models: dict[int, str]) -> None:
    handles = [Line2D([], [], color=c, lw=1.5, label=_short(one)) for one, c in models.items()]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(6, len(handles)), fontsize=8,
        frameon=False,
    )  # fmt: skip


def _head(figure: Figure, data: xr.Dataset, what: str) -> None:
    name = str(data["task"].to_numpy()[0]).replace("_", " ")
    figure.suptitle(f"{name}: {what}", fontsize=9)
