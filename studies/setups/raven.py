"""Symbolic Raven matrices, and the transformer that completes them (Schug et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import mechanisms
import tasks
from studies import engine
from tasks import RavenConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class RavenSetup(engine.Setup):
    """A transformer that fills the last panel of a Raven matrix.

    Args:
        model: the attention, one of `mechanisms.ATTENTION_VARIANTS`.
        task: which Raven task.
        n_layers: blocks.
        d_model: width of the residual stream.
        n_heads, d_head: heads of the attention, and their width.
        d_mlp: hidden units of the feed-forward layers.
        attention_dropout: see `mechanisms.AttentionConfig`.
    """

    task: RavenConfig
    n_layers: int
    d_model: int
    n_heads: int
    d_head: int = 4
    d_mlp: int
    attention_dropout: float = 0.0

    metrics: ClassVar = {
        "accuracy": engine.Metric("share of instances with all features right", percent=True),
        "feature_accuracy": engine.Metric("share of features that are right", percent=True),
    }
    reported: ClassVar = engine.reported("schug_2024", "raven")

    @property
    def all_splits(self) -> tuple[str, ...]:
        """Also instances whose columns all have one order of the features."""
        return (*self.splits, "id_unpermuted", "ood_unpermuted")

    def models(self) -> tuple[str, ...]:
        return tuple(mechanisms.ATTENTION_VARIANTS)

    def sampler(self) -> tasks.Raven:
        return engine.kept(tasks.Raven, self.task)

    def build(self, generator: torch.Generator) -> mechanisms.Transformer:
        n_features, n_values = self.task.n_features, self.task.n_values
        attention = mechanisms.AttentionConfig.named(
            self.model, n_heads=self.n_heads, d_head=self.d_head, dropout=self.attention_dropout
        )
        config = mechanisms.TransformerConfig(
            d_input=n_values,
            d_output=n_values,
            d_model=self.d_model,
            n_layers=self.n_layers,
            attention=attention,
            feed_forward=mechanisms.FeedForwardConfig(d_mlp=self.d_mlp),
            positions="relative",
            max_distance=9 * n_features,
            n_readout=n_features,  # the tokens of the last panel
        )
        return mechanisms.Transformer(config, generator=generator)

    def references(self, split: str) -> dict[str, dict[str, dict[str, float]]]:
        chance = {"accuracy": self.sampler().chance, "feature_accuracy": 1 / self.task.n_values}
        return {"chance": {name: {engine.ALL: value} for name, value in chance.items()}}
