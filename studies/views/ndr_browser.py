"""Steps through the control flow of single examples, beside the true dataflow and the attention."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

import probes
import tasks
from probes.control_flow.graphs import INPUT_STEP
from studies.engine.results import config_of, task_config_of
from studies.measures.control_flow import NODES
from studies.report.browsers import chosen, control, matrix_panel
from studies.report.charts import CONFIG, INDEPENDENT, Spec, title_of
from studies.setups.expressions import TASKS
from studies.views.ndr import SHADES, criteria_of, first_cells, graphs_of

UNIT = 34
"""Pixels of a column, and of a step."""

READ, KEPT, NOW = "#cc3311", "#bbbbbb", "#fff3c4"
"""Colours of reads, of frames of inputs, and of the step that is shown."""

MOST = 500_000
"""The most values of attention that a page has room for."""

MAXIMUM = "maximum of all"
"""The choice of no single head."""


class Stepped(NamedTuple):
    """An example: its name in the list, tokens, activations, and the truth.

    For each criterion also the graph and the shades of its nodes; models without gates have those
    of changes for all.
    """

    name: str
    tokens: list[str]
    data: xr.Dataset
    graphs: dict[str, xr.Dataset]
    shades: dict[str, xr.DataArray]
    truth: xr.Dataset


def examples_of(result: xr.DataTree) -> Iterator[Stepped]:
    """The drawn examples of the first model of each condition."""
    for condition, cell, data in first_cells(result):
        seed = result["scores"].to_dataset()["seed"].to_numpy()[cell]
        known = criteria_of(data)
        criteria = {name: name if name in known else "change" for name in NODES}
        for number in range(data.sizes["example"]):
            one = data.isel(example=[number])
            found = {nodes: graphs_of(one, nodes) for nodes in known}
            graphs = {name: found[nodes] for name, nodes in criteria.items()}
            one = one.isel(example=0)
            shades = {name: one[nodes] for name, nodes in criteria.items()}
            tokens = one["tokens"].item().split()
            name = f"{condition.label}, seed {seed}: {' '.join(tokens[1:-1])}"
            answers = f"right {one['target'].item()}, answered {one['answer'].item()}"
            truth = true_dataflow(result, cell, tokens)
            yield Stepped(f"{name} ({answers})", tokens, one, graphs, shades, truth)


def true_dataflow(result: xr.DataTree, cell: int, tokens: list[str]) -> xr.Dataset:
    """The true dataflow between the columns of an expression, from its task."""
    setup = config_of(result)["setup"]
    kind = next(one for one in TASKS if one.__name__ == setup["task"]["class"])
    axes = json.loads(result.attrs["axes"])["coordinates"]
    own = {
        path: result["scores"][name].to_numpy()[cell].item()
        for name, path in axes.items()
        if path == "readout" or path.startswith("task.")
    }
    readout = own.pop("readout", setup.get("readout", "last"))
    changes = {path.removeprefix("task."): value for path, value in own.items()}
    task = TASKS[kind](task_config_of(result, kind, **changes))
    words = tokens[1:-1]
    # Arithmetic, whose tokens are single characters, is written without spaces.
    separator = " " if max(map(len, words)) > 1 else ""
    batch = task.examples_of([separator.join(words)])
    return tasks.column_dataflow(batch, readout=readout).isel(example=0)


def control_flow(result: xr.DataTree) -> Spec | None:
    """Columns by steps with gates, updates and reads up to a step; the truth; and attention."""
    examples, heads = _fitting(list(examples_of(result)))
    if not examples:
        return None
    names = [one.name for one in examples]
    attention = _attention(examples, heads)
    criteria = xr.DataArray(list(NODES), dims="criterion", coords={"criterion": list(NODES)})
    tokens = {
        dim: xr.DataArray(
            _padded([one.tokens for one in examples]), {"example": names}, ("example", dim)
        )
        for dim in ("query_pos", "key_pos")
    }
    matrix = matrix_panel(attention, y="query_pos", x="key_pos", names=tokens)
    matrix["title"] = title_of("attention at the step")
    shades = ", or ".join(label for _, label in SHADES.values())
    return {
        "description": "The control flow of an example up to a step, beside its true dataflow and "
        "the attention at that step. Shades: " + shades + "; frames: updates; red: reads",
        "params": [
            control(attention, "example"),
            control(attention, "step"),
            control(criteria, "criterion", "nodes by"),
            control(attention, "head"),
        ],
        "config": CONFIG,
        "resolve": {"scale": {"color": "independent", "opacity": "independent"}},
        "hconcat": [
            _flow(examples),
            {"vconcat": [_truth(examples), matrix], "resolve": INDEPENDENT},
        ],
    }


def _fitting(examples: list[Stepped]) -> tuple[list[Stepped], bool]:
    """The first examples whose attention has `MOST` values; and whether each head's is among it."""
    width = max((len(one.tokens) for one in examples), default=0)
    sizes = [one.data.sizes["step"] * width**2 for one in examples]
    n_heads = max((one.data.sizes["head"] for one in examples), default=0)
    if sum(sizes) * (n_heads + 1) <= MOST:
        return examples, True
    return [
        one for one, total in zip(examples, np.cumsum(sizes), strict=True) if total <= MOST
    ], False


