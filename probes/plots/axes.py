"""What all plots share: the axes, the variables of a result, and names beside ticks."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Literal

import numpy as np
import xarray as xr
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.ticker import FixedFormatter, FixedLocator

from probes.plots.style import SMALL

# Font sizes: of names that are not turned, and of all; where there is room for less, some are left
# out.
_SMALLER, _SMALLEST = 6, 5
_LINE, _LETTER = 1.2, 0.6  # height of a line and width of a letter, as a share of the font size
_LONGEST = 34  # letters of a line of an axis' label


def given_or_current(ax: Axes | None) -> Axes:
    """The axes, or without any the current ones of pyplot."""
    if ax is None:
        import matplotlib.pyplot as plt  # a figure of one's own needs no backend

        ax = plt.gca()
    return ax


def variable_of(result: xr.Dataset, name: str, *dims: str, probe: str) -> xr.DataArray:
    """A variable of a probe's result with exactly these dims, in this order.

    Other dims of a single label are dropped.

    Args:
        result: the result.
        name: the variable.
        dims: its dims.
        probe: the probes that make it, for errors.

    Raises:
        KeyError: the result lacks the variable.
        ValueError: it lacks one of the dims, or has others with several labels.
    """
    if name not in result:
        known = ", ".join(sorted(map(str, result.data_vars))) or "nothing"
        raise KeyError(f"result must hold {name!r}, made by {probe}, got {known}")
    values = result[name]
    values = values.squeeze(
        [dim for dim in values.dims if dim not in dims and values.sizes[dim] == 1]
    )
    if set(values.dims) != set(dims):
        others = [str(dim) for dim in values.dims if dim not in dims]
        chosen = f"; select one label: result.isel({others[0]}=0)" if others else ""
        raise ValueError(
            f"{name} of {probe} must have the dims {dims}, got {dict(values.sizes)}{chosen}"
        )
    return values.transpose(*dims)


def bar_lengths(
    values: xr.DataArray, low: xr.DataArray, high: xr.DataArray
) -> Float[np.ndarray, "end ..."]:
    """Lengths of error bars below and above values; 0 where there is no interval."""
    return np.maximum(np.nan_to_num([values - low, high - values]), 0)


def title_of(values: xr.DataArray) -> str:
    """What an array holds, in lines for the label of an axis: its long name, or its name."""
    return textwrap.fill(str(values.attrs.get("long_name") or words(values.name or "")), _LONGEST)


def words(label: object) -> str:
    """A label as words, without underscores."""
    return str(label).replace("_", " ")


def put_names(ax: Axes, side: Literal["x", "y"], names: Sequence[str]) -> None:
    """Write names at 0, 1, ... of an axis, as large as there is room for.

    Names on the x-axis that would touch one another are turned. Where even small ones would, only
    every second name, or third one, and so on, is written.
    """
    extent, dpi = ax.get_window_extent(), ax.figure.dpi
    room = 72 * (extent.width if side == "x" else extent.height) / dpi / max(len(names), 1)
    across = room / _LETTER / (max(map(len, names), default=0) + 1)
    is_turned = side == "x" and across < _SMALLER
    size = min(SMALL, across if side == "x" and not is_turned else max(_SMALLEST, room / _LINE))
    every = max(1, math.ceil(_SMALLEST * _LINE / room)) if is_turned or side == "y" else 1
    axis = ax.xaxis if side == "x" else ax.yaxis
    # Not `set_ticks`, which makes ticks at once, also where a figure then hides them.
    axis.set_major_locator(FixedLocator(range(0, len(names), every)))
    axis.set_major_formatter(FixedFormatter(names[::every]))
    axis.set_tick_params(labelsize=size, rotation=90 if is_turned else 0)
