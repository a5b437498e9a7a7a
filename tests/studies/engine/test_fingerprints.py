"""Code digests, on a small package that the tests write and edit."""

import copy
import enum
import functools
import importlib
import operator
import re
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from studies import raven_latent_code
from studies.engine import RunError, fingerprints
from studies.engine.fingerprints import VALUES, changed_files, code_of
from studies.engine.measures import configured
from studies.engine.trainees import run_training

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
import {name}.dotted
from {name}.chosen import chosen
from {name}.helpers import ONE
from {name}.shared import *
from {name}.shared_too import *
from math import sqrt

class Base:
    def run(self, x):
        return self.more(x) + {name}.dotted.add(x) + chosen(x) + starred(x) + TWO + ONE

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
from {name}.shared import *

def add(x):
    return x + 1

def subtract(x):
    return x - 1
""",
    "late.py": """
def late(x):
    return x
""",
    "dotted.py": """
TABLE = {}

def add(x):
    return x + 3

def other(x):
    return x
""",
    "chosen.py": """
FAST = True
try:
    if FAST:
        def chosen(x):
            return x
    else:
        def chosen(x):
            return 0 + x
except ValueError:
    pass
""",
    "shared.py": """
from {name}.further import *

ONE = 1
THREE = 3
""",
    "further.py": """
def starred(x):
    return x

def unused(x):
    return x
""",
    "shared_too.py": """
TWO = 2
""",
    "held.py": """
from functools import partial

def call(function, *more):
    return function

def read(name, power=2):
    def reading(x):
        return x[name] ** power
    return reading

def scaled(x, by):
    return by * x

NAMED = read("id")
IN_PART = partial(scaled, by=[1, {"deep": 2}])
HIDDEN = call(lambda x: x + 1)
METHOD = "{:.1f}".format
""",
    "changing.py": """
import {name}.dotted
from {name} import helpers
from {name}.deep import Layer, OTHER
from {name}.shared import *

OWN = {}
OWN[OTHER] = 1
Layer.gain = 1
helpers.SCALE = 1
if OTHER:
    {name}.dotted.TABLE["a"] = 1
starred.gain, first = 1, OTHER

def measure(trained):
    return trained
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
    # Bytecode stays valid after an edit within a second that keeps the length of the file.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.invalidate_caches()
    fingerprints.forget()
    yield folder
    fingerprints.forget()
    for key in [key for key in sys.modules if key.partition(".")[0] == name]:
        del sys.modules[key]


def import_user(folder):
    return importlib.import_module(f"{folder.name}.user")


def file_names(code):
    return [Path(path).name for path in code]


def changed_by_edit(folder, file, before, after):
    """The files whose digest, as part of `Model`, changes with an edit."""
    first = code_of(import_user(folder).Model)
    text = (folder / file).read_text()
    assert before in text
    (folder / file).write_text(text.replace(before, after))
    fingerprints.forget()
    return file_names(changed_files(first, code_of(import_user(folder).Model)))


def test_the_code_of_a_class_is_followed_across_modules(package):
    module = import_user(package)
    reached = "chosen deep dotted further helpers late shared shared_too user"
    found = sorted(file_names(code_of(module.Model)))
    assert found == [f"{name}.py" for name in reached.split()]
    assert file_names(code_of(module.measure)) == ["user.py"]


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("deep.py", "x * SCALE", "x * SCALE * 3"),
        ("deep.py", "SCALE = 2", "SCALE = 4"),
        ("helpers.py", "return x + 1", "return x + 2"),
        ("late.py", "return x", "return -x"),
        ("user.py", "return self.more(x)", "return 2 * self.more(x)"),
        ("deep.py", "class Layer:", "print('a side effect')\n\nclass Layer:"),
        ("dotted.py", "return x + 3", "return x + 4"),
        ("chosen.py", "FAST = True", "FAST = False"),
        ("chosen.py", "if FAST", "if not FAST"),
        ("chosen.py", "except ValueError", "except TypeError"),
        ("further.py", "def starred(x):\n    return x", "def starred(x):\n    return -x"),
        ("shared_too.py", "TWO = 2", "TWO = 3"),
        ("shared.py", "ONE = 1", "ONE = 2"),
    ],
)
def test_edits_of_code_that_runs_change_the_digest(package, file, before, after):
    assert changed_by_edit(package, file, before, after) == [file]


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
        ("dotted.py", "def other(x):\n    return x", "def other(x):\n    return -x"),
        ("further.py", "def unused(x):\n    return x", "def unused(x):\n    return -x"),
        ("shared.py", "THREE = 3", "THREE = 4"),
    ],
)
def test_edits_of_code_that_does_not_run_keep_the_digest(package, file, before, after):
    assert changed_by_edit(package, file, before, after) == []


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("OWN[OTHER] = 1", False),
        ("Layer.gain = 1", True),
        ("helpers.SCALE = 1", True),
        ('dotted.TABLE["a"] = 1', True),
        ("starred.gain, first = 1", True),
    ],
)
def test_assignments_to_parts_of_imported_objects_count(package, text, counts):
    """They change what other modules run; those to a module's own objects count with these."""
    codes = []
    for number in "12":
        file = package / "changing.py"
        file.write_text(file.read_text().replace(text, text.replace("= 1", f"= {number}")))
        fingerprints.forget()
        module = importlib.import_module(f"{package.name}.changing")
        codes.append(code_of(module.measure))
    changed = file_names(changed_files(*codes))
    assert changed == (["changing.py"] if counts else [])


