"""The examples in docstrings of what the packages export run.

An example shows an output where that is short; then it is checked. What an example takes for
granted, such as `model` and `batches`, is made in `names.py`, by the folder of the export.
"""

import doctest
import inspect

import matplotlib.pyplot as plt
import pytest

import mechanisms
import probes
import tasks
from probes import plots
from tests.docs.names import names_of


class Checker(doctest.OutputChecker):
    """An output counts only where the example shows one."""

    def check_output(self, want, got, optionflags):
        return not want or super().check_output(want, got, optionflags)


def documented(package):
    """The exported classes and functions of a package by name."""
    exports = {name: getattr(package, name) for name in package.__all__}
    return {
        name: export
        for name, export in exports.items()
        if inspect.isclass(export) or inspect.isroutine(export)
    }


def example_of(export):
    """The example in the docstring of an export itself; None if there is none."""
    text = inspect.cleandoc(export.__doc__ or "")
    test = doctest.DocTestParser().get_doctest(text, {}, export.__name__, None, None)
    return test if test.examples else None


PACKAGES = (mechanisms, tasks, probes, plots)
EXAMPLES = [
    pytest.param(package, export, id=f"{package.__name__}.{name}")
    for package in PACKAGES
    for name, export in documented(package).items()
    if example_of(export)
]


@pytest.mark.parametrize(("package", "export"), EXAMPLES)
def test_examples_run(package, export, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    test = example_of(export)
    test.globs = names_of(inspect.unwrap(export).__module__)
    runner = doctest.DocTestRunner(checker=Checker(), verbose=False)
    messages = []
    results = runner.run(test, out=messages.append)
    plt.close("all")
    assert not results.failed, "".join(messages)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_export_has_an_example(package):
    exports = documented(package)
    lacking = [name for name, export in exports.items() if not example_of(export)]
    assert not lacking, "give these an example that runs"


def test_a_wrong_output_is_found():
    def wrong():
        """Add.

        >>> 1 + 1
        3
        """

    messages = []
    runner = doctest.DocTestRunner(checker=Checker(), verbose=False)
    assert runner.run(example_of(wrong), out=messages.append).failed
    assert "Expected:\n    3" in "".join(messages)
