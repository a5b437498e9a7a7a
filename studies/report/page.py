"""The page of a result, `report.html`: one file that needs no network, with interactive figures.

It holds the question, the verdicts with their fairness, the table, examples to step through, every
figure with its numbers, and how the result was made. `index` is a page that compares several runs.
The libraries of the charts, see `studies.report.charts`, are within the page.
"""

from __future__ import annotations

import base64
import csv
import functools
import gzip
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import numpy as np
import xarray as xr
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from rich.table import Table

from studies.engine.folders import REPORT, write_atomically
from studies.engine.readings import conditions_of, most_seeds, varied
from studies.report import figures
from studies.report.charts import Spec, chart
from studies.report.names import name_of
from studies.report.table import STATISTICS, render_summary, short
from studies.report.verdicts import render_claims, render_fairness
from tasks.cache import DEFAULT_CACHE

if TYPE_CHECKING:
    from studies.engine.study import Study

INDEX = "index.html"
"""The page of several runs."""

MOST = 6_000_000
"""The largest size of a page, in bytes."""

LARGE = 30_000
"""Characters of a figure's numbers above which they are compressed."""

COLUMNS = ("panel", "series", "x", "y", "low", "high", "x2", "y2", "value")
"""The columns of a figure's numbers, of which it has those that it needs."""

FEW_SEEDS = {1: "One seed: no number has an interval over seeds.", 2: "Two seeds."}


@dataclass(frozen=True)
class Exhibit:
    """A figure, or a chart of examples, on a page.

    Attributes:
        name: the name of its view.
        description: what it shows, in words.
        spec: the interactive chart; None: there is an image.
        image: the image as PNG; empty with a chart.
        numbers: as CSV; empty for an image.
    """

    name: str
    description: str
    spec: Spec | None
    image: bytes = b""
    numbers: str = ""

    @property
    def title(self) -> str:
        """Its name in words."""
        return name_of(self.name)

    @property
    def chart(self) -> Markup:
        """The chart as JSON that can stand in a page."""
        return Markup(_compact(self.spec).replace("<", "\\u003c"))

    @property
    def source(self) -> str:
        """The image as an address that holds it."""
        return "data:image/png;base64," + base64.b64encode(self.image).decode()

    @property
    def download(self) -> tuple[str, str]:
        """The numbers as a file: its name, and an address that holds it, compressed if large."""
        if len(self.numbers) <= LARGE:
            return f"{self.name}.csv", f"data:text/csv;charset=utf-8,{quote(self.numbers)}"
        # Without the time, so that equal results have equal pages.
        content = base64.b64encode(gzip.compress(self.numbers.encode(), mtime=0)).decode()
        return f"{self.name}.csv.gz", f"data:application/gzip;base64,{content}"

    @property
    def size(self) -> int:
        """About how many bytes of the page it takes."""
        return len(_compact(self.spec)) + len(self.download[1]) + len(self.source)


class ReportError(RuntimeError):
    """A page cannot be made."""


def exhibit(name: str, figure: Figure) -> Exhibit:
    """A figure as an interactive chart, or if it shows what no chart can, as an image.

    Args:
        name: the name of its view.
        figure: the figure.

    Example:
        >>> exhibit("rates", figure).spec["vconcat"]
    """
    description, parts = figures.described(figure), figures.read(figure)
    if parts is None:
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=90)
        return Exhibit(name, description, None, image=stream.getvalue())
    return Exhibit(name, description, chart(parts, description), numbers=_csv(parts))


