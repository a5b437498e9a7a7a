import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr

from probes import draw_pairing, score_pairing


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


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


def drawn(scores, *, fitted="all"):
    panels = plt.subplots(1, scores.sizes["search"] * scores.sizes["group"])[1]
    draw_pairing(panels, scores, fitted=fitted)
    return panels


def ticks(axis, of):
    return [text.get_text() for text in getattr(axis, f"get_{of}ticklabels")()]


def test_a_model_that_pairs_rightly_shows_diagonals_in_its_own_order():
    panels = drawn(scored([1, 0], [2, 0, 1]))
    titles = [axis.get_title().splitlines() for axis in panels]
    assert [title[0] for title in titles] == [
        "search 0, all",
        "search 1, all",
        "search pooled, all",
    ]
    assert {title[1] for title in titles} == {"agrees 100%"}
    for axis in panels[:2]:
        assert np.allclose(axis.images[0].get_array(), np.eye(3))
        assert axis.images[0].get_clim() == (0, 1)
        assert (ticks(axis, "x"), ticks(axis, "y")) == (["2", "0", "1"], ["0", "1", "2"])
    # The model's searches, whatever the truth: each uses all retrievals.
    assert ticks(panels[2], "y") == ["1", "0"]
    assert panels[2].images[0].get_array().shape == (2, 3)
    assert np.allclose(panels[2].images[0].get_array().sum(1), 1)
    assert panels[2].get_xlabel() == "model's retrieval"


def test_retrievals_and_searches_without_a_counterpart_follow():
    panels = drawn(scored([2, 0], [3, 1], n_model=(3, 4)))
    assert ticks(panels[0], "x") == ["3", "1", "0", "2"]
    assert np.allclose(panels[0].images[0].get_array(), np.eye(2, 4))
    assert ticks(panels[2], "y") == ["2", "0", "1"]


def test_a_model_that_heeds_no_truth_shows_no_diagonal():
    panels = drawn(scored([0, 1], [0, 1, 2], follow=False))
    assert np.abs(panels[0].images[0].get_array() - 1 / 3).max() < 0.25
    assert int(panels[0].get_title().split()[-1].rstrip("%")) < 60


def test_among_larger_models_what_a_smaller_lacks_is_left_out():
    both = xr.concat([scored([1, 0], [1, 0]), scored([0, 1], [2, 0, 1])], "network", join="outer")
    panels = drawn(both.isel(network=0))
    assert (ticks(panels[0], "x"), ticks(panels[0], "y")) == (["1", "0"], ["0", "1"])
    assert np.allclose(panels[0].images[0].get_array(), np.eye(2))


def test_groups_are_side_by_side_in_the_order_fitted_to_one_of_them():
    scores = scored([0, 1], [1, 0], groups=("id", "ood"))
    panels = drawn(scores, fitted="id")
    names = [axis.get_title().splitlines()[0] for axis in panels]
    assert names[:3] == ["search 0, id", "search 0, ood", "search 1, id"]
    assert len(names) == 6


def test_axes_and_group_must_fit():
    scores = scored([0, 1], [0, 1])
    panels = plt.subplots(1, 3)[1]
    with pytest.raises(ValueError, match="axes must be 3, one for each search and group, got 2"):
        draw_pairing(panels[:2], scores, fitted="all")
    with pytest.raises(KeyError, match="fitted must be one of all, got 'id'"):
        draw_pairing(panels, scores, fitted="id")
