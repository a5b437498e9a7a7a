"""The ledger: judges stored results, and writes what they say about every claim of the papers.

    python -m studies.ledger
    python -m studies.ledger --results FOLDER

Verdicts in result files are made anew where claims have changed since. The page `claims.md` and the
data `claims.nc` are then written beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
import xarray as xr

from studies.engine import RunError, SchemaError, read_result
from studies.engine.command import exit_on
from studies.engine.folders import write_atomically
from studies.engine.ledger import ledger
from studies.engine.paper_claims import read_claims
from studies.engine.results import make_result, write_result
from studies.report.ledger import ledger_page
from studies.zoo import all_studies

RESULTS = Path(__file__).parent / "results"
"""The folder of stored results."""

PAGE, DATA = "claims.md", "claims.nc"


def result_files(folder: Path = RESULTS) -> list[Path]:
    """The result files of studies in a folder.

    Raises:
        ValueError: there are none.
    """
    files = sorted(path for path in folder.rglob("*.nc") if path.name != DATA)
    if not files:
        raise ValueError(f"results must be a folder with result files, got {folder}")
    return files


def judged(result: xr.DataTree) -> xr.DataTree:
    """A result with verdicts by the present claims of its study.

    Raises:
        ValueError: its study is not one of this package.
    """
    studies, name = all_studies(), result.attrs["study"]
    if name not in studies:
        raise ValueError(f"study must be one of {', '.join(studies)}, got {name!r}")
    groups = {group.path.strip("/"): group.to_dataset() for group in result.subtree}
    groups |= studies[name].judge(result)
    return make_result({path: data for path, data in groups.items() if path}, result.attrs)


def make_ledger(files: Mapping[str, xr.DataTree]) -> tuple[xr.DataTree, str]:
    """The ledger of results, by the names of their files, and its page."""
    data = ledger(files, read_claims())
    return data, ledger_page(data, {name: of.citation for name, of in read_claims().items()})


def main(
    results: Annotated[Path, typer.Option(help="folder of result files")] = RESULTS,
) -> None:
    """Judge stored results, and write the ledger of claims beside them."""
    with exit_on(ValueError, RunError, SchemaError):
        files = {}
        for path in result_files(results):
            stored = read_result(path)
            files[str(path.relative_to(results))] = new = judged(stored)
            if not new.equals(stored):
                write_result(new, path)
        data, page = make_ledger(files)
        write_result(data, results / DATA)
        write_atomically(results / PAGE, lambda to: to.write_text(page))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
