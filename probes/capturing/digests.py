"""Digests of what a capture depends on: a model, its inputs, and functions."""

from __future__ import annotations

import dis
import hashlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from probes.capturing.hooking import modules_of
from probes.checking import shape_of

_LIBRARIES = ("builtins", "typing", "torch", "transformer_lens", "transformers", "probes")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def digest_of(name: str, value: Any) -> str:
    """A digest of all that a value holds, the same in each process.

    Of models these are weights and buffers, the settings of layers, the config, the arguments of
    `hooked`, the code of the methods of your own classes, and of other public attributes the plain
    values (numbers, strings, dtypes, functions, and lists and mappings of them), but neither
    tensors that are no buffers nor other objects. Of functions these are the code, defaults, and
    what they take from around them; of those of models the plain values of it.

    Args:
        name: what the value is, for errors.
        value: any value that can be pickled, or a function.

    Raises:
        TypeError: a part of the value has contents that cannot be read, such as a generator.
    """
    digest = hashlib.sha256()
    try:
        for part in _bytes(value, ()):
            digest.update(part)
    except TypeError as error:
        raise TypeError(
            f"captures on disk need {name} that can be told from another one: of plain values, "
            f"tensors and functions, got {shape_of(value)} ({error})"
        ) from error
    return digest.hexdigest()[:16]


def _bytes(value: Any, above: tuple[Any, ...]) -> Iterator[Any]:
    yield f"({type(value).__qualname__} ".encode()
    if isinstance(value, _PLAIN):
        yield repr(value).encode()
    elif isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)} ".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    elif isinstance(value, type | ModuleType):
        yield _name(value).encode()
    elif not any(value is one for one in above):
        for part in _contents(value):
            yield from _bytes(part, (*above, value))
    yield b")"


def _contents(value: Any) -> Iterable[Any]:
    match value:
        case nn.Module():
            return _of_model(value)
        case Mapping():
            return value.items()
        case list() | tuple():
            return value
        case set() | frozenset():
            return sorted(digest_of("an element", one) for one in value)
        case np.ndarray():
            # Arrays of objects hold addresses.
            values = value.tolist() if value.dtype.hasobject else value.tobytes()
            return value.dtype.str, value.shape, values
        case FunctionType():
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            defaults = value.__defaults__, value.__kwdefaults__
            return _name(value), value.__code__, *defaults, cells, [*_globals(value)]
        case CodeType():
            return value.co_code, value.co_names, value.co_consts
        case MethodType():
            return value.__func__, value.__self__
    call = type(value).__call__ if callable(value) else None
    return call if isinstance(call, FunctionType) else None, *_reduced(value)


def _reduced(value: Any) -> Iterable[Any]:
    """How pickle makes an object: its class, arguments, state, and elements."""
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):
        return (reduced,)
    return [[*part] if isinstance(part, Iterator) else part for part in reduced]


def _of_model(model: nn.Module) -> Iterator[Any]:
    # Imported here because `--help` of studies should not wait for it.
    from transformer_lens import HookedRootModule
    from transformer_lens.hook_points import HookPoint

    from probes.capturing.any_module import bound_arguments

    # Hooks, the training flag, and what else has no effect on what is computed.
    bookkeeping = vars(HookedRootModule()).keys() | vars(HookPoint()).keys()
    seen = set[Any]()
    for module in modules_of(model):
        weights = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        yield from ((_name(type(module)), name, weight) for name, weight in weights)
        # Of hook points, and of what holds them, there are more after a pass with more steps.
        if not isinstance(module, HookPoint) and type(module).forward is not nn.Module.forward:
            for one in type(module).__mro__:
                if one not in seen and not _is_of_library(one):
                    seen.add(one)
                    yield _methods(one, seen)
            # Private attributes are often counters and flags of calls.
            attributes = {
                name: value
                for name, value in vars(module).items()
                if name not in bookkeeping and not name.startswith("_")
            }
            settings = "" if [*module.children()] else module.extra_repr()
            yield _name(type(module)), settings, _plain(attributes, seen)
        if is_dataclass(config := vars(module).get("config")):
            yield config
        if arguments := bound_arguments(module):
            yield arguments


def _methods(module_class: type, seen: set[Any]) -> Any:
    """The code of a class's methods, and its attributes."""
    members = {
        name: getattr(member, "fget", None) or getattr(member, "__func__", member)
        for name, member in vars(module_class).items()
    }
    return _plain(
        {
            name: member
            for name, member in members.items()
            if isinstance(member, FunctionType) or not name.startswith("__")
        },
        seen,
    )


def _plain(value: Any, seen: set[Any]) -> Any:
    """Of a value the plain ones and the code of functions, each once; None for other objects."""
    match value:
        case bool() | int() | float() | complex() | str() | bytes() | torch.dtype():
            return value
        case list() | tuple():
            return [_plain(one, seen) for one in value]
        case Mapping():
            # Without other objects: some are kept while a model is called.
            pairs = ((_plain(key, seen), _plain(one, seen)) for key, one in value.items())
            return [pair for pair in pairs if pair[1] is not None]
        case partial():
            return _plain((value.func, value.args, value.keywords), seen)
        case MethodType():
            return _plain(value.__func__, seen)
        case BuiltinFunctionType():
            return _name(value)
        case FunctionType():
            function = inspect.unwrap(value)
            if (
                not isinstance(function, FunctionType)
                or function in seen
                or _is_of_library(function)
            ):
                return _name(function)
            seen.add(function)
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
            defaults = function.__defaults__, function.__kwdefaults__
            around = _plain((*defaults, cells, dict(_globals(function))), seen)
            return _name(function), function.__code__, around
    return None


def _is_of_library(value: Any) -> bool:
    """Whether a class or function is of the libraries, whose code is not compared."""
    return str(value.__module__).partition(".")[0] in _LIBRARIES


def _globals(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function takes from its module; of functions of other modules the names."""
    names, codes = set[str](), [function.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        names |= {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
    for name in sorted(names & set(function.__globals__)):
        value = function.__globals__[name]
        is_foreign = (
            isinstance(value, FunctionType) and value.__globals__ is not function.__globals__
        )
        yield name, _name(value) if is_foreign else value


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
