"""Interactive charts of figures, as specifications of Vega-Lite.

Views are written once, with matplotlib. `studies.report.figures` reads what their figures show, and
`chart` draws it again: panels that can be zoomed, values under the pointer, a legend and a list
that pick a line in all panels.

Why Vega-Lite: its libraries take 0.9 MB in a page (bokeh with its widgets 1.7 MB, plotly 4.8 MB)
and come within the package `vl-convert-python`, so that no network is needed. A chart is data:
selections that filter, highlight or step through linked panels are bound to native lists and
sliders without JavaScript of our own, which bokeh needs for them, and for which plotly has no more
than buttons. None of the three lays out networks at positions that mean something, such as columns
and steps; all draw lines between points. Charts are dicts, since objects of altair took half a
second to make for eight panels, more than the figure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from textwrap import wrap
from typing import Any

from studies.report.figures import (
    Box,
    Line,
    Matrix,
    Note,
    Panel,
    Part,
    Scale,
    numbers,
    owners,
    short_number,
)

Spec = dict[str, Any]
"""A chart, or a part of it, in Vega-Lite's JSON."""

SCALE = 78
"""Pixels per inch of a figure."""

MARGIN = 56
"""Pixels beside and below a panel, for its labels."""

CONFIG = {
    "font": "system-ui, sans-serif",
    "view": {"stroke": "#cccccc"},
    "axis": {"gridColor": "#eeeeee", "labelFontSize": 9, "titleFontSize": 10}
    | {"titleFontWeight": 400},
    "legend": {"labelFontSize": 10, "titleFontSize": 10, "titleFontWeight": 400}
    | {"labelLimit": 300},
    "title": {"fontSize": 11, "fontWeight": 600},
}
"""Fonts and colours of all charts."""

INDEPENDENT = {"scale": {"color": "independent"}}

SHOWN = {
    "or": [
        {"and": [{"param": "picked"}, "only == null || only == datum.series"]},
        "datum.series == ''",
    ]
}
"""Whether a line is shown: picked in the legend and in the list, or without a label."""


def chart(parts: Sequence[Part], description: str = "") -> Spec:
    """The chart of a figure.

    Args:
        parts: what it shows, from `figures.read`.
        description: the same in words, for those who cannot see it.
    """
    key = legend([panel for part in parts for row in part.rows for panel in row])
    number, specs = count(), []
    for part in parts:
        height = _clip(part.height * SCALE / len(part.rows) - MARGIN, 40, 700)
        width = _clip(part.width * SCALE / max(map(len, part.rows)) - MARGIN, 56, 760)
        of_rows = [
            {
                "hconcat": [panel_spec(panel, width, height, next(number), key) for panel in row],
                "spacing": 12,
            }
            for row in part.rows
        ]
        specs.append({"title": title_of(part.title, 12), "vconcat": of_rows, "spacing": 12})
    choices = {"options": [None, *key], "labels": ["all", *key], "name": "show "}
    only = {"name": "only", "value": None, "bind": {"input": "select", **choices}}
    return {
        "description": description,
        "params": [only] if len(key) > 1 else [],
        "vconcat": specs,
        "spacing": 18,
        "resolve": INDEPENDENT,
        "config": CONFIG,
    }


def legend(panels: Sequence[Panel]) -> dict[str, tuple[str, str]]:
    """Colour and shape of each label; black for a label that has several colours."""
    styles: dict[str, list[tuple[str, str]]] = {}
    for panel in panels:
        for line in panel.lines:
            styles.setdefault(line.label, []).append((line.colour, line.shape or "stroke"))
        for box in panel.boxes:
            styles.setdefault(box.label, []).append((box.fill or box.stroke or "", "square"))
    styles.pop("", None)
    return {
        label: ("#000000" if len({colour for colour, _ in of_label}) > 1 else colour, shape)
        for label, of_label in styles.items()
        for colour, shape in of_label[:1]
    }


def panel_spec(
    panel: Panel, width: int, height: int, number: int, key: Mapping[str, tuple[str, str]]
) -> Spec:
    """The specification of a panel.

    Args:
        panel: the panel.
        width, height: its size, in pixels.
        number: its number in the figure; the first has the legend.
        key: see `legend`.
    """
    layers = [
        *(_matrix_layer(matrix, panel) for matrix in panel.matrices),
        *_layers_of_boxes(panel),
        *_layers_of_lines(panel),
        *_layers_of_notes(panel),
    ]
    if not layers:
        layers = [_layer([], "point", _encoding(panel))]
    if len(key) > 1:
        for layer in layers[len(panel.matrices) :]:
            fades = {"condition": {"test": SHOWN, "value": 1}, "value": 0.06}
            layer["encoding"]["opacity"] = fades
    # Without the key that is held, the wheel scrolls the page.
    zoom = {"type": "interval", "zoom": "wheel![event.shiftKey]"}
    layers[0]["params"] = [{"name": f"zoom_{number}", "select": zoom, "bind": "scales"}]
    if number == 0 and key:
        layers.append(_legend_layer(key))
    return {
        "title": title_of(panel.title),
        "width": width,
        "height": height,
        # The colour of cells without a value.
        "view": {"fill": "#e4e4e4"} if panel.matrices else {},
        "layer": layers,
        "resolve": INDEPENDENT,
    }


