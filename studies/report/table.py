"""The closing table of a study: readings of every condition, over seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import xarray as xr
from rich.box import SIMPLE
from rich.table import Table as RichTable

import probes
from studies.engine.readings import Reading, conditions_of, varied
from studies.engine.results import cell_coordinates, described

MOST_ROWS = 60
"""Conditions that are shown; all are in the result's group `summary`."""

STATISTICS = {
    "mean": "mean over seeds",
    "low": "lower 95% bound of the mean over seeds (Student's t)",
    "high": "upper 95% bound of the mean over seeds (Student's t)",
    "least": "least of all seeds",
    "greatest": "greatest of all seeds",
    "example_low": "lower 95% bound over examples, of a single seed",
    "example_high": "upper 95% bound over examples, of a single seed",
    "n_seeds": "seeds",
}
"""The variables of the group `summary`, [condition, reading]."""

BRACKETS = {
    1: ("One seed; brackets: 95% intervals over examples.", "example_low", "example_high"),
    2: ("Means over two seeds; brackets: both of them.", "least", "greatest"),
}
"""What brackets hold, in words and as statistics, where seeds are few."""


def percent(value: float) -> str:
    """A share in percent, with one digit; 100 without."""
    text = f"{100 * value:.1f}"
    return "100" if text == "100.0" else text


def short(value: float) -> str:
    """Two digits, without needless zeros."""
    if value and abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:.2g}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.3g}"


def count(value: float) -> str:
    """A whole number, with commas."""
    return f"{value:,.0f}"


