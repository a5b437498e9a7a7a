"""The tables in the README and on the results page are those of the result files beside it."""

from io import StringIO
from pathlib import Path

import pytest
import xarray as xr
from rich.console import Console

from studies.raven_latent_code import closing_table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "studies" / "results"


@pytest.mark.parametrize(
    ("page", "name"),
    [
        (ROOT / "README.md", "result.nc"),
        (RESULTS / "raven_latent_code.md", "result.nc"),
        (RESULTS / "raven_latent_code.md", "split_of_seed_0.nc"),
    ],
)
def test_the_table_is_that_of_the_result(page, name):
    stream = StringIO()
    with xr.open_datatree(RESULTS / "raven_latent_code" / name, engine="h5netcdf") as result:
        Console(width=80, file=stream).print(closing_table(result))
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    rows = [line for line in lines if "[" in line]
    assert len(rows) == 9
    text = page.read_text()
    for row in rows:
        assert row in text
