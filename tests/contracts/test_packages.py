"""Contracts that hold for everything that the packages export."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import mechanisms
import probes
import tasks

ROOT = Path(__file__).parents[2]
PACKAGES = ("mechanisms", "tasks", "probes")
EXPORTS = [(package, name) for package in (mechanisms, tasks, probes) for name in package.__all__]


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_do_not_import_one_another(package):
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            others = {"studies", "tests", *PACKAGES} - {package}
            assert not {name.split(".")[0] for name in names} & others, path


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_imports_nothing_heavy(package):
    script = f"import sys, {package}; print(*sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert not {"torch", "transformer_lens", "sklearn", "xarray"} & set(process.stdout.split())


@pytest.mark.parametrize(("package", "name"), EXPORTS, ids=lambda x: getattr(x, "__name__", x))
def test_exports_exist_and_are_documented(package, name):
    export = getattr(package, name)
    assert name in dir(package)
    if inspect.isclass(export) or inspect.isfunction(export):
        assert inspect.getdoc(export), name
        # The docstring of a dataclass without its own is its signature.
        assert not (export.__doc__ or "").startswith(f"{name}("), name


@pytest.mark.parametrize("package", [mechanisms, tasks, probes])
def test_an_unknown_name_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match="nothing"):
        package.nothing  # noqa: B018
    assert importlib.import_module(package.__name__) is package


COMPONENTS = [
    export
    for export in (getattr(mechanisms, name) for name in mechanisms.__all__)
    if inspect.isclass(export) and issubclass(export, nn.Module) and not inspect.isabstract(export)
]


@pytest.mark.parametrize("component", COMPONENTS, ids=lambda c: c.__name__)
def test_components_take_their_randomness_from_a_generator(component):
    assert "generator" in inspect.signature(component).parameters


PROBES = [
    export
    for export in (getattr(probes, name) for name in probes.__all__)
    if inspect.isfunction(export)
]


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.__name__)
def test_every_probe_checks_its_arguments(probe):
    parameters = inspect.signature(probe).parameters.values()
    required = [one.name for one in parameters if one.default is one.empty] or [
        next(iter(parameters)).name
    ]
    with pytest.raises(TypeError) as caught:
        probe(**{name: object() for name in required})
    assert any(str(caught.value).startswith(name) for name in required)
    assert len(str(caught.value)) < 300
