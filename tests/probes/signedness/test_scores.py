import itertools

import numpy as np
import pytest
import torch
import xarray as xr

from mechanisms import AttentionConfig, CodaAttentionConfig
from probes import relative_weights, score_saturation, score_signedness, strongest_head

PAIRS = ("example", "query_pos", "key_pos")


def label(array, *more):
    return xr.DataArray(array, dims=("example", *more, "query_pos", "key_pos"))


def plant(seed, *, examples=60, n_query=4, n_key=6, noise=0.0, size=0.95):
    """Signs, and a pattern that has them: 1 with noise of this share of other signs."""
    rng = np.random.default_rng(seed)
    sign = rng.integers(-1, 2, size=(examples, n_query, n_key))
    other = rng.integers(-1, 2, size=sign.shape)
    pattern = size * np.where(rng.random(sign.shape) < noise, other, sign)
    return label(pattern), label(sign)


def test_shares_and_numbers_by_hand():
    # Two queries, four keys; the last key is not valid for the second query.
    one = [[1.0, 0.5, 0.1, -0.9], [-0.3, -0.3, 0.0, 7.0]]
    valid = label(np.array([[[True] * 4, [True, True, True, False]]] * 2))
    result = score_signedness(label(np.array([one, one])), valid=valid, bins=4, resamples=10)
    assert result["share"].sel(kind="added") == pytest.approx(1 / 7)
    assert result["share"].sel(kind="partly_added") == pytest.approx(1 / 7)
    assert result["share"].sel(kind="deleted") == pytest.approx(2 / 7)
    assert result["share"].sel(kind="partly_subtracted") == pytest.approx(2 / 7)
    assert result["share"].sel(kind="subtracted") == pytest.approx(1 / 7)
    assert result["share"].dims == ("kind",)
    np.testing.assert_allclose(result["bin"], [-0.75, -0.25, 0.25, 0.75])
    np.testing.assert_allclose(result["distribution"], [1 / 7, 2 / 7, 2 / 7, 2 / 7])
    assert result["added"] == 1
    assert result["subtracted"] == 1.5
    first = (1 + 0.5 + 0.1) ** 2 / (1 + 0.25 + 0.01)
    assert result["effective_added"] == pytest.approx(first / 2)
    assert result["effective_subtracted"] == pytest.approx((1 + 2) / 2)
    # Equal examples leave no doubt.
    for name in ("share", "added", "effective_subtracted"):
        np.testing.assert_allclose(result[f"{name}_low"], result[name])
        np.testing.assert_allclose(result[f"{name}_high"], result[name])
    assert "accuracy" not in result


def test_what_is_beyond_the_limit_is_in_the_last_bins():
    pattern = label(np.array([[[-9.0, -0.1, 0.1, 3.0]]] * 2))
    result = score_signedness(pattern, bins=2, resamples=2)
    np.testing.assert_allclose(result["distribution"], [0.5, 0.5])
    wide = score_signedness(pattern, bins=6, limit=9, resamples=2)
    np.testing.assert_allclose(wide["distribution"], [0.25, 0, 0.25, 0.25, 0.25, 0])


def loops(pattern, sign, near_zero):
    """Agreement as in the docstring, one pair at a time."""
    counts = {half: np.zeros((3, 3)) for half in (0, 1)}
    for e, q, k in itertools.product(*map(range, pattern.shape)):
        weight = float(pattern[e, q, k])
        found = 0 if abs(weight) <= near_zero else (1 if weight > 0 else -1)
        counts[e % 2][int(sign[e, q, k]) + 1, found + 1] += 1

    def balanced(table):
        return np.mean([table[row, row] / table[row].sum() for row in range(3)])

    if balanced(counts[0][:, ::-1]) > balanced(counts[0]):
        counts[1] = counts[1][:, ::-1]
    table = counts[1]
    return table / table.sum(1, keepdims=True), np.trace(table) / table.sum(), balanced(table)


