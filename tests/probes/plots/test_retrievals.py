import numpy as np
import pytest
import xarray as xr

from probes import plots, score_pairing
from tests.probes.plots.conftest import names


def scored(searches, retrievals, *, n_model=None, groups=("all",), follow=True):
    """Scores of hard choices: true search t is the model's searches[t], v is retrievals[v]."""
    rng = np.random.default_rng(0)
    n_searches, n_retrievals = n_model or (len(searches), len(retrievals))
    examples = 60 * len(groups)
    truth = rng.integers(len(retrievals), size=(examples, 4, len(searches)))
    chosen = rng.integers(n_retrievals, size=(examples, 4, n_searches))
    for true, model in enumerate(searches):
        if follow:
            chosen[..., model] = np.array(retrievals)[truth[..., true]]
    return score_pairing(
        xr.DataArray(np.eye(n_retrievals)[chosen], dims=("example", "pos", "search", "retrieval")),
        xr.DataArray(truth, dims=("example", "pos", "true_search")),
        groups=xr.DataArray(np.repeat(groups, 60), dims="example"),
        resamples=2,
    )


@pytest.mark.parametrize("search", ["0", "1", "pooled"])
def test_a_correct_pairing_shows_a_diagonal_in_the_models_own_order(search, ax):
    assert plots.pairing(scored([1, 0], [2, 0, 1]), ax, search=search) is ax
    assert np.allclose(ax.images[0].get_array(), np.eye(3))
    assert ax.images[0].get_clim() == (0, 1)
    assert (names(ax, "x"), names(ax, "y")) == (["2", "0", "1"], ["0", "1", "2"])
    assert ax.get_title() == "agrees 100%"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("model's retrieval", "true retrieval")
    assert {text.get_position(): text.get_text() for text in ax.texts} == {
        (column, row): "100%" if row == column else "0%" for row in range(3) for column in range(3)
    }


def test_without_a_search_the_models_searches_are_rows_whatever_the_truth(ax):
    scores = scored([1, 0], [2, 0, 1])
    plots.pairing(scores, ax)
    assert (names(ax, "x"), names(ax, "y")) == (["2", "0", "1"], ["1", "0"])
    expected = scores["pairing"].sel(group="all").to_numpy()[[1, 0]][:, [2, 0, 1]]
    assert np.allclose(ax.images[0].get_array(), expected)
    assert ax.get_ylabel() == "model's search"


def test_retrievals_and_searches_without_a_counterpart_follow(ax):
    scores = scored([2, 0], [3, 1], n_model=(3, 4))
    plots.pairing(scores, ax, search="0")
    assert names(ax, "x") == ["3", "1", "0", "2"]
    assert np.allclose(ax.images[0].get_array(), np.eye(2, 4))
    ax.clear()
    plots.pairing(scores, ax)
    assert names(ax, "y") == ["2", "0", "1"]


def test_a_model_that_heeds_no_truth_shows_no_diagonal(ax):
    plots.pairing(scored([0, 1], [0, 1, 2], follow=False), ax, search="0")
    assert np.abs(ax.images[0].get_array() - 1 / 3).max() < 0.25
    assert int(ax.get_title().split()[-1].rstrip("%")) < 60


def test_among_larger_models_what_a_smaller_lacks_is_left_out(ax):
    both = xr.concat([scored([1, 0], [1, 0]), scored([0, 1], [2, 0, 1])], "network", join="outer")
    plots.pairing(both.isel(network=0), ax, search="pooled")
    assert (names(ax, "x"), names(ax, "y")) == (["1", "0"], ["0", "1"])
    assert np.allclose(ax.images[0].get_array(), np.eye(2))


def test_another_group_is_drawn_in_the_order_fitted_to_the_first(ax):
    scores = scored([0, 1], [1, 0], groups=("id", "ood"))
    scores["activation"].loc[{"group": "ood"}] = [[0.2, 0.8], [0.7, 0.3]]
    plots.pairing(scores, ax, group="ood", fitted="id", search="0")
    at = {"fitted": "id", "group": "ood", "search": "0", "control": "observed"}
    assert ax.get_title() == f"agrees {scores['agreement'].sel(at).item():.0%}"
    assert ax.images[0].get_array().tolist() == [[0.8, 0.2], [0.3, 0.7]]


def test_unknown_labels_and_results_of_other_probes_are_refused(ax):
    scores = scored([0, 1], [0, 1])
    for name in ("group", "fitted", "search"):
        with pytest.raises(KeyError, match=rf"{name} must be one of .*, got 'none'"):
            plots.pairing(scores, ax, **{name: "none"})
    made = "'agreement', made by score_pairing or measure_pairing"
    with pytest.raises(KeyError, match=made):
        plots.pairing(scores.drop_vars("agreement"), ax)
