"""Settings: dotted paths into frozen configs, read from text, described by their docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Config = TypeVar("Config")


def plain(config: object) -> Any:
    """A config as JSON values: dataclasses become dicts with the name of their class, tuples lists.

    The class tells apart configs with the same fields. Mappings keep their keys.
    """
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        return {"class": type(config).__qualname__} | {k: plain(v) for k, v in fields.items()}
    if isinstance(config, Mapping):
        return {str(key): plain(value) for key, value in config.items()}
    if isinstance(config, tuple | list):
        return [plain(value) for value in config]
    if isinstance(config, type) or callable(config):
        return getattr(config, "__qualname__", repr(config))
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


def get(config: object, path: str) -> Any:
    """The value of a setting, nested ones with dots: `get(config, "training.n_steps")`.

    Raises:
        ValueError: there is no such setting.
    """
    value = config
    for name in path.split("."):
        fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        if name not in [field.name for field in fields]:
            raise unknown_setting(path, setting_names(config))
        value = getattr(value, name)
    return value


def put(config: Config, changes: Mapping[str, Any]) -> Config:
    """A copy of `config` with settings changed; all of one config at once, so that it is checked
    as a whole.

    Args:
        config: a frozen dataclass, perhaps of others.
        changes: by full name: `{"training.n_steps": 100, "seed": 1}`.

    Raises:
        ValueError: a setting is unknown; or what a config's own validation raises.
    """
    own: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        get(config, path)
        first, _, rest = path.partition(".")
        if rest:
            nested.setdefault(first, {})[rest] = value
        else:
            own[first] = value
    for name, some in nested.items():
        own[name] = put(own.get(name, getattr(config, name)), some)
    return dataclasses.replace(config, **own) if own else config  # pyright: ignore[reportArgumentType, reportReturnType]


def parse(config: object, path: str, text: str) -> tuple[Any, ...]:
    """The values of a setting that are given as text: several, with commas, make an axis.

    A setting that is a tuple takes all of them as its one value.

    Raises:
        ValueError: the setting is unknown or is a group of settings, or a value is of a wrong type.
    """
    value = get(config, path)
    if dataclasses.is_dataclass(value):
        names = ", ".join(setting_names(value, f"{path}."))
        raise ValueError(f"{path} is a group of settings: {names}")
    parent, _, name = path.rpartition(".")
    owner = get(config, parent) if parent else config
    hint = get_type_hints(type(owner))[name]
    if is_tuple(hint):
        return (_parse(text, hint, path),)
    return tuple(_parse(part, hint, path) for part in text.split(",") if part)


def unknown_setting(name: str, known: list[str]) -> ValueError:
    """The error about a setting that there is none of: it names the nearest."""
    near = get_close_matches(name, known, n=3) or known
    return ValueError(f"unknown setting {name!r}; nearest are {', '.join(near)}")


def describe(config: object, prefix: str = "") -> list[tuple[str, Any, str]]:
    """Name, value and documentation of every setting, from the `Args:` of the configs' classes."""
    found = []
    docs = _documented(type(config))
    for field in dataclasses.fields(config):  # pyright: ignore[reportArgumentType]
        value, name = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            found += describe(value, f"{name}.")
        else:
            found.append((name, value, docs.get(field.name, "")))
    return found


def _documented(kind: type) -> dict[str, str]:
    """What docstrings of a class and its bases say of each argument."""
    docs: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        text = inspect.cleandoc(one.__doc__ or "")
        section = re.search(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)*)", text, re.MULTILINE)
        if section is None:
            continue
        entries = re.split(r"^    (?=\S)", section[1], flags=re.MULTILINE)
        for entry in entries:
            names, colon, about = entry.partition(":")
            if colon and re.fullmatch(r"[\w, ]+", names):
                said = " ".join(about.split())
                docs |= dict.fromkeys(re.split(r", *", names), said)
    return docs


def is_tuple(hint: Any) -> bool:
    """Whether a tuple is among the types that a setting may have."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return any(get_origin(kind) is tuple for kind in kinds)


def _parse(text: str, hint: Any, path: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if text.lower() == "none" and type(None) in arguments:
            return None
        hint = next(argument for argument in arguments if argument is not type(None))
        return _parse(text, hint, path)
    if origin is tuple:
        return tuple(_parse(part, arguments[0], path) for part in text.split(",") if part)
    if origin is Literal:
        return _one_of(text, arguments, path)
    if hint is str:
        return text
    try:
        value = json.loads(text.lower() if hint is bool else text)
        if hint is float and type(value) is int:
            value = float(value)
        if type(value) is hint:
            return value
        raise ValueError
    except ValueError:
        raise ValueError(f"{path} must be of type {hint.__name__}, got {text!r}") from None


def _one_of(text: str, allowed: tuple[Any, ...], path: str) -> Any:
    for value in allowed:
        if str(value) == text:
            return value
    names = ", ".join(map(str, allowed))
    raise ValueError(f"{path} must be one of {names}, got {text!r}")
