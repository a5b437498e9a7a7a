"""Pages say what results hold, in one file, and work in a browser."""

import csv
import functools
import io
import itertools
import sys
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

from studies.engine import Claim, Resources, Row, Table, metric, percent, run
from studies.engine.study import Study
from studies.report import browsers, page, plots
from studies.report.charts import chart, legend
from studies.report.figures import read
from tests.studies import browser as browsing
from tests.studies.engine import toy
from tests.studies.engine.synthetic import two_models

pytest.importorskip("vl_convert", reason="no vl_convert: pip install '.[dev]'")

WEIGHTS = np.array([[[0.9, 0.1], [0.0, 1.0]], [[0.2, 0.8], [0.5, 0.5]]])
"""Attention [example, query_pos, key_pos] of the first model."""


def attention(result):
    values = np.stack(
        [WEIGHTS, *[np.full_like(WEIGHTS, np.nan)] * (result["scores"].sizes["cell"] - 1)]
    )
    dims = ("cell", "example", "query_pos", "key_pos")
    coords = {dim: range(2) for dim in dims[1:]}
    return xr.DataArray(values, coords, dims).to_dataset(name="value")


def tokens(result):
    names = np.full((result["scores"].sizes["cell"], 2, 2), ["<b>", "b"])
    return xr.DataArray(names, dims=("cell", "example", "key_pos")).to_dataset(name="value")


def photograph(result):
    figure = Figure()
    figure.subplots().imshow(np.zeros((2, 2, 3)))
    figure.axes[0].set_title("a photograph")
    return figure


READINGS = {"in": metric("accuracy", "id"), "out": metric("accuracy", "ood")}
STUDY = Study(
    name="toy",
    question="Is a < b?",
    setup=toy.TOY.setup,
    grids=({"seed": (0,)},),
    claims=(Claim("a is better", "P", metric("accuracy", "ood"), {"model": "a"}, {"model": "b"}),),
    table=Table(title="Right answers", rows=(Row("ood", metric("accuracy", "ood"), percent),)),
    views={
        "right": functools.partial(plots.points, readings=READINGS, xlabel="share"),
        "picture": photograph,
        "nothing": lambda result: None,
    },
    browsers={
        "attention": functools.partial(
            browsers.matrices,
            data=attention,
            y="query_pos",
            x="key_pos",
            names={"key_pos": tokens},
            title="weights",
        )
    },
)


@pytest.fixture(scope="module")
def result():
    result = two_models([0.80, 0.82, 0.81], [0.50, 0.53, 0.51])
    for name, data in STUDY.judge(result).items():
        result[name] = xr.DataTree(data)
    result.attrs |= {
        **{name: "x" for name in ("created_at", "preset", "command")},
        **{
            "study": "toy",
            "question": STUDY.question,
            "config": '{"setup": {"n": 4}}',
            "seeds": "[0, 1, 2]",
        },
    }
    return result


@pytest.fixture(scope="module")
def exhibits(result):
    return list(page.exhibits_of(result, STUDY))


@pytest.fixture(scope="module")
def text(result, exhibits):
    return page.report(result, STUDY, exhibits, "result.nc")


