"""Modules import one another without cycles."""

import ast
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("mechanisms", "tasks", "probes", "studies")


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(path, modules):
    """The project's modules that a file imports, inside of functions and for types too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [str(node.module)]
        else:
            continue
        yield from (name for name in names if name in modules)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_modules_import_one_another(package):
    modules = {name_of(path): path for path in (ROOT / package).rglob("*.py")}
    graph = networkx.DiGraph(
        (name, other)
        for name, path in modules.items()
        for other in imported(path, modules)
        # A package's own file imports its modules lazily, when a name is first used.
        if not (modules[name].name == "__init__.py" or modules[other].name == "__init__.py")
    )
    assert graph.number_of_edges() > 10
    assert list(networkx.simple_cycles(graph)) == []
