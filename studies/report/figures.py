"""What figures show: the lines, points, intervals, bars, matrices and texts on matplotlib's axes.

`read` takes them off the axes of a figure, a user's own too; `studies.report.charts` draws them
again as an interactive chart, `rows` lists their numbers, and `described` says what there is to
see.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import to_hex, to_rgba
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.markers import MarkerStyle
from matplotlib.patches import Rectangle, StepPatch
from matplotlib.text import Annotation, Text
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter

from probes.plots import MARKERS

SHAPES: dict[Any, str] = dict(
    zip(
        MARKERS,
        (
            *("circle", "square", "triangle-up", "diamond", "cross", "triangle-down"),
            "M-.5,-.5L.5,-.5L.5,.5L-.5,.5ZM-1,0L1,0M0,-1L0,1",
            "M0,-1L.3,-.3L1,-.3L.4,.2L.6,1L0,.5L-.6,1L-.4,.2L-1,-.3L-.3,-.3Z",
            *("triangle-left", "triangle-right"),
        ),
        strict=True,
    )
)
"""Vega's names, or outlines, of matplotlib's markers."""

DASHES = {"-": [], "--": [6, 3], ":": [2, 2], "-.": [6, 2, 2, 2]}
"""Lengths of dashes and gaps, in pixels, of matplotlib's styles of lines."""

OTHER_SHAPE, OTHER_DASH = "circle", [4, 1]


@dataclass(frozen=True)
class Line:
    """A line, points, or both.

    Attributes:
        label: entry of the legend; "" without.
        colour: as hexadecimal.
        x, y: the points.
        dash: of the line between them; None: no line.
        shape: of the points; None: not drawn.
        marked: indices of the points that are drawn.
        size: area of a point, in pixels.
        bounds: lower and upper bounds, and the axis that they are along.
    """

    label: str
    colour: str
    x: Float[np.ndarray, " point"]
    y: Float[np.ndarray, " point"]
    dash: list[int] | None
    shape: str | None
    marked: Sequence[int]
    size: float = 25
    bounds: tuple[Float[np.ndarray, " point"], Float[np.ndarray, " point"], str] | None = None


@dataclass(frozen=True)
class Box:
    """A bar, a shaded range, or a frame.

    Attributes:
        label: entry of the legend; "" without.
        fill, stroke: colours; None: without.
        corners: x, y, and those of the opposite corner.
        is_bar: whether it is a bar, which says a number.
    """

    label: str
    fill: str | None
    stroke: str | None
    corners: tuple[float, float, float, float]
    is_bar: bool


@dataclass
class Matrix:
    """Values as colours.

    Attributes:
        values: the values, NaN where there is none.
        x, y: centres of columns and rows.
        domain, colours: the values of the first and last colour, and colours in between.
        title: title of the colour bar; None: there is none.
    """

    values: Float[np.ndarray, "row column"]
    x: Float[np.ndarray, " column"]
    y: Float[np.ndarray, " row"]
    domain: tuple[float, float]
    colours: Sequence[str]
    title: str | None


@dataclass(frozen=True)
class Note:
    """Text at a point, in data coordinates."""

    text: str
    x: float
    y: float
    colour: str
    align: str
    weight: str


@dataclass(frozen=True)
class Scale:
    """An axis of a panel: its title, limits, whether it is logarithmic, and names at numbers."""

    title: str
    limits: tuple[float, float]
    base: float | None
    names: dict[float, str]
    is_shown: bool


@dataclass(frozen=True)
class Panel:
    """What an axes shows."""

    title: str
    x: Scale
    y: Scale
    lines: list[Line]
    boxes: list[Box]
    matrices: list[Matrix]
    notes: list[Note]


class NotReadable(Exception):
    """A figure shows something that is neither line, point, bar, matrix nor text."""


@dataclass(frozen=True)
class Part:
    """A figure, or a subfigure: its title, size in inches, and panels by row."""

    title: str
    width: float
    height: float
    rows: list[list[Panel]]


def read(figure: Figure) -> list[Part] | None:
    """What a figure shows: a part for itself, or for each of its subfigures.

    Returns:
        None if it shows what no chart can.
    """
    try:
        parts = [part for part in _parts(figure) if part.rows]
    except NotReadable:
        return None
    return parts or None


