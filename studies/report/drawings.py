"""Drawings of the contents of a result for any study: pictures by a probe, and matrices.

Arguments that the functions share with those of `studies.report.plots`:

- `data`: the data, for example `values("decoding", "confusion")`; see `panels.Data`.
- `rows`: how the data is split into rows of panels, a dim or `CONDITIONS`; see `panels.By`.
- `ylabel`: label of the y-axis.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import probes
from studies.report.names import name_of
from studies.report.panels import (
    SMALL,
    By,
    Data,
    facets,
    finished,
    over_cells,
    shown_conditions,
)


def pictures(
    result: xr.DataTree,
    *,
    data: Data,
    draw: Callable[[xr.Dataset, Axes], Any],
    rows: By,
    mean: str | None = None,
    share: bool = True,
    bar: str = "",
    ylabel: str = "",
) -> Figure | None:
    """Panels drawn by a given function, such as one of `probes.plots`: a column per condition.

    Args:
        result, data, rows, ylabel: see the module's docstring.
        draw: (data, axis) -> draws one panel, as the functions of `probes.plots` do; titles and
            labels of y-axes are those of the figure. The first colour of the axis is the
            condition's.
        mean: name under which `draw` expects the mean over cells of `value`, with its interval
            as `{mean}_low` and `{mean}_high`. None: `draw` gets all variables of the first cell.
        share: whether panels share their axes.
        bar: title of a colour bar for all panels, which then share colour limits from 0 to the
            largest of all panels.
    """
    layout: Any = {"rows": rows, "ylabel": ylabel, "share": share}
    figure, panels = facets(data(result), shown_conditions(result), **layout)
    for panel in panels:
        axis, colour = panel.axis, panel.shown.colour if panel.shown else probes.plots.CONTROL
        axis.set_prop_cycle(color=[colour])
        title, label = axis.get_title(), axis.get_ylabel()
        if mean is None:
            draw(panel.data.isel(cell=0), axis)
        else:
            names = {"value": mean, "low": f"{mean}_low", "high": f"{mean}_high"}
            draw(over_cells(panel.data).rename(names), axis)
        axis.title.set_text(title)
        axis.set_ylabel(label)
        axis.xaxis.label.set_fontsize(SMALL)
    images = [image for panel in panels for image in panel.axis.images]
    if bar and figure is not None:
        largest = max(image.get_clim()[1] for image in images)
        for image in images:
            image.set_clim(0, largest)
        colours = figure.colorbar(images[0], ax=figure.axes, shrink=0.7)
        colours.set_label(bar, fontsize=SMALL)
    return finished(figure)


def matrices(
    result: xr.DataTree,
    *,
    data: Data,
    y: str,
    x: str,
    title: str,
    rows: By = None,
    numbers: Callable[[float], str] | None = None,
) -> Figure | None:
    """Matrices of non-negative values, averaged over cells: a column of panels per condition.

    Args:
        result, data, rows: see the module's docstring.
        y, x: the dims of the matrix.
        title: title of the colour bar.
        numbers: text of the number in a cell; None: no numbers.
    """
    return pictures(
        result,
        data=data,
        draw=functools.partial(_draw_matrix, y=y, x=x, numbers=numbers),
        rows=rows,
        mean="value",
        share=False,
        bar=title,
        ylabel=name_of(y),
    )


def _draw_matrix(
    data: xr.Dataset, axis: Axes, *, y: str, x: str, numbers: Callable[[float], str] | None
) -> None:
    """Draw a matrix with the names of its rows and columns."""
    matrix = data["value"].transpose(y, x)
    if matrix.isnull().all():
        # The label of the row stays.
        axis.spines[:].set_visible(False)
        axis.set(xticks=[], yticks=[])
        return
    names = {dim: [name_of(label) for label in matrix[dim].to_numpy()] for dim in (y, x)}
    probes.plots.matrix(matrix.assign_coords(names), axis, numbers=numbers)
    axis.set_xlabel(name_of(x))
