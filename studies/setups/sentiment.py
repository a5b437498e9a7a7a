"""Setups: the sentiment of texts, told by a transformer from the mean of its tokens."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import mechanisms
import probes
import tasks
from studies.setups.quasi_transformer import QuasiTransformerSetup
from tasks import Batch


@dataclass(frozen=True, kw_only=True)
class TextReaderSetup(QuasiTransformerSetup):
    """A transformer over padded texts, see `mechanisms.SequenceClassifier`."""

    shown: ClassVar = "attention"

    def build(self, generator: torch.Generator) -> mechanisms.SequenceClassifier:
        task = self.sampler()
        config = mechanisms.SequenceClassifierConfig(
            d_input=task.vocabulary_size,
            d_output=len(task.classes),
            padding=0,
            n_layers=self.n_layers,
            **self.blocks,
        )
        return mechanisms.SequenceClassifier(config, generator=generator)

    @abstractmethod
    def places(self, batch: Batch[Any]) -> dict[str, probes.AttentionPlace]:
        """`attention`: that of all layers, between the words of a text."""


@dataclass(frozen=True, kw_only=True)
class NegatedSentimentSetup(TextReaderSetup):
    """Generated sentences with negators.

    Args:
        task: the sentences.
    """

    task: tasks.NegatedSentimentConfig

    task_type: ClassVar = tasks.NegatedSentiment

    def places(self, batch: Batch[Any]) -> dict[str, probes.AttentionPlace]:
        """Attention from the negators: they subtract the polar words of their scope.

        The answer is read from the mean over positions, so that a word that its negator subtracts
        from it no longer counts with its own sign.
        """
        negator, effect = batch.latents["negator"], batch.latents["effect"]
        position = torch.arange(batch.inputs.shape[1], device=batch.inputs.device)
        is_scope = negator[:, None] == position[:, None]
        sign = -(is_scope & (effect < 0)[:, None]).long()
        is_negator = is_scope.any(2)
        valid = is_negator[:, :, None] & (batch.inputs != 0)[:, None]
        return {"attention": probes.AttentionPlace("blocks.*.attn.", valid, sign)}
