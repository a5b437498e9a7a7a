"""Examples of what the packages export, which the test file of each module provides.

Contract tests run over all exported attention configs and tasks. The test file of the module that
defines one has `CONTRACT_EXAMPLES`, a dict by name: of an attention, configs with four heads; of a
task, functions that make a small one, given an empty folder for the files it may read.
"""

import importlib
import inspect

import pytest

import mechanisms
import tasks


def exports_with(package, *attributes):
    """The exported classes with all these attributes, except protocols and abstract classes."""
    exports = [getattr(package, name) for name in package.__all__]
    return [
        export
        for export in exports
        if inspect.isclass(export)
        and not getattr(export, "_is_protocol", False)
        and not inspect.isabstract(export)
        and all(hasattr(export, attribute) for attribute in attributes)
    ]


def examples_of(export):
    """`CONTRACT_EXAMPLES` of the test file of an export's module."""
    *packages, module = export.__module__.split(".")
    name = ".".join(["tests", *packages, f"test_{module}"])
    examples = getattr(importlib.import_module(name), "CONTRACT_EXAMPLES", {})
    if not examples:
        raise LookupError(f"{name} must have CONTRACT_EXAMPLES for {export.__name__}, got none")
    return [
        pytest.param(example, id=f"{export.__name__} {label}")
        for label, example in examples.items()
    ]


ATTENTION_CONFIGS = exports_with(mechanisms, "measures_distances", "needs_all_queries", "build")
ATTENTIONS = [example for export in ATTENTION_CONFIGS for example in examples_of(export)]
TASK_CLASSES = exports_with(tasks, "batch", "splits")
TASKS = [example for export in TASK_CLASSES for example in examples_of(export)]
CAUSAL_TASKS = [
    example
    for export in TASK_CLASSES
    if issubclass(export, tasks.CausalTask)
    for example in examples_of(export)
]
