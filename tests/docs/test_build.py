"""The site builds without warnings (its notebooks are run by `test_notebooks`)."""

import importlib.util
import os
import re
import subprocess
import sys
from html import unescape

import pytest

from tests.docs.pages import ROOT


@pytest.mark.skipif(importlib.util.find_spec("myst_nb") is None, reason="the extra docs is needed")
def test_it_builds_without_warnings(tmp_path):
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
    assert (tmp_path / "html" / "index.html").exists()
    page = (tmp_path / "html" / "docs" / "reference" / "mechanisms.html").read_text()
    assert "x_query: Float[Tensor, 'batch query_pos d_model']" in unescape(
        re.sub("<.*?>", "", page)
    )
