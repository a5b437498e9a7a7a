import itertools

import numpy as np
import pytest
import xarray as xr

from probes import score_pairing, score_specialization

DIMS = ("example", "pos", "search", "retrieval")


def label(scores, truth):
    return xr.DataArray(scores, dims=DIMS), xr.DataArray(truth, dims=("example", "pos", "wanted"))


def plant(seed, searches, retrievals, *, sharpness, examples=80, n_model=None, n_true=None):
    """Value scores in which true search t is the model's searches[t], v is retrievals[v]."""
    rng = np.random.default_rng(seed)
    n_searches, n_retrievals = n_model or (len(searches), len(retrievals))
    truth = rng.integers(len(retrievals), size=(examples, 5, len(searches)))
    logits = rng.standard_normal((examples, 5, n_searches, n_retrievals))
    for true, model in enumerate(searches):
        if model >= 0:
            wanted = np.array(retrievals)[truth[..., true]]
            logits[:, :, model] += sharpness * (wanted[..., None] == np.arange(n_retrievals))
    scores = np.exp(logits)
    return label(scores / scores.sum(-1, keepdims=True), truth)


def attend(seed, truth, searches, n_searches, *, length=5, follow=0.6):
    """Winners, and attention that finds them: true search t with the model's searches[t]."""
    rng = np.random.default_rng(seed)
    winner = rng.integers(length, size=truth.shape)
    pattern = rng.dirichlet(np.ones(length), size=(len(truth), n_searches, length))
    for true, model in enumerate(searches):
        found = np.eye(length)[winner[..., true]]
        pattern[:, model] = follow * found + (1 - follow) * pattern[:, model]
    return {
        "winner": xr.DataArray(winner, dims=("example", "pos", "wanted")),
        "pattern": xr.DataArray(pattern, dims=("example", "search", "query_pos", "key_pos")),
    }


def count_right(scores, truth, searches, retrievals, examples):
    right = [0] * truth.shape[2]
    for e, p, t in itertools.product(examples, range(truth.shape[1]), range(truth.shape[2])):
        best = int(np.argmax(scores[e, p, searches[t]]))
        right[t] += best == retrievals[truth[e, p, t]]
    return right


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("attention", [False, True])
def test_assignment_and_agreement_equal_those_tried_one_by_one(seed, attention):
    rng = np.random.default_rng(seed)
    planted = rng.permutation(3).tolist(), rng.permutation(3).tolist()
    scores, truth = plant(seed, *planted, sharpness=1.0)
    also = attend(seed, truth, planted[0], 3) if attention else {}
    result = score_pairing(scores, truth, resamples=2, **also).sel(fitted="all", group="all")
    even, odd = range(0, 80, 2), range(1, 80, 2)
    tried = itertools.product(itertools.permutations(range(3)), repeat=2)
    best = max(
        tried,
        key=lambda pair: sum(count_right(scores.to_numpy(), truth.to_numpy(), *pair, even)),
    )
    assert result["search_assignment"].to_numpy().tolist() == list(best[0]) == planted[0]
    assert result["retrieval_assignment"].to_numpy().tolist() == list(best[1]) == planted[1]
    right = np.array(count_right(scores.to_numpy(), truth.to_numpy(), *best, odd)) / (40 * 5)
    observed = result["agreement"].sel(control="observed")
    np.testing.assert_allclose(observed, [*right, right.mean()])
    if attention:
        for t, m in itertools.product(range(3), range(3)):
            seen = [
                also["pattern"][e, m, p, also["winner"][e, p, t]] for e in even for p in range(5)
            ]
            assert result["affinity"][t, m] == pytest.approx(np.mean(seen))


def test_a_hard_pairing_is_recovered_and_the_control_is_at_chance():
    scores, truth = plant(0, [2, 0, 1], [3, 1, 0, 2], sharpness=100, examples=200)
    result = score_pairing(scores, truth, resamples=100).sel(fitted="all", group="all")
    observed, shuffled = (result.sel(control=c) for c in ("observed", "shuffled"))
    assert (observed["agreement"] == 1).all()
    assert (observed["agreement_low"] == 1).all()
    for name in ("specialization", "collapse", "adjusted_mutual_information"):
        np.testing.assert_allclose(observed[name], 1, atol=2e-3)
    expected = np.eye(4)[[3, 1, 0, 2]]
    np.testing.assert_allclose(observed["activation"], np.tile(expected, (4, 1, 1)), atol=1e-9)
    np.testing.assert_allclose(observed["entropy"], 0, atol=1e-9)
    np.testing.assert_allclose(observed["chance"], 1 / 4, atol=0.01)
    np.testing.assert_allclose(shuffled["agreement"], 1 / 4, atol=0.08)
    assert (abs(shuffled["adjusted_mutual_information"]) < 0.02).all()


