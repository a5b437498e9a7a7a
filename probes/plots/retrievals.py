"""Which retrieval serves which search in compositional attention."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from probes.checking import checked
from probes.plots.axes import variable_of
from probes.plots.matrices import matrix

_PROBE = "score_pairing or measure_pairing"


@checked
def pairing(
    result: xr.Dataset,
    ax: Axes | None = None,
    *,
    search: str | None = None,
    group: str | None = None,
    fitted: str | None = None,
) -> Axes:
    """Draw mean value scores, in percent: the model's searches, or true retrievals, by retrieval.

    The model's searches and retrievals are in the order of the true ones that they are assigned to,
    so that a correct pairing shows diagonals; those without a counterpart follow. True retrievals
    that do not occur are grey. The title gives the share of choices that agree with the truth.

    Args:
        result: `pairing`, `activation`, `agreement` and both assignments, of `score_pairing` or
            `measure_pairing`, for one model.
        ax: the axes to draw on; None: the current ones.
        search: None: the retrievals that each of the model's searches chooses, whatever the truth;
            a true search: those that its counterpart chooses given the true retrieval; "pooled":
            those that all choose given the true retrieval.
        group: the examples whose value scores are drawn; None: the first group.
        fitted: the group on which the assignment was fitted; None: `group`.

    Returns:
        The axes.

    Raises:
        KeyError: the result is not that of one of these probes, or an unknown group or search.

    Example:
        >>> probes.plots.pairing(score_pairing(data["value_scores"], data["preference"]))

    Source: Mittal et al. 2021, "Compositional Attention", figures 5, 11 and 12.
    """
    for name in ("pairing", "activation", "agreement", "search_assignment", "retrieval_assignment"):
        if name not in result:
            variable_of(result, name, probe=_PROBE)
    groups = [str(name) for name in result["group"].to_numpy()]
    group = groups[0] if group is None else group
    fitted = group if fitted is None else fitted
    for name, value, known in (
        ("group", group, groups),
        ("fitted", fitted, [str(name) for name in result["fitted"].to_numpy()]),
        ("search", search or "pooled", [str(name) for name in result["search"].to_numpy()]),
    ):
        if value not in known:
            raise KeyError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    result = result.sel(fitted=fitted, control="observed")
    searches, retrievals = (_order(result, name) for name in ("search", "retrieval"))
    is_true = np.isfinite(result["retrieval_assignment"].to_numpy())
    result = result.isel(true_retrieval=is_true, model_retrieval=retrievals, model_search=searches)
    result = result.sel(group=group)
    agreement = result["agreement"].sel(search=search or "pooled").item()
    if search is None:
        name, rows = "pairing", "model_search"
    else:
        name, rows, result = "activation", "true_retrieval", result.sel(search=search)
    scores = variable_of(result, name, rows, "model_retrieval", probe=_PROBE)
    if "true_retrieval" not in scores.coords and rows == "true_retrieval":
        scores = scores.assign_coords(true_retrieval=np.flatnonzero(is_true))
    scores = scores.assign_coords(model_retrieval=retrievals)
    scores = scores if search is not None else scores.assign_coords(model_search=searches)
    ax = matrix(scores, ax, limits=(0.0, 1.0), numbers="{:.0%}")
    ax.set(xlabel="model's retrieval", ylabel=rows.replace("model_", "model's ").replace("_", " "))
    ax.set_title(f"agrees {agreement:.0%}", fontsize=8)
    return ax


def _order(result: xr.Dataset, kind: str) -> list[int]:
    """Order the model's searches or retrievals by their counterparts, then those without."""
    others = [dim for dim in result["pairing"].dims if dim != f"model_{kind}"]
    used = np.flatnonzero(result["pairing"].notnull().any(others)).tolist()
    # Datasets of several models pad the smaller ones with NaN.
    assigned = [int(index) for index in result[f"{kind}_assignment"].to_numpy() if index >= 0]
    return assigned + [index for index in used if index not in assigned]
