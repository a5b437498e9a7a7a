import json
from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr

from studies.engine import Resources, RunError, SchemaError, read_result, run
from studies.engine.readings import most_seeds
from studies.engine.results import (
    ATTRIBUTES,
    GROUPS,
    SCHEMA_VERSION,
    check_result,
    join_cells,
    write_tree,
)
from tests.studies.engine.synthetic import result_of, two_models
from tests.studies.engine.toy import TOY


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return run(TOY, resources=Resources(root=tmp_path_factory.mktemp("runs")))


@pytest.fixture
def result(folder):
    return read_result(folder / "result.nc")


def test_a_result_has_all_groups_and_attributes_of_its_provenance(result, folder):
    assert set(GROUPS) <= set(result.children)
    assert {"weights", "weights_along_training", "hidden"} <= set(result.children)
    assert set(ATTRIBUTES) <= set(result.attrs)
    assert result.attrs["schema_version"] == SCHEMA_VERSION
    assert folder.name == f"toy-{result.attrs['config_hash']}"
    assert json.loads(result.attrs["seeds"]) == [0, 1]
    assert json.loads(result.attrs["devices_of_training"]) == ["cpu"]
    code = json.loads(result.attrs["code"])
    assert "tests/studies/engine/toy.py" in code["training"]
    assert set(code["measures"]) == {"scores", "costs", "weights", "hidden"}


def test_cells_have_a_coordinate_for_each_axis(result):
    scores = result["scores"]
    assert scores["model"].to_numpy().tolist() == ["mlp", "mlp", "linear", "linear"]
    assert scores["seed"].to_numpy().tolist() == [0, 1, 0, 1]
    for name in ("scores", "training", "costs", "weights", "hidden"):
        assert result[name]["cell"].equals(scores["cell"])


def test_a_measure_that_does_not_apply_is_nan(result):
    np.testing.assert_array_equal(result["hidden"]["hidden"], [8, 8, np.nan, np.nan])


def test_scores_have_intervals_groups_and_references(result):
    accuracy = result["scores"].to_dataset().sel(split="id", group="all")
    assert (accuracy["accuracy_low"] <= accuracy["accuracy"]).all()
    assert (accuracy["accuracy"] <= accuracy["accuracy_high"]).all()
    assert (accuracy["accuracy_chance"] == 0.25).all()
    assert (accuracy["accuracy_untrained"] != accuracy["accuracy"]).all()
    counts = result["scores"]["n_examples"].sel(split="id")
    assert (counts.sel(group="all") == 4096).all()
    assert (abs(counts.sel(group="first") - 1024) < 150).all()


def test_measures_along_training_are_taken_at_the_kept_checkpoints(result):
    sizes = result["weights_along_training"]["size"]
    assert sizes["train_step"].to_numpy().tolist() == [10, 30]
    trained = sizes.sel(control="trained").transpose("cell", "train_step").to_numpy()
    assert (trained[:, 0] != trained[:, 1]).all()
    untrained = sizes.sel(control="untrained").transpose("cell", "train_step").to_numpy()
    assert (untrained[:, 0] == untrained[:, 1]).all()


def test_training_and_costs_agree_with_the_curves_and_the_architecture(result):
    training = result["training"].to_dataset()
    assert training["train_step"].to_numpy().tolist() == [10, 20, 30, 40]
    curve = training["accuracy"].sel(split="id", group="all")
    np.testing.assert_allclose(training["validation"], curve.max("train_step"))
    best = curve.isel(train_step=curve.argmax("train_step"))["train_step"]
    np.testing.assert_array_equal(training["tested_step"], best)
    costs = result["costs"].to_dataset()
    np.testing.assert_array_equal(costs["parameters"], [76, 76, 20, 20])
    np.testing.assert_array_equal(costs["operations"], [128, 128, 32, 32])


def test_the_summary_has_means_over_seeds(result):
    mean = result["summary"]["mean"].sel(reading="accuracy, id").to_numpy()
    values = result["scores"]["accuracy"].sel(split="id", group="all").to_numpy()
    np.testing.assert_allclose(mean, [values[:2].mean(), values[2:].mean()])
    np.testing.assert_array_equal(result["summary"]["n_seeds"].sel(reading="accuracy, id"), [2, 2])


