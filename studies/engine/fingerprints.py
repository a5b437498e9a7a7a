"""Code digests: a hash of the source of everything that a function or class can run.

Starting from a function or class, the names in its source are followed, across modules, to every
function, class and constant of modscope and of the user's own modules. What no source shows counts
beside it: the values that closures, partial functions and instances hold. Comments, docstrings
and layout do not count, nor does what type annotations refer to; libraries count only by their
versions, which results record. What is reached by other ways than names is not followed: what a
decorator or a base class has registered, and modules that are passed on as values.
Definitions are followed one by one, so unrelated code in the same file does not matter: in a
single-file study, editing a measure does not invalidate the trained models.
"""

from __future__ import annotations

import ast
import copyreg
import dataclasses
import functools
import hashlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from importlib import import_module
from inspect import Signature
from itertools import chain
from pathlib import Path, PurePath
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from probes.capturing.digests import digest_of
from studies.engine.folders import RunError

PACKAGES = ("mechanisms", "tasks", "probes", "studies")
"""The packages of modscope; followed even where they are installed in site-packages."""

BOOKKEEPING = ("folders", "checkpoints", "settings", "fingerprints")
"""Modules of the engine that cannot change a number: files, locks, names. Not followed."""

_BODY = "<module>"
"""The name for the statements of a module that neither define nor import."""

VALUES = "values of closures and partial functions"
"""What changed if a value did that a function or an instance holds, but no source shows."""

Definition = tuple[str, str]
"""The name of a module, and the name of a definition in it."""


def code_of(*roots: object) -> dict[str, str]:
    """Digests of the source that `roots` can run, by file: `{"tasks/mlu.py": ...}`.

    The modules are imported, so that what runs later is what was read now.

    Args:
        roots: functions, classes, and instances. Of a dataclass, whose values are settings, only
            its class and the classes, functions and other instances among its values count.

    Raises:
        RunError: a definition is in no file, as in a notebook; or an instance cannot be read.
    """
    parts = _Parts(*roots)
    for module, name in sorted(parts.definitions):
        if module == "__main__" and not _is_followed(module):
            raise RunError(
                f"{name} is defined in no file, as in a notebook, where changes of its code could "
                "not be seen: write it to a module, and import it"
            )
    code = dict(_code_from(frozenset(parts.definitions)))
    return code | ({VALUES: _hash("\n".join(parts.values))} if parts.values else {})


@functools.cache
def _code_from(starts: frozenset[Definition]) -> tuple[tuple[str, str], ...]:
    """The digest of each file, over its definitions that can be reached from `starts`."""
    waiting, reached = list(starts), set()
    while waiting:
        definition = waiting.pop()
        if definition not in reached and _is_followed(definition[0]):
            reached.add(definition)
            waiting += [(definition[0], _BODY), *_references(definition)]
    files: dict[str, list[str]] = {}
    for module, name in sorted(reached):
        if digest := _digest((module, name)):
            files.setdefault(_module(module).label, []).append(f"{name}={digest}")
    return tuple((label, _hash("\n".join(lines))) for label, lines in sorted(files.items()))


