"""Plots of the Raven study: scaling, codes by layer, similar rules, correspondences, examples."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import probes
import tasks
from studies.engine import Reading
from studies.engine.readings import conditions_of
from studies.report import drawings, plots
from studies.report.panels import SMALL, grid, group, shown_conditions, values

SIZES = {
    "n_steps": "training steps",
    "n_layers": "layers",
    "d_model": "width",
}
"""What `scaling` draws a reading against, with the labels of the x-axis."""

RULES = [name.replace("progression ", "") for name in tasks.RAVEN_RULES]
"""Short names of the rules."""


def _measured(data: xr.Dataset, axis: Axes, name: str) -> xr.Dataset:
    """The data without what only other models have, such as more heads, by a variable.

    An empty dataset, and a hidden axis, if nothing is left.
    """
    for dim in data[name].dims:
        data = data.dropna(dim, how="all", subset=[name])
    if data[name].size:
        return data
    axis.axis("off")
    return xr.Dataset()


def scaling(result: xr.DataTree, *, reading: Reading, setting: str, ylabel: str) -> Figure | None:
    """A reading against one of `SIZES`, at the largest values of the other two.

    None if the setting has only one value.
    """
    known = [condition.values for condition in conditions_of(result)]
    largest: dict[str, Any] = {
        name: max(values[name] for values in known if values.get(name) is not None)
        for name in SIZES
        if name != setting and any(values.get(name) is not None for values in known)
    }
    # The width of the heads follows from that of the model.
    view = partial(plots.against, readings={ylabel: reading}, setting=setting, ylabel="", log="x")
    figure = plots.only(result, view=view, **largest)
    ticks = sorted({values[setting] for values in known if values.get(setting) is not None})
    for axis in figure.axes if figure else ():
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axis.set_xlabel(SIZES[setting], fontsize=SMALL)
    return figure


def layers(result: xr.DataTree, *, label: str, names: Any) -> Figure | None:
    """The codes of each layer by t-SNE, coloured by a label: a row per layer."""
    data = group("projection", kind="tsne")(result)
    if "layer" not in data.dims:
        return None
    rows = {
        f"layer {layer}": {"layer": layer} for layer in data["layer"].to_numpy() if layer != "all"
    }
    draw = partial(_draw_codes, label=label, names=names)
    return drawings.pictures(result, data=lambda result: data, draw=draw, rows=rows, share=False)


def _draw_codes(data: xr.Dataset, axis: Axes, *, label: str, names: Any) -> None:
    """Draw the codes of one layer, if the model has that layer."""
    data = _measured(data, axis, "projection")
    if data:
        names = names[: int(data[label].max()) + 1]
        probes.plots.projection(data, axis, label=label, names=names)


def cosines(result: xr.DataTree) -> Figure | None:
    """Cosine similarity of the mean codes of rules; in the second row without the common part."""
    at = {"control": "observed", "layer": "all", "key": "all"}
    rows = {"mean codes": {"centring": "none"}, "minus the mean of all": {"centring": "mean"}}
    return drawings.pictures(
        result,
        data=values("similarity", "similarity", **at),
        draw=_draw_cosines,
        rows=rows,
        mean="similarity",
        share=False,
    )


def single_codes(result: xr.DataTree) -> Figure | None:
    """Cosine similarity of the codes of single instances, sorted by rule: a row per layer."""
    return drawings.pictures(
        result,
        data=group("samples"),
        draw=_draw_single_codes,
        rows="layer",
        share=False,
    )


def _draw_cosines(data: xr.Dataset, axis: Axes) -> None:
    probes.plots.similarity(data.assign_coords(first=RULES, second=RULES), axis)


def _draw_single_codes(data: xr.Dataset, axis: Axes) -> None:
    """Draw a matrix of similarities, with the names of the rules."""
    data = _measured(data, axis, "code_similarity")
    if not data:
        return
    rules = data["code_rule"].to_numpy().astype(int)
    matrix = data["code_similarity"].transpose("sample", "other")
    probes.plots.matrix(matrix, axis, limits=(-1.0, 1.0))
    axis.set(xlabel="", aspect="equal")
    # Names of rules of a single sample would overlap.
    rules, counts = np.unique(rules, return_counts=True)
    centres = (np.cumsum(counts) - (counts + 1) / 2)[counts > 1]
    names = [RULES[rule] for rule in rules[counts > 1]]
    axis.set_xticks(centres, names, rotation=90, fontsize=6)
    axis.set_yticks(centres, names, fontsize=6)
    _add_scale(axis)


def _add_scale(axis: Axes) -> None:
    """Add the colour bar of a panel with a scale of its own."""
    figure = axis.get_figure(root=True)
    assert figure is not None
    bar = figure.colorbar(axis.images[-1], ax=axis, fraction=0.05, pad=0.02)
    bar.ax.tick_params(labelsize=6)


SCOPES = {"code": "code patched", "row": "its row patched", "pattern": "all tokens patched"}
"""What is patched, in the order of bars, with entries of the legend."""


def patched(data: xr.Dataset, axis: Axes) -> None:
    """Draw how often answers follow B, by patched layer and by what is patched in it."""
    data = data.sel(scope=list(SCOPES)).assign_coords(scope=list(SCOPES.values()))
    probes.plots.interchange(data, axis)
    axis.set_xlabel("")


def heads(result: xr.DataTree, *, row: str) -> Figure | None:
    """How often heads point to the corresponding token of a row, and to the same position."""
    tokens = {"corresponding token": "corresponding", "token at its position": "same position"}
    rows = {
        f"{name}\nin the {column} column": {"target": target, "column": column}
        for name, target in tokens.items()
        for column in ("first", "second")
    }
    at = {"control": "observed", "split": "ood", "row": row}
    return drawings.matrices(
        result,
        data=values("pointing", "share", **at),
        y="layer",
        x="head",
        rows=rows,
        title="share of answer tokens",
    )


def attention(result: xr.DataTree, *, kind: str) -> Figure | None:
    """The attention of the last answer token in an instance: heads by keys, a row per layer.

    Args:
        result: the result.
        kind: `scores` or `pattern`.
    """
    draw = partial(_draw_attention, kind=kind)
    return drawings.pictures(result, data=group("samples"), draw=draw, rows="layer", share=False)


def _draw_attention(data: xr.Dataset, axis: Axes, *, kind: str) -> None:
    """Draw the weights of the first instance, with lines between panels."""
    data = _measured(data.isel(example=0), axis, kind)
    if not data:
        return
    order = data["permutation"].dropna("token").transpose("column", "token").to_numpy()
    n_features, n_heads = order.shape[1], data.sizes["head"]
    probes.plots.matrix(data[kind].transpose("head", "key_pos"), axis)
    for panel in range(1, 9):
        style = {"color": "black", "lw": 1.0 if panel % 3 == 0 else 0.3}
        axis.axvline(panel * n_features - 0.5, **style)
    feature = order[2, -1]
    same = [panel * n_features + list(order[panel % 3]).index(feature) for panel in range(8)]
    style = {"marker": "v", "ms": 4, "ls": "none", "color": "#228833", "clip_on": False}
    axis.plot(same, [-0.5] * 8, **style, label="token of the same feature")
    centres = (np.arange(9) + 0.5) * n_features - 0.5
    axis.set_xticks(centres, [f"{row},{column}" for row in "123" for column in "123"], fontsize=6)
    axis.set_yticks(range(n_heads), [f"head {n}" for n in range(n_heads)], fontsize=6)
    axis.set_xlabel("panel (row, column)", fontsize=SMALL)
    _add_scale(axis)


def instances(result: xr.DataTree) -> Figure | None:
    """Instances of the task as the columns list them; a feature has one colour in all panels.

    Below each, the rule of each feature. The last panel is the right answer, with a question mark
    where that of the first model with the chosen values of tuned settings differs.
    """
    data = group("samples")(result)
    if not data:
        return None
    data = data.isel(cell=shown_conditions(result)[0].cells[0])
    data = data.dropna("token", subset=["answer"]).dropna("feature", subset=["rule"])
    n, n_features = data.sizes["example"], data.sizes["feature"]
    figure, axes = grid(1, n, width=2.6, height=2.6 + 0.25 * n_features, share=False)
    for number, axis in enumerate(axes[0]):
        _draw_instance(axis, data.isel(example=number))
        axis.set_title(f"instance {number + 1}", fontsize=9)
    return figure


def _draw_instance(axis: Axes, data: xr.Dataset) -> None:
    """Draw the grid of an instance with its rules."""
    shown = data["values"].transpose("row", "column", "feature").to_numpy().astype(int)
    order = data["permutation"].transpose("column", "token").to_numpy().astype(int)
    answer, n_features = data["answer"].to_numpy(), order.shape[1]
    for row in range(3):
        for column in range(3):
            axis.add_patch(Rectangle((column, 2 - row), 1, 1, fill=False, lw=1))
            for token, feature in enumerate(order[column]):
                is_asked = (row, column) == (2, 2)
                wrong = is_asked and answer[token] != shown[row, column, feature]
                axis.text(
                    column + 0.5,
                    3 - row - (token + 0.5) / n_features,
                    f"{shown[row, column, feature]}" + (" ?" if wrong else ""),
                    color=probes.plots.COLOURS[feature],
                    ha="center",
                    va="center",
                    fontsize=9,
                    weight="bold" if is_asked else "normal",
                )
    for feature, rule in enumerate(data["rule"].to_numpy().astype(int)):
        axis.text(
            1.5,
            -0.25 - 0.3 * feature,
            tasks.RAVEN_RULES[rule],
            color=probes.plots.COLOURS[feature],
            ha="center",
            va="center",
            fontsize=SMALL,
        )
    axis.set(xlim=(-0.05, 3.05), ylim=(-0.3 * n_features - 0.15, 3.05), aspect="equal")
    axis.axis("off")
