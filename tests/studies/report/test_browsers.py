"""What is stepped through is what was measured."""

import numpy as np
import pytest
import xarray as xr

from studies.report import browsers
from tests.studies.engine.synthetic import result_of, two_models

SHAPE = {"cell": 2, "layer": 3, "kind": 2, "query": 2, "key": 4}


@pytest.fixture(scope="module")
def result():
    return two_models([0.8], [0.5])


@pytest.fixture(scope="module")
def values():
    numbers = np.random.default_rng(0).normal(size=tuple(SHAPE.values())) * [[[[[1]]]], [[[[50]]]]]
    array = xr.DataArray(numbers, dims=list(SHAPE))
    array = array.assign_coords(layer=[0, 1, 2], kind=["id", "ood"], query=["x", "y"])
    array[0, 2] = np.nan
    return array


def spec_of(result, values, **names):
    def take(array):
        return lambda result: array.to_dataset(name="value")

    by_dim = {dim: take(array) for dim, array in names.items()}
    return browsers.matrices(result, data=take(values), y="query", x="key", names=by_dim)


def test_matrices_are_those_of_the_data(result, values):
    spec = spec_of(result, values)
    rows = {(row["model"], row["layer"], row["kind"]): row for row in spec["data"]["values"]}
    # Of one model, a layer was not measured.
    assert len(rows) == 2 * 3 * 2 - 2
    for model, largest in zip(("a, seed 0", "b, seed 0"), abs(values).max(SHAPE.keys() - {"cell"})):  # noqa: B905
        for layer in (0, 1):
            expected = values.sel(layer=layer, kind="ood").isel(cell="ab".index(model[0]))
            shown = np.array(rows[model, layer, "ood"]["value"]) * float(largest) / browsers.LEVELS
            half = float(largest) / browsers.LEVELS / 2
            np.testing.assert_allclose(shown, expected.to_numpy().ravel(), atol=half * 1.001)


def test_each_dim_that_is_not_drawn_has_a_control(result, values):
    model, layer, kind = spec_of(result, values)["params"]
    assert model["bind"]["options"] == ["a, seed 0", "b, seed 0"]
    assert {key: layer["bind"][key] for key in ("input", "min", "max")} == {
        "input": "range",
        "min": 0,
        "max": 2,
    }
    assert kind["bind"]["options"] == ["id", "ood"]
    assert kind["bind"]["labels"] == ["in distribution", "out of distribution"]


def test_signed_values_have_colours_on_both_sides(result, values):
    for array, low in ((values, "-("), (abs(values), 0)):
        scale = spec_of(result, array)["encoding"]["color"]["scale"]
        least = scale["domainMin"]
        assert least == low or least["expr"].startswith(low)


def test_names_of_labels_may_differ_between_examples(result, values):
    words = xr.DataArray(
        [[["p", "q", "r", "s"]] * 2, [["p", "q", "r", "z"]] * 2], dims=("cell", "kind", "key")
    ).assign_coords(kind=["id", "ood"])
    (name,) = [
        step["calculate"]
        for step in spec_of(result, values, key=words)["transform"]
        if step.get("as") == "column_name"
    ]
    assert '"b, seed 0|ood": ["p", "q", "r", "z"]' in name
    assert "datum.model + '|' + datum.kind" in name


def test_nothing_measured_is_no_chart(result):
    assert browsers.matrices(result, data=lambda result: xr.Dataset(), y="y", x="x") is None


def test_models_with_settings_that_were_not_chosen_are_left_out():
    cells = [
        {"model": "a", "seed": 0, "rate": rate, "id": right, "ood": 0.0}
        for rate, right in ((0.1, 0.4), (1.0, 0.9))
    ]
    result = result_of(cells, tuned=("rate",))
    values = xr.DataArray(np.array([[1.0], [2.0]]), dims=("cell", "x"))
    shown = browsers.with_models(result, values)
    assert shown.to_numpy().tolist() == [[2.0]]
    (name,) = shown["model"].to_numpy().tolist()
    assert "seed 0" in name