def test_noise_agrees_as_often_as_chance():
    covered = []
    for seed in range(20):
        result = score_pairing(
            *plant(seed, [0, 1], [0, 1, 2], sharpness=0.0), resamples=100, seed=seed
        ).sel(fitted="all", group="all", control="observed", search="pooled")
        covered.append(result["agreement_low"] <= result["chance"] <= result["agreement_high"])
        assert abs(result["agreement"] - 1 / 3) < 0.12
    # 95% intervals, 20 times: fewer than 16 that hold it have a chance of 3e-3.
    assert sum(covered) >= 16


def test_agreement_is_not_scored_where_it_was_fitted():
    # Each choice follows a rule of its own in even examples, and another in odd ones.
    truth = np.tile(np.arange(4), (40, 1))[..., None]
    shift = np.arange(40) % 2
    scores = np.eye(4)[(truth + shift[:, None, None]) % 4]
    result = score_pairing(*label(scores, truth), resamples=10)
    assert result["retrieval_assignment"].to_numpy().tolist() == [[0, 1, 2, 3]]
    assert (result["agreement"].sel(control="observed") == 0).all()


@pytest.mark.parametrize("attention", [False, True])
def test_more_in_the_model_than_in_the_task(attention):
    scores, truth = plant(0, [3, 1], [4, 0, 2], sharpness=100, n_model=(4, 6))
    also = attend(0, truth, [3, 1], 4) if attention else {}
    result = score_pairing(scores, truth, resamples=10, **also).isel(fitted=0, group=0)
    assert result["search_assignment"].to_numpy().tolist() == [3, 1]
    assert result["retrieval_assignment"].to_numpy().tolist() == [4, 0, 2]
    assert (result["agreement"].sel(control="observed") == 1).all()
    assert result["pairing"].shape == (4, 6)
    np.testing.assert_allclose(result["pairing"].sum("model_retrieval"), 1)


def test_fewer_in_the_model_than_in_the_task():
    # One search, two retrievals: for v = 0 and 2 of the second true search.
    scores, truth = plant(0, [-1, 0], [0, 2, 1], sharpness=100, n_model=(1, 2), examples=400)
    result = score_pairing(scores, truth, resamples=10).isel(fitted=0, group=0)
    assert result["search_assignment"].to_numpy().tolist() == [-1, 0]
    assert result["retrieval_assignment"].to_numpy().tolist() == [0, -1, 1]
    agreed = result["agreement"].sel(control="observed").to_numpy()
    share = float((truth.to_numpy()[1::2, :, 1] != 1).mean())
    np.testing.assert_allclose(agreed, [0, share, share / 2])
    assert result["chance"].sel(search="0") == 0
    special = result["specialization"].sel(control="observed")
    assert special.isnull().to_numpy().tolist() == [True, False, False]
    assert result["activation"].sel(search="0").isnull().all()


def test_a_pairing_that_switches_between_groups():
    rules = {"train": [0, 1, 2], "ood": [1, 0, 2]}
    parts = [plant(n, [1, 0], rule, sharpness=100) for n, rule in enumerate(rules.values())]
    # In turns, so that halves by the parity of all examples would not do.
    scores, truth = (
        xr.concat(arrays, "group").transpose("example", "group", ...).stack(e=("example", "group"))
        for arrays in zip(*parts, strict=True)
    )
    scores, truth = (
        x.drop_vars(["e", "example", "group"], errors="ignore") for x in (scores, truth)
    )
    result = score_pairing(
        scores.rename(e="example"),
        truth.rename(e="example"),
        groups=xr.DataArray(["train", "ood"] * 80, dims="example"),
        resamples=100,
    )
    assert result["group"].to_numpy().tolist() == ["train", "ood"]
    for group, rule in rules.items():
        assert result["retrieval_assignment"].sel(fitted=group).to_numpy().tolist() == rule
    agreed = result["agreement"].sel(control="observed", search="pooled")
    np.testing.assert_allclose(np.diag(agreed), 1)
    for fitted, group in (("train", "ood"), ("ood", "train")):
        other = {"fitted": fitted, "group": group}
        assert agreed.sel(other) == pytest.approx(1 / 3, abs=0.08)
        high = result["agreement_high"].sel(control="observed", search="pooled", **other)
        assert high < 0.5
    alone = score_pairing(*parts[0], resamples=100).isel(fitted=0, group=0)
    mine = result.sel(fitted="train", group="train")
    for name in ("agreement", "activation", "pairing", "entropy", "specialization"):
        pick = {"control": "observed"} if "control" in mine[name].dims else {}
        np.testing.assert_allclose(mine[name].sel(pick), alone[name].sel(pick))


def test_specialization_is_that_of_routing():
    scores, truth = plant(4, [1, 0], [2, 0, 1], sharpness=1.5)
    result = score_pairing(scores, truth, resamples=20, seed=3).isel(group=0, fitted=0)
    routing = scores.isel(example=slice(1, None, 2), search=[1, 0])
    expected = score_specialization(
        routing.rename(search="layer", retrieval="module"),
        truth.isel(example=slice(1, None, 2)).rename(wanted="layer"),
        operations=3,
        resamples=20,
        seed=3,
    )
    for name in ("specialization", "collapse_high", "adjusted_mutual_information_low"):
        np.testing.assert_allclose(result[name], expected[name])
    np.testing.assert_allclose(result["activation"], expected["activation"])


