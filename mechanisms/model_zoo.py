"""The model zoo: small trained models that come with the package, and their scores.

A model is a pair of files in `FOLDER`: `NAME.safetensors`, written by `mechanisms.save`, and its
record `NAME.json`: the study and all settings, the training log, the code that trained it, and its
scores. `python studies/zoo.py` adds models of finished runs.
"""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import xarray as xr

FOLDER = Path(__file__).parent / "weights"
"""The folder of the models."""

PREFIX = "zoo:"
"""What a path begins with that is the name of a model of the zoo."""

SCORES = {
    "score": "metric on examples used neither by training nor by checkpoint selection",
    "validation": "metric on the validation examples",
}
"""The scores of a record, each by `split/metric`."""


def records() -> dict[str, dict[str, Any]]:
    """The records of all models, by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def record_of(name: str) -> dict[str, Any]:
    """The record of a model.

    Raises:
        ValueError: there is no such model; the message names the nearest ones.
    """
    return json.loads(weights_path(name).with_suffix(".json").read_text())


def weights_path(name: str) -> Path:
    """The file with the weights of a model.

    Raises:
        ValueError: there is no such model; the message names the nearest ones.
    """
    names = sorted(path.stem for path in FOLDER.glob("*.json"))
    if name not in names:
        nearest = get_close_matches(name, names, n=3, cutoff=0.3) or names
        listed = ", ".join(PREFIX + other for other in nearest)
        known = f"nearest: {listed}" if names else "the zoo has no models"
        raise ValueError(f"unknown model {PREFIX + name!r}; {known}")
    return FOLDER / f"{name}.safetensors"


def zoo() -> xr.Dataset:
    """The trained models that come with the package, with their scores; loads no weights.

    `load("zoo:NAME")` loads a model.

    Returns:
        By `model` (its name): `score` and `validation` [model, split, metric], NaN where a model
        has no such split or metric; `study`, the class `mechanism`, `parameters`, `seed`, `step`
        (of the checkpoint), `megabytes`, and `config` (all settings, as JSON).

    Example:
        >>> zoo().score.sel(split="ood", metric="accuracy").to_series()
    """
    import numpy as np
    import xarray as xr

    found = records()
    all_records = list(found.values())
    keys = [key.split("/") for record in all_records for kind in SCORES for key in record[kind]]
    splits = list(dict.fromkeys(key[0] for key in keys))
    metrics = list(dict.fromkeys(key[1] for key in keys))
    columns = {
        "study": ("study that trained the model", [record["study"] for record in all_records]),
        "mechanism": ("class of the model", [record["mechanism"] for record in all_records]),
        "parameters": ("number of parameters", [record["parameters"] for record in all_records]),
        "seed": ("seed of training", [record["config"]["seed"] for record in all_records]),
        "step": ("training step of the checkpoint", [record["step"] for record in all_records]),
        "megabytes": ("size of the weights", [weights_path(n).stat().st_size / 1e6 for n in found]),
        "config": ("all settings, as JSON", [json.dumps(r["config"]) for r in all_records]),
    }
    data: dict[str, Any] = {
        name: ("model", values, {"long_name": text}) for name, (text, values) in columns.items()
    }
    data["megabytes"][2]["units"] = "MB"
    for kind, text in SCORES.items():
        values = [
            [
                [record[kind].get(f"{split}/{metric}", np.nan) for metric in metrics]
                for split in splits
            ]
            for record in all_records
        ]
        shape = len(found), len(splits), len(metrics)
        array = np.array(values, dtype=float).reshape(shape)
        data[kind] = (("model", "split", "metric"), array, {"long_name": text})
    return xr.Dataset(data, {"model": list(found), "split": splits, "metric": metrics})
