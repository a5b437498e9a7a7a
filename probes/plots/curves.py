"""Lines along a dim, with intervals and controls: what most results are drawn as."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from probes.checking import checked
from probes.plots.axes import bar_lengths, given_or_current, put_names, title_of, variable_of, words
from probes.plots.style import CONTROL, DASHES, MARKERS

_ANY = "a probe"


@checked
def line(
    result: xr.Dataset,
    variable: str,
    ax: Axes | None = None,
    *,
    along: str,
    label: str | None = None,
    color: str | None = None,
    marker: str = "o",
    linestyle: str = "-",
) -> Axes:
    """Draw a variable along a dim, with its interval if the result has one.

    Names, such as those of splits, are in a row; numbers are at their values. What is NaN is left
    out.

    Args:
        result: `variable` [along], and optionally its bounds `{variable}_low`, `{variable}_high`.
        variable: the variable.
        ax: the axes to draw on; None: the current ones.
        along: the dim of the x-axis.
        label: the entry of the legend.
        color: None: the next one of the axes.
        marker, linestyle: as in matplotlib.

    Returns:
        The axes.

    Raises:
        KeyError: the result lacks the variable.
        ValueError: the variable has other dims with several labels.

    Example:
        >>> probes.plots.line(loss_by_context(loss, mask), "loss", along="seen")
    """
    ax = given_or_current(ax)
    values = variable_of(result, variable, along, probe=_ANY)
    y, labels = values.to_numpy().astype(float), values[along].to_numpy()
    x = labels if labels.dtype.kind in "iuf" else np.arange(len(labels))
    if x is not labels:
        put_names(ax, "x", [words(name) for name in labels])
        ax.set_xlim(-0.5, len(labels) - 0.5)
    elif labels.dtype.kind in "iu" and ax.get_xscale() == "linear":
        ax.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    lengths = None
    if f"{variable}_low" in result:
        low, high = (
            variable_of(result, f"{variable}_{end}", along, probe=_ANY) for end in ("low", "high")
        )
        lengths = bar_lengths(values, low, high)
    finite = np.isfinite(y)
    ax.errorbar(
        x[finite],
        y[finite],
        yerr=None if lengths is None else lengths[:, finite],
        color=color,
        marker=marker,
        linestyle=linestyle,
        label=label,
        ms=4,
        capsize=2,
    )
    ax.set(xlabel=title_of(values[along]), ylabel=title_of(values))
    return ax


@checked
def lines(
    result: xr.Dataset,
    variable: str,
    ax: Axes | None = None,
    *,
    along: str,
    by: str = "control",
) -> Axes:
    """Draw a line for each label of a dim, by default what is observed and its controls.

    Controls are grey and not solid. Labels of other dims have colours of their own.

    Args:
        result: `variable` [by, along], and optionally its bounds.
        variable, ax, along: as in `line`.
        by: the dim with a line for each label.

    Returns:
        The axes.

    Raises:
        KeyError, ValueError: as in `line`.

    Example:
        >>> probes.plots.lines(score_heads(attention, truth).sel(role=role), "score", along="head")
    """
    ax = given_or_current(ax)
    labels = variable_of(result, variable, by, along, probe=_ANY)[by].to_numpy().tolist()
    for number, label in enumerate(labels):
        one = result.isel({by: number})
        is_control = by == "control" and number > 0
        if one[variable].notnull().any():
            line(
                one,
                variable,
                ax,
                along=along,
                label=words(label),
                color=CONTROL if is_control else None,
                marker=MARKERS[number % len(MARKERS)],
                linestyle=DASHES[number % len(DASHES)] if by == "control" else "-",
            )
    return ax


LEVELS = (*DASHES[1:], (0, (3, 1, 1, 1, 1, 1)))
"""Styles of lines of values that do not depend on x."""


def level(ax: Axes, value: xr.DataArray | float, label: str, number: int) -> None:
    """Draw a value that does not depend on x, such as chance, as a black line across the axes."""
    ax.axhline(float(value), color="black", lw=1, ls=LEVELS[number % len(LEVELS)], label=label)