def _parts(figure: Figure) -> Iterator[Part]:
    bars = {axis for axis in figure.axes if _colour_bar(axis) is not None}
    titles = {id(_colour_bar(axis).mappable): _title_of_bar(axis) for axis in bars}
    for part in figure.subfigs or [figure]:
        rows: dict[int, list[tuple[int, Panel]]] = {}
        for number, axis in enumerate(axis for axis in part.axes if axis not in bars):
            if axis.axison or axis.texts or axis.patches or axis.images:
                spec = axis.get_subplotspec()
                row, column = (0, number) if spec is None else (spec.rowspan[0], spec.colspan[0])
                rows.setdefault(row, []).append((column, read_axes(axis, titles)))
        ordered = [sorted(rows[row], key=lambda entry: entry[0]) for row in sorted(rows)]
        panels = _with_bar_at_the_end([[panel for _, panel in row] for row in ordered])
        width, height = (length / figure.dpi for length in (part.bbox.width, part.bbox.height))
        yield Part(part.get_suptitle(), width, height, panels)


def _with_bar_at_the_end(rows: list[list[Panel]]) -> list[list[Panel]]:
    """The panels, with a colour bar that is for all of them beside the last of the first row."""
    matrices = [matrix for row in rows for panel in row for matrix in panel.matrices]
    titles = [matrix.title for matrix in matrices if matrix.title is not None]
    if titles and rows[0][-1].matrices and len({matrix.domain for matrix in matrices}) == 1:
        for matrix in matrices:
            matrix.title = None
        rows[0][-1].matrices[0].title = titles[0]
    return rows


def _colour_bar(axis: Axes) -> Any:
    """The colour bar that an axes is for, if it is."""
    return getattr(axis, "_colorbar", None)


def _title_of_bar(axis: Axes) -> str:
    return axis.get_ylabel() or axis.get_xlabel()


def read_axes(axis: Axes, titles: dict[int, str]) -> Panel:
    """What an axes shows.

    Args:
        axis: the axes.
        titles: titles of colour bars, by the id of what they are of.

    Raises:
        NotReadable: it has something that no panel can show.
    """
    bars = [one for one in axis.containers if isinstance(one, ErrorbarContainer)]
    parts = {id(part) for bar in bars for part in bar.get_children()}
    panel = Panel(
        title=axis.get_title() or axis.get_title(loc="left"),
        x=_scale(axis, "x"),
        y=_scale(axis, "y"),
        lines=[_intervals(axis, bar) for bar in bars],
        boxes=[],
        matrices=[],
        notes=[],
    )
    known = {*axis.spines.values(), axis.xaxis, axis.yaxis, axis.patch}
    of_bars = [one for one in axis.containers if isinstance(one, BarContainer)]
    labels = {id(bar): str(container.get_label()) for container in of_bars for bar in container}
    for artist in axis.get_children():
        if artist in known or id(artist) in parts or not artist.get_visible():
            continue
        match artist:
            case Line2D():
                panel.lines.append(_line(axis, artist))
            case PathCollection():
                panel.lines.extend(_points(axis, artist))
            case Rectangle():
                panel.boxes.append(_box(axis, artist, labels))
            case LineCollection():
                panel.lines.extend(_segments(axis, artist))
            case StepPatch():
                panel.lines.append(_outline(artist))
            case AxesImage() if _values_of(artist).ndim == 2:
                panel.matrices.append(_matrix(artist, titles.get(id(artist))))
            case Annotation():
                raise NotReadable("an arrow")
            case Text():
                if artist.get_text() and artist not in _titles(axis):
                    panel.notes.append(_note(axis, artist))
            case _:
                raise NotReadable(type(artist).__name__)
    return panel


def _titles(axis: Axes) -> list[Text]:
    """The texts that are titles, of which matplotlib has no public list."""
    return [axis.title, axis._left_title, axis._right_title]  # pyright: ignore[reportAttributeAccessIssue]


def _scale(axis: Axes, side: str) -> Scale:
    one: Any = axis.xaxis if side == "x" else axis.yaxis
    low, high = axis.get_xlim() if side == "x" else axis.get_ylim()
    formatter, names = one.get_major_formatter(), {}
    locator = one.get_major_locator()
    # Names that were set are in a list, or by `set_ticks` in a function from positions.
    if isinstance(locator, FixedLocator) and isinstance(formatter, FixedFormatter | FuncFormatter):
        names = {
            float(at): formatter(at, number)
            for number, at in enumerate(locator.tick_values(low, high))
        }
    kind = one.get_scale()
    if kind not in ("linear", "log"):
        raise NotReadable(f"a scale {kind}")
    base = one.get_transform().base if kind == "log" else None
    is_shown = axis.axison and (bool(names) or len(one.get_ticklocs()) > 0)
    return Scale(one.get_label_text(), (float(low), float(high)), base, names, is_shown)


def _in_data(axis: Axes, artist: Any, points: Any) -> Float[np.ndarray, "point 2"]:
    """Points of an artist in data coordinates, whatever its own are."""
    points = np.asarray(points, dtype=float).reshape(-1, 2)
    transform = artist.get_transform()
    if transform == axis.transData:
        return points
    return axis.transData.inverted().transform(transform.transform(points))


