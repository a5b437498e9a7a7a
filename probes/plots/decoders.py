"""Plots of decoding: scores beside their controls, confusion, and similarity of codes."""

from __future__ import annotations

import xarray as xr
from matplotlib.axes import Axes

from probes.checking import checked
from probes.plots.axes import given_or_current, variable_of, words
from probes.plots.curves import level, lines
from probes.plots.matrices import matrix

_DECODERS = "decode, decode_continuous or decode_each"
_GUESSES = {
    "chance": "chance",
    "majority": "most frequent",
    "majority_of_split": "most frequent of the split",
    "majority_of_type": "most frequent of the type",
}


@checked
def decoding(
    result: xr.Dataset, ax: Axes | None = None, *, along: str = "layer", metric: str | None = None
) -> Axes:
    """Draw how well a label is decoded along a dim, beside its controls and what guessing gives.

    The probe is solid, in the next colour of the axes; controls (permuted labels, a control task,
    the untrained model) are grey. Black lines are guesses: chance, and the most frequent label, if
    the result has them for this metric.

    Args:
        result: `score` [control, along, metric] with its bounds, of `decode`, `decode_continuous`
            or `decode_each`, for one split.
        ax: the axes to draw on; None: the current ones.
        along: the dim of the x-axis: a dim of cells, or one that results are concatenated along.
        metric: None: the first, accuracy or R^2.

    Returns:
        The axes.

    Raises:
        KeyError: the result is not that of a decoder.
        ValueError: `along` is no dim of the score; a further dim has several labels, such as
            `split`.

    Example:
        >>> probes.plots.decoding(decode(train, {"ood": ood}))
    """
    ax = given_or_current(ax)
    if "metric" in result.dims:
        result = result.isel(metric=0) if metric is None else result.sel(metric=metric)
    dims = [str(dim) for dim in result.get("score", xr.DataArray()).dims if dim != "control"]
    if dims and along not in dims:
        raise ValueError(f"along must be a dim of the score, one of {dims}, got {along!r}")
    score = variable_of(result, "score", "control", along, probe=_DECODERS)
    lines(result, "score", ax, along=along)
    metric = str(result["metric"].item()) if "metric" in result.coords else "score"
    if metric in ("macro_f1", "f1"):
        result = result.drop_vars("chance", errors="ignore")
    for number, (name, label) in enumerate(_GUESSES.items()):
        if name in result:
            level(ax, variable_of(result, name, probe=_DECODERS), label, number)
    if not (score < 0).any():
        ax.set_ylim(0, 1.02)
    ax.set_ylabel(ax.get_ylabel().replace("score", words(metric)))
    return ax


@checked
def confusion(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Draw which labels a probe takes for which: shares of each true label, in percent.

    Shares below 10% are not written. The image, for a colour bar, is `ax.images[0]`.

    Args:
        result: `confusion` [true, predicted] of `decode`, for one split and cell.
        ax: the axes to draw on; None: the current ones.

    Returns:
        The axes.

    Raises:
        KeyError: the result is not that of `decode`.
        ValueError: a further dim has several labels, such as `split` or `layer`.

    Example:
        >>> probes.plots.confusion(decode(train, {"ood": ood}).sel(layer="all"))
    """
    counts = variable_of(result, "confusion", "true", "predicted", probe="decode")
    total = counts.sum("predicted")
    shares = counts / total.where(total > 0, 1)
    return matrix(shares, ax, limits=(0.0, 1.0), numbers=percent)


@checked
def similarity(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Draw the cosine similarity of the mean codes of labels: blue above 0, red below.

    The image, for a colour bar, is `ax.images[0]`.

    Args:
        result: `similarity` [first, second] of `compare_means`, for one control, centring and cell.
        ax: the axes to draw on; None: the current ones.

    Returns:
        The axes.

    Raises:
        KeyError: the result is not that of `compare_means`.
        ValueError: a further dim has several labels, such as `control` or `centring`.

    Example:
        >>> found = compare_means(data).sel(control="observed", centring="mean", layer="all")
        >>> probes.plots.similarity(found)

    Source: Schug et al. 2024, "Attention as a Hypernetwork", figure 5E.
    """
    cosines = variable_of(result, "similarity", "first", "second", probe="compare_means")
    ax = matrix(cosines, ax, limits=(-1.0, 1.0), numbers=_short)
    ax.set(xlabel="", ylabel="")
    return ax


def percent(share: float) -> str:
    """A share as a number of percent, "" below 10%."""
    return f"{100 * share:.0f}" if share >= 0.1 else ""


def _short(value: float) -> str:
    return "0" if abs(value) < 0.05 else f"{value:.1f}".replace("0.", ".")
