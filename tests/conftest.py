"""Every test runs on one thread: the models are small, and the runner already uses all cores.

None leaves figures open.
"""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)


SLOW = (
    "tests/docs",
    "tests/test_readme.py",
    "tests/studies",
    "tests/contracts",
    "tests/mechanisms",
)
"""In order, the files and folders whose tests take longest, and begin first."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the slowest modules first, so that all workers are busy to the end."""
    slow = [config.rootpath / name for name in SLOW]

    def rank(item: pytest.Item) -> int:
        parents = (item.path, *item.path.parents)
        return min((slow.index(path) for path in slow if path in parents), default=len(slow))

    items.sort(key=rank)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests need a GPU that is not there."""
    skipped = terminalreporter.stats.get("skipped", [])
    if n := sum("no CUDA device" in str(report.longrepr) for report in skipped):
        terminalreporter.write_line(f"{n} tests skipped that need a CUDA device")


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close("all")
