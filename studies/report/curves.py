"""Curves over training: a line for each seed of each condition."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from studies.report.names import name_of
from studies.report.panels import grid, legend_beside, shown_conditions

STYLES = (("black", "--"), ("grey", ":"), ("black", "-."), ("grey", "-"))
"""Colours and lines of limits, in turn."""


def training_curves(
    result: xr.DataTree,
    *,
    metric: str,
    limits: Mapping[str, tuple[str, str]] | None = None,
    log: bool = False,
) -> Figure:
    """A metric on the validation examples over training, a panel for each split.

    Args:
        result: what is drawn.
        metric: of the setup.
        limits: horizontal lines by label: group and variable [cell, split, ...] of the result.
        log: whether the axis of the metric is logarithmic.
    """
    curves = result["training"][metric].sel(group="all")
    splits = [
        split for split in curves["split"].to_numpy() if np.isfinite(curves.sel(split=split)).any()
    ]
    figure, axes = grid(1, len(splits), width=3.6, height=3.2)
    for axis, split in zip(axes[0], splits, strict=True):
        for one in shown_conditions(result):
            for number, cell in enumerate(one.cells):
                line = curves.sel(split=split).isel(cell=cell).dropna("train_step")
                label = one.label if number == 0 else None
                axis.plot(line["train_step"], line, color=one.colour, lw=1.2, label=label)
        for (label, (group, variable)), (colour, style) in zip(
            (limits or {}).items(), STYLES, strict=False
        ):
            if group not in result.children or variable not in result[group].data_vars:
                continue
            data = result[group].to_dataset()[variable].sel(split=split)
            data = data.sel(group="all") if "group" in data.dims else data
            if np.isfinite(value := float(data.mean())):
                axis.axhline(value, color=colour, ls=style, lw=1, label=label)
        axis.set(title=name_of(split), xlabel="training step")
        if log:
            axis.set_yscale("log")
    percent = result["scores"][metric].attrs.get("percent", 0)
    if percent and not log and not (curves.to_numpy() < 0).any():
        axes[0, 0].set_ylim(0, 1.02)
    axes[0, 0].set_ylabel(result["scores"][metric].attrs["long_name"], fontsize=8)
    legend_beside(figure, axes)
    return figure