def _line(axis: Axes, line: Any, label: str | None = None) -> Line:
    x, y = _in_data(axis, line, line.get_xydata()).T
    finite = np.isfinite(x) & np.isfinite(y)
    style, marker, every = line.get_linestyle(), str(line.get_marker()), line.get_markevery()
    has_line = style not in ("None", "none", "", " ")
    dash = DASHES.get(style, OTHER_DASH) if has_line else None
    shape = None if marker in ("None", "none", "", " ") else SHAPES.get(marker, OTHER_SHAPE)
    marked = np.arange(finite.sum())
    if isinstance(every, list):
        marked = marked[every]
    return Line(
        _label(line.get_label() if label is None else label),
        to_hex(line.get_color()),
        x[finite],
        y[finite],
        dash,
        shape,
        [] if shape is None else marked.tolist(),
        size=5 if marker == "." else line.get_markersize() ** 2 * 1.4,
    )


def _label(label: object) -> str:
    """The entry of the legend; matplotlib's own labels begin with an underscore."""
    return "" if str(label).startswith("_") else str(label)


def _intervals(axis: Axes, container: Any) -> Line:
    """A line with its error bars, or the error bars of bars."""
    drawn, _, bars = container.lines
    along = "x" if container.has_xerr else "y"
    segments = np.array([bar for of_axis in bars for bar in of_axis.get_segments()])
    if drawn is None:
        x, y = segments.mean(1).T
        line = Line("", to_hex(bars[0].get_color()[0]), x, y, None, None, [])
    else:
        line = _line(axis, drawn, str(container.get_label()))
    if len(segments) != len(line.x) or not len(segments):
        return line
    ends = segments[:, :, "xy".index(along)]
    return replace(line, bounds=(ends.min(1), ends.max(1), along))


def _points(axis: Axes, points: Any) -> Iterator[Line]:
    """Scattered points, which are several lines where they have several colours."""
    offsets = np.ma.filled(points.get_offsets(), np.nan)
    offsets = offsets[np.isfinite(offsets).all(1)]
    colours = [to_hex(colour) for colour in points.get_facecolor()] or ["#000000"]
    of_each = np.array([colours[number % len(colours)] for number in range(len(offsets))])
    label, shape = _label(points.get_label()), _shape(points)
    # Points on a colour scale, which have no entry in the legend, are one line for each colour.
    for colour in dict.fromkeys(of_each if len(offsets) else colours[:1]):
        x, y = offsets[of_each == colour].T if len(offsets) else np.empty((2, 0))
        sizes = points.get_sizes()
        size = float(sizes[0]) * 1.4 if len(sizes) else 25
        yield Line(label, colour, x, y, None, shape, range(len(x)), size=size)


def _shape(points: Any) -> str:
    """The shape of points: of the marker with the same outline."""
    outline = points.get_paths()[0].vertices
    for marker, shape in SHAPES.items():
        style = MarkerStyle(marker)
        path: Any = style.get_path().transformed(style.get_transform()).vertices
        if path.shape == outline.shape and np.allclose(path, outline):
            return shape
    return OTHER_SHAPE


def _segments(axis: Axes, lines: Any) -> Iterator[Line]:
    """Lines that were drawn together; the first has their entry in the legend."""
    label, colours = _label(lines.get_label()), lines.get_color()
    for number, segment in enumerate(lines.get_segments()):
        x, y = _in_data(axis, lines, segment).T
        colour = to_hex(colours[number % len(colours)])
        yield Line(label, colour, x, y, DASHES["-"], None, [])


def _box(axis: Axes, box: Any, bars: dict[int, str]) -> Box:
    corners = _in_data(axis, box, [(0, 0), (1, 1)])
    (x, y), (x2, y2) = corners.tolist()
    is_filled = box.get_fill() and box.get_facecolor()[3] > 0
    fill = _on_white(box.get_facecolor()) if is_filled else None
    stroke = None if is_filled else to_hex(box.get_edgecolor())
    label = _label(box.get_label()) or _label(bars.get(id(box), ""))
    return Box(label, fill, stroke, (x, y, x2, y2), id(box) in bars)


def _on_white(colour: Any) -> str:
    """A colour that may be transparent, as it is on white."""
    red, green, blue, alpha = to_rgba(colour)
    red, green, blue = (1 - alpha * (1 - part) for part in (red, green, blue))
    return to_hex((red, green, blue))


