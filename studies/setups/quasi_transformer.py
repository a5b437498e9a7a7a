"""What transformers of the quasi-attention studies share: sizes, dropout and label smoothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

import mechanisms
from studies import engine
from studies.setups.quasi_attention import QuasiSetup
from tasks import Batch

TINY: dict[str, Any] = {
    "d_model": 128,
    "n_heads": 4,
    "d_mlp": 512,
    "n_layers": 2,
    "activation": "relu",
    "initialization": "xavier_uniform",
    "attention_biases": False,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "mlp_dropout": 0.1,
    "label_smoothing": 0.1,
}
"""`transformer_tiny` of tensor2tensor, which sections 3.5 and 3.6 of Tay et al. 2019 follow."""


def tiny_training(n_steps: int, batch_size: int, **more: Any) -> engine.TrainingConfig:
    """The training of `transformer_tiny`; its last weights are tested."""
    return engine.TrainingConfig(
        n_steps=n_steps,
        batch_size=batch_size,
        learning_rate=2.0 * (TINY["d_model"] * 8000) ** -0.5,
        schedule="inverse_sqrt",
        warmup_steps=8000,
        beta2=0.997,
        epsilon=1e-9,
        checkpoint="last",
        **more,
    )


@dataclass(frozen=True, kw_only=True)
class QuasiTransformerSetup(QuasiSetup):
    """A transformer with the same attention mechanism throughout.

    Args:
        d_mlp: hidden units of the feed-forward layers.
        n_layers: number of layers, of the encoder and of the decoder if it has both.
        activation: activation of the feed-forward layers.
        initialization: `lecun_normal`; or `xavier_uniform`, as in tensor2tensor.
        attention_biases: whether the projections of all attentions have biases.
        dropout: dropout rate of the embeddings and of what each part of a block adds.
        attention_dropout: that of pairs of tokens.
        mlp_dropout: that of hidden units of the feed-forward layers.
        label_smoothing: probability that the loss expects of all wrong answers together.

    Raises:
        ValueError: label_smoothing is outside [0, 1).
    """

    d_mlp: int
    n_layers: int
    activation: Literal["gelu", "relu"] = "gelu"
    initialization: Literal["lecun_normal", "xavier_uniform"] = "lecun_normal"
    attention_biases: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    mlp_dropout: float = 0.0
    label_smoothing: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}")

    @property
    def may_centre_matrix(self) -> bool:
        return True

    @property
    def blocks(self) -> dict[str, Any]:
        """Arguments that the configs of all transformers share."""
        attention = self.attention(self.attention_dropout)
        return {
            "d_model": self.d_model,
            "attention": replace(attention, bias=self.attention_biases),
            "feed_forward": mechanisms.FeedForwardConfig(
                d_mlp=self.d_mlp, activation=self.activation, dropout=self.mlp_dropout
            ),
            "initialization": self.initialization,
            "dropout": self.dropout,
        }

    def loss(self, model: nn.Module, batch: Batch[Any], step: int) -> Tensor:
        logits = engine.answer(model, batch).float()
        return engine.cross_entropy(logits, batch, smoothing=self.label_smoothing)
