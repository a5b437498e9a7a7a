"""Views of contextual retrieval: what they draw of planted errors and value scores."""

import json

import numpy as np
import pytest
import xarray as xr

import probes
import tasks
from studies.views.retrieval import example, losses, specialization, switching
from tests.studies.engine.synthetic import result_of

HEADS = (2, 4, 8)
ORDER = {0: [1, 2, 3, 0], 1: [3, 0, 2, 1]}
"""The model's retrieval for each true one, by seed."""


def error_of(width, heads, seed):
    return {None: 0.1}.get(heads, 0.01 * (heads or 0)) + 16 / width + seed / 100


def with_config(tree, **task):
    sizes = {"class": "ContextualRetrievalConfig", "n_searches": 2, "n_retrievals": 4}
    setup = {"d_model": 64, "task": sizes | task}
    tree.attrs["config"] = json.dumps({"setup": setup})
    return tree


@pytest.fixture
def errors():
    cells = [
        {"model": model, "d_model": width, "n_heads": heads, "seed": seed, "id": 0.1}
        | {"ood": error_of(width, heads, seed)}
        for model, numbers in (("multi_head", HEADS), ("compositional", (None,)))
        for width in (64, 128)
        for heads in numbers
        for seed in (0, 1)
    ]
    tree = with_config(result_of(cells, metric="error", better="lower"))
    tree["scores"]["error_paper"] = tree["scores"]["error"] * 2
    return tree


def test_errors_have_a_bar_for_each_width_and_number_of_heads(errors):
    (axis,) = losses(errors, split="ood").axes
    expected = [error_of(width, heads, 0.5) for width in (64, 128) for heads in (*HEADS, None)]
    heights = [patch.get_height() for patch in axis.patches]
    assert heights == pytest.approx(expected)
    papers = [line.get_ydata()[0] for line in axis.lines if line.get_marker() == "D"]
    assert papers == pytest.approx([2 * height for height in expected])
    seeds = [line.get_ydata() for line in axis.lines if line.get_marker() == "."]
    assert np.ptp(seeds, axis=1) == pytest.approx([0.01] * 8)
    assert [text.get_text() for text in axis.get_xticklabels()] == ["d = 64", "d = 128"]
    # The ticks are in the middle of the bars of their width.
    x = [patch.get_x() + patch.get_width() / 2 for patch in axis.patches]
    assert axis.get_xticks() == pytest.approx([np.mean(x[:4]), np.mean(x[4:])])
    assert losses(errors, split="all") is None


def pairing_of(searches, retrievals, order):
    """The pairing of a model that chooses `order[true]`; in `ood` only the last retrievals."""
    generator = np.random.default_rng(0)
    first = {"all": 0, "id": 0, "ood": retrievals // 2}
    truth = {
        group: generator.integers(low, retrievals, (200, 5, searches))
        for group, low in first.items()
    }
    truth = xr.DataArray(np.concatenate(list(truth.values())), dims=("example", "pos", "true"))
    scores = np.eye(retrievals)[np.array(order)[truth.to_numpy()]]
    return probes.score_pairing(
        xr.DataArray(scores, dims=("example", "pos", "search", "retrieval")),
        truth,
        groups=xr.DataArray(np.repeat(list(first), 200), dims="example"),
        resamples=2,
    )


@pytest.fixture
def pairings():
    sizes = [(2, 4, ORDER[0]), (2, 4, ORDER[1]), (1, 2, [1, 0]), (1, 2, [0, 0])]
    cells = [
        {"model": "compositional", "n_searches": searches, "n_retrievals": retrievals}
        | {"seed": number % 2, "id": 0.1, "ood": 0.1}
        for number, (searches, retrievals, _) in enumerate(sizes)
    ]
    tree = with_config(result_of(cells, metric="error", better="lower"))
    names = tree["scores"]["cell"].to_numpy()
    data = [pairing_of(*size).expand_dims(cell=[n]) for n, size in zip(names, sizes, strict=True)]
    joined = xr.concat(data, "cell", join="outer", combine_attrs="drop_conflicts")
    coordinates = {name: tree["scores"][name] for name in ("model", "seed", "n_searches")}
    tree["pairing"] = xr.DataTree(joined.assign_coords(coordinates))
    return tree


def images_of(figure):
    return [axis.images[0].get_array() for axis in figure.axes if axis.images]


def test_specialised_retrievals_are_a_diagonal_whatever_their_order(pairings):
    figure = specialization(pairings)
    first, second, third, failed = images_of(figure)
    for image, size in ((first, 4), (second, 4), (third, 2)):
        np.testing.assert_allclose(image, np.eye(size))
    # One retrieval for both preferences: no diagonal in any order.
    np.testing.assert_allclose(failed, [[1, 0], [1, 0]])
    titles = [axis.get_title() for axis in figure.axes]
    assert titles[0] == "seed 0: agrees 100%"
    assert titles[3].startswith("seed 1: agrees 5")


def test_switching_shows_each_search_on_all_familiar_and_held_out_combinations(pairings):
    images = images_of(switching(pairings))
    assert [image.shape for image in images] == [(2, 4)] * 6 + [(1, 2)] * 6
    held_out = np.zeros((2, 4))
    # Preferences 2 and 3, half of the objects each.
    held_out[:, [ORDER[0][2], ORDER[0][3]]] = 0.5
    np.testing.assert_allclose(images[0], 0.25, atol=0.05)
    np.testing.assert_allclose(images[2], held_out, atol=0.05)


def test_the_example_shows_what_the_first_object_retrieves(errors):
    config = tasks.ContextualRetrievalConfig(n_searches=2, n_retrievals=3)
    figure = example(with_config(errors, n_retrievals=3))
    task = tasks.ContextualRetrieval(config)
    batch = task.batch("id", 0, 1)
    for search, axis in enumerate(figure.axes):
        marked = [text for text in axis.texts if text.get_weight() == "bold"]
        (text,) = marked
        value = batch.latents["retrieved"][0, 0, search].item()
        assert float(text.get_text()) == pytest.approx(value, abs=0.051)
        in_order = batch.inputs[0, :, search].argsort()
        assert in_order[text.get_position()[0]] == batch.latents["winner"][0, 0, search]
    assert figure.get_suptitle().endswith(f"= {batch.targets[0, 0]:.2f}")