@pytest.mark.parametrize(
    ("name", "before", "after", "changed"),
    [
        ("NAMED", '"id"', '"ood"', VALUES),
        ("NAMED", "x[name]", "-x[name]", "held.py"),
        ("IN_PART", '"deep": 2', '"deep": 3', VALUES),
        ("IN_PART", "by * x", "x * by", "held.py"),
        ("HIDDEN", "lambda x: x + 1", "lambda x: x + 2", "held.py"),
        ("HIDDEN", "HIDDEN =", "\n\nHIDDEN =", None),
        ("METHOD", "1f", "2f", None),
    ],
)
def test_what_a_function_holds_counts_too(package, name, before, after, changed):
    def code():
        fingerprints.forget()
        module = importlib.import_module(f"{package.name}.held")
        return code_of(getattr(importlib.reload(module), name))

    file, first = package / "held.py", code()
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))
    found = [Path(one).name if one != VALUES else one for one in changed_files(first, code())]
    assert found == ([] if changed is None else [changed])


def test_a_measure_with_settings_counts_with_what_it_holds():
    def make(split):
        def measure(trained, n: int = 5):
            return split, n

        return configured(measure)

    codes = [code_of(make(split)) for split in ("id", "ood", "id")]
    assert codes[0] == codes[2]
    assert changed_files(codes[0], codes[1]) == [VALUES]


def test_what_is_read_is_imported(package):
    module = import_user(package)
    late = f"{package.name}.late"
    assert late not in sys.modules
    code_of(module.Model)
    assert late in sys.modules


def test_instances_count_by_their_class_and_values(package):
    module = import_user(package)

    @dataclass(frozen=True)
    class Holder:
        value: object

    assert code_of(module.Model).items() <= code_of(Holder(module.Model())).items()
    bound = functools.partial(module.measure, model=module.Model)
    assert {*file_names(code_of(bound))} >= {"user.py", "deep.py"}
    assert code_of({"a": [module.Model]}) == code_of(module.Model)


class Scaled:
    """A measure as an instance of a plain class."""

    def __init__(self, by, **more):
        self.by = by
        vars(self).update(more)

    def __call__(self, trained):
        return self.by

    def run(self, trained):
        return self.by

    @functools.cached_property
    def twice(self):
        return 2 * self.by


class Slotted:
    __slots__ = ("by",)

    def __init__(self, by):
        self.by = by


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


@dataclass(frozen=True)
class Config:
    """Settings, one of which is an object."""

    value: object


