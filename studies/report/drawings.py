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
from studies.report.names import CONTROL, name_of
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
    draw: Callable[[Axes, xr.Dataset], Any],
    rows: By,
    mean: str | None = None,
    share: bool = True,
    bar: str = "",
    ylabel: str = "",
) -> Figure | None:
    """Panels drawn by a given function, for example one of `probes`: a column per condition.

    Args:
        result, data, rows, ylabel: see the module's docstring.
        draw: (axis, data) -> draws one panel. The first colour of the axis is the condition's.
        mean: name under which `draw` expects the mean over cells of `value`, with its interval
            as `{mean}_low` and `{mean}_high`. None: `draw` gets all variables of the first cell.
        share: whether panels share their axes.
        bar: title of a colour bar for all panels, which then share colour limits from 0 to the
            largest of all panels.
    """
    layout: Any = {"rows": rows, "ylabel": ylabel, "share": share}
    figure, panels = facets(data(result), shown_conditions(result), **layout)
    for panel in panels:
        panel.axis.set_prop_cycle(color=[panel.shown.colour if panel.shown else CONTROL])
        if mean is None:
            draw(panel.axis, panel.data.isel(cell=0))
        else:
            names = {"value": mean, "low": f"{mean}_low", "high": f"{mean}_high"}
            draw(panel.axis, over_cells(panel.data).rename(names))
    images = [image for panel in panels for image in panel.axis.images]
    if bar and figure is not None:
        largest = max(image.get_clim()[1] for image in images)
        for image in images:
            image.set_clim(0, largest)
        figure.colorbar(images[0], ax=figure.axes, shrink=0.7, label=bar)
    return finished(figure)


def matrices(
    result: xr.DataTree,
    *,
    data: Data,
    y: str,
    x: str,
    title: str,
    rows: By = None,
    shares: bool = False,
) -> Figure | None:
    """Matrices of non-negative values, averaged over cells: a column of panels per condition.

    Args:
        result, data, rows: see the module's docstring.
        y, x: the dims of the matrix.
        title: title of the colour bar.
        shares: whether counts are drawn as shares of their row.
    """
    return pictures(
        result,
        data=data,
        draw=functools.partial(_draw_matrix, y=y, x=x, shares=shares),
        rows=rows,
        mean="value",
        share=False,
        bar=title,
        ylabel=name_of(y),
    )


def _draw_matrix(axis: Axes, data: xr.Dataset, *, y: str, x: str, shares: bool) -> None:
    """Draw a matrix with the names of its rows and columns; shares of at least 10% as numbers."""
    matrix = data["value"].transpose(y, x)
    if shares:
        total = matrix.sum(x)
        matrix = matrix / total.where(total > 0, 1)
    if matrix.isnull().all():
        # The label of the row stays.
        axis.spines[:].set_visible(False)
        axis.set(xticks=[], yticks=[])
        return
    axis.set_xlabel(name_of(x), fontsize=SMALL)
    names = {dim: [name_of(label) for label in matrix[dim].to_numpy()] for dim in (y, x)}
    probes.draw_numbers(
        axis,
        matrix.assign_coords(names),
        limits=(0.0, 1.0 if shares else float(matrix.max())),
        style=lambda share: f"{100 * share:.0f}" if shares and share >= 0.1 else "",
        colours="Blues",
    )
