"""Bar plot of the results of `interchange`, by patched site."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from probes.checking import checked
from probes.interventions.interchange import NO_SITE


@checked
def draw_interchange(axes: Axes, found: xr.Dataset, *, scopes: Mapping[str, str]) -> None:
    """Draw how often an outcome occurs: bars by site and scope, and a line for the unpatched run.

    Bars take the next colours of the axes, paler from scope to scope.

    Args:
        axes: matplotlib axes to draw on.
        found: `rate`, `rate_low`, `rate_high` [scope, site] for one outcome, from `interchange`
            with several masks.
        scopes: legend entry of each scope, in the order of the bars.

    Raises:
        ValueError: a scope is unknown.

    Example:
        found = interchange(..., where={"code": code, "row": row}).sel(outcome="source_rule")
        draw_interchange(plt.gca(), found, scopes={"code": "the code", "row": "its row"})
    """
    available = found["scope"].to_numpy().tolist()
    if unknown := sorted(set(scopes) - set(available)):
        raise ValueError(f"scopes must be some of {', '.join(available)}, got {', '.join(unknown)}")
    patched = found.sel(site=[site for site in found["site"].to_numpy() if site != NO_SITE])
    positions, width = np.arange(patched.sizes["site"]), 0.81 / len(scopes)
    opacities = np.geomspace(1, 0.2, len(scopes))
    for number, (scope, label) in enumerate(scopes.items()):
        rate, low, high = (
            patched[name].sel(scope=scope).to_numpy() for name in ("rate", "rate_low", "rate_high")
        )
        axes.bar(
            positions + (number - (len(scopes) - 1) / 2) * width,
            rate,
            width,
            yerr=np.maximum([rate - low, high - rate], 0),
            error_kw={"lw": 0.8},
            alpha=opacities[number],
            label=label,
        )
    unpatched = float(found["rate"].sel(site=NO_SITE).isel(scope=0))
    axes.axhline(unpatched, color="black", ls="--", label="nothing patched")
    axes.set_xticks(positions, patched["site"].to_numpy(), fontsize=7)
    axes.set_ylim(0, 1.02)
