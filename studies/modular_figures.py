"""The figures of the modular-routing study, drawn from its result alone.

Cells are those of the learning rate that counts, except in the curves of training. Where a grid has
more settings than a figure has panels, the title tells which of them are shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from textwrap import wrap
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from studies.modular_claims import CONDITION, MODULAR, TASK, Row, cells_of, selected_cells
from tasks import MATH_OPERATIONS, MathEquationsConfig

Setting = dict[str, Any]
"""What conditions have in common but for the model: a value for each of `SETTINGS`."""

SETTINGS = CONDITION[1:]

LOOKS = {
    "structural_oracle": ("#117733", "D"),
    "cross_attention": ("#4477aa", "o"),
    "concatenation": ("#aa3377", "s"),
    "encoder": ("#dd8822", "^"),
    "monolithic": ("#555555", "X"),
}
"""Colour and marker of each model, in the order in which they are drawn."""

NAMES = {
    "structural_oracle": "structural oracle",
    "cross_attention": "cross-attention",
    "pooled": "all layers",
    "id": "familiar combinations (id)",
    "ood": "held-out combinations (ood)",
    "specialization": "specialization, 0 to 1",
    "collapse": "collapse (1: none), 0 to 1",
    "collapse_attainable": "collapse over the attainable",
    "sampled": "sampled path",
    "all_paths": "all paths",
    "mlp": "learned modules",
    "operations": "true operations",
}

LOSSES = {
    "id": ("router's path, id", "#77aadd", "o"),
    "ood": ("router's path, ood", "#223388", "o"),
    "best_task": ("best of each task, ood", "#dd8822", "s"),
    "best_sample": ("best of each sample, ood", "#117733", "^"),
    "mean": ("mean of all paths, ood", "#aa3377", "D"),
    "null_task": ("best of each task, untrained, ood", "#dd8822", "s"),
    "null_sample": ("best of each sample, untrained, ood", "#117733", "^"),
}
"""Label, colour and marker of each loss; those of untrained modules are hollow."""

PATHS = {"routed": "ood", "task": "best_task", "sample": "best_sample"}
"""Which of `LOSSES` a path looks like."""

VARIANTS = {
    "objectives": (("objective", "selection_bottleneck"), ("id", "ood", "specialization")),
    "functional": (("functional_bottleneck",), ("ood", "specialization", "collapse")),
    "keys": (("module_keys",), ("ood", "specialization", "collapse")),
    "layers": (("n_layers",), ("id", "ood", "specialization")),
    "pools": (("pool",), ("id", "ood", "specialization")),
}
"""Figures of what is compared beside the models, by file name: settings, and what is drawn."""

DASHES = {"id": ":", "ood": "-."}
"""Lines of the constant answer's loss, by split."""

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
"""Colours of what has none of its own."""

MOST = 12
"""Panels in a figure."""

LEAST = 1e-8
"""Losses below it are drawn there: those of the true operations are rounding errors, or 0."""

MANY = 30
"""More operations or tasks than these are drawn without their names."""


@dataclass(frozen=True)
class Cells:
    """Cells of the grid, and the settings under which they stand beside one another.

    Attributes:
        rows: see `rows_of`.
        settings: in the order of the result.
    """

    rows: list[Row]
    settings: list[Setting]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Cells:
        """What a model has no variants of is no setting of its own: it counts under every one."""
        settings: list[Setting] = []
        for row in sorted(rows, key=lambda row: -len(_asked_of(row["model"]))):
            if not any(_counts_under(row, setting) for setting in settings):
                settings.append({name: row[name] for name in SETTINGS})
        return cls(list(rows), settings)

    @property
    def varied(self) -> list[str]:
        """The settings that vary."""
        return [name for name in SETTINGS if len(self.values(name)) > 1]

    @property
    def reference(self) -> Setting:
        """The first of the settings with the usual task, or with the nearest to it."""
        usual = MathEquationsConfig()
        return min(
            self.settings,
            key=lambda setting: sum(setting[name] != getattr(usual, name) for name in TASK),
        )

    def values(self, *names: str) -> list[Any]:
        """The values of a setting, or the combinations of several ones' values."""
        found = [tuple(setting[name] for name in names) for setting in self.settings]
        distinct = list(dict.fromkeys(found))
        return [one for (one,) in distinct] if len(names) == 1 else distinct

    def shown(self, most: int) -> list[Setting]:
        """All settings, or those that differ from the reference in one thing: at most so many."""
        if len(self.settings) <= most:
            return self.settings
        reference = self.reference
        near = [
            setting
            for setting in self.settings
            if sum(setting[name] != reference[name] for name in SETTINGS) == 1
        ]
        return [reference, *near][:most]

    def under(self, setting: Setting, *free: str) -> dict[str, list[Row]]:
        """The rows that count under a setting, by model; of those in `free`, any value does."""
        found = [row for row in self.rows if _counts_under(row, setting, free)]
        models = {model: [row for row in found if row["model"] == model] for model in LOOKS}
        return {model: rows for model, rows in models.items() if rows}

    def told(self, setting: Setting, *, but: Iterable[str] = ()) -> str:
        """Those of a setting's values that vary, as words."""
        return ", ".join(_word(name, setting[name]) for name in self.varied if name not in but)


