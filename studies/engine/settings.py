"""Settings: dotted paths into frozen configs, parsed from text, documented by docstrings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

Config = TypeVar("Config")


class SettingTypeError(TypeError):
    """A setting has a type that settings cannot have."""


def plain(config: object) -> Any:
    """A config as JSON values; a dataclass includes its class name, which is part of its hash."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {"class": type(config).__qualname__} | plain(_values(config))
    if isinstance(config, Mapping):
        return {str(key): plain(value) for key, value in config.items()}
    if isinstance(config, tuple | list):
        return [plain(value) for value in config]
    if isinstance(config, functools.partial):
        held = {"args": plain(config.args), "keywords": plain(config.keywords)}
        return {"partial": plain(config.func)} | held
    if isinstance(config, type) or callable(config):
        return getattr(config, "__qualname__", type(config).__qualname__)
    # Numbers of NumPy, as in np.arange(3), are no JSON.
    return config.item() if isinstance(config, np.generic) else config


def check_types(config: object, path: str = "") -> None:
    """Check that all settings have values that can be hashed and written as JSON.

    Args:
        config: a config, or the value of a setting.
        path: its path; "" for a whole config.

    Raises:
        SettingTypeError: one does not.
    """
    if _is_group(config):
        for name, value in _values(config).items():
            check_types(value, f"{path}.{name}" if path else name)
    elif isinstance(config, tuple):
        for value in config:
            check_types(value, path)
    elif not (
        config is None
        or isinstance(config, bool | int | float | str | np.generic | type)
        or callable(config)
    ):
        raise SettingTypeError(
            f"setting {path} must be None, a bool, number, string, function or class, a tuple of "
            f"these, or a frozen dataclass, got {config!r} of type {type(config).__qualname__}"
        )


def from_plain(values: Mapping[str, Any], like: Config) -> Config:
    """The inverse of `plain`: a config of the same classes as `like`, with other values.

    Settings that are missing from `values` have their defaults, if they have one, so that configs
    from before a setting was added stand for what they were.

    Raises:
        ValueError: a class is another one than in `like`, or a setting or its value is not allowed.

    Example:
        >>> from_plain(plain(config), config) == config
        True
    """
    name = type(like).__qualname__
    if values.get("class") != name:
        raise ValueError(f"class must be {name}, got {values.get('class')!r}")
    missing = [field for field in dataclasses.fields(like) if field.name not in values]  # pyright: ignore[reportArgumentType]
    fields: dict[str, Any] = {
        field.name: field.default for field in missing if field.default is not dataclasses.MISSING
    }
    for path, value in values.items():
        if path == "class":
            continue
        of_like = get(like, path)
        if isinstance(value, Mapping):
            fields[path] = from_plain(value, of_like)
        else:
            fields[path] = with_tuples(value)
    return dataclasses.replace(like, **fields)  # pyright: ignore[reportArgumentType, reportReturnType, reportCallIssue]


def describe(config: object, prefix: str = "") -> list[tuple[str, Any, str]]:
    """Path, value and documentation of every setting, from `Args:` in the classes' docstrings."""
    rows, documentation = [], _documentation(type(config))
    for field, value in _values(config).items():
        if _is_group(value):
            rows += describe(value, f"{prefix}{field}.")
        else:
            rows.append((prefix + field, value, documentation.get(field, "")))
    return rows


def text_of(value: object) -> str:
    """The value of a setting as it is written on the command line: "none", "0.001", "id,ood"."""
    if isinstance(value, tuple | list):
        return ",".join(map(text_of, value))
    plain_value = plain(value)
    return (
        str(plain_value).lower() if value is None or isinstance(value, bool) else str(plain_value)
    )


def get(config: object, path: str) -> Any:
    """The value of a setting, by its dotted path: `get(config, "training.n_steps")`.

    Raises:
        ValueError: there is no such setting.
    """
    value: Any = config
    for name in path.split("."):
        if not _is_group(value) or name not in _names(value):
            raise unknown_setting(path, config)
        value = value[name] if isinstance(value, Mapping) else getattr(value, name)
    return value


def put(config: Config, changes: Mapping[str, Any]) -> Config:
    """A copy of a frozen `config`, or of a mapping of configs, with changes such as `{"seed": 1}`.

    All changes of one config are applied at once, so that validation sees only the final values.

    Raises:
        ValueError: a setting is unknown, or the config's own validation fails.
    """
    fields: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        get(config, path)
        name, _, inner_path = path.partition(".")
        if inner_path:
            nested.setdefault(name, {})[inner_path] = value
        else:
            fields[name] = value
    for name, inner_changes in nested.items():
        fields[name] = put(fields.get(name, get(config, name)), inner_changes)
    if isinstance(config, Mapping):
        return {**config, **fields}  # pyright: ignore[reportReturnType]
    return dataclasses.replace(config, **fields) if fields else config  # pyright: ignore[reportArgumentType, reportReturnType]


def parse(config: object, path: str, text: str) -> tuple[Any, ...]:
    """The values of a setting from text; several values are separated by commas.

    A setting that is a tuple takes all of them as a single value.

    Raises:
        ValueError: the setting is unknown or a group of settings, or a value has the wrong type.
        SettingTypeError: values of the setting's type cannot be written as text.
    """
    if _is_group(value := get(config, path)):
        names = ", ".join(name for name, *_ in describe(value, f"{path}."))
        raise ValueError(f"{path} is a group of settings: {names}")
    parent, _, name = path.rpartition(".")
    hint = _type_hints(type(get(config, parent) if parent else config))[name]
    types = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if any(get_origin(allowed) is tuple for allowed in types):
        return (_parse(text, types, path),)
    return tuple(_parse(part, types, path) for part in text.split(",") if part)


