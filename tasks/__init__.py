"""Synthetic tasks: a frozen config, a sampler and the named ground truth behind every example.

The names are imported when they are first used, so `import tasks` itself costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks._bundled import BUNDLED_IMAGES, PYTHON_HELP
    from tasks.arithmetic import Arithmetic, ArithmeticConfig
    from tasks.batch import Batch
    from tasks.classification import Classification, ClassificationConfig
    from tasks.contextual_retrieval import ContextualRetrieval, ContextualRetrievalConfig
    from tasks.esbn import ESBN, ESBN_CHARACTERS, ESBN_RELATIONS, ESBNConfig
    from tasks.expressions import (
        ExpressionTask,
        column_dataflow,
        dataflow,
        spread_over_depths,
    )
    from tasks.fuzzy_logic import FuzzyLogic, FuzzyLogicConfig
    from tasks.images import Images, ImagesConfig
    from tasks.listops import LISTOPS_OPERATORS, ListOps, ListOpsConfig
    from tasks.math_equations import (
        MATH_OPERATIONS,
        MathEquations,
        MathEquationsConfig,
        apply_operation,
    )
    from tasks.mlu import MLU, MLU_CHARACTERS, MLU_OPERATORS, MLUConfig
    from tasks.pairs import Pairs, PairsConfig, score_ranking
    from tasks.raven import RAVEN_RULES, Raven, RavenConfig
    from tasks.raven_interventions import RavenPairs, raven_last_row, raven_pairs
    from tasks.raven_observer import IdealObserver, Observation, RavenCeiling, raven_ceilings
    from tasks.scan import SCAN_ACTIONS, SCAN_LATENTS, SCAN_WORDS, Scan, ScanConfig
    from tasks.sequences import Sequences, SequencesConfig
    from tasks.signed_pairs import SignedPairs, SignedPairsConfig
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
    "BUNDLED_IMAGES",
    "ESBN",
    "ESBN_CHARACTERS",
    "ESBN_RELATIONS",
    "LISTOPS_OPERATORS",
    "MATH_OPERATIONS",
    "MLU",
    "MLU_CHARACTERS",
    "MLU_OPERATORS",
    "PYTHON_HELP",
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
    "Classification",
    "ClassificationConfig",
    "ContextualRetrieval",
    "ContextualRetrievalConfig",
    "ESBNConfig",
    "ExpressionTask",
    "FuzzyLogic",
    "FuzzyLogicConfig",
    "IdealObserver",
    "Images",
    "ImagesConfig",
    "ListOps",
    "ListOpsConfig",
    "MLUConfig",
    "MathEquations",
    "MathEquationsConfig",
    "Observation",
    "Pairs",
    "PairsConfig",
    "Raven",
    "RavenCeiling",
    "RavenConfig",
    "RavenPairs",
    "Scan",
    "ScanConfig",
    "Sequences",
    "SequencesConfig",
    "SignedPairs",
    "SignedPairsConfig",
    "SortOfClevr",
    "SortOfClevrConfig",
    "TableLookup",
    "TableLookupConfig",
    "Text",
    "TextConfig",
    "Triangles",
    "TrianglesConfig",
    "apply_operation",
    "column_dataflow",
    "dataflow",
    "raven_ceilings",
    "raven_last_row",
    "raven_pairs",
    "score_ranking",
    "spread_over_depths",
]

_HOME = {
    "BUNDLED_IMAGES": "_bundled",
    "ESBN": "esbn",
    "ESBN_CHARACTERS": "esbn",
    "ESBN_RELATIONS": "esbn",
    "LISTOPS_OPERATORS": "listops",
    "MATH_OPERATIONS": "math_equations",
    "MLU": "mlu",
    "MLU_CHARACTERS": "mlu",
    "MLU_OPERATORS": "mlu",
    "PYTHON_HELP": "_bundled",
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
    "Classification": "classification",
    "ClassificationConfig": "classification",
    "ContextualRetrieval": "contextual_retrieval",
    "ContextualRetrievalConfig": "contextual_retrieval",
    "ESBNConfig": "esbn",
    "ExpressionTask": "expressions",
    "FuzzyLogic": "fuzzy_logic",
    "FuzzyLogicConfig": "fuzzy_logic",
    "IdealObserver": "raven_observer",
    "Images": "images",
    "ImagesConfig": "images",
    "ListOps": "listops",
    "ListOpsConfig": "listops",
    "MLUConfig": "mlu",
    "MathEquations": "math_equations",
    "MathEquationsConfig": "math_equations",
    "Observation": "raven_observer",
    "Pairs": "pairs",
    "PairsConfig": "pairs",
    "Raven": "raven",
    "RavenCeiling": "raven_observer",
    "RavenConfig": "raven",
    "RavenPairs": "raven_interventions",
    "Scan": "scan",
    "ScanConfig": "scan",
    "Sequences": "sequences",
    "SequencesConfig": "sequences",
    "SignedPairs": "signed_pairs",
    "SignedPairsConfig": "signed_pairs",
    "SortOfClevr": "sort_of_clevr",
    "SortOfClevrConfig": "sort_of_clevr",
    "TableLookup": "table_lookup",
    "TableLookupConfig": "table_lookup",
    "Text": "text",
    "TextConfig": "text",
    "Triangles": "triangles",
    "TrianglesConfig": "triangles",
    "apply_operation": "math_equations",
    "column_dataflow": "expressions",
    "dataflow": "expressions",
    "raven_ceilings": "raven_observer",
    "raven_last_row": "raven_interventions",
    "raven_pairs": "raven_interventions",
    "score_ranking": "pairs",
    "spread_over_depths": "expressions",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'tasks' has no attribute {name!r}; it has {__all__}")
    return getattr(import_module(f"tasks.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
