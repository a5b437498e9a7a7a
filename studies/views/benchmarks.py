"""Plots of the benchmarks of compositional attention: value scores, and samples of two tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

import probes
import tasks
from studies.engine.results import task_config_of
from studies.report import panels

N_SAMPLES = 3
"""Number of examples that are drawn."""


def value_scores(result: xr.DataTree, *, n_retrievals: int) -> Figure | None:
    """Mean value scores by layer (rows) and group (columns), of a network with `n_retrievals`.

    The first with the chosen values of tuned settings; the title names it. The last row shows
    the last token in the last layer (the class token where there is one), from which the answer is
    read. None without such a network.
    """
    if "value_scores" not in result.children:
        return None
    data = result["value_scores"].to_dataset()
    matching = (data["n_retrievals"] == n_retrievals) & data["tightness"].notnull()
    found = [
        (condition.label, number)
        for condition in panels.shown_conditions(result)
        for number in condition.cells
        if matching[number]
    ]
    if not found:
        return None
    label, number = found[0]
    cell = data.isel(cell=number)
    shown = cell[["value_scores"]].isel(retrieval=slice(n_retrievals))
    shown = shown.dropna("group", how="all").dropna("search", how="all")
    shown = shown.sel(group=[name for name in shown["group"].to_numpy() if ":" not in name])
    layers = [f"layer {layer}" for layer in shown["layer"].to_numpy()]
    last = shown.sel(token="last").isel(layer=[-1])
    rows = xr.concat([shown.sel(token="all"), last], "layer", coords="minimal", compat="override")
    names = [*layers, f"{layers[-1]}, last token"]
    groups = rows["group"].to_numpy()
    figure, axes = panels.grid(len(names), len(groups), width=1.5, height=1.5)
    highest = float(cell["value_scores"].max())
    for (row, column), axis in np.ndenumerate(axes):
        probes.plots.value_scores(rows.isel(layer=row, group=column), axis, highest=highest)
        axis.set_title(groups[column] if row == 0 else "", fontsize=panels.SMALL)
        axis.set_ylabel(f"{names[row]}\nsearch", fontsize=7)
        axis.label_outer()
    figure.suptitle(f"{label}, seed {int(cell['seed'])}", fontsize=panels.SMALL)
    figure.colorbar(axes[0, 0].images[0], ax=axes, shrink=0.6, label="mean value score")
    return figure


def pictures(result: xr.DataTree) -> Figure:
    """Pictures of Sort-of-CLEVR's test set, with a question of each type and its answer."""
    task = tasks.SortOfClevr(task_config_of(result, tasks.SortOfClevrConfig, n_train=1, n_valid=1))
    batch = task.batch("test", 0, task.size("test"))
    images = batch.latents["image"].unique()[:N_SAMPLES].tolist()
    figure, axes = panels.grid(1, len(images), width=2.6, height=3.6, share=False)
    for axis, number in zip(axes[0], images, strict=True):
        questions = batch[batch.latents["image"] == number]
        _show(axis, questions.inputs[0][0].permute(1, 2, 0))
        axis.set_title(f"picture {number + 1}", fontsize=9, loc="left")
        types = questions.latents["question_type"].tolist()
        lines = [_question(questions, types.index(kind)) for kind in sorted(set(types))]
        axis.text(0, 80, "\n".join(lines), fontsize=6, va="top", linespacing=1.6)
    return figure


def _question(batch: tasks.Batch[Any], example: int) -> str:
    """A question of Sort-of-CLEVR in words, with its answer."""
    kind = list(tasks.SORT_OF_CLEVR_QUESTIONS)[batch.latents["question_type"][example]]
    subtype = tasks.SORT_OF_CLEVR_QUESTIONS[kind][batch.latents["subtype"][example]]
    colours = [tasks.SORT_OF_CLEVR_COLOURS[i] for i in batch.latents["colours"][example] if i >= 0]
    answer = tasks.SORT_OF_CLEVR_ANSWERS[batch.targets[example, 0]]
    return f"{kind}: {subtype}, {' and '.join(colours)}? {answer}"


def problems(result: xr.DataTree) -> Figure:
    """A problem of each ESBN task; the right one of several candidates is framed."""
    rules = tuple(tasks.ESBN_RELATIONS)
    figure, axes = panels.grid(len(rules), 9, width=0.8, height=1.0, share=False)
    for rule, row in zip(rules, axes, strict=True):
        task = tasks.ESBN(task_config_of(result, tasks.ESBNConfig, rule=rule, n_withheld=0))
        # The first of a larger batch has a random answer.
        batch = task.batch("id", 0, 24)[:1]
        answer = int(batch.targets[0, 0])
        for number, axis in enumerate(row):
            if number >= task.n_images:
                axis.axis("off")
                continue
            _show(axis, 1 - batch.inputs[0, number, 0])
            if number in _candidates(rule, task.n_images, answer):
                axis.spines[:].set(visible=True, color="#228833", linewidth=2)
        title = task.relations[answer] if rule == "same_different" else f"answer {answer + 1}"
        row[0].set_title(f"{rule.replace('_', ' ')}: {title}", fontsize=panels.SMALL, loc="left")
    return figure


def _candidates(rule: str, n_images: int, answer: int) -> range:
    """The images that are the right candidate."""
    if rule == "same_different":
        return range(0)
    if rule == "rmts":
        return range(2 + 2 * answer, 4 + 2 * answer)
    return range(n_images - 4 + answer, n_images - 3 + answer)


def _show(axis: Axes, image: ArrayLike) -> None:
    """Draw an image without ticks."""
    pixels = np.asarray(image)
    axis.imshow(pixels, cmap="gray", vmin=0, vmax=1)
    axis.set(xticks=[], yticks=[])
