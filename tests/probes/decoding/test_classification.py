import numpy as np
import pytest
import torch
import xarray as xr
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, balanced_accuracy_score, f1_score
from sklearn.preprocessing import StandardScaler

from probes import decode
from probes.decoding.classification import METRICS, _class_counts, _metrics

CLASSES, HEADS = 4, 6
CENTRES = np.random.default_rng(99).standard_normal((CLASSES, HEADS)) * 3


def planted(seed, examples=300, *, layers=2, weights=None, noise=1.0):
    """Layer 0 holds noise, the last layer a code around one centre per rule."""
    rng = np.random.default_rng(seed)
    rule = rng.choice(CLASSES, size=examples, p=weights)
    code = rng.standard_normal((examples, layers, HEADS))
    code[:, -1] = CENTRES[rule] + noise * code[:, -1]
    return xr.Dataset(
        {"code": (("example", "layer", "head"), code), "rule": ("example", rule)},
        coords={"layer": np.arange(layers)},
    )


def test_finds_a_planted_code_and_nothing_in_noise():
    fit, tests = planted(0, 500), {"id": planted(1), "ood": planted(2)}
    result = decode(fit, tests, untrained=(planted(3, noise=50.0), {k: planted(4) for k in tests}))
    accuracy = result["score"].sel(metric="accuracy")
    assert list(result["layer"].values) == ["0", "1", "all"]
    assert list(result["control"].values) == ["probe", "shuffled", "untrained"]
    assert (accuracy.sel(control="probe", layer=["1", "all"]) > 0.95).all()
    chance = float(result["chance"])
    assert chance == 1 / CLASSES
    noise = result.sel(control="probe", layer="0", metric="accuracy")
    assert (noise["score_low"] <= chance).all()
    assert (noise["score_high"] >= chance).all()
    # The control task fails on the same codes, so the probe is selective there alone.
    shuffled = result.sel(control="shuffled", metric="accuracy")
    assert (shuffled["score_low"] <= 0.3).all()
    assert (result["selectivity_low"].sel(layer="1") > 0.5).all()
    assert (result["selectivity_low"].sel(layer="0") < 0).all()
    assert (result["selectivity_high"].sel(layer="0") > 0).all()
    # Confusion counts the probe's predictions.
    confusion = result["confusion"].sel(layer="1", split="id")
    assert confusion.sum() == 300
    assert np.trace(confusion) / 300 == accuracy.sel(control="probe", layer="1", split="id")
    assert all(variable.attrs["long_name"] for variable in result.data_vars.values())
    assert result.attrs["seed"] == 0


def test_penalties_may_be_given_twice():
    fit, tests = planted(0), {"t": planted(1)}
    twice, once = (
        decode(fit, tests, penalties=grid, resamples=5)
        for grid in ((0.1, 0.1, 1.0, 1.0, 1.0), (0.1, 1.0))
    )
    xr.testing.assert_allclose(twice["score"], once["score"])


def test_intervals_cover_the_truth():
    # The truth: the same probe on a test set of 50 times the size
    fit = planted(0, 400, noise=4.0)
    truth = decode(fit, {"t": planted(10, 15_000, noise=4.0)}, resamples=1)["score"]
    for seed in range(11, 14):
        result = decode(fit, {"t": planted(seed, noise=4.0)})
        inside = (result["score_low"] <= truth) & (truth <= result["score_high"])
        assert inside.sel(control="probe").mean() >= 0.6
        width = result["score_high"] - result["score_low"]
        # about 4 standard errors of a share: 4 sqrt(p (1 - p) / 300)
        share = result["score"].sel(metric="accuracy")
        expected = 3.92 * np.sqrt(share * (1 - share) / 300)
        np.testing.assert_allclose(width.sel(metric="accuracy"), expected, rtol=0.2)


