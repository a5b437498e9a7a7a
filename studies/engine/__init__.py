"""The engine that runs every study: those in this repository and those in a user's own files.

A study file imports from here: `Study`, `Setup`, `Preset`, `Claim`, ... and `main`.
"""

from studies.engine.claims import Claim
from studies.engine.command import main
from studies.engine.execution import Resources, run
from studies.engine.fairness import TrainedIf
from studies.engine.folders import RunError
from studies.engine.papers import Reported, reported
from studies.engine.readings import Reading, above_least, constant, metric, minus_that_of, read
from studies.engine.results import SchemaError, read_result
from studies.engine.setup import ALL, Metric, Selection, Setup, cached
from studies.engine.study import Preset, Study, Where
from studies.engine.trained import Trained
from studies.engine.training import TrainingError, answer, cross_entropy
from studies.engine.training_config import TrainingConfig
from studies.report.table import Row, Section, Table, count, percent, short

__all__ = [
    "ALL",
    "Claim",
    "Metric",
    "Preset",
    "Reading",
    "Reported",
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
    "Where",
    "above_least",
    "answer",
    "cached",
    "constant",
    "count",
    "cross_entropy",
    "main",
    "metric",
    "minus_that_of",
    "percent",
    "read",
    "read_result",
    "reported",
    "run",
    "short",
]