@pytest.mark.parametrize("way", [1, -1])
def test_agreement_is_counted_pair_by_pair(way):
    pattern, sign = plant(0, noise=0.4)
    result = score_signedness(way * pattern, sign=sign, resamples=20).sel(control="observed")
    confusion, accuracy, balanced = loops(way * pattern.to_numpy(), sign.to_numpy(), 0.1)
    np.testing.assert_allclose(result["confusion"], confusion)
    assert result["accuracy"] == pytest.approx(accuracy)
    assert result["balanced_accuracy"] == pytest.approx(balanced)
    assert result["turned"] == (way < 0)
    assert result["accuracy_low"] < accuracy < result["accuracy_high"]


def test_planted_signs_are_found_and_the_control_is_at_chance():
    pattern, sign = plant(1, examples=200)
    result = score_signedness(pattern, sign=sign, resamples=50)
    found, control = (result.sel(control=name) for name in ("observed", "shuffled"))
    assert found["accuracy"] == found["balanced_accuracy"] == found["accuracy_low"] == 1
    np.testing.assert_allclose(found["confusion"], np.eye(3))
    assert result["balanced_chance"].to_numpy().tolist() == [1 / 3, 1 / 3]
    assert control["balanced_accuracy"] == pytest.approx(1 / 3, abs=0.05)
    assert control["accuracy"] == pytest.approx(float(control["chance"]), abs=0.05)


def test_noise_agrees_as_often_as_chance():
    covered = []
    for seed in range(20):
        pattern, sign = plant(seed, noise=1.0, examples=40)
        result = score_signedness(pattern, sign=sign, resamples=200, seed=seed).isel(control=0)
        low, high = (result[f"balanced_accuracy_{side}"] for side in ("low", "high"))
        covered.append(low <= result["balanced_chance"] <= high)
    # 95% intervals, 20 times: fewer than 15 that hold it have a chance of 3e-4.
    assert sum(covered) >= 15


def test_chance_counts_signs_that_are_not_planted_as_wrong():
    rng, shape = np.random.default_rng(0), (60, 6, 6)
    sign = label(rng.choice([-1, 1], size=shape))
    pattern = label(rng.normal(size=shape) * (rng.random(shape) < 0.4))
    result = score_signedness(pattern, sign=sign, near_zero=0.0, resamples=5)
    np.testing.assert_allclose(result["balanced_chance"], 0.2, atol=0.01)
    np.testing.assert_allclose(result["balanced_accuracy"], result["balanced_chance"], atol=0.03)


def test_a_match_is_any_sign_where_a_token_counts():
    pattern, sign = plant(7, noise=0.5, examples=100)
    result = score_signedness(pattern, sign=sign, resamples=5)
    scored, planted = pattern[1::2].to_numpy(), sign[1::2].to_numpy()
    counts = np.abs(scored) > 0.1
    rates = [(counts if kind else ~counts)[planted == kind].mean() for kind in (-1, 0, 1)]
    expected = ((rates[0] + rates[2]) / 2 + rates[1]) / 2
    assert result["matched"].sel(control="observed") == pytest.approx(expected)
    # Weights that have all matches and no sign; and signs that are dealt out anew.
    unsigned = score_signedness(abs(sign) * 0.5, sign=sign, resamples=5)
    assert unsigned["matched"].sel(control="observed") == 1
    assert unsigned["balanced_accuracy"].sel(control="observed") == pytest.approx(2 / 3)
    assert unsigned["matched"].sel(control="shuffled") == pytest.approx(0.5, abs=0.05)


def test_what_matches_is_not_known_without_tokens_that_are_ignored():
    pattern, sign = plant(8)
    result = score_signedness(pattern, sign=xr.where(sign == 0, 1, sign), resamples=5)
    assert result["matched"].isnull().all()


