"""Plots of the modular routing study: methods, sizes, best paths, and what routers choose.

A view draws the cells that its figure of the paper is about, and nothing without such cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import probes
from studies.engine import Reading
from studies.engine.readings import conditions_of
from studies.engine.results import config_of
from studies.measures.modular_routing import (
    COLLAPSE,
    ID,
    NULL,
    OOD,
    SCORES,
    SHARES,
    SPECIAL,
    TRAINED,
    without_outliers,
)
from studies.report import browsers, drawings, panels, plots
from studies.report.panels import group, values
from studies.setups.equations import MODULAR

SIZES = ("n_operators", "n_points")
"""The coordinates over which the paper's figures about methods pool."""

ERROR, ON_OOD = "mean squared error", "mean squared error, ood"


def with_settings(
    result: xr.DataTree, *, view: Callable[[xr.DataTree], Figure | None], **required: Any
) -> Figure | None:
    """A view of the cells with these settings, whether they are axes of the run or not.

    A setting that does not apply to a condition, such as to the monolithic network, matches all.
    """
    setup, coordinates = config_of(result)["setup"], conditions_of(result)[0].values
    if any(setup.get(name, value) != value for name, value in _without(required, coordinates)):
        return None
    return plots.only(result, view=view, **{k: v for k, v in required.items() if k in coordinates})


def _without(required: Mapping[str, Any], names: Iterable[str]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in required.items() if name not in names]


def of_size(reading: Reading, n_operators: Iterable[int]) -> Reading:
    """The reading for some |S| only; NaN for others, and where |S| is no axis."""

    def values_of_size(result: xr.DataTree) -> np.ndarray:
        cells, found = result["scores"].coords, reading.values(result)
        if "n_operators" not in cells:
            return np.full(len(found), np.nan)
        return np.where(np.isin(cells["n_operators"], list(n_operators)), found, np.nan)

    return Reading(reading.label, values_of_size)


def against_size(result: xr.DataTree, *, setting: str, **options: Any) -> Figure | None:
    """`plots.against` one of `SIZES`, with ticks at its values."""
    figure = plots.against(result, setting=setting, **options)
    known = {condition.values.get(setting) for condition in conditions_of(result)}
    ticks = sorted(value for value in known if value is not None)
    for axis in figure.axes if figure else ():
        axis.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks], fontsize=7)
    return figure


# Activation


def specialization(result: xr.DataTree) -> Figure | None:
    """Specialization against collapse on `id`, a panel for each layer and all together."""
    if "specialization" not in result.children:
        return None
    data = result["specialization"].to_dataset().sel(split="id")
    data = data.isel(layer=data["specialization"].notnull().any(["cell", "control"]))
    figure, axes = panels.grid(1, data.sizes["layer"], height=3.2)
    for axis, layer in zip(axes[0], data["layer"].to_numpy(), strict=True):
        for condition in panels.shown_conditions(result):
            style = {"color": condition.colour, "marker": condition.marker}
            scores = data.isel(cell=condition.cells)
            probes.plots.specialization(scores, axis, layer=layer, label=condition.label, **style)
        axis.set_title("all layers" if layer == "pooled" else f"layer {layer}", fontsize=9)
        axis.label_outer()
    return panels.finished(figure)


def ordered_activation(result: xr.DataTree) -> xr.Dataset:
    """The share of each operation that each module gets; a diagonal is perfect specialization."""
    scores = group("specialization", split="id")(result)
    return probes.ordered_activation(scores).to_dataset(name="value") if scores else scores


