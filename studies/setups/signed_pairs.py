"""Setup: pairs of sequences with planted signs, read by decomposable attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

import tasks
from studies import engine
from studies.engine.setup import References
from studies.setups.pair_reader import PairReaderSetup
from tasks import Batch, SignedPairsConfig


@dataclass(frozen=True, kw_only=True)
class SignedPairsSetup(PairReaderSetup):
    """Signed pairs, read by decomposable attention.

    Args:
        task: the pairs.
    """

    task: SignedPairsConfig

    task_type: ClassVar = tasks.SignedPairs

    def groups(self, batch: Batch[Any]) -> dict[str, Tensor]:
        """By the absolute value of the signed sum."""
        size = batch.latents["total"].abs()
        small, large = size <= 3, size > 8
        return {"sum 1-3": small, "sum 4-8": ~small & ~large, "sum above 8": large}

    def references(self, split: str) -> References:
        names = (engine.ALL, *self.groups(self.sampler().batch("train", 0, 1)))
        return {"chance": {"accuracy": dict.fromkeys(names, 0.5)}}
