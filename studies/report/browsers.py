"""Charts with which examples are stepped through, on the page of a result.

A browser is a function of the result that returns a chart of Vega-Lite, or None if the result has
nothing to show; a study binds the other arguments with `functools.partial`. What is shown is chosen
with native lists and sliders, one for each dim that is not drawn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import xarray as xr

from studies.report.charts import CONFIG, Spec, title_of
from studies.report.names import name_of
from studies.report.panels import Data, shown_conditions

CELL = 16
"""The side of a cell of a matrix, in pixels."""

LEAST, WIDEST = 150, 560
"""Sides of a matrix, in pixels."""

LEVELS = 1000
"""Values are rounded to so many steps up to the largest."""

WHITE_TO_BLUE = ["#f7fbff", "#c6dbef", "#6baed6", "#2171b5", "#08306b"]
RED_TO_BLUE = ["#b2182b", "#f4a582", "#f7f7f7", "#92c5de", "#2166ac"]


def matrices(
    result: xr.DataTree,
    *,
    data: Data,
    y: str,
    x: str,
    names: Mapping[str, Data] | None = None,
    title: str = "",
) -> Spec | None:
    """A matrix, chosen by trained model and all other dims, such as example, layer, step and head.

    Args:
        result: the result.
        data: the values, as `value` [cell, ..., y, x].
        y, x: the dims of the matrix.
        names: for `y` and `x`, the names of their labels, as `value` [..., y] with some of the
            other dims of the data.
        title: what the values are.
    """
    table = data(result)
    if not table:
        return None
    values = with_models(result, table["value"])
    of_dims = {dim: take(result)["value"] for dim, take in (names or {}).items()}
    of_dims = {dim: with_models(result, labels) for dim, labels in of_dims.items()}
    panel = matrix_panel(values, y=y, x=x, names=of_dims)
    return {
        "description": f"{title}: a matrix of {name_of(y)} by {name_of(x)}, chosen with the lists "
        "below it",
        "title": title_of(title),
        "params": [control(values, dim) for dim in values.dims if dim not in (y, x)],
        "config": CONFIG,
        **panel,
    }


def with_models(result: xr.DataTree, values: xr.DataArray) -> xr.DataArray:
    """Values whose trained models have readable names: the dim `model` in place of `cell`.

    Left out are models for which nothing was measured, and those of settings that were tried and
    not chosen.
    """
    seeds = result["scores"].to_dataset()["seed"].to_numpy()
    of_cells = {
        cell: ", ".join(filter(None, [condition.label, f"seed {seeds[cell]}"]))
        for condition in shown_conditions(result)
        for cell in condition.cells
    }
    cells = sorted(of_cells)
    names = [of_cells[cell] for cell in cells]
    # Cells that differ in tuned settings or draws alone have the same name.
    names = [
        f"{name} ({names[:number].count(name) + 1})" if names.count(name) > 1 else name
        for number, name in enumerate(names)
    ]
    plain = values.drop_vars([name for name in values.coords if name not in values.dims])
    named = plain.isel(cell=cells).assign_coords(cell=names).rename(cell="model")
    if named.dtype.kind == "f":
        named = named.dropna("model", how="all")
    return named.transpose("model", ...)


def labels_of(values: xr.DataArray, dim: Any) -> list[Any]:
    """The labels of a dim, or numbers from 0 without."""
    return values[dim].to_numpy().tolist()


def control(values: xr.DataArray, dim: Any, name: str = "") -> Spec:
    """The parameter that chooses a label of a dim: a slider for numbers, or else a list.

    Args:
        values: an array with the dim.
        dim: the dim, which is also the name of the parameter.
        name: what is written beside it; by default the dim.
    """
    labels, name = labels_of(values, dim), (name or name_of(dim)) + " "
    is_range = len(labels) > 2 and labels == list(range(len(labels)))
    bind: Spec = {"input": "select", "options": labels, "name": name}
    if is_range:
        bind = {"input": "range", "min": 0, "max": len(labels) - 1, "step": 1, "name": name}
    elif all(isinstance(label, str) for label in labels):
        bind["labels"] = [name_of(label) for label in labels]
    return {"name": dim, "value": labels[0], "bind": bind}


def chosen(dims: Sequence[Any]) -> str:
    """The expression that is true for what the controls choose."""
    return " && ".join(f"datum.{dim} == {dim}" for dim in dims) or "true"


def matrix_panel(
    values: xr.DataArray, *, y: str, x: str, names: Mapping[str, xr.DataArray] | None = None
) -> Spec:
    """A panel with the matrix that the controls of all other dims choose.

    Args:
        values: [..., y, x].
        y, x: the dims of the matrix.
        names: see `matrices`; with the dim `model`.
    """
    others = [dim for dim in values.dims if dim not in (y, x)]
    n_rows, n_columns = values.sizes[y], values.sizes[x]
    is_signed = bool((values < 0).any())
    largest = _largest_of(values, others[:1])
    scale = {"domainMax": {"expr": largest}, "range": RED_TO_BLUE if is_signed else WHITE_TO_BLUE}
    scale["domainMin"] = {"expr": f"-{largest}"} if is_signed else 0
    position = {"row": f"floor((datum.number - 1) / {n_columns})"}
    position["column"] = f"(datum.number - 1) % {n_columns}"
    channels = {}
    for field, dim in (("row", y), ("column", x)):
        label = _name_expression(field, dim, values, (names or {}).get(dim))
        channels[field] = {
            "field": f"{field}_name",
            "type": "nominal",
            "title": name_of(dim),
            "sort": {"field": field},
            "axis": {
                "labelOverlap": True,
                "labelLimit": 220,
                "labelAngle": -60 * (field == "column"),
            },
            "expression": label,
        }
    transform: list[Spec] = [
        {"filter": chosen(others)},
        {"flatten": ["value"]},
        {"window": [{"op": "row_number", "as": "number"}]},
        *({"calculate": text, "as": field} for field, text in position.items()),
        {"filter": "isValid(datum.value)"},
        {"calculate": f"datum.value * {largest} / {LEVELS}", "as": "value"},
        *({"calculate": of.pop("expression"), "as": of["field"]} for of in channels.values()),
    ]
    tips = [
        {"field": of["field"], "type": "nominal", "title": of["title"]} for of in channels.values()
    ]
    tips.append({"field": "value", "type": "quantitative", "format": ".3~g"})
    return {
        "data": {"values": list(_rows(values, others, y, x))},
        "transform": transform,
        "width": int(np.clip(CELL * n_columns, LEAST, WIDEST)),
        "height": int(np.clip(CELL * n_rows, LEAST, WIDEST)),
        "mark": "rect",
        "encoding": {
            "y": channels["row"],
            "x": channels["column"],
            "color": {"field": "value", "type": "quantitative", "scale": scale, "title": None},
            "tooltip": tips,
        },
    }


def _rows(values: xr.DataArray, others: Sequence[Any], y: str, x: str) -> Iterator[Spec]:
    """A row for each matrix, with its values in a list, row after row, in `LEVELS` of the largest.

    Whole numbers take little room.
    """
    largest = abs(values).max([dim for dim in values.dims if dim not in others[:1]])
    levels = (LEVELS * values / largest.where(largest > 0, 1)).round()
    arrays = levels.transpose(*others, y, x).to_numpy()
    every = [labels_of(values, dim) for dim in others]
    for index in product(*(range(len(labels)) for labels in every)):
        matrix = arrays[index]
        if np.isfinite(matrix).any():
            of_each = (labels[at] for labels, at in zip(every, index, strict=True))
            labels = dict(zip(others, of_each, strict=True))
            numbers = matrix.ravel().tolist()
            yield labels | {"value": [int(v) if np.isfinite(v) else None for v in numbers]}


def _largest_of(values: xr.DataArray, dims: Sequence[Any]) -> str:
    """The expression for the largest absolute value of what is chosen of a dim, such as a model."""
    if not dims:
        return str(_rounded(float(np.abs(values).max())))
    (dim,) = dims
    labels = map(str, labels_of(values, dim))
    largest = abs(values).max([other for other in values.dims if other != dim]).to_numpy()
    table = {label: _rounded(value) for label, value in zip(labels, largest, strict=True)}
    return f"({json.dumps(table)})[{dim}]"


def _rounded(value: float) -> float:
    """A number with six digits; 1 for 0 and NaN."""
    return float(f"{value:.6g}") if np.isfinite(value) and value else 1.0


def _name_expression(field: str, dim: str, values: xr.DataArray, names: xr.DataArray | None) -> str:
    """The expression for the name of a row or column: its label, or its number and name."""
    if names is None:
        return f"{json.dumps([name_of(label) for label in labels_of(values, dim)])}[datum.{field}]"
    others = [other for other in names.dims if other != dim]
    arrays = names.transpose(*others, dim).to_numpy()
    every = [labels_of(names, other) for other in others]
    rows = arrays.reshape(-1, arrays.shape[-1]).tolist()
    keys = ("|".join(map(str, labels)) for labels in product(*every))
    table = {key: list(map(str, row)) for key, row in zip(keys, rows, strict=True)}
    key = " + '|' + ".join(f"datum.{other}" for other in others) or "''"
    # Numbers keep labels apart that have the same name.
    return f"datum.{field} + ' ' + ({json.dumps(table)})[{key}][datum.{field}]"