@dataclass(frozen=True)
class Row:
    """What is shown of each condition.

    Args:
        label: what it is; with the section's title unlike all others.
        reading: a number for each cell.
        shown: how numbers are written.
        spread: whether the interval is shown.
        beside: readings that have columns of their own, without intervals: of the mean over all
            conditions; or, where conditions are rows, of each.
    """

    label: str
    reading: Reading
    shown: Callable[[float], str] = percent
    spread: bool = True
    beside: Mapping[str, Reading] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """A line between rows, perhaps with a title."""

    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """What a study prints at its end.

    Args:
        title: above the table.
        rows: readings and sections.
        caption: what the rows are.
        conditions: whether conditions are `columns`, or `rows` with readings as columns.
    """

    title: str
    rows: tuple[Row | Section, ...]
    caption: str = ""
    conditions: Literal["columns", "rows"] = "columns"

    def readings(self) -> dict[str, tuple[Row, Reading]]:
        """All readings, those beside included, by the names that the summary has for them.

        Raises:
            ValueError: two have the same name.
        """
        found: dict[str, tuple[Row, Reading]] = {}
        for name, row in self._named_rows():
            if isinstance(row, Section):
                continue
            rows = {name: row} | {
                f"{name} | {column}": Row(f"{row.label}, {column}", one, row.shown, spread=False)
                for column, one in row.beside.items()
            }
            for key, one in rows.items():
                if key in found:
                    raise ValueError(f"rows must have different labels, got {key!r} twice")
                found[key] = (one, one.reading)
        return found

    def summary(self, result: xr.DataTree) -> xr.Dataset:
        """`STATISTICS` of every reading of every condition, [condition, reading]."""
        conditions, readings = conditions_of(result), self.readings()
        shape = (len(conditions), len(readings))
        found = {name: np.full(shape, np.nan) for name in STATISTICS}
        for column, (_, reading) in enumerate(readings.values()):
            values = reading.values(result)
            bounds = reading.bounds(result) if reading.bounds is not None else None
            for row, one in enumerate(conditions):
                for name, value in _statistics(values, bounds, one.cells).items():
                    found[name][row, column] = value
        data = {name: (about, found[name]) for name, about in STATISTICS.items()}
        coords = {"reading": list(readings), "condition": np.arange(len(conditions))}
        for name, (_, values) in cell_coordinates([one.values for one in conditions]).items():
            coords[name] = ("condition", values)
        return xr.Dataset(described(("condition", "reading"), data), coords)

    def render(self, result: xr.DataTree) -> RichTable:
        """The table, from a result's summary."""
        summary, shown = result["summary"].to_dataset(), varied(result)
        most = int(summary["n_seeds"].max())
        words = f"Means over {most} seeds; brackets: their 95% intervals (Student's t)."
        caption = f"{self.caption} {BRACKETS[most][0] if most in BRACKETS else words}".strip()
        table = RichTable(title=self.title, caption=caption, caption_justify="left", box=SIMPLE)
        fill, between = self._fill_columns, "\n"
        if self.conditions == "rows":
            fill, between = self._fill_rows, ", "
        fill(table, summary, [between.join(one.words(shown)) for one in conditions_of(result)])
        return table

    def _named_rows(self) -> Iterator[tuple[str, Row | Section]]:
        """Rows with the names that the summary has for them, and sections."""
        title = ""
        for row in self.rows:
            if isinstance(row, Section):
                title = row.title or title
                yield title, row
            else:
                label = row.label.replace("\n", " ").strip()
                yield f"{title}: {label}" if title else label, row

    def _fill_columns(self, table: RichTable, summary: xr.Dataset, headings: list[str]) -> None:
        beside = dict.fromkeys(c for row in self.rows if isinstance(row, Row) for c in row.beside)
        table.add_column("")
        for heading in (*headings, *beside):
            table.add_column(heading, justify="right")
        for name, row in self._named_rows():
            if isinstance(row, Section):
                table.add_section()
                if row.title:
                    table.add_row(row.title)
                continue
            cells = _cells(summary, name, row)
            for column in beside:
                mean = np.nan
                if column in row.beside:
                    mean = summary["mean"].sel(reading=f"{name} | {column}").mean().item()
                cells.append(row.shown(mean) if np.isfinite(mean) else "")
            if any(cells):
                table.add_row(row.label, *cells)

    def _fill_rows(self, table: RichTable, summary: xr.Dataset, headings: list[str]) -> None:
        table.padding = (0, 1, 0, 0)
        table.add_column("", min_width=13)
        columns = [headings]
        for name, (row, _) in self.readings().items():
            cells = _cells(summary, name, row, between="\n")
            if any(cells):
                table.add_column(row.label, justify="right", overflow="fold")
                columns.append(cells)
        for cells in list(zip(*columns, strict=True))[:MOST_ROWS]:
            table.add_row(*cells)
        if len(headings) > MOST_ROWS:
            table.add_row("... (all are in result.nc, group summary)")


def _statistics(values: np.ndarray, bounds: Any, cells: np.ndarray) -> dict[str, float]:
    """Those `STATISTICS` of a condition that are known."""
    known = values[cells][np.isfinite(values[cells])]
    if len(known) == 0:
        return {"n_seeds": 0}
    mean, low, high = probes.over_seeds(known)
    found = {"mean": mean, "low": low, "high": high, "n_seeds": len(known)}
    found |= {"least": known.min(), "greatest": known.max()}
    if bounds is not None and len(cells) == 1:
        found["example_low"], found["example_high"] = (end[cells[0]] for end in bounds)
    return found


def _cells(summary: xr.Dataset, name: str, row: Row, between: str = " ") -> list[str]:
    """What is shown of a reading, for each condition."""
    cells = []
    for one in summary.sel(reading=name)[list(STATISTICS)].to_dataframe().to_dict("records"):
        _, *names = BRACKETS.get(one["n_seeds"], ("", "low", "high"))
        ends = [one[end] for end in names]
        text = row.shown(one["mean"]) if np.isfinite(one["mean"]) else ""
        if text and row.spread and np.isfinite(ends).all():
            whole = row.shown is percent
            low, high = (f"{100 * end:.0f}" if whole else row.shown(end) for end in ends)
            text += f"{between}[{low}-{high}]"
        cells.append(text)
    return cells
