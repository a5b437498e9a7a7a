"""Fuzzy logic functions in context, and the transformer that learns them (Schug et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import mechanisms
import tasks
from studies import engine
from tasks import Batch, FuzzyLogicConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def explained(unexplained: Any) -> Any:
    """R^2, from the share of the variance that is not explained."""
    return 1 - unexplained


@dataclass(frozen=True, kw_only=True)
class FuzzySetup(engine.Setup):
    """A transformer that sees points of a function and is asked for its value at another one.

    The task's seed, of what is held out and of all examples, is the model's `seed`: seeds differ in
    the data too.

    Args:
        model: the attention, one of `mechanisms.ATTENTION_VARIANTS`.
        n_variables, n_terms: of a function, L and K; see `tasks.FuzzyLogicConfig`.
        n_points: points of a sequence, the one that is asked for among them, N.
        held_out: share of the combinations of seen terms that is held out, for split `test`.
        n_layers: blocks.
        d_model: width of the residual stream.
        n_heads, d_head: heads of the attention, and their width.
        d_mlp: hidden units of the feed-forward layers.

    Raises:
        ValueError: the model is unknown, or a number is out of its range.
    """

    n_variables: int = 4
    n_terms: int = 2
    n_points: int = 32
    held_out: float = 0.7
    n_layers: int = 2
    d_model: int = 128
    n_heads: int = 8
    d_head: int = 2
    d_mlp: int = 256

    metrics: ClassVar = {
        "r2": engine.Metric("R^2 of the answers", transform=explained),
        "r2_of_sequences": engine.Metric("R^2 of the answers, mean over sequences"),
    }
    selection: ClassVar = engine.Selection("id", "r2")
    reported: ClassVar = engine.reported("schug_2024", "fuzzy_logic")

    def __post_init__(self):
        super().__post_init__()
        self.sampler()

    def models(self) -> tuple[str, ...]:
        return tuple(mechanisms.ATTENTION_VARIANTS)

    @property
    def splits(self) -> dict[str, Any]:
        """Familiar combinations of terms, held-out ones (`test`), and unseen terms (`ood`)."""
        return {"id": "in", "test": "out", "ood": "out"}

    def sampler(self) -> tasks.FuzzyLogic:
        config = FuzzyLogicConfig(
            n_variables=self.n_variables,
            n_terms=self.n_terms,
            n_examples=self.n_points,
            held_out=self.held_out,
            seed=self.seed,
        )
        return engine.kept(tasks.FuzzyLogic, config)

    def build(self, generator: torch.Generator) -> mechanisms.Transformer:
        attention = mechanisms.AttentionConfig.named(
            self.model, n_heads=self.n_heads, d_head=self.d_head
        )
        config = mechanisms.TransformerConfig(
            d_input=self.n_variables + 1,
            d_output=1,
            d_model=self.d_model,
            n_layers=self.n_layers,
            attention=attention,
            feed_forward=mechanisms.FeedForwardConfig(d_mlp=self.d_mlp),
            positions="relative",
            max_distance=self.n_points,
            n_readout=1,  # the point that is asked for
        )
        return mechanisms.Transformer(config, generator=generator)

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Tensor:
        return (engine.answer(model, batch)[:, :, 0] - batch.targets).square().mean()

    def scores(self, output: Tensor, batch: Batch, split: str) -> dict[str, tuple[Tensor, Tensor]]:
        """Squared errors beside the variances of the sequences; and R^2 of each of these."""
        scored, variance = self.sampler().score(output[:, :, 0], batch), batch.latents["variance"]
        each = scored["r2"], variance.new_ones(len(batch))
        return {"r2": (scored["squared_error"], variance), "r2_of_sequences": each}
