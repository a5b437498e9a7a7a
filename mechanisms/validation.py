"""Checks of config settings; each error names the setting, what is allowed and what was passed."""

from __future__ import annotations

from numbers import Integral
from typing import Any, get_args


def check_sizes(
    config: object, *required: str, optional: tuple[str, ...] = (), minimum: int = 1
) -> None:
    """Raise unless settings are integers of at least `minimum`; `optional` ones may be None.

    Raises:
        TypeError: one is no integer.
        ValueError: one is less.
    """
    passed = [name for name in optional if getattr(config, name) is not None]
    for name in (*required, *passed):
        value = getattr(config, name)
        if not isinstance(value, Integral):
            raise TypeError(f"{name} must be an integer, got {value!r}")
        if value < minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {value}")


def check_choice(config: object, name: str, choices: Any) -> None:
    """Raise a ValueError unless the setting is one of `choices`, a Literal type."""
    value, allowed = getattr(config, name), get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def check_dropout(config: Any, *names: str) -> None:
    """Raise a ValueError unless these settings, or else `config.dropout`, are in [0, 1)."""
    for name in names or ("dropout",):
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(f"{name} must be in [0, 1), got {getattr(config, name)}")


def check_positive(config: object, *names: str) -> None:
    """Raise a ValueError unless these settings are greater than 0."""
    for name in names:
        if not getattr(config, name) > 0:
            raise ValueError(f"{name} must be greater than 0, got {getattr(config, name)}")
