"""What counts as the code of something, on a small package of the test's own."""

import functools
import importlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from studies.engine import fingerprints
from studies.engine.fingerprints import changed_files, code_of

FILES = {
    "__init__.py": '''
"""A package."""
from importlib import import_module
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from {name}.deep import Layer

def __getattr__(key):
    return getattr(import_module(f"{name}.deep"), key)
''',
    "deep.py": '''
SCALE = 2
OTHER = 3

class Layer:
    """A layer."""
    def __call__(self, x):
        return x * SCALE  # doubled

def unused(x):
    return x + OTHER
''',
    "user.py": """
import {name}
from {name} import helpers as h
from math import sqrt

class Base:
    def run(self, x):
        return self.more(x)

class Model(Base):
    def more(self, x):
        from {name}.late import late
        return {name}.Layer()(x) + h.add(late(x)) + sqrt(4)

def measure(model: "annotated") -> None:
    return model

def annotated():
    return 1

if __name__ == "__main__":
    print("never")
""",
    "helpers.py": """
def add(x):
    return x + 1

def subtract(x):
    return x - 1
""",
    "late.py": """
def late(x):
    return x
""",
}


@pytest.fixture
def package(tmp_path, monkeypatch, request):
    name = f"package_{abs(hash(request.node.name)) % 10**8}"
    folder = tmp_path / name
    folder.mkdir()
    for file, text in FILES.items():
        (folder / file).write_text(text.replace("{name}", name))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    fingerprints.forget()
    yield folder
    fingerprints.forget()
    for key in [key for key in sys.modules if key.partition(".")[0] == name]:
        del sys.modules[key]


def user(folder):
    return importlib.import_module(f"{folder.name}.user")


def changed(folder, file, before, after, root="Model"):
    """The files whose digest changes with an edit."""
    first = code_of(getattr(user(folder), root))
    text = (folder / file).read_text()
    assert before in text
    (folder / file).write_text(text.replace(before, after))
    fingerprints.forget()
    return [Path(name).name for name in changed_files(first, code_of(getattr(user(folder), root)))]


def test_the_code_of_a_class_is_followed_through_modules(package):
    files = {Path(name).name for name in code_of(user(package).Model)}
    assert files == {"user.py", "deep.py", "helpers.py", "late.py"}
    assert {Path(name).name for name in code_of(user(package).measure)} == {"user.py"}


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("deep.py", "x * SCALE", "x * SCALE * 3"),
        ("deep.py", "SCALE = 2", "SCALE = 4"),
        ("helpers.py", "return x + 1", "return x + 2"),
        ("late.py", "return x", "return -x"),
        ("user.py", "return self.more(x)", "return 2 * self.more(x)"),
        ("deep.py", "class Layer:", "print('a side effect')\n\nclass Layer:"),
    ],
)
def test_what_is_run_counts(package, file, before, after):
    assert changed(package, file, before, after) == [file]


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("deep.py", "  # doubled", "  # twice as much"),
        ("deep.py", '"""A layer."""', '"""Another docstring."""'),
        ("deep.py", "x * SCALE", "(\n            x\n            * SCALE\n        )"),
        ("deep.py", "x + OTHER", "x - OTHER"),
        ("deep.py", "OTHER = 3", "OTHER = 4"),
        ("helpers.py", "x - 1", "x - 2"),
        ("user.py", 'print("never")', 'print("not even now")'),
        ("user.py", "return 1", "return 2"),
    ],
)
def test_what_is_not_run_does_not_count(package, file, before, after):
    assert changed(package, file, before, after) == []


def test_instances_count_by_their_class_and_values(package):
    module = user(package)

    @dataclass(frozen=True)
    class Holder:
        value: object

    whole = code_of(Holder(module.Model()))
    assert code_of(module.Model).items() <= whole.items()
    bound = functools.partial(module.measure, model=module.Model)
    assert {Path(name).name for name in code_of(bound)} >= {"user.py", "deep.py"}
    assert code_of({"a": [module.Model]}) == code_of(module.Model)


def test_methods_of_builtins_do_not_count():
    assert code_of("{:.1f}".format) == {}


def test_libraries_do_not_count():
    names = code_of(importlib.import_module("studies.engine.cells").run_training)
    assert "studies/engine/training.py" in names
    assert all(name.split("/")[0] in fingerprints.PACKAGES for name in names)
    assert not {f"studies/engine/{name}.py" for name in fingerprints.BOOKKEEPING} & set(names)


def test_a_mechanism_counts_for_the_models_that_have_it_and_no_others():
    setup = importlib.import_module("studies.raven_latent_code").STUDY.setup
    names = code_of(setup)
    assert "mechanisms/attention/multi_head.py" in names
    assert "mechanisms/models/dnc.py" not in names
    assert "tasks/raven/task.py" in names
    assert "tasks/expressions/listops.py" not in names


def test_digests_are_those_of_another_process():
    script = (
        "from studies.engine.fingerprints import code_of\n"
        "from studies.engine.cells import run_training\n"
        "print(sorted(code_of(run_training).items()))"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True
    )
    run_training = importlib.import_module("studies.engine.cells").run_training
    assert done.stdout.strip() == str(sorted(code_of(run_training).items()))
