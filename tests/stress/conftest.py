"""Collects what the stress tests find into one table, `tests/stress/table.md`.

They take long and are not part of `make test`. A share of each can be run:

    STRESS=0.05 make stress
"""

import os
from pathlib import Path

import pytest

from tests.tables import collect, recorder


@pytest.fixture(scope="session")
def rows():
    yield from collect(Path(__file__).with_name("table.md"), "make stress")


@pytest.fixture
def record(rows, request):
    return recorder(rows, request.path)


@pytest.fixture(scope="session")
def share():
    """The share of kills, inputs and minutes to run."""
    return float(os.environ.get("STRESS", "1"))
