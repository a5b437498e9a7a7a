"""The tables in the README and on the results page are those of the result file beside it."""

from io import StringIO
from pathlib import Path

import pytest
import xarray as xr
from rich.console import Console

from studies.raven_latent_code import closing_table

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["README.md", "studies/results/raven_latent_code.md"])
def test_the_table_is_that_of_the_result(page):
    place = ROOT / "studies" / "results" / "raven_latent_code" / "result.nc"
    with xr.open_datatree(place, engine="h5netcdf") as result:
        console = Console(width=80, file=StringIO())
        console.print(closing_table(result))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    rows = [line for line in lines if "[" in line and "Brackets" not in line]
    assert len(rows) == 9
    text = (ROOT / page).read_text()
    for row in rows:
        assert row in text
