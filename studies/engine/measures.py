"""Measures as functions: what a function takes beside a trained model are its settings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def configured(measure: Callable[..., Any]) -> Callable[..., Any]:
    """A measure with settings that can be shown and changed: a frozen dataclass that is called.

    Args:
        measure: a function of a trained model whose further parameters, with defaults, are the
            settings, documented under `Args:`; anything else is left as it is.

    Raises:
        TypeError: a further parameter has no default.

    Example:
        >>> def decoding(trained: Trained, n: int = 2000) -> xr.Dataset: ...
        >>> dataclasses.replace(configured(decoding), n=100)(trained)
    """
    if not inspect.isfunction(measure):
        return measure
    _, *parameters = inspect.signature(measure).parameters.values()
    if not parameters:
        return measure
    if missing := [one.name for one in parameters if one.default is one.empty]:
        raise TypeError(
            f"the measure {measure.__name__} must have defaults of {', '.join(missing)}: what it "
            "takes beside a trained model are its settings"
        )
    hints = get_type_hints(measure)
    kind = dataclasses.make_dataclass(
        measure.__name__,
        [(one.name, hints.get(one.name, type(one.default)), one.default) for one in parameters],
        namespace={"__call__": lambda self, trained: measure(trained, **vars(self))},
        frozen=True,
    )
    # Where the code of the function is, and its documentation, is where those of the class are.
    same = ("__module__", "__qualname__", "__doc__")
    return functools.update_wrapper(kind, measure, assigned=same, updated=())()
