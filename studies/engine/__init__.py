"""The engine that runs every study, of modscope and of its users.

A study file imports from here: `Study`, `Setup`, `Preset`, `Claim`, ... and `main`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from studies.engine.cells import Trained
    from studies.engine.claims import Claim
    from studies.engine.command import main
    from studies.engine.execution import Resources, run
    from studies.engine.fairness import TrainedIf
    from studies.engine.folders import RunError
    from studies.engine.readings import Reading, constant, metric, read
    from studies.engine.results import SchemaError, read_result
    from studies.engine.setup import ALL, Metric, Selection, Setup, kept
    from studies.engine.study import Preset, Study
    from studies.engine.training import TrainingConfig, TrainingError, answer, cross_entropy
    from studies.report.table import Row, Section, Table, count, percent, short

_HOME = {
    "ALL": "engine.setup",
    "Claim": "engine.claims",
    "Metric": "engine.setup",
    "Preset": "engine.study",
    "Reading": "engine.readings",
    "Resources": "engine.execution",
    "Row": "report.table",
    "RunError": "engine.folders",
    "SchemaError": "engine.results",
    "Section": "report.table",
    "Selection": "engine.setup",
    "Setup": "engine.setup",
    "Study": "engine.study",
    "Table": "report.table",
    "Trained": "engine.cells",
    "TrainedIf": "engine.fairness",
    "TrainingConfig": "engine.training",
    "TrainingError": "engine.training",
    "answer": "engine.training",
    "constant": "engine.readings",
    "count": "report.table",
    "cross_entropy": "engine.training",
    "kept": "engine.setup",
    "main": "engine.command",
    "metric": "engine.readings",
    "percent": "report.table",
    "read": "engine.readings",
    "read_result": "engine.results",
    "run": "engine.execution",
    "short": "report.table",
}

__all__ = [
    "ALL",
    "Claim",
    "Metric",
    "Preset",
    "Reading",
    "Resources",
    "Row",
    "RunError",
    "SchemaError",
    "Section",
    "Selection",
    "Setup",
    "Study",
    "Table",
    "Trained",
    "TrainedIf",
    "TrainingConfig",
    "TrainingError",
    "answer",
    "constant",
    "count",
    "cross_entropy",
    "kept",
    "main",
    "metric",
    "percent",
    "read",
    "read_result",
    "run",
    "short",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'studies.engine' has no attribute {name!r}; it has {__all__}")
    return getattr(import_module(f"studies.{_HOME[name]}"), name)