def combinations(result: xr.DataTree) -> Figure | None:
    """The modules that combinations of operators go to: one network of each method.

    As in the paper's Figure 9 with |S| = 10, the most points and no selection bottleneck, where
    these are axes.
    """
    required: dict[str, Any] = {"n_operators": 10, "selection_bottleneck": 0}
    known = [condition.values for condition in conditions_of(result)]
    points = [each["n_points"] for each in known if each.get("n_points") is not None]
    required |= {"n_points": max(points)} if points else {}
    axes = {k: v for k, v in required.items() if any(each.get(k) == v for each in known)}
    data = group("combinations")(result)
    if not data:
        return None
    rows = {
        f"{split}, layer {layer}": {"split": split, "layer": layer}
        for split in data["split"].to_numpy()
        for layer in data["layer"].to_numpy()
    }
    view = partial(
        drawings.pictures,
        data=_with_shares,
        draw=_draw_combinations,
        rows=rows,
        share=False,
        bar="share of the combination",
    )
    return plots.only(result, view=view, **axes)


def _with_shares(result: xr.DataTree) -> xr.Dataset:
    """The shares as `value`, so that networks without modules have none."""
    data = group("combinations")(result)
    return data.assign(value=data["activation"])


def _draw_combinations(data: xr.Dataset, axis: Axes) -> None:
    """Draw the shares of modules, with the operators of each row."""
    names = data["name"].to_numpy()
    shares = data["activation"].isel(combination=names != "").dropna("module", how="all")
    shares = shares.transpose("combination", "module")
    if not shares.size:
        axis.axis("off")
        return
    names = [name for name in names if name]
    shares = shares.assign_coords(combination=names)
    probes.plots.matrix(shares, axis, limits=(0.0, 1.0))


# Views of readings

LOSSES = {
    "router's path, id": ID,
    "router's path, ood": OOD,
    "best of each task": TRAINED["task"],
    "best of each sample": TRAINED["sample"],
    "mean of all paths": TRAINED["mean"],
    "best of each task, untrained": NULL["task"],
    "best of each sample, untrained": NULL["sample"],
}
BOTH_LOSSES = {"id": ID, "ood": OOD}
CONSTANT = {"constant": values("scores", "loss_constant", group="all")}
AXES = ("n_operators", "n_layers", "objective", "selection_bottleneck")
AXES += ("functional_bottleneck", "module_keys", "pool")
paths = partial(values, "paths", split="ood", control="trained")
KNOWN_PATHS = {name: paths(name) for name in ("routed", "oracle")}
paths_view = partial(plots.lines, ylabel=ON_OOD)
losses_by = partial(plots.against, readings=BOTH_LOSSES, ylabel=ERROR)

END_TO_END = {"n_layers": 2, "pool": "mlp", "functional_bottleneck": "oracle"}
TRUE_MODULES = END_TO_END | {"pool": "operations"}
DIRECT = {"module_keys": "direct"}
methods = partial(
    plots.points,
    readings={"OOD loss": OOD, "ID loss": ID, "specialization": SPECIAL},
    separate=True,
    ignore=SIZES,
)
best_paths = partial(
    plots.points,
    readings={"router's path": OOD.among(MODULAR), "best path of each sample": TRAINED["sample"]},
    xlabel=ON_OOD,
    log=True,
    ignore=SIZES,
)
keys = partial(losses_by, setting="module_keys", log="y", ignore=SIZES)
detailed = partial(against_size, setting="n_points", rows="n_operators")
SPECIALIZATION = {"specialization": without_outliers(SPECIAL)}
SMOOTH_OOD = without_outliers(OOD)


def by_size(readings: Mapping[str, Reading], setting: str, ylabel: str, log: str) -> Any:
    """A view of readings against |S| or C, pooled over the other one."""
    sized = partial(against_size, readings=readings, setting=setting, ylabel=ylabel, log=log)
    return partial(with_settings, view=partial(sized, ignore=SIZES), **END_TO_END, **DIRECT)


