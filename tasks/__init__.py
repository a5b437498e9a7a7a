"""Synthetic tasks: a frozen config, a sampler and the named ground truth behind every example.

The names are imported when they are first used, so `import tasks` itself costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.arithmetic import Arithmetic, ArithmeticConfig
    from tasks.batch import Batch
    from tasks.contextual_retrieval import ContextualRetrieval, ContextualRetrievalConfig
    from tasks.esbn import ESBN, ESBN_CHARACTERS, ESBN_RELATIONS, ESBNConfig
    from tasks.expressions import ExpressionTask, dataflow
    from tasks.images import Images, ImagesConfig
    from tasks.listops import LISTOPS_OPERATORS, ListOps, ListOpsConfig
    from tasks.math_equations import (
        MATH_OPERATIONS,
        MathEquations,
        MathEquationsConfig,
        apply_operation,
    )
    from tasks.raven import RAVEN_RULES, Raven, RavenConfig
    from tasks.raven_observer import IdealObserver, Observation, RavenCeiling
    from tasks.scan import SCAN_ACTIONS, SCAN_LATENTS, SCAN_WORDS, Scan, ScanConfig
    from tasks.sort_of_clevr import (
        SORT_OF_CLEVR_ANSWERS,
        SORT_OF_CLEVR_COLOURS,
        SORT_OF_CLEVR_QUESTIONS,
        SortOfClevr,
        SortOfClevrConfig,
    )
    from tasks.table_lookup import TableLookup, TableLookupConfig
    from tasks.text import Text, TextConfig
    from tasks.triangles import Triangles, TrianglesConfig

__all__ = [
    "ESBN",
    "ESBN_CHARACTERS",
    "ESBN_RELATIONS",
    "LISTOPS_OPERATORS",
    "MATH_OPERATIONS",
    "RAVEN_RULES",
    "SCAN_ACTIONS",
    "SCAN_LATENTS",
    "SCAN_WORDS",
    "SORT_OF_CLEVR_ANSWERS",
    "SORT_OF_CLEVR_COLOURS",
    "SORT_OF_CLEVR_QUESTIONS",
    "Arithmetic",
    "ArithmeticConfig",
    "Batch",
    "ContextualRetrieval",
    "ContextualRetrievalConfig",
    "ESBNConfig",
    "ExpressionTask",
    "IdealObserver",
    "Images",
    "ImagesConfig",
    "ListOps",
    "ListOpsConfig",
    "MathEquations",
    "MathEquationsConfig",
    "Observation",
    "Raven",
    "RavenCeiling",
    "RavenConfig",
    "Scan",
    "ScanConfig",
    "SortOfClevr",
    "SortOfClevrConfig",
    "TableLookup",
    "TableLookupConfig",
    "Text",
    "TextConfig",
    "Triangles",
    "TrianglesConfig",
    "apply_operation",
    "dataflow",
]

_HOME = {
    "ESBN": "esbn",
    "ESBN_CHARACTERS": "esbn",
    "ESBN_RELATIONS": "esbn",
    "LISTOPS_OPERATORS": "listops",
    "MATH_OPERATIONS": "math_equations",
    "RAVEN_RULES": "raven",
    "SCAN_ACTIONS": "scan",
    "SCAN_LATENTS": "scan",
    "SCAN_WORDS": "scan",
    "SORT_OF_CLEVR_ANSWERS": "sort_of_clevr",
    "SORT_OF_CLEVR_COLOURS": "sort_of_clevr",
    "SORT_OF_CLEVR_QUESTIONS": "sort_of_clevr",
    "Arithmetic": "arithmetic",
    "ArithmeticConfig": "arithmetic",
    "Batch": "batch",
    "ContextualRetrieval": "contextual_retrieval",
    "ContextualRetrievalConfig": "contextual_retrieval",
    "ESBNConfig": "esbn",
    "ExpressionTask": "expressions",
    "IdealObserver": "raven_observer",
    "Images": "images",
    "ImagesConfig": "images",
    "ListOps": "listops",
    "ListOpsConfig": "listops",
    "MathEquations": "math_equations",
    "MathEquationsConfig": "math_equations",
    "Observation": "raven_observer",
    "Raven": "raven",
    "RavenCeiling": "raven_observer",
    "RavenConfig": "raven",
    "Scan": "scan",
    "ScanConfig": "scan",
    "SortOfClevr": "sort_of_clevr",
    "SortOfClevrConfig": "sort_of_clevr",
    "TableLookup": "table_lookup",
    "TableLookupConfig": "table_lookup",
    "Text": "text",
    "TextConfig": "text",
    "Triangles": "triangles",
    "TrianglesConfig": "triangles",
    "apply_operation": "math_equations",
    "dataflow": "expressions",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'tasks' has no attribute {name!r}; it has {__all__}")
    return getattr(import_module(f"tasks.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