def figures(result: xr.DataTree) -> dict[str, Figure]:
    """All figures by file name; those that a result has no data for are left out."""
    every = rows_of(result)
    chosen = selected_cells(every)
    cells = Cells.of(chosen)
    drawn = {
        "losses": losses_of_paths(cells),
        "training": losses_while_training(result, Cells.of(every), chosen),
    }
    if len(cells.values("n_points")) > 1:
        drawn["points"] = losses_by_points(cells)
    if len(cells.values("n_operators")) > 1:
        drawn["operators"] = figures_by_operators(cells)
    if "specialization" not in result.children:
        return drawn
    modular = Cells.of([row for row in chosen if row["model"] in MODULAR])
    drawn |= {
        "specialization": specialization_and_collapse(result, modular),
        "activation": operations_and_modules(result, modular),
        "regret": regret_by_layer(result, modular),
        "adaptation": losses_of_adapted_paths(result, modular),
        "by_task": losses_by_task(result, modular),
        "loss_against_specialization": losses_and_specialization(modular),
    }
    for name, (settings, measured) in VARIANTS.items():
        if len(modular.values(*settings)) > 1:
            drawn[name] = variants_of_models(modular, settings, measured)
    return drawn


def rows_of(result: xr.DataTree) -> list[Row]:
    """Rows of `modular_claims.cells_of`, each with its `cell`, `constant_id` and `constant_ood`."""
    losses = result["losses"].to_dataset()
    told = {"cell": losses["cell"].to_numpy().tolist()} | {
        f"constant_{split}": losses["constant"].sel(split=split).to_numpy().tolist()
        for split in ("id", "ood")
    }
    return [
        row | {name: column[number] for name, column in told.items()}
        for number, row in enumerate(cells_of(result))
    ]


def losses_of_paths(cells: Cells) -> Figure:
    """Losses of the router's path, of the best ones and of all, a panel for each setting.

    Each seed is a point, a line their mean.
    """
    shown = cells.shown(MOST)
    figure, axes = _panels(len(shown), width=5.2 if len(shown) < 3 else 4.2, height=3.1, columns=3)
    for axis, setting in zip(axes.flat, shown, strict=False):
        models = cells.under(setting)
        for place, rows in enumerate(models.values()):
            for number, (name, (label, colour, marker)) in enumerate(LOSSES.items()):
                _strip(
                    axis,
                    place + 0.8 * ((number + 0.5) / len(LOSSES) - 0.5),
                    [row.get(name, np.nan) for row in rows],
                    width=0.05,
                    colour=colour,
                    marker=marker,
                    hollow=name.startswith("null"),
                    label=label,
                )
        for place in range(1, len(models)):
            axis.axvline(place - 0.5, color="#cccccc", lw=0.6)
        _draw_constants(axis, [row for rows in models.values() for row in rows])
        _label_models(axis, models)
        axis.set_title(cells.told(setting), fontsize=8)
    _loss_axes(axes)
    _legend(figure, axes)
    _head(figure, "Losses", cells, shown=shown)
    return figure


