"""The figures of the contextual-retrieval study, drawn from its result alone.

A setting is a size of the task with a width of the models. Where a result has more settings, or
networks, than a figure has room for, its title says how many of them are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Literal

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import LogLocator, NullFormatter

from studies.retrieval_claims import CONDITION, PAPER

Setting = tuple[int, int, int]
SETTING = CONDITION[1:]

LOOKS = {
    "multi_head": ("#4477aa", "multi-head"),
    "multi_head_pairs": ("#dd8822", "multi-head,\na head per pair"),
    "compositional": ("#aa3377", "compositional"),
}
"""Colour and name of each model, in the order in which they are drawn."""

SPLITS = {
    "id": ("familiar combinations (id)", 0.4, "-"),
    "ood": ("held-out combinations (ood)", 0.9, "--"),
}
"""Name, opacity of bars and dashes of lines of each split."""

FORCED = {
    "none": ("nothing is forced", "#555555"),
    "hardened": ("its own choices, hard", "#77aadd"),
    "familiar": ("its own of familiar combinations", "#aa3377"),
    "true": ("the true pairing", "#117733"),
    "random": ("random choices", "#dd8822"),
}
"""Name and colour of what is forced upon the value scores."""

CONTROLS = {
    "observed": ("true preferences", "o", "#aa3377"),
    "shuffled": ("preferences shuffled", "s", "#555555"),
}
"""Name, marker and colour of whose preferences a pairing is fitted to."""

CONSTANT = {"color": "black", "lw": 1.0, "label": "always answering 0"}
HELD_OUT = "#d55e00"
ERROR = "mean absolute error"

MOST = 6
"""Settings, or networks, in a figure."""


def figures(result: xr.DataTree) -> dict[str, Figure]:
    """All figures by file name; those that a result has no data for are left out."""
    drawn = {"errors": errors_of_models(result), "training": errors_while_training(result)}
    if (known := _known_combinations(result)).sizes["cell"]:
        drawn["combinations"] = errors_of_combinations(known)
    if "pairing" in result.children:
        drawn["pairing"] = retrievals_of_searches(result)
        drawn["agreement"] = agreement_with_pairing(result)
    if "forcing" in result.children:
        drawn["forcing"] = errors_under_forcing(result)
    return drawn


def errors_of_models(result: xr.DataTree) -> Figure:
    """Errors on both splits, a row for each size of the task; at the right, over the constant's.

    Bars are means over seeds, points the seeds, in their order, with their intervals.
    """
    data = result["errors"].to_dataset()
    settings, models = _settings(data), _models(data)
    sizes = list(dict.fromkeys(setting[:2] for setting in settings))
    widths = sorted({setting[2] for setting in settings})
    places = {
        (width, model): number + place * (len(models) + 0.5)
        for place, width in enumerate(widths)
        for number, model in enumerate(models)
    }
    figure, axes = _grid(len(sizes), 2, width=max(3.4, 0.7 * len(places)), height=3.1, share="none")
    relative = data / data["constant"]
    for (left, right), size in zip(axes, sizes, strict=True):
        for (width, model), place in places.items():
            here = _under(data, (*size, width), model)
            for split, x in (("id", place - 0.2), ("ood", place + 0.2)):
                _draw_error(left, x, here.sel(split=split), split)
                _draw_error(right, x, relative.sel(cell=here["cell"], split=split), split)
            if paper := PAPER.get((model, size[0], size[1], width)):
                star = {"ls": "", "marker": "*", "ms": 9, "color": "black", "mfc": "white"}
                left.plot([place - 0.2, place + 0.2], paper, **star, label="the paper's figures")
        for axis, name in ((left, ERROR), (right, "error / that of always answering 0")):
            axis.set_ylabel(name, fontsize=8)
            axis.set_title("S={}, R={}".format(*size), fontsize=9)
            if len(widths) == 1:
                names = [LOOKS[model][1] for model in models]
                axis.set_xticks(list(places.values()), names, fontsize=7)
                axis.set_xlabel(f"d={widths[0]}", fontsize=8)
            else:
                middles = [np.mean([places[width, model] for model in models]) for width in widths]
                axis.set_xticks(middles, [f"d={width}" for width in widths], fontsize=8)
    colours = [Patch(color=LOOKS[model][0], label=LOOKS[model][1]) for model in models]
    shades = [Patch(color="#555555", alpha=shade, label=name) for name, shade, _ in SPLITS.values()]
    return _finished(figure, axes, "Errors of each attention", more=[*colours, *shades])


def errors_while_training(result: xr.DataTree) -> Figure:
    """Error over training, a row for each setting and a column for each model; thin: seeds."""
    data = result["training"].to_dataset()
    constant = result["errors"].to_dataset()["constant"]
    settings, models = _settings(data), _models(data)
    figure, axes = _grid(len(settings[:MOST]), len(models), width=2.9, height=2.5, share="all")
    for line, setting in zip(axes, settings, strict=False):
        for axis, model in zip(line, models, strict=True):
            colour, name = LOOKS[model]
            axis.set_title(name.replace("\n", " "), fontsize=9)
            curves = _under(data, setting, model)["error"].dropna("train_step", how="all")
            steps = curves["train_step"]
            for split, (_, _, dashes) in SPLITS.items():
                one = curves.sel(split=split).transpose("train_step", "cell")
                look = {"color": colour, "ls": dashes}
                axis.plot(steps, one.mean("cell"), lw=1.8, label=f"_{split}", **look)
                axis.plot(steps, one, lw=0.6, alpha=0.5, label="_seeds", **look)
            axis.axhline(constant.sel(cell=curves["cell"]).mean().item(), ls=":", **CONSTANT)
        line[0].set_ylabel(f"{_told(setting)}\n{ERROR}", fontsize=8)
    axes[0, 0].set_yscale("log")
    axes[0, 0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[0, 0].yaxis.set_major_formatter("{x:g}")
    axes[0, 0].yaxis.set_minor_formatter(NullFormatter())
    for axis in axes[-1]:
        axis.set_xlabel("training step", fontsize=8)
    lines = [
        Line2D([], [], color="#555555", ls=dashes, lw=1.8, label=name)
        for name, _, dashes in SPLITS.values()
    ]
    seeds = Line2D([], [], color="#555555", lw=0.6, alpha=0.5, label="a seed (thick: their mean)")
    about = f"Errors while training{_part_of(settings)}"
    return _finished(figure, axes, about, more=[*lines, seeds])


def errors_of_combinations(data: xr.Dataset) -> Figure:
    """Error of each combination of two preferences, mean over seeds; those held out are framed.

    A row for each setting, a column for each model.

    Args:
        data: errors of models with two searches.
    """
    settings, models = _settings(data), _models(data)
    figure, axes = _grid(len(settings[:MOST]), len(models), width=2.7, height=2.7, share="none")
    for line, setting in zip(axes, settings, strict=False):
        retrievals = setting[1]
        every = data.sel(combination=np.arange(retrievals**2))
        means = [_under(every, setting, model).mean("cell") for model in models]
        highest = max(float(one["error"].max()) for one in means)
        for axis, model, one in zip(line, models, means, strict=True):
            error = one["error"].to_numpy().reshape(retrievals, retrievals)
            image = _heat_map(axis, error, highest, range(retrievals))
            for number in np.flatnonzero(one["held_out"] > 0):
                i, j = divmod(number, retrievals)
                corner = (j - 0.46, i - 0.46)
                axis.add_patch(Rectangle(corner, 0.92, 0.92, fill=False, ec=HELD_OUT, lw=2))
            axis.set_title(LOOKS[model][1].replace("\n", " "), fontsize=9)
            axis.set_xlabel("preference in search 1", fontsize=8)
            if axis is line[-1]:
                bar = figure.colorbar(image, ax=line.tolist(), shrink=0.8)
                bar.set_label(ERROR, fontsize=8)
        line[0].set_ylabel(f"{_told(setting)}\npreference in search 0", fontsize=8)
    about = f"Error of each combination of preferences{_part_of(settings)}"
    framed = Patch(fc="none", ec=HELD_OUT, lw=2, label="held out")
    return _finished(figure, axes, about, more=[framed])


def retrievals_of_searches(result: xr.DataTree) -> Figure:
    """Which retrieval each search uses, given the preference: a row for each network.

    The model's searches and retrievals stand in the order of the true ones whose parts they were
    given on id, so that a network that pairs rightly shows diagonals. Grey: preferences that a
    split lacks. At the right, what searches use whatever the preference.
    """
    data = result["pairing"].to_dataset().sortby("seed")
    most = int(data["n_searches"].max())
    shown = range(min(data.sizes["cell"], MOST))
    figure, axes = _grid(len(shown), 2 * most + 2, width=1.75, height=2.1, share="none")
    image = None
    for line, number in zip(axes, shown, strict=True):
        one = data.isel(cell=number)
        fitted = one.sel(fitted="id", control="observed")
        setting = tuple(one[name].item() for name in SETTING)
        searches, retrievals, _ = setting
        rows = _order(fitted["search_assignment"], searches)
        columns = _order(fitted["retrieval_assignment"], retrievals)
        chosen = fitted.sel(model_retrieval=columns, true_retrieval=range(retrievals))
        for axis in line[2 * searches : 2 * most]:
            axis.set_axis_off()
        for axis, (search, split) in zip(line, product(range(searches), SPLITS), strict=False):
            at = chosen.sel(search=str(search), group=split)
            scores = at["activation"].transpose("true_retrieval", "model_retrieval").to_numpy()
            _heat_map(axis, scores, 1.0, columns)
            axis.set_title(f"search {search}, {split}:\nagrees {at['agreement']:.0%}", fontsize=8)
        for axis, split in zip(line[-2:], SPLITS, strict=True):
            at = chosen.sel(search="pooled", group=split, model_search=rows)
            scores = at["pairing"].transpose("model_search", "model_retrieval").to_numpy()
            image = _heat_map(axis, scores, 1.0, columns)
            axis.set_yticks(range(searches), map(str, rows), fontsize=7)
            axis.set_ylabel("model's search", fontsize=8)
            axis.set_title(f"on the whole, {split}:\nagrees {at['agreement']:.0%}", fontsize=8)
        line[0].set_ylabel(f"{_told(setting)}\nseed {one['seed'].item()}\npreference", fontsize=8)
    if image is not None:
        every = axes.ravel().tolist()
        figure.colorbar(image, ax=every, shrink=0.6).set_label("mean value score", fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("model's retrieval", fontsize=8)
    about = f"Which retrieval searches use{_part_of(data['cell'], 'networks')}"
    return _finished(figure, axes, f"{about}; retrievals in the order fitted on id")


def agreement_with_pairing(result: xr.DataTree) -> Figure:
    """Share of choices that agree with the pairing fitted on one split, scored on the other too.

    A panel for each setting; points are seeds in their order, with intervals over examples.
    """
    data = result["pairing"].to_dataset().sel(search="pooled")
    settings = _settings(data)
    pairs = list(product(SPLITS, SPLITS))
    figure, axes = _grid(1, len(settings[:MOST]), width=3.2, height=2.9, share="all")
    for axis, setting in zip(axes[0], settings, strict=False):
        here = _under(data, setting)
        spread = np.linspace(-0.2, 0.2, here.sizes["cell"] + 2)[1:-1]
        for place, (fitted, scored) in enumerate(pairs):
            at = here.sel(fitted=fitted, group=scored)
            for control, (name, marker, colour) in CONTROLS.items():
                one = at.sel(control=control)
                bars = _bars(one, "agreement")
                look = {"fmt": marker, "ms": 4.5, "color": colour, "lw": 0.9, "label": name}
                face = colour if control == "observed" else "none"
                axis.errorbar(place + spread, one["agreement"], yerr=bars, mfc=face, **look)
            ends = (place + spread - 0.07, place + spread + 0.07)
            axis.hlines(at["chance"], *ends, color="black", label="independent choices")
        axis.set_xticks(range(len(pairs)), [f"{one} \u2192\n{other}" for one, other in pairs])
        axis.set_xlabel("fitted on \u2192 scored on", fontsize=8)
        axis.set_title(_told(setting), fontsize=9)
    axes[0, 0].set_ylim(0, 1.03)
    axes[0, 0].set_ylabel("share of choices that agree", fontsize=8)
    about = f"Does the pairing hold on the other split?{_part_of(settings)}"
    return _finished(figure, axes, about)


def errors_under_forcing(result: xr.DataTree) -> Figure:
    """Error on ood with value scores set to a pairing, a panel for each setting.

    A group of bars is a seed, with intervals over examples.
    """
    data = result["forcing"].to_dataset()
    constant = result["errors"]["constant"].sel(split="ood")
    settings = _settings(data)
    figure, axes = _grid(1, len(settings[:MOST]), width=3.2, height=2.9, share="y")
    for axis, setting in zip(axes[0], settings, strict=False):
        here = _under(data, setting)
        places = np.arange(here.sizes["cell"])
        for number, (condition, (name, colour)) in enumerate(FORCED.items()):
            one = here.sel(condition=condition)
            width = 0.8 / len(FORCED)
            x = places + width * (number - (len(FORCED) - 1) / 2)
            bars = _bars(one, "mean_error")
            axis.bar(x, one["mean_error"], width, yerr=bars, color=colour, label=name)
        zeros = constant.sel(cell=here["cell"])
        axis.hlines(zeros, places - 0.45, places + 0.45, ls="--", **CONSTANT)
        axis.set_xticks(places, [f"seed {seed}" for seed in here["seed"].to_numpy()])
        axis.set_title(_told(setting), fontsize=9)
    axes[0, 0].set_ylabel(f"{ERROR}, ood", fontsize=8)
    return _finished(figure, axes, f"Errors when the pairing is forced{_part_of(settings)}")


def _draw_error(axis: Axes, x: float, one: xr.Dataset, split: str) -> None:
    """A bar at the mean over seeds, the seeds upon it, and the constant answer's error."""
    if not one.sizes["cell"]:
        return
    colour = LOOKS[one["model"].to_numpy()[0]][0]
    axis.bar(x, float(one["error"].mean()), 0.38, color=colour, alpha=SPLITS[split][1])
    seeds = x + np.linspace(-0.15, 0.15, one.sizes["cell"] + 2)[1:-1]
    bars = _bars(one, "error")
    points = {"fmt": "o", "ms": 2.5, "color": "black", "lw": 0.8}
    axis.errorbar(seeds, one["error"], yerr=bars, **points, label="seed, 95% interval")
    axis.hlines(float(one["constant"].mean()), x - 0.2, x + 0.2, ls="--", **CONSTANT)


