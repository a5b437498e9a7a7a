"""The notebooks run from top to bottom, each in a session of its own, and end in a figure."""

import matplotlib.pyplot as plt
import pytest

from tests.docs.pages import NOTEBOOKS, blocks

CELLS = 20


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_run(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = blocks(notebook.read_text(), "{code-cell}")
    assert 0 < len(cells) <= CELLS
    # One process, since it takes longer to start six kernels than to run the cells.
    names: dict[str, object] = {"__name__": "__main__"}
    for cell in cells:
        exec(cell, names)
    assert plt.get_fignums()
    assert all(axes.has_data() for axes in names["figure"].axes)


def test_there_is_one_for_each_paper_and_one_for_other_models():
    assert len(NOTEBOOKS) == 6


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_are_notebooks_of_myst(notebook):
    _, head, _ = notebook.read_text().split("---\n", 2)
    assert "format_name: myst" in head
    assert "kernelspec:" in head
