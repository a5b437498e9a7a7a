"""The figures of the study of quasi-attention, drawn from its result alone.

A model is a way to attend, with its best learning rate; its seeds are networks. All but the
ablation and the matrices leave out compositions that the paper has in its ablation alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from studies.coda_composition import CONDITION, conditions_of
from studies.coda_tasks import ALL

Condition = tuple[Any, ...]
"""Values of `CONDITION`."""

LOOKS = {"softmax": "#4477aa", "linear": "#228833", "hyla": "#aa3377"}
"""Colour of each mechanism but CoDA; others are grey."""

CODA = ("#cc3311", "#dd8822", "#66ccee", "#332288", "#999933", "#882255")
"""Colours of CoDA, in the order of its compositions."""

SPLITS = {"id": ("familiar (id)", "o", "-"), "ood": ("put together anew (ood)", "s", "--")}
"""Name, marker and dashes of each split."""

GROUPS = {"mlu": (ALL, "+", "-", "*", "two variables")}
"""Groups with panels of their own; of other tasks that of all examples."""

AGREEMENT = {
    "": ("trained", "#aa3377"),
    " untrained": ("untrained", "#999999"),
    " shuffled": ("planted signs shuffled", "#dddddd"),
}
"""Name and colour of what is compared with planted signs."""

AGREED = {
    "signs": ("agreement of the best head with the planted signs: add, subtract, ignore", 1 / 3),
    "matches": ("the same, of whether a token counts at all", 1 / 2),
}
"""Title and chance of each way to compare."""

SATURATED = {
    ("affinity", "both"): "|E| > 2",
    ("dissimilarity", "low"): "N < -3: closed",
    ("dissimilarity", "high"): "N > 3: open",
}
"""Panels of saturation, by quantity and side."""

CENTRED = {"none": "not centred", "row": "over rows", "matrix": "over the matrix"}

MOST = 8
"""Models whose curves are drawn together."""

MOST_IN_ROW = 6


def model_name(condition: Mapping[str, Any]) -> str:
    """A model in short: what differs from tanh(E) * sigmoid(N) without centring.

    `single`: the paper's base model for pairs, with one matrix instead of heads.

    Args:
        condition: values of `CONDITION`, such as coordinates of a result.
    """
    single = condition["alignment"] == "networks"
    if condition["model"] != "coda":
        name = str(condition["model"]).replace("_", " ")
        return f"single {name}" if single else name
    affinity, gate = (_function(condition[name]) for name in ("affinity", "gate"))
    doubled = "2 " if condition["doubled"] else ""
    if (condition["affinity"], condition["gate"]) != ("tanh", "sigmoid"):
        functions = f"{affinity} × {doubled}{gate}"
    else:
        functions = f"{doubled}{gate}" if doubled else ""
    rest = ", ".join(filter(None, [functions, _centring(condition)]))
    if not rest:
        return "single CoDA" if single else "CoDA"
    # Tables have no room for both words, and only CoDA has functions.
    return f"{'single' if single else 'CoDA'}, {rest}"


def _function(name: object) -> str:
    short = {"sigmoid": "sigm.", "algebraic": "alg.", "arctan_scaled": "2/π arctan"}
    return short.get(str(name), str(name))


def _centring(condition: Mapping[str, Any]) -> str:
    over = {
        quantity: str(condition[f"{name}_centring"])
        for quantity, name in (("E", "affinity"), ("N", "gate"))
        if condition[f"{name}_centring"] != "none"
    }
    if len(set(over.values())) > 1:
        return ", ".join(f"{quantity} {what}" for quantity, what in over.items())
    return f"{', '.join(over)} by {next(iter(over.values()))}" if over else ""


def figures(result: xr.DataTree) -> dict[str, Figure]:
    """All figures by file name; those that a result has no data for are left out."""
    drawn = {"accuracy": accuracy(result), "training": training(result), "signs": signs(result)}
    if alignments := _ablated(_chosen(result, "errors")):
        drawn["ablation"] = ablation(result, alignments)
    if "matrices" in result.children:
        drawn["matrices"] = matrices(result)
    return drawn


def accuracy(result: xr.DataTree) -> Figure:
    """Share of right answers, a row for each model and a point for each seed; by operator too."""
    errors = _compared(_chosen(result, "errors"))
    models, task = conditions_of(errors), _task(errors)
    # From nothing, or from chance where all are better.
    lowest = float(errors["accuracy_low"].min())
    least = float(errors["chance"].sel(group=ALL).min())
    least = 0.0 if lowest < least else least
    groups = [group for group in GROUPS.get(task, (ALL,)) if group in errors["group"]]
    width = 3.6 if len(groups) == 1 else 2.0
    size = (2.2 + width * len(groups), 1.4 + 0.42 * len(models))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, len(groups), sharex=True, sharey=True, squeeze=False)[0]
    for axis, group in zip(axes, groups, strict=True):
        _plain(axis)
        for row, (colour, cells) in enumerate(zip(_colours(models), models.values(), strict=True)):
            for split, (_, marker, _) in SPLITS.items():
                one = errors.isel(cell=cells).sel(split=split, group=group)
                middle = row + (-0.17 if split == "id" else 0.17)
                places = middle + 0.1 * (np.arange(len(cells)) - (len(cells) - 1) / 2)
                values, low, high = (
                    one[f"accuracy{bound}"].to_numpy() for bound in ("", "_low", "_high")
                )
                spread = np.clip([values - low, high - values], 0, None)
                axis.errorbar(
                    values, places, xerr=spread, ls="", marker=marker, ms=4, color=colour,
                    mfc=colour if split == "id" else "white", elinewidth=0.9,
                )  # fmt: skip
            axis.axhline(row + 0.5, color="#dddddd", lw=0.6)
        chance = errors["chance"].isel(cell=0).sel(group=group).item()
        axis.axvline(chance, color="black", ls=":", lw=1)
        axis.set_title("all examples" if group == ALL else group.replace("*", "×"), fontsize=9)
        axis.xaxis.set_major_formatter(PercentFormatter(1))
        axis.set_xlim(least - 0.03 * (1 - least), 1 + 0.03 * (1 - least))
    axes[0].set_yticks(range(len(models)), [_name(one) for one in models], fontsize=8)
    axes[0].set_ylim(len(models) - 0.5, -0.5)
    marks = [
        Line2D([], [], color="#555555", ls="", marker=marker, ms=5, mfc=face, label=name)
        for (name, marker, _), face in zip(SPLITS.values(), ("#555555", "white"), strict=True)
    ]
    marks.append(Line2D([], [], color="black", ls=":", lw=1, label="the most frequent answer"))
    _legend(figure, marks)
    figure.suptitle(
        f"{task.replace('_', ' ')}: right answers, of each seed with its 95% interval", fontsize=10
    )
    return figure


def ablation(result: xr.DataTree, alignments: Sequence[str]) -> Figure:
    """Accuracy on `ood` by functions, by centrings, and of what else there is: mean over seeds.

    A row for each of `alignments`, all of it on one scale of colours. In each map the other
    settings are those of the first composition.
    """
    errors = _chosen(result, "errors").sel(split="ood", group=ALL)
    figure = Figure(figsize=(11, 0.4 + 3.0 * len(alignments)), layout="constrained")
    parts = figure.subfigures(len(alignments), 1, squeeze=False)[:, 0]
    for part, alignment in zip(parts, alignments, strict=True):
        inside = errors.isel(cell=(errors["alignment"] == alignment).to_numpy())
        models = conditions_of(inside)
        means = {
            one: 100 * float(inside["accuracy"][cells].mean()) for one, cells in models.items()
        }
        base = next(one for one in means if one[0] == "coda")
        maps = [
            _crossed(means, base, ("affinity", "gate")),
            _crossed(means, base, ("affinity_centring", "gate_centring")),
            _beside(means, base),
        ]
        maps = [one for one in maps if one.size > 1]
        ratios = [1.2 + one.shape[1] for one in maps]
        axes = part.subplots(1, len(maps), squeeze=False, width_ratios=ratios)[0]
        limits = min(means.values()), max(means.values())
        image = [_heat_map(axis, one, *limits) for axis, one in zip(axes, maps, strict=True)][-1]
        bar = part.colorbar(image, ax=list(axes), shrink=0.9)
        bar.set_label("right on ood, %", fontsize=8)
        bar.ax.tick_params(labelsize=7)
        seeds = f"{len(models[base])} seed" + ("s" if len(models[base]) > 1 else "")
        what = "one matrix (the paper's base model)" if alignment == "networks" else alignment
        title = f"{_task(errors).replace('_', ' ')}, {what}: mean of {seeds}"
        part.suptitle(title, fontsize=10)
    return figure


def matrices(result: xr.DataTree) -> Figure:
    """E, its gate, M, and the planted signs of one example: the paper's Figure 2.

    Of the model with the highest accuracy on `id`, the head whose M is largest; where signs are
    planted, of all models within a percent of it the head whose M correlates most with them, in all
    examples that are kept. Shown is the one with the most queries.
    """
    data = _chosen(result, "matrices")
    right = result["errors"]["accuracy"].sel(split="id", group=ALL, cell=data["cell"])
    least = right.max().item()
    pairs = ("example", "query_pos", "key_pos")
    strength, about = abs(data["pattern"]).mean(pairs), "mean |M|"
    if "sign" in data:
        strength = xr.corr(data["pattern"], data["sign"], pairs)
        about = "correlation with the planted signs"
        least -= 0.01
    allowed = abs(strength).where(right >= least).fillna(0)
    stacked = allowed.stack(place=["cell", "layer", "head"])
    cell, layer, head = stacked.isel(place=int(stacked.to_numpy().argmax()))["place"].item()
    where = {"cell": cell, "layer": layer, "head": head}
    some = data.sel(where)
    asked = (some["query"] != "").sum("query_pos").to_numpy()
    one = some.isel(example=int(asked.argmax()))
    one = one.isel(
        query_pos=np.flatnonzero(one["query"] != ""), key_pos=np.flatnonzero(one["key"] != "")
    ).transpose("query_pos", "key_pos")
    gate = f"{'2 ' if one['doubled'] else ''}{_function(one['gate'].item())}"
    titles = {
        "affinity_matrix": f"E{_over(one, 'affinity')}",
        "gate_matrix": f"{gate}(N{_over(one, 'gate')})",
        "pattern": f"M = {_function(one['affinity'].item())}(E) × {gate}(N)",
    } | ({"sign": "planted sign"} if "sign" in one else {})

    n_queries, n_keys = one.sizes["query_pos"], one.sizes["key_pos"]
    n_columns = 2 if "sign" in one else 1
    n_rows = -(-len(titles) // n_columns)
    size = (0.9 + n_columns * (1.1 + 0.42 * n_keys), 0.9 + n_rows * (0.8 + 0.3 * n_queries))
    figure = Figure(figsize=(max(6.0, size[0]), size[1]), layout="constrained")
    axes = figure.subplots(n_rows, n_columns, squeeze=False)
    for axis, (name, title) in zip(axes.flat, titles.items(), strict=True):
        values = one[name].to_numpy()
        high, low, colours = float(np.abs(values).max()), 0.0, "viridis"
        if name == "gate_matrix":
            low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
        else:
            low, colours = -high, "RdBu"
        image = axis.imshow(values, vmin=low, vmax=high, cmap=colours, aspect="auto")
        axis.set_xticks(range(n_keys), one["key"].to_numpy().tolist(), fontsize=8)
        axis.set_yticks(range(n_queries), one["query"].to_numpy().tolist(), fontsize=8)
        axis.tick_params(length=0)
        axis.set_title(title, fontsize=9)
        figure.colorbar(image, ax=axis).ax.tick_params(labelsize=7)
        _annotate(axis, image, "{:.0f}" if name == "sign" else "{:.2f}")
    figure.supylabel("queries", fontsize=8)
    figure.supxlabel("keys", fontsize=8)
    name = model_name({key: one[key].item() for key in CONDITION})
    accuracy = 100 * right.sel(cell=cell).item()
    figure.suptitle(
        f"{name}, seed {one['seed'].item()}, {accuracy:.1f}% right on id; "
        f"place {one.attrs['place']}, layer {layer}, head {head}\n"
        f"{about}: {strength.sel(where).item():.2f}; an example of {one.attrs['split']}",
        fontsize=9,
    )
    return figure


def signs(result: xr.DataTree) -> Figure:
    """How attention weights are distributed on `ood`, over all places, layers and heads.

    The first and last bins also hold what is beyond. Below, where signs are planted, how well they
    are agreed with, over seeds.
    """
    data = _compared(_chosen(result, "signs"))
    models = conditions_of(data)
    summary = _compared(result["summary"].to_dataset(), "condition")
    agreed = "signs" in summary["figure"]
    n_columns = min(len(models), MOST_IN_ROW)
    n_rows = -(-len(models) // n_columns)
    heights = [0.4 + 1.9 * n_rows, *([2.4 * len(AGREED)] if agreed else [])]
    figure = Figure(figsize=(1 + 1.9 * n_columns, 0.3 + sum(heights)), layout="constrained")
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    axes = parts[0].subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False)
    shares = data["distribution"].sel(scale="weights", split="ood")
    shares = shares.mean(("place", "layer", "head"))
    bins = shares["bin"].to_numpy()
    least = float(shares.where(shares > 0).min())
    edges = np.append(bins, 2 * bins[-1] - bins[-2]) - (bins[1] - bins[0]) / 2
    for axis in axes.flat[len(models) :]:
        axis.set_axis_off()
    colours = _colours(models)
    for axis, colour, (model, cells) in zip(axes.flat, colours, models.items(), strict=False):
        _plain(axis)
        means = shares.isel(cell=cells).mean("cell")
        axis.stairs(means.sel(weights="trained"), edges, fill=True, color=colour, alpha=0.8)
        axis.stairs(means.sel(weights="untrained"), edges, color="black", lw=0.9)
        axis.axvline(0, color="black", lw=0.5, ls=":")
        axis.set_title(_name(model), fontsize=8)
        axis.set_yscale("log")
        axis.set_ylim(max(least / 2, 1e-5), 1.5)
    parts[0].supylabel("share of weights", fontsize=8)
    parts[0].supxlabel("attention weight (first and last: and beyond)", fontsize=8)
    marks = [Patch(color="#999999", label="trained"), Patch(fill=False, label="untrained")]
    parts[0].legend(handles=marks, loc="outside upper right", ncols=2, fontsize=7, frameon=False)
    parts[0].suptitle(f"Signs of attention: {_task(data).replace('_', ' ')}", fontsize=10)
    if agreed:
        axes = parts[1].subplots(len(AGREED), 1)
        for axis, name in zip(axes, AGREED, strict=True):
            _draw_agreement(axis, summary, name)
        axes[0].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7, frameon=False)
    return figure


def training(result: xr.DataTree) -> Figure:
    """Accuracy over training, mean over seeds; and what share of E and N CoDA saturates.

    A row for heads, and one for the paper's base model. Of more than `MOST` models those with the
    highest final accuracy on `id`.
    """
    curves = _compared(_chosen(result, "training"))
    alignments = dict.fromkeys(curves["alignment"].to_numpy().tolist())
    panels = list(SATURATED.items()) if "coda" in curves["model"] else []
    size = (5.6 + 2.3 * len(panels), 0.4 + 3.2 * len(alignments))
    figure = Figure(figsize=size, layout="constrained")
    ratios = [1.7] + [1.0] * len(panels)
    axes = figure.subplots(
        len(alignments), 1 + len(panels), width_ratios=ratios, sharex=True, squeeze=False
    )
    for row, alignment in zip(axes, alignments, strict=True):
        mine = (curves["alignment"] == alignment).to_numpy()
        _draw_curves(row, curves.isel(cell=mine), [key for key, _ in panels])
    titles = ["right answers", *(f"share of pairs, {title}" for _, title in panels)]
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("training step", fontsize=8)
    figure.suptitle(f"{_task(curves).replace('_', ' ')}: means over seeds", fontsize=10)
    return figure


def _draw_curves(axes: Sequence[Axes], curves: xr.Dataset, panels: Sequence[Any]) -> None:
    every = conditions_of(curves)
    last = {
        one: float(curves["accuracy"][cells].sel(split="id").isel(train_step=-1).mean())
        for one, cells in every.items()
    }
    kept = sorted(every, key=lambda one: -last[one])[:MOST]
    models = {one: cells for one, cells in every.items() if one in kept}
    steps, colours = curves["train_step"].to_numpy(), _colours(models)
    for colour, (model, cells) in zip(colours, models.items(), strict=True):
        mine = curves.isel(cell=cells).mean("cell")
        for split, (_, _, dashes) in SPLITS.items():
            axes[0].plot(steps, mine["accuracy"].sel(split=split), color=colour, ls=dashes, lw=1.3)
        if model[0] != "coda":
            continue
        for axis, (quantity, side) in zip(axes[1:], panels, strict=True):
            share = mine["saturated"].sel(quantity=quantity)
            share = share.sum("side") if side == "both" else share.sel(side=side)
            axis.plot(steps, share, color=colour, lw=1.3)
    for axis in axes:
        _plain(axis)
        axis.yaxis.set_major_formatter(PercentFormatter(1))
    for axis in axes[1:]:
        axis.set_ylim(-0.03, 1.03)
    marks = [
        Line2D([], [], color=colour, lw=1.5, label=_name(one))
        for colour, one in zip(colours, models, strict=True)
    ]
    kinds = [
        Line2D([], [], color="#555555", ls=dashes, label=name)
        for name, _, dashes in SPLITS.values()
    ]
    title = "" if len(every) <= MOST else f"the best {MOST} of {len(every)}"
    axes[-1].legend(
        handles=marks + kinds, loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=7,
        frameon=False, title=title, title_fontsize=7,
    )  # fmt: skip


# Parts of figures


def _draw_agreement(axis: Axes, summary: xr.Dataset, agreed: str) -> None:
    _plain(axis)
    title, chance = AGREED[agreed]
    conditions = zip(*(summary[name].to_numpy().tolist() for name in CONDITION), strict=True)
    names = [_name(one) for one in conditions]
    for number, (control, (label, colour)) in enumerate(AGREEMENT.items()):
        one = summary.sel(figure=f"{agreed}{control}")
        mean, low, high = (one[kind].to_numpy() for kind in ("mean", "lowest", "highest"))
        places = np.arange(len(names)) + 0.27 * (number - 1)
        axis.bar(places, mean, 0.25, color=colour, ec="black", lw=0.4, label=label)
        spread = np.clip([mean - low, high - mean], 0, None)
        axis.errorbar(places, mean, spread, ls="", color="black", elinewidth=0.8)
    axis.axhline(chance, color="black", ls=":", lw=1, label="chance")
    axis.set_xticks(range(len(names)), [one.replace(", ", ",\n") for one in names], fontsize=7)
    axis.set_ylim(0, 1.02)
    axis.set_ylabel("balanced accuracy", fontsize=8)
    axis.set_title(title, fontsize=9)


def _crossed(
    means: Mapping[Condition, float], base: Condition, names: tuple[str, str]
) -> xr.DataArray:
    """Accuracies by two settings, all others as in `base`; NaN where there is no such model."""
    fixed = [name for name in CONDITION if name not in names]
    found = {
        tuple(_told(one)[name] for name in names): mean
        for one, mean in means.items()
        if all(_told(one)[name] == _told(base)[name] for name in fixed)
    }
    rows, columns = (list(dict.fromkeys(one[side] for one in found)) for side in (0, 1))
    values = [[found.get((row, column), np.nan) for column in columns] for row in rows]
    functions = names[0] == "affinity"
    told = {
        "title": "composition functions" if functions else "centring",
        "rows": "of the affinity E" if functions else "of E",
        "columns": "of the dissimilarity N" if functions else "of N",
    }
    coords = dict(zip(names, (rows, columns), strict=True))
    return xr.DataArray(values, dims=names, coords=coords, attrs=told)


def _over(one: xr.Dataset, name: str) -> str:
    centring = one[f"{name}_centring"].item()
    return "" if centring == "none" else f", centred {CENTRED[centring]}"


def _beside(means: Mapping[Condition, float], base: Condition) -> xr.DataArray:
    """The basic form, that with a doubled gate, and other mechanisms."""
    kept = [one for one in means if one[0] != "coda" or one in (base, (*base[:-1], 1))]
    names = [model_name(_told(one) | {"alignment": "heads"}) for one in kept]
    return xr.DataArray(
        [[means[one]] for one in kept],
        dims=("model", "nothing"),
        coords={"model": [name.replace(", ", ",\n") for name in names], "nothing": [""]},
        attrs={"title": "beside these", "rows": "", "columns": ""},
    )


def _heat_map(axis: Axes, values: xr.DataArray, low: float, high: float) -> AxesImage:
    rows, columns = (values[dim].to_numpy() for dim in values.dims)
    image = axis.imshow(values.to_numpy(), vmin=low, vmax=high, cmap="viridis", aspect="auto")
    axis.set_facecolor("#dddddd")
    axis.set_xticks(range(len(columns)), [_tick(one) for one in columns], fontsize=8)
    axis.set_yticks(range(len(rows)), [_tick(one) for one in rows], fontsize=8)
    axis.tick_params(length=0)
    axis.set_title(values.attrs["title"], fontsize=9)
    axis.set_xlabel(values.attrs["columns"], fontsize=8)
    axis.set_ylabel(values.attrs["rows"], fontsize=8)
    _annotate(axis, image, "{:.1f}")
    return image


def _annotate(axis: Axes, image: AxesImage, style: str) -> None:
    """Each cell's number, in black or white, whichever can be read."""
    values = np.ma.filled(np.ma.asarray(image.get_array(), float), np.nan)
    for row, column in np.argwhere(np.isfinite(values)):
        red, green, blue, _ = image.to_rgba(values[row, column])
        dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.5
        look = {"color": "white" if dark else "black", "fontsize": 7, "ha": "center"}
        axis.text(column, row, style.format(values[row, column]), va="center", **look)


