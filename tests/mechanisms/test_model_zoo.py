import json

import numpy as np
import pytest
import torch

from mechanisms import load, model_zoo, save, zoo
from tests.mechanisms.models.test_transformer import CONFIGS, build, inputs_for


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(model_zoo, "FOLDER", tmp_path)
    return tmp_path


def add(folder, name, **changes):
    model = build(CONFIGS["plain"])
    save(model, folder / f"{name}.safetensors")
    record = {
        "study": "raven",
        "mechanism": "Transformer",
        "parameters": sum(weights.numel() for weights in model.parameters()),
        "step": 100,
        "score": {"id/accuracy": 0.5},
        "validation": {"id/accuracy": 0.75},
        "config": {"class": "RavenSetup", "seed": 3},
        "log": [],
    }
    (folder / f"{name}.json").write_text(json.dumps(record | changes))
    return model


def test_a_model_is_loaded_by_its_name(folder):
    model = add(folder, "raven-hyla-k2-seed0")
    loaded = load("zoo:raven-hyla-k2-seed0")
    assert loaded.config == model.config
    assert not loaded.training
    inputs = inputs_for(model.config)
    assert torch.equal(loaded(inputs), model.eval()(inputs))


def test_the_error_for_an_unknown_name_has_the_nearest_ones(folder):
    with pytest.raises(ValueError, match="unknown model 'zoo:raven'; the zoo has no models"):
        load("zoo:raven")
    for name in ("raven-hyla-k2-seed0", "raven-hyla-k2-seed1", "ndr-forward-seed0"):
        add(folder, name)
    with pytest.raises(ValueError, match=r"'zoo:raven-hyla-k3-seed0'; nearest: zoo:raven-hyla"):
        load("zoo:raven-hyla-k3-seed0")
    with pytest.raises(ValueError, match=r"nearest: .*zoo:ndr-forward-seed0, .*k2-seed1$"):
        load("zoo:?")
    # A file that is no model of the zoo, although it exists.
    add(folder.parent, "outside")
    with pytest.raises(ValueError, match="unknown model"):
        load("zoo:../outside")


def test_the_models_are_listed_with_their_scores_and_without_their_weights(folder, monkeypatch):
    assert dict(zoo().sizes) == {"model": 0, "split": 0, "metric": 0}
    model = add(folder, "raven-hyla-k2-seed0")
    fuzzy = {"test/r2": 0.25, "ood/r2": -1.0}
    add(folder, "fuzzy-softmax-seed3", study="fuzzy", score=fuzzy, validation={"test/r2": 0.5})

    def no_weights(*arguments, **settings):
        raise AssertionError("weights are loaded")

    monkeypatch.setattr("mechanisms.serialization.safe_open", no_weights)
    catalog = zoo()
    assert catalog["model"].to_numpy().tolist() == ["fuzzy-softmax-seed3", "raven-hyla-k2-seed0"]
    score, validation = catalog["score"], catalog["validation"]
    raven = {"model": "raven-hyla-k2-seed0", "split": "id", "metric": "accuracy"}
    assert (float(score.sel(raven)), float(validation.sel(raven))) == (0.5, 0.75)
    of_fuzzy = {"model": "fuzzy-softmax-seed3", "metric": "r2"}
    assert float(score.sel(of_fuzzy | {"split": "test"})) == 0.25
    assert float(score.sel(of_fuzzy | {"split": "ood"})) == -1
    assert float(validation.sel(of_fuzzy | {"split": "test"})) == 0.5
    assert int(score.notnull().sum()) == 3
    assert int(validation.notnull().sum()) == 2
    first = catalog.sel(model="raven-hyla-k2-seed0")
    assert str(first["study"].item()) == "raven"
    assert first["parameters"].item() == sum(weights.numel() for weights in model.parameters())
    size = (folder / "raven-hyla-k2-seed0.safetensors").stat().st_size
    assert np.isclose(first["megabytes"].item(), size / 1e6)
    assert json.loads(first["config"].item()) == {"class": "RavenSetup", "seed": 3}
    assert all(values.attrs["long_name"] for values in catalog.data_vars.values())