VIEWS = {
    "training": partial(plots.training, metric="loss", references=CONSTANT, log="y"),
    "tuning": partial(plots.tuning, log="y"),
    "losses": partial(plots.points, readings=LOSSES, log=True, xlabel=ERROR),
    "routed": partial(
        plots.points, readings={"familiar": ID, "held out": OOD}, log=True, xlabel=ERROR
    ),
    "routing": partial(plots.points, readings=SCORES, xlabel="score"),
    "specialization": specialization,
    "activation": partial(
        drawings.matrices,
        data=ordered_activation,
        y="operation",
        x="module",
        rows="layer",
        numbers=lambda share: f"{100 * share:.0f}" if share >= 0.1 else "",
        title="share of the operation (numbers: %)",
    ),
    "combinations": combinations,
    "regret": partial(
        paths_view,
        data=paths("regret"),
        along="layer",
        references={"routed": KNOWN_PATHS["routed"]},
        log="y",
    ),
    "adaptation": partial(
        paths_view, data=paths("adapted"), along="examples", references=KNOWN_PATHS, log="xy"
    ),
    "by_task": partial(paths_view, data=paths("task_loss"), along="task", lines="path", log="y"),
    "gaps": partial(plots.points, readings=SHARES, xlabel=f"share of the {ON_OOD}"),
    "gaps_by_task": partial(
        plots.lines,
        data=values("gaps", "loss"),
        along="task",
        lines="stage",
        ylabel=ON_OOD,
        log="y",
    ),
    "loss_against_specialization": partial(
        plots.scatter, x=SPECIAL, y=OOD, xlabel="specialization", ylabel=ON_OOD, log="y"
    ),
    "routing_by_n_operators": partial(
        plots.against,
        setting="n_operators",
        readings={"specialization": SPECIAL} | SCORES,
        ylabel="score",
    ),
    "by_n_points": partial(losses_by, setting="n_points", log="xy"),
    **{f"by_{name}": partial(losses_by, setting=name, log="y") for name in AXES},
    # The paper's figures: methods, pooled over sizes
    "true_modules": partial(with_settings, view=methods, **TRUE_MODULES, **DIRECT),
    "end_to_end": partial(with_settings, view=methods, **END_TO_END, **DIRECT),
    "best_paths": partial(with_settings, view=best_paths, **END_TO_END, **DIRECT),
    "one_layer": partial(with_settings, view=methods, n_layers=1),
    "collapse_by_functional_bottleneck": partial(
        plots.against,
        readings={"collapse": COLLAPSE},
        setting="functional_bottleneck",
        ylabel="collapse (1: none)",
        ignore=SIZES,
    ),
    "keys_of_true_modules": partial(with_settings, view=keys, **TRUE_MODULES),
    "keys_end_to_end": partial(with_settings, view=keys, **END_TO_END),
    # Sizes: all but the detailed ones without outliers
    "ood_by_n_points": by_size({"all |S|": SMOOTH_OOD}, "n_points", ON_OOD, "xy"),
    "specialization_by_n_points": by_size(SPECIALIZATION, "n_points", "specialization", "x"),
    "specialization_by_n_operators": by_size(SPECIALIZATION, "n_operators", "specialization", ""),
    "ood_few_operators": by_size(
        {"all C": of_size(SMOOTH_OOD, (3, 5))}, "n_operators", ON_OOD, "y"
    ),
    "ood_many_operators": by_size(
        {"all C": of_size(SMOOTH_OOD, range(5, 16))}, "n_operators", ON_OOD, "y"
    ),
    "id_few_operators": by_size(
        {f"|S| = {n}": of_size(without_outliers(ID), [n]) for n in (3, 5)},
        "n_points",
        "mean squared error, id",
        "xy",
    ),
    "detailed_losses": partial(detailed, readings=BOTH_LOSSES, ylabel=ERROR, log="xy"),
    "detailed_routing": partial(
        detailed,
        readings={"specialization": SPECIAL, "collapse": COLLAPSE},
        ylabel="score",
        log="x",
    ),
}

BROWSERS = {
    "modules_by_combination": partial(
        browsers.matrices,
        data=values("combinations", "activation"),
        y="combination",
        x="module",
        names={"combination": values("combinations", "name")},
        title="share of each module in a combination of operators",
    ),
}
"""Charts with which a combination's modules are stepped through."""