def _tick(name: object) -> str:
    return CENTRED.get(str(name), _function(name))


# Models


def _chosen(result: xr.DataTree, group: str) -> xr.Dataset:
    """A group's cells with the best learning rates."""
    data = result[group].to_dataset()
    return data.isel(cell=(data["chosen"] == 1).to_numpy())


def _name(condition: Condition) -> str:
    return model_name(_told(condition))


def _told(condition: Condition) -> dict[str, Any]:
    return dict(zip(CONDITION, condition, strict=True))


def _colours(models: Iterable[Condition]) -> list[str]:
    coda = cycle(CODA)
    names = (one[0] for one in models)
    return [next(coda) if name == "coda" else LOOKS.get(name, "#888888") for name in names]


def _compared(data: xr.Dataset, dim: str = "cell") -> xr.Dataset:
    """All with heads; of those with one matrix, the functions of the paper, E as it is."""
    papers = (data["affinity"] == "tanh") & (data["gate"] == "sigmoid")
    papers &= data["affinity_centring"] == "none"
    kept = (data["alignment"] == "heads") | (data["model"] != "coda") | papers
    return data.isel({dim: kept.to_numpy()}) if kept.any() else data


def _ablated(errors: xr.Dataset) -> list[str]:
    """The alignments in which there are several composition functions."""
    pairs: dict[str, set[Any]] = {}
    for one in map(_told, conditions_of(errors)):
        if one["model"] == "coda":
            pairs.setdefault(one["alignment"], set()).add((one["affinity"], one["gate"]))
    return [alignment for alignment, found in pairs.items() if len(found) > 1]


def _task(data: xr.Dataset) -> str:
    return str(data["task"].to_numpy()[0])


# Looks


def _plain(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=7)


def _legend(figure: Figure, handles: Sequence[Line2D]) -> None:
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(4, len(handles)), fontsize=7,
        frameon=False,
    )  # fmt: skip