def schema_error(result, change):
    """The message of the SchemaError for a result with a change."""
    copy = result.copy(deep=True)
    change(copy)
    with pytest.raises(SchemaError) as error:
        check_result(copy)
    return str(error.value)


def test_results_that_do_not_follow_the_schema_are_refused(result):
    check_result(result)

    def drop_attribute(tree):
        del tree.attrs["seeds"]

    def drop_group(tree):
        del tree["claims"]

    def drop_long_name(tree):
        tree["costs"]["parameters"].attrs.clear()

    def unknown_dim(tree):
        data = tree["hidden"].to_dataset().assign(x=("thing", [1.0], {"long_name": "x"}))
        tree["hidden"] = xr.DataTree(data)

    def swap_bounds(tree):
        data = tree["scores"].to_dataset()
        low, high = data["accuracy_low"], data["accuracy_high"]
        tree["scores"] = xr.DataTree(data.assign(accuracy_low=high, accuracy_high=low))

    def one_bound(tree):
        tree["scores"] = xr.DataTree(tree["scores"].to_dataset().drop_vars("accuracy_low"))

    def other_cells(tree):
        tree["costs"] = xr.DataTree(tree["costs"].to_dataset().isel(cell=[1, 0, 2, 3]))

    def other_version(tree):
        tree.attrs["schema_version"] = 1

    for change, message in (
        (drop_attribute, "attribute seeds is missing"),
        (drop_group, "group claims is missing"),
        (drop_long_name, "/costs: parameters has no long_name"),
        (unknown_dim, "dim thing is not in the schema and has no coordinate"),
        (swap_bounds, "accuracy_low is above accuracy_high"),
        (one_bound, "/scores: accuracy has only one bound"),
        (other_cells, "groups have different cells"),
        (other_version, "schema_version must be 2, got 1"),
    ):
        assert message in schema_error(result, change)


def test_cells_with_different_labels_are_joined_with_nan():
    def cell(steps, values, extra=None):
        data = xr.Dataset({"loss": ("train_step", values)}, {"train_step": steps})
        groups = {"training": data}
        if extra is not None:
            groups["only"] = xr.Dataset({"x": ("kind", extra)}, {"kind": ["z", "a"]})
        return xr.DataTree.from_dict(groups)

    joined = join_cells({"p": cell([1, 2], [1.0, 2.0]), "q": cell([2, 3], [5.0, 6.0], [7, 8])})
    expected = [[1, 2, np.nan], [np.nan, 5, 6]]
    np.testing.assert_array_equal(joined["training"]["loss"], expected)
    np.testing.assert_array_equal(joined["only"]["x"], [[np.nan] * 2, [7, 8]])
    assert joined["only"]["kind"].to_numpy().tolist() == ["z", "a"]


def test_cells_with_sizes_that_do_not_fit_are_refused_with_the_group():
    trees = [xr.DataTree.from_dict({"mine": xr.Dataset({"a": ("x", [0.0] * n)})}) for n in (2, 3)]
    with pytest.raises(SchemaError, match=r"mine of different cells cannot be joined: .* sizes"):
        join_cells(dict(zip("ab", trees, strict=True)))


@pytest.mark.parametrize("free", [0, 10**9])
def test_a_file_that_cannot_be_written_is_an_error_that_says_why(tmp_path, monkeypatch, free):
    def fails(self, *_, **__):
        raise RuntimeError("NetCDF: HDF error")

    monkeypatch.setattr(xr.DataTree, "to_netcdf", fails)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    tree = xr.DataTree(xr.Dataset({"x": ("cell", np.zeros(100))}))
    why = "NetCDF: HDF error" if free else "No space left on device"
    with pytest.raises(RunError, match=f"cannot write {tmp_path / 'x.nc'}: {why}"):
        write_tree(tree, tmp_path / "x.nc")
    assert not list(tmp_path.iterdir())


def test_seeds_are_counted_within_conditions():
    """The best model of each mechanism, of different seeds, is one seed."""
    cells = [
        {"model": model, "seed": seed, "id": 0.9, "ood": 0.5}
        for model, seed in (("a", 0), ("b", 2))
    ]
    assert most_seeds(result_of(cells)) == 1
    assert most_seeds(two_models([0.5, 0.6], [0.7])) == 2
