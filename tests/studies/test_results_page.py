"""The tables in the README and on the results pages are those of the result files beside them."""

from io import StringIO
from pathlib import Path

import pytest
import xarray as xr
from rich.console import Console

from studies import (
    compositional_benchmarks,
    language_modelling,
    modular_routing,
    ndr_control_flow,
)

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "studies" / "results"
NDR = RESULTS / "ndr_control_flow"
ROUTING = RESULTS / "modular_routing"

# The pages of these tell once what the caption says under every table.
WITHOUT_CAPTION = (
    compositional_benchmarks,
    language_modelling,
)


@pytest.mark.parametrize(
    ("page", "result", "study"),
    [
        (ROOT / "README.md", NDR / "result.nc", ndr_control_flow),
        (RESULTS / "ndr_control_flow.md", NDR / "result.nc", ndr_control_flow),
        (RESULTS / "ndr_control_flow.md", NDR / "near_mark.nc", ndr_control_flow),
        (ROOT / "README.md", ROUTING / "result.nc", modular_routing),
        (RESULTS / "modular_routing.md", ROUTING / "result.nc", modular_routing),
        (RESULTS / "modular_routing.md", ROUTING / "learning_rate.nc", modular_routing),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
def test_the_table_is_that_of_the_result(page, result, study):
    stream = StringIO()
    with xr.open_datatree(result, engine="h5netcdf") as tree:
        Console(width=80, file=stream).print(study.closing_table(tree))
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    # Those with numbers.
    rows = [line for line in lines if any(sign.isdigit() for sign in line)]
    assert len(rows) > 5
    text = page.read_text()
    for row in rows:
        assert row in text


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


@pytest.mark.parametrize(
    ("result", "beginnings"),
    [
        ("selection.nc", ("The selection bottleneck raises", "All paths lower")),
        ("operators.nc", ("OOD loss falls",)),
        ("functional.nc", ("Functional bottlenecks", "Without functional bottleneck")),
        ("one_layer.nc", ("With one layer",)),
    ],
)
def test_further_claims_are_those_of_their_results(result, beginnings):
    text = (RESULTS / "modular_routing.md").read_text()
    with xr.open_datatree(ROUTING / result, engine="h5netcdf") as tree:
        claims = tree["claims"].to_dataset().load()
    for beginning in beginnings:
        (claim,) = [one for one in claims["claim"].to_numpy() if str(one).startswith(beginning)]
        one = claims.sel(claim=claim)
        assert f"- {claim}: **{one['verdict'].item()}**. {one['measured'].item()}\n" in text
