"""Which code a result comes from: a digest of the source of all that a function or class runs.

From a function or class the names that its source mentions are followed, through modules, down to
every function, class and constant of modscope and of the user's own modules. Comments, docstrings,
annotations' imports and layout do not count; libraries count by their versions, which results hold.
Definitions are followed one by one, so that what a file holds beside them does not matter: in a
study of a single file a changed measure leaves its models alone.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = ("mechanisms", "tasks", "probes", "studies")
"""The packages of modscope, which count as its own code also where they are installed."""

BOOKKEEPING = ("folders", "checkpoints", "settings", "fingerprints")
"""Modules of the engine that move numbers and never change them: files, locks, names."""

_BODY = "<module>"
"""The name of what a module's source does beside defining and importing."""

Place = tuple[str, str]
"""A module, and the name of a definition in it."""


def code_of(*roots: object) -> dict[str, str]:
    """The digests of the source that `roots` run, by file: `{"tasks/mlu.py": ...}`.

    Roots are functions, classes and instances; of an instance its class and those of its values.
    """
    return dict(_code_at(frozenset(place for root in roots for place in _places(root))))


@functools.cache
def _code_at(places: frozenset[Place]) -> tuple[tuple[str, str], ...]:
    waiting, reached = list(places), set()
    while waiting:
        place = waiting.pop()
        if place not in reached and _is_own(place[0]):
            reached.add(place)
            waiting += [(place[0], _BODY), *_references(place)]
    files: dict[str, list[str]] = {}
    for module, name in sorted(reached):
        if digest := _digest((module, name)):
            files.setdefault(_module(module).label, []).append(f"{name}={digest}")
    return tuple((label, _hash("\n".join(some))) for label, some in sorted(files.items()))


def changed_files(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The files whose code differs, or is on one side only."""
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


def sources_of(*roots: object) -> dict[str, Path]:
    """The folders of modscope's code, and of the user's own that `roots` are of, by name."""
    found = {"modscope": Path(__file__).parent}
    for module, _ in (place for root in roots for place in _places(root)):
        if module.partition(".")[0] not in PACKAGES and _is_own(module):
            found["study"] = Path(_spec(module).origin).parent
    return found


def _places(root: Any) -> Iterator[Place]:
    """Where what defines an object's behaviour is."""
    parts: Any = ()
    if isinstance(root, functools.partial):
        parts = (root.func, *root.args, *root.keywords.values())
    elif isinstance(root, type) or (callable(root) and hasattr(root, "__qualname__")):
        # Methods of builtins, such as "{:.1f}".format, are of no module.
        if root.__module__ is not None:
            yield root.__module__, root.__qualname__.partition(".")[0]
    elif dataclasses.is_dataclass(root):
        parts = (type(root), *(getattr(root, field.name) for field in dataclasses.fields(root)))
    elif isinstance(root, Mapping):
        parts = root.values()
    elif isinstance(root, tuple | list):
        parts = root
    elif type(root).__module__ != "builtins":
        parts = (type(root),)
    for part in parts:
        yield from _places(part)


class _Module:
    """A module's source.

    Attributes:
        label: its file; where that lies does not matter, but the package's folders do.
        nodes: its statements by the names that they define.
        imported: what its imports bind names to: modules, or names in modules.
    """

    def __init__(self, name: str):
        spec = _spec(name)
        path, self._package = Path(spec.origin), spec.parent
        self.label = "/".join([*filter(None, self._package.split(".")), path.name])
        self.nodes: dict[str, list[ast.stmt]] = {_BODY: []}
        self.imported: dict[str, tuple[str, str | None]] = {}
        self._index(ast.parse(path.read_text()).body)

    def _index(self, body: list[ast.stmt]) -> None:
        for node in body:
            match node:
                case ast.Import() | ast.ImportFrom():
                    self.imported |= self.bindings(node)
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    self.nodes.setdefault(node.name, []).append(node)
                case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    for inner in chain.from_iterable(map(ast.walk, targets)):
                        if isinstance(inner, ast.Name):
                            self.nodes.setdefault(inner.id, []).append(node)
                case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                    pass
                case ast.If() | ast.Try() | ast.With():
                    self._index([n for n in ast.walk(node) if isinstance(n, ast.stmt)][1:])
                case ast.Expr(value=ast.Constant()):
                    pass
                case _:
                    self.nodes[_BODY].append(node)

    def bindings(self, node: ast.Import | ast.ImportFrom) -> dict[str, tuple[str, str | None]]:
        """What an import binds names to."""
        if isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            source = importlib.util.resolve_name(name, self._package)
            return {alias.asname or alias.name: (source, alias.name) for alias in node.names}
        bound: dict[str, tuple[str, str | None]] = {}
        for alias in node.names:
            # Without a name of its own, `import a.b` binds a.
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            bound[alias.asname or name] = (name, None)
        return bound


@functools.cache
def _digest(place: Place) -> str:
    """Of a definition's source, whatever its layout and comments; "" if it has none here."""
    shapes = list(map(_shape, _module(place[0]).nodes.get(place[1], [])))
    return _hash(repr(shapes)) if shapes else ""


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _shape(value: Any) -> Any:
    """A tree as nested tuples: the same for every version of Python, without docstrings."""
    if isinstance(value, ast.AST):
        fields = [
            (name, _shape(child))
            for name, child in ast.iter_fields(value)
            if child not in (None, []) and name not in ("ctx", "kind", "type_comment")
        ]
        return type(value).__name__, fields
    if isinstance(value, list):
        return [_shape(child) for child in value if not _is_docstring(child)]
    return value


def _is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)


