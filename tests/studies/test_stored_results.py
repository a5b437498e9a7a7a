"""Stored results follow the schema, and pages say what they hold."""

import functools
import json
import re
from copy import copy
from fnmatch import fnmatchcase
from io import StringIO
from pathlib import Path

import netCDF4
import pytest
import xarray as xr
from rich.console import Console
from rich.measure import Measurement

from studies.engine import read_result
from studies.engine.command import FILE_WIDTH
from studies.engine.execution import chosen_cells
from studies.engine.paper_claims import read_claims
from studies.engine.results import config_of, load_tree
from studies.ledger import (
    DATA,
    OVERVIEWS,
    PAGE,
    README,
    TEMPLATES,
    judged,
    make_ledger,
    make_pages,
    overview,
    result_files,
    summarize,
)
from studies.report import page
from studies.report.ledger import ledger_page
from studies.report.pages import loose_words
from studies.report.verdicts import render_claims
from tests.contracts.test_studies import STUDIES
from tests.studies import browser as browsing

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "studies" / "results"
BY_NAME = {one.values[0].name: one.values[0] for one in STUDIES}


def relative(path):
    return str(path.relative_to(RESULTS))


@functools.cache
def stored_in(path):
    """The result in a file, which is read once for all tests that do not change it."""
    return read_result(path)


FILES = result_files()


@functools.cache
def study_of(path):
    """The study of a stored result, of which no more is read: tests are collected by it."""
    with netCDF4.Dataset(path) as file:
        return BY_NAME[file.getncattr("study")]


@functools.cache
def largest_of_each_study():
    """Of the results of each study the largest file: its page has most to hold."""
    by_size = sorted(FILES, key=lambda path: path.stat().st_size)
    return sorted({study_of(path).name: path for path in by_size}.values())


OF_ALL = {PAGE, *(template.name for template in OVERVIEWS)}
PAGES = sorted(page for page in RESULTS.glob("*.md") if page.name not in OF_ALL)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_results_follow_the_schema(path):
    result = stored_in(path)
    assert "+changes" not in result.attrs["git_commits_of_training"]
    assert "/" not in result.attrs["command"]


@functools.cache
def table_of(path):
    """The table of a stored result, rendered once for all tests."""
    return study_of(path).table.render(stored_in(path))


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_no_word_of_a_caption_is_lost(path):
    for table in (table_of(path), render_claims(stored_in(path))):
        if table is not None:
            stream = StringIO()
            Console(width=FILE_WIDTH, file=stream).print(table)
            words = str(table.caption).split()
            assert stream.getvalue().split()[-len(words) :] == words


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_the_table_of_a_result_is_on_its_page(path):
    stream, table = StringIO(), copy(table_of(path))
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


@functools.cache
def views_to_draw():
    """The names of the views to draw of each result.

    Of the largest result of a study these are all. Each other view whose picture is stored is drawn
    of the smallest file that has it.
    """
    drawn = {path: list(study_of(path).views) for path in FILES}
    seen = set()
    for path in sorted(FILES, key=lambda path: path.stat().st_size):
        if path in largest_of_each_study():
            continue
        study = study_of(path).name
        pictures = {picture.stem for picture in path.parent.glob("*.png")}
        stored = [name for name in drawn[path] if pictures & {name, f"{path.stem}_{name}"}]
        drawn[path] = [name for name in stored if (study, name) not in seen]
        seen |= {(study, name) for name in stored}
    return drawn


@functools.cache
def exhibits_of(path):
    """The figures of a stored result, and whether they have arrows, drawn once for all tests."""
    result, exhibits = stored_in(path), []
    for name in views_to_draw()[path]:
        figure = study_of(path).views[name](result)
        assert figure is None or figure.axes, name
        if figure is not None:
            # Not `findobj`, which makes every tick.
            texts = [text for axes in figure.axes for text in axes.texts]
            has_arrows = any(getattr(text, "arrow_patch", None) is not None for text in texts)
            exhibits.append((page.exhibit(name, figure), has_arrows))
    return exhibits


@pytest.mark.parametrize("path", [path for path in FILES if views_to_draw()[path]], ids=relative)
def test_figures_can_be_drawn_again(path):
    for exhibit, has_arrows in exhibits_of(path):
        # What is neither line, point, bar nor matrix is an image: a graph only if it has reads.
        is_image = exhibit.name == "pictures" or has_arrows
        assert not has_arrows or exhibit.name in ("graphs_gate", "graphs_change")
        assert (exhibit.spec is None) == bool(exhibit.image) == is_image, exhibit.name
        assert bool(exhibit.numbers) != is_image


