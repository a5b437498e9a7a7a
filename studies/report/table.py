"""The closing table of a study: readings of every condition, over seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xarray as xr

import probes
from studies.engine.readings import Reading, conditions_of, varied
from studies.report.names import setting_name

if TYPE_CHECKING:
    from rich.table import Table as RichTable

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
        beside: readings whose mean over all conditions is shown in a column of its own.
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
        title = ""
        for row in self.rows:
            if isinstance(row, Section):
                title = row.title or title
                continue
            label = row.label.replace("\n", " ").strip()
            name = f"{title}: {label}" if title else label
            beside = {f"{name} | {column}": one for column, one in row.beside.items()}
            for key, reading in ({name: row.reading} | beside).items():
                if key in found:
                    raise ValueError(f"rows must have different labels, got {key!r} twice")
                found[key] = (row, reading)
        return found

    def summary(self, result: xr.DataTree) -> xr.Dataset:
        """`STATISTICS` of every reading of every condition, [condition, reading]."""
        conditions, readings = conditions_of(result), self.readings()
        shape = (len(conditions), len(readings))
        data = {name: np.full(shape, np.nan) for name in STATISTICS}
        for column, (_, reading) in enumerate(readings.values()):
            values = reading.values(result)
            bounds = reading.bounds(result) if reading.bounds is not None else None
            for row, one in enumerate(conditions):
                here = values[one.cells]
                known = here[np.isfinite(here)]
                data["n_seeds"][row, column] = len(known)
                if len(known) == 0:
                    continue
                over = probes.over_seeds(known)
                for name, value in (
                    ("mean", over.estimate),
                    ("low", over.low),
                    ("high", over.high),
                    ("least", known.min()),
                    ("greatest", known.max()),
                ):
                    data[name][row, column] = value
                if bounds is not None and len(one.cells) == 1:
                    data["example_low"][row, column] = bounds[0][one.cells[0]]
                    data["example_high"][row, column] = bounds[1][one.cells[0]]
        dims = ("condition", "reading")
        coordinates = {
            name: ("condition", _file_values([one.values[name] for one in conditions]))
            for name in conditions[0].values
        }
        return xr.Dataset(
            {name: (dims, data[name], {"long_name": about}) for name, about in STATISTICS.items()},
            coords={"reading": list(readings), "condition": np.arange(len(conditions))}
            | coordinates,
        )

    def render(self, result: xr.DataTree) -> RichTable:
        """The table, from a result's summary."""
        from rich.box import SIMPLE
        from rich.table import Table as RichTable

        table = RichTable(
            title=self.title, caption=f"{self.caption} {_spread_in_words(result)}".strip()
        )
        table.box, table.caption_justify = SIMPLE, "left"
        summary = result["summary"].to_dataset()
        headings = [_heading(values, varied(result)) for values in _condition_values(summary)]
        if self.conditions == "columns":
            self._fill_columns(table, summary, headings)
        else:
            self._fill_rows(table, summary, headings)
        return table

    def _fill_columns(self, table: RichTable, summary: xr.Dataset, headings: list[str]) -> None:
        beside = dict.fromkeys(n for r in self.rows if isinstance(r, Row) for n in r.beside)
        table.add_column("")
        for heading in (*headings, *beside):
            table.add_column(heading, justify="right")
        names = iter(name for name in self.readings() if " | " not in name)
        for row in self.rows:
            if isinstance(row, Section):
                table.add_section()
                if row.title:
                    table.add_row(row.title)
                continue
            name = next(names)
            one = summary.sel(reading=name)
            cells = [_cell(one.isel(condition=n), row) for n in range(len(headings))]
            for column in beside:
                mean = np.nan
                if column in row.beside:
                    values = summary["mean"].sel(reading=f"{name} | {column}").to_numpy()
                    mean = np.nanmean(values) if np.isfinite(values).any() else np.nan
                cells.append(row.shown(float(mean)) if np.isfinite(mean) else "")
            if any(cells):
                table.add_row(row.label, *cells)

    def _fill_rows(self, table: RichTable, summary: xr.Dataset, headings: list[str]) -> None:
        table.padding = (0, 1, 0, 0)
        table.add_column("", min_width=13)
        shown = {}
        for name, (row, _) in self.readings().items():
            if " | " not in name and np.isfinite(summary["mean"].sel(reading=name)).any():
                shown[name] = row
                table.add_column(row.label, justify="right", no_wrap=True)
        for number, heading in enumerate(headings[:MOST_ROWS]):
            one = summary.isel(condition=number)
            cells = [_cell(one.sel(reading=name), row, "\n") for name, row in shown.items()]
            table.add_row(heading, *cells)
        if len(headings) > MOST_ROWS:
            table.add_row("... (all are in result.nc, group summary)")


def _cell(one: xr.Dataset, row: Row, between: str = " ") -> str:
    mean, n_seeds = one["mean"].item(), one["n_seeds"].item()
    if not np.isfinite(mean):
        return ""
    names = ("low", "high") if n_seeds >= 3 else ("least", "greatest")
    if n_seeds == 1:
        names = ("example_low", "example_high")
    low, high = (one[name].item() for name in names)
    if not row.spread or not (np.isfinite(low) and np.isfinite(high)):
        return row.shown(mean)
    ends = [f"{100 * end:.0f}" if row.shown is percent else row.shown(end) for end in (low, high)]
    return f"{row.shown(mean)}{between}[{ends[0]}-{ends[1]}]"


def _spread_in_words(result: xr.DataTree) -> str:
    most = int(np.nanmax(result["summary"]["n_seeds"].to_numpy()))
    if most == 1:
        return "One seed; brackets: 95% intervals over examples."
    if most == 2:
        return "Means over two seeds; brackets: both of them."
    return f"Means over {most} seeds; brackets: their 95% intervals (Student's t)."


def _condition_values(summary: xr.Dataset) -> list[dict[str, Any]]:
    names = [name for name in summary.coords if summary[name].dims == ("condition",)]
    names.remove("condition")
    return [
        {str(name): summary[name].to_numpy()[number].item() for name in names}
        for number in range(summary.sizes["condition"])
    ]


def _heading(values: Mapping[str, Any], shown: list[str]) -> str:
    parts = []
    for name in shown:
        value = values[name]
        if value == "" or value != value:
            continue
        parts.append(setting_name(name, value))
    return "\n".join(filter(None, parts))


def _file_values(values: list[Any]) -> list[Any]:
    """For a file, what does not apply is NaN, or among text an empty string."""
    missing = "" if any(isinstance(value, str) for value in values) else np.nan
    return [missing if value is None else value for value in values]
