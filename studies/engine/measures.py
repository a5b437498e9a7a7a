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

    Example:
        >>> def decoding(trained: Trained, n: int = 2000) -> xr.Dataset: ...
        >>> dataclasses.replace(configured(decoding), n=100)(trained)
    """
    if not inspect.isfunction(measure):
        return measure
    _, *parameters = inspect.signature(measure).parameters.values()
    if not parameters:
        return measure
    hints = get_type_hints(measure)
    kind = dataclasses.make_dataclass(
        measure.__name__,
        [(one.name, hints[one.name], one.default) for one in parameters],
        namespace={"__call__": lambda self, trained: measure(trained, **vars(self))},
        frozen=True,
    )
    # Where the code of the function is, and its documentation, is where those of the class are.
    return functools.update_wrapper(kind, measure, updated=())()
