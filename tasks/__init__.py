"""Synthetic tasks: a frozen config, a sampler and the named ground truth behind every example.

The names are imported when they are first used, so `import tasks` itself costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.arithmetic import Arithmetic, ArithmeticConfig
    from tasks.batch import Batch
    from tasks.expressions import ExpressionTask, dataflow
    from tasks.listops import LISTOPS_OPERATORS, ListOps, ListOpsConfig
    from tasks.math_equations import (
        MATH_OPERATIONS,
        MathEquations,
        MathEquationsConfig,
        apply_operation,
    )
    from tasks.raven import RAVEN_RULES, Raven, RavenConfig
    from tasks.raven_observer import IdealObserver, Observation, RavenCeiling
    from tasks.table_lookup import TableLookup, TableLookupConfig

__all__ = [
    "LISTOPS_OPERATORS",
    "MATH_OPERATIONS",
    "RAVEN_RULES",
    "Arithmetic",
    "ArithmeticConfig",
    "Batch",
    "ExpressionTask",
    "IdealObserver",
    "ListOps",
    "ListOpsConfig",
    "MathEquations",
    "MathEquationsConfig",
    "Observation",
    "Raven",
    "RavenCeiling",
    "RavenConfig",
    "TableLookup",
    "TableLookupConfig",
    "apply_operation",
    "dataflow",
]

_HOME = {
    "LISTOPS_OPERATORS": "listops",
    "MATH_OPERATIONS": "math_equations",
    "RAVEN_RULES": "raven",
    "Arithmetic": "arithmetic",
    "ArithmeticConfig": "arithmetic",
    "Batch": "batch",
    "ExpressionTask": "expressions",
    "IdealObserver": "raven_observer",
    "ListOps": "listops",
    "ListOpsConfig": "listops",
    "MathEquations": "math_equations",
    "MathEquationsConfig": "math_equations",
    "Observation": "raven_observer",
    "Raven": "raven",
    "RavenCeiling": "raven_observer",
    "RavenConfig": "raven",
    "TableLookup": "table_lookup",
    "TableLookupConfig": "table_lookup",
    "apply_operation": "math_equations",
    "dataflow": "expressions",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'tasks' has no attribute {name!r}; it has {__all__}")
    return getattr(import_module(f"tasks.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
