"""Setups: a transformer on Raven matrices and on fuzzy logic (Schug et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import mechanisms
import tasks
from studies import engine
from studies.engine.setup import References, Scores
from tasks import FuzzyLogicConfig, RavenConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class LatentCodeSetup(engine.Setup):
    """A transformer over vectors, read out at its last tokens.

    Args:
        model: the attention, one of `mechanisms.ATTENTION_VARIANTS`.
        n_layers: number of blocks.
        d_model: width of the residual stream.
        n_heads, d_head: number and width of attention heads.
        d_mlp: hidden units of the feed-forward layers.
        attention_dropout: see `mechanisms.AttentionConfig`.
        n_experts: experts of a mixture in place of each feed-forward layer, of `d_mlp` hidden
            units each and two for each token; 1: a single layer.
    """

    n_layers: int
    d_model: int
    n_heads: int
    d_head: int
    d_mlp: int
    attention_dropout: float = 0.0
    n_experts: int = 1

    def models(self) -> tuple[str, ...]:
        return tuple(mechanisms.ATTENTION_VARIANTS)

    def transformer(
        self, generator: torch.Generator, sizes: dict[str, Any]
    ) -> mechanisms.Transformer:
        """The model; `sizes` are arguments of `TransformerConfig` that depend on the task."""
        config = mechanisms.TransformerConfig(
            **sizes,
            d_model=self.d_model,
            n_layers=self.n_layers,
            attention=mechanisms.AttentionConfig.named(
                self.model,
                n_heads=self.n_heads,
                d_head=self.d_head,
                dropout=self.attention_dropout,
            ),
            feed_forward=self.feed_forward,
            positions="relative",
        )
        return mechanisms.Transformer(config, generator=generator)

    @property
    def feed_forward(self) -> mechanisms.FeedForwardConfig | mechanisms.MixtureOfExpertsConfig:
        """The config of the feed-forward layers."""
        if self.n_experts == 1:
            return mechanisms.FeedForwardConfig(d_mlp=self.d_mlp)
        return mechanisms.MixtureOfExpertsConfig(
            n_experts=self.n_experts, top_k=2, d_mlp=self.d_mlp
        )


@dataclass(frozen=True, kw_only=True)
class RavenSetup(LatentCodeSetup):
    """A transformer that completes the last panel of a Raven matrix.

    Args:
        task: the Raven task.
    """

    task: RavenConfig

    task_type: ClassVar = tasks.Raven
    metrics: ClassVar = {
        "accuracy": engine.Metric(
            "share of instances with all features right", percent=True, best=1.0
        ),
        "feature_accuracy": engine.Metric(
            "share of features that are right", percent=True, best=1.0
        ),
    }
    reported: ClassVar = engine.reported("schug_2024", "raven_latent_code")

    @property
    def all_splits(self) -> tuple[str, ...]:
        """Adds instances whose columns all have the same order of features."""
        return (*self.splits, "id_unpermuted", "ood_unpermuted")

    def build(self, generator: torch.Generator) -> mechanisms.Transformer:
        """A transformer read out at the tokens of the last panel."""
        n_features, n_values = self.task.n_features, self.task.n_values
        sizes = {"d_input": n_values, "d_output": n_values, "n_readout": n_features}
        sizes["max_distance"] = 9 * n_features
        return self.transformer(generator, sizes)

    def references(self, split: str) -> References:
        chance = {"accuracy": self.sampler().chance, "feature_accuracy": 1 / self.task.n_values}
        return {"chance": {name: {engine.ALL: value} for name, value in chance.items()}}


@dataclass(frozen=True, kw_only=True)
class FuzzySetup(LatentCodeSetup):
    """A transformer that sees points of a function and predicts its value at a further point.

    The splits that are scored have the names of the published code, not of the paper: `id`,
    combinations of terms as in training; `test`, held-out combinations of the same terms, which the
    paper calls OOD; `ood`, terms that are not in training, which the paper calls unknown terms.

    The seed of the task (held-out combinations and all examples) is the model's `seed`, so seeds
    also differ in the data.

    Args:
        n_variables, n_terms: L and K of a function; see `tasks.FuzzyLogicConfig`.
        n_points: N, points in a sequence, including the queried one.
        held_out: share of the combinations of training terms that is held out as split `test`,
            the paper's OOD.

    Raises:
        ValueError: a number is out of its range.
    """

    n_variables: int = 4
    n_terms: int = 2
    n_points: int = 32
    held_out: float = 0.7

    metrics: ClassVar = {
        # What the paper reports.
        "r2_of_sequences": engine.Metric("R^2 of the answers, mean over sequences", best=1.0),
        "r2": engine.Metric(
            "R^2 of the answers, all sequences together",
            transform=lambda unexplained: 1 - unexplained,
            best=1.0,
        ),
    }
    selection: ClassVar = engine.Selection("id", "r2_of_sequences")
    reported: ClassVar = engine.reported("schug_2024", "fuzzy_logic_latent_code")

    def __post_init__(self):
        super().__post_init__()
        self.sampler()

    @property
    def splits(self) -> dict[str, Any]:
        """Combinations of terms as in training (`id`), held-out ones (`test`, the paper's OOD), and
        terms that are not in training (`ood`, the paper's unknown terms).
        """
        return {"id": "in", "test": "out", "ood": "out"}

    def sampler(self) -> tasks.FuzzyLogic:
        config = FuzzyLogicConfig(
            n_variables=self.n_variables,
            n_terms=self.n_terms,
            n_examples=self.n_points,
            held_out=self.held_out,
            seed=self.seed,
        )
        return engine.cached(tasks.FuzzyLogic, config)

    def build(self, generator: torch.Generator) -> mechanisms.Transformer:
        """A transformer read out at the queried point."""
        sizes = {"d_input": self.n_variables + 1, "d_output": 1, "n_readout": 1}
        return self.transformer(generator, sizes | {"max_distance": self.n_points})

    def loss(self, model: nn.Module, batch: tasks.Batch, step: int) -> Tensor:
        return (engine.answer(model, batch)[:, :, 0] - batch.targets).square().mean()

    def scores(self, output: Tensor, batch: tasks.Batch, split: str) -> Scores:
        """Squared errors with the variance of each sequence, and the R^2 of each sequence."""
        scored, variance = self.sampler().score(output[:, :, 0], batch), batch.latents["variance"]
        of_sequences = scored["r2"], variance.new_ones(len(batch))
        return {"r2": (scored["squared_error"], variance), "r2_of_sequences": of_sequences}
