"""Bars with intervals: what interventions change, by site."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from probes.checking import checked
from probes.plots.axes import given_or_current, put_names, title_of, variable_of, words

_ANY = "a probe"
_NOTHING = "none"  # the site or condition of the unchanged run
_WIDTH = 0.81  # of all bars of a label


@checked
def bars(
    result: xr.Dataset,
    variable: str,
    ax: Axes | None = None,
    *,
    along: str,
    by: str | None = None,
) -> Axes:
    """Draw bars with intervals: those of `by` side by side, at each label of `along`.

    Bars have the next colour of the axes, paler from one label of `by` to the next.

    Args:
        result: `variable` [along] or [by, along], and optionally its bounds `{variable}_low`,
            `{variable}_high`.
        variable: the variable.
        ax: the axes to draw on; None: the current ones.
        along: the dim of the x-axis.
        by: the dim whose labels are bars side by side, named in the legend.

    Returns:
        The axes.

    Raises:
        KeyError: the result lacks the variable.
        ValueError: the variable has other dims with several labels.

    Example:
        >>> scores = score_signedness(pattern.isel(layer=0, head=0))
        >>> probes.plots.bars(scores, "share", along="kind")
    """
    ax = given_or_current(ax)
    dims = (along,) if by is None else (by, along)
    values, *bounds = (
        variable_of(result, name, *dims, probe=_ANY)
        for name in (variable, f"{variable}_low", f"{variable}_high")
        if name in result or name == variable
    )
    heights = np.atleast_2d(values.to_numpy())
    lengths = [np.abs(np.atleast_2d(bound.to_numpy()) - heights) for bound in bounds]
    color = next(iter(ax.plot([], []))).get_color()
    opacities = np.geomspace(1, 0.2, len(heights)) if len(heights) > 1 else [1.0]
    for number, left in enumerate(_lefts(values, by)):
        ax.bar(
            left,
            heights[number],
            _WIDTH / len(heights),
            align="edge",
            yerr=[length[number] for length in lengths] or None,
            error_kw={"lw": 0.8},
            color=color,
            alpha=opacities[number],
            label=None if by is None else words(values[by].to_numpy()[number]),
        )
    put_names(ax, "x", [words(label) for label in values[along].to_numpy()])
    ax.set(xlabel=words(along), ylabel=title_of(values))
    return ax


@checked
def interchange(result: xr.Dataset, ax: Axes | None = None, *, variable: str = "rate") -> Axes:
    """Draw what patching changes: bars by site, and a black line across each for the unpatched run.

    Args:
        result: `rate` [site] with its bounds, of `interchange` or `interchange_codes`, for one
            outcome; with several scopes or outcomes, these are bars side by side.
        ax: the axes to draw on; None: the current ones.
        variable: `rate`, or for metrics `value` or `change`.

    Returns:
        The axes.

    Raises:
        KeyError: the result is not that of `interchange`.
        ValueError: two further dims have several labels, such as `scope` and `outcome`.

    Example:
        >>> probes.plots.interchange(patched.sel(outcome="source_rule"))
    """
    probe = "interchange, interchange_codes or interchange_pairs"
    by = _compared(result, variable, "site", probe=probe)
    patched = result.drop_sel(site=_NOTHING)
    unpatched = result[variable].sel(site=_NOTHING, drop=True)
    return _against(patched, variable, unpatched, ax, by, "nothing patched")


@checked
def erasure(result: xr.Dataset, ax: Axes | None = None) -> Axes:
    """Draw what erasing a label changes: bars by site, and a black line for the unchanged model.

    Beside the erasure are its controls, erasures of permuted labels and of random subspaces.

    Args:
        result: `rate` [condition, site] with its bounds, of `erase`, for one outcome.
        ax: the axes to draw on; None: the current ones.

    Returns:
        The axes.

    Raises:
        KeyError: the result is not that of `erase`.
        ValueError: a further dim has several labels, such as `outcome`.

    Example:
        >>> probes.plots.erasure(used.sel(outcome="right"))
    """
    variable_of(result, "rate", "condition", "site", probe="erase")
    unchanged = result["rate"].sel(condition=_NOTHING, drop=True)
    erased = result.drop_sel(condition=_NOTHING)
    return _against(erased, "rate", unchanged, ax, "condition", "nothing erased")


def _against(
    result: xr.Dataset,
    variable: str,
    unchanged: xr.DataArray,
    ax: Axes | None,
    by: str | None,
    label: str,
) -> Axes:
    """Draw bars by site, and across each a line at the value of the unchanged run."""
    ax = bars(result, variable, ax, along="site", by=by)
    values = variable_of(result, variable, *([by] if by else []), "site", probe=_ANY)
    values, unchanged = xr.broadcast(values, unchanged.squeeze())
    unchanged = unchanged.transpose(*values.dims)
    lefts, levels = _lefts(values, by).ravel(), unchanged.to_numpy().ravel()
    width = _WIDTH / (values.sizes[by] if by else 1)
    ax.hlines(levels, lefts, lefts + width, color="black", lw=1.2, label=label)
    if variable == "rate":
        ax.set_ylim(0, 1.02)
    return ax


def _compared(result: xr.Dataset, variable: str, along: str, *, probe: str) -> str | None:
    """The dim of a variable, beside `along`, that has several labels, if there is one."""
    if variable not in result or along not in result[variable].dims:
        variable_of(result, variable, along, probe=probe)
    others = [str(d) for d, n in result[variable].sizes.items() if d != along and n > 1]
    if len(others) > 1:
        variable_of(result, variable, along, others[-1], probe=probe)
    return others[0] if others else None


def _lefts(values: xr.DataArray, by: str | None) -> np.ndarray:
    """Left edges of bars [by, along]."""
    n_bars = values.sizes[by] if by else 1
    places = np.arange(values.size // n_bars) - _WIDTH / 2
    return places + np.arange(n_bars)[:, None] * _WIDTH / n_bars
