"""Multi-head and compositional attention in otherwise the same model (Mittal et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import mechanisms
from studies.engine import Metric, Setup
from studies.engine.setup import Scores

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from mechanisms.transformer import HeadedConfig
    from tasks import Batch

MODELS = ("multi_head", "compositional")


@dataclass(frozen=True, kw_only=True)
class HeadsSetup(Setup):
    """The sizes of a transformer.

    Args:
        n_layers, d_model, d_mlp: of the transformer; SCAN's has as many layers twice.
        n_heads: heads, or searches; each is d_model / n_heads wide.
        dropout: of hidden activations; and, but for ESBN's tasks and text, of what each part of a
            block adds, and of the embedding.

    Raises:
        ValueError: n_heads does not divide d_model.
    """

    n_layers: int
    d_model: int
    d_mlp: int
    n_heads: int
    dropout: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if self.n_heads < 1 or self.d_model % self.n_heads:
            raise ValueError(f"n_heads must divide d_model = {self.d_model}, got {self.n_heads}")

    @property
    def d_head(self) -> int:
        """Width of a head."""
        return self.d_model // self.n_heads

    @property
    def feed_forward(self) -> mechanisms.FeedForwardConfig:
        """That of every block."""
        return mechanisms.FeedForwardConfig(d_mlp=self.d_mlp, dropout=self.dropout)


@dataclass(frozen=True, kw_only=True)
class PairingSetup(HeadsSetup):
    """S heads, or S searches and R retrievals.

    Args:
        model: `multi_head`, or `compositional`.
        n_retrievals: R of compositional attention; multi-head attention has one for each head.
        d_selection: width of its value queries and value keys; None for that of a head.
    """

    n_retrievals: int
    d_selection: int | None = None

    metrics: ClassVar = {
        "accuracy": Metric("share of right answers", percent=True),
        "log_likelihood": Metric("mean log-probability of a target", units="nats"),
    }
    at_once: ClassVar = 200

    def models(self) -> tuple[str, ...]:
        return MODELS

    @property
    def attention(self) -> HeadedConfig:
        """That of every block."""
        if self.model == "multi_head":
            return mechanisms.AttentionConfig(n_heads=self.n_heads, d_head=self.d_head)
        return mechanisms.CompositionalAttentionConfig(
            n_searches=self.n_heads,
            n_retrievals=self.n_retrievals,
            d_head=self.d_head,
            d_selection=self.d_selection,
        )

    def scores(self, output: Any, batch: Batch[Any], split: str) -> Scores:
        """Of a single target, output [batch, 1, answer]: whether it is the most probable answer."""
        correct = (output.argmax(-1) == batch.targets)[:, 0].float()
        every = correct.new_ones(len(batch))
        likelihood = log_likelihood(output, batch)
        return {"accuracy": (correct, every), "log_likelihood": (likelihood, every)}

    def inapplicable(self) -> frozenset[str]:
        """Multi-head attention has no retrievals of its own."""
        compositional = self.model == "compositional"
        return frozenset() if compositional else frozenset({"n_retrievals", "d_selection"})


def log_likelihood(
    output: Float[Tensor, "batch pos answer"], batch: Batch[Any]
) -> Float[Tensor, " batch"]:
    """The sum over the targets that count, in nats."""
    of_targets = output.float().log_softmax(-1).gather(-1, batch.targets[..., None])[..., 0]
    return of_targets.where(batch.mask, 0).sum(1)
