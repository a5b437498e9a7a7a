"""The command line of studies, called in this process: another one would import all anew."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from unittest import mock

from studies.engine import Study, main


def command_line(*studies: Study, words: list[str]) -> tuple[int, str]:
    """The exit status, and what is printed."""
    printed = io.StringIO()
    arguments = mock.patch.object(sys, "argv", ["study.py", *words])
    width = mock.patch.dict(os.environ, {"COLUMNS": "140"})
    with arguments, width, contextlib.redirect_stdout(printed):
        try:
            main(*studies)
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
    return status, printed.getvalue()
