"""Views of the Raven study that a smoke run has nothing to draw in."""

from functools import partial

import numpy as np
import pytest

from studies.engine import metric
from studies.raven_latent_code import STUDY
from studies.views.raven import scaling
from tests.studies.engine.synthetic import result_of

SIZES = {"n_steps": (10, 20, 40), "n_layers": (4, 8), "d_model": (128, 256)}


def right(n_steps, n_layers, d_model):
    return n_steps / 100 + n_layers / 100 + d_model / 1000


@pytest.fixture(scope="module")
def result():
    cells = [
        {"model": model, "n_steps": n, "n_layers": layers, "d_model": width, "seed": seed}
        | {"id": 0.9, "ood": right(n, layers, width) + (model == "hyla") / 10}
        for model in ("hyla", "softmax")
        for n in SIZES["n_steps"]
        for layers in SIZES["n_layers"]
        for width in SIZES["d_model"]
        for seed in (0, 1)
    ]
    return result_of(cells)


@pytest.mark.parametrize("setting", SIZES)
def test_scaling_is_drawn_at_the_largest_of_the_other_sizes(result, setting):
    figure = scaling(result, reading=metric("accuracy", "ood"), setting=setting, ylabel="right")
    (axis,) = figure.axes
    largest = {name: max(values) for name, values in SIZES.items()}
    expected = [right(**largest | {setting: value}) for value in SIZES[setting]]
    drawn = {
        container.get_label(): container.lines[0].get_xydata() for container in axis.containers
    }
    assert set(drawn) == {"HYLA", "softmax attention"}
    for label, gain in (("HYLA", 0.1), ("softmax attention", 0.0)):
        np.testing.assert_array_equal(drawn[label][:, 0], SIZES[setting])
        np.testing.assert_allclose(drawn[label][:, 1], np.array(expected) + gain)
    assert [text.get_text() for text in axis.get_xticklabels()] == list(map(str, SIZES[setting]))


def test_nothing_is_drawn_against_a_size_with_one_value():
    cells = [
        {"model": "hyla", "n_steps": 10, "n_layers": layers, "seed": 0, "id": 0.5, "ood": 0.4}
        for layers in (4, 8)
    ]
    draw = partial(scaling, result_of(cells), reading=metric("accuracy", "ood"), ylabel="right")
    assert draw(setting="n_steps") is None
    assert draw(setting="d_model") is None
    assert draw(setting="n_layers") is not None


@pytest.mark.parametrize(
    ("view", "setting", "values"),
    [("n_features", "n_features", (2, 4)), ("held_out", "ood_fraction", (0.1, 0.5))],
)
def test_accuracies_are_drawn_against_a_setting_of_the_task(view, setting, values):
    cells = [
        {"model": "hyla", setting: value, "seed": 0, "id": 0.5, "ood": value / 10}
        for value in values
    ]
    known, held_out = STUDY.views[view](result_of(cells)).axes
    line = held_out.containers[0].lines[0].get_xydata()
    np.testing.assert_allclose(line, [(value, value / 10) for value in values])
    assert (known.containers[0].lines[0].get_ydata() == 0.5).all()
