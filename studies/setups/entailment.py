"""Setup: texts that follow from one another or not, read by decomposable attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import tasks
from studies.setups.pair_reader import PairReaderSetup


@dataclass(frozen=True, kw_only=True)
class EntailmentSetup(PairReaderSetup):
    """Generated hypotheses and premises.

    Args:
        task: the texts.
    """

    task: tasks.PlantedTextsConfig

    task_type: ClassVar = tasks.PlantedEntailment
