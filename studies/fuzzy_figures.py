"""The figures of the fuzzy-logic study, drawn from its result alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

LOOKS = {
    "softmax": "#4477aa",
    "linear": "#228833",
    "hyla": "#aa3377",
    "linear_relu": "#dd8822",
    "rms_head_linear": "#66ccee",
}
"""Colour of each mechanism; others are grey."""

SPLITS = {
    "id": ("familiar combinations (id)", "o"),
    "test": ("held-out combinations (test)", "s"),
    "ood": ("unseen terms (ood)", "^"),
}
CONTROLS = {"probe": 1.0, "untrained": 0.45, "shuffled": 0.15}


def figures(result: xr.DataTree) -> dict[str, Figure]:
    """All figures by file name."""
    drawn = {
        "answers": answers(result),
        "training": training(result),
        "decoding": decoding(result),
    }
    means = result["summary"].to_dataset()
    for name, label in (
        ("n_examples", "points of a sequence, N"),
        ("held_out", "share of combinations that is held out"),
    ):
        if len(np.unique(means[name].to_numpy())) > 1:
            drawn[name] = along(means, name, label)
    return drawn


def answers(result: xr.DataTree) -> Figure:
    """R^2 of the answers in each split: seeds as points, their mean as a bar."""
    errors = result["errors"].to_dataset()
    models = _models(errors)
    figure = Figure(figsize=(3.2 * len(SPLITS), 3.2), layout="constrained")
    axes = figure.subplots(1, len(SPLITS), sharey=True)
    for axis, (split, (title, _)) in zip(axes, SPLITS.items(), strict=True):
        for place, model in enumerate(models):
            values = errors["r2"].sel(split=split)[(errors["model"] == model).to_numpy()].to_numpy()
            axis.bar(place, values.mean(), color=_colour(model), alpha=0.8)
            offsets = np.linspace(-0.2, 0.2, len(values)) if len(values) > 1 else [0.0]
            axis.plot(place + np.asarray(offsets), values, "k.", ms=5)
        axis.set_xticks(range(len(models)), [m.replace("_", "\n") for m in models], fontsize=8)
        axis.set_title(title, fontsize=9)
        axis.axhline(0, color="black", lw=0.8)
    axes[0].set_ylabel("R² of the answer (0: mean of the sequence)")
    figure.suptitle("How well the value at another point is answered; points are single networks")
    return figure


def training(result: xr.DataTree) -> Figure:
    """R^2 over training: mean over seeds, and the seeds."""
    curves = result["training"].to_dataset()
    models = _models(curves)
    figure = Figure(figsize=(2.8 * len(models), 3.0), layout="constrained")
    axes = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    colours = dict(zip(SPLITS, ("#777777", "#4477aa", "#cc3311"), strict=True))
    for axis, model in zip(axes, models, strict=True):
        mine = curves["r2"][(curves["model"] == model).to_numpy()]
        for split, (label, _) in SPLITS.items():
            values = mine.sel(split=split)
            for one in values.to_numpy():
                axis.plot(mine["train_step"], one, color=colours[split], lw=0.6, alpha=0.5)
            axis.plot(mine["train_step"], values.mean("cell"), color=colours[split], label=label)
        axis.set_title(model.replace("_", " "), fontsize=9)
        axis.set_xlabel("training step")
        axis.set_ylim(-0.2, 1.02)
    axes[0].set_ylabel("R² of the answer")
    axes[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    figure.suptitle("While training: mean of the networks (thick) and each of them (thin)")
    return figure


def decoding(result: xr.DataTree) -> Figure:
    """R^2 of decoding from the codes of all layers, beside both controls."""
    means = result["summary"].to_dataset()
    panels = {
        "terms id": "which terms, id",
        "terms test": "which terms, test",
        "variables test": "negated variables, test",
        "variables ood": "negated variables, ood",
    }
    figure = Figure(figsize=(2.9 * len(panels), 3.2), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True)
    models = list(dict.fromkeys(means["model"].to_numpy().tolist()))
    for axis, (name, title) in zip(axes, panels.items(), strict=True):
        for place, model in enumerate(models):
            mine = means.isel(condition=(means["model"] == model).to_numpy())
            for number, (control, alpha) in enumerate(CONTROLS.items()):
                figure_name = name if control == "probe" else f"{control} {name}"
                value = mine["mean"].sel(figure=figure_name).mean().item()
                axis.bar(
                    place + 0.27 * (number - 1),
                    value,
                    width=0.25,
                    color=_colour(model),
                    alpha=alpha,
                    edgecolor="black",
                    linewidth=0.4,
                    label=control if place == 0 else None,
                )
        axis.set_xticks(range(len(models)), [m.replace("_", "\n") for m in models], fontsize=7)
        axis.set_title(title, fontsize=9)
        axis.axhline(0, color="black", lw=0.8)
    axes[0].set_ylabel("R² of decoding, mean over labels")
    axes[-1].legend(
        fontsize=7, title="codes", title_fontsize=7, loc="center left", bbox_to_anchor=(1.02, 0.5),
        frameon=False,
    )  # fmt: skip
    figure.suptitle("What ridge regression reads from the code of the token that is asked for")
    return figure


def along(means: xr.Dataset, name: str, label: str) -> Figure:
    """R^2 of the answers along a setting, a panel for each split."""
    figure = Figure(figsize=(3.2 * len(SPLITS), 3.0), layout="constrained")
    axes = figure.subplots(1, len(SPLITS), sharey=True)
    for axis, (split, (title, marker)) in zip(axes, SPLITS.items(), strict=True):
        for model in dict.fromkeys(means["model"].to_numpy().tolist()):
            mine = means.isel(condition=(means["model"] == model).to_numpy()).sortby(name)
            one = mine.sel(figure=f"r2 {split}")
            spread = [one["mean"] - one["lowest"], one["highest"] - one["mean"]]
            axis.errorbar(
                one[name],
                one["mean"],
                yerr=np.array([part.to_numpy() for part in spread]),
                color=_colour(model),
                marker=marker,
                label=model.replace("_", " "),
            )
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(label)
        axis.set_xticks(np.unique(means[name].to_numpy()))
    axes[0].set_ylabel("R² of the answer")
    axes[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    return figure


def _models(data: Any) -> list[str]:
    return list(dict.fromkeys(data["model"].to_numpy().tolist()))


def _colour(model: str) -> str:
    return LOOKS.get(model, "#888888")
