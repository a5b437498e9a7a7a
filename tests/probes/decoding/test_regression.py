from functools import partial

import numpy as np
import pytest
import xarray as xr
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score
from sklearn.preprocessing import StandardScaler

from probes import decode, decode_continuous, decode_each

SLOPE = np.random.default_rng(99).standard_normal(6)


def planted(seed, examples=300, noise=0.5):
    """Layer 0 is noise, layer 1 is the value plus noise; R^2 is known."""
    rng = np.random.default_rng(seed)
    code = rng.standard_normal((examples, 2, 6))
    value = code[:, 1] @ SLOPE + noise * np.linalg.norm(SLOPE) * rng.standard_normal(examples)
    return xr.Dataset(
        {"code": (("example", "layer", "head"), code), "value": ("example", value + 5)}
    )


def test_recovers_a_planted_relation_and_finds_nothing_in_noise():
    result = decode_continuous(planted(0, 1000), {"t": planted(1, 1000)}).sel(split="t")
    truth = 1 / (1 + 0.5**2)
    probe = result.sel(control="probe", layer=["1", "all"], metric="r2")
    assert (probe["score_low"] <= truth).all()
    assert (probe["score_high"] >= truth).all()
    np.testing.assert_allclose(probe["score"], truth, atol=0.05)
    noise = result.sel(control="probe", layer="0", metric="r2")
    assert noise["score"] < 0.01
    assert noise["score_high"] < 0.05
    assert (result["score"].sel(control="shuffled") < 0.02).all()
    assert (result["selectivity_low"].sel(layer="1") > 0.7).all()
    # Noise is shrunk by the strongest penalty.
    assert result["alpha"].sel(control="probe", layer="0") == 1e4
    assert result["alpha"].sel(control="probe", layer="1") < 1e3


def test_agrees_with_scikit_learn():
    fit, test = planted(0), planted(1)
    result = decode_continuous(fit, {"t": test}, penalties=(10.0,), untrained=(test, {"t": fit}))
    scaler = StandardScaler().fit(fit["code"].sel(layer=1))
    model = Ridge(alpha=10.0).fit(scaler.transform(fit["code"].sel(layer=1)), fit["value"])
    expected = r2_score(test["value"], model.predict(scaler.transform(test["code"].sel(layer=1))))
    got = result["score"].sel(control="probe", layer="1", split="t", metric="r2")
    assert float(got) == pytest.approx(expected, abs=1e-9)
    assert "untrained" in result["control"].values


def test_invalid_labels_are_refused():
    fit, test = planted(0, 40), planted(1, 40)
    with pytest.raises(TypeError, match="must hold numbers"):
        decode_continuous(
            fit.assign(value=("example", ["a"] * 40)),
            {"t": test.assign(value=("example", ["a"] * 40))},
        )
    with pytest.raises(ValueError, match="must vary"):
        decode_continuous(fit, {"t": test.assign(value=("example", np.ones(40)))})
    with pytest.raises(ValueError, match="finite"):
        decode_continuous(fit, {"t": test.assign(value=("example", np.full(40, np.nan)))})


def of_many(seed, **constant):
    """`value` [example, label]: `read` is that of `planted`, `noise` is not in the code."""
    data = planted(seed, 200)
    noise = np.random.default_rng(seed + 50).standard_normal(200)
    columns = {"read": data["value"].to_numpy(), "noise": noise, "one": np.arange(200.0)}
    columns |= {name: np.full(200, value) for name, value in constant.items()}
    values = np.stack(list(columns.values()), axis=1)
    return data.assign(value=(("example", "label"), values)).assign_coords(label=list(columns))


def test_each_of_many_numbers_is_decoded_by_itself():
    fit, tests = of_many(0, one=1.0), {"a": of_many(1), "b": of_many(2, noise=0.0)}
    bare = of_many(3), {"a": of_many(4), "b": of_many(5, noise=0.0)}
    result = decode_each(fit, tests, along="label", untrained=bare, resamples=50, seed=1)
    # What is constant where probes are fitted is left out.
    assert result["label"].to_numpy().tolist() == ["read", "noise"]
    assert result["score"].dims == ("label", "control", "split", "layer", "metric")
    probe = result["score"].sel(control="probe", layer="1", metric="r2")
    assert (probe.sel(label="read") > 0.6).all()
    assert probe.sel(label="noise", split="a") < 0.1
    # What is constant in a test has no score there.
    assert np.isnan(result["score"].sel(label="noise", split="b")).all()
    alone = decode_continuous(
        *(fit.sel(label="read"), {name: test.sel(label="read") for name, test in tests.items()}),
        untrained=(
            bare[0].sel(label="read"),
            {n: test.sel(label="read") for n, test in bare[1].items()},
        ),
        resamples=50,
        seed=1,
    )
    xr.testing.assert_equal(result.sel(label="read", drop=True), alone)


def test_each_of_several_classes_is_decoded_with_its_own_decoder():
    """A class that layer 1 shows, one at random, and one that is the same everywhere."""

    def of_classes(seed):
        data = of_many(seed)
        read = data["value"].sel(label="read", drop=True)
        shown = read > read.mean()
        noise = xr.DataArray(np.random.default_rng(seed).random(len(shown)) < 0.5, dims="example")
        has = xr.concat([shown, noise, xr.ones_like(shown)], "label")
        return (
            data[["code"]]
            .drop_vars("label", errors="ignore")
            .assign(has=has.assign_coords(label=["shown", "noise", "always"]))
        )

    decoder = partial(decode, positive=True)
    tests = {"t": of_classes(1)}
    result = decode_each(of_classes(0), tests, along="label", label="has", decoder=decoder)
    assert result["label"].to_numpy().tolist() == ["shown", "noise"]
    f1 = result["score"].sel(split="t", layer="1", metric="f1")
    assert f1.sel(label="shown", control="probe") > 0.8
    assert f1.sel(label="shown", control="shuffled") < 0.7
    accuracy = result["score"].sel(split="t", layer="1", metric="accuracy", control="probe")
    assert abs(accuracy.sel(label="noise") - 0.5) < 0.12


def test_the_dim_of_the_labels_must_be_one_of_theirs():
    data = xr.Dataset(
        {"code": (("example", "d"), np.eye(4)), "value": (("example", "term"), np.eye(4))}
    )
    with pytest.raises(KeyError, match=r"along must be a dim of 'value', example, term, got 'trm'"):
        decode_each(data, {"t": data}, along="trm", cells=())


def test_numbers_that_never_vary_are_refused():
    fit = of_many(0, read=0.0, noise=0.0, one=1.0)
    with pytest.raises(ValueError, match="must vary"):
        decode_each(fit, {"a": of_many(1)}, along="label")