def test_relative_weights_are_those_of_the_size_of_a_head():
    pattern, sign = plant(9, noise=0.3)
    heads = xr.concat([0.003 * pattern, -50 * pattern, 0 * pattern], "head")
    relative = relative_weights(heads)
    assert relative.dims == heads.dims
    np.testing.assert_allclose(relative.isel(head=0), np.sign(pattern), atol=1e-6)
    np.testing.assert_allclose(relative.isel(head=1), -np.sign(pattern), atol=1e-6)
    assert (relative.isel(head=2) == 0).all()
    # Where signs are those of weights beyond a tenth, the size of a head says nothing any more.
    found, alone = (
        score_signedness(one, sign=sign, resamples=5).sel(control="observed")
        for one in (relative, pattern)
    )
    for name in ("balanced_accuracy", "matched"):
        np.testing.assert_allclose(found[name][:2], alone[name])
    bare = score_signedness(heads, sign=sign, resamples=5).sel(control="observed")
    assert bare["balanced_accuracy"][0] == pytest.approx(1 / 3)


def test_relative_weights_leave_what_is_not_valid_out():
    pattern = label(np.array([[[1.0, -2.0, 3.0, 1000.0]]] * 2))
    valid = xr.DataArray([True, True, True, False], dims="key_pos")
    largest = relative_weights(pattern, valid=valid, quantile=1.0)
    np.testing.assert_allclose(largest[0, 0, :3], [1 / 3, -2 / 3, 1])
    np.testing.assert_allclose(relative_weights(pattern, quantile=0.5)[0, 0, :2], [0.4, -0.8])


def heads_of(rng, n_heads=3):
    """Heads of different sizes; of the examples the second one has most queries."""
    values = rng.uniform(-1, 1, (4, 2, n_heads, 3, 5)) * (1 + np.arange(n_heads))[:, None, None]
    pattern = xr.DataArray(values, dims=("example", "layer", "head", "query_pos", "key_pos"))
    pattern = pattern.assign_coords(layer=[0, 3], head=range(n_heads))
    there = xr.DataArray([2, 3, 1, 2], dims="example") > xr.DataArray(range(3), dims="query_pos")
    return pattern.where(there)


def test_the_strongest_head_has_the_greatest_weights():
    pattern = heads_of(np.random.default_rng(0))
    pattern[{"layer": 1, "head": 1}] *= 10
    data = xr.Dataset({"pattern": pattern, "gate": abs(pattern), "key": ("key_pos", list("abcde"))})
    one = strongest_head(data, pattern)
    assert (one["layer"].item(), one["head"].item()) == (3, 1)
    np.testing.assert_array_equal(one["pattern"], pattern[1, 1, 1])
    np.testing.assert_array_equal(one["gate"], abs(pattern[1, 1, 1]))
    assert "".join(one["key"].to_numpy()) == "abcde"
    # What is not known is not chosen.
    one = strongest_head(data, pattern.where(pattern["layer"] == 0))
    assert (one["layer"].item(), one["head"].item()) == (0, 2)


def test_the_strongest_head_agrees_best_where_signs_are_planted():
    rng = np.random.default_rng(1)
    pattern = heads_of(rng)
    sign = xr.DataArray(rng.integers(-1, 2, (4, 3, 5)), dims=PAIRS)
    pattern[{"layer": 0, "head": 0}] = -0.01 * sign
    one = strongest_head(xr.Dataset({"pattern": pattern, "sign": sign}), pattern)
    assert (one["layer"].item(), one["head"].item()) == (0, 0)
    np.testing.assert_allclose(one["pattern"], -0.01 * one["sign"])


def test_frequent_signs_raise_accuracy_but_not_balanced_accuracy():
    pattern, sign = plant(2, examples=100)
    sign = xr.where(sign < 1, 0, sign)
    nothing = score_signedness(0 * pattern, sign=sign, resamples=5).isel(control=0)
    assert nothing["accuracy"] > 0.6
    assert nothing["accuracy"] == pytest.approx(float(nothing["chance"]))
    assert nothing["balanced_accuracy"] == nothing["balanced_chance"] == 0.5
    assert nothing["confusion"].sel(sign=-1).isnull().all()