def changed_files(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The files whose digests differ, or that only one side has."""
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


def sources_of(*roots: object) -> dict[str, Path]:
    """The folders of source code: `modscope`, and `study` if `roots` are from a user's module."""
    sources = {"modscope": Path(__file__).parent}
    for module, _ in _Parts(*roots).definitions:
        if module.partition(".")[0] not in PACKAGES and _is_followed(module):
            sources["study"] = Path(_spec(module).origin).parent
    return sources


class _Parts:
    """What determines the behaviour of objects.

    Attributes:
        definitions: the definitions of their functions and classes.
        values: texts of the plain values that functions and instances hold, in order. Those of
            dataclasses do not count: they are settings, which have a hash of their own.
    """

    def __init__(self, *roots: object):
        self.definitions: set[Definition] = set()
        self.values: list[str] = []
        self._seen: dict[int, object] = {}
        for root in roots:
            self._add(root, is_held=False)

    def _add(self, root: Any, *, is_held: bool) -> None:
        """Add an object; `is_held`: a function holds it."""
        if root is None or isinstance(root, str | bytes | int | float | complex):
            self.values += [repr(root)] if is_held else []
            return
        if id(root) in self._seen:
            return
        self._seen[id(root)] = root
        parts: Iterable[Any] = ()
        if isinstance(root, functools.partial):
            self._add(root.func, is_held=is_held)
            parts, is_held = (*root.args, *root.keywords.items()), True
        elif isinstance(root, type) or (callable(root) and hasattr(root, "__qualname__")):
            # Methods of builtins, such as "{:.1f}".format, have no module.
            if root.__module__ is not None:
                self.definitions.add((root.__module__, _name_of(root)))
            parts, is_held = _held_by(root), True
        elif dataclasses.is_dataclass(root):
            parts = (type(root), *(getattr(root, field.name) for field in dataclasses.fields(root)))
        elif isinstance(root, Mapping):
            parts = root.items()
        elif isinstance(root, tuple | list):
            parts = root
        elif isinstance(root, set | frozenset):
            parts = sorted(root, key=repr)
        # The source shows signatures.
        elif not isinstance(root, ModuleType | Signature):
            parts, is_held = (type(root), *_state_of(root)), True
        for part in parts:
            self._add(part, is_held=is_held)


def _name_of(function: Any) -> str:
    """The name of the definition of a function or class in its module."""
    name = function.__qualname__.partition(".")[0]
    if name != "<lambda>" or not _is_followed(function.__module__):
        return name
    return _module(function.__module__).name_of_lambda(function.__code__.co_firstlineno)


def _held_by(function: Any) -> Iterator[Any]:
    """What a function holds that its source does not show, or what a class wraps."""
    if isinstance(function, MethodType):
        yield function.__self__
    elif isinstance(function, type):
        # A measure with settings is a class around its function.
        yield vars(function).get("__wrapped__", ())
    elif isinstance(function, FunctionType):
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            # A function that is not yet defined is an empty cell.
            with suppress(ValueError):
                yield name, cell.cell_contents
        if "<" in function.__qualname__:
            yield function.__defaults__
            yield function.__kwdefaults__


def _state_of(instance: Any) -> tuple[Any, ...]:
    """What determines the behaviour of an instance beside its class: what pickle would store of it.

    Raises:
        RunError: it cannot be read.
    """
    if isinstance(instance, range | slice | PurePath | np.generic | np.dtype):
        return (repr(instance),)
    if isinstance(instance, Enum):
        return (instance.name,)
    reduce = copyreg.dispatch_table.get(type(instance), lambda held: held.__reduce_ex__(4))
    try:
        is_array = isinstance(instance, np.ndarray) and instance.dtype != object
        if is_array or isinstance(instance, torch.Tensor):
            return (digest_of("an array", instance),)
        reduced: Any = reduce(instance)
    except Exception as error:
        raise RunError(
            f"a measure, view or setting holds a value of type {type(instance).__qualname__}, "
            f"whose changes could not be seen: {error}. Make it where it is used, or leave it out "
            "of the state of its class by `__getstate__`"
        ) from error
    if isinstance(reduced, str):
        return (reduced,)
    _, arguments, state, *items = (*reduced, None)[:5]
    if isinstance(state, dict):
        # What a property has cached follows from the rest, and appears only when it is used.
        state = {
            name: value
            for name, value in state.items()
            if not isinstance(getattr(type(instance), name, None), functools.cached_property)
        }
    return arguments, state, *(tuple(each) for each in items if each is not None)


class _Module:
    """The parsed source of a module.

    Attributes:
        label: its file, relative to the folder that holds the top-level package.
        nodes: its statements by the names that they define.
        imported: what each imported name stands for: a module, or a name in a module.
        starred: the modules from which it imports all names.
    """

    def __init__(self, name: str):
        spec = _spec(name)
        path, self._package = Path(spec.origin), spec.parent
        self.label = "/".join([*filter(None, self._package.split(".")), path.name])
        self.nodes: dict[str, list[ast.AST]] = {_BODY: []}
        self.imported: dict[str, tuple[str, str | None]] = {}
        self.starred: list[str] = []
        self._own: set[str] = set()
        self._changing: list[ast.Assign | ast.AnnAssign | ast.AugAssign] = []
        self._tree = ast.parse(path.read_text())
        self._index(self._tree.body)
        # They change what is not defined here, such as `helpers.SCALE = 3` for imported `helpers`.
        self.nodes[_BODY] += [
            node
            for node in self._changing
            if not all(root in self._own for root in _changed_names(node))
        ]

    def _index(self, body: list[ast.stmt]) -> None:
        for node in body:
            match node:
                case ast.Import() | ast.ImportFrom():
                    bound = self.bindings(node)
                    self.starred += [source for source, name in bound.values() if name == "*"]
                    self.imported |= bound
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    self.nodes.setdefault(node.name, []).append(node)
                    self._own.add(node.name)
                case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                    self._changing.append(node)
                    for target in _targets(node):
                        if isinstance(target, ast.Name):
                            self.nodes.setdefault(target.id, []).append(node)
                            if isinstance(target.ctx, ast.Store):
                                self._own.add(target.id)
                case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                    pass
                case ast.If() | ast.Try() | ast.With():
                    self._index([n for n in ast.walk(node) if isinstance(n, ast.stmt)][1:])
                    self.nodes[_BODY] += _conditions(node)
                case ast.Expr(value=ast.Constant()):
                    pass
                case _:
                    self.nodes[_BODY].append(node)

    def name_of_lambda(self, line: int) -> str:
        """A name for the lambda functions that begin in a line, from their source."""
        of_line = [
            node
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Lambda) and node.lineno == line
        ]
        name = f"<lambda {_hash(repr(list(map(_plain_tree, of_line))))}>"
        self.nodes[name] = [*of_line]
        return name

    def bindings(self, node: ast.Import | ast.ImportFrom) -> dict[str, tuple[str, str | None]]:
        """What each name bound by an import stands for."""
        if isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            source = importlib.util.resolve_name(name, self._package)
            return {alias.asname or alias.name: (source, alias.name) for alias in node.names}
        bound: dict[str, tuple[str, str | None]] = {}
        for alias in node.names:
            # `import a.b` without `as` binds a.
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            bound[alias.asname or name] = (name, None)
        return bound