def losses_while_training(result: xr.DataTree, cells: Cells, chosen: Sequence[Row]) -> Figure:
    """Loss over training on both splits, a row for each setting and learning rate.

    Lines are means over seeds, shaded from the least to the greatest.

    Args:
        result: the result.
        cells: of all learning rates.
        chosen: those of the learning rates that count; the others' lines are dashed.
    """
    counted = {row["cell"] for row in chosen}
    rates = sorted({row["learning_rate"] for row in cells.rows})
    shown = cells.shown(max(1, MOST // 2 // len(rates)))
    pairs = list(product(shown, rates))[: MOST // 2]
    figure, axes = _grid(len(pairs), 2, width=3.8, height=2.3)
    curves = _group(result, "training", "loss")["loss"]
    for (setting, rate), line in zip(pairs, axes, strict=True):
        for model, rows in cells.under(setting).items():
            rows = [row for row in rows if row["learning_rate"] == rate]
            if not rows:
                continue
            loss = curves.sel(cell=[row["cell"] for row in rows]).dropna("train_step", how="all")
            loss = loss.clip(min=LEAST)
            steps = loss["train_step"].to_numpy()
            for axis, split in zip(line, ("id", "ood"), strict=True):
                one = loss.sel(split=split)
                axis.fill_between(
                    steps, one.min("cell"), one.max("cell"), color=LOOKS[model][0], alpha=0.2, lw=0
                )
                axis.plot(
                    steps,
                    one.mean("cell"),
                    color=LOOKS[model][0],
                    ls="-" if rows[0]["cell"] in counted else "--",
                    lw=1.4,
                    label=_name(model),
                )
        about = [cells.told(setting)] if len(shown) > 1 else []
        about += [f"learning rate {rate:g}"] if len(rates) > 1 else []
        for axis, split in zip(line, ("id", "ood"), strict=True):
            every = [row for rows in cells.under(setting).values() for row in rows]
            _draw_constants(axis, every, split)
            axis.set_title("\n".join([_name(split), *filter(None, about)]), fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("training step")
    _loss_axes(axes)
    solid = [
        Line2D([], [], color=LOOKS[model][0], lw=1.4, label=_name(model))
        for model in LOOKS
        if any(row["model"] == model for row in cells.rows)
    ]
    dashed = Line2D([], [], color="black", ls="--", lw=1.2, label="rate not chosen")
    _legend(figure, axes, more=[*solid, dashed] if len(rates) > 1 else solid)
    _head(figure, "Losses while training", cells, shown=shown)
    return figure


def losses_by_points(cells: Cells) -> Figure:
    """ID and OOD loss against the number of training points, a column for each |S|."""
    numbers = cells.values("n_operators")[: MOST // 2]
    figure, axes = _grid(2, len(numbers), width=2.8, height=2.4)
    for row, split in zip(axes, ("id", "ood"), strict=True):
        for axis, operators in zip(row, numbers, strict=True):
            setting = cells.reference | {"n_operators": operators}
            models = cells.under(setting, "n_points")
            _draw_against(axis, models, "n_points", split)
            axis.set_xscale("log")
            values = cells.values("n_points")
            axis.set_xticks(values, values, rotation=45)
            axis.xaxis.set_minor_locator(NullLocator())
    _loss_axes(axes)
    for axis, operators in zip(axes[0], numbers, strict=True):
        axis.set_title(_word("n_operators", operators), fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("C, training points (log)")
    for row, split in zip(axes, ("id", "ood"), strict=True):
        row[0].set_ylabel(f"{row[0].get_ylabel()}\n{_name(split)}", fontsize=8)
    _legend(figure, axes)
    _head(figure, "Losses by number of training points", cells, free=TASK)
    return figure


def figures_by_operators(cells: Cells) -> Figure:
    """OOD loss, specialization and collapse against |S|, a row for each C."""
    measured = [name for name in ("ood", "specialization", "collapse_attainable")]
    measured = [name for name in measured if name in cells.rows[0]]
    numbers = cells.values("n_points")[: MOST // len(measured)]
    figure, axes = _grid(len(numbers), len(measured), width=3.1, height=2.5, sharey=False)
    for row, points in zip(axes, numbers, strict=True):
        setting = cells.reference | {"n_points": points}
        models = cells.under(setting, "n_operators")
        for axis, name in zip(row, measured, strict=True):
            _draw_against(axis, models, "n_operators", name)
            axis.set_xticks(sorted(cells.values("n_operators")))
            if name != "ood":
                axis.set_ylim(-0.03, max(1.03, axis.get_ylim()[1]))
            axis.set_ylabel(_name(name) if name != "ood" else "", fontsize=8)
            if len(numbers) > 1:
                axis.set_title(_word("n_points", points), fontsize=8)
    _loss_axes(axes[:, :1], name="mean squared error, ood")
    for axis in axes[-1]:
        axis.set_xlabel("|S|, operations in the data")
    _legend(figure, axes)
    _head(figure, "By number of operations", cells, free=TASK)
    return figure


def specialization_and_collapse(result: xr.DataTree, cells: Cells) -> Figure:
    """Specialization against collapse, a row for each setting and a column for each layer.

    No network is right of the line: with M modules collapse is at most log |S| / log M + 1 -
    specialization, and that of a specialized network log |S| / log M.
    """
    names = ["specialization", "collapse", "seen", "utilisation"]
    data = _group(result, "specialization", *names).sel(split="id")
    layers = _layers(data)
    shown = cells.shown(max(1, MOST // len(layers)))
    figure, axes = _grid(len(shown), len(layers), width=2.9, height=2.6)
    for row, setting in zip(axes, shown, strict=True):
        models = cells.under(setting)
        every = [one["cell"] for rows in models.values() for one in rows]
        here = data.sel(cell=every).load()
        for axis, layer in zip(row, layers, strict=True):
            scores = here.sel(layer=layer)
            if not bool(scores["specialization"].notnull().any()):
                axis.set_axis_off()
                continue
            _draw_attainable(axis, scores)
            for model, rows in models.items():
                colour, marker = LOOKS[model]
                own = scores.sel(cell=[one["cell"] for one in rows])
                for control, label in (("observed", _name(model)), ("shuffled", "")):
                    one = own.sel(control=control)
                    axis.plot(
                        one["collapse"],
                        one["specialization"],
                        ls="",
                        marker=marker,
                        ms=5.5,
                        color=colour,
                        mfc=colour if control == "observed" else "none",
                        mew=0.9,
                        alpha=0.85,
                        label=label or f"_{control}, {_name(model)}",
                    )
            axis.set(xlim=(-0.03, 1.06), ylim=(-0.04, 1.06))
        _label_row(row[0], cells.told(setting), "specialization")
    for axis, layer in zip(axes[0], layers, strict=True):
        axis.set_title(_layer_name(layer), fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("collapse (1: none)")
    hollow = Line2D(
        [], [], ls="", marker="o", ms=5.5, color="black", mfc="none", label="operations shuffled"
    )
    _legend(figure, axes, more=[hollow])
    _head(figure, "Specialization of modules, on id", cells, shown=shown)
    return figure


def operations_and_modules(result: xr.DataTree, cells: Cells) -> Figure:
    """How often each module serves each operation: a column for each router, a row for each layer.

    Of the first seed. Modules stand in the order of the operations that they are assigned to, so
    that one module for each operation gives a diagonal; the rest by how often they are chosen.
    """
    names = ["activation", "seen", "assignment", "utilisation"]
    setting = cells.reference
    first = [rows[0] for rows in cells.under(setting).values()]
    models = {row["model"]: row["cell"] for row in first}
    data = _group(result, "specialization", *names).sel(split="id")
    data = data.sel(cell=list(models.values())).load()
    layers = _layers(data)
    if len(layers) * len(models) > MOST:
        layers = layers[:1]
    operations = _operations(data)
    n_modules = int(data["utilisation"].notnull().any(["cell", "layer"]).sum())
    width = min(max(2.3, 0.25 * n_modules), 5.0)
    height = min(max(1.5, 0.2 * len(operations)), 7.0)
    figure, axes = _grid(
        len(layers), len(models), width=width, height=height + 0.5, sharex=False, sharey=False
    )
    image = None
    for row, layer in zip(axes, layers, strict=True):
        for axis, (model, cell) in zip(row, models.items(), strict=True):
            one = data.sel(cell=cell, layer=layer, operation=operations)
            order = modules_in_order(one["assignment"].to_numpy(), one["utilisation"].to_numpy())
            shares = one["activation"].transpose("operation", "module").to_numpy()[:, order]
            axis.set_facecolor("#dddddd")
            image = axis.imshow(shares, vmin=0, vmax=1, cmap="Blues", aspect="auto")
            if shares.size <= 80:
                _annotate(axis, shares)
            named = axis is row[0] and len(operations) <= MANY
            axis.set_yticks(range(len(operations)) if named else [], operations if named else [])
            axis.set_xticks(range(len(order)), data["module"].to_numpy()[order])
            axis.tick_params(labelsize=6.5, length=2)
            if axis in axes[0]:
                axis.set_title(_name(model), fontsize=9)
        row[0].set_ylabel(_layer_name(layer), fontsize=8)
    figure.supxlabel("module, in the order of the operations", fontsize=8)
    assert image is not None
    label = "share of the operation (numbers: %)"
    figure.colorbar(image, ax=axes, shrink=0.7, aspect=30, label=label)
    seeds = ", ".join(str(seed) for seed in sorted({row["seed"] for row in first}))
    _head(figure, f"Modules that operations are sent to, on id, seed {seeds}", cells, free=())
    return figure


def regret_by_layer(result: xr.DataTree, cells: Cells) -> Figure:
    """How much is lost where the router leaves the best path, a panel for each setting.

    The router's loss is the best path's of each sample and the regrets of all layers together.
    """
    shown = cells.shown(MOST)
    names = [f"regret{suffix}" for suffix in ("", "_low", "_high")]
    data = _group(result, "oracle", *names, "loss").sel(split="ood", control="trained")
    figure, axes = _panels(len(shown), width=3.8, height=2.7, columns=4)
    for axis, setting in zip(axes.flat, shown, strict=False):
        models = cells.under(setting)
        for place, rows in enumerate(models.values()):
            here = data.sel(cell=[row["cell"] for row in rows]).load()
            here = here.dropna("layer", subset=["regret"])
            routed = float(here["loss"].sel(path="routed").mean())
            axis.bar(
                place, routed, 0.8, color="none", edgecolor="black", lw=0.8, label="router's loss"
            )
            layers = here["layer"].to_numpy()
            mean, bars = _mean_and_bars(here, "regret")
            for number, layer in enumerate(layers):
                axis.bar(
                    place + 0.7 * ((number + 0.5) / len(layers) - 0.5),
                    mean[number],
                    0.6 / len(layers),
                    yerr=bars[:, [number]],
                    color=COLOURS[number],
                    error_kw={"lw": 0.9, "capsize": 2},
                    label=f"regret, layer {layer}",
                )
        _label_models(axis, models)
        axis.set_title(cells.told(setting), fontsize=8)
    for axis in axes[:, 0]:
        axis.set_ylabel("mean squared error, ood", fontsize=8)
    _legend(figure, axes)
    _head(figure, "Where the router leaves the best path", cells, shown=shown)
    return figure


def losses_of_adapted_paths(result: xr.DataTree, cells: Cells) -> Figure:
    """Loss of the path that n labelled examples choose: a row a setting, a column a router."""
    pairs = product(("adapted", "routed", "oracle"), ("", "_low", "_high"))
    data = _group(result, "adaptation", *(f"{name}{suffix}" for name, suffix in pairs))
    columns = [model for model in LOOKS if any(row["model"] == model for row in cells.rows)]
    shown = cells.shown(max(1, MOST // len(columns)))
    figure, axes = _grid(len(shown), len(columns), width=2.5, height=2.3)
    for line, setting in zip(axes, shown, strict=True):
        models = cells.under(setting)
        for axis, model in zip(line, columns, strict=True):
            if model not in models:
                axis.set_axis_off()
                continue
            here = data.sel(cell=[row["cell"] for row in models[model]]).load()
            here = here.clip(min=LEAST)
            for name, label, colour, style in (
                ("routed", "router's path", "#223388", "--"),
                ("oracle", "best of each task", "#dd8822", ":"),
            ):
                axis.axhspan(
                    float(here[f"{name}_low"].min()),
                    float(here[f"{name}_high"].max()),
                    color=colour,
                    alpha=0.15,
                    lw=0,
                )
                axis.axhline(float(here[name].mean()), color=colour, ls=style, lw=1.4, label=label)
            mean, bars = _mean_and_bars(here, "adapted")
            axis.errorbar(
                here["examples"].to_numpy(),
                mean,
                yerr=bars,
                color="black",
                marker="o",
                ms=4,
                lw=1.2,
                capsize=2,
                label="path that the examples choose",
            )
            axis.set_xscale("log")
            axis.set_xticks(data["examples"].to_numpy(), data["examples"].to_numpy())
            axis.minorticks_off()
    _loss_axes(axes, name="mean squared error, ood")
    for axis, model in zip(axes[0], columns, strict=True):
        axis.set_title(_name(model), fontsize=9)
    for line, setting in zip(axes, shown, strict=True):
        _label_row(line[0], cells.told(setting), line[0].get_ylabel())
    figure.supxlabel("labelled examples of each held-out task", fontsize=9)
    _legend(figure, axes, title="mean over seeds;\nintervals: 95%")
    _head(figure, "How many examples does a path take?", cells, shown=shown)
    return figure


def losses_by_task(result: xr.DataTree, cells: Cells) -> Figure:
    """Losses of each held-out combination, a panel for each router."""
    setting = cells.reference
    models = cells.under(setting)
    every = [row["cell"] for rows in models.values() for row in rows]
    losses = _group(result, "oracle", "task_loss")["task_loss"]
    losses = losses.sel(split="ood", control="trained", cell=every).load()
    losses = losses.dropna("task", how="all")
    tasks = losses["task"].to_numpy()
    seen = _group(result, "specialization", "seen").sel(cell=every)
    labels = _task_names(_operations(seen), setting)
    figure, axes = _panels(
        len(models),
        width=min(max(2.5, 0.32 * len(tasks)), 9.0),
        height=3.4,
        columns=4 if len(tasks) < 10 else 2,
    )
    for axis, (model, rows) in zip(axes.flat, models.items(), strict=False):
        here = losses.sel(cell=[row["cell"] for row in rows])
        for number, (path, look) in enumerate(PATHS.items()):
            label, colour, marker = LOSSES[look]
            for place, task in enumerate(tasks):
                _strip(
                    axis,
                    place + 0.6 * ((number + 0.5) / len(PATHS) - 0.5),
                    here.sel(path=path, task=task).to_numpy(),
                    width=0.1,
                    colour=colour,
                    marker=marker,
                    label=label.removesuffix(", ood"),
                )
        axis.set_title(_name(model), fontsize=9)
        axis.set_xlim(-0.6, len(tasks) - 0.4)
        axis.grid(axis="x", lw=0.3)
        if len(tasks) <= MANY:
            axis.set_xticks(range(len(tasks)), [labels[task] for task in tasks])
            axis.tick_params(axis="x", labelsize=6.5, rotation=90)
        else:
            axis.set_xticks([])
    _loss_axes(axes)
    figure.supxlabel("held-out combination of operations", fontsize=9)
    _legend(figure, axes)
    _head(figure, "Which held-out combinations fail?", cells, free=())
    return figure


def losses_and_specialization(cells: Cells) -> Figure:
    """OOD loss against specialization of all networks with modules, a column for each |S|."""
    numbers = sorted(cells.values("n_operators"))[: MOST // 2]
    kinds = {
        "specialization": "specialization, 0 to 1, all layers",
        "specialization_by_layer": "specialization, 0 to 1, mean of layers",
    }
    figure, axes = _grid(len(kinds), len(numbers), width=3.2, height=2.5, sharex=False)
    for line, (kind, about) in zip(axes, kinds.items(), strict=True):
        for axis, operators in zip(line, numbers, strict=True):
            rows = [row for row in cells.rows if row["n_operators"] == operators]
            for model, (colour, marker) in LOOKS.items():
                own = [row for row in rows if row["model"] == model]
                if own:
                    axis.plot(
                        [row[kind] for row in own],
                        np.maximum([row["ood"] for row in own], LEAST),
                        ls="",
                        marker=marker,
                        color=colour,
                        ms=5,
                        mew=0,
                        alpha=0.75,
                        label=_name(model),
                    )
            _draw_constants(axis, rows, "ood")
            axis.set_xlim(-0.03, 1.03)
            axis.set_xlabel(about, fontsize=8)
            if len(numbers) > 1:
                axis.set_title(_word("n_operators", operators), fontsize=9)
    _loss_axes(axes, name="mean squared error, ood")
    _legend(figure, axes)
    settings = len(cells.settings)
    figure.suptitle(
        "Loss and specialization" + (f" (all {settings} settings)" if settings > 1 else ""),
        fontsize=10,
    )
    return figure


def variants_of_models(cells: Cells, names: Sequence[str], measured: Sequence[str]) -> Figure:
    """What a setting, or two, makes of each router; a panel for each figure.

    Args:
        cells: networks with modules.
        names: the settings.
        measured: figures of `modular_claims.cells_of`.
    """
    variants = list(cells.values(*names))
    reference = cells.reference
    models = cells.under(reference, *names)
    figure, axes = _grid(1, len(measured), width=3.6, height=3.0, sharey=False)
    for axis, name in zip(axes[0], measured, strict=True):
        drawn: set[str] = set()
        for number, variant in enumerate(variants):
            told = dict(zip(names, variant if len(names) > 1 else (variant,), strict=True))
            for model, rows in cells.under(reference | told).items():
                # The structural oracle has no bottleneck, and counts with it too.
                rows = [row for row in rows if row["cell"] not in drawn]
                drawn |= {row["cell"] for row in rows}
                _strip(
                    axis,
                    list(models).index(model) + 0.7 * ((number + 0.5) / len(variants) - 0.5),
                    [row[name] for row in rows],
                    width=0.25 / len(variants),
                    colour=COLOURS[number % len(COLOURS)],
                    marker="os^DvPX"[number % 7],
                    label=", ".join(_word(*one) for one in told.items()),
                    clip=name in ("id", "ood"),
                )
        _label_models(axis, models)
        if name in ("id", "ood"):
            rows = [row for rows in models.values() for row in rows]
            _draw_constants(axis, rows, name)
            _loss_axes(np.array([[axis]]))
            axis.set_title(_name(name), fontsize=9)
        else:
            axis.set_ylim(-0.03, 1.03)
            axis.set_title(_name(name), fontsize=9)
    _legend(figure, axes)
    _head(figure, "Each router under each setting", cells, free=names)
    return figure


def modules_in_order(assignment: np.ndarray, utilisation: np.ndarray) -> list[int]:
    """The modules that operations are assigned to, in their order, then the others, busiest first.

    Args:
        assignment: [operation], the module's index; below 0 or NaN for none.
        utilisation: [module], how often each is chosen; NaN for what is no module.
    """
    order = [int(module) for module in assignment if module >= 0]
    rest = np.argsort(-utilisation, kind="stable")
    return order + [int(one) for one in rest if one not in order and np.isfinite(utilisation[one])]


def _asked_of(model: str) -> tuple[str, ...]:
    """The settings that a model has variants of."""
    if model == "monolithic":
        return TASK
    if model == "structural_oracle":
        return tuple(name for name in SETTINGS if name != "selection_bottleneck")
    return SETTINGS


def _counts_under(row: Row, setting: Setting, free: Iterable[str] = ()) -> bool:
    names = (name for name in _asked_of(row["model"]) if name not in free)
    return all(row[name] == setting[name] for name in names)


def _group(result: xr.DataTree, name: str, *variables: str) -> xr.Dataset:
    """Some of a group's variables, without the conditions of its cells, of which rows tell."""
    return result[name].to_dataset()[list(variables)].reset_coords(drop=True)


def _layers(data: xr.Dataset) -> list[str]:
    """The layers of the networks in `data`, all together first; of a single one only itself."""
    there = data["seen"].notnull().any([dim for dim in data["seen"].dims if dim != "layer"])
    layers = [layer for layer in data["layer"].to_numpy()[there.to_numpy()] if layer != "pooled"]
    return ["pooled", *layers] if len(layers) > 1 else layers


def _operations(data: xr.Dataset) -> list[str]:
    """The operations of the networks in `data`, or combinations of them, in their own order.

    Where results of several tasks are joined, operations of the others are missing.
    """
    missing = [dim for dim in data["seen"].dims if dim != "operation"]
    names = data["operation"].to_numpy()[data["seen"].notnull().any(missing).to_numpy()]
    place = MATH_OPERATIONS.index
    return sorted(map(str, names), key=lambda name: [place(one) for one in name.split(", ")])


def _task_names(operations: Sequence[str], setting: Setting) -> list[str]:
    """The name of each task by its number: its operations, the last of which changes fastest."""
    if setting["n_layers"] == 1:
        return [name.replace(", ", ",\n") for name in operations]
    return [",\n".join(one) for one in product(operations, repeat=setting["n_layers"])]


def _strip(
    axis: Axes,
    place: float,
    values: Sequence[float] | np.ndarray,
    *,
    width: float,
    colour: str,
    marker: str,
    label: str,
    hollow: bool = False,
    clip: bool = True,
) -> None:
    """A point for each seed, and a line at their mean, so far to both sides."""
    seeds = np.asarray(values, dtype=float)
    seeds = seeds[np.isfinite(seeds)]
    if not seeds.size:
        return
    mean = seeds.mean()
    low = LEAST if clip else -np.inf
    axis.plot(
        [place] * len(seeds),
        np.maximum(seeds, low),
        ls="",
        marker=marker,
        ms=4,
        color=colour,
        mfc="none" if hollow else colour,
        mew=0.9,
        alpha=0.85,
        label=label,
    )
    ends = [place - width, place + width]
    axis.plot(ends, np.maximum([mean] * 2, low), color=colour, lw=1.6, label="_mean")


def _draw_against(axis: Axes, models: dict[str, list[Row]], setting: str, name: str) -> None:
    """A figure against a setting: a point for each cell, a line through the means over seeds."""
    every = [row for rows in models.values() for row in rows if np.isfinite(row[name])]
    loss = name in ("id", "ood")
    for model in models:
        rows = [row for row in every if row["model"] == model]
        if not rows:
            continue
        colour, marker = LOOKS[model]
        seeds = np.array([row[name] for row in rows])
        axis.plot(
            [row[setting] for row in rows],
            np.maximum(seeds, LEAST) if loss else seeds,
            ls="",
            marker=marker,
            ms=3.5,
            color=colour,
            alpha=0.6,
            mew=0,
            label=f"_seeds of {model}",
        )
        values, means = _means(rows, setting, name)
        axis.plot(
            values,
            np.maximum(means, LEAST) if loss else means,
            color=colour,
            marker=marker,
            ms=4.5,
            lw=1.3,
            label=_name(model),
        )
    if loss:
        constant = _means(every, setting, f"constant_{name}")
        axis.plot(*constant, color="black", ls=DASHES[name], lw=1, label=f"constant answer, {name}")


def _means(rows: Sequence[Row], setting: str, name: str) -> tuple[list[Any], np.ndarray]:
    """The values of a setting, ascending, and the mean of a figure at each."""
    values = sorted({row[setting] for row in rows})
    means = [np.mean([row[name] for row in rows if row[setting] == one]) for one in values]
    return values, np.array(means)


def _draw_constants(axis: Axes, rows: Sequence[Row], *splits: str) -> None:
    """What a constant answer loses on each split, where tasks differ but little in it."""
    for split in splits or DASHES:
        values = [row[f"constant_{split}"] for row in rows]
        if max(values) <= 1.25 * min(values):
            axis.axhline(
                float(np.mean(values)),
                color="black",
                ls=DASHES[split],
                lw=1,
                label=f"constant answer, {split}",
            )


def _draw_attainable(axis: Axes, scores: xr.Dataset) -> None:
    """How far from collapse a network can be that is as specialized as it is."""
    operations = (scores["seen"] > 0).sum("operation").max()
    modules = scores["utilisation"].notnull().sum("module").max()
    if int(modules) < 2:
        return
    specialized = min(1.0, float(np.log(operations) / np.log(modules)))
    # One point more where the bound leaves the axis.
    y = np.array([0.0, specialized, 1.0])
    axis.plot(
        np.minimum(1, specialized + 1 - y), y, color="black", lw=0.9, ls="--", label="attainable"
    )
    axis.plot(
        specialized,
        1.0,
        ls="",
        marker="*",
        ms=11,
        color="black",
        mfc="none",
        label="one module for\neach operation",
        zorder=0,
    )


def _annotate(axis: Axes, shares: np.ndarray) -> None:
    for i, j in np.argwhere(shares >= 0.1):
        axis.text(
            j,
            i,
            f"{100 * shares[i, j]:.0f}",
            ha="center",
            va="center",
            fontsize=6,
            color="white" if shares[i, j] > 0.6 else "black",
        )


def _mean_and_bars(cells: xr.Dataset, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The mean over seeds, and how far below and above it their intervals reach: [2, point]."""
    mean = cells[name].mean("cell").to_numpy()
    low = cells[f"{name}_low"].min("cell").to_numpy()
    high = cells[f"{name}_high"].max("cell").to_numpy()
    return mean, np.maximum([mean - low, high - mean], 0)


def _label_models(axis: Axes, models: Iterable[str]) -> None:
    """The names of the models under the axis."""
    names = [_name(model).replace(" ", "\n").replace("-", "-\n") for model in models]
    axis.set_xticks(range(len(names)), names, fontsize=7)
    axis.set_xlim(-0.55, len(names) - 0.45)


def _label_row(axis: Axes, told: str, name: str) -> None:
    """The name of the axis, and above it the row's setting."""
    axis.set_ylabel("\n".join([*wrap(told, width=26), name]), fontsize=8)


def _loss_axes(axes: np.ndarray, *, name: str = "mean squared error") -> None:
    """Logarithmic axes of losses, named at the left."""
    lowest = min(axis.dataLim.ymin for axis in axes.flat)
    clipped = "\n(at the bottom: 1e-8 or less)" if lowest <= LEAST else ""
    for axis in axes.flat:
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        # Small ticks make much of the time that drawing takes; they are for narrow ranges.
        if high > 100 * low:
            axis.yaxis.set_minor_locator(NullLocator())
    for axis in axes[:, 0]:
        axis.set_ylabel(f"{name}{clipped}", fontsize=8)


def _panels(n: int, *, width: float, height: float, columns: int) -> tuple[Figure, np.ndarray]:
    """So many panels on the same vertical axis, side by side as far as `columns` go."""
    n_rows = -(-n // columns)
    n_columns = -(-n // n_rows)
    figure, axes = _grid(n_rows, n_columns, width=width, height=height, sharex=False)
    for axis in axes.flat[n:]:
        axis.set_axis_off()
    return figure, axes


def _grid(
    n_rows: int,
    n_columns: int,
    *,
    width: float,
    height: float,
    sharex: bool = True,
    sharey: bool = True,
) -> tuple[Figure, np.ndarray]:
    """Panels of a size, in inches, and room for a legend beside them."""
    size = (width * n_columns + 2.1, height * n_rows + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(n_rows, n_columns, sharex=sharex, sharey=sharey, squeeze=False)
    for axis in axes.flat:
        axis.tick_params(which="both", labelsize=8)
    return figure, axes


def _legend(
    figure: Figure,
    axes: np.ndarray,
    *,
    more: Sequence[Line2D | Patch] = (),
    title: str | None = None,
) -> None:
    """One legend beside the panels, of all that they show."""
    found: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    found |= {str(handle.get_label()): handle for handle in more}
    figure.legend(
        found.values(),
        found.keys(),
        loc="outside right center",
        frameon=False,
        fontsize=8,
        title=title,
        title_fontsize=8,
        alignment="left",
    )


def _head(
    figure: Figure,
    about: str,
    cells: Cells,
    *,
    shown: Sequence[Setting] | None = None,
    free: Iterable[str] | None = None,
) -> None:
    """The title: what it is about, and which settings, if these are not all that there are."""
    if shown is not None and len(shown) < len(cells.settings):
        about += f" ({len(shown)} of {len(cells.settings)} settings)"
    elif free is not None and (told := cells.told(cells.reference, but=free)):
        about += f" ({told})"
    figure.suptitle(about, fontsize=10)


def _layer_name(layer: str) -> str:
    return _name(layer) if layer == "pooled" else f"layer {layer}"


def _word(name: str, value: Any) -> str:
    """A setting as a word or two."""
    if name == "selection_bottleneck":
        return "+Sbtl" if value else "-Sbtl"
    if name == "n_layers":
        return "1 layer" if value == 1 else f"{value} layers"
    if name in TASK:
        return f"{'|S|' if name == 'n_operators' else 'C'}={value}"
    if name == "functional_bottleneck":
        return f"functional: {value}"
    return f"{value} keys" if name == "module_keys" else _name(value)


def _name(key: str) -> str:
    return NAMES.get(key, key)
