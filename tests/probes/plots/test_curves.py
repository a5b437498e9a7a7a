import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from probes import loss_by_context, plots
from probes.plots import COLOURS, CONTROL
from tests.probes.plots.conftest import legend, lines_of, names


def result(along, labels, *, controls=("observed", "shuffled")):
    values = np.arange(len(controls) * len(labels), dtype=float).reshape(len(controls), -1)
    dims = ("control", along)
    return xr.Dataset(
        {
            "score": (dims, values, {"long_name": "share of right answers"}),
            "score_low": (dims, values - 0.5),
            "score_high": (dims, values + 0.25),
        },
        {"control": list(controls), along: labels},
    )


def test_numbers_are_at_their_values_with_their_intervals(ax):
    data = result("depth", [2, 3, 7]).isel(control=0)
    assert plots.line(data, "score", ax, along="depth", label="mine", color="#aa3377") is ax
    line, ends = lines_of(ax)["mine"]
    assert line.get_xydata().tolist() == [[2, 0], [3, 1], [7, 2]]
    assert ends == {2: (-0.5, 0.25), 3: (0.5, 1.25), 7: (1.5, 2.25)}
    assert to_hex(line.get_color()) == "#aa3377"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("depth", "share of right answers")


def test_names_are_in_a_row_also_where_some_are_nan(ax):
    data = result("split", ["id", "held_out", "ood"]).isel(control=0)
    data["score"][1] = np.nan
    plots.line(data.drop_vars(["score_low", "score_high"]), "score", ax, along="split")
    (line,) = ax.lines
    assert line.get_xydata().tolist() == [[0, 0], [2, 2]]
    assert names(ax, "x") == ["id", "held out", "ood"]
    assert ax.get_xticks().tolist() == [0, 1, 2]
    assert ax.get_xlim() == (-0.5, 2.5)
    # Without bounds there are no bars.
    assert not ax.collections


def test_controls_are_grey_and_dashed_and_others_have_colours(ax):
    three = result("layer", [0, 1], controls=("probe", "shuffled", "control task"))
    plots.lines(three, "score", ax, along="layer")
    assert legend(ax) == ["probe", "shuffled", "control task"]
    drawn = [line for line, _ in lines_of(ax).values()]
    assert [to_hex(line.get_color()) for line in drawn] == ["#1f77b4", CONTROL, CONTROL]
    assert len({line.get_linestyle() for line in drawn}) == 3
    assert len({line.get_marker() for line in drawn}) == 3
    for number, line in enumerate(drawn):
        assert line.get_ydata().tolist() == three["score"][number].values.tolist()
    other = Figure().subplots()
    rules = three.rename(control="rule")
    plots.lines(rules, "score", other, along="layer", by="rule")
    drawn = [line for line, _ in lines_of(other).values()]
    assert len({to_hex(line.get_color()) for line in drawn}) == 3
    assert {line.get_linestyle() for line in drawn} == {"-"}


def test_a_control_that_was_not_measured_is_not_drawn(ax):
    data = result("layer", [0, 1])
    data["score"][1] = np.nan
    plots.lines(data, "score", ax, along="layer")
    assert legend(ax) == ["observed"]


def test_without_axes_the_current_ones_are_drawn_on():
    _, (_, right) = plt.subplots(1, 2)
    assert plots.line(result("layer", [0, 1]).isel(control=0), "score", along="layer") is right
    assert len(right.lines) > 0


def test_what_is_missing_is_named(ax):
    with pytest.raises(KeyError, match="must hold 'loss', made by a probe, got score, score_high"):
        plots.line(result("layer", [0]), "loss", ax, along="layer")
    message = r"dims \('layer',\), got .*; select one label: result.isel\(control=0\)"
    with pytest.raises(ValueError, match=message):
        plots.line(result("layer", [0]), "score", ax, along="layer")


def test_any_result_with_an_interval_can_be_drawn(ax):
    ones = xr.DataArray(np.random.default_rng(0).random((10, 8)), dims=("window", "pos"))
    found = loss_by_context(ones, ones >= 0)
    plots.line(found, "loss", ax, along="seen")
    (line, ends), *_ = lines_of(ax).values()
    assert line.get_xdata().tolist() == [1, 2, 4, 8]
    assert np.allclose(line.get_ydata(), found["loss"])
    bounds = np.stack([found["loss_low"], found["loss_high"]], 1)
    assert np.allclose(list(ends.values()), bounds)


def test_many_names_are_small_turned_or_thinned():
    short, long, many = Figure().subplots(1, 3)
    for ax, labels in (
        (short, ["a", "b", "c"]),
        (long, ["a rule with a long name"] * 5),
        (many, [f"token {number}" for number in range(200)]),
    ):
        data = xr.Dataset({"score": ("name", np.ones(len(labels)))}, {"name": labels})
        plots.line(data, "score", ax, along="name")
    turned = [ax.get_xticklabels()[0].get_rotation() for ax in (short, long, many)]
    assert turned == [0, 90, 90]
    assert len(many.get_xticks()) < 50
    assert names(many, "x")[1] == f"token {many.get_xticks()[1]}"
    assert min(text.get_fontsize() for text in many.get_xticklabels()) >= 5


def seen_without_red_or_green(colour):
    """CIELAB of a colour for a reader without one kind of cones (Machado et al. 2009)."""
    kinds = (
        np.eye(3),
        np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
        np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    )
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    for kind in kinds:
        xyz = to_xyz @ np.clip(kind @ linear, 0, 1) / [0.9505, 1, 1.089]
        f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
        yield np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_colour_blind_readers_can_tell_the_colours_apart():
    distances = [
        np.linalg.norm(one - other)
        for number, first in enumerate(COLOURS)
        for second in COLOURS[:number]
        for one, other in zip(
            seen_without_red_or_green(first), seen_without_red_or_green(second), strict=True
        )
    ]
    assert min(distances) > 25