def read(changes: Sequence[str], *configs: object) -> dict[str, tuple[Any, ...]]:
    """Parse changes such as `["seed=0,1"]` into the values of each setting.

    A setting is looked up in the first config that has it. If it occurs in several changes, its
    values add up.

    Raises:
        ValueError: see `parse`; or a setting has no values, or the same value twice.
    """
    values_of: dict[str, tuple[Any, ...]] = {}
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            raise ValueError(f"settings must look like key=value, got {change!r}")
        owner = next((config for config in configs if has(config, name)), None)
        if owner is None:
            raise unknown_setting(name, *configs)
        values_of[name] = values_of.get(name, ()) + parse(owner, name, text)
    for name, values in values_of.items():
        if not values:
            raise ValueError(f"{name} must have a value, got none")
        if len(set(values)) < len(values):
            raise ValueError(f"values of {name} must be different from one another, got {values}")
    return values_of


def read_single(changes: str, config: object) -> dict[str, Any]:
    """Parse changes such as `"n_steps=100 clip=none"` into one value per setting; see `read`.

    Raises:
        ValueError: see `read`; or a setting has several values.
    """
    values_of = read(changes.split(), config)
    for name, values in values_of.items():
        if len(values) > 1:
            raise ValueError(f"{name} must have a single value in {changes!r}, got {values}")
    return {name: value for name, (value,) in values_of.items()}


def changed(config: Config, changes: str) -> Config:
    """A copy of a config with changes such as `"n_steps=100 clip=none"`."""
    return put(config, read_single(changes, config))


def replaced(changes: Sequence[str], by: Sequence[str]) -> list[str]:
    """Changes, in which others take the place of those of the same settings.

    Both together would make an axis.

    Example:
        `replaced(["seed=0,1", "n_layers=2"], ["seed=5"])` is `["n_layers=2", "seed=5"]`.
    """
    names = {change.partition("=")[0] for change in by}
    return [*(change for change in changes if change.partition("=")[0] not in names), *by]


def has(config: object, path: str) -> bool:
    """Whether a config has a setting, or a group of settings, at a path."""
    try:
        get(config, path)
    except ValueError:
        return False
    return True


def unknown_setting(name: str, *configs: object) -> ValueError:
    """The error for a setting that no config has.

    Its message names the three closest ones: of those of other groups that end alike, else of all;
    every setting, where none is close.
    """
    paths = list(dict.fromkeys(path for config in configs for path, *_ in describe(config)))
    same = [path for path in paths if path.rpartition(".")[2] == name.rpartition(".")[2]]
    nearest = get_close_matches(name, same, n=3, cutoff=0) or get_close_matches(name, paths, n=3)
    return ValueError(f"unknown setting {name!r}; nearest: {', '.join(nearest or paths)}")


def with_tuples(value: Any) -> Any:
    """A JSON value as a setting has it: tuples in place of lists."""
    return tuple(map(with_tuples, value)) if isinstance(value, list) else value


def _is_group(value: object) -> bool:
    return isinstance(value, Mapping) or dataclasses.is_dataclass(value)


def _values(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    return {name: getattr(config, name) for name in _names(config)}


def _names(config: Any) -> Collection[str]:
    """The names of the settings that a group has."""
    if isinstance(config, Mapping):
        return config.keys()
    return _field_names(config if isinstance(config, type) else type(config))


# Cached because plans look settings up hundreds of thousands of times.
@functools.cache
def _field_names(config_class: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(config_class))


# Cached because annotations are evaluated from text, thousands of times for reported numbers.
_type_hints = functools.cache(get_type_hints)


@functools.cache
def _documentation(config_class: type) -> dict[str, str]:
    """The documentation of each argument, from the docstrings of a class and its bases."""
    documentation: dict[str, str] = {}
    for base in reversed(config_class.__mro__):
        docstring = inspect.cleandoc(base.__doc__ or "")
        for section in re.findall(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)*)", docstring, re.M):
            for entry in re.split(r"^    (?=\S)", section, flags=re.M):
                names, _, text = entry.partition(":")
                documentation |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return documentation


def _name_of(hint: Any) -> str:
    """An annotation as it is written."""
    return hint.__qualname__ if type(hint) is type else str(hint)


def _parse(text: str, types: Sequence[Any], path: str) -> Any:
    """Convert text to a value of one of `types`: None, or the first type that is not None."""
    if NoneType in types and text.lower() == "none":
        return None
    target = next((allowed for allowed in types if allowed is not NoneType), NoneType)
    if get_origin(target) is tuple:
        return tuple(_parse(part, get_args(target)[:1], path) for part in text.split(",") if part)
    if get_origin(target) is Literal:
        options = {str(value): value for value in get_args(target)}
        if text not in options:
            raise ValueError(f"{path} must be one of {', '.join(options)}, got {text!r}")
        return options[text]
    if not (isinstance(target, type) and issubclass(target, int | float | str)):
        raise SettingTypeError(
            f"setting {path} must be annotated as bool, int, float, str, a Literal or a tuple of "
            f"these, or None, for its value to be given as text, got {_name_of(target)}"
        )
    try:
        return {"true": True, "false": False}[text.lower()] if target is bool else target(text)
    except (KeyError, ValueError):
        raise ValueError(f"{path} must be of type {target.__name__}, got {text!r}") from None