def _heat_map(axis: Axes, values: np.ndarray, highest: float, columns: Sequence[int]) -> AxesImage:
    """Numbers as colours, grey for NaN; where they are few, they are written out."""
    axis.set_facecolor("#cccccc")
    image = axis.imshow(values, vmin=0, vmax=highest, cmap="Blues")
    axis.set_xticks(range(len(columns)), map(str, columns), fontsize=7 if len(columns) < 9 else 4)
    if len(columns) < 7:
        axis.set_yticks(range(len(values)))
        for i, j in np.argwhere(np.isfinite(values)):
            colour = "white" if values[i, j] > 0.6 * highest else "black"
            look = {"ha": "center", "va": "center", "fontsize": 6.5, "color": colour}
            axis.text(j, i, f"{values[i, j]:.2f}".removeprefix("0"), **look)
    return image


def _known_combinations(result: xr.DataTree) -> xr.Dataset:
    """The errors of the cells in which those of combinations of two preferences are known."""
    if "combinations" not in result.children:
        return result["errors"].to_dataset().isel(cell=[])
    data = result["combinations"].to_dataset()
    return data.sel(cell=data["n_searches"] == 2)


def _order(assignment: xr.DataArray, count: int) -> list[int]:
    """The model's indices in the order of their true counterparts, then those without."""
    order = [int(one) for one in assignment.to_numpy() if one >= 0]
    return order + [one for one in range(count) if one not in order]


