"""Plots of the Raven study: codes in the plane, and what patching them does."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from studies.report.names import name_of
from studies.report.panels import grid, legend_beside, mean_and_bars, shown_conditions

SCOPES = {"code": (1.0, "the code"), "row": (0.5, "its row"), "pattern": (0.2, "all tokens")}
"""Opacity and label of what is patched."""

OUTCOMES = (
    ("other_rule", "source_rule", "B has another rule:\nanswer follows B's"),
    ("same_rule", "base_rule", "B has the same rule:\nanswer follows it"),
)


def projection(result: xr.DataTree) -> Figure:
    """The codes of held-out combinations in the plane, one colour for each rule, first seed."""
    data = result["projection"].to_dataset()
    conditions, methods = shown_conditions(result), data["kind"].to_numpy()
    names = result["decoding"]["true"].to_numpy()
    figure, axes = grid(len(methods), len(conditions), width=3.0, height=3.0, share=False)
    palette = plt.get_cmap("tab10")
    for row, method in zip(axes, methods, strict=True):
        for axis, one in zip(row, conditions, strict=True):
            first = data.isel(cell=one.cells[0])
            points = first["projection"].sel(kind=method)
            flat = points.transpose("example", "feature", "component").to_numpy().reshape(-1, 2)
            rule = first["rule"].to_numpy().ravel()
            for number, name in enumerate(names):
                chosen = flat[rule == number]
                axis.scatter(*chosen.T, s=4, color=palette(number), label=name, linewidths=0)
            axis.set(xticks=[], yticks=[], title=one.label)
        row[0].set_ylabel(name_of(method))
    legend_beside(figure, axes[:1, :1], markerscale=3)
    return figure


def interchange(result: xr.DataTree) -> Figure:
    """What is answered when attention is patched, on held-out combinations.

    Above, the source B has another rule than the base A: how often the answer becomes that of
    B's rule. Below, it has the same rule: how often the answer stays right.
    """
    data = result["interchange"].to_dataset().sel(split="ood_unpermuted")
    conditions = shown_conditions(result)
    sites = [site for site in data["site"].to_numpy() if site != "none"]
    figure, axes = grid(len(OUTCOMES), len(conditions))
    for row, (condition, outcome, label) in zip(axes, OUTCOMES, strict=True):
        for axis, one in zip(row, conditions, strict=True):
            here = data.sel(condition=condition, outcome=outcome)
            for number, (scope, (alpha, scope_label)) in enumerate(SCOPES.items()):
                mean, bars = mean_and_bars(here.sel(scope=scope, site=sites), "rate", one)
                places = np.arange(len(sites)) + (number - 1) * 0.27
                look = {"color": one.colour, "alpha": alpha, "error_kw": {"lw": 0.8}}
                axis.bar(places, mean, 0.27, yerr=bars, label=scope_label, **look)
            unpatched = here["rate"].sel(site="none", scope="code").isel(cell=one.cells)
            axis.axhline(float(unpatched.mean()), color="black", ls="--", label="nothing patched")
            axis.set_xticks(range(len(sites)), [_layer(site) for site in sites])
            axis.set_title(one.label)
        row[0].set_ylabel(label, fontsize=8)
    axes[0, 0].set_ylim(0, 1.02)
    legend_beside(figure, axes[:, :1], title="patched in layer")
    return figure


def _layer(site: str) -> str:
    return site.removeprefix("layer ").removesuffix(" layers")