def _csv(parts: Sequence[figures.Part]) -> str:
    rows, stream = list(figures.rows(parts)), io.StringIO()
    used = [name for name in COLUMNS if any(row.get(name) not in (None, "") for row in rows)]
    table = csv.DictWriter(stream, used, extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return stream.getvalue()


def exhibits_of(result: xr.DataTree, study: Study) -> Iterator[Exhibit]:
    """The figures of a result, drawn by the views of its study."""
    for name, view in study.views.items():
        if (figure := view(result)) is not None:
            yield exhibit(name, figure)


def report(result: xr.DataTree, study: Study | None, exhibits: Sequence[Exhibit], data: str) -> str:
    """The page of a result.

    Args:
        result: the result.
        study: the study that made it; None: the table has what its summary holds, and there are no
            examples.
        exhibits: its figures.
        data: the name of the file of the result, beside the page.

    Raises:
        ReportError: the package of the charts is missing.
    """
    browsers = {} if study is None else study.browsers
    drawn = ((name, browser(result)) for name, browser in browsers.items())
    examples = [
        Exhibit(name, spec.get("description", ""), spec) for name, spec in drawn if spec is not None
    ]
    table = render_summary(result) if study is None else study.table.render(result)
    claims = render_claims(result)
    return _fitting(
        "report",
        [*examples, *exhibits],
        examples=lambda shown: shown[: len(examples)],
        figures=lambda shown: shown[len(examples) :],
        attrs=result.attrs,
        title=name_of(result.attrs["study"]),
        table=html_table(table),
        claims=None if claims is None else html_table(claims),
        fairness=fairness_table(result),
        notes=[*render_fairness(result), *filter(None, [FEW_SEEDS.get(most_seeds(result))])],
        provenance={name: _readable(value) for name, value in result.attrs.items()},
        data=data,
    )


class HtmlTable(NamedTuple):
    """A table: its title, headings, rows (an empty one is a line between others), and caption."""

    title: str
    headings: list[str]
    rows: list[tuple[str, ...]]
    caption: str


def html_table(table: Table) -> HtmlTable:
    """A table that was made for the terminal."""
    rows = zip(*(map(str, column.cells) for column in table.columns), strict=True)
    headings = [str(column.header) for column in table.columns]
    return HtmlTable(str(table.title or ""), headings, list(rows), str(table.caption or ""))


def fairness_table(result: xr.DataTree) -> HtmlTable:
    """Costs, training and tuning of each condition, without what was not measured."""
    fairness = result["fairness"].to_dataset()
    columns = {name: values for name, values in fairness.data_vars.items() if name != "label"}
    rows = [
        (str(label), *(_number(values[row].item()) for values in columns.values()))
        for row, label in enumerate(fairness["label"].to_numpy())
    ]
    caption = "; ".join(
        f"{name_of(name)}: {values.attrs.get('long_name', '')}" for name, values in columns.items()
    )
    return HtmlTable("Fairness", ["", *map(name_of, columns)], rows, caption)


def _number(value: float) -> str:
    """A number as text: whole ones in full."""
    if not np.isfinite(value):
        return ""
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 1000 else short(value)


def _readable(value: object) -> str:
    """An attribute of a result, with JSON on several lines if it is long."""
    try:
        content = json.loads(str(value))
    except ValueError:
        return str(value)
    return json.dumps(content, indent=None if len(str(value)) < 80 else 1, ensure_ascii=False)


def _fitting(template: str, exhibits: Sequence[Exhibit], **content: Any) -> str:
    """A page that is not larger than `MOST`: the largest charts give way to a sentence."""
    shown = list(exhibits)
    while True:
        parts = {key: value(shown) if callable(value) else value for key, value in content.items()}
        page = _template(template).render(libraries=Markup(libraries()), **parts)
        if len(page.encode()) <= MOST:
            return page
        largest = max(range(len(shown)), key=lambda number: shown[number].size)
        text = f"{shown[largest].description} (too large for this page; see the data)"
        shown[largest] = Exhibit(shown[largest].name, text, None)


def _template(name: str) -> Any:
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    return environment.get_template(f"{name}.html")


@functools.cache
def libraries() -> str:
    """The JavaScript of Vega, Vega-Lite and Vega-Embed.

    It is kept in a file, since putting it together takes seconds.

    Raises:
        ReportError: `vl-convert-python` is not installed.
    """
    try:
        import vl_convert  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ReportError(
            "pages need the package vl-convert-python: pip install 'modscope[report]'"
        ) from error
    # Its types lack the version, and the default of the snippet.
    library: Any = vl_convert
    path = DEFAULT_CACHE / f"vega-{library.__version__}.js"
    if not path.exists():
        bundle = library.javascript_bundle()
        write_atomically(path, lambda to: to.write_text(bundle, encoding="utf-8"))
    return path.read_text(encoding="utf-8")


def _compact(spec: object) -> str:
    return json.dumps(spec, separators=(",", ":"), ensure_ascii=False)


# Several runs


def index(results: Mapping[str, xr.DataTree]) -> str:
    """A page that lists and compares results.

    Args:
        results: by the path of their file, relative to the page; their pages lie beside them.
    """
    runs = [_run(path, result) for path, result in results.items()]
    comparison = Exhibit("comparison", "", compare(results))
    return _fitting("index", [comparison], comparison=lambda shown: shown[0], runs=runs)


def _run(path: str, result: xr.DataTree) -> dict[str, Any]:
    """What the list says of a run."""
    verdicts = result["claims"]["verdict"].to_numpy().tolist()
    counts = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
    return {
        "page": page_of(Path(path)).as_posix(),
        "path": path,
        "claims": ", ".join(f"{n} {verdict}" for verdict, n in counts.items()),
        "n_models": result["scores"].sizes["cell"],
        **{str(name): value for name, value in result.attrs.items()},
    }


def page_of(result: Path) -> Path:
    """The page of a result file: `report.html`, or `NAME.html` beside a file with a name."""
    return result.with_name(REPORT) if result.stem == "result" else result.with_suffix(".html")


def compare(results: Mapping[str, xr.DataTree]) -> Spec:
    """A chart of the readings of all runs, one reading at a time, by run and condition."""
    values = [row for path, result in results.items() for row in _readings(path, result)]
    readings = list(dict.fromkeys(row["reading"] for row in values))
    search = {"input": "search", "placeholder": "run or condition", "name": "search "}
    choose = {"input": "select", "options": readings, "name": "reading "}
    where = {"field": "label", "type": "nominal", "title": None, "sort": None}
    where |= {"axis": {"labelLimit": 500}}
    colour = {"field": "run", "type": "nominal", "title": "run", "legend": {"labelLimit": 400}}
    tips = [{"field": name} for name in ("run", "condition", "reading")]
    tips += [{"field": name, "format": ".4~g"} for name in ("mean", "low", "high", "seeds")]
    found = "test(regexp(search, 'i'), datum.label)"
    return {
        "description": "A reading of every condition of the runs, with its interval over seeds",
        "params": [
            {"name": "reading", "value": next(iter(readings), ""), "bind": choose},
            {"name": "search", "value": "", "bind": search},
        ],
        "data": {"values": values},
        "transform": [{"filter": f"datum.reading == reading && (!search || {found})"}],
        "width": 520,
        "height": {"step": 18},
        "encoding": {"y": where, "color": colour, "tooltip": tips},
        "layer": [
            {
                "mark": "rule",
                "encoding": {
                    "x": {"field": "low", "type": "quantitative", "title": "mean over seeds"},
                    "x2": {"field": "high"},
                },
            },
            {
                "mark": {"type": "point", "filled": True, "size": 50},
                "encoding": {
                    "x": {"field": "mean", "type": "quantitative", "scale": {"zero": False}},
                    "shape": colour,
                },
            },
        ],
    }


def _readings(path: str, result: xr.DataTree) -> Iterator[dict[str, Any]]:
    """The summary of a run, as rows."""
    summary, study = result["summary"].to_dataset(), result.attrs["study"]
    run = f"{Path(path).parent.name}/{Path(path).name}".removesuffix("/result.nc")
    names = [", ".join(one.value_names(varied(result))) for one in conditions_of(result)]
    tables = {name: summary[name].transpose("condition", "reading") for name in STATISTICS}
    for row, condition in enumerate(names):
        for column, reading in enumerate(summary["reading"].to_numpy()):
            numbers = {
                name: figures.short_number(t[row, column].item()) for name, t in tables.items()
            }
            if numbers["mean"] is not None:
                low, high = (
                    numbers[end] if numbers[end] is not None else numbers[f"example_{end}"]
                    for end in ("low", "high")
                )
                yield {
                    "run": run,
                    "condition": condition,
                    "label": f"{run}: {condition}" if condition else run,
                    "reading": f"{study}: {reading}",
                    "mean": numbers["mean"],
                    "low": low,
                    "high": high,
                    "seeds": numbers["n_seeds"],
                }