def test_entropy_and_pairing_by_hand():
    # The first search takes 1/2, 1/2, the second 1, 0; the last position is padding.
    scores = np.tile([[0.5, 0.5], [1.0, 0.0]], (4, 3, 1, 1))
    scores[:, 2] = [[0.0, 1.0], [0.5, 0.5]]
    truth = np.zeros((4, 3, 2), int)
    truth[:, 1, 0] = -1
    truth[:, 2] = -1
    result = score_pairing(*label(scores, truth), resamples=5).isel(group=0, fitted=0)
    np.testing.assert_allclose(result["entropy"], [1, 0])
    np.testing.assert_allclose(result["entropy_high"], [1, 0])
    np.testing.assert_allclose(result["pairing"], [[0.5, 0.5], [1, 0]])
    assert result["agreement"].sel(control="observed").to_numpy().tolist() == [1, 1, 1]
    single = score_pairing(*label(np.ones((4, 1, 1, 1)), np.zeros((4, 1, 1), int)), resamples=5)
    assert single["entropy"].isnull().all()


def test_examples_of_a_position_are_resampled_together():
    scores, truth = plant(0, [0, 1], [0, 1, 2], sharpness=1.0, examples=400)
    once = score_pairing(scores, truth)
    copies = [xr.concat([x] * 4, "pos").transpose("example", "pos", ...) for x in (scores, truth)]
    four = score_pairing(*copies)
    for name in ("agreement_low", "agreement_high", "entropy_low"):
        pick = {"control": "observed"} if "control" in once[name].dims else {}
        np.testing.assert_allclose(once[name].sel(pick), four[name].sel(pick))
    width = once["agreement_high"] - once["agreement_low"]
    rate = once["agreement"].sel(control="observed", search="0").item()
    # 200 examples of 5 independent tokens.
    expected = 2 * 1.96 * (rate * (1 - rate) / 1000) ** 0.5
    assert width.sel(control="observed", search="0").item() == pytest.approx(expected, rel=0.15)


def test_every_variable_says_what_it_is():
    result = score_pairing(*plant(0, [0, 1], [0, 1, 2], sharpness=1.0), resamples=5)
    assert all(result[name].attrs["long_name"] for name in result.data_vars)
    assert result["agreement"].dims == ("control", "fitted", "group", "search")
    assert result["specialization"].dims == ("control", "group", "search")
    assert result["activation"].dims == ("group", "search", "true_retrieval", "model_retrieval")


def test_invalid_input_is_refused():
    scores, truth = plant(0, [0, 1], [0, 1, 2], sharpness=1.0)
    also = attend(0, truth, [0, 1], 2)
    with pytest.raises(ValueError, match=r"value_scores must have the dims \('example', 'pos', "):
        score_pairing(scores.rename(search="head"), truth)
    with pytest.raises(ValueError, match=r"value_scores must hold probabilities .* sums in 2\.\.2"):
        score_pairing(2 * scores, truth)
    with pytest.raises(ValueError, match=r"truth must have the dims 'example', 'pos' and one"):
        score_pairing(scores, truth.isel(wanted=0))
    with pytest.raises(ValueError, match=r"truth must have 80 values along 'example', .* got 79"):
        score_pairing(scores, truth[1:])
    with pytest.raises(TypeError, match=r"truth must hold integers, got float64"):
        score_pairing(scores, truth * 1.0)
    with pytest.raises(ValueError, match=r"truth must hold .* got values in -2\.\.0"):
        score_pairing(scores, truth - 2)
    with pytest.raises(ValueError, match=r"winner and pattern must be passed together"):
        score_pairing(scores, truth, winner=also["winner"])
    with pytest.raises(ValueError, match=r"winner must be in 0\.\.4 where there is a truth"):
        score_pairing(scores, truth, winner=also["winner"] + 1, pattern=also["pattern"])
    with pytest.raises(ValueError, match=r"pattern must have 80 examples, 2 searches and 5 query"):
        score_pairing(scores, truth, **(also | {"pattern": also["pattern"][:, :1]}))
    with pytest.raises(ValueError, match=r"groups must have the dim 'example' of size 80"):
        score_pairing(scores, truth, groups=xr.DataArray([0], dims="example"))
    one = xr.DataArray([1] + [0] * 79, dims="example")
    with pytest.raises(ValueError, match=r"at least 2 examples .* got 1 of '1'"):
        score_pairing(scores, truth, groups=one)
    half = xr.where(truth["example"] % 2 == 0, truth, -1).transpose(*truth.dims)
    with pytest.raises(ValueError, match=r"truth must be known in both halves .* got 'all'"):
        score_pairing(scores, half)
    with pytest.raises(ValueError, match=r"resamples must be at least 1, got 0"):
        score_pairing(scores, truth, resamples=0)
