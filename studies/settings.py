"""Settings from the command line: `key=value` over the fields of a frozen config."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from difflib import get_close_matches
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

Config = TypeVar("Config")


def override(config: Config, settings: Iterable[str]) -> Config:
    """A copy of `config` with settings such as `training.n_steps=100` or `seeds=0,1` changed.

    Raises:
        ValueError: a setting is unknown, is no `key=value`, or has a value of the wrong type;
            or what the config's own validation raises.
    """
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"a setting looks like key=value, got {setting!r}")
        config = _replace(config, key.split("."), text, key)
    return config


def setting_names(config: object, prefix: str = "") -> list[str]:
    """The full names of all settings of a config, nested ones with dots."""
    names: list[str] = []
    for field in dataclasses.fields(config):  # pyright: ignore[reportArgumentType]
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            names += setting_names(value, f"{prefix}{field.name}.")
        else:
            names.append(prefix + field.name)
    return names


def from_plain(kind: type[Config], values: dict[str, Any]) -> Config:
    """The config of class `kind` that was stored as JSON values.

    Raises:
        ValueError: a key is unknown or missing.
    """
    hints = get_type_hints(kind)
    names = {field.name for field in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]
    if unknown := sorted(set(values) - names):
        raise ValueError(f"{kind.__name__} has no setting {', '.join(unknown)}")
    arguments = {}
    for name, value in values.items():
        if isinstance(value, dict):
            value = from_plain(_config_class(hints[name], value), value)
        arguments[name] = tuple(value) if isinstance(value, list) else value
    return kind(**arguments)


def _config_class(hint: Any, values: dict[str, Any]) -> type:
    """The config class that `hint` names: of several, the one that has exactly these settings."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    configs = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
    fitting = [
        kind
        for kind in configs
        if len(configs) == 1 or {field.name for field in dataclasses.fields(kind)} == set(values)
    ]
    if len(fitting) != 1:
        raise ValueError(f"no config of {hint} has the settings {', '.join(values)}")
    return cast(type, fitting[0])


def _replace(config: Any, path: list[str], text: str, key: str) -> Any:
    name, *rest = path
    names = [field.name for field in dataclasses.fields(config)]
    value = getattr(config, name, None)
    if name not in names or bool(rest) != dataclasses.is_dataclass(value):
        known = setting_names(config, prefix=key.removesuffix(".".join(path)))
        near = get_close_matches(key, known, n=3) or known
        raise ValueError(f"unknown setting {key!r}; nearest are {', '.join(near)}")
    if rest:
        return dataclasses.replace(config, **{name: _replace(value, rest, text, key)})
    return dataclasses.replace(
        config, **{name: _parse(text, get_type_hints(type(config))[name], key)}
    )


def _parse(text: str, hint: Any, key: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if text.lower() == "none" and type(None) in arguments:
            return None
        hint = next(argument for argument in arguments if argument is not type(None))
        return _parse(text, hint, key)
    if origin is tuple:
        return tuple(_parse(part, arguments[0], key) for part in text.split(",") if part)
    if origin is Literal or hint is str:
        return text
    try:
        value = json.loads(text.lower() if hint is bool else text)
        if hint is float and type(value) is int:
            value = float(value)
        if type(value) is hint:
            return value
        raise ValueError
    except ValueError:
        raise ValueError(f"{key} must be of type {hint.__name__}, got {text!r}") from None
