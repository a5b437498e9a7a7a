"""Settings: dotted paths into frozen configs, read from text, described by their docstrings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Mapping, Sequence
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
        if _is_group(value):
            found += describe(value, f"{prefix}{field}.")
        else:
            found.append((prefix + field, value, docs.get(field, "")))
    return found


def get(config: object, path: str) -> Any:
    """The value of a setting, nested ones with dots: `get(config, "training.n_steps")`.

    Raises:
        ValueError: there is no such setting.
    """
    value = config
    for name in path.split("."):
        if not _is_group(value) or name not in _values(value):
            raise unknown_setting(path, config)
        value = _values(value)[name]
    return value


def put(config: Config, changes: Mapping[str, Any]) -> Config:
    """A copy of a frozen `config`, or of configs by name, with changes such as `{"seed": 1}`.

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
        own[name] = put(own.get(name, get(config, name)), some)
    if isinstance(config, Mapping):
        return {**config, **own}  # pyright: ignore[reportReturnType]
    return dataclasses.replace(config, **own) if own else config  # pyright: ignore[reportArgumentType, reportReturnType]


def parse(config: object, path: str, text: str) -> tuple[Any, ...]:
    """The values of a setting that are given as text: several, with commas, make an axis.

    A setting that is a tuple takes all of them as its one value.

    Raises:
        ValueError: the setting is unknown or is a group of settings, or a value is of a wrong type.
    """
    if _is_group(value := get(config, path)):
        names = ", ".join(name for name, *_ in describe(value, f"{path}."))
        raise ValueError(f"{path} is a group of settings: {names}")
    parent, _, name = path.rpartition(".")
    hint = _hints(type(get(config, parent) if parent else config))[name]
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if any(get_origin(kind) is tuple for kind in kinds):
        return (_parse(text, kinds, path),)
    return tuple(_parse(part, kinds, path) for part in text.split(",") if part)


def read(changes: Sequence[str], *configs: object) -> dict[str, tuple[Any, ...]]:
    """The values of settings, each of the first config that has it, from `["seed=0,1"]`, say.

    The same setting again is a further value of it.

    Raises:
        ValueError: see `parse`; or values are missing, or there are equal ones.
    """
    given: dict[str, tuple[Any, ...]] = {}
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            raise ValueError(f"a setting looks like key=value, got {change!r}")
        owner = next((config for config in configs if has(config, name)), None)
        if owner is None:
            raise unknown_setting(name, *configs)
        given[name] = given.get(name, ()) + parse(owner, name, text)
    for name, values in given.items():
        if not values or len(set(values)) < len(values):
            raise ValueError(f"values of {name} must be different from one another: {values}")
    return given


def read_single(changes: str, config: object) -> dict[str, Any]:
    """The value of each setting, from `"n_steps=100 clip=none"`, say; see `read`."""
    return {name: value for name, (value,) in read(changes.split(), config).items()}


def changed(config: Config, changes: str) -> Config:
    """A copy of a config with changes such as `"n_steps=100 clip=none"`."""
    return put(config, read_single(changes, config))


def has(config: object, path: str) -> bool:
    """Whether there is such a setting, or group of settings."""
    try:
        get(config, path)
    except ValueError:
        return False
    return True


def unknown_setting(name: str, *configs: object) -> ValueError:
    """The error about a setting that configs do not have: it names the nearest."""
    known = [path for config in configs for path, *_ in describe(config)]
    near = get_close_matches(name, known, n=3) or known
    return ValueError(f"unknown setting {name!r}; nearest are {', '.join(near)}")


def _is_group(value: object) -> bool:
    return isinstance(value, Mapping) or dataclasses.is_dataclass(value)


def _values(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


# Annotations are text that is evaluated, and what papers report asks for them thousands of times.
_hints = functools.cache(get_type_hints)


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


def _parse(text: str, kinds: Sequence[Any], path: str) -> Any:
    """The value of one of some types that a text is."""
    if NoneType in kinds and text.lower() == "none":
        return None
    kind = next(kind for kind in kinds if kind is not NoneType)
    if get_origin(kind) is tuple:
        return tuple(_parse(part, get_args(kind)[:1], path) for part in text.split(",") if part)
    if get_origin(kind) is Literal:
        allowed = {str(value): value for value in get_args(kind)}
        if text not in allowed:
            raise ValueError(f"{path} must be one of {', '.join(allowed)}, got {text!r}")
        return allowed[text]
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"{path} must be of type {kind.__name__}, got {text!r}") from None