def holding(value):
    def measure(trained):
        return value

    return measure


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (range(9), range(8)),
        (slice(2), slice(3)),
        (Path("a"), Path("b")),
        (Kind.ONE, Kind.TWO),
        (np.int64(1), np.int64(2)),
        (np.array([1, 2, 50]), np.array([1, 2, 51])),
        (np.zeros(4), np.zeros((2, 2))),
        (np.array([Kind.ONE], object), np.array([Kind.TWO], object)),
        (torch.ones(2, dtype=torch.bfloat16), torch.tensor([1, 2], dtype=torch.bfloat16)),
        (torch.tensor(1.0), torch.tensor(2.0)),
        (torch.float32, torch.float64),
        (re.compile("a"), re.compile("b")),
        (deque([1, 2]), deque([1, 3])),
        (operator.itemgetter("a"), operator.itemgetter("b")),
        (Slotted(1), Slotted(2)),
        (Scaled([Scaled(1)]), Scaled([Scaled(2)])),
    ],
)
@pytest.mark.parametrize(
    "hold",
    [holding, Scaled, lambda value: Scaled(value).run, lambda value: Config(Scaled(value))],
    ids=["closure", "instance", "bound method", "setting"],
)
def test_values_of_instances_count(hold, first, second):
    equal = copy.deepcopy(first)
    assert code_of(hold(first)) == code_of(hold(equal))
    assert changed_files(code_of(hold(first)), code_of(hold(second))) == [VALUES]


def test_instances_that_refer_to_one_another_are_read_once():
    parent = Scaled(1)
    parent.child = Scaled(2, parent=parent)
    first = code_of(parent)
    parent.child.by = 3
    assert changed_files(first, code_of(parent)) == [VALUES]


def test_what_an_instance_has_cached_does_not_count():
    measure = Scaled(1)
    first = code_of(measure)
    assert measure.twice == 2
    assert code_of(measure) == first


def test_an_instance_that_cannot_be_read_is_refused():
    with pytest.raises(RunError, match="type lock, whose changes could not be seen"):
        code_of(Scaled(threading.Lock()))


def test_methods_of_builtins_do_not_count():
    assert code_of("{:.1f}".format) == {}


def test_libraries_and_bookkeeping_do_not_count():
    paths = code_of(run_training)
    assert "studies/engine/training.py" in paths
    assert all(path.split("/")[0] in fingerprints.PACKAGES for path in paths)
    assert not {f"studies/engine/{name}.py" for name in fingerprints.BOOKKEEPING} & set(paths)


def test_a_mechanism_counts_only_for_models_that_use_it():
    paths = code_of(raven_latent_code.STUDY.setup)
    assert "mechanisms/attention/multi_head.py" in paths
    assert "mechanisms/models/dnc.py" not in paths
    assert "tasks/raven/task.py" in paths
    assert "tasks/expressions/listops.py" not in paths


def test_code_that_is_in_no_file_is_refused():
    """As in a notebook: its changes could not be seen, and old numbers would be taken for new."""
    script = (
        "from studies.engine.fingerprints import code_of\n"
        "from studies.engine import RunError\n"
        "def measure(trained): return 1\n"
        "try: code_of(measure)\n"
        "except RunError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.startswith("measure is defined in no file")


def test_digests_are_the_same_in_another_process():
    script = (
        "from studies.engine.fingerprints import code_of\n"
        "from studies.engine.trainees import run_training\n"
        "print(sorted(code_of(run_training).items()))"
    )
    arguments = {"cwd": Path(__file__).parents[3], "capture_output": True, "text": True}
    process = subprocess.run([sys.executable, "-c", script], **arguments, check=True)
    assert process.stdout.strip() == str(sorted(code_of(run_training).items()))


def test_libraries_do_not_count_wherever_they_are_installed(package, tmp_path, monkeypatch):
    """As with `pip install --target`, whose folder need not be called site-packages."""
    folder = tmp_path / "libraries"
    (folder / "somelibrary").mkdir(parents=True)
    (folder / "somelibrary" / "__init__.py").write_text("def helper():\n    return 1\n")
    monkeypatch.syspath_prepend(folder)
    fingerprints.forget()
    helper = importlib.import_module("somelibrary").helper
    assert list(code_of(helper)) == ["somelibrary/__init__.py"]
    (folder / "somelibrary-1.0.dist-info").mkdir()
    fingerprints.forget()
    assert code_of(helper) == {}


def test_a_module_of_a_user_counts_if_python_has_one_of_that_name(tmp_path, monkeypatch):
    """In a new process, since this one may have imported that of Python."""
    (tmp_path / "wave.py").write_text("def gain():\n    return 1\n")
    script = (
        "from studies.engine.fingerprints import code_of\n"
        "import calendar, wave\n"
        "print([*code_of(wave.gain)], code_of(calendar.TextCalendar))"
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    arguments = {"cwd": tmp_path, "capture_output": True, "text": True}
    process = subprocess.run([sys.executable, "-c", script], **arguments, check=True)
    assert process.stdout.strip() == "['wave.py'] {}"
