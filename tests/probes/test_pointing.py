"""Pointing: planted attention points where it was told to, attention at random does not."""

import numpy as np
import pytest
import xarray as xr

from probes import score_pointing

N = 4


def planted(n=2000, queries=4, seed=0):
    """Head 0 points to the truth, head 1 to the same position, head 2 anywhere."""
    rng = np.random.default_rng(seed)
    truth = np.stack([rng.permutation(N)[:queries] for _ in range(n)])
    position = np.broadcast_to(np.arange(queries), truth.shape)
    heads = np.stack([truth, position, rng.integers(N, size=truth.shape)], axis=-1)
    dims = ("example", "query")
    return (
        xr.DataArray(heads, dims=(*dims, "head")),
        {"truth": xr.DataArray(truth, dims=dims), "position": xr.DataArray(position, dims=dims)},
    )


def test_planted_heads_are_found_and_chance_is_chance():
    strongest, targets = planted()
    found = score_pointing(strongest, targets, n_candidates=N, samples=("example", "query"))
    share = found["share"].transpose("control", "target", "head")
    observed = share.sel(control="observed").to_numpy()
    # Samples in which the truth is at the same position do not count.
    np.testing.assert_allclose(observed[:, :2], [[1, 0], [0, 1]])
    np.testing.assert_allclose(observed[:, 2], found["chance"], atol=0.03)
    # A head that points to one position gives the targets of other examples away.
    np.testing.assert_allclose(share.sel(control="shuffled", target="position")[1], 1)
    np.testing.assert_allclose(
        share.sel(control="shuffled", target="truth")[[0, 2]], 0.25, atol=0.04
    )
    inside = (found["share_low"] <= found["share"]) & (found["share"] <= found["share_high"])
    assert inside.all()
    width = (found["share_high"] - found["share_low"]).isel(control=0, target=0, head=2)
    assert 0.01 < width < 0.05


def test_shares_are_those_of_a_count():
    strongest, targets = planted(50, seed=3)
    found = score_pointing(strongest, targets, n_candidates=N, samples=("example", "query"))
    truth, position = targets["truth"].to_numpy(), targets["position"].to_numpy()
    hits = [
        strongest.to_numpy()[i, q, 2] == truth[i, q]
        for i in range(50)
        for q in range(4)
        if truth[i, q] != position[i, q]
    ]
    share = found["share"].sel(control="observed", target="truth").isel(head=2)
    assert float(share) == pytest.approx(np.mean(hits))
    assert found.attrs["samples"] == len(hits)


def test_samples_without_different_targets_have_no_share():
    strongest, targets = planted(20)
    same = {"truth": targets["position"], "position": targets["position"]}
    found = score_pointing(strongest, same, n_candidates=N, samples=("example", "query"))
    assert found["share"].isnull().all()


def test_a_target_may_be_the_same_in_all_examples():
    strongest, targets = planted(50)
    wide = targets["position"]
    for alone in ({"position": wide[0]}, {"position": xr.DataArray(2)}):
        found, expected = (
            score_pointing(strongest, each, n_candidates=N, samples=("example", "query"))
            for each in (alone, {"position": alone["position"].broadcast_like(wide)})
        )
        xr.testing.assert_identical(found, expected)
        assert found.attrs["samples"] == 50 * 4
        both = {"truth": targets["truth"]} | alone
        score_pointing(strongest, both, n_candidates=N, samples=("example", "query"))


def test_wrong_arguments_are_refused():
    strongest, targets = planted(5)
    with pytest.raises(ValueError, match="n_candidates must be at least 1, got 0"):
        score_pointing(strongest, targets, n_candidates=0)
    with pytest.raises(ValueError, match="targets must name at least one"):
        score_pointing(strongest, {}, n_candidates=N)
    with pytest.raises(ValueError, match=r"dims of targets\['truth'\] must be some of"):
        score_pointing(strongest, {"truth": targets["truth"].rename(query="other")}, n_candidates=N)
    with pytest.raises(ValueError, match="samples must be dims of strongest"):
        score_pointing(strongest, targets, n_candidates=N, samples=("example", "other"))
    with pytest.raises(ValueError, match="samples must name at least one dim"):
        score_pointing(strongest, targets, n_candidates=N, samples=())


@pytest.mark.parametrize("number", [-1, N, 0.5, np.nan])
def test_what_is_no_candidate_is_refused_where_it_counts(number):
    strongest, targets = planted(5)
    settings = {"n_candidates": N, "samples": ("example", "query")}
    counted = targets["truth"] != targets["position"]
    with pytest.raises(ValueError, match=rf"strongest must be integers .* = 3 .*, got {number}"):
        score_pointing(strongest.where(strongest["head"] < 2, number), targets, **settings)
    wrong = targets | {"truth": targets["truth"].where(~counted, number)}
    with pytest.raises(ValueError, match=rf"targets\['truth'\] must be .*, got {number}"):
        score_pointing(strongest, wrong, **settings)
    if not np.isnan(number):  # NaN differs from NaN, so that it counts
        unknown = {name: target.where(counted, number) for name, target in targets.items()}
        found, expected = (score_pointing(strongest, of, **settings) for of in (unknown, targets))
        xr.testing.assert_identical(found, expected)


def test_labels_are_those_of_what_points():
    strongest, targets = planted(6)
    settings = {"n_candidates": N, "samples": ("example", "query")}
    labelled = strongest.assign_coords(example=range(6))
    for labels in (range(6, 12), range(1, 7)):
        truth = {"truth": targets["truth"].assign_coords(example=labels)}
        with pytest.raises(ValueError, match="must have the 6 labels of 'example' of strongest"):
            score_pointing(labelled, truth, **settings)
    with pytest.raises(ValueError, match=r"must have the 6 labels of 'example' .* got 5"):
        score_pointing(strongest, {"truth": targets["truth"][:5]}, **settings)
