"""Setups: texts that an encoder-decoder writes: translations, and programs from descriptions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import mechanisms
import tasks
from studies import engine
from studies.engine.setup import Role, Scores
from studies.setups.encoder_decoder import EncoderDecoderSetup
from tasks import Batch


@dataclass(frozen=True, kw_only=True)
class GenerationSetup(EncoderDecoderSetup):
    """A text that follows from another one."""

    metrics: ClassVar = {
        "accuracy": engine.Metric(
            "share of texts that are right in every token", percent=True, best=1.0
        ),
        "token_accuracy": engine.Metric(
            "share of right tokens, those before them given", percent=True, best=1.0
        ),
    }

    @property
    @abstractmethod
    def n_ids(self) -> tuple[int, int]:
        """The numbers of source and target ids."""

    def build(self, generator: torch.Generator) -> mechanisms.EncoderDecoder:
        return mechanisms.EncoderDecoder(self.architecture(*self.n_ids), generator=generator)

    def scores(self, output: Any, batch: Batch[Any], split: str) -> Scores:
        scores = self.sampler().score(output, batch)
        right, n_tokens = scores["correct"], batch.mask.sum(1)
        return {
            "accuracy": (right, torch.ones_like(right)),
            "token_accuracy": (scores["token_correct"] * n_tokens, n_tokens),
        }

    def references(self, split: str) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, kw_only=True)
class TranslationSetup(GenerationSetup):
    """Translation between two made-up grammars, whose words are known to come from one another.

    Args:
        task: the grammars.
    """

    task: tasks.TranslationConfig

    task_type: ClassVar = tasks.Translation

    @property
    def n_ids(self) -> tuple[int, int]:
        task = self.sampler()
        return len(task.source_words), len(task.target_words)


@dataclass(frozen=True, kw_only=True)
class ProgramSetup(GenerationSetup):
    """Programs from descriptions, which are run on tests."""

    @abstractmethod
    def problems(self, batch: Batch[Any], split: str) -> list[tasks.AlgoLispProblem]:
        """The problem behind each example, with its tests."""


@dataclass(frozen=True, kw_only=True)
class AlgoLispSetup(ProgramSetup):
    """Generated programs of AlgoLisp.

    Args:
        task: the programs.
    """

    task: tasks.AlgoLispConfig

    task_type: ClassVar = tasks.AlgoLisp

    @property
    def n_ids(self) -> tuple[int, int]:
        n = len(self.sampler().vocabulary)
        return n, n

    def problems(self, batch: Batch[Any], split: str) -> list[tasks.AlgoLispProblem]:
        return [self.sampler().problem(batch, example) for example in range(len(batch))]


@dataclass(frozen=True, kw_only=True)
class StoredSequencesSetup(GenerationSetup):
    """A data set of texts and what follows from them.

    Args:
        task: the data set.
    """

    task: tasks.SequencesConfig

    task_type: ClassVar = tasks.Sequences
    selection: ClassVar = engine.Selection("valid", "token_accuracy")
    evaluation_batch_size: ClassVar = 64

    @property
    def splits(self) -> Mapping[str, Role]:
        return {"valid": "in", "test": "in"}

    @property
    def n_ids(self) -> tuple[int, int]:
        n = self.sampler().vocabulary_size
        return n, n

    def prepare(self) -> None:
        """Read the data, or fail now if it is missing."""
        _ = self.sampler().vocabulary_size


@dataclass(frozen=True, kw_only=True)
class StoredTranslationSetup(StoredSequencesSetup):
    """Translations of a data set, such as IWSLT'15 (Tay et al. 2019, Tables 4, 8 and 9)."""

    reported: ClassVar = engine.reported("tay_2019", "translation")


@dataclass(frozen=True, kw_only=True)
class StoredProgramSetup(StoredSequencesSetup, ProgramSetup):
    """The published programs of AlgoLisp (Tay et al. 2019, Table 7)."""

    selection: ClassVar = engine.Selection("valid", "accuracy")
    reported: ClassVar = engine.reported("tay_2019", "algolisp")

    def problems(self, batch: Batch[Any], split: str) -> list[tasks.AlgoLispProblem]:
        of_split = engine.cached(tasks.read_problems, self.task.path)[split]
        return [of_split[row] for row in batch.latents["row"].tolist()]
