"""Code digests: a hash of the source of everything that a function or class can run.

Starting from a function or class, the names in its source are followed, across modules, to every
function, class and constant of modscope and of the user's own modules. Comments, docstrings, type
annotations and layout do not count; libraries count only by their versions, which results record.
Definitions are followed one by one, so unrelated code in the same file does not matter: in a
single-file study, editing a measure does not invalidate the trained models.
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
"""The packages of modscope; followed even where they are installed in site-packages."""

BOOKKEEPING = ("folders", "checkpoints", "settings", "fingerprints")
"""Modules of the engine that cannot change a number: files, locks, names. Not followed."""

_BODY = "<module>"
"""The name for the statements of a module that neither define nor import."""

Definition = tuple[str, str]
"""The name of a module, and the name of a definition in it."""


def code_of(*roots: object) -> dict[str, str]:
    """Digests of the source that `roots` can run, by file: `{"tasks/mlu.py": ...}`.

    Args:
        roots: functions, classes, and instances; an instance counts by its class and the classes
            and functions among its values.
    """
    return dict(_code_from(frozenset(start for root in roots for start in _definitions(root))))


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
    for module, _ in (start for root in roots for start in _definitions(root)):
        if module.partition(".")[0] not in PACKAGES and _is_followed(module):
            sources["study"] = Path(_spec(module).origin).parent
    return sources


def _definitions(root: Any) -> Iterator[Definition]:
    """The definitions that determine an object's behaviour."""
    parts: Any = ()
    if isinstance(root, functools.partial):
        parts = (root.func, *root.args, *root.keywords.values())
    elif isinstance(root, type) or (callable(root) and hasattr(root, "__qualname__")):
        # Methods of builtins, such as "{:.1f}".format, have no module.
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
        yield from _definitions(part)


class _Module:
    """The parsed source of a module.

    Attributes:
        label: its file, relative to the folder that holds the top-level package.
        nodes: its statements by the names that they define.
        imported: what each imported name stands for: a module, or a name in a module.
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
                    for target in chain.from_iterable(map(ast.walk, targets)):
                        if isinstance(target, ast.Name):
                            self.nodes.setdefault(target.id, []).append(node)
                case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                    pass
                case ast.If() | ast.Try() | ast.With():
                    self._index([n for n in ast.walk(node) if isinstance(n, ast.stmt)][1:])
                case ast.Expr(value=ast.Constant()):
                    pass
                case _:
                    self.nodes[_BODY].append(node)

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
        references |= _resolve_dynamic(module_name, name)
    for node in module.nodes.get(name, []):
        imported = dict(module.imported)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Import | ast.ImportFrom):
                imported |= module.bindings(inner)
        for inner in _executed_nodes(node):
            match inner:
                case ast.Attribute(value=ast.Name(id=used), attr=member) if used in imported:
                    source = ".".join(filter(None, imported[used]))
                    references |= _resolve(source, member)
                case ast.Name(id=used) if used in imported:
                    references |= _resolve(*imported[used])
                case ast.Name(id=used) if used in module.nodes:
                    references.add((module_name, used))
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


def _resolve(module: str, name: str | None) -> set[Definition]:
    """The definition of a name in a module; none for libraries and for whole modules."""
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
    if top in sys.stdlib_module_names or (
        top == "studies" and path_in_package in {f"engine.{name}" for name in BOOKKEEPING}
    ):
        return False
    path = Path(getattr(_spec(module), "origin", None) or "")
    return path.suffix == ".py" and (top in PACKAGES or not _is_installed(top, path))


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
