import numpy as np
import pytest
import xarray as xr
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from probes import draw_interchange

SCOPES = {"row": "its row", "code": "the code"}


@pytest.fixture
def result():
    rate = np.array([[0.1, 0.5, 0.9], [0.1, 0.2, 0.4]])
    parts = {"rate": rate, "rate_low": rate - 0.05, "rate_high": rate + 0.02}
    return xr.Dataset(
        {name: (("scope", "site"), values) for name, values in parts.items()},
        {"scope": ["code", "row"], "site": ["none", "layer 0", "all layers"]},
    )


def test_bars_are_the_rates_and_the_line_is_the_unpatched_run(result):
    axes = Figure().subplots()
    axes.set_prop_cycle(color=["green"])
    draw_interchange(axes, result, scopes=SCOPES)
    row, code = (one for one in axes.containers if one.get_label() in SCOPES.values())
    assert [bar.get_height() for bar in row] == [0.2, 0.4]
    assert [bar.get_height() for bar in code] == [0.5, 0.9]
    # Side by side around the site, paler from scope to scope, in the colour of the axes.
    centres = [[bar.get_center()[0] for bar in bars] for bars in (row, code)]
    assert np.allclose(np.mean(centres, axis=0), [0, 1])
    assert row[0].get_alpha() == 1 > code[0].get_alpha()
    assert to_rgb(row[0].get_facecolor()) == to_rgb(code[0].get_facecolor()) == to_rgb("green")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["layer 0", "all layers"]
    handles, labels = axes.get_legend_handles_labels()
    assert labels == ["nothing patched", "its row", "the code"]
    assert list(handles[0].get_ydata()) == [0.1, 0.1]


def test_error_bars_are_the_intervals(result):
    axes = Figure().subplots()
    draw_interchange(axes, result, scopes={"code": "the code"})
    (lines,) = next(one for one in axes.containers if one.get_label() == "the code").errorbar[2]
    ends = [(low, high) for (_, low), (_, high) in lines.get_segments()]
    assert np.allclose(ends, [(0.45, 0.52), (0.85, 0.92)])


def test_an_unknown_scope_is_refused(result):
    with pytest.raises(ValueError, match="some of code, row, got pattern"):
        draw_interchange(Figure().subplots(), result, scopes={"pattern": "all"})
