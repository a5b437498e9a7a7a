"""Plots of the fuzzy logic study: sequences with their functions, and codes in the plane."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import probes
from studies.report import drawings
from studies.report.panels import SMALL, grid, group, shown_conditions

LABELS = {"first_term": "a term", "function": "the function", "value": "the value asked for"}
"""What codes are coloured by."""


def samples(result: xr.DataTree) -> Figure | None:
    """Sequences of held-out combinations with their functions: the task of figure 2A.

    Points are columns, with their values in the last row; the last one is asked for. Of networks,
    which differ in length, too, the first with the chosen values of tuned settings.
    """
    data = group("samples")(result)
    if not data:
        return None
    first = shown_conditions(result)[0]
    data = data.isel(cell=first.cells[0]).dropna("pos", how="all", subset=["value"])
    n = data.sizes["example"]
    figure, axes = grid(n, 1, width=6.5, height=1.9, share=False)
    for number, axis in enumerate(axes[:, 0]):
        _draw_sequence(axis, data.isel(example=number), first.label)
    return figure


def _draw_sequence(axis: Axes, data: xr.Dataset, model: str) -> None:
    """Draw a sequence as a matrix, with the function as the title, and the model's answer."""
    points = data["point"].transpose("variable", "pos").to_numpy()
    values, answer = data["value"].to_numpy(), float(data["answer"])
    terms = []
    for literals in data["literal"].transpose("term", "variable").to_numpy():
        signs = ("" if literal else "¬" for literal in literals)
        terms.append(" ∧ ".join(f"{sign}x{number}" for number, sign in enumerate(signs, 1)))
    axis.imshow(np.vstack([points, values]), cmap="viridis", vmin=0, vmax=1, aspect="auto")
    axis.axhline(len(points) - 0.5, color="white", lw=2)
    axis.text(len(values) - 1, len(points), "?", ha="center", va="center", color="white")
    names = [*(f"x{number}" for number in range(1, len(points) + 1)), "f(x)"]
    axis.set_yticks(range(len(names)), names, fontsize=SMALL)
    axis.set_xticks([])
    axis.set_title(f"f = ({') ∨ ('.join(terms)})", fontsize=9)
    asked = f"asked for: {values[-1]:.2f}, answered by {model}: {answer:.2f}"
    axis.set_xlabel(f"{len(values) - 1} points with their values; {asked}", fontsize=SMALL)


def codes(result: xr.DataTree) -> Figure | None:
    """The codes of held-out combinations by t-SNE, all layers, coloured by each of `LABELS`."""
    data = group("projection")(result)
    if not data:
        return None
    rows = {f"coloured by {name}": label for label, name in LABELS.items()}
    stacked = xr.concat(
        [data.assign(shade=data[label].astype(float)) for label in rows.values()],
        xr.Variable("colouring", list(rows)),
        data_vars="all",
    )
    return drawings.pictures(
        result,
        data=lambda result: stacked,
        draw=_draw_codes,
        rows={name: {"colouring": name} for name in rows},
        share=False,
    )


def _draw_codes(data: xr.Dataset, axis: Axes) -> None:
    # Neighbouring numbers of terms and functions are no more alike than others.
    is_number = bool((data["shade"] == data["shade"].round()).all())
    data = data.assign(shade=data["shade"].astype(int)) if is_number else data
    probes.plots.projection(data, axis, label="shade")