def _bars(data: xr.Dataset, name: str) -> np.ndarray:
    """How far the interval reaches below and above: [2, cell]."""
    low, middle, high = (data[f"{name}{part}"].to_numpy() for part in ("_low", "", "_high"))
    return np.maximum([middle - low, high - middle], 0)


def _settings(data: xr.Dataset) -> list[Setting]:
    columns = (data[name].to_numpy().tolist() for name in SETTING)
    return list(dict.fromkeys(zip(*columns, strict=True)))


def _models(data: xr.Dataset) -> list[str]:
    return [model for model in LOOKS if model in data["model"].to_numpy()]


def _under(data: xr.Dataset, setting: Setting, *models: str) -> xr.Dataset:
    """The cells of a setting, of some models or of all, by seed."""
    chosen = np.isin(data["model"].to_numpy(), models or list(LOOKS))
    for name, value in zip(SETTING, setting, strict=True):
        chosen &= data[name].to_numpy() == value
    return data.isel(cell=np.flatnonzero(chosen)).sortby("seed")


def _told(setting: Setting) -> str:
    return "S={}, R={}, d={}".format(*setting)


def _part_of(every: Sequence[Setting] | xr.DataArray, what: str = "settings") -> str:
    return f" ({MOST} of {len(every)} {what})" if len(every) > MOST else ""


def _grid(
    rows: int, columns: int, *, width: float, height: float, share: Literal["all", "y", "none"]
) -> tuple[Figure, np.ndarray]:
    """Panels of a size, in inches, and room for a legend; which axes they share."""
    size = (width * columns + 2.1, height * rows + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(
        rows, columns, sharex=share == "all", sharey=share != "none", squeeze=False
    )
    for axis in axes.flat:
        axis.tick_params(which="both", labelsize=8)
    return figure, axes


def _finished(
    figure: Figure, axes: np.ndarray, about: str, *, more: Sequence[Line2D | Patch] = ()
) -> Figure:
    """With its title, and one legend of all that the panels show, and of more."""
    figure.suptitle(about, fontsize=10)
    found = {str(handle.get_label()): handle for handle in more}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        look = {"loc": "outside right center", "frameon": False, "fontsize": 8}
        figure.legend(found.values(), found.keys(), **look)
    return figure