class Parsed(HTMLParser):
    """What a page is made of: its tags with their attributes, and its words outside of scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self._hidden = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._hidden = tag in ("script", "style")

    def handle_endtag(self, tag):
        self._hidden = self._hidden and tag not in ("script", "style")

    def handle_data(self, data):
        if not self._hidden:
            self.words += data.split()


def test_a_page_says_what_the_result_holds(text, result):
    words = " ".join(Parsed(text).words)
    assert "Is a < b?" in words
    assert "a is better (P)" in words
    assert f"{result['claims']['verdict'].to_numpy()[0]}" in words
    # The mean of both models, in percent, as in the table of the terminal.
    assert "81.0 [79; 83]" in words
    assert "51.3 [48; 55]" in words
    assert '{"n": 4}' in words
    for name in ("values tried", "still improving", "parameters"):
        assert name in words


def test_a_page_is_accessible_and_whole(text):
    tags = Parsed(text).tags
    assert ("html", {"lang": "en"}) in tags
    levels = [int(tag[1]) for tag, _ in tags if tag in ("h1", "h2", "h3")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    ids = [attrs["id"] for _, attrs in tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    images = [attrs for tag, attrs in tags if tag == "img"]
    assert [image["alt"] for image in images] == ["1 panel. panels: a photograph."]
    targets = {attrs.get("href", attrs.get("src")) for _, attrs in tags} - {None}
    assert all(target.startswith(("#", "data:", "result.nc")) for target in targets)
    assert {target[1:] for target in targets if target.startswith("#")} <= set(ids)


def test_equal_results_have_equal_pages(text, result):
    again = page.report(result, STUDY, list(page.exhibits_of(result, STUDY)), "result.nc")
    assert again == text


def test_numbers_of_a_figure_are_those_of_the_result(exhibits, result):
    right = exhibits[0]
    rows = list(csv.DictReader(io.StringIO(right.numbers)))
    drawn = {round(float(row["x"]), 6) for row in rows}
    accuracy = result["scores"]["accuracy"].to_numpy().round(6)
    assert set(accuracy.ravel().tolist()) <= drawn
    name, address = right.download
    assert name == "right.csv"
    assert address.startswith("data:text/csv")


def test_large_numbers_are_compressed(exhibits):
    name, address = replace(exhibits[0], numbers="x,y\n" + "1,2\n" * page.LARGE).download
    assert name == "right.csv.gz"
    assert len(address) < 1000


def test_charts_that_do_not_fit_give_way(result, exhibits, text, monkeypatch):
    most = len(text.encode()) - 10
    monkeypatch.setattr(page, "MOST", most)
    smaller = page.report(result, STUDY, exhibits, "result.nc")
    assert len(smaller.encode()) <= most
    assert smaller.count("too large for this page") == 1


def test_a_page_without_the_study_has_the_stored_summary(result):
    words = " ".join(Parsed(page.report(result, None, [], "result.nc")).words)
    assert "ood .81 [" in words
    assert "There are none." in words


def test_without_the_package_of_charts_an_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    page.libraries.cache_clear()
    with pytest.raises(page.ReportError, match=r"pip install 'modscope\[report\]'"):
        page.libraries()


def test_an_error_in_the_page_keeps_the_result(tmp_path, monkeypatch):
    def broken(*arguments):
        raise KeyError("nothing like it")

    study = replace(toy.TOY, grids=({"model": ("linear",)},), browsers={"broken": broken})
    changes = ["training.n_steps=2", "training.evaluate_every=2", "training.keep_at=2"]
    with pytest.warns(UserWarning, match="nothing like it"):
        folder = run(study, "laptop", changes, resources=Resources(root=tmp_path))
    assert (folder / "result.nc").exists()
    assert not (folder / "report.html").exists()


def test_a_label_with_several_colours_is_black_in_the_legend():
    figure = Figure()
    for axis, colour in zip(figure.subplots(1, 2), ("#cc3311", "#4477aa"), strict=True):
        axis.plot([1, 2], color=colour, label="probe")
        axis.plot([2, 1], color="#777777", label="chance")
    parts = read(figure)
    assert legend([panel for part in parts for row in part.rows for panel in row]) == {
        "probe": ("#000000", "stroke"),
        "chance": ("#777777", "stroke"),
    }
    options = chart(parts)["params"][0]["bind"]["options"]
    assert options == [None, "probe", "chance"]


# In a browser


@pytest.fixture(scope="module")
def browser():
    yield from browsing.start()


@pytest.fixture(scope="module")
def kinds():
    """An exhibit with lines, points, intervals, bars, a matrix, names and logarithmic axes."""
    figure = Figure((12, 4))
    lines, bars, matrix, points = figure.subplots(1, 4)
    lines.errorbar([1, 10], [0.25, 0.75], yerr=0.1, label="first")
    lines.plot([1, 10], [0.9, 0.1], "--", label="second")
    lines.set_xscale("log")
    bars.bar([0, 1], [1, 2], label="share")
    bars.set_xticks([0, 1], ["</script>", "a 'name'"])
    image = matrix.imshow([[0.5, np.nan], [0.25, 1.0]])
    figure.colorbar(image, ax=matrix, label="weight")
    points.scatter([1, 2], [3, 4], label="second")
    points.text(1, 3, "a note")
    return page.exhibit("kinds", figure)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, result, exhibits, kinds):
    folder = tmp_path_factory.mktemp("pages")
    pages = {
        "report": page.report(result, STUDY, [*exhibits, kinds], "result.nc"),
        "index": page.index({"one/result.nc": result, "two/result.nc": result}),
    }
    for name, content in pages.items():
        (folder / f"{name}.html").write_text(content, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def opened(browser, folder):
    """The page of the result. Nothing goes wrong in it, to the end of all tests."""
    with browsing.opened(browser, folder / "report.html") as opened:
        yield opened


@pytest.fixture
def chart_of(opened):
    """Draws a chart of the page."""

    def draw(figure):
        chart = opened.locator(f"#{figure} [data-chart]")
        browsing.draw(opened, chart)
        return chart

    return draw


def test_all_kinds_of_charts_are_drawn(opened, chart_of):
    charts = ("example-attention", "figure-right", "figure-kinds")
    assert opened.locator("[data-chart]").count() == len(charts)
    labels = [chart_of(name).locator("[aria-label]").first for name in charts]
    assert labels[2].get_attribute("aria-label").startswith("4 panels")


def test_the_list_picks_a_line(chart_of):
    chart = chart_of("figure-kinds")
    before = browsing.picture(chart)
    browsing.choose(chart, "only", "first")
    assert browsing.picture(chart) != before
    browsing.choose(chart, "only", "all")
    assert browsing.picture(chart) == before


def test_the_legend_picks_a_line(chart_of):
    chart = chart_of("figure-kinds")
    before = browsing.picture(chart)
    chart.locator("svg.marks text", has_text="second").last.click()
    assert browsing.picture(chart) != before


def test_values_are_under_the_pointer(opened, chart_of):
    box = chart_of("example-attention").locator("svg.marks").bounding_box()
    opened.mouse.move(box["x"] + 100, box["y"] + 60)
    tip = opened.locator("#vg-tooltip-element")
    tip.get_by_text("0 <b>").wait_for()
    assert "0.9" in tip.inner_text()


def test_the_wheel_zooms_with_shift_only(opened, chart_of):
    chart = chart_of("figure-kinds")
    box, before = chart.locator("svg.marks").bounding_box(), browsing.picture(chart)
    opened.mouse.move(box["x"] + 120, box["y"] + 80)
    opened.mouse.wheel(0, -1)
    assert browsing.picture(chart) == before
    opened.keyboard.down("Shift")
    opened.mouse.wheel(0, -300)
    opened.keyboard.up("Shift")
    assert browsing.picture(chart) != before


def test_examples_are_stepped_through(chart_of):
    chart = chart_of("example-attention")
    first = browsing.picture(chart)
    browsing.choose(chart, "example", 1)
    assert browsing.picture(chart) != first
    # Only the first model was measured.
    assert chart.locator("[name=model] option").count() == 1


def test_numbers_can_be_downloaded(opened, kinds):
    with opened.expect_download() as download:
        opened.get_by_text("Data of this figure (kinds.csv)").click()
    with open(download.value.path(), newline="") as file:
        assert file.read() == kinds.numbers


def test_runs_are_searched_and_compared(browser, folder):
    with browsing.opened(browser, folder / "index.html") as opened:
        rows = opened.locator("#runs tbody tr")
        assert [row.is_visible() for row in rows.all()] == [True, True]
        opened.locator("#search").fill("two")
        assert [row.is_visible() for row in rows.all()] == [False, True]
        assert opened.locator("#found").inner_text() == "1 runs"
        chart = opened.locator("[data-chart]")
        browsing.draw(opened, chart)
        both = browsing.picture(chart)
        browsing.choose(chart, "search", "one")
        assert browsing.picture(chart) != both
