"""Tables of what was measured, in Markdown: a section for each file of measurements."""

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch


@dataclass(frozen=True)
class Row:
    what: str
    measured: str
    wanted: str


def collect(table: Path, command: str) -> Iterator[dict[str, list[Row]]]:
    """Rows by the name of their file; at the end they replace its section of the table."""
    collected: dict[str, list[Row]] = {}
    yield collected
    sections = read_sections(table.read_text()) if table.exists() else {}
    about = f"{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, {platform.machine()}, "
    about += f"{os.cpu_count()} cores."
    for name, measured in collected.items():
        if not measured:  # all were skipped, for want of a GPU
            continue
        lines = [about, "", "| what | measured | wanted |", "|---|---|---|"]
        lines += [f"| {row.what} | {row.measured} | {row.wanted} |" for row in measured]
        sections[name] = "\n".join(lines)
    parts = [f"## {name}\n\n{sections[name]}\n" for name in sorted(sections)]
    table.write_text("\n".join([f"Written by `{command}`.\n", *parts]))


def read_sections(text: str) -> dict[str, str]:
    """The table's sections, by the names of the files that they are of."""
    parts = (part.partition("\n") for part in text.split("## ")[1:])
    return {name: body.strip() for name, _, body in parts}


def recorder(rows: dict[str, list[Row]], file: Path) -> Callable[..., None]:
    """A function that appends a row to those of a file, and prints it."""
    mine = rows.setdefault(file.stem, [])

    def record(what: str, measured: str, wanted: str = "") -> None:
        mine.append(Row(what, measured, wanted))
        print(f"{what}: {measured} ({wanted})")

    return record