def _targets(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> Iterator[ast.AST]:
    """All nodes of what an assignment assigns to."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return chain.from_iterable(map(ast.walk, targets))


def _changed_names(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> Iterator[str]:
    """The name of each object of which an assignment changes a part; "" for other expressions."""
    for target in _targets(node):
        if isinstance(getattr(target, "ctx", None), ast.Store):
            changed = target
            while isinstance(changed, ast.Attribute | ast.Subscript):
                changed = changed.value
            if changed is not target:
                yield changed.id if isinstance(changed, ast.Name) else ""


def _conditions(node: ast.If | ast.Try | ast.With) -> list[ast.AST]:
    """What decides which of the definitions in a block are made."""
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return []
        case ast.If(test=test):
            return [test]
        case ast.With(items=items):
            return [*items]
        case ast.Try(handlers=handlers):
            return [one.type for one in handlers if one.type is not None]


@functools.cache
def _digest(definition: Definition) -> str:
    """The digest of a definition's syntax tree; "" if the module does not define the name."""
    module, name = definition
    trees = list(map(_plain_tree, _module(module).nodes.get(name, [])))
    return _hash(repr(trees)) if trees else ""


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain_tree(value: Any) -> Any:
    """A syntax tree as nested tuples, without docstrings; equal for all Python versions."""
    if isinstance(value, ast.AST):
        fields = [
            (name, _plain_tree(child))
            for name, child in ast.iter_fields(value)
            if child not in (None, []) and name not in ("ctx", "kind", "type_comment")
        ]
        return type(value).__name__, fields
    if isinstance(value, list):
        return [_plain_tree(child) for child in value if not _is_docstring(child)]
    return value


def _is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)


@functools.cache
def _references(definition: Definition) -> frozenset[Definition]:
    """The definitions that the source of a definition refers to, in any module."""
    module_name, name = definition
    module = _module(module_name)
    references: set[Definition] = set()
    if name in module.imported:
        references |= _resolve(*module.imported[name])
    elif name not in module.nodes:
        references |= _starred(module, name) or _resolve_dynamic(module_name, name)
    for node in module.nodes.get(name, []):
        imported = dict(module.imported)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Import | ast.ImportFrom):
                imported |= module.bindings(inner)
        for inner in _executed_nodes(node):
            match inner:
                case ast.Attribute() if (path := _path(inner)) and path[0] in imported:
                    source = ".".join(filter(None, imported[path[0]]))
                    references |= _resolve_path(source, path[1:])
                case ast.Name(id=used) if used in imported:
                    references |= _resolve(*imported[used])
                case ast.Name(id=used) if used in module.nodes:
                    references.add((module_name, used))
                case ast.Name(id=used):
                    references |= _starred(module, used)
                case _:
                    pass
    return frozenset(references)


