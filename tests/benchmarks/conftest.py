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
    """Benchmarks append their rows; the table is written when all have run."""
    collected: list[Row] = []
    yield collected
    head = f"{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, {platform.machine()}, "
    head += f"{torch.get_num_threads()} threads. Written by `make bench`."
    lines = [head, "", "| what | measured | wanted |", "|---|---|---|"]
    lines += [f"| {row.what} | {row.measured} | {row.wanted} |" for row in collected]
    TABLE.write_text("\n".join(lines) + "\n")


@pytest.fixture
def record(rows):
    def record(what: str, measured: str, wanted: str = ""):
        rows.append(Row(what, measured, wanted))
        print(f"{what}: {measured} ({wanted})")

    return record
