"""Similarity of mean codes: against numpy, with labels that share a code and labels at random."""

import numpy as np
import pytest
import xarray as xr

from probes import compare_means

CENTRES = np.random.default_rng(99).standard_normal((4, 32))
CENTRES[3] = CENTRES[2]


def planted(seed=0, examples=400, *, offset=0.0):
    """Layer 0 holds noise, layer 1 a code around one centre per label; 2 and 3 share theirs."""
    rng = np.random.default_rng(seed)
    label = rng.integers(4, size=(examples, 2))
    code = rng.standard_normal((examples, 2, 2, 32))
    code[:, :, 1] = CENTRES[label] + 0.3 * code[:, :, 1]
    dims = ("example", "feature")
    variables = {"code": ((*dims, "layer", "head"), code + offset), "rule": (dims, label)}
    return xr.Dataset(variables)


def compare(data):
    return compare_means(data, samples=("example", "feature"), resamples=100)


def test_labels_with_the_same_code_are_similar_and_others_are_not():
    found = compare(planted())
    similarity = found["similarity"].sel(control="observed", layer="1", centring="none")
    np.testing.assert_allclose(np.diag(similarity), 1)
    assert similarity.sel(first=2, second=3) > 0.98
    others = [(0, 1), (0, 2), (1, 2), (1, 3)]
    assert all(abs(similarity.sel(first=a, second=b)) < 0.6 for a, b in others)
    # Noise has no code in common, and labels at random all have the same one.
    noise = found["similarity"].sel(control="observed", layer="0", centring="none")
    assert all(abs(noise.sel(first=a, second=b)) < 0.6 for a, b in [*others, (2, 3)])
    shuffled = found["similarity"].sel(control="shuffled", layer="1", centring="none")
    assert shuffled.min() > 0.8


def test_it_is_the_cosine_of_means():
    data = planted(1, 50)
    found = compare(data)["similarity"].sel(control="observed")
    code, label = data["code"].to_numpy().reshape(100, 2, 32), data["rule"].to_numpy().ravel()
    for centring, whole in (("none", 0), ("mean", code.mean(0))):
        parts = {"0": (code - whole)[:, 0], "1": (code - whole)[:, 1]}
        parts["all"] = (code - whole).reshape(100, -1)
        for layer, part in parts.items():
            a, b = (part[label == number].mean(0) for number in (1, 3))
            cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
            value = found.sel(centring=centring, layer=layer, first=1, second=3)
            assert float(value) == pytest.approx(cosine)


def test_a_common_part_makes_all_codes_similar_unless_it_is_taken_away():
    found = compare(planted(offset=20.0))["similarity"].sel(control="observed", layer="1")
    assert found.sel(centring="none").min() > 0.9
    centred = found.sel(centring="mean")
    assert centred.sel(first=2, second=3) > 0.95
    assert centred.sel(first=0, second=1) < 0.5


def test_intervals_hold_the_similarity_of_more_examples():
    at = {"control": "observed", "layer": "1", "centring": "none", "first": 0, "second": 1}
    found = compare(planted(5, 100)).sel(at)
    large = float(compare(planted(6, 4_000))["similarity"].sel(at))
    assert found["similarity_low"] - 0.02 < large < found["similarity_high"] + 0.02
    assert found["similarity_high"] - found["similarity_low"] < 0.2


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_means_that_are_zero_but_for_rounding_have_no_similarity(dtype):
    label = np.arange(60) % 3
    constant = np.full((60, 7), 0.1, dtype)
    opposed = np.where(np.arange(60)[:, None] < 30, 0.3, -0.3) * np.ones((60, 7), dtype)
    for code, centring in ((constant, "mean"), (opposed, "none"), (opposed, "mean")):
        data = xr.Dataset({"code": (("example", "d"), code), "rule": ("example", label)})
        found = compare_means(data, cells=(), resamples=10)["similarity"]
        assert found.sel(centring=centring, control="observed").isnull().all()
    data["code"] = ("example", "d"), constant + np.eye(3, 7, dtype=dtype)[label] / 1000
    found = compare_means(data, cells=(), resamples=10)["similarity"].sel(control="observed")
    assert found.notnull().all()


def test_wrong_arguments_are_refused():
    data = planted(examples=5)
    with pytest.raises(KeyError, match="must hold 'kind'"):
        compare_means(data, label="kind")
    data = data.isel(feature=0)
    with pytest.raises(TypeError, match=r"label 'rule' must hold classes .* got \['float64'\]"):
        compare_means(data.assign(rule=data["rule"] * 0.5))
    with pytest.raises(ValueError, match="resamples must be at least 1, got 0"):
        compare_means(data, resamples=0)
