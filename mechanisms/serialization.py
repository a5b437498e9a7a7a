"""Models on disk: safetensors with the config as JSON in the header, in one file, no pickle."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

import mechanisms


def config_to_json(config: Any) -> dict[str, Any]:
    """A config as JSON values, each nested config with the name of its class."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {"class": type(config).__name__} | {
        name: config_to_json(value) if dataclasses.is_dataclass(value) else value
        for name, value in values.items()
    }


def config_from_json(values: dict[str, Any]) -> Any:
    """The config that `config_to_json` wrote; its classes are exports of `mechanisms`.

    Raises:
        ValueError: for a class that `mechanisms` does not export.
        TypeError: for a setting that the class does not have.
    """
    name = values.get("class")
    if name not in dir(mechanisms) or not dataclasses.is_dataclass(getattr(mechanisms, name)):
        raise ValueError(f"{name!r} is no config that mechanisms exports")
    arguments = {}
    for key, value in values.items():
        if isinstance(value, dict):
            value = config_from_json(value)
        if key != "class":
            # JSON knows lists alone, configs tuples alone.
            arguments[key] = tuple(value) if isinstance(value, list) else value
    return getattr(mechanisms, name)(**arguments)


def save(model: nn.Module, path: str | Path) -> None:
    """Write a model that is made of a `config`; an earlier file is replaced when all is written.

    With the weights, in their precision, go the `eps` of its layer norms, which may be others than
    the model was built with.

    Raises:
        TypeError: the model is not made of a config alone, as a block or an attention module, which
            has its width from the model around it, is not.
        OSError: the file cannot be written.

    Example:
        >>> save(model, "model.safetensors")
        >>> model = load("model.safetensors")
    """
    path, kind = Path(path), type(model)
    further = [
        name
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.default is parameter.empty and name != "config"
    ]
    if further or not dataclasses.is_dataclass(getattr(model, "config", None)):
        needed = f", which also needs {', '.join(further)}" if further else ""
        raise TypeError(
            f"model must be built from its config alone, got {kind.__name__}{needed}: save the "
            "model that it is a part of"
        )
    metadata = {
        "class": kind.__name__,
        "config": json.dumps(config_to_json(model.config)),
        "eps": json.dumps({name: norm.eps for name, norm in _norms(model).items()}),
    }
    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(weights, partial, metadata)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load(path: str | Path, *, device: torch.device | str = "cpu") -> Any:
    """The model that `save` wrote, in evaluation mode.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or was not written by `save`.
    """
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error
    if metadata.get("class") not in dir(mechanisms) or "config" not in metadata:
        raise ValueError(f"{path} holds no model of mechanisms: its header is {metadata}")
    model = getattr(mechanisms, metadata["class"])(config_from_json(json.loads(metadata["config"])))
    # Copied into the model's own weights they would take on its precision.
    model.load_state_dict(weights, assign=True)
    for name, eps in json.loads(metadata.get("eps", "{}")).items():
        model.get_submodule(name).eps = eps
    return model.to(device).eval()


def _norms(model: nn.Module) -> dict[str, nn.LayerNorm]:
    return {name: one for name, one in model.named_modules() if isinstance(one, nn.LayerNorm)}
