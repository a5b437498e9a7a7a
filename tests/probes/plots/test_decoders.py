import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

from probes import compare_means, decode, decode_continuous, plots
from tests.probes.plots.conftest import legend, lines_of, names


@pytest.fixture(scope="module")
def decoded(codes):
    fit, test = (one.assign(type=one["rule"]) for one in codes)
    tests = {"id": test, "ood": test.isel(example=slice(40))}
    untrained = (
        fit,
        {
            name: xr.zeros_like(data).assign(rule=data["rule"], type=data["type"])
            for name, data in tests.items()
        },
    )
    return decode(fit, tests, types="type", untrained=untrained, penalties=(0.1,), resamples=20)


def test_the_probe_and_its_controls_are_drawn_with_their_intervals(decoded, ax):
    of_split = decoded.sel(split="ood")
    plots.decoding(of_split, ax)
    controls = ["probe", "shuffled", "control task", "untrained"]
    guesses = ["chance", "most frequent", "most frequent of the split", "most frequent of the type"]
    assert sorted(legend(ax)) == sorted(controls + guesses)
    scores = of_split.sel(metric="accuracy")
    for control in controls:
        line, ends = lines_of(ax)[control]
        expected = scores.sel(control=control)
        assert line.get_xdata().tolist() == [0, 1, 2, 3]
        assert np.allclose(line.get_ydata(), expected["score"])
        bounds = np.stack([expected["score_low"], expected["score_high"]], 1)
        assert np.allclose([ends[x] for x in range(4)], bounds)
    assert names(ax, "x") == ["0", "1", "2", "all"]
    levels = {
        line.get_label(): line.get_ydata()[0] for line in ax.lines if line.get_label() in guesses
    }
    assert levels["chance"] == 0.25
    drawn = [line for line in ax.lines if line.get_label() in guesses]
    assert len({str(line._unscaled_dash_pattern) for line in drawn}) == len(guesses)
    assert levels["most frequent"] == scores["majority"]
    assert levels["most frequent of the split"] == scores["majority_of_split"]
    assert levels["most frequent of the type"] == scores["majority_of_type"] == 1
    assert ax.get_ylabel() == "accuracy of decoding rule from code"


def test_another_metric_has_its_own_guesses(decoded, ax):
    of_split = decoded.sel(split="id")
    plots.decoding(of_split, ax, metric="macro_f1")
    line, _ = lines_of(ax)["probe"]
    assert np.allclose(line.get_ydata(), of_split["score"].sel(metric="macro_f1", control="probe"))
    # One in the number of classes is no chance level of F1.
    assert "chance" not in legend(ax)
    assert ax.get_ylabel().startswith("macro f1 of")


def test_r2_below_0_stays_visible(codes, ax):
    noise = np.random.default_rng(0)
    numbers = [one.assign(rule=("example", noise.random(one.sizes["example"]))) for one in codes]
    found = decode_continuous(numbers[0], {"test": numbers[1]}, label="rule", resamples=20)
    plots.decoding(found, ax)
    assert set(legend(ax)) == {"probe", "shuffled"}
    lowest = float(found["score"].min())
    assert lowest < 0
    assert ax.get_ylim()[0] < lowest
    assert ax.get_ylabel().startswith("R^2 of")


def test_confusion_is_the_share_of_each_true_label(decoded, ax):
    cell = decoded.sel(split="id", layer="1")
    plots.confusion(cell, ax)
    counts = cell["confusion"].to_numpy()
    shares = counts / counts.sum(1, keepdims=True)
    assert np.allclose(ax.images[0].get_array(), shares)
    assert ax.images[0].get_clim() == (0, 1)
    assert names(ax, "x") == names(ax, "y") == ["constant", "difference", "other", "sum"]
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("true", "predicted")
    written = {text.get_position(): text.get_text() for text in ax.texts}
    expected = {
        (column, row): f"{100 * share:.0f}"
        for (row, column), share in np.ndenumerate(shares)
        if share >= 0.1
    }
    assert written == expected


def test_a_label_that_does_not_occur_is_empty(decoded, ax):
    counts = decoded.sel(split="id", layer="1")[["confusion"]].copy(deep=True)
    counts["confusion"][2] = 0
    plots.confusion(counts, ax)
    assert (ax.images[0].get_array()[2] == 0).all()


def test_similar_codes_are_blue_and_opposite_ones_red(codes, ax):
    found = compare_means(codes[1], resamples=2)
    found = found.sel(control="observed", centring="mean", layer="all")
    plots.similarity(found, ax)
    (image,) = ax.images
    assert np.allclose(image.get_array(), found["similarity"])
    assert image.get_clim() == (-1, 1)
    (low, high), middle = (image.to_rgba(value)[:3] for value in (-1.0, 1.0)), image.to_rgba(0.0)
    assert low[0] > low[2]
    assert high[2] > high[0]
    assert min(middle) > 0.9
    assert {(n, n): "1.0" for n in range(4)}.items() <= {
        text.get_position(): text.get_text() for text in ax.texts
    }.items()


def test_results_of_other_probes_and_missing_selections_are_refused(decoded):
    ax = Figure().subplots()
    other = xr.Dataset({"rate": ("site", [1.0])})
    for plot, variable, probe in (
        (plots.decoding, "score", "decode, decode_continuous or decode_each"),
        (plots.confusion, "confusion", "decode"),
        (plots.similarity, "similarity", "compare_means"),
    ):
        with pytest.raises(KeyError, match=f"must hold '{variable}', made by {probe}, got rate"):
            plot(other, ax)
    with pytest.raises(ValueError, match=r"select one label: result.isel\(split=0\)"):
        plots.decoding(decoded, ax)
    with pytest.raises(ValueError, match=r"select one label: result.isel\(split=0\)"):
        plots.confusion(decoded.sel(layer="all"), ax)


def test_along_is_a_dim_of_the_score(decoded, ax):
    by_step = decoded.sel(split="ood").rename(layer="step")
    with pytest.raises(ValueError, match=r"along must be .*\['step'.*\], got 'layer'"):
        plots.decoding(by_step, ax)
    plots.decoding(by_step, ax, along="step")