def _outline(patch: Any) -> Line:
    values, edges, _ = patch.get_data()
    values = np.ma.filled(np.asarray(values, dtype=float), np.nan)
    colour = to_hex(patch.get_facecolor() if patch.get_fill() else patch.get_edgecolor())
    x, y = np.repeat(edges, 2)[1:-1], np.repeat(values, 2)
    return Line(_label(patch.get_label()), colour, x, y, [], None, [])


def _values_of(image: Any) -> Float[np.ndarray, "row column ..."]:
    """The values of an image: two dims, or three for colours themselves."""
    return np.ma.filled(np.ma.asarray(image.get_array(), dtype=float), np.nan)


def _matrix(image: Any, title: str | None) -> Matrix:
    values = _values_of(image)
    left, right, bottom, top = image.get_extent()
    if image.origin == "lower":
        bottom, top = top, bottom
    rows, columns = values.shape
    x = left + (np.arange(columns) + 0.5) * (right - left) / columns
    y = top + (np.arange(rows) + 0.5) * (bottom - top) / rows
    low, high = image.get_clim()
    colours = [to_hex(colour) for colour in image.get_cmap()(np.linspace(0, 1, 9))]
    return Matrix(values, x, y, (float(low), float(high)), colours, title)


def _note(axis: Axes, text: Any) -> Note:
    ((x, y),) = _in_data(axis, text, [text.get_position()]).tolist()
    weight = "bold" if text.get_weight() in ("bold", 700) else "normal"
    align = str(text.get_horizontalalignment())
    return Note(text.get_text(), x, y, to_hex(text.get_color()), align, weight)


def described(figure: Figure) -> str:
    """What a figure shows, in words: for those who cannot see it."""
    drawn = [axis for axis in figure.axes if _colour_bar(axis) is None]
    panels = [axis.get_title() or axis.get_title(loc="left") for axis in drawn]
    against = {
        tuple(" ".join(label.split()) for label in (axis.get_ylabel(), axis.get_xlabel()))
        for axis in drawn
    }
    axes = [" against ".join(filter(None, labels)) for labels in sorted(against) if any(labels)]
    labels = [label for axis in drawn for label in axis.get_legend_handles_labels()[1]]
    bars = [_title_of_bar(axis) for axis in figure.axes if axis not in drawn]
    titles = [part.get_suptitle() for part in (figure, *figure.subfigs)]
    parts = {
        "": titles,
        "panels: ": panels,
        "axes: ": axes,
        "colours: ": bars,
        "series: ": labels,
    }
    found = {name: list(dict.fromkeys(filter(None, words))) for name, words in parts.items()}
    n = len(drawn)
    sentences = [f"{n} panel{'s' if n > 1 else ''}"]
    sentences += [name + "; ".join(words) for name, words in found.items() if words]
    return " ".join(". ".join(sentences).split()) + "."


def rows(parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
    """The numbers of a figure: a row for each point, bar, and cell of a matrix."""
    for part in parts:
        for panel in (panel for row in part.rows for panel in row):
            names = (part.title, panel.title, " ".join(panel.y.title.split("\n")[1:]))
            where = {"panel": ", ".join(filter(None, names)).replace("\n", " ")}
            for line, label in zip(panel.lines, owners(panel.lines), strict=True):
                bounds = zip(*line.bounds[:2], strict=True) if line.bounds else repeat((None, None))
                for x, y, (low, high) in zip(line.x, line.y, bounds, strict=False):
                    yield where | {
                        "series": label,
                        "x": _named(panel.x, x),
                        "y": _named(panel.y, y),
                        "low": None if low is None else short_number(low),
                        "high": None if high is None else short_number(high),
                    }
            for box in (box for box in panel.boxes if box.is_bar):
                x, y, x2, y2 = numbers(box.corners)
                yield where | {"series": box.label, "x": x, "x2": x2, "y": y, "y2": y2}
            for matrix in panel.matrices:
                for (row, column), value in np.ndenumerate(matrix.values):
                    x, y = _named(panel.x, matrix.x[column]), _named(panel.y, matrix.y[row])
                    yield where | {"x": x, "y": y, "value": short_number(value)}


def _named(scale: Scale, value: Any) -> str | float | None:
    """The name of a position, if it has one, or the number."""
    return scale.names.get(float(value)) or short_number(value)


def owners(lines: Sequence[Line]) -> list[str]:
    """The label of each line; points without one have that of points that look alike."""
    of_style = {(line.colour, line.shape): line.label for line in lines if line.label}
    return [
        line.label or (of_style.get((line.colour, line.shape), "") if line.dash is None else "")
        for line in lines
    ]


def short_number(value: float) -> float | None:
    """A number with six significant digits; None for NaN."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def numbers(values: Any) -> list[float | None]:
    """Numbers with six significant digits each; None for NaN."""
    return [short_number(value) for value in np.asarray(values, dtype=float).tolist()]
