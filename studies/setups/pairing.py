"""Setups: multi-head or compositional attention in the same model (Mittal et al. 2021)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import mechanisms
from studies.engine import Metric, Setup
from studies.engine.setup import Scores

if TYPE_CHECKING:
    from torch import Tensor

    from mechanisms.protocols import AttentionProtocol
    from tasks import Batch

MODELS = ("multi_head", "compositional")
NORM_EPSILON = 1e-5
OF_COMPOSITIONAL = frozenset(
    {"n_retrievals", "d_selection", "scorer", "separate_value_keys", "chosen_by", "n_selected"}
)


@dataclass(frozen=True, kw_only=True)
class HeadsSetup(Setup):
    """Sizes of a transformer whose attention is chosen by a subclass.

    Args:
        n_layers, d_model, d_mlp: sizes of the transformer; SCAN's encoder and decoder have
            n_layers each.
        n_heads: number of heads or searches, each of width d_model / n_heads.
        dropout: rate for the places that the model drops, which its setup names; by default the
            hidden activations of feed-forward layers.

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
    @abstractmethod
    def attention(self) -> AttentionProtocol:
        """The attention of every block."""

    @property
    def blocks(self) -> dict[str, Any]:
        """Arguments that the configs of all transformers share."""
        return {
            "d_model": self.d_model,
            "n_layers": self.n_layers,
            "attention": self.attention,
            "feed_forward": mechanisms.FeedForwardConfig(d_mlp=self.d_mlp, dropout=self.dropout),
        }


@dataclass(frozen=True, kw_only=True)
class PairingSetup(HeadsSetup):
    """Multi-head attention with S heads, or compositional attention with S searches, R retrievals.

    The networks are those of the authors' code: relu, and LayerNorms with an epsilon of 1e-5.

    Args:
        model: `multi_head` or `compositional`.
        n_retrievals: R of compositional attention; multi-head attention has one per head.
        d_selection: width of value queries and value keys; None for the width of a head.
        scorer, separate_value_keys, n_selected: see `mechanisms.CompositionalAttentionConfig`.
        chosen_by: how retrievals are selected, `selection` there.
        own_value: whether each token's own value feeds the output, too.
    """

    n_retrievals: int
    d_selection: int | None = None
    scorer: Literal["dot", "mlp"] = "dot"
    separate_value_keys: bool = False
    chosen_by: Literal["softmax", "gumbel", "hard", "top_k"] = "softmax"
    n_selected: int | None = None
    own_value: bool = False

    metrics: ClassVar = {
        "accuracy": Metric("share of right answers", percent=True, best=1.0),
        "log_likelihood": Metric("mean log-probability of a target", units="nats"),
    }
    evaluation_batch_size: ClassVar = 200

    def models(self) -> tuple[str, ...]:
        return MODELS

    @property
    def attention(self) -> AttentionProtocol:
        n_heads, d_head = self.n_heads, self.d_model // self.n_heads
        if self.model == "multi_head":
            return mechanisms.AttentionConfig(
                n_heads=n_heads, d_head=d_head, own_value=self.own_value
            )
        return mechanisms.CompositionalAttentionConfig(
            n_searches=n_heads,
            n_retrievals=self.n_retrievals,
            d_head=d_head,
            d_selection=self.d_selection,
            scorer=self.scorer,
            separate_value_keys=self.separate_value_keys,
            selection=self.chosen_by,
            n_selected=self.n_selected,
            own_value=self.own_value,
        )

    @property
    def feed_forward(self) -> mechanisms.FeedForwardConfig:
        """The feed-forward layer of every block."""
        return mechanisms.FeedForwardConfig(
            d_mlp=self.d_mlp, activation="relu", dropout=self.dropout
        )

    @property
    def blocks(self) -> dict[str, Any]:
        return super().blocks | {"feed_forward": self.feed_forward}

    def scores(self, output: Tensor, batch: Batch[Any], split: str) -> Scores:
        """Whether all targets of an example are right, how many are, and their log-likelihood."""
        n_targets = batch.mask.sum(1).float()
        n_right = ((output.argmax(-1) == batch.targets) & batch.mask).sum(1).float()
        of_targets = output.float().log_softmax(-1).gather(-1, batch.targets[..., None])[..., 0]
        scores = {
            "accuracy": ((n_right == n_targets).float(), n_targets.new_ones(len(batch))),
            "token_accuracy": (n_right, n_targets),
            "log_likelihood": (of_targets.where(batch.mask, 0).sum(1), n_targets),
        }
        return {name: scores[name] for name in self.metrics}

    def inapplicable(self) -> frozenset[str]:
        """Settings that multi-head attention does not have."""
        return frozenset() if self.model == "compositional" else OF_COMPOSITIONAL
