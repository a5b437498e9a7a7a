"""The result table of a study: readings of every condition, summarised over seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import xarray as xr
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table as RichTable

import probes
from studies.engine.readings import Reading, conditions_of, constant, pairs_name, varied
from studies.engine.results import cell_coordinates, described

MOST_ROWS = 60
"""Largest number of conditions shown as rows; the group `summary` of a result has all."""

MOST_COLUMNS = 6
"""Largest number of conditions beside each other; further ones are shown below them."""

MOST_LETTERS = 84
"""Largest width of the longest words of headings beside each other, with the space between."""

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
"""By number of seeds, where they are too few for Student's t: a sentence about what the brackets
in the table show, and the two statistics that they show."""


def percent(value: float) -> str:
    """Format a share in percent, with one decimal: "12.3", but "100"."""
    text = f"{100 * value:.1f}"
    return "100" if text == "100.0" else text


def short(value: float) -> str:
    """Format a number with two significant digits (three from 1 on), without leading zeros."""
    if value and abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:.2g}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.3g}"


def plain_console(**options: Any) -> Console:
    """A console that prints text as it is: in rich's markup `[ood]` is a style, and not shown.

    Args:
        options: further arguments of the console.
    """
    return Console(markup=False, emoji=False, **options)


def count(value: float) -> str:
    """Format a number as an integer with thousands separators: "1,234"."""
    return f"{value:,.0f}"


@dataclass(frozen=True)
class Row:
    """A row of a table: a reading of each condition.

    Args:
        label: name of the row, unique within its section.
        reading: the reading.
        shown: function that formats a number.
        spread: whether intervals are shown.
        beside: further readings by the name of an extra column, shown without intervals: the mean
            over all conditions, or one number per condition where conditions are rows.
        note: sentences in the caption, if the row is shown.

    Example:
        `Row("right, ood", metric("accuracy", "ood"), beside={"chance": constant(0.25)})`
    """

    label: str
    reading: Reading
    shown: Callable[[float], str] = percent
    spread: bool = True
    beside: Mapping[str, Reading] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A line between rows, with an optional title.

    Args:
        title: title above the rows.
        note: sentences in the caption, if a row of the section is shown.
    """

    title: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The table that a study prints at its end.

    Args:
        title: title above the table.
        rows: rows and sections.
        caption: explanation below the table, before the notes of its rows.
        conditions: whether conditions are `columns`, or `rows` (readings are then columns).

    Example:
        `Table(title="Accuracy", rows=(Row("id", metric("accuracy", "id")),))`
    """

    title: str
    rows: tuple[Row | Section, ...]
    caption: str = ""
    conditions: Literal["columns", "rows"] = "columns"

    def readings(self) -> dict[str, tuple[Row, Reading]]:
        """All rows with their readings, including extra columns, by their names in the summary.

        Raises:
            ValueError: two have the same name.
        """
        readings: dict[str, tuple[Row, Reading]] = {}
        for name, row in self._named_rows():
            if isinstance(row, Section):
                continue
            rows = {name: row} | {
                f"{name} | {column}": Row(f"{row.label}, {column}", extra, row.shown, spread=False)
                for column, extra in row.beside.items()
            }
            for key, named_row in rows.items():
                if key in readings:
                    raise ValueError(f"rows must have different labels, got {key!r} twice")
                readings[key] = (named_row, named_row.reading)
        return readings

    def summary(self, result: xr.DataTree) -> xr.Dataset:
        """`STATISTICS` of every reading of every condition, [condition, reading]."""
        conditions, readings = conditions_of(result), self.readings()
        shape = (len(conditions), len(readings))
        statistics = {name: np.full(shape, np.nan) for name in STATISTICS}
        for column, (_, reading) in enumerate(readings.values()):
            values = reading.values(result)
            bounds = reading.bounds(result) if reading.bounds is not None else None
            for row, condition in enumerate(conditions):
                for name, value in _statistics(values, bounds, condition.cells).items():
                    statistics[name][row, column] = value
        data = {name: (long_name, statistics[name]) for name, long_name in STATISTICS.items()}
        coords = {"reading": list(readings), "condition": np.arange(len(conditions))}
        columns = cell_coordinates([condition.values for condition in conditions])
        for name, (_, values) in columns.items():
            coords[name] = ("condition", values)
        return xr.Dataset(described(("condition", "reading"), data), coords)

    def render(self, result: xr.DataTree) -> RichTable:
        """The table as text."""
        # Not the stored summary: older results have that of the rows of their time.
        summary, coordinates = self.summary(result), varied(result)
        about_seeds = self._about_seeds(summary, pairs_name(result))
        notes = dict.fromkeys([self.caption, *self._notes(summary), about_seeds])
        caption = " ".join(filter(None, notes))
        table = RichTable(title=self.title, caption=caption, caption_justify="left", box=SIMPLE)
        fill, separator = self._fill_columns, "\n"
        if self.conditions == "rows":
            fill, separator = self._fill_rows, ", "
        names = [condition.value_names(coordinates) for condition in conditions_of(result)]
        fill(table, summary, [separator.join(parts) for parts in names])
        return table

    def _about_seeds(self, summary: xr.Dataset, pairs: str) -> str:
        """A sentence about what is shown: the mean over how many seeds, and which brackets."""
        n_seeds = summary["n_seeds"]
        n_seeds = n_seeds.where(n_seeds > 0)
        most = n_seeds.max().item()
        if not np.isfinite(most):
            return "Nothing was measured."
        if most in BRACKETS:
            return BRACKETS[int(most)][0]
        up_to = "up to " if n_seeds.min() < most else ""
        sentence = (
            f"Means over {up_to}{most:.0f} {pairs}; brackets: their 95% intervals (Student's t)"
        )
        with_brackets = [name for name, (row, _) in self.readings().items() if row.spread]
        shown = summary.sel(reading=with_brackets)
        if (shown["n_seeds"] == 2).any():
            sentence += ", of two both of them"
        if ((shown["n_seeds"] == 1) & shown["example_low"].notnull()).any():
            sentence += ", of a single one that over examples"
        return f"{sentence}."

    def _named_rows(self) -> Iterator[tuple[str, Row | Section]]:
        """Rows and sections in order; rows with their names in the summary."""
        title = ""
        for row in self.rows:
            if isinstance(row, Section):
                title = row.title or title
                yield title, row
            else:
                label = row.label.replace("\n", " ").strip()
                yield f"{title}: {label}" if title else label, row

    def _notes(self, summary: xr.Dataset) -> Iterator[str]:
        """The notes of rows in which something was measured, and before them of their sections."""
        measured = summary["n_seeds"].any("condition")
        section = Section()
        for name, row in self._named_rows():
            if isinstance(row, Section):
                section = row
            elif measured.sel(reading=[name, *(f"{name} | {key}" for key in row.beside)]).any():
                yield section.note
                yield row.note

    def _fill_columns(self, table: RichTable, summary: xr.Dataset, headings: list[str]) -> None:
        means = {
            (name, column): summary["mean"].sel(reading=f"{name} | {column}").mean().item()
            for name, row in self._named_rows()
            if isinstance(row, Row)
            for column in row.beside
        }
        extra_columns = dict.fromkeys(column for _, column in means)
        longest = max(len(word) for heading in headings for word in heading.split())
        fitting = min(MOST_COLUMNS, MOST_LETTERS // (longest + 2))
        most = max(1, fitting - len(extra_columns))
        width = min(len(headings), most)
        table.add_column("")
        for heading in (*headings[:width], *extra_columns):
            table.add_column(heading, justify="right")
        for start in range(0, len(headings), most):
            block = slice(start, start + most)
            padding = [""] * (width - len(headings[block]))
            if start:
                table.add_section()
                table.add_row("", *headings[block], *padding, *extra_columns, end_section=True)
            self._fill_block(table, summary.isel(condition=block), padding, extra_columns, means)

    def _fill_block(
        self,
        table: RichTable,
        summary: xr.Dataset,
        padding: Sequence[str],
        extra_columns: Iterable[str],
        means: Mapping[tuple[str, str], float],
    ) -> None:
        """Add the rows of some conditions, without those in which nothing was measured."""
        section = None
        for name, row in self._named_rows():
            if isinstance(row, Section):
                section = row
                continue
            cells = [*_cells(summary, name, row), *padding]
            for column in extra_columns:
                mean = means.get((name, column), np.nan)
                cells.append(row.shown(mean) if np.isfinite(mean) else "")
            if not any(cells):
                continue
            # A section without any row is not shown.
            if section is not None:
                table.add_section()
                if section.title:
                    table.add_row(section.title)
                section = None
            table.add_row(row.label, *cells)

    def _fill_rows(self, table: RichTable, summary: xr.Dataset, headings: list[str]) -> None:
        table.padding = (0, 1, 0, 0)
        table.add_column("", min_width=14)
        columns = [headings]
        for name, (row, _) in self.readings().items():
            cells = _cells(summary, name, row, separator="\n")
            if any(cells):
                table.add_column(row.label, justify="right", overflow="fold")
                columns.append(cells)
        for cells in list(zip(*columns, strict=True))[:MOST_ROWS]:
            table.add_row(*cells)
        if len(headings) > MOST_ROWS:
            table.add_row("... (all are in result.nc, group summary)")


def render_summary(result: xr.DataTree) -> RichTable:
    """The stored summary of a result as text, for results whose study is not at hand."""
    summary = result["summary"].to_dataset()
    names = [", ".join(one.value_names(varied(result))) for one in conditions_of(result)]
    table = RichTable("", *names, title=result.attrs["study"].replace("_", " "), box=SIMPLE)
    for reading in summary["reading"].to_numpy():
        cells = _cells(summary, reading, Row("", constant(0), short))
        if any(cells):
            table.add_row(str(reading), *cells)
    return table


def _statistics(values: np.ndarray, bounds: Any, cells: np.ndarray) -> dict[str, float]:
    """The `STATISTICS` of a reading over the cells of a condition, as far as they are defined."""
    finite = values[cells][np.isfinite(values[cells])]
    if len(finite) == 0:
        return {"n_seeds": 0}
    mean, low, high = probes.over_seeds(finite)
    statistics = {"mean": mean, "low": low, "high": high, "n_seeds": len(finite)}
    statistics |= {"least": finite.min(), "greatest": finite.max()}
    if bounds is not None and len(cells) == 1:
        statistics["example_low"], statistics["example_high"] = (
            bound[cells[0]] for bound in bounds
        )
    return statistics


def _cells(summary: xr.Dataset, name: str, row: Row, separator: str = " ") -> list[str]:
    """The table cells of a reading, one for each condition; "" where nothing was measured."""
    cells = []
    column = summary.get_index("reading").get_loc(name)
    of_conditions = [summary[statistic].to_numpy()[:, column] for statistic in STATISTICS]
    for values in zip(*of_conditions, strict=True):
        statistics = dict(zip(STATISTICS, values, strict=True))
        _, *names = BRACKETS.get(statistics["n_seeds"], ("", "low", "high"))
        bounds = [statistics[bound] for bound in names]
        text = row.shown(statistics["mean"]) if np.isfinite(statistics["mean"]) else ""
        if text and row.spread and np.isfinite(bounds).all():
            in_percent = row.shown is percent
            low, high = (
                f"{100 * bound:.0f}" if in_percent else row.shown(bound) for bound in bounds
            )
            text += f"{separator}[{low}; {high}]"
        cells.append(text)
    return cells
