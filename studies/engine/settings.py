"""Settings: dotted paths into frozen configs, read from text, described by their docstrings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Config = TypeVar("Config")


def plain(config: object) -> Any:
    """A config as JSON values; of a dataclass also its name, which tells it from similar ones."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {"class": type(config).__qualname__} | plain(_values(config))
    if isinstance(config, Mapping):
        return {str(key): plain(value) for key, value in config.items()}
    if isinstance(config, tuple | list):
        return [plain(value) for value in config]
    if isinstance(config, type) or callable(config):
        return getattr(config, "__qualname__", repr(config))
    return config


def describe(config: object, prefix: str = "") -> list[tuple[str, Any, str]]:
    """Full name, value and documentation of every setting, from `Args:` of the configs' classes."""
    found, docs = [], _documented(type(config))
    for field, value in _values(config).items():
        name = prefix + field
        if dataclasses.is_dataclass(value):
            found += describe(value, f"{name}.")
        else:
            found.append((name, value, docs.get(field, "")))
    return found


def setting_names(config: object, prefix: str = "") -> list[str]:
    """The full names of all settings of a config, nested ones with dots."""
    return [name for name, _, _ in describe(config, prefix)]


def get(config: object, path: str) -> Any:
    """The value of a setting, nested ones with dots: `get(config, "training.n_steps")`.

    Raises:
        ValueError: there is no such setting.
    """
    value = config
    for name in path.split("."):
        if not dataclasses.is_dataclass(value) or name not in _values(value):
            raise unknown_setting(path, setting_names(config))
        value = getattr(value, name)
    return value


def put(config: Config, changes: Mapping[str, Any]) -> Config:
    """A copy of a frozen `config` with changes such as `{"training.n_steps": 100, "seed": 1}`.

    All of one config are put at once, so that it is checked as a whole.

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
    hint = hint_of(config, path)
    texts = [text] if is_tuple(hint) else filter(None, text.split(","))
    return tuple(_parse(part, hint, path) for part in texts)


def unknown_setting(name: str, known: list[str]) -> ValueError:
    """The error about a setting that there is none of: it names the nearest."""
    near = get_close_matches(name, known, n=3) or known
    return ValueError(f"unknown setting {name!r}; nearest are {', '.join(near)}")


def hint_of(config: object, path: str) -> Any:
    """The type that a setting is annotated with."""
    parent, _, name = path.rpartition(".")
    return get_type_hints(type(get(config, parent) if parent else config))[name]


def is_tuple(hint: Any) -> bool:
    """Whether a tuple is among the types that a setting may have."""
    return any(get_origin(kind) is tuple for kind in _kinds(hint))


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _values(config: object) -> dict[str, Any]:
    fields = dataclasses.fields(config)  # pyright: ignore[reportArgumentType]
    return {field.name: getattr(config, field.name) for field in fields}


@functools.cache
def _documented(kind: type) -> dict[str, str]:
    """What docstrings of a class and its bases say of each argument."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        text = inspect.cleandoc(base.__doc__ or "")
        for section in re.findall(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)*)", text, re.M):
            for entry in re.split(r"^    (?=\S)", section, flags=re.M):
                names, _, said = entry.partition(":")
                docs |= dict.fromkeys(names.split(", "), " ".join(said.split()))
    return docs


def _parse(text: str, hint: Any, path: str) -> Any:
    kinds = _kinds(hint)
    if NoneType in kinds and text.lower() == "none":
        return None
    kind = next(kind for kind in kinds if kind is not NoneType)
    if get_origin(kind) is tuple:
        parts = filter(None, text.split(","))
        return tuple(_parse(part, get_args(kind)[0], path) for part in parts)
    if get_origin(kind) is Literal:
        allowed = {str(value): value for value in get_args(kind)}
        if text not in allowed:
            raise ValueError(f"{path} must be one of {', '.join(allowed)}, got {text!r}")
        return allowed[text]
    if kind is str:
        return text
    try:
        value = json.loads(text.lower() if kind is bool else text)
    except ValueError:
        value = None
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{path} must be of type {kind.__name__}, got {text!r}")
    return value
