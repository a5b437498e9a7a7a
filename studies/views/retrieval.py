"""Plots of contextual retrieval: errors by size and heads, and which retrievals searches choose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import probes
import tasks
from studies.engine import Reading, metric
from studies.engine.readings import Condition, conditions_of
from studies.engine.results import config_of, task_config_of
from studies.report.names import colours_of, name_of
from studies.report.panels import SMALL, finished, grid

MOST = 6
"""The largest number of networks, or of conditions, in a figure of matrices."""

GROUPS = {
    "all": "all combinations",
    "id": "familiar combinations",
    "ood": "held-out combinations",
}
"""Splits as groups of the pairing, with the titles of their panels."""

HEADS = ("#99c4e8", "#4477aa", "#223d55")
"""Colours of multi-head attention by number of heads, from few to many."""

PERCENT = "{:.0%}"
"""The format of value scores."""


# Task


def example(result: xr.DataTree) -> Figure | None:
    """A set of objects with the searches of one of them, what it retrieves, and its target.

    A panel per search, with the objects in the order of their search feature; below each its
    retrieval features. Of the nearest object the preferred one is retrieved.
    """
    task = tasks.ContextualRetrieval(task_config_of(result, tasks.ContextualRetrievalConfig))
    batch, searches = task.batch("id", 0, 1), task.config.n_searches
    features = batch.inputs[0].numpy()
    preferred, winner, retrieved = (
        batch.latents[name][0, 0].tolist() for name in ("preference", "winner", "retrieved")
    )
    figure, axes = grid(searches, 1, width=5.2, height=2.2, share=False)
    for search, axis in enumerate(axes[:, 0]):
        order = features[:, search].argsort()
        x = order.argsort()
        columns = features[:, searches : searches + task.config.n_retrievals]
        for row, of_row in enumerate(columns.T):
            for number, value in enumerate(of_row):
                is_retrieved = (number, row) == (winner[search], preferred[search])
                style: Any = {"weight": "bold", "color": "#cc3311"} if is_retrieved else {}
                axis.text(x[number], -row, f"{value:.1f}", ha="center", fontsize=6, **style)
        axis.plot(x, [1] * len(x), "o", color="#777777", ms=4)
        axis.plot(x[0], 1, "D", color="#332288", ms=6, label="object that asks")
        style = {"color": "#cc3311", "ms": 6, "label": "nearest object"}
        axis.plot(x[winner[search]], 1, "s", **style)
        axis.set_ylim(-columns.shape[1], 2)
        axis.set_yticks([])
        ticks = [f"{value:.2f}" for value in features[order, search]]
        axis.set_xticks(range(len(ticks)), ticks, fontsize=6)
        axis.set_xlabel(f"search feature {search}", fontsize=SMALL)
        title = f"search {search} prefers feature {preferred[search]}: {retrieved[search]:.2f}"
        axis.set_title(title, fontsize=9)
    terms = zip(task.coefficients, retrieved, strict=True)
    terms = " + ".join(f"{weight:.2f} x {value:.2f}" for weight, value in terms)
    figure.suptitle(f"target: {terms} = {batch.targets[0, 0]:.2f}", fontsize=9)
    return finished(figure)


# Errors


def losses(result: xr.DataTree, *, split: str) -> Figure | None:
    """Errors on a split by width, with a bar per number of heads, beside the paper's.

    A panel for each size of the task; bars are means over seeds, dots single seeds, and diamonds
    the paper's figures. None if no model is scored on the split.
    """
    error, paper = metric("error", split), metric("error_paper", split)
    finite = np.isfinite(error.values(result))
    sizes: dict[tuple[int, int], list[Condition]] = {}
    for condition in conditions_of(result):
        if finite[condition.cells].any():
            size = tuple(_value(result, condition, name) for name in ("n_searches", "n_retrievals"))
            sizes.setdefault(size, []).append(condition)
    if not sizes:
        return None
    width = 1.4 + 0.3 * max(map(len, sizes.values()))
    figure, axes = grid(1, len(sizes), width=width, share=False)
    for axis, ((searches, retrievals), conditions) in zip(axes[0], sizes.items(), strict=True):
        _draw_losses(axis, result, conditions, error, paper)
        axis.set_title(f"{searches} searches, {retrievals} retrievals", fontsize=9)
        axis.set_ylabel(f"mean absolute error,\n{GROUPS[split]}", fontsize=SMALL)
    return finished(figure)


def _draw_losses(
    axis: Axes,
    result: xr.DataTree,
    conditions: Sequence[Condition],
    error: Reading,
    paper: Reading,
) -> None:
    """Draw the errors of conditions that differ in width, model and number of heads."""
    numbers = sorted({n for n in (c.values.get("n_heads") for c in conditions) if n is not None})
    x, ticks = 0.0, {}
    for width in sorted({_value(result, condition, "d_model") for condition in conditions}):
        row = [c for c in conditions if _value(result, c, "d_model") == width]
        ticks[x + (len(row) - 1) / 2] = f"d = {width}"
        for condition in row:
            heads, model = condition.values.get("n_heads"), condition.values["model"]
            label, colour = name_of(model), colours_of([model])[0]
            if heads is not None:
                label = f"{label}, {heads:g} heads"
                colour = HEADS[min(numbers.index(heads), len(HEADS) - 1)]
            values, reported = (r.values(result)[condition.cells] for r in (error, paper))
            axis.bar(x, np.nanmean(values), color=colour, width=0.9, label=label)
            axis.plot([x] * len(values), values, ".", color="black", ms=3)
            if np.isfinite(reported).any():
                style: Any = {"mfc": "white", "mec": "black", "ms": 4, "label": "paper"}
                axis.plot(x, np.nanmean(reported), "D", **style)
            x += 1
        x += 1
    axis.set_xticks(list(ticks), list(ticks.values()), fontsize=SMALL)
    axis.grid(axis="y", lw=0.3)


def _value(result: xr.DataTree, condition: Condition, name: str) -> Any:
    """The value of a setting in a condition, also if it is the same in all of them."""
    value = condition.values.get(name)
    if value is None:
        setup = config_of(result)["setup"]
        value = setup["task"].get(name, setup.get(name))
    return value


# Value scores


def switching(result: xr.DataTree) -> Figure | None:
    """Mean value scores of each search on all, familiar and held-out combinations: a row a model.

    For models that some combinations were held out from; None without any.
    """
    networks = [one for one in _networks(result) if "ood" in one[1]["group"]][:MOST]
    if not networks:
        return None
    groups = [group for group in GROUPS if group in networks[0][1]["group"]]
    figure, axes = grid(len(networks), len(groups), width=2.2, height=1.9, share=False)
    for row, (label, network) in zip(axes, networks, strict=True):
        for axis, group in zip(row, groups, strict=True):
            scores = network["pairing"].sel(group=group).transpose(..., "model_retrieval")
            probes.plots.matrix(scores, axis, limits=(0.0, 1.0), numbers=PERCENT)
            axis.set_title(GROUPS[group], fontsize=9)
            axis.set_xlabel("model's retrieval", fontsize=SMALL)
            axis.set_ylabel("")
        row[0].set_ylabel(f"{label}\nmodel's search", fontsize=SMALL)
    return finished(figure)


def specialization(result: xr.DataTree) -> Figure | None:
    """Mean value scores given the true retrieval, over all searches: a row per condition.

    A column per seed. The model's retrievals are in the order of the true ones that they are
    assigned to, so that specialised ones show a diagonal. Models that were trained on all
    combinations if there are any. None without compositional attention.
    """
    rows: dict[str, list[xr.Dataset]] = {}
    networks = list(_networks(result))
    if any("ood" not in network["group"] for _, network in networks):
        networks = [one for one in networks if "ood" not in one[1]["group"]]
    for label, network in networks:
        rows.setdefault(label.rpartition(", seed ")[0], []).append(network)
    if not rows:
        return None
    shown = dict(list(rows.items())[:MOST])
    n_columns = max(map(len, shown.values()))
    figure, axes = grid(len(shown), n_columns, width=2.0, height=2.0, share=False)
    for row, (label, of_condition) in zip(axes, shown.items(), strict=True):
        for axis in row[len(of_condition) :]:
            axis.axis("off")
        for axis, network in zip(row, of_condition, strict=False):
            _draw_specialization(axis, network)
        row[0].set_ylabel(f"{label}\ntrue retrieval", fontsize=SMALL)
    return finished(figure)


def _draw_specialization(axis: Axes, network: xr.Dataset) -> None:
    group = "all" if "all" in network["group"] else "id"
    probes.plots.pairing(network, axis, search="pooled", group=group)
    title = f"seed {network['seed'].item()}: {axis.get_title()}"
    axis.set_title(title, fontsize=SMALL)
    axis.set_xlabel(axis.get_xlabel(), fontsize=SMALL)
    axis.set_ylabel("")


def pairing(result: xr.DataTree) -> Figure | None:
    """Mean value scores given the truth: a row for each of the first `MOST` networks.

    For each search and group a panel; "pooled": each search of the model, whatever the truth. The
    order of retrievals is that of the true ones that they are assigned to in the first group.
    """
    networks = [(label, _without_all(network)) for label, network in _networks(result)][:MOST]
    if not networks:
        return None
    n_panels = max(one.sizes["search"] * one.sizes["group"] for _, one in networks)
    figure, axes = grid(len(networks), n_panels, width=1.7, height=2.1, share=False)
    for row, (label, network) in zip(axes, networks, strict=True):
        shown = list(product(network["search"].to_numpy(), network["group"].to_numpy()))
        for axis in row[len(shown) :]:
            axis.axis("off")
        for axis, (search, group) in zip(row, shown, strict=False):
            at = {"group": str(group), "fitted": str(network["group"][0].item())}
            of_search = None if search == "pooled" else str(search)
            probes.plots.pairing(network, axis, search=of_search, **at)
            title = f"search {search}, {group}\n{axis.get_title()}"
            axis.set_title(title, fontsize=SMALL)
            axis.set_ylabel("model's search" if search == "pooled" else "", fontsize=SMALL)
            axis.set_xlabel("model's retrieval", fontsize=SMALL)
        row[0].set_ylabel(f"{label}\npreference", fontsize=SMALL)
    return finished(figure)


def _without_all(network: xr.Dataset) -> xr.Dataset:
    """The pairing without the group of all combinations, if familiar ones are a group."""
    groups = [group for group in ("id", "ood") if group in network["group"]] or ["all"]
    return network.sel(group=groups, fitted=groups)


def _networks(result: xr.DataTree) -> Iterator[tuple[str, xr.Dataset]]:
    """The pairing of each compositional network, with a label, without what it does not have."""
    if "pairing" not in result.children:
        return
    data = result["pairing"].to_dataset()
    for condition in conditions_of(result):
        for cell in condition.cells:
            network = data.isel(cell=cell)
            for dim in ("group", "model_search", "model_retrieval"):
                network = network.dropna(dim, how="all", subset=["pairing"])
            if not network["pairing"].size:
                continue
            network = network.sel(fitted=network["group"].to_numpy())
            network = network.dropna("true_search", how="all", subset=["search_assignment"])
            network = network.dropna("true_retrieval", how="all", subset=["retrieval_assignment"])
            searches = [str(search) for search in network["true_search"].to_numpy()]
            size = f"{len(searches)}x{network.sizes['true_retrieval']}"
            width = condition.values.get("d_model")
            parts = [size] if width is None else [size, f"d = {width:g}"]
            label = ", ".join([*parts, f"seed {network['seed'].item()}"])
            yield label, network.sel(search=[*searches, "pooled"])