@functools.cache
def _references(place: Place) -> frozenset[Place]:
    """The definitions, in its module and in others, that a definition mentions."""
    here, name = place
    module = _module(here)
    found: set[Place] = set()
    if name in module.imported:
        found |= _resolved(*module.imported[name])
    elif name not in module.nodes:
        found |= _made_at_run_time(here, name)
    for node in module.nodes.get(name, []):
        known = dict(module.imported)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Import | ast.ImportFrom):
                known |= module.bindings(inner)
        for inner in _run(node):
            match inner:
                case ast.Attribute(value=ast.Name(id=used), attr=member) if used in known:
                    source = ".".join(filter(None, known[used]))
                    found |= _resolved(source, member)
                case ast.Name(id=used) if used in known:
                    found |= _resolved(*known[used])
                case ast.Name(id=used) if used in module.nodes:
                    found.add((here, used))
                case _:
                    pass
    return frozenset(found)


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a tree but those of annotations, which run nothing."""
    waiting = [node]
    while waiting:
        yield (inner := waiting.pop())
        for field, value in ast.iter_fields(inner):
            if field not in ("annotation", "returns"):
                children = value if isinstance(value, list) else [value]
                waiting += [child for child in children if isinstance(child, ast.AST)]


def _resolved(module: str, name: str | None) -> set[Place]:
    """Where a name of a module is defined; nowhere for libraries and for modules as a whole."""
    if name is None or not _is_own(module) or _spec(f"{module}.{name}") is not None:
        return set()
    return {(module, name)}


def _made_at_run_time(module: str, name: str) -> set[Place]:
    """Where a name comes from that a module's source does not bind, but its `__getattr__` does."""
    value = None if name == _BODY else getattr(import_module(module), name, None)
    if value is None or isinstance(value, ModuleType):
        return set()
    home = getattr(value, "__module__", None)
    if home is not None and home != module and hasattr(value, "__qualname__"):
        return {(home, value.__qualname__.partition(".")[0])}
    below = [key for key in list(sys.modules) if key.startswith(f"{module}.")]
    return {(key, name) for key in below if vars(sys.modules[key]).get(name) is value}


@functools.cache
def _is_own(module: str) -> bool:
    """Whether a module is modscope's or the user's own: not Python's, installed or bookkeeping."""
    top, _, rest = module.partition(".")
    if top in sys.stdlib_module_names or (
        top == "studies" and rest in {f"engine.{name}" for name in BOOKKEEPING}
    ):
        return False
    path = Path(getattr(_spec(module), "origin", None) or "")
    is_installed = {"site-packages", "dist-packages"} & set(path.parts)
    return path.suffix == ".py" and (top in PACKAGES or not is_installed)


@functools.cache
def _spec(module: str) -> Any:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        # What is run as a script has no spec, but a file.
        file = getattr(sys.modules.get(module), "__file__", None)
        return None if file is None else importlib.util.spec_from_file_location(module, file)


_module = functools.cache(_Module)


def forget() -> None:
    """Read sources anew at the next call: for tests that edit them."""
    for cached in (_code_at, _digest, _references, _module, _spec, _is_own):
        cached.cache_clear()
