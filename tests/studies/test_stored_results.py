"""Stored results follow the schema, and pages say what they hold."""

import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.measure import Measurement

from studies.engine import read_result
from studies.engine.command import FILE_WIDTH
from tests.contracts.test_studies import STUDIES

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "studies" / "results"
BY_NAME = {one.values[0].name: one.values[0] for one in STUDIES}


def relative(path):
    return str(path.relative_to(RESULTS))


FILES = sorted(RESULTS.rglob("*.nc"))


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_results_follow_the_schema(path):
    result = read_result(path)
    assert result.attrs["study"] in BY_NAME
    assert "+changes" not in result.attrs["git_commits_of_training"]
    assert "/" not in result.attrs["command"]


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_the_table_of_a_result_is_on_its_page(path):
    result = read_result(path)
    stream = StringIO()
    table = BY_NAME[result.attrs["study"]].table.render(result)
    table.caption = None
    console = Console(width=FILE_WIDTH, file=stream)
    console.print(table)
    # In wider tables columns would be cut off.
    assert Measurement.get(console, console.options, table).minimum <= FILE_WIDTH
    words = stream.getvalue().split()
    for column in table.columns:
        heading = str(column.header).split()
        assert all(words.count(word) >= heading.count(word) for word in heading), heading
    assert "…" not in stream.getvalue()
    rows = [line.rstrip() for line in stream.getvalue().splitlines() if any(map(str.isdigit, line))]
    assert rows
    text = path.parent.with_suffix(".md").read_text()
    for row in rows:
        assert row in text


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_figures_can_be_drawn_again(path):
    result = read_result(path)
    for name, view in BY_NAME[result.attrs["study"]].views.items():
        figure = view(result)
        assert figure is None or figure.axes, name


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*.md")), ids=lambda page: page.name)
def test_pages_and_files_name_one_another(page):
    named = set(re.findall(rf"\]\({page.stem}/([\w.]+)\)", page.read_text()))
    assert named == {path.name for path in (RESULTS / page.stem).iterdir()}