def _attention(examples: list[Stepped], heads: bool) -> xr.DataArray:
    """Attention [example, head, step, query_pos, key_pos]: the maximum over heads, and each."""
    arrays = []
    for one in examples:
        weights = one.data["attention"].drop_vars(["head", "step"], errors="ignore")
        parts = [weights.max("head").expand_dims(head=[MAXIMUM])]
        if heads and weights.sizes["head"] > 1:
            names = [f"head {number}" for number in range(weights.sizes["head"])]
            parts.append(weights.assign_coords(head=names))
        joined = xr.concat(parts, "head").reset_coords(drop=True)
        width = len(one.tokens)
        inside = np.arange(joined.sizes["key_pos"]) < width
        joined = joined.where(xr.DataArray(inside, dims="key_pos"))
        arrays.append(joined.where(xr.DataArray(inside, dims="query_pos")))
    names = xr.Variable("example", [one.name for one in examples])
    stacked = xr.concat(arrays, names, join="outer")
    return stacked.assign_coords(step=range(stacked.sizes["step"]))


def _padded(rows: list[list[str]]) -> list[list[str]]:
    width = max(map(len, rows))
    return [row + [""] * (width - len(row)) for row in rows]


def _flow(examples: list[Stepped]) -> Spec:
    """The graph: columns along x, steps downwards, inputs above."""
    width = max(len(one.tokens) for one in examples)
    n_steps = max(one.data.sizes["step"] for one in examples)
    nodes, frames, edges, inputs = [], [], [], []
    for one in examples:
        for pos, token in enumerate(one.tokens):
            inputs.append({"example": one.name, "pos": pos, "at": INPUT_STEP, "token": token})
        for name in NODES:
            graphs, shade = one.graphs[name], one.shades[name].to_numpy()
            columns = list(range(len(one.tokens)))
            for step, of_step in enumerate(shade[:, columns].round(2).tolist()):
                key = {"example": one.name, "criterion": name, "at": step}
                nodes.append(key | {"pos": columns, "shade": of_step})
                updates = np.flatnonzero(graphs["update"].to_numpy()[0, step]).tolist()
                frames.append(key | {"pos": updates})
            edges += [{"example": one.name, "criterion": name, **edge} for edge in _reads(graphs)]
    x: Spec = {"field": "pos", "type": "quantitative", "title": "column", "axis": {"grid": False}}
    x["scale"] = {"domain": [-0.6, width - 0.4], "nice": False}
    y: Spec = {"field": "at", "type": "quantitative", "title": "step"}
    y["axis"] = {
        "grid": False,
        "tickMinStep": 1,
        "labelExpr": "datum.value < 0 ? 'input' : datum.value",
    }
    y["scale"] = {"domain": [INPUT_STEP - 0.6, n_steps - 0.4], "reverse": True, "nice": False}
    is_chosen = {"filter": chosen(["example", "criterion"])}
    past = {"filter": "datum.at <= step"}
    box = [
        {"calculate": f"datum.{field} {sign} 0.42", "as": f"{field}{end}"}
        for field in ("pos", "at")
        for sign, end in (("-", "0"), ("+", "1"))
    ]
    sides = {"x": {**x, "field": "pos0"}, "x2": {"field": "pos1"}}
    sides |= {"y": {**y, "field": "at0"}, "y2": {"field": "at1"}}
    tips = [{"field": name, "type": "nominal"} for name in ("pos", "at", "shade")]
    of_read = ("source", "pos", "source_step", "at", "weight")
    now = {"condition": {"test": "datum.at == step", "value": 1}, "value": 0.3}
    darkness = {"field": "shade", "type": "quantitative", "legend": None}
    darkness["scale"] = {"domain": [0, 1], "range": [0, 0.75]}
    return {
        "title": title_of("control flow up to the step"),
        "width": UNIT * width,
        "height": round(UNIT * 0.8 * (n_steps + 1)),
        "layer": [
            {
                "data": {"values": [{}]},
                "transform": [
                    {"calculate": "step - 0.5", "as": "low"},
                    {"calculate": "step + 0.5", "as": "high"},
                ],
                "mark": {"type": "rect", "color": NOW},
                "encoding": {"y": {**y, "field": "low"}, "y2": {"field": "high"}},
            },
            {
                "data": {"values": nodes},
                "transform": [is_chosen, past, {"flatten": ["pos", "shade"]}, *box],
                "mark": {"type": "rect", "color": "black"},
                "encoding": {**sides, "opacity": darkness, "tooltip": tips},
            },
            {
                "data": {"values": frames},
                "transform": [is_chosen, past, {"flatten": ["pos"]}, *box],
                "mark": {"type": "rect", "filled": False, "stroke": "black", "strokeWidth": 1.5},
                "encoding": {**sides, "tooltip": tips[:2]},
            },
            {
                "data": {"values": edges},
                "transform": [is_chosen, past],
                "mark": {"type": "rule", "color": READ},
                "encoding": {
                    "x": {**x, "field": "source"},
                    "y": {**y, "field": "source_step"},
                    "x2": {"field": "pos"},
                    "y2": {"field": "at"},
                    "opacity": now,
                    "size": {"field": "weight", "type": "quantitative", "legend": None}
                    | {"scale": {"domain": [0, 1], "range": [0.8, 4]}},
                    "tooltip": [{"field": name, "type": "nominal"} for name in of_read],
                },
            },
            {
                "data": {"values": inputs},
                "transform": [{"filter": chosen(["example"])}],
                "mark": {"type": "text", "fontSize": 12, "fontWeight": 600},
                "encoding": {"x": x, "y": y, "text": {"field": "token", "type": "nominal"}},
            },
        ],
    }


