"""Plots of pairing: mean value scores of retrievals given the true retrieval."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from probes.checking import checked


@checked
def draw_pairing(axes: Sequence[Axes] | np.ndarray, scores: xr.Dataset, *, fitted: str) -> None:
    """Draw mean value scores given the true retrieval; "pooled" shows each search of the model.

    The model's searches and retrievals are in the order of the true ones that they are assigned
    to, so that a correct pairing shows diagonals; those without a counterpart follow. True
    retrievals that do not occur are white. Titles give the share of choices that agree.

    Args:
        axes: one per search and group of `scores`, groups vary fastest.
        scores: result of `score_pairing` for one model.
        fitted: the group on which the assignment was fitted.

    Raises:
        KeyError: `fitted` is no group.
        ValueError: the number of axes does not match.

    Example:
        `draw_pairing(plt.subplots(1, 3)[1], scores, fitted="all")`, of two searches and "pooled"
    """
    panels = list(product(scores["search"].to_numpy(), scores["group"].to_numpy()))
    if len(axes) != len(panels):
        raise ValueError(
            f"axes must be {len(panels)}, one for each search and group, got {len(axes)}"
        )
    if fitted not in (groups := scores["fitted"].to_numpy().tolist()):
        raise KeyError(f"fitted must be one of {', '.join(groups)}, got {fitted!r}")
    scores = scores.sel(fitted=fitted, control="observed")
    searches, retrievals = (_order(scores, name) for name in ("search", "retrieval"))
    true = np.isfinite(scores["retrieval_assignment"].to_numpy())
    scores = scores.isel(true_retrieval=true, model_retrieval=retrievals, model_search=searches)
    for axis, (search, group) in zip(axes, panels, strict=True):
        panel_scores = scores.sel(group=group, search=search)
        table, rows = panel_scores["activation"], panel_scores["true_retrieval"].to_numpy()
        if search == "pooled":
            table, rows = panel_scores["pairing"], searches
            axis.set_ylabel("model's search", fontsize=8)
        style: Any = {"vmin": 0, "vmax": 1, "cmap": "Blues", "aspect": "auto"}
        axis.imshow(table.transpose(..., "model_retrieval"), **style)
        agreement = f"agrees {panel_scores['agreement'].item():.0%}"
        axis.set_title(f"search {search}, {group}\n{agreement}", fontsize=8)
        axis.set_xticks(range(len(retrievals)), list(map(str, retrievals)), fontsize=6)
        axis.set_yticks(range(len(rows)), list(map(str, rows)), fontsize=6)
    axes[-1].set_xlabel("model's retrieval", fontsize=8)


def _order(scores: xr.Dataset, kind: str) -> list[int]:
    """Order the model's searches or retrievals by their counterparts, then those without."""
    others = [dim for dim in scores["pairing"].dims if dim != f"model_{kind}"]
    used = np.flatnonzero(scores["pairing"].notnull().any(others)).tolist()
    # Datasets of several models pad the smaller ones with NaN.
    assigned = [int(index) for index in scores[f"{kind}_assignment"].to_numpy() if index >= 0]
    return assigned + [index for index in used if index not in assigned]