def title_of(text: str, size: int = 11) -> Spec:
    """A title at the left, of one or several lines."""
    return {"text": text.split("\n"), "fontSize": size, "anchor": "start"}


def literal(field: str) -> Spec:
    """A field that holds colours, dashes or shapes themselves."""
    return {"field": field, "type": "nominal", "scale": None}


def _clip(value: float, low: float, high: float) -> int:
    return round(min(max(value, low), high))


def _layer(
    values: Sequence[Mapping[str, Any]], mark: str, encoding: Spec, flatten: str = "", **style: Any
) -> Spec:
    """A layer of marks.

    Args:
        values: the data.
        mark: the kind of mark.
        encoding: what its channels show.
        flatten: fields of the data that hold lists of equal lengths, a mark for each entry.
        style: further properties of all marks.
    """
    transform = [{"flatten": flatten.split()}] if flatten else []
    transform += [
        {"calculate": tip["lookup"], "as": tip["field"]}
        for tip in encoding.get("tooltip", ())
        if "lookup" in tip
    ]
    tips = [{k: v for k, v in tip.items() if k != "lookup"} for tip in encoding.get("tooltip", ())]
    return {
        "data": {"values": values},
        "transform": transform,
        "mark": {"type": mark, "clip": True, **style},
        "encoding": encoding | {"tooltip": tips or None},
    }


def _encoding(panel: Panel, **further: Any) -> Spec:
    """Positions on the axes of a panel, with further channels."""
    return {"x": {"field": "x", **_axis(panel.x)}, "y": {"field": "y", **_axis(panel.y)}} | further


def _axis(scale: Scale) -> Spec:
    """The scale of an axis, and its ticks."""
    low, high = sorted(scale.limits)
    kind: Spec = {"domain": [short_number(low), short_number(high)], "nice": False}
    kind |= {"reverse": True} if low != scale.limits[0] else {}
    kind |= {"zero": False} if scale.base is None else {"type": "log", "base": scale.base}
    axis: Spec = {"labelOverlap": True, "labelLimit": 160}
    if scale.base is not None:
        axis["format"] = "~g"
    if scale.names:
        names = {"values": list(scale.names), "labelExpr": _lookup("value", scale.names)}
        axis |= {**names, "grid": False}
    return {
        "type": "quantitative",
        "scale": kind,
        "axis": axis if scale.is_shown else None,
        "title": scale.title.split("\n") if scale.title else None,
    }


def _lookup(field: str, names: Mapping[float, str]) -> str:
    """An expression for the name at a number."""
    texts = {f"{position:g}": name for position, name in names.items()}
    return f"({json.dumps(texts)})[format(datum.{field}, '.6~g')] || ''"


def _tip(field: str, title: str = "") -> Spec:
    """An entry of a tooltip for a number."""
    title = " ".join(title.split()) or field
    return {"field": field, "title": title, "type": "quantitative", "format": ".4~g"}


def _positions(panel: Panel) -> list[Spec]:
    """Entries of a tooltip for the position, with its names."""
    tips = []
    for field, scale in (("x", panel.x), ("y", panel.y)):
        tip = _tip(field, scale.title)
        if scale.names:
            look_up = {"field": f"{field}_name", "lookup": _lookup(field, scale.names)}
            tip = {"title": tip["title"], "type": "nominal", **look_up}
        tips.append(tip)
    return tips


SERIES = {"field": "series", "type": "nominal"}


def _matrix_layer(matrix: Matrix, panel: Panel) -> Spec:
    values = [
        {"y": short_number(position), "x": numbers(matrix.x), "value": numbers(of_row)}
        for position, of_row in zip(matrix.y.tolist(), matrix.values, strict=True)
    ]
    bar = None if matrix.title is None else {"title": wrap(matrix.title, 24)}
    colours = {"domain": matrix.domain, "range": matrix.colours, "clamp": True}
    value = {"field": "value", "type": "quantitative"}
    encoding = _encoding(
        panel,
        x2={"field": "x_end"},
        y2={"field": "y_end"},
        color={**value, "scale": colours, "legend": bar},
        tooltip=[*_positions(panel), _tip("value")],
    )
    for name in ("x", "y"):
        encoding[name]["field"] = f"{name}_start"
    layer = _layer(values, "rect", encoding, "x value")
    layer["transform"].append({"filter": "isValid(datum.value)"})
    for name, centres in (("x", matrix.x), ("y", matrix.y)):
        half = abs(float(centres[1] - centres[0])) / 2 if len(centres) > 1 else 0.5
        layer["transform"] += [
            {"calculate": f"datum.{name} - {half:g}", "as": f"{name}_start"},
            {"calculate": f"datum.{name} + {half:g}", "as": f"{name}_end"},
        ]
    return layer