def test_agrees_with_scikit_learn():
    fit, test = planted(0, noise=4.0), planted(1, noise=4.0)
    result = decode(fit, {"t": test}, penalties=(0.1,))
    for layer in (0, 1):
        scaler = StandardScaler().fit(fit["code"].sel(layer=layer))
        reference = LogisticRegression(C=0.1, tol=1e-8).fit(
            scaler.transform(fit["code"].sel(layer=layer)), fit["rule"]
        )
        predicted = reference.predict(scaler.transform(test["code"].sel(layer=layer)))
        actual = result["score"].sel(control="probe", split="t", layer=str(layer))
        expected = [
            accuracy_score(test["rule"], predicted),
            balanced_accuracy_score(test["rule"], predicted),
            f1_score(test["rule"], predicted, average="macro"),
        ]
        np.testing.assert_allclose(actual, expected, atol=1e-3)


def test_metrics_agree_with_scikit_learn_when_classes_are_missing():
    true = np.array([0, 0, 1, 1, 3, 3, 3])
    predicted = np.array([0, 1, 1, 2, 3, 3, 0])
    example = torch.tensor([0, 0, 0, 2, 2, 2, 2])
    counts = _class_counts(example, torch.from_numpy(true), torch.from_numpy(predicted), 5)
    # As many as classes, not as pairs of them, of which there may be very many.
    assert counts.shape == (3, 3, 5)
    assert counts[0].tolist() == [[1, 1, 0, 0, 0], [2, 1, 0, 0, 0], [1, 2, 0, 0, 0]]
    assert (counts[1] == 0).all()
    with pytest.warns(UserWarning, match="y_pred contains classes"):
        balanced = balanced_accuracy_score(true, predicted)
    expected = [
        accuracy_score(true, predicted),
        balanced,
        f1_score(true, predicted, average="macro", zero_division=0),
    ]
    np.testing.assert_allclose(_metrics(counts.sum(0)), expected)
    assert METRICS == ("accuracy", "balanced_accuracy", "macro_f1")


def test_f1_of_a_class_is_scikit_learns():
    fit, test = (planted(seed, noise=6.0) for seed in (0, 1))
    result = decode(fit, {"t": test}, positive=2).sel(split="t")
    assert list(result["metric"].values) == [*METRICS, "f1"]
    for layer in ("0", "1"):
        counts = result["confusion"].sel(layer=layer).to_numpy()
        true, predicted = (
            np.repeat(grid.ravel(), counts.ravel()) for grid in np.indices((CLASSES, CLASSES))
        )
        expected = f1_score(true, predicted, labels=[2], average=None, zero_division=0)
        f1 = result["score"].sel(control="probe", layer=layer, metric="f1")
        assert float(f1) == pytest.approx(expected.item())
        # The mean of the F1 of all classes is the metric of before.
        macro = result["score"].sel(control="probe", layer=layer, metric="macro_f1")
        assert float(macro) == pytest.approx(f1_score(true, predicted, average="macro"))
    assert result["majority"].sel(metric="f1") in (0, pytest.approx(2 * 0.25 / 1.25, abs=0.1))
    with pytest.raises(ValueError, match=r"positive must be one of the classes"):
        decode(fit, {"t": test}, positive=7)


def test_unbalanced_labels_raise_the_majority_baseline():
    weights = [0.85, 0.05, 0.05, 0.05]
    fit, test = planted(0, 600, weights=weights), planted(1, 600, weights=weights)
    result = decode(fit, {"t": test})
    share = float((test["rule"] == 0).mean())
    assert result["majority"].sel(split="t", metric="accuracy") == share
    assert result["majority"].sel(split="t", metric="balanced_accuracy") == 1 / CLASSES
    # Noise reaches the majority's accuracy, and the other metrics show that it is nothing.
    noise = result["score"].sel(control="probe", layer="0", split="t")
    assert noise.sel(metric="accuracy") == pytest.approx(share, abs=0.01)
    assert noise.sel(metric="balanced_accuracy") == pytest.approx(1 / CLASSES, abs=0.02)
    assert (result["score"].sel(control="probe", layer="1") > 0.9).all()


