"""Collects what the benchmarks measure into one table, `tests/benchmarks/table.md`."""

import os
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

TABLE = Path(__file__).with_name("table.md")

# The tests' own configuration keeps to one thread; speed is measured on all cores.
torch.set_num_threads(os.cpu_count() or 1)


@dataclass(frozen=True)
class Row:
    what: str
    measured: str
    wanted: str


@pytest.fixture(scope="session")
def rows():
    """Benchmarks append their rows; those of a file replace its section of the table at the end."""
    collected: dict[str, list[Row]] = {}
    yield collected
    sections = read_sections(TABLE.read_text()) if TABLE.exists() else {}
    about = f"{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, {platform.machine()}, "
    about += f"{torch.get_num_threads()} threads."
    for name, measured in collected.items():
        lines = [about, "", "| what | measured | wanted |", "|---|---|---|"]
        lines += [f"| {row.what} | {row.measured} | {row.wanted} |" for row in measured]
        sections[name] = "\n".join(lines)
    parts = [f"## {name}\n\n{sections[name]}\n" for name in sorted(sections)]
    TABLE.write_text("\n".join(["Written by `make bench`.\n", *parts]))


def read_sections(text: str) -> dict[str, str]:
    """The table's sections, by the names of the files that they are of."""
    parts = (part.partition("\n") for part in text.split("## ")[1:])
    return {name: body.strip() for name, _, body in parts}


@pytest.fixture
def record(rows, request):
    mine = rows.setdefault(request.path.stem, [])

    def record(what: str, measured: str, wanted: str = ""):
        mine.append(Row(what, measured, wanted))
        print(f"{what}: {measured} ({wanted})")

    return record
