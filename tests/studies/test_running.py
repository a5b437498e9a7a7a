import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from studies.running import describe_coordinates, merge, percent

STUDIES = Path(__file__).parents[2] / "studies"


def analysis(accuracy, steps=(10, 20), **more):
    training = xr.Dataset(
        {"accuracy": ("train_step", [accuracy + step for step in steps])},
        coords={"train_step": list(steps)},
    )
    return xr.DataTree.from_dict({"training": training, **more})


def test_every_value_stands_at_the_place_of_its_model():
    places = [
        {"model": model, "seed": seed} for model, seed in [("z", 3), ("a", 3), ("z", 1), ("a", 1)]
    ]
    merged = merge([analysis(number) for number in range(4)], places)
    data = merged["training"].to_dataset()
    for number, place in enumerate(places):
        assert data["accuracy"].sel(place).to_numpy().tolist() == [number + 10, number + 20]
    # In the order in which they came, not sorted.
    assert data["model"].to_numpy().tolist() == ["z", "a"]
    assert data["seed"].to_numpy().tolist() == [3, 1]


def test_what_a_model_lacks_is_missing_in_the_result():
    places = [{"model": "a", "seed": 0}, {"model": "b", "seed": 1}]
    merged = merge([analysis(1), analysis(2, steps=(20, 30))], places)
    data = merged["training"]["accuracy"]
    assert data["train_step"].to_numpy().tolist() == [10, 20, 30]
    assert data.sel(model="a", seed=0).to_numpy().tolist()[:2] == [11, 21]
    assert data.sel(model="b", seed=1).to_numpy().tolist()[1:] == [22, 32]
    assert data.sel(model="a", seed=0, train_step=30).isnull()
    assert data.sel(model="a", seed=1).isnull().all()
    assert data.sel(model="b", seed=0).isnull().all()


def test_models_with_other_labels_share_those_that_they_have():
    """One model is never wrong."""
    labels = (["False", "True", "all"], ["True", "all"])
    trees = [
        xr.DataTree.from_dict(
            {"flow": xr.Dataset({"f1": ("correct", range(len(one)))}, {"correct": one})}
        )
        for one in labels
    ]
    merged = merge(trees, [{"model": "a"}, {"model": "b"}])["flow"].to_dataset()
    assert merged["correct"].to_numpy().tolist() == labels[0]
    assert merged["f1"].sel(model="a").to_numpy().tolist() == [0, 1, 2]
    assert merged["f1"].sel(model="b", correct=labels[1]).to_numpy().tolist() == [0, 1]
    assert merged["f1"].sel(model="b", correct="False").isnull()


def test_what_is_missing_stays_missing_in_a_file(tmp_path):
    trees = []
    for number in range(2):
        data = xr.Dataset(
            {
                "trials": ("x", [number, 7]),
                "right": ("x", [True, False]),
                "token": ("x", ["a", "b"]),
            }
        )
        xr.DataTree.from_dict({"cuts": data}).to_netcdf(
            tmp_path / f"{number}.nc", engine="h5netcdf"
        )
        trees.append(xr.load_datatree(tmp_path / f"{number}.nc", engine="h5netcdf"))
    merge(trees, [{"model": "a", "seed": 0}, {"model": "b", "seed": 1}]).to_netcdf(
        tmp_path / "merged.nc", engine="h5netcdf"
    )
    merged = xr.load_datatree(tmp_path / "merged.nc", engine="h5netcdf")["cuts"]
    assert merged["trials"].sel(model="b", seed=1).to_numpy().tolist() == [1, 7]
    assert merged["right"].sel(model="b", seed=1).to_numpy().tolist() == [True, False]
    assert merged["token"].sel(model="b", seed=1).to_numpy().tolist() == ["a", "b"]
    assert merged["trials"].sel(model="b", seed=0).isnull().all()
    assert merged["right"].sel(model="b", seed=0).isnull().all()


def test_a_group_holds_only_the_models_that_have_it():
    graph = xr.Dataset({"f1": ((), 0.5)}, attrs={"routes": 1, "seed": 7})
    other = xr.Dataset({"f1": ((), 0.25)}, attrs={"routes": 1, "seed": 8})
    trees = [analysis(0), analysis(1, graph=graph), analysis(2), analysis(3, graph=other)]
    merged = merge(trees, [{"model": model} for model in "dcba"])
    assert merged["training"]["model"].to_numpy().tolist() == ["d", "c", "b", "a"]
    assert merged["graph"]["model"].to_numpy().tolist() == ["c", "a"]
    assert merged["graph"]["f1"].to_numpy().tolist() == [0.5, 0.25]
    # An attribute on which they do not agree says nothing of the whole.
    assert merged["graph"].attrs == {"routes": 1}


def test_as_many_places_as_trees():
    with pytest.raises(ValueError, match="shorter"):
        merge([analysis(0), analysis(1)], [{"model": "a"}])


def cell(values, low=None, high=None):
    values = np.array(values, dtype=float)
    parts = {
        "rate": values,
        "rate_low": values - 0.1 if low is None else np.array(low),
        "rate_high": values + 0.1 if high is None else np.array(high),
    }
    return xr.Dataset({name: ("seed", part) for name, part in parts.items()})


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (cell([0.5], [0.42], [0.61]), "50.0 [42-61]"),
        (cell([0.2, 0.6, 0.7]), "50.0 [20-70]"),
        (cell([np.nan, 0.25], [np.nan, 0.2], [np.nan, 0.3]), "25.0 [20-30]"),
        (cell([np.nan]), ""),
        (cell([]), ""),
    ],
    ids=["the interval of one seed", "the range of several", "one of two", "missing", "no seed"],
)
def test_percent(data, expected):
    assert percent(data, "rate") == expected


def test_coordinates_get_names_and_keep_those_that_they_have():
    deep = xr.Dataset(
        {"x": (("step", "pos"), np.zeros((2, 2)))},
        coords={"step": ("step", [0, 1], {"long_name": "step, from 0"}), "pos": [0, 1]},
    )
    tree = xr.DataTree.from_dict({"a": xr.Dataset(coords={"seed": [0]}), "b/c/d": deep})
    describe_coordinates(tree, {"seed": "seed of the weights", "step": "another"})
    assert tree["a"]["seed"].attrs == {"long_name": "seed of the weights"}
    assert tree["b/c/d"]["step"].attrs == {"long_name": "step, from 0"}
    assert tree["b/c/d"]["pos"].attrs == {"long_name": "pos"}


@pytest.mark.parametrize("name", ["raven_latent_code", "ndr_control_flow"])
def test_help_does_not_import_transformer_lens(name):
    script = f"""
import sys, runpy
sys.argv = ["study", "--help"]
try:
    runpy.run_path({str(STUDIES / f"{name}.py")!r}, run_name="__main__")
except SystemExit:
    pass
assert "transformer_lens" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60
    )
    assert "--preset" in done.stdout
