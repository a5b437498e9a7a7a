"""Contracts that hold for everything that the packages export."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
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


FEW = {"n_id": 31, "n_valid": 31, "n_ood": 31}
SHALLOW = {"n_train": 101, "train_depth": 2, "valid_depths": (3, 3), "ood_depths": (4, 4), **FEW}
FEW_TRIANGLES = tasks.TrianglesConfig(n_train=101, n_valid=31, n_test=31)
TASKS = [
    tasks.Raven(tasks.RavenConfig(n_features=2)),
    tasks.TableLookup(tasks.TableLookupConfig(n_compositions=101, **FEW)),
    tasks.Arithmetic(tasks.ArithmeticConfig(**SHALLOW)),
    tasks.ListOps(tasks.ListOpsConfig(**SHALLOW), cache=None),
    tasks.MathEquations(tasks.MathEquationsConfig(n_points=101, n_id=31, n_ood=31)),
    tasks.SortOfClevr(tasks.SortOfClevrConfig(n_train=4, n_valid=2, n_test=2)),
    tasks.Triangles(FEW_TRIANGLES),
    tasks.ContextualRetrieval(tasks.ContextualRetrievalConfig()),
    tasks.Scan(tasks.ScanConfig(split="length")),
    tasks.ESBN(tasks.ESBNConfig(rule="rmts", n_withheld=50)),
    tasks.Images(tasks.ImagesConfig(sources=("triangles",), triangles=FEW_TRIANGLES)),
    tasks.Text(tasks.TextConfig(path=__file__, held_out=0.2, length=8), cache=None),
    tasks.MLU(tasks.MLUConfig(low=-20, high=20)),
    tasks.FuzzyLogic(tasks.FuzzyLogicConfig()),
    tasks.SignedPairs(tasks.SignedPairsConfig()),
]


def inputs_of(batch):
    """The inputs of a batch as a tuple."""
    return batch.inputs if isinstance(batch.inputs, tuple) else (batch.inputs,)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_batches_are_pure_functions_and_name_their_latents(task):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for split in task.splits:
        first, second = task.batch(split, 3, 5), task.batch(split, 3, 5)
        other = task.batch(split, 4, 5)
        assert all(map(torch.equal, inputs_of(first), inputs_of(second)))
        assert torch.equal(first.targets, second.targets)
        assert not all(map(torch.equal, inputs_of(first), inputs_of(other)))
        assert len(first) == 5
        assert first.mask.dtype == torch.bool
        assert first.latents
        for name, latent in first.latents.items():
            assert latent.shape[0] == 5, name
            assert torch.equal(latent, second.latents[name])
        assert [len(part) for part in first.parts(2)] == [2, 2, 1]
        inputs_of_parts = zip(*map(inputs_of, first.parts(2)), strict=True)
        assert all(map(torch.equal, map(torch.cat, inputs_of_parts), inputs_of(first)))
        sliced = first[1:3]
        for sliced_input, full_input in zip(inputs_of(sliced), inputs_of(first), strict=True):
            assert torch.equal(sliced_input, full_input[1:3])
        assert all(
            torch.equal(sliced.latents[name], first.latents[name][1:3]) for name in sliced.latents
        )
    assert torch.equal(torch.get_rng_state(), before)
