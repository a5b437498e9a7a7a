"""The site builds without warnings (its notebooks are run by `test_notebooks`)."""

import importlib.util
import os
import re
import subprocess
import sys
from html import unescape

import pytest

from tests.docs.pages import ROOT
from tests.studies import browser as browsing

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser():
    yield from browsing.start()


needs_docs = pytest.mark.skipif(
    importlib.util.find_spec("myst_nb") is None, reason="the extra docs is needed"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("site")
    options = ["-q", "-W", "--keep-going", "-D", "nb_execution_mode=off", "-c", "docs"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "sphinx",
            *options,
            "-d",
            tmp_path / "trees",
            ".",
            tmp_path / "html",
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return tmp_path / "html"


@needs_docs
def test_it_builds_without_warnings(site):
    assert (site / "index.html").exists()
    page = (site / "docs" / "reference" / "mechanisms.html").read_text()
    assert "x_query: Float[Tensor, 'batch query_pos d_model']" in unescape(
        re.sub("<.*?>", "", page)
    )


@needs_docs
@pytest.mark.parametrize("width", [400, 900, 1010, 1200, 1320, 1600])
def test_pages_fit_the_window(site, browser, width):
    for page in ("index", "gallery", "howto/model"):
        with browsing.opened(browser, site / "docs" / f"{page}.html") as opened:
            opened.set_viewport_size({"width": width, "height": 800})
            assert opened.evaluate("document.documentElement.scrollWidth") <= width, page