def _reads(graphs: xr.Dataset) -> Iterator[dict[str, Any]]:
    """The reads of an example's graph, with the largest weight over heads."""
    graph = probes.to_networkx(graphs, 0)
    for source, target, edge in graph.edges(data=True):
        if edge["kind"] == "attention":
            (pos, step), (to, at) = source, target
            weight = round(float(edge["weight"]), 3)
            yield {"source": pos, "source_step": step, "pos": to, "at": at, "weight": weight}


def _truth(examples: list[Stepped]) -> Spec:
    """The true dataflow: columns along x, depths of values upwards; framed: updates at the step."""
    width = max(len(one.tokens) for one in examples)
    nodes, edges = [], []
    for one in examples:
        level = one.truth["level"].to_numpy().astype(int)
        used = one.truth["used"].to_numpy()
        level[int(one.truth["readout"])] = level.max() + 1
        for pos, token in enumerate(one.tokens):
            for name in NODES:
                update = one.graphs[name]["update"].to_numpy()[0, :, pos]
                key = {"example": one.name, "criterion": name, "pos": pos, "token": token}
                if level[pos] >= 0:
                    updates = np.flatnonzero(update).tolist()
                    nodes.append(key | {"level": int(level[pos]), "updates": updates})
        for (argument, operation), is_used in zip(one.truth["edges"].to_numpy().astype(int), used):  # noqa: B905
            if argument >= 0:
                ends = {"pos": int(argument), "to": int(operation)}
                levels = {"level": int(level[argument]), "to_level": int(level[operation])}
                edges.append({"example": one.name, **ends, **levels, "used": bool(is_used)})
    highest = max((node["level"] for node in nodes), default=1)
    x: Spec = {"field": "pos", "type": "quantitative", "title": "column", "axis": {"grid": False}}
    x["scale"] = {"domain": [-0.6, width - 0.4], "nice": False}
    y: Spec = {"field": "level", "type": "quantitative", "title": "depth of the value"}
    y |= {"scale": {"domain": [-0.6, highest + 0.6], "nice": False}, "axis": {"grid": False}}
    updates = {"condition": {"test": "indexof(datum.updates, step) >= 0", "value": "black"}}
    return {
        "title": title_of("true dataflow (framed: columns that update at the step)"),
        "width": UNIT * width,
        "height": 300,
        "layer": [
            {
                "data": {"values": edges},
                "transform": [{"filter": chosen(["example"])}],
                "mark": {"type": "rule", "color": READ, "strokeWidth": 1.5},
                "encoding": {
                    "x": x,
                    "y": y,
                    "x2": {"field": "to"},
                    "y2": {"field": "to_level"},
                    "opacity": {"condition": {"test": "datum.used", "value": 0.8}, "value": 0.25},
                    "tooltip": [
                        {"field": name, "type": "nominal"} for name in ("pos", "to", "used")
                    ],
                },
            },
            {
                "data": {"values": nodes},
                "transform": [{"filter": chosen(["example", "criterion"])}],
                "mark": {"type": "square", "size": 500, "fill": "white", "opacity": 1},
                "encoding": {"x": x, "y": y, "stroke": {**updates, "value": KEPT}},
            },
            {
                "data": {"values": nodes},
                "transform": [{"filter": chosen(["example", "criterion"])}],
                "mark": {"type": "text", "fontSize": 12},
                "encoding": {"x": x, "y": y, "text": {"field": "token", "type": "nominal"}},
            },
        ],
    }