def test_the_most_frequent_label_of_a_split_can_be_another_one_than_that_of_fit():
    fit = planted(0, 600, weights=[0.85, 0.05, 0.05, 0.05])
    test = planted(1, 600, weights=[0.10, 0.70, 0.10, 0.10])
    result = decode(fit, {"t": test, "fit": fit})
    shares = result.sel(metric="accuracy")
    assert shares["majority"].sel(split="t") == (test["rule"] == 0).mean()
    assert shares["majority_of_split"].sel(split="t") == (test["rule"] == 1).mean()
    assert shares["majority_of_split"].sel(split="fit") == shares["majority"].sel(split="fit")
    balanced = result["majority_of_split"].sel(split="t", metric="balanced_accuracy")
    assert balanced == 1 / CLASSES


def test_samples_of_one_example_stay_on_one_side():
    # Every example has its own constellation, shared by its 8 samples, and a random label: a
    # probe that saw other samples of an example would decode its label.
    rng = np.random.default_rng(0)
    rule = np.repeat(rng.integers(0, 2, size=(120, 1)), 8, axis=1)
    code = np.repeat(rng.standard_normal((120, 1, 40)), 8, axis=1)
    data = xr.Dataset(
        {
            "code": (("example", "feature", "head"), code),
            "rule": (("example", "feature"), rule),
        }
    )
    fit, test = data.isel(example=slice(60)), data.isel(example=slice(60, None))
    grid = (1e-4, 1e3)
    grouped = decode(
        fit, {"t": test}, samples=("example", "feature"), cells=(), penalties=grid, folds=3
    )
    # By example there is nothing to find, so the strong penalty is chosen ...
    assert grouped["C"].sel(control="probe") == grid[0]
    # ... whereas folds over single samples are fooled.
    single = decode(
        fit.stack(sample=("example", "feature")).reset_index("sample"),
        {"t": test.stack(sample=("example", "feature")).reset_index("sample")},
        samples=("sample",),
        cells=(),
        penalties=grid,
        folds=3,
    )
    assert single["C"].sel(control="probe") == grid[1]
    # Intervals over 60 examples are wider than over 480 samples that are taken for independent.
    width = [
        (result["score_high"] - result["score_low"]).sel(control="probe", metric="accuracy").item()
        for result in (grouped, single)
    ]
    assert width[0] > 1.8 * width[1]


