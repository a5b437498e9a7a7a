"""Saving and loading models: one safetensors file with the config as JSON in its header."""

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
from mechanisms import model_zoo


def config_to_json(config: Any) -> dict[str, Any]:
    """A config as a JSON object; it and every nested config also hold the name of their class."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {"class": type(config).__name__} | {
        name: config_to_json(value) if dataclasses.is_dataclass(value) else value
        for name, value in values.items()
    }


def config_from_json(values: dict[str, Any]) -> Any:
    """The inverse of `config_to_json`, for config classes that `mechanisms` exports.

    Raises:
        ValueError: the class is not a config that `mechanisms` exports.
        TypeError: the class does not have one of the settings.
    """
    name = values.get("class")
    if name not in dir(mechanisms) or not dataclasses.is_dataclass(getattr(mechanisms, name)):
        raise ValueError(f"class must be a config that mechanisms exports, got {name!r}")
    arguments = {}
    for key, value in values.items():
        if isinstance(value, dict):
            value = config_from_json(value)
        if key != "class":
            # Tuples become lists in JSON; configs have no lists.
            arguments[key] = tuple(value) if isinstance(value, list) else value
    return getattr(mechanisms, name)(**arguments)


def save(model: nn.Module, path: str | Path) -> None:
    """Save a model that is built from a `config`, replacing an existing file atomically.

    Weights keep their dtype. The `eps` of norms is saved too, since it may have been changed
    after the model was built.

    Raises:
        TypeError: the model needs other arguments besides its config, as blocks and attention
            modules do, whose width is that of the model around them.
        OSError: the file cannot be written.

    Example:
        >>> save(model, "model.safetensors")
        >>> model = load("model.safetensors")
    """
    path, model_class = Path(path), type(model)
    other_arguments = [
        name
        for name, parameter in inspect.signature(model_class).parameters.items()
        if parameter.default is parameter.empty and name != "config"
    ]
    if other_arguments or not dataclasses.is_dataclass(getattr(model, "config", None)):
        needs = f", which also needs {', '.join(other_arguments)}" if other_arguments else ""
        raise TypeError(
            f"model must be built from its config alone, got {model_class.__name__}{needs}: save "
            "the model that contains it"
        )
    metadata = {
        "class": model_class.__name__,
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
    """Load a model that `save` wrote, in evaluation mode.

    Args:
        path: the file, or `zoo:NAME` for a trained model that comes with the package; see `zoo`.
        device: the device of the model.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged, or was not written by `save`; or the zoo has no such model.

    Example:
        >>> model = load("zoo:equations-encoder-seed0")
        >>> model.config.n_modules
        10
    """
    if str(path).startswith(model_zoo.PREFIX):
        path = model_zoo.weights_path(str(path).removeprefix(model_zoo.PREFIX))
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            # Cloned: kernels round by memory alignment, which tensors in a file do not have.
            weights = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"path must be a safetensors file, got {path}: {error}") from error
    if metadata.get("class") not in dir(mechanisms) or "config" not in metadata:
        raise ValueError(
            f"path must be a file that mechanisms.save wrote, got {path} with header {metadata}"
        )
    model = getattr(mechanisms, metadata["class"])(config_from_json(json.loads(metadata["config"])))
    # What is not in the file has the precision of the weights.
    model.to(next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point()))
    # Assigned, not copied: a copy would convert them to the dtype of the new model's weights.
    model.load_state_dict(weights, assign=True)
    for name, eps in json.loads(metadata.get("eps", "{}")).items():
        model.get_submodule(name).eps = eps
    return model.to(device).eval()


def _norms(model: nn.Module) -> dict[str, nn.LayerNorm | nn.RMSNorm]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.LayerNorm | nn.RMSNorm)
    }
