"""Setups: published data sets of labelled texts and of pairs of texts, or one's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import probes
import tasks
from studies import engine
from studies.engine.setup import Role
from studies.setups.pair_reader import PairReaderSetup
from studies.setups.quasi_attention import QuasiSetup
from studies.setups.sentiment import TextReaderSetup
from tasks import Batch


@dataclass(frozen=True, kw_only=True)
class StoredSetup(QuasiSetup):
    """A data set with `valid`, which chooses checkpoints, and `test`."""

    selection: ClassVar = engine.Selection("valid", "accuracy")

    @property
    def splits(self) -> Mapping[str, Role]:
        return {"valid": "in", "test": "in"}

    def prepare(self) -> None:
        """Read the data, or fail now if it is missing."""
        _ = self.sampler().vocabulary_size


@dataclass(frozen=True, kw_only=True)
class StoredPairsSetup(StoredSetup, PairReaderSetup):
    """Pairs of sentences, or questions and answers, of a data set (Tay et al. 2019, Tables 2, 3).

    Args:
        task: the data set.
    """

    task: tasks.PairsConfig

    task_type: ClassVar = tasks.Pairs
    reported: ClassVar = (
        *engine.reported("tay_2019", "text_pairs"),
        *engine.reported("tay_2019", "text_ranking"),
    )
    evaluation_batch_size: ClassVar = 256


@dataclass(frozen=True, kw_only=True)
class StoredTextSetup(StoredSetup, TextReaderSetup):
    """Texts of a data set, such as film reviews (Tay et al. 2019, Table 5).

    Args:
        task: the data set.
    """

    task: tasks.ClassificationConfig

    task_type: ClassVar = tasks.Classification
    reported: ClassVar = engine.reported("tay_2019", "text_sentiment")
    evaluation_batch_size: ClassVar = 64

    def places(self, batch: Batch[Any]) -> dict[str, probes.AttentionPlace]:
        is_word = batch.inputs != 0
        valid = is_word[:, :, None] & is_word[:, None]
        return {"attention": probes.AttentionPlace("blocks.*.attn.", valid)}
