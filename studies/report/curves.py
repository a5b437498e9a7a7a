"""Curves over training: a line for each seed of each condition."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from studies.report.names import name_of
from studies.report.panels import data_of, finished, grid, shown_conditions

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
    curves = result["training"][metric].sel(group="all").dropna("split", how="all")
    figure, axes = grid(1, curves.sizes["split"], width=3.6, height=3.2)
    for axis, split in zip(axes[0], curves["split"].to_numpy(), strict=True):
        for one in shown_conditions(result):
            for cell in one.cells:
                line = curves.sel(split=split).isel(cell=cell).dropna("train_step")
                axis.plot(line["train_step"], line, color=one.colour, lw=1.2, label=one.label)
        known = zip((limits or {}).items(), STYLES, strict=False)
        for (label, (group, variable)), (colour, style) in known:
            data = data_of(result, group, variable, {"split": split, "group": "all"})
            if data is not None and np.isfinite(value := data[variable].mean().item()):
                axis.axhline(value, color=colour, ls=style, lw=1, label=label)
        axis.set(title=name_of(split), xlabel="training step")
    about = result["scores"][metric].attrs
    whole = about.get("percent", 0) and not log and not (curves < 0).any()
    ylim = (-0.02, 1.02) if whole else None
    return finished(figure, ylabel=about["long_name"], ylim=ylim, log_y=log)