def test_cells_and_their_unions():
    def data(seed):
        rng = np.random.default_rng(seed)
        rule = rng.integers(0, 4, size=(150, 2))
        code = rng.standard_normal((150, 2, 3, 2, HEADS))
        # layer 1 tells bit 0 at key "a" and bit 1 at key "b": only both together tell the rule
        code[:, :, 1, 0, 0] += 10 * (rule % 2)
        code[:, :, 1, 1, 0] += 10 * (rule // 2)
        return xr.Dataset(
            {
                "code": (("example", "feature", "layer", "key", "head"), code),
                "rule": (("example", "feature"), rule),
            },
            coords={"key": ["a", "b"], "layer": [3, 4, 10]},
        )

    result = decode(
        data(0).transpose("head", "layer", ...),
        {"t": data(1).transpose("head", "layer", ...)},
        samples=("example", "feature"),
        cells=("layer", "key"),
        resamples=100,
    )
    accuracy = result["score"].sel(control="probe", split="t", metric="accuracy")
    assert accuracy.dims == ("layer", "key")
    assert list(accuracy["layer"].values) == ["3", "4", "10", "all"]
    assert list(accuracy["key"].values) == ["a", "b", "all"]
    for layer in ("4", "all"):
        np.testing.assert_allclose(accuracy.sel(layer=layer), [0.5, 0.5, 1.0], atol=0.1)
    assert (accuracy.sel(layer=["3", "10"]) < 0.35).all()
    assert result["confusion"].dims == ("split", "layer", "key", "true", "predicted")


def test_draws_are_those_of_the_intervals():
    fit, tests = planted(0), {"id": planted(1), "ood": planted(2)}
    result = decode(fit, tests, draws=True, resamples=200)
    draws = result["score_draws"]
    assert draws.dims == ("chain", "draw", "control", "split", "layer", "metric")
    assert draws.shape[:2] == (1, 200)
    for end, quantile in (("low", 0.025), ("high", 0.975)):
        np.testing.assert_allclose(
            draws.quantile(quantile, ("chain", "draw")), result[f"score_{end}"], atol=1e-12
        )
    xr.testing.assert_identical(result.drop_vars("score_draws"), decode(fit, tests, resamples=200))


def test_features_are_matched_by_dim_and_label():
    sizes = {"example": 60, "layer": 2, "head": 3, "d": 3}
    codes = {
        seed: np.random.default_rng(seed).normal(size=tuple(sizes.values())) for seed in (0, 1)
    }
    rules = {seed: (code[:, 1, 0, 2] > 0).astype(int) for seed, code in codes.items()}
    fit, test = (
        xr.Dataset(
            {"code": (tuple(sizes), code), "rule": ("example", rules[seed])},
            {"head": ["a", "b", "c"], "d": range(3)},
        )
        for seed, code in codes.items()
    )
    turned = test.transpose("d", "head", "example", "layer").isel(head=[2, 0, 1], d=[1, 2, 0])
    tests = {"plain": test, "turned": turned, "bare": test.drop_vars(["head", "d"])}
    scores = decode(fit, tests, untrained=(fit, tests), resamples=10)["score"]
    scores = scores.sel(control=["probe", "untrained"])
    assert (scores.sel(layer="1", metric="accuracy") > 0.85).all()
    plain, *others = (scores.sel(split=split, drop=True) for split in tests)
    for other in others:
        xr.testing.assert_equal(other, plain)
    with pytest.raises(ValueError, match=r"must have the labels of fit along 'd', \[0, 1, 2\]"):
        decode(fit, {"t": test.assign_coords(d=range(1, 4))})
    with pytest.raises(ValueError, match=r"'t' must have the layout of fit: .* 'head': 3"):
        decode(fit, {"t": test.rename(head="expert")})


def test_joined_cells_are_optional():
    fit, tests = planted(0), {"t": planted(1)}
    alone = decode(fit, tests, joined=False)
    assert list(alone["layer"].values) == ["0", "1"]
    xr.testing.assert_identical(alone, decode(fit, tests).sel(layer=["0", "1"]))


def test_wide_codes_are_read_cell_by_cell(tmp_path):
    def wide(seed):
        data = planted(seed, 60, layers=3)
        rng = np.random.default_rng(seed + 50)
        noise = xr.DataArray(rng.standard_normal((60, 3, 400)), dims=("example", "layer", "head"))
        return data[["rule"]].assign(code=xr.concat([data["code"], noise], "head"))

    fit, test = wide(0), wide(1)
    for name, data in (("fit", fit), ("test", test)):
        data.to_netcdf(tmp_path / f"{name}.nc", engine="netcdf4")
    on_disk = [
        xr.open_dataset(tmp_path / f"{name}.nc", engine="netcdf4") for name in ("fit", "test")
    ]
    result = decode(on_disk[0], {"t": on_disk[1]})
    assert not any(data["code"]._in_memory for data in on_disk)
    xr.testing.assert_identical(result, decode(fit, {"t": test}))


def test_control_types_can_be_memorised_and_lower_the_selectivity():
    # The code holds the type in one-hot form: any labelling of types is decodable from it.
    def data(seed):
        kind = np.random.default_rng(seed).integers(0, 12, size=400)
        return xr.Dataset(
            {
                "code": (("example", "head"), np.eye(12)[kind]),
                "rule": ("example", kind % 4),
                "kind": ("example", kind),
            }
        )

    arguments = {"fit": data(0), "tests": {"t": data(1)}, "cells": ()}
    by_type = decode(**arguments, types="kind").sel(metric="accuracy", split="t")
    by_sample = decode(**arguments).sel(metric="accuracy", split="t")
    assert by_type["score"].sel(control="probe") == 1
    assert by_type["score"].sel(control="control task") == 1
    assert by_type["score"].sel(control="shuffled") < 0.5
    assert by_type["selectivity"] == 0
    assert by_sample["selectivity"] > 0.5
    assert by_type["majority_of_type"] == 1
    assert by_type["majority"] == by_sample["majority"] < 0.5


def test_the_most_frequent_label_of_a_type_is_that_of_fit():
    def data(kinds, rules):
        code = np.random.default_rng(0).normal(size=(len(kinds), 3))
        return xr.Dataset(
            {
                "code": (("example", "head"), code),
                "rule": ("example", rules),
                "kind": ("example", kinds),
            }
        )

    fit = data([*"aaabbb"] * 5, [0, 0, 1, 2, 2, 1] * 5)
    # Type c is unknown: the most frequent label of all is 0, as frequent as 2 and 1.
    test = data([*"aabbcc"], [0, 1, 2, 0, 0, 1])
    found = decode(fit, {"t": test}, cells=(), types="kind").sel(metric="accuracy", split="t")
    assert found["majority_of_type"] == 3 / 6


def test_the_same_seed_gives_the_same_result():
    fit, tests = planted(0), {"t": planted(1)}
    assert decode(fit, tests).identical(decode(fit, tests))
    assert not decode(fit, tests, seed=1).identical(decode(fit, tests))


def test_constant_features_and_string_labels():
    fit, test = planted(0), planted(1)
    for data in (fit, test):
        data["code"][:, :, 2] = 7.25
        data["rule"] = ("example", np.array(["const", "sum", "diff", "perm"])[data["rule"]])
    result = decode(fit, {"t": test})
    assert result["score"].sel(control="probe", layer="1", metric="accuracy") > 0.9
    assert list(result["true"].values) == ["const", "diff", "perm", "sum"]
    # all constant: nothing but the majority
    fit["code"][:], test["code"][:] = 1.0, 1.0
    result = decode(fit, {"t": test})
    np.testing.assert_allclose(result["score"].sel(control="probe", layer="0"), result["majority"])


def test_classes_that_one_side_lacks():
    fit, test = planted(0, 500), planted(1)
    without = {
        "fit": (fit.isel(example=fit["rule"].to_numpy() != 2), test),
        "test": (fit, test.isel(example=test["rule"].to_numpy() != 2)),
    }
    results = {
        side: decode(a, {"t": b}).sel(control="probe", layer="1", split="t")
        for side, (a, b) in without.items()
    }
    # Never predicted where the fit side lacks it: its recall is 0, the others' as before
    confusion = results["fit"]["confusion"]
    assert confusion.sel(predicted="2").sum() == 0
    assert confusion.sel(true="2").sum() == (test["rule"] == 2).sum()
    assert results["fit"]["score"].sel(metric="balanced_accuracy") < 0.76
    # It does not count where the test side lacks it.
    assert results["test"]["score"].sel(metric="balanced_accuracy") > 0.95
    assert results["test"]["chance"] == 0.25


def test_invalid_input_is_refused():
    fit, test = planted(0, 40), planted(1, 40)
    broken = fit.copy(deep=True)
    broken["code"][3, 0, 0] = np.nan
    broken["code"][4, 1, 1] = np.inf
    with pytest.raises(ValueError, match=r"1 of 40 samples with NaN .* in fit \(layer 0\)"):
        decode(broken, {"t": test})
    with pytest.raises(ValueError, match=r"tests\['t'\]"):
        decode(fit, {"t": broken})
    with pytest.raises(KeyError, match="must hold 'latent'"):
        decode(fit, {"t": test}, code="latent")
    many = fit.assign({f"variable {i}": 0 for i in range(1000)})
    with pytest.raises(KeyError) as caught:
        decode(many, {"t": test}, code="latent")
    assert len(str(caught.value)) < 1000
    with pytest.raises(TypeError, match=r"^fit of decode must be Dataset, got ndarray"):
        decode(fit["code"].to_numpy(), {"t": test})
    with pytest.raises(TypeError, match=r"tests of decode must .*, got dict"):
        decode(fit, {"t": test["code"]})
    with pytest.raises(ValueError, match="must be distinct dims"):
        decode(fit, {"t": test}, cells=("step",))
    with pytest.raises(ValueError, match="at least one dataset"):
        decode(fit, {})
    with pytest.raises(ValueError, match="two classes"):
        decode(fit.isel(example=fit["rule"].to_numpy() == 1), {"t": test})
    with pytest.raises(TypeError, match="decode_continuous"):
        decode(fit.assign(rule=fit["rule"] * 0.5), {"t": test})
    with pytest.raises(ValueError, match="layout of fit"):
        decode(fit, {"t": test.isel(head=slice(3))})
    with pytest.raises(ValueError, match="splits"):
        decode(fit, {"t": test}, untrained=(fit, {"u": test}))
    with pytest.raises(ValueError, match="folds must be in"):
        decode(fit, {"t": test}, folds=41)
    with pytest.raises(ValueError, match="penalties must be one or more positive"):
        decode(fit, {"t": test}, penalties=(0.0,))
    with pytest.raises(ValueError, match="no dims but the samples"):
        decode(fit.assign(rule=fit["code"].isel(head=0)), {"t": test})


def test_codes_that_are_no_real_numbers_are_refused():
    fit, test = planted(0, 40), planted(1, 40)
    with pytest.raises(TypeError, match=r"'code' must hold real numbers, got complex128 in fit"):
        decode(fit.assign(code=fit["code"] * (1 + 1j)), {"t": test})
    with pytest.raises(TypeError, match=r"'code' must hold real numbers, got <U\d+ in tests"):
        decode(fit, {"t": test.assign(code=test["code"].astype(str))})


def test_samples_without_a_label_are_named():
    fit, test = planted(0, 40), planted(1, 40)
    names = np.array(["sum", "max", "min"], dtype=object)[fit["rule"].to_numpy() % 3]
    names[3] = None
    unlabelled = fit.assign(rule=("example", names))
    message = r"'rule' must hold integers or strings, .* got float and str in fit"
    with pytest.raises(TypeError, match=message):
        decode(unlabelled, {"t": test})


def test_number_of_threads_is_restored():
    threads = torch.get_num_threads()
    decode(planted(0, 40), {"t": planted(1, 40)}, resamples=10)
    assert torch.get_num_threads() == threads


def test_steps_that_some_samples_lack_are_decoded_in_those_that_have_them():
    rng = np.random.default_rng(0)
    rule, n_step = rng.integers(3, size=300), rng.integers(1, 4, size=300)
    code = rng.normal(size=(300, 3, 4))
    code[..., 0] += 8 * rule[:, None]
    code[np.arange(3) >= n_step[:, None]] = np.nan
    code_of = ("example", "step", "feature"), code
    data = xr.Dataset({"code": code_of, "rule": ("example", rule)}, {"step": range(3)})
    fit, test = data.isel(example=slice(200)), data.isel(example=slice(200, None))
    with pytest.raises(ValueError, match=r"decode each step of those that have it: data.isel"):
        decode(fit, {"test": test}, cells=("step",))
    for step in range(3):
        have = [part.isel(step=[step]).dropna("example") for part in (fit, test)]
        assert have[0].sizes["example"] == (n_step[:200] > step).sum()
        scores = decode(have[0], {"test": have[1]}, cells=("step",), joined=False, resamples=20)
        accuracy = scores["score"].sel(split="test", metric="accuracy", step=str(step))
        assert accuracy.sel(control="probe") > 0.95
        assert accuracy.sel(control="shuffled") < 0.6