def _layers_of_boxes(panel: Panel) -> Iterator[Spec]:
    def values(boxes: Sequence[Box]) -> list[Spec]:
        corners = (dict(zip(("x", "y", "x2", "y2"), numbers(box.corners))) for box in boxes)  # noqa: B905
        none = "transparent"
        return [
            {"series": box.label, "fill": box.fill or none, "stroke": box.stroke or none} | corner
            for box, corner in zip(boxes, corners, strict=True)
        ]

    channels: Spec = {"x2": {"field": "x2"}, "y2": {"field": "y2"}}
    channels |= {"fill": literal("fill"), "stroke": literal("stroke")}
    for boxes, tips in (
        ([box for box in panel.boxes if not box.is_bar], []),
        ([box for box in panel.boxes if box.is_bar], [SERIES, _tip("y2", panel.y.title)]),
    ):
        if boxes:
            encoding = _encoding(panel, **channels, tooltip=tips)
            yield _layer(values(boxes), "rect", encoding, strokeWidth=1.2)


def _layers_of_lines(panel: Panel) -> Iterator[Spec]:
    """Error bars, lines and points."""
    labels = owners(panel.lines)
    rows = [_line_row(*pair) for pair in zip(panel.lines, labels, strict=True)]
    tips = [SERIES, *_positions(panel)]
    bounds, colour = [_tip("low"), _tip("high")], {"color": literal("colour")}
    for axis in ("x", "y"):
        if bars := [row for row in rows if row["along"] == axis]:
            encoding = _encoding(panel, **colour, tooltip=[*tips, *bounds])
            encoding[axis]["field"], encoding[f"{axis}2"] = "low", {"field": "high"}
            yield _layer(bars, "rule", encoding, "x y low high")
    if joined := [{**row, "line": n} for n, row in enumerate(rows) if row["dash"] is not None]:
        channels: Spec = {"strokeDash": literal("dash"), "detail": {"field": "line"}}
        # As they come: Vega-Lite would sort by x.
        encoding = _encoding(panel, **colour, **channels, order={"value": None}, tooltip=tips)
        yield _layer(joined, "line", encoding, "x y", strokeWidth=1.4)
    pairs = zip(rows, panel.lines, strict=True)
    marked = [_only(row, line.marked) for row, line in pairs if line.shape and len(line.marked)]
    channels = {"shape": literal("shape"), "size": {**literal("size"), "type": "quantitative"}}
    for is_bounded, fields in ((False, "x y"), (True, "x y low high")):
        if points := [row for row in marked if bool(row["along"]) == is_bounded]:
            further = [*tips, *(bounds if is_bounded else ())]
            encoding = _encoding(panel, **colour, **channels, tooltip=further)
            yield _layer(points, "point", encoding, fields, filled=True, opacity=1)


def _line_row(line: Line, label: str) -> Spec:
    """A line as a row of data, with lists of its points."""
    row = {
        "series": label,
        "colour": line.colour,
        "dash": line.dash,
        "shape": line.shape,
        "size": round(line.size, 1),
        "along": "" if line.bounds is None else line.bounds[2],
        "x": numbers(line.x),
        "y": numbers(line.y),
    }
    if line.bounds is not None:
        row |= {"low": numbers(line.bounds[0]), "high": numbers(line.bounds[1])}
    return row


def _only(row: Spec, points: Sequence[int]) -> Spec:
    """Some of the points of a line."""
    lists = {name: row[name] for name in ("x", "y", "low", "high") if name in row}
    return row | {name: [values[point] for point in points] for name, values in lists.items()}


def _layers_of_notes(panel: Panel) -> Iterator[Spec]:
    by_style: dict[tuple[str, str], list[Note]] = {}
    for note in panel.notes:
        by_style.setdefault((note.align, note.weight), []).append(note)
    for (align, weight), notes in by_style.items():
        values = [
            {"series": "", "text": note.text, "colour": note.colour}
            | {"x": short_number(note.x), "y": short_number(note.y)}
            for note in notes
        ]
        channels = {"text": {"field": "text", "type": "nominal"}, "color": literal("colour")}
        style = {"fontSize": 9, "align": align, "fontWeight": weight, "lineBreak": "\n"}
        yield _layer(values, "text", _encoding(panel, **channels), **style)


def _legend_layer(key: Mapping[str, tuple[str, str]]) -> Spec:
    """Points that cannot be seen, for the legend that picks lines in all panels."""
    styles = (*(entry[0] for entry in key.values()),), (*(entry[1] for entry in key.values()),)
    # By default entries after the 30th are left out.
    look = {"symbolOpacity": 1, "symbolStrokeWidth": 1.5, "symbolLimit": len(key)}
    colour, shape = (
        {**SERIES, "scale": {"domain": [*key], "range": style}, "legend": {"title": None} | look}
        for style in styles
    )
    values = [{"series": label} for label in key]
    encoding = {"fill": colour, "stroke": colour, "shape": shape}
    layer = _layer(values, "point", encoding, filled=True, opacity=0)
    pick = {"type": "point", "fields": ["series"]}
    layer["params"] = [{"name": "picked", "select": pick, "bind": "legend"}]
    return layer
