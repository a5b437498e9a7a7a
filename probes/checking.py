"""Arguments of probes are checked against their annotations, so that errors name the argument."""

import inspect
import random
import re
import reprlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, reduce, wraps
from operator import or_
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import xarray as xr
from beartype import BeartypeConf, FrozenDict
from beartype.door import is_bearable
from jaxtyping import AbstractArray
from torch import Tensor, nn

P = ParamSpec("P")
Result = TypeVar("Result")

# NumPy's numbers are numbers.
_CONF = BeartypeConf(
    hint_overrides=FrozenDict(
        {int: int | np.integer, float: float | int | np.floating | np.integer}
    )
)
_ArrayLike = np.ndarray | np.generic | xr.DataArray | Sequence | float
_OF_NAMES = (Sequence, Collection, Iterable)
_LONGEST = 200
_REMEDY = "; probes.hooked(model) gives any PyTorch model hooks"


def checked(function: Callable[P, Result]) -> Callable[P, Result]:
    """Check the types of a function's arguments on each call.

    Of a container one value is checked, the same on each call, so that the cost does not depend on
    its size.

    Raises:
        TypeError: an argument is not of the annotated type; the message names it.

    Example:
        >>> @checked
        ... def count(data: xr.Dataset) -> int: ...
        >>> count([1])
        TypeError: data of count must be Dataset, got list [1]
    """
    signature = inspect.signature(function)

    @cache
    def hints() -> dict[str, Any]:
        return {name: _checkable(hint) for name, hint in get_type_hints(function).items()}

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{function.__name__}: {error}") from None
        with _same_draws():
            names = (name for name, value in given.items() if not _fits(value, hints()[name]))
            wrong = next(names, None)
        if wrong is not None:
            wanted, got = _named(hints()[wrong]), described(given[wrong])
            if "HookedModel" in wanted and isinstance(given[wrong], nn.Module):
                got += _REMEDY
            if isinstance(value := given[wrong], str) and is_bearable(value, hints()[wrong]):
                got += f"; a sequence of it alone is ({value!r},)"
            raise TypeError(f"{wrong} of {function.__name__} must be {wanted}, got {got}")
        return function(*args, **kwargs)

    return call


def _fits(value: object, hint: Any) -> bool:
    """Whether a value has a type; a string is no sequence of names, though it is one of letters."""
    if isinstance(value, str):
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        options = [one for one in options if get_origin(one) not in _OF_NAMES]
        return any(is_bearable(value, one, conf=_CONF) for one in options)
    return is_bearable(value, hint, conf=_CONF)


@contextmanager
def _same_draws() -> Iterator[None]:
    """Have `random` draw the same numbers each time, and restore its state.

    By these beartype chooses the value of a container that it checks.
    """
    state = random.getstate()
    random.seed(0)
    try:
        yield
    finally:
        random.setstate(state)


def _checkable(hint: Any) -> Any:
    """A type without what probes themselves check: shapes, choices, what batches have."""
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return Tensor if hint.array_type is Tensor else _ArrayLike
    if getattr(hint, "_is_protocol", False) and not hint._is_runtime_protocol:
        return Any
    if get_origin(hint) is Literal:
        return reduce(or_, map(type, get_args(hint)))
    if arguments := get_args(hint):
        inner = [_checkable(argument) for argument in arguments if not isinstance(argument, list)]
        if inner != list(arguments) and len(inner) == len(arguments):
            origin: Any = get_origin(hint)
            return reduce(or_, inner) if origin in (Union, UnionType) else origin[tuple(inner)]
    return hint


def shape_of(value: object) -> str:
    """The shape of a tensor, or the type of anything else."""
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def check_labels(
    name: str, array: xr.DataArray, of: str, expected: xr.DataArray, dim: Hashable = "example"
) -> None:
    """Raise a ValueError if both arrays have labels along a dim, and these differ."""
    both = dim in array.coords and dim in expected.coords
    if both and not np.array_equal(array[dim].to_numpy(), expected[dim].to_numpy()):
        raise ValueError(f"{name} must have the coordinate {dim!r} of {of}, got another")


def described(value: object) -> str:
    """The type of a value with its shape, or else with the start of its text; see `checked`."""
    kind = type(value).__name__
    if isinstance(shape := getattr(value, "shape", None), tuple):
        return f"{kind} of shape {tuple(shape)} and dtype {getattr(value, 'dtype', None)}"
    if isinstance(value, list | tuple | dict | set | str | int | float):
        return f"{kind} {reprlib.repr(value)[:_LONGEST]}"
    return kind


def _named(hint: Any) -> str:
    """The name of a type without the modules that define it, and what its protocols have."""
    text = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    members = [
        f" ({part.__name__}: {', '.join(name for name in vars(part) if not name.startswith('_'))})"
        for part in (hint, *get_args(hint))
        if getattr(part, "_is_protocol", False)
    ]
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text) + "".join(members)
