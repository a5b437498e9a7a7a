"""The ledger: judges stored results, and writes what they say about every claim of the papers.

    python -m studies.ledger
    python -m studies.ledger --results FOLDER

Verdicts in result files are made anew where claims have changed since, and settings that were added
since are filled in. The page `claims.md` and the data `claims.nc` are then written beside them, and
the pages that have templates in `studies/pages`: `NAME.md` from the result files in the folder
`NAME`, `findings.md` and `summary.md` from all of them and the ledger, and from `readme.md` a part
of the README.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
import xarray as xr

from studies.engine import RunError, SchemaError, read_result
from studies.engine.command import FILE_WIDTH, exit_on
from studies.engine.folders import write_atomically
from studies.engine.ledger import ledger
from studies.engine.paper_claims import read_claims
from studies.engine.remedies import remedies_of
from studies.engine.results import config_of, make_result, write_result
from studies.engine.settings import plain
from studies.engine.zoo import setup_of
from studies.report.ledger import ledger_page
from studies.report.pages import render_page
from studies.zoo import all_studies

RESULTS = Path(__file__).parent / "results"
"""The folder of stored results."""

PAGE, DATA = "claims.md", "claims.nc"

TEMPLATES = Path(__file__).parent / "pages"
"""The folder of templates of pages."""

OVERVIEWS = tuple(TEMPLATES / name for name in ("findings.md", "summary.md"))
"""The templates of the pages about all studies."""

IN_README = TEMPLATES / "readme.md"
"""The template of a part of the README."""

README = Path(__file__).parents[1] / "README.md"
START, END = "<!-- from studies/pages/readme.md -->\n", "<!-- end -->\n"
"""What the part of the README is between."""


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
    """A result with the present settings and verdicts by the present claims of its study.

    Settings that were added since have their defaults.

    Raises:
        ValueError: its study is not one of this package.
        RunError: its study no longer has all of its settings.
    """
    studies, name = all_studies(), result.attrs["study"]
    if name not in studies:
        raise ValueError(f"study must be one of {', '.join(studies)}, got {name!r}")
    groups = {group.path.strip("/"): group.to_dataset() for group in result.subtree}
    groups |= studies[name].judge(result)
    config = config_of(result)
    config["setup"] = plain(setup_of(config["setup"], studies[name]))
    attrs = result.attrs | {"config": json.dumps(config)}
    return make_result({path: data for path, data in groups.items() if path}, attrs)


def make_ledger(files: Mapping[str, xr.DataTree]) -> tuple[xr.DataTree, str]:
    """The ledger of results, by the names of their files, and its page."""
    remedies = dict(remedies_of(all_studies(), files.values()))
    data = ledger(files, read_claims(), remedies)
    return data, ledger_page(data, {name: of.citation for name, of in read_claims().items()})


def make_pages(files: Mapping[str, xr.DataTree]) -> Mapping[str, str]:
    """The pages with templates whose results are there, by name.

    Args:
        files: results by the names of their files, in folders with the names of pages.

    Raises:
        ValueError, KeyError: a template has what is in no result (see `render_page`).
    """
    pages = {}
    for template in sorted(set(TEMPLATES.glob("*.md")) - {*OVERVIEWS, IN_README}):
        folder = f"{template.stem}/"
        own = {
            name.removeprefix(folder): of for name, of in files.items() if name.startswith(folder)
        }
        if own:
            pages[template.name] = render_page(template.read_text(), own, all_studies(), FILE_WIDTH)
    return pages


def overview(template: Path, data: xr.DataTree, files: Mapping[str, xr.DataTree]) -> str:
    """The text that a template makes of the ledger and all results."""
    return render_page(template.read_text(), {DATA: data, **files}, all_studies(), FILE_WIDTH)


def summarize(readme: str, data: xr.DataTree, files: Mapping[str, xr.DataTree]) -> str:
    """The README with what the ledger and the results say, between `START` and `END`."""
    before, rest = readme.split(START)
    _, after = rest.split(END, 1)
    return "".join((before, START, overview(IN_README, data, files), END, after))


def _rounded(result: xr.DataTree) -> xr.DataTree:
    """A result in single precision: last digits differ from one processor to the next."""

    def single(values: xr.DataArray) -> xr.DataArray:
        return values.astype("float32") if values.dtype.kind == "f" else values

    return result.map_over_datasets(lambda data: data.map(single, keep_attrs=True))


def main(
    results: Annotated[Path, typer.Option(help="folder of result files")] = RESULTS,
) -> None:
    """Judge stored results, and write the ledger of claims beside them."""
    with exit_on(ValueError, RunError, SchemaError):
        files = {}
        for path in result_files(results):
            stored = read_result(path)
            new = judged(stored)
            if _rounded(new).identical(_rounded(stored)):
                new = stored
            else:
                write_result(new, path)
            files[str(path.relative_to(results))] = new
        data, page = make_ledger(files)
        write_result(data, results / DATA)
        pages = {results / PAGE: page}
        pages |= {results / name: text for name, text in make_pages(files).items()}
        if results.resolve() == RESULTS.resolve():
            pages |= {results / one.name: overview(one, data, files) for one in OVERVIEWS}
            pages[README] = summarize(README.read_text(), data, files)
        for path, text in pages.items():
            write_atomically(path, lambda to, text=text: to.write_text(text))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
