"""The figures of the Raven study, drawn from its result alone."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure

COLOURS = {"softmax": "#4477aa", "linear": "#228833", "hyla": "#cc3311"}
NAMES = {
    "softmax": "softmax attention",
    "linear": "linear attention",
    "hyla": "HYLA",
    "id": "familiar rule combinations (id)",
    "ood": "held-out rule combinations (ood)",
    "id_unpermuted": "familiar rule combinations (id)",
    "ood_unpermuted": "held-out rule combinations (ood)",
    "pca": "PCA",
    "tsne": "t-SNE",
}


def figures(result: xr.DataTree) -> dict[str, Figure]:
    """All figures by file name, from what `result.nc` holds."""
    # Figures are for files: no window system is asked for.
    plt.switch_backend("agg")
    return {
        "accuracy": accuracy_curves(result),
        "decoding": decoding_by_layer(result),
        "confusion": confusion(result),
        "projection": projection(result),
        "interchange": interchange(result),
    }


def accuracy_curves(result: xr.DataTree) -> Figure:
    """Accuracy over training, with the ideal observer's above and chance below."""
    curves = result["training"]["accuracy"].sel(metric="all_features")
    limits = result["accuracy"].to_dataset().sel(metric="all_features")
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for axis, split in zip(axes, curves["split"].to_numpy(), strict=True):
        for model in curves["model"].to_numpy():
            for seed in curves["seed"].to_numpy():
                line = curves.sel(model=model, seed=seed, split=split).dropna("train_step")
                first = seed == curves["seed"].to_numpy()[0]
                axis.plot(
                    line["train_step"],
                    line,
                    color=_colour(model),
                    label=_name(model) if first else None,
                )
        ceiling = float(limits["ceiling"].sel(split=split))
        axis.axhline(ceiling, color="black", ls="--", lw=1, label="ideal observer")
        axis.axhline(float(limits["chance"]), color="grey", ls=":", lw=1, label="chance")
        axis.set(title=_name(split), xlabel="training step", ylim=(0, 1.02))
    axes[0].set_ylabel("all features right")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def decoding_by_layer(result: xr.DataTree) -> Figure:
    """Accuracy of decoding the rule, by layer, beside every control."""
    data = result["decoding"].to_dataset().sel(metric="accuracy", key="all")
    models, splits = data["model"].to_numpy(), data["split"].to_numpy()
    figure, axes = _grid(len(splits), len(models))
    layers = data["layer"].to_numpy()
    places = np.arange(len(layers))
    looks = {"probe": ("-", "o"), "untrained": ("--", "s"), "shuffled": (":", "^")}
    for row, split in zip(axes, splits, strict=True):
        for axis, model in zip(row, models, strict=True):
            here = data.sel(model=model, split=split)
            for control, (line, marker) in looks.items():
                cell = here.sel(control=control)
                mean, bars = _mean_and_bars(cell, "score")
                colour = _colour(model) if control == "probe" else "#777777"
                axis.errorbar(
                    places,
                    mean,
                    yerr=bars,
                    color=colour,
                    ls=line,
                    marker=marker,
                    ms=4,
                    capsize=2,
                    label=CONTROLS[control],
                )
            majority = float(here["majority"].mean())
            axis.axhline(majority, color="black", lw=0.8, ls="-.", label="most frequent rule")
            axis.set_xticks(places, [f"{layer}" for layer in layers])
            if split == splits[0]:
                axis.set_title(_name(model))
            else:
                axis.set_xlabel("layer")
        row[0].set_ylabel(f"rule decoded\n{_name(split).split(' (')[0]}", fontsize=8)
    axes[0, 0].set_ylim(0, 1.02)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    return figure


CONTROLS = {
    "probe": "trained model",
    "untrained": "untrained model",
    "shuffled": "control task",
}


def confusion(result: xr.DataTree) -> Figure:
    """Which rules are taken for which, on held-out combinations, from all layers' codes (in %)."""
    data = result["decoding"]["confusion"].sel(layer="all", key="all", split="ood_unpermuted")
    counts = data.sum("seed")
    models = counts["model"].to_numpy()
    figure, axes = plt.subplots(
        1, len(models), figsize=(3.2 * len(models) + 1.4, 3.6), squeeze=False, layout="constrained"
    )
    image = None
    for axis, model in zip(axes[0], models, strict=True):
        table = counts.sel(model=model).transpose("true", "predicted").to_numpy().astype(float)
        shares = table / np.maximum(table.sum(1, keepdims=True), 1)
        image = axis.imshow(shares, vmin=0, vmax=1, cmap="Blues")
        rules = counts["true"].to_numpy()
        axis.set_xticks(range(len(rules)), rules, rotation=90, fontsize=7)
        first = model == models[0]
        axis.set_yticks(range(len(rules)), rules if first else [], fontsize=7)
        axis.set(title=_name(model), xlabel="decoded rule")
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
    axes[0, 0].set_ylabel("true rule")
    if image is not None:
        figure.colorbar(image, ax=axes, shrink=0.7, label="share of the true rule")
    return figure


