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
import sysconfig
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = ("mechanisms", "tasks", "probes", "studies")
"""The packages of modscope, which count as its own code also where they are installed."""

BOOKKEEPING = ("folders", "checkpoints", "settings", "fingerprints")
"""Modules of the engine that move numbers and never change them: files, locks, names."""

_MODULE = "<module>"


def code_of(*roots: object) -> dict[str, str]:
    """The digests of the source that `roots` run, by file.

    Args:
        roots: functions, classes, or instances; of an instance its class and those of its values.

    Returns:
        For each file its name, from the package's folder on, and sixteen hexadecimal digits.

    Example:
        `code_of(train, setup)["mechanisms/attention.py"]`
    """
    return dict(_code_at(frozenset(place for root in roots for place in _places(root))))


@functools.cache
def _code_at(places: frozenset[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    waiting, reached = list(places), set()
    while waiting:
        place = waiting.pop()
        if place in reached or not _is_own(place[0]):
            continue
        reached.add(place)
        waiting += [(place[0], _MODULE), *_module(place[0]).references(place[1])]
    files: dict[str, list[str]] = {}
    for name, definition in sorted(reached):
        module = _module(name)
        if digest := module.digest(definition):
            files.setdefault(module.label, []).append(f"{definition}={digest}")
    return tuple((label, _hash("\n".join(some))) for label, some in sorted(files.items()))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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


def _places(root: object) -> Iterator[tuple[str, str]]:
    """The modules and names of what an object's behaviour is defined by."""
    if isinstance(root, functools.partial):
        yield from _places(root.func)
        for value in (*root.args, *root.keywords.values()):
            yield from _places(value)
    elif isinstance(root, type) or (callable(root) and hasattr(root, "__qualname__")):
        kind: Any = root
        yield kind.__module__, kind.__qualname__.partition(".")[0]
    elif dataclasses.is_dataclass(root):
        yield from _places(type(root))
        for field in dataclasses.fields(root):
            yield from _places(getattr(root, field.name))
    elif isinstance(root, Mapping):
        for value in root.values():
            yield from _places(value)
    elif isinstance(root, tuple | list):
        for value in root:
            yield from _places(value)
    elif type(root).__module__ != "builtins":
        yield from _places(type(root))


class _Module:
    """The definitions in a module's source.

    Args:
        name: of the module.
        path: its file.
    """

    def __init__(self, name: str, path: Path):
        self.name = name
        self._path = path
        # Where it lies does not matter, but the package's folders do.
        self.label = "/".join([*name.split(".")[:-1], path.name])
        if path.name == "__init__.py":
            self.label = "/".join([*name.split("."), path.name])
        self._nodes: dict[str, list[ast.stmt]] = {_MODULE: []}
        self._imported: dict[str, tuple[str, str | None]] = {}
        self._digests: dict[str, str] = {}
        self._references: dict[str, list[tuple[str, str]]] = {}
        self._index(ast.parse(path.read_text()).body)

    def _index(self, body: list[ast.stmt]) -> None:
        for node in body:
            match node:
                case ast.Import() | ast.ImportFrom():
                    self._imported |= self._bindings(node)
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    self._nodes.setdefault(node.name, []).append(node)
                case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                    for name in _targets(node):
                        self._nodes.setdefault(name, []).append(node)
                case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                    pass
                case ast.If() | ast.Try() | ast.With():
                    self._index([n for n in ast.walk(node) if isinstance(n, ast.stmt)][1:])
                case ast.Expr(value=ast.Constant()):
                    pass
                case _:
                    self._nodes[_MODULE].append(node)

    def _bindings(self, node: ast.Import | ast.ImportFrom) -> dict[str, tuple[str, str | None]]:
        """What names an import binds: to a module, or to a name in a module."""
        if isinstance(node, ast.Import):
            return {
                alias.asname or alias.name.partition(".")[0]: (
                    alias.name if alias.asname else alias.name.partition(".")[0],
                    None,
                )
                for alias in node.names
            }
        source = node.module or ""
        if node.level:
            parts = self.name.split(".")
            if self._path.name == "__init__.py":
                parts.append("")
            source = ".".join([*parts[: -node.level], *filter(None, [source])])
        return {alias.asname or alias.name: (source, alias.name) for alias in node.names}

    def digest(self, definition: str) -> str:
        """Of a definition's source, whatever its layout and comments; "" if it has none here."""
        if definition not in self._digests:
            shapes = [_shape(node) for node in self._nodes.get(definition, [])]
            self._digests[definition] = _hash(repr(shapes)) if shapes else ""
        return self._digests[definition]

    def references(self, definition: str) -> list[tuple[str, str]]:
        """The definitions, here and in other modules, that one mentions."""
        if definition not in self._references:
            self._references[definition] = list(dict.fromkeys(self._find_references(definition)))
        return self._references[definition]

    def _find_references(self, definition: str) -> Iterator[tuple[str, str]]:
        if definition in self._imported:
            yield from _resolve(*self._imported[definition])
        elif definition not in self._nodes:
            yield from _made_at_run_time(self.name, definition)
        for node in self._nodes.get(definition, []):
            yield from self._mentioned(node)

    def _mentioned(self, node: ast.AST) -> Iterator[tuple[str, str]]:
        known = dict(self._imported)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Import | ast.ImportFrom):
                known |= self._bindings(inner)
        for inner in _without_annotations(node):
            match inner:
                case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in known:
                    source, member = known[name]
                    module = source if member is None else f"{source}.{member}"
                    yield from _resolve(module, attribute)
                    yield from _resolve(source, member)
                case ast.Name(id=name) if name in known:
                    yield from _resolve(*known[name])
                case ast.Name(id=name) if name in self._nodes:
                    yield self.name, name
                case _:
                    pass


def _targets(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [
        inner.id
        for target in targets
        if target is not None
        for inner in ast.walk(target)
        if isinstance(inner, ast.Name)
    ]


def _resolve(module: str, name: str | None) -> Iterator[tuple[str, str]]:
    """Where a name of a module is defined; nothing for libraries and for modules as a whole."""
    if name is None or not _is_own(module):
        return
    if _spec(f"{module}.{name}") is None:
        yield module, name


def _made_at_run_time(module: str, name: str) -> Iterator[tuple[str, str]]:
    """Where a name comes from that a module's source does not bind, but its `__getattr__` does."""
    if name == _MODULE:
        return
    value = getattr(import_module(module), name, None)
    if isinstance(value, ModuleType) or value is None:
        return
    home = getattr(value, "__module__", None)
    if home is not None and home != module and hasattr(value, "__qualname__"):
        yield home, value.__qualname__.partition(".")[0]
        return
    for other, loaded in list(sys.modules.items()):
        if other.startswith(f"{module}.") and vars(loaded).get(name) is value:
            yield other, name


def _without_annotations(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a tree but those of annotations, which run nothing."""
    waiting = [node]
    while waiting:
        inner = waiting.pop()
        yield inner
        for field, value in ast.iter_fields(inner):
            if field in ("annotation", "returns"):
                continue
            children = value if isinstance(value, list) else [value]
            waiting += [child for child in children if isinstance(child, ast.AST)]


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
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
        case _:
            return False


@functools.cache
def _is_own(module: str) -> bool:
    """Whether a module is modscope's or the user's own, and no bookkeeping."""
    top, _, rest = module.partition(".")
    if top == "studies" and rest in {f"engine.{name}" for name in BOOKKEEPING}:
        return False
    if top not in PACKAGES and _is_library(top):
        return False
    spec = _spec(module)
    return spec is not None and (spec.origin or "").endswith(".py")


@functools.cache
def _is_library(top: str) -> bool:
    """Whether a package or module is Python's or installed; its own are then not looked at."""
    if top in sys.stdlib_module_names:
        return True
    spec = _spec(top)
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    origin = None if spec is None else spec.origin
    return origin is not None and any(Path(origin).is_relative_to(folder) for folder in folders)


@functools.cache
def _spec(module: str) -> Any:
    loaded = sys.modules.get(module)
    if loaded is not None and getattr(loaded, "__spec__", None) is not None:
        return loaded.__spec__
    if loaded is not None and getattr(loaded, "__file__", None):
        return importlib.util.spec_from_file_location(module, str(loaded.__file__))
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None


@functools.cache
def _module(name: str) -> _Module:
    return _Module(name, Path(_spec(name).origin))


def forget() -> None:
    """Read sources anew at the next call: for tests that edit them."""
    for cached in (_code_at, _module, _spec, _is_own, _is_library):
        cached.cache_clear()
