import numpy as np
import pytest
import torch
import xarray as xr
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from probes import erase, interchange, plots
from tests.probes.plots.conftest import batch, legend, names


@pytest.fixture
def result():
    rate = np.array([[0.1, 0.5, 0.9], [0.2, 0.3, 0.4]])
    parts = {"rate": rate, "rate_low": rate - 0.05, "rate_high": rate + 0.02}
    return xr.Dataset(
        {name: (("scope", "site"), values) for name, values in parts.items()},
        {"scope": ["its_row", "code"], "site": ["none", "layer 0", "all layers"]},
    )


def bars_of(ax):
    """Bars by label: [(centre, height)], and the ends of their intervals."""
    found = {}
    for container in ax.containers:
        if hasattr(container, "patches"):
            bars = [(round(bar.get_center()[0], 6), bar.get_height()) for bar in container]
            error = container.errorbar
            ends = (
                [tuple(end for _, end in segment) for segment in error[2][0].get_segments()]
                if error
                else []
            )
            found[container.get_label()] = (bars, ends, container.patches[0])
    return found


def levels(ax):
    """The horizontal lines: centre, value and width."""
    (lines,) = ax.collections[-1:]
    return [
        (round((left + right) / 2, 6), y, round(right - left, 6))
        for (left, y), (right, _) in lines.get_segments()
    ]


def test_bars_are_side_by_side_and_the_unpatched_run_is_a_line_across_each(result, ax):
    ax.set_prop_cycle(color=["green"])
    assert plots.interchange(result, ax) is ax
    (row, row_ends, row_patch), (code, code_ends, code_patch) = bars_of(ax).values()
    assert list(bars_of(ax)) == ["its row", "code"]
    assert [height for _, height in row] == [0.5, 0.9]
    assert [height for _, height in code] == [0.3, 0.4]
    centres = np.array([[x for x, _ in bars] for bars in (row, code)])
    assert np.allclose(centres.mean(axis=0), [0, 1])
    assert np.allclose(row_ends, [(0.45, 0.52), (0.85, 0.92)])
    assert np.allclose(code_ends, [(0.25, 0.32), (0.35, 0.42)])
    assert row_patch.get_alpha() == 1 > code_patch.get_alpha()
    assert to_hex(row_patch.get_facecolor()) == to_hex(code_patch.get_facecolor()) == "#008000"
    assert names(ax, "x") == ["layer 0", "all layers"]
    # Of scopes that differ without a patch, each has its own line, as wide as the bar.
    width = row_patch.get_width()
    expected = [(x, 0.1, width) for x, _ in row] + [(x, 0.2, width) for x, _ in code]
    assert np.allclose(levels(ax), expected)
    assert set(legend(ax)) == {"its row", "code", "nothing patched"}


def test_a_single_scope_has_bars_in_the_middle(result, ax):
    plots.interchange(result.sel(scope=["code"]), ax)
    ((bars, _, _),) = bars_of(ax).values()
    assert bars == [(0, 0.3), (1, 0.4)]
    assert legend(ax) == ["nothing patched"]


def test_patching_a_model_that_is_not_ours_is_drawn_as_measured(own_model, ax):
    base, source = batch(40, 0).inputs, batch(40, 1).inputs
    changed = interchange(
        own_model,
        base,
        source,
        hooks={"first": "blocks.0.hook_out", "last": "blocks.2.hook_out"},
        where={"some": torch.arange(6)[None] < 3, "all": torch.ones(1, 6, dtype=torch.bool)},
        answer=lambda logits: logits.argmax(-1),
        outcomes={"source's": own_model(source).argmax(-1)},
    )
    plots.interchange(changed, ax)
    rate = changed["rate"].sel(outcome="source's")
    for scope, (bars, ends, _) in bars_of(ax).items():
        of_scope = rate.sel(scope=scope, site=["first", "last"])
        assert np.allclose([height for _, height in bars], of_scope)
        lowest = changed["rate_low"].sel(scope=scope, site=["first", "last"]).squeeze()
        assert np.allclose([low for low, _ in ends], lowest)
    assert np.allclose([y for _, y, _ in levels(ax)], rate.sel(site="none", scope="all"))
    # The last state is all that the answer is read from.
    assert bars_of(ax)["all"][0][1][1] == 1


def test_changes_of_a_metric_are_drawn_against_0(ax):
    values = np.array([0.0, -1.5, -2.0])
    changes = xr.Dataset(
        {
            name: (("site", "metric"), values[:, None] + shift)
            for name, shift in (("change", 0.0), ("change_low", -0.1), ("change_high", 0.3))
        },
        {"site": ["none", "layer 0", "layer 1"], "metric": ["logit difference"]},
    )
    plots.interchange(changes, ax, variable="change")
    ((bars, ends, _),) = bars_of(ax).values()
    assert bars == [(0, -1.5), (1, -2.0)]
    assert np.allclose(ends, [(-1.6, -1.2), (-2.1, -1.7)])
    assert [y for _, y, _ in levels(ax)] == [0, 0]
    assert ax.get_ylim()[0] < -2


def test_erasure_is_drawn_beside_its_controls_and_the_unchanged_model(own_model, ax):
    fit, test = batch(60, 0), batch(50, 1)
    erased = erase(
        own_model,
        fit.inputs,
        fit.targets % 2,
        test.inputs,
        hooks={"first": "blocks.0.hook_out", "last": "blocks.2.hook_out"},
        answer=lambda logits: logits.argmax(-1),
        outcomes={"same": own_model(test.inputs).argmax(-1)},
        draws=2,
        resamples=20,
    )
    plots.erasure(erased, ax)
    drawn = bars_of(ax)
    assert list(drawn) == ["erased", "control", "random"]
    for condition, (bars, ends, _) in drawn.items():
        expected = erased.sel(condition=condition, outcome="same")
        assert np.allclose([height for _, height in bars], expected["rate"])
        bounds = np.stack([expected["rate_low"], expected["rate_high"]], 1)
        assert np.allclose(ends, bounds)
    assert {y for _, y, _ in levels(ax)} == {1.0}
    assert names(ax, "x") == ["first", "last"]


def test_what_cannot_be_compared_on_one_axes_is_refused(result, ax):
    both = xr.concat([result, result], xr.Variable("outcome", ["own", "source"]))
    with pytest.raises(ValueError, match=r"select one label: result.isel\((scope|outcome)=0\)"):
        plots.interchange(both, ax)
    made = "made by interchange, interchange_codes or interchange_pairs, got rate"
    with pytest.raises(KeyError, match=f"'change', {made}"):
        plots.interchange(result, ax, variable="change")
    with pytest.raises(KeyError, match="'rate', made by erase, got score"):
        plots.erasure(xr.Dataset({"score": 1.0}), ax)


def test_bars_of_any_variable(ax):
    data = xr.Dataset({"share": ("kind", [0.2, 0.8])}, {"kind": ["is_added", "deleted"]})
    plots.bars(data, "share", ax, along="kind")
    ((bars, ends, patch),) = bars_of(ax).values()
    assert (bars, ends) == ([(0, 0.2), (1, 0.8)], [])
    assert names(ax, "x") == ["is added", "deleted"]
    assert patch.get_alpha() == 1
    other = Figure().subplots()
    plots.bars(data.expand_dims(model=["a", "b"]), "share", other, along="kind", by="model")
    assert legend(other) == ["a", "b"]