def test_each_head_may_have_its_own_way_round():
    pattern, sign = plant(3)
    heads = xr.concat([pattern, -pattern, 0 * pattern], "head")
    both = xr.concat([heads, 2 * heads], xr.DataArray([100, 200], dims="train_step", name="t"))
    both = both.rename(t="train_step") if "t" in both.dims else both
    both = both.assign_coords(train_step=[100, 200])
    result = score_signedness(both, sign=sign, resamples=5).sel(control="observed")
    assert result["balanced_accuracy"].dims == ("train_step", "head")
    assert result["train_step"].to_numpy().tolist() == [100, 200]
    np.testing.assert_allclose(result["balanced_accuracy"], [[1, 1, 1 / 3]] * 2)
    assert result["turned"].to_numpy().tolist() == [[0, 1, 0]] * 2
    assert result["share"].sel(kind="added", train_step=100)[2] == 0
    alone = score_signedness(-pattern, sign=sign, resamples=5).sel(control="observed")
    for name in ("share", "distribution", "added", "effective_subtracted_low", "confusion"):
        np.testing.assert_allclose(result[name].isel(train_step=0, head=1), alone[name])


def test_which_way_round_is_not_found_where_it_is_scored():
    pattern, sign = plant(4)
    other = pattern.copy()
    other[1::2] *= -1
    result = score_signedness(other, sign=sign, resamples=5).sel(control="observed")
    assert result["balanced_accuracy"] == pytest.approx(1 / 3)
    assert result["confusion"].sel(sign=1, found=-1) == 1


def test_pairs_that_are_not_valid_count_for_nothing():
    pattern, sign = plant(5, n_key=5)
    more = pattern.pad(key_pos=(0, 2), constant_values=np.nan)
    valid = xr.DataArray([True] * 5 + [False] * 2, dims="key_pos")
    padded = score_signedness(
        more, sign=sign.pad(key_pos=(0, 2), constant_values=9), valid=valid, resamples=10
    )
    bare = score_signedness(pattern, sign=sign, resamples=10)
    for name in bare.data_vars:
        if name != "confusion" and "shuffled" not in name:
            observed = [
                x[name].sel(control="observed") if "control" in x[name].dims else x[name]
                for x in (padded, bare)
            ]
            np.testing.assert_allclose(*observed, err_msg=str(name))


def test_intervals_are_over_examples():
    pattern, _ = plant(6, examples=300)
    once = score_signedness(pattern)
    four = score_signedness(xr.concat([pattern] * 4, "query_pos"))
    for bound in ("share_low", "share_high", "added_low", "effective_added_high"):
        np.testing.assert_allclose(once[bound], four[bound])
    rate = float(once["share"].sel(kind="deleted"))
    width = float((once["share_high"] - once["share_low"]).sel(kind="deleted"))
    assert width == pytest.approx(2 * 1.96 * (rate * (1 - rate) / (300 * 24)) ** 0.5, rel=0.15)


def patterns_of(config):
    """What the attention of a layer, drawn at random, shows."""
    attention = config.build(16, generator=torch.Generator().manual_seed(0))
    kept = {}
    for name in ("hook_pattern", "hook_affinity", "hook_gate"):
        if hasattr(attention, name):
            getattr(attention, name).add_hook(
                lambda value, hook, name=name: kept.__setitem__(name, value.detach().numpy())
            )
    x = 2 * torch.randn(8, 6, 16, generator=torch.Generator().manual_seed(1))
    attention(x, x)
    return {name: label(value, "head") for name, value in kept.items()}


