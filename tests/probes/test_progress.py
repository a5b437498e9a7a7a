"""Progress bars: on a terminal, and only for what takes longer than a second."""

import io
import time

import pytest

from probes.progress import progress


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


def shown(monkeypatch, stream, seconds):
    monkeypatch.setattr("sys.stderr", stream)
    for _ in progress(range(2), "decode rule"):
        time.sleep(seconds)
    return stream.getvalue()


def test_slow_loops_have_a_bar_on_a_terminal(monkeypatch):
    assert "decode rule" in shown(monkeypatch, Terminal(), 1.1)


@pytest.mark.parametrize(("stream", "seconds"), [(io.StringIO(), 0.6), (Terminal(), 0.0)])
def test_others_have_none(monkeypatch, stream, seconds):
    assert not shown(monkeypatch, stream, seconds).strip("\r\n ")