def _executed_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a syntax tree except those of annotations."""
    waiting = [node]
    while waiting:
        yield (inner := waiting.pop())
        for field, value in ast.iter_fields(inner):
            if field not in ("annotation", "returns"):
                children = value if isinstance(value, list) else [value]
                waiting += [child for child in children if isinstance(child, ast.AST)]


def _path(node: ast.expr) -> list[str]:
    """The names in `a.b.c`; none if it begins with another expression."""
    if isinstance(node, ast.Attribute):
        return [*path, node.attr] if (path := _path(node.value)) else []
    return [node.id] if isinstance(node, ast.Name) else []


def _resolve_path(module: str, path: list[str]) -> set[Definition]:
    """The definition that `module.path[0].path[1]...` refers to, which may be in a submodule."""
    while len(path) > 1 and _is_followed(module) and _spec(f"{module}.{path[0]}") is not None:
        module, path = f"{module}.{path[0]}", path[1:]
    return _resolve(module, path[0])


def _starred(module: _Module, name: str) -> set[Definition]:
    """The definitions of a name in the modules from which a module imports all names."""
    found = set()
    for source in filter(_is_followed, module.starred):
        parsed = _module(source)
        if name in parsed.nodes or name in parsed.imported or _starred(parsed, name):
            found.add((source, name))
    return found


def _resolve(module: str, name: str | None) -> set[Definition]:
    """The definition of a name in a module; none for libraries and for whole modules."""
    # The search for a submodule imports the module.
    if name is None or not _is_followed(module) or _spec(f"{module}.{name}") is not None:
        return set()
    return {(module, name)}


def _resolve_dynamic(module: str, name: str) -> set[Definition]:
    """The definition of a name that only a module's `__getattr__` provides."""
    value = None if name == _BODY else getattr(import_module(module), name, None)
    if value is None or isinstance(value, ModuleType):
        return set()
    home = getattr(value, "__module__", None)
    if home is not None and home != module and hasattr(value, "__qualname__"):
        return {(home, value.__qualname__.partition(".")[0])}
    submodules = [key for key in list(sys.modules) if key.startswith(f"{module}.")]
    return {(key, name) for key in submodules if vars(sys.modules[key]).get(name) is value}


@functools.cache
def _is_followed(module: str) -> bool:
    """Whether a module is modscope's or the user's, and not one of `BOOKKEEPING`."""
    top, _, path_in_package = module.partition(".")
    if top == "studies" and path_in_package in {f"engine.{name}" for name in BOOKKEEPING}:
        return False
    path = Path(getattr(_spec(module), "origin", None) or "")
    return path.suffix == ".py" and (
        top in PACKAGES or not (_is_installed(top, path) or _is_of_python(path))
    )


def _is_of_python(path: Path) -> bool:
    """Whether a file is of the standard library, whose names a user's own modules can have too."""
    folders = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
    return not folders.isdisjoint(path.resolve().parents)


def _is_installed(top: str, path: Path) -> bool:
    """Whether a package manager has put a module there, in whichever folder."""
    if {"site-packages", "dist-packages"} & set(path.parts):
        return True
    # `pip install --target FOLDER` writes the records of the packages beside them.
    homes = [parent.parent for parent in path.parents if parent.name == top] or [path.parent]
    return any(any(home.glob("*.dist-info")) for home in homes)


@functools.cache
def _spec(module: str) -> Any:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        # A module that runs as a script has a file but no spec.
        file = getattr(sys.modules.get(module), "__file__", None)
        return None if file is None else importlib.util.spec_from_file_location(module, file)


_module = functools.cache(_Module)


def forget() -> None:
    """Clear all caches, so that the next call reads the sources again; for tests that edit them."""
    for cached in (_code_from, _digest, _references, _module, _spec, _is_followed):
        cached.cache_clear()