@pytest.fixture(scope="module")
def browser():
    yield from browsing.start()


@pytest.mark.parametrize("path", largest_of_each_study(), ids=relative)
def test_the_page_of_a_result_works(browser, path, tmp_path):
    result = stored_in(path)
    study, file = study_of(path), tmp_path / "report.html"
    exhibits = [exhibit for exhibit, _ in exhibits_of(path)]
    text = page.report(result, study, exhibits, path.name)
    assert "too large for this page" not in text
    file.write_text(text, encoding="utf-8")
    with browsing.opened(browser, file) as opened:
        of_figures = opened.locator("[data-chart^='figure-']")
        assert of_figures.count() == sum(one.spec is not None for one in exhibits)
        first = opened.locator("[data-chart]").first
        browsing.draw(opened, first)
        if opened.locator("[data-chart^='example-']").count():
            before = browsing.picture(first)
            sliders = first.locator("input[type=range]")
            if sliders.count():
                sliders.first.fill("1")
            else:
                first.locator("select:has(option + option)").first.select_option(index=1)
            assert browsing.picture(first) != before


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_and_files_name_one_another(page):
    named = set(re.findall(rf"\]\({page.stem}/([\w.]+)\)", page.read_text()))
    assert named == {path.name for path in (RESULTS / page.stem).iterdir()}


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_verdicts_and_settings_are_those_of_the_present_study(path):
    stored = stored_in(path)
    new = judged(stored)
    for name in ("fairness", "claims", "summary"):
        xr.testing.assert_allclose(new[name].to_dataset(), stored[name].to_dataset())
    assert config_of(new) == config_of(stored)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_tuned_settings_are_chosen_by_the_present_rule(path):
    stored = stored_in(path)
    groups = {name: stored[name].to_dataset() for name in ("scores", "training")}
    chosen = chosen_cells(groups, json.loads(stored.attrs["axes"]))
    assert chosen.tolist() == groups["scores"]["chosen"].to_numpy().tolist()


def test_the_ledger_is_that_of_the_stored_results():
    stored = load_tree(RESULTS / DATA)
    made, _ = make_ledger({relative(path): stored_in(path) for path in FILES})
    assert set(made.children) == set(stored.children)
    for name, group in made.children.items():
        xr.testing.assert_allclose(group.to_dataset(), stored[name].to_dataset())
    citations = {name: paper.citation for name, paper in read_claims().items()}
    assert ledger_page(stored, citations) == (RESULTS / PAGE).read_text()


def test_pages_are_what_their_templates_make_of_results():
    results = {relative(path): stored_in(path) for path in FILES}
    for name, text in make_pages(results).items():
        assert (RESULTS / name).read_text() == text, name
    data, readme = load_tree(RESULTS / DATA), README.read_text()
    for template in OVERVIEWS:
        assert overview(template, data, results) == (RESULTS / template.name).read_text()
    assert summarize(readme, data, results) == readme


@pytest.mark.parametrize(
    "template", sorted(TEMPLATES.glob("*.md")), ids=lambda template: template.name
)
def test_pages_have_no_numbers_and_verdicts_of_their_own(template):
    assert loose_words(template.read_text()) == []


STATEMENTS = {name: [claim.statement for claim in one.claims] for name, one in BY_NAME.items()}


@pytest.mark.parametrize(
    "claim",
    [
        pytest.param(claim, id=claim.id)
        for paper in read_claims().values()
        for claim in paper.claims
    ],
)
def test_what_decides_a_claim_is_claimed_by_a_study(claim):
    for study, patterns in claim.decided_by.items():
        for pattern in patterns:
            assert any(fnmatchcase(statement, pattern) for statement in STATEMENTS[study]), pattern
    statements = [one for study in claim.decided_by for one in STATEMENTS[study]]
    for pattern in claim.some:
        assert any(fnmatchcase(statement, pattern) for statement in statements), pattern


def test_the_papers_have_89_claims():
    claims = {(name, claim.id) for name, paper in read_claims().items() for claim in paper.claims}
    assert len(claims) == sum(len(paper.claims) for paper in read_claims().values()) == 89
