"""Setups: questions about passages, answered by DecaProp with softmax attention or CoDA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

import mechanisms
import probes
import tasks
from studies import engine
from studies.engine import Metric, reported
from studies.engine.setup import References, Role, Scores
from studies.setups.quasi_attention import QuasiSetup
from tasks import Batch


@dataclass(frozen=True, kw_only=True)
class ReaderSetup(QuasiSetup):
    """DecaProp, whose attention between passage and question is softmax or CoDA.

    Args:
        d_model: width of the states of both directions of an LSTM together, an even number.
        n_heads: without effect; the alignments have one matrix.
        d_embed: width of the embeddings.
        n_layers: number of encoder layers.
        n_factors: width of the factors of the factorization machines.
        projection: F before an alignment: `relu`, as in DecaProp, with which E is never negative,
            or `linear`, with which CoDA can subtract.
        dropout: dropout probability of the input of every LSTM and dense layer.

    Raises:
        ValueError: a value is not allowed.
    """

    n_heads: int = 1
    d_embed: int
    n_layers: int
    n_factors: int
    projection: Literal["relu", "linear"] = "linear"
    dropout: float = 0.0

    shown: ClassVar = "Q1"
    metrics: ClassVar = {
        "exact_match": Metric("share of answers that match exactly (EM)", percent=True, best=1.0),
        "f1": Metric("mean F1 of the words of answers", percent=True, best=1.0),
        "start": Metric("share of right starts of spans", percent=True, best=1.0),
        "end": Metric("share of right ends of spans", percent=True, best=1.0),
    }
    selection: ClassVar = engine.Selection("id", "exact_match")
    evaluation_batch_size: ClassVar = 256

    def __post_init__(self):
        super().__post_init__()
        if self.d_model % 2:
            raise ValueError(f"d_model must be even, for two directions, got {self.d_model}")

    @property
    def may_centre_matrix(self) -> bool:
        return True

    def models(self) -> tuple[str, ...]:
        return ("softmax", "coda")

    def inapplicable(self) -> frozenset[str]:
        return super().inapplicable() | {"n_heads"}

    def build(self, generator: torch.Generator) -> mechanisms.DecaProp:
        alignment = mechanisms.AlignmentConfig(
            projection=self.projection,
            composition=self.composition,
            scaled=self.scaled or self.composition is None,
            dropout=self.dropout,
        )
        config = mechanisms.DecaPropConfig(
            d_input=self.sampler().vocabulary_size,
            padding=0,
            d_embed=self.d_embed,
            d_hidden=self.d_model // 2,
            n_layers=self.n_layers,
            n_factors=self.n_factors,
            alignment=alignment,
            dropout=self.dropout,
        )
        return mechanisms.DecaProp(config, generator=generator)

    def scores(self, output: Any, batch: Batch[Any], split: str) -> Scores:
        scores = self.sampler().score(output, batch)
        return {name: (values, torch.ones_like(values)) for name, values in scores.items()}

    def references(self, split: str) -> References:
        return {}

    def places(self, batch: Batch[Any]) -> dict[str, probes.AttentionPlace]:
        """The weights of question words for passage words, with the planted signs if there are any.

        `Q1`, `Q2`, ...: in the connectors of that layer of the question, with the layers of the
        passage as layers; `core`: in the gated attention to the question.
        """
        passage, question = batch.inputs
        valid = (passage != 0)[:, :, None] & (question != 0)[:, None]
        hooks = {f"Q{j + 1}": f"connectors.*.{j}.align." for j in range(self.n_layers)}
        hooks |= {"core": "attend.align."}
        sign = batch.latents.get("sign")
        return {name: probes.AttentionPlace(of, valid, sign) for name, of in hooks.items()}


@dataclass(frozen=True, kw_only=True)
class FactQuestionsSetup(ReaderSetup):
    """Generated questions about facts, of which one or two are needed.

    Args:
        task: the questions.
    """

    task: tasks.FactQuestionsConfig

    task_type: ClassVar = tasks.FactQuestions

    def references(self, split: str) -> References:
        """The exact match of a fact that is drawn at random, over all questions of the split.

        That of either kind of questions is the same to about 0.01.
        """
        groups = (engine.ALL, "one fact", "two facts")
        return {"chance": {"exact_match": dict.fromkeys(groups, self.sampler().chance(split))}}


@dataclass(frozen=True, kw_only=True)
class StoredQuestionsSetup(ReaderSetup):
    """Questions of a data set, such as Quasar-T (Tay et al. 2019, Table 1).

    Args:
        task: the data set.
    """

    task: tasks.QuestionsConfig

    task_type: ClassVar = tasks.Questions
    selection: ClassVar = engine.Selection("valid", "exact_match")
    # Scores of all spans of a passage take memory.
    evaluation_batch_size: ClassVar = 16
    reported: ClassVar = reported("tay_2019", "open_domain_question_answering")

    @property
    def splits(self) -> Mapping[str, Role]:
        return {"valid": "in", "test": "in"}

    def prepare(self) -> None:
        """Read the data, or fail now if they are missing."""
        _ = self.sampler().vocabulary_size
