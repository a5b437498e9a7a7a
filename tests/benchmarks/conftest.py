"""Collects what the benchmarks measure into one table, `tests/benchmarks/table.md`."""

import os
from pathlib import Path

import pytest
import torch

from tests.tables import collect, recorder

# The tests' own configuration keeps to one thread; speed is measured on all cores.
torch.set_num_threads(os.cpu_count() or 1)


@pytest.fixture(scope="session")
def rows():
    yield from collect(Path(__file__).with_name("table.md"), "make bench")


@pytest.fixture
def record(rows, request):
    return recorder(rows, request.path)
