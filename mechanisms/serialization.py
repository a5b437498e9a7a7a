"""Saving and loading models: one safetensors file with the config as JSON in its header."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import mechanisms
from mechanisms import model_zoo


def name_of_class(of: type) -> str:
    """The name of a class in a file; that of a class of your own begins with its module."""
    is_ours = getattr(mechanisms, of.__name__, None) is of
    return of.__name__ if is_ours else f"{of.__module__}.{of.__name__}"


def class_named(name: str, classes: Sequence[type] = ()) -> type:
    """The class that has a name in a file.

    Args:
        name: see `name_of_class`.
        classes: those that `mechanisms` does not export. Their modules do not matter: that of a
            script is another one when it is imported.

    Raises:
        ValueError: neither `mechanisms` nor `classes` has it.
    """
    module, _, last = name.rpartition(".")
    own = {one.__name__: one for one in classes}
    if module and last in own:
        return own[last]
    if name not in dir(mechanisms):
        raise ValueError(
            f"class must be exported by mechanisms or be one of classes, got {name!r} and classes="
            f"({', '.join(own)})"
        )
    return getattr(mechanisms, name)


def config_to_json(config: Any) -> dict[str, Any]:
    """A config as a JSON object; it and every nested config also hold the name of their class."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {"class": name_of_class(type(config))} | {
        name: config_to_json(value) if dataclasses.is_dataclass(value) else value
        for name, value in values.items()
    }


def config_from_json(values: dict[str, Any], classes: Sequence[type] = ()) -> Any:
    """The inverse of `config_to_json`; for `classes` see `class_named`.

    Raises:
        ValueError: neither `mechanisms` nor `classes` has the class, or it is no config.
        TypeError: the class does not have one of the settings.
    """
    name = values.get("class", "")
    config_class = class_named(name, classes)
    if not dataclasses.is_dataclass(config_class):
        raise ValueError(f"class must be a config, got {name!r}")
    arguments = {}
    for key, value in values.items():
        if isinstance(value, dict):
            value = config_from_json(value, classes)
        if key != "class":
            # Tuples become lists in JSON; configs have no lists.
            arguments[key] = tuple(value) if isinstance(value, list) else value
    return config_class(**arguments)


def save(model: nn.Module, path: str | Path) -> None:
    """Save a model that is built from a `config`, replacing an existing file atomically.

    Weights keep their dtype. The `eps` of norms is saved too, since it may have been changed
    after the model was built.

    Raises:
        TypeError: the model needs other arguments besides its config, as blocks and attention
            modules do, whose width is that of the model around them; or parameters share memory.
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
        "class": name_of_class(model_class),
        "config": json.dumps(config_to_json(model.config)),
        "eps": json.dumps({name: norm.eps for name, norm in _norms(model).items()}),
    }
    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    partial = path.with_name(f".{path.name}.partial")
    try:
        write_tensors(partial, weights, metadata)
        partial.replace(path)
    # How safetensors refuses tensors of which one is a part of another.
    except RuntimeError as error:
        raise TypeError(f"weights must not share memory: {str(error).strip()}") from error
    finally:
        partial.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file with the permissions of other new files.

    safetensors lets the owner alone read it, which hides models from a group that shares a disk.
    """
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata)
    path.chmod(mode)


def load(
    path: str | Path, *, device: torch.device | str = "cpu", classes: Sequence[type] = ()
) -> Any:
    """Load a model that `save` wrote, in evaluation mode.

    Args:
        path: the file, or `zoo:NAME` for a trained model that comes with the package; see `zoo`.
        device: the device of the model.
        classes: those of models and configs of your own that the file names, such as the config of
            an attention; a file runs no code that is not passed.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged, or was not written by `save`; it names a class that is
            neither exported by `mechanisms` nor in `classes`; or the zoo has no such model.

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
    if not {"class", "config"} <= set(metadata):
        raise ValueError(
            f"path must be a file that mechanisms.save wrote, got {path} with header {metadata}"
        )
    config = config_from_json(json.loads(metadata["config"]), classes)
    model: Any = class_named(metadata["class"], classes)(config)
    # What is not in the file has the precision of the weights.
    for tensor in weights.values():
        if tensor.is_floating_point():
            model.to(tensor.dtype)
            break
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