def test_attention_of_every_kind_can_be_scored():
    sizes = {"n_heads": 2, "d_head": 8}
    softmax = score_signedness(
        patterns_of(AttentionConfig.named("softmax", **sizes))["hook_pattern"], resamples=5
    )
    assert (softmax["subtracted"] == 0).all()
    assert (softmax["effective_subtracted"] == 0).all()
    assert ((softmax["effective_added"] > 1) & (softmax["effective_added"] < 6)).all()
    hyla = patterns_of(AttentionConfig.named("hyla", **sizes))["hook_pattern"]
    assert (score_signedness(hyla, resamples=5)["subtracted"] > 1).all()
    shown = patterns_of(CodaAttentionConfig(**sizes))
    coda = score_signedness(shown["hook_pattern"], near_zero=1e-3, resamples=5)
    assert (coda["subtracted"] > 1).all()
    # Uncentred and not doubled: the gate is at most a half.
    assert (coda["share"].sel(kind=["added", "subtracted"]) == 0).all()
    assert (coda["share"].sum("kind") == 1).all()
    gate = score_saturation(shown["hook_gate"], low=0.05, high=0.5, resamples=5)
    assert (gate["saturated"].sel(side="high") == 0).all()


def test_every_variable_says_what_it_is():
    pattern, sign = plant(0)
    result = score_signedness(pattern, sign=sign, resamples=5)
    assert all(result[name].attrs["long_name"] for name in result.data_vars)
    assert result.attrs["interval"].startswith("percentile bootstrap over examples, 95%")


def test_invalid_input_is_refused():
    pattern, sign = plant(0)
    with pytest.raises(ValueError, match=r"pattern must have the dims \('example', 'query_pos', "):
        score_signedness(pattern.rename(key_pos="pos"))
    with pytest.raises(ValueError, match=r"near_zero must be in \[0, near_one = 0\.9\)"):
        score_signedness(pattern, near_zero=0.9)
    with pytest.raises(ValueError, match=r"limit must be above 0 and finite, got 0"):
        score_signedness(pattern, limit=0)
    with pytest.raises(ValueError, match=r"limit must be above 0 and finite, got inf"):
        score_signedness(pattern, limit=np.inf)
    with pytest.raises(ValueError, match=r"bins must be at least 1, got 0"):
        score_signedness(pattern, bins=0)
    with pytest.raises(ValueError, match=r"resamples must be at least 1, got 0"):
        score_signedness(pattern, resamples=0)
    with pytest.raises(TypeError, match=r"valid must hold bool, got int64"):
        score_signedness(pattern, valid=sign)
    with pytest.raises(ValueError, match=r"valid must hold at least one pair"):
        score_signedness(pattern, valid=sign > 3)
    with pytest.raises(ValueError, match=r"pattern must be finite where valid"):
        score_signedness(pattern * np.nan)
    with pytest.raises(TypeError, match=r"sign must hold integers, got float64"):
        score_signedness(pattern, sign=sign * 1.0)
    with pytest.raises(ValueError, match=r"sign must be -1, 0 or 1 .* values in -2\.\.2"):
        score_signedness(pattern, sign=2 * sign)
    with pytest.raises(ValueError, match=r"sign must have only dims of .* got .*'query_pos': 3"):
        score_signedness(pattern, sign=sign[:, :3])
    with pytest.raises(ValueError, match=r"valid must hold pairs among the even examples"):
        score_signedness(pattern[:1], sign=sign[:1])
    with pytest.raises(ValueError, match=r"quantile must be in \(0, 1\], got 0"):
        relative_weights(pattern, quantile=0)
    with pytest.raises(
        ValueError, match=r"pattern must have the dims .* and a weight that is not NaN"
    ):
        strongest_head(pattern.to_dataset(name="x"), pattern.expand_dims("head") * np.nan)
    with pytest.raises(TypeError, match=r"valid must hold bool, got int64"):
        relative_weights(pattern, valid=sign)
