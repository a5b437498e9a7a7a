"""Stored results follow the schema, and pages say what they hold."""

from io import StringIO
from pathlib import Path

import pytest
import xarray as xr
from rich.console import Console
from rich.measure import Measurement

from studies.engine import read_result
from studies.engine.command import FILE_WIDTH
from studies.engine.results import SCHEMA_VERSION
from tests.contracts.test_studies import STUDIES

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "studies" / "results"
BY_NAME = {one.values[0].name: one.values[0] for one in STUDIES}


def version(path):
    with xr.open_datatree(path, engine="h5netcdf") as tree:
        return tree.attrs["schema_version"]


def relative(path):
    return str(path.relative_to(RESULTS))


FILES = sorted(RESULTS.rglob("*.nc"))
OLDER = [path for path in FILES if version(path) < SCHEMA_VERSION]
"""Made before there was one schema: their pages say so, and no table is checked against them."""
CURRENT = [path for path in FILES if path not in OLDER]


@pytest.mark.parametrize("path", CURRENT, ids=relative)
def test_results_follow_the_schema(path):
    result = read_result(path)
    assert result.attrs["study"] in BY_NAME
    assert "+changes" not in result.attrs["git_commits_of_training"]


@pytest.mark.parametrize("path", CURRENT, ids=relative)
def test_the_table_of_a_result_is_on_its_page(path):
    result = read_result(path)
    stream = StringIO()
    table = BY_NAME[result.attrs["study"]].table.render(result)
    table.caption = None
    console = Console(width=FILE_WIDTH, file=stream)
    console.print(table)
    # In wider tables columns would be cut off.
    assert Measurement.get(console, console.options, table).minimum <= FILE_WIDTH
    rows = [line.rstrip() for line in stream.getvalue().splitlines() if any(map(str.isdigit, line))]
    assert rows
    text = path.parent.with_suffix(".md").read_text()
    for row in rows:
        assert row in text


@pytest.mark.parametrize("path", CURRENT, ids=relative)
def test_figures_can_be_drawn_again(path):
    result = read_result(path)
    for name, view in BY_NAME[result.attrs["study"]].views.items():
        figure = view(result)
        assert figure is None or figure.axes, name


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*.md")), ids=lambda page: page.name)
def test_pages_say_which_results_are_older(page):
    older = [path for path in OLDER if path.parent.name == page.stem]
    assert ("older than the present studies" in page.read_text()) == bool(older)
