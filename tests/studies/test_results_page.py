"""The tables in the README and on the results pages are those of the result files beside them."""

from io import StringIO
from pathlib import Path

import pytest
import xarray as xr
from rich.console import Console

from studies import (
    compositional_benchmarks,
    language_modelling,
)

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "studies" / "results"

# The pages of these tell once what the caption says under every table.
WITHOUT_CAPTION = (
    compositional_benchmarks,
    language_modelling,
)


def results_without_caption():
    for study in WITHOUT_CAPTION:
        name = study.__name__.removeprefix("studies.")
        for result in sorted((RESULTS / name).glob("*.nc")):
            yield pytest.param(result, study, id=f"{name}/{result.stem}")


@pytest.mark.parametrize(("result", "study"), list(results_without_caption()))
def test_all_tables_of_a_page_are_those_of_its_results(result, study):
    stream = StringIO()
    with xr.open_datatree(result, engine="h5netcdf") as tree:
        table = study.closing_table(tree)
        table.caption = None
        Console(width=80, file=stream).print(table)
    rows = [line.rstrip() for line in stream.getvalue().splitlines() if any(map(str.isdigit, line))]
    assert len(rows) > 1
    for row in rows:
        assert row in result.parent.with_suffix(".md").read_text()