def projection(result: xr.DataTree) -> Figure:
    """The codes of held-out combinations in the plane, one colour for each rule."""
    data = result["projection"]["projection"].isel(seed=0)
    models, methods = data["model"].to_numpy(), data["kind"].to_numpy()
    names = result["decoding"]["true"].to_numpy()
    figure, axes = plt.subplots(
        len(methods),
        len(models),
        figsize=(3.0 * len(models) + 1.6, 3.0 * len(methods)),
        squeeze=False,
        layout="constrained",
    )
    palette = plt.get_cmap("tab10")
    for row, method in zip(axes, methods, strict=True):
        for axis, model in zip(row, models, strict=True):
            points = data.sel(model=model, kind=method)
            rule = points["rule"].to_numpy().ravel()
            flat = points.transpose("example", "feature", "component").to_numpy().reshape(-1, 2)
            for number, name in enumerate(names):
                chosen = flat[rule == number]
                axis.scatter(*chosen.T, s=4, color=palette(number), label=name, linewidths=0)
            axis.set_xticks([])
            axis.set_yticks([])
            if method == methods[0]:
                axis.set_title(_name(model))
        row[0].set_ylabel(_name(method))
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside right center", frameon=False, fontsize=8, markerscale=3
    )
    return figure


def interchange(result: xr.DataTree) -> Figure:
    """What is answered when attention is patched, on held-out combinations.

    Above, the source B has another rule than the base A: how often the answer becomes that of
    B's rule. Below, it has the same rule: how often the answer stays right.
    """
    data = result["interchange"].to_dataset().sel(split="ood_unpermuted")
    rows = (
        ("other_rule", "source_rule", "B has another rule:\nanswer follows B's"),
        ("same_rule", "base_rule", "B has the same rule:\nanswer follows it"),
    )
    scopes = {"code": (1.0, "the code"), "row": (0.5, "its row"), "pattern": (0.2, "all tokens")}
    models = data["model"].to_numpy()
    sites = [site for site in data["site"].to_numpy() if site != "none"]
    figure, axes = _grid(len(rows), len(models))
    width = 0.27
    for row, (condition, outcome, label) in zip(axes, rows, strict=True):
        for axis, model in zip(row, models, strict=True):
            here = data.sel(model=model, condition=condition, outcome=outcome)
            for number, (scope, (alpha, scope_label)) in enumerate(scopes.items()):
                cell = here.sel(scope=scope, site=sites)
                mean, bars = _mean_and_bars(cell, "rate")
                axis.bar(
                    np.arange(len(sites)) + (number - 1) * width,
                    mean,
                    width,
                    yerr=bars,
                    color=_colour(model),
                    alpha=alpha,
                    error_kw={"lw": 0.8},
                    label=scope_label,
                )
            unpatched = float(here["rate"].sel(site="none", scope="code").mean("seed"))
            axis.axhline(unpatched, color="black", ls="--", lw=1, label="nothing patched")
            shown = [site.replace("layer ", "").replace("all layers", "all") for site in sites]
            axis.set_xticks(range(len(sites)), shown)
        row[0].set_ylabel(label, fontsize=8)
    for axis, model in zip(axes[0], models, strict=True):
        axis.set_title(_name(model))
    for axis in axes[-1]:
        axis.set_xlabel("patched layer")
    axes[0, 0].set_ylim(0, 1.02)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, title="patched", loc="outside right center", frameon=False, fontsize=8
    )
    return figure


def _grid(n_rows: int, n_columns: int) -> tuple[Figure, np.ndarray]:
    """A row for each question and a column for each mechanism, all on the same axes."""
    return plt.subplots(
        n_rows,
        n_columns,
        figsize=(3.1 * n_columns + 1.8, 2.7 * n_rows),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )


def _mean_and_bars(cell: xr.Dataset, name: str) -> tuple[xr.DataArray, np.ndarray]:
    """The mean over seeds, and how far below and above it their intervals reach: [2, point]."""
    mean = cell[name].mean("seed")
    low, high = cell[f"{name}_low"].min("seed"), cell[f"{name}_high"].max("seed")
    return mean, np.maximum([mean - low, high - mean], 0)


def _colour(model: str) -> str:
    return COLOURS.get(model, "#aa3377")


def _name(key: str) -> str:
    return NAMES.get(key, key)
