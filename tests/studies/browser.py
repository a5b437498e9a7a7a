"""A headless browser that opens pages and reports what went wrong in them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = ("no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking")
FLAGS += ("disable-component-update", "disable-sync")
NAMES = ("chromium", "chromium-browser", "google-chrome")
OWN = ("file:", "data:", "blob:")
"""What pages may load: themselves."""

DRAWN = "element => element.dataset.state === 'drawn'"


def start() -> Iterator[Any]:
    """A browser, as a generator for a fixture; skips where there is none."""
    for package in ("playwright", "vl_convert"):
        pytest.importorskip(package, reason=f"no {package}: pip install '.[dev]'")
    from playwright.sync_api import sync_playwright

    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        pytest.skip("no browser: apt-get install chromium")
    with sync_playwright() as playwright:
        launch = playwright.chromium.launch
        browser = launch(executable_path=executable, args=[f"--{flag}" for flag in FLAGS])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, path: Path) -> Iterator[Any]:
    """A page, in which nothing may go wrong until the end: no error, no warning, no request."""
    page = browser.new_page(viewport={"width": 1200, "height": 600})
    problems: list[str] = []
    page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.on(
        "request",
        lambda request: (
            None if request.url.startswith(OWN) else problems.append(f"request: {request.url}")
        ),
    )
    page.goto(path.resolve().as_uri())
    yield page
    page.close()
    assert problems == []


def draw(page: Any, chart: Any) -> None:
    """Scroll to a chart, and wait until it is drawn."""
    chart.scroll_into_view_if_needed()
    page.wait_for_function(DRAWN, arg=chart.element_handle(), timeout=60_000)


def picture(chart: Any) -> str:
    """The marks of a chart, as text."""
    # The next picture is drawn after a control has changed.
    chart.page.wait_for_timeout(150)
    return chart.locator("svg.marks").evaluate("svg => svg.outerHTML")


def choose(chart: Any, name: str, value: object) -> None:
    """Choose a value of a control with the keyboard's means, those of native controls."""
    control = chart.locator(f"[name='{name}']")
    if control.evaluate("element => element.tagName") == "SELECT":
        control.select_option(str(value))
    else:
        control.fill(str(value))
