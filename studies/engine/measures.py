"""Measures written as functions: parameters other than the trained model become settings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def configured(measure: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a measure function into a callable frozen dataclass with the settings as fields.

    Args:
        measure: a function of a trained model and of settings, which have defaults and are
            documented under `Args:`. Functions without settings, and other callables, are
            returned as they are.

    Raises:
        TypeError: a setting has no default.

    Example:
        >>> def decoding(trained: Trained, n: int = 2000) -> xr.Dataset: ...
        >>> dataclasses.replace(configured(decoding), n=100)(trained)
    """
    if not inspect.isfunction(measure):
        return measure
    _, *parameters = inspect.signature(measure).parameters.values()
    if not parameters:
        return measure
    if missing := [
        parameter.name for parameter in parameters if parameter.default is parameter.empty
    ]:
        raise TypeError(
            f"all settings of measure {measure.__name__} must have defaults, got "
            f"{', '.join(missing)} without"
        )
    hints = get_type_hints(measure)
    measure_class = dataclasses.make_dataclass(
        measure.__name__,
        [
            (parameter.name, hints.get(parameter.name, type(parameter.default)), parameter.default)
            for parameter in parameters
        ],
        namespace={"__call__": lambda self, trained: measure(trained, **vars(self))},
        frozen=True,
    )
    # So that the code and the documentation of the function are found from the class.
    copied = ("__module__", "__qualname__", "__doc__")
    return functools.update_wrapper(measure_class, measure, assigned=copied, updated=())()
