"""Setups: causal transformers as language models of a text."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch

import mechanisms
import probes
import tasks
from studies.engine import ALL, Metric, Selection, reported
from studies.engine.setup import References, Role, Scores
from studies.setups.pairing import NORM_EPSILON, HeadsSetup, PairingSetup

if TYPE_CHECKING:
    from torch import Tensor

    from mechanisms.protocols import AttentionProtocol
    from tasks import Batch


def perplexity_in_words(value: float) -> str:
    """A perplexity with four digits, or as a whole number."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


@dataclass(frozen=True, kw_only=True)
class TextSetup(HeadsSetup):
    """A causal transformer over the tokens of a text; checkpoints are chosen by loss on `valid`.

    Args:
        task: the text and its division into windows, the examples.
        max_distance: largest distance that the relative position bias distinguishes, and its number
            of buckets; if it is larger than the windows, their length.

    Attributes:
        shared: whether all blocks have the same weights.
    """

    task: tasks.TextConfig
    max_distance: int = 64

    shared: ClassVar[bool]
    task_type: ClassVar = tasks.Text
    metrics: ClassVar = {
        "loss": Metric("mean loss of a token", "lower", units="nats"),
        "accuracy": Metric("share of tokens that are the most probable one", percent=True),
        "bits_per_byte": Metric("loss per byte of text", "lower", units="bits"),
        "perplexity": Metric(
            "perplexity per word, ends of lines included", "lower", transform=np.exp
        ),
        "token_perplexity": Metric("perplexity per token", "lower", transform=np.exp),
    }
    selection: ClassVar = Selection("valid", "loss")
    evaluation_batch_size: ClassVar = 16

    @property
    def splits(self) -> Mapping[str, Role]:
        return {"valid": "in", "test": "in"}

    def prepare(self) -> None:
        """Write the bundled text, or fail now if another one is missing; encode it once."""
        _ = self.sampler().vocabulary_size

    def scores(self, output: Tensor, batch: Batch[Any], split: str) -> Scores:
        return self.sampler().figures(output.float(), batch, split)

    def references(self, split: str) -> References:
        """The metrics of predicting the token frequencies of training."""
        baseline = self.sampler().baseline_figures(split)
        return {"frequencies": {metric: {ALL: value} for metric, value in baseline.items()}}

    @property
    def biased(self) -> bool:
        """Whether positions are T5's bias; otherwise the attention has positions of its own."""
        return True

    @property
    def config(self) -> mechanisms.TransformerConfig:
        """The config of the transformer."""
        size = self.sampler().vocabulary_size
        return mechanisms.TransformerConfig(
            **self.blocks,
            d_input=size,
            d_output=size,
            inputs="tokens",
            positions="relative" if self.biased else "none",
            max_distance=max(2, min(self.max_distance, self.task.length)) if self.biased else None,
            causal=True,
            shared=self.shared,
        )

    def build(self, generator: torch.Generator) -> mechanisms.Transformer:
        return mechanisms.Transformer(self.config, generator=generator)


@dataclass(frozen=True, kw_only=True)
class TextPairingSetup(TextSetup, PairingSetup):
    """The language models of Mittal et al. 2021: shared blocks, sinusoids, tied embeddings.

    Args:
        dropout: rate for the embedding and the outputs of attention and feed-forward layers.
    """

    shared: ClassVar = True
    evaluation_batch_size: ClassVar = 8
    reported: ClassVar = reported("mittal_2021", "text")

    @property
    def biased(self) -> bool:
        return False

    @property
    def feed_forward(self) -> mechanisms.FeedForwardConfig:
        return replace(super().feed_forward, dropout=0.0)

    @property
    def config(self) -> mechanisms.TransformerConfig:
        return replace(
            super().config,
            positions="sinusoidal",
            tied=True,
            scaled=True,
            dropout=self.dropout,
            norm_epsilon=NORM_EPSILON,
            initialization="mittal_2021",
        )

    def inapplicable(self) -> frozenset[str]:
        return super().inapplicable() | {"max_distance"}


@dataclass(frozen=True, kw_only=True)
class LanguageSetup(TextSetup):
    """Language models with equal numbers of parameters, matched by their `d_mlp`.

    Args:
        model: the attention; see `models`.
        positions: `relative` (T5's bias, or the relative positions of Transformer-XL's attention)
            or `rotary`.
        d_mlp: of the reference, softmax attention with relative positions; see `own_d_mlp`.
        activation: of the feed-forward layers; `swiglu` has no biases.
        attention_dropout: of `mechanisms.AttentionConfig`; other attention has none.
        tied: whether the read-out is the transposed embedding.
    """

    positions: Literal["relative", "rotary"] = "relative"
    activation: Literal["gelu", "swiglu"] = "gelu"
    attention_dropout: float = 0.0
    tied: bool = False

    shared: ClassVar = False

    def models(self) -> tuple[str, ...]:
        """The mechanisms that take these positions."""
        relative_only = () if self.positions == "rotary" else ("compositional", "transformer_xl")
        return (*mechanisms.ATTENTION_VARIANTS, "coda", *relative_only)

    @property
    def biased(self) -> bool:
        return self.positions == "relative" and self.model != "transformer_xl"

    @property
    def attention(self) -> AttentionProtocol:
        """The attention of every block.

        CoDA's gate is centred by row: without centring it starts nearly closed, and centring over
        the matrix is not causal. Compositional attention has half as many retrievals as searches.
        """
        heads: dict[str, Any] = {"n_heads": self.n_heads, "d_head": self.d_model // self.n_heads}
        rotary = self.positions == "rotary"
        match self.model:
            case "coda":
                by_row = mechanisms.QuasiAttentionConfig(gate_centring="row")
                return mechanisms.CodaAttentionConfig(**heads, composition=by_row, rotary=rotary)
            case "compositional":
                retrievals = max(1, self.n_heads // 2)
                return mechanisms.CompositionalAttentionConfig(
                    n_searches=self.n_heads, n_retrievals=retrievals, d_head=heads["d_head"]
                )
            case "transformer_xl":
                return mechanisms.RelativeAttentionConfig(**heads)
            case _:
                return mechanisms.AttentionConfig.named(
                    self.model, **heads, dropout=self.attention_dropout, rotary=rotary
                )

    @property
    def blocks(self) -> dict[str, Any]:
        feed_forward = mechanisms.FeedForwardConfig(
            d_mlp=self.d_mlp,
            activation=self.activation,
            bias=self.activation != "swiglu",
            dropout=self.dropout,
        )
        return super().blocks | {"feed_forward": feed_forward}

    @property
    def config(self) -> mechanisms.TransformerConfig:
        return replace(super().config, tied=self.tied)

    def inapplicable(self) -> frozenset[str]:
        has_dropout = self.model in mechanisms.ATTENTION_VARIANTS
        dropout = frozenset[str]() if has_dropout else frozenset({"attention_dropout"})
        return dropout if self.biased else dropout | {"max_distance"}

    def build(self, generator: torch.Generator) -> mechanisms.Transformer:
        return mechanisms.Transformer(
            replace(self, d_mlp=self.own_d_mlp()).config, generator=generator
        )

    def own_d_mlp(self) -> int:
        """The d_mlp whose number of parameters is nearest to `reference_parameters`.

        Raises:
            ValueError: the model has more parameters even with d_mlp=1.
        """
        target = self.reference_parameters()
        with_1, with_2 = (_parameters_of(replace(self, d_mlp=d_mlp).config) for d_mlp in (1, 2))
        d_mlp = 1 + round((target - with_1) / (with_2 - with_1))
        if d_mlp < 1:
            raise ValueError(
                f"d_mlp must leave room for the {with_1} parameters that {self.model} attention "
                f"needs with d_mlp=1, got {self.d_mlp}, which gives softmax attention {target}"
            )
        return d_mlp

    def reference_parameters(self) -> int:
        """The number of parameters of softmax attention with relative positions."""
        return _parameters_of(replace(self, model="softmax", positions="relative").config)


@functools.lru_cache(maxsize=64)
def _parameters_of(config: mechanisms.TransformerConfig) -> int:
    # Tensors on `meta` take no memory.
    with torch.device("meta"):
        return probes.count_parameters(mechanisms.Transformer(config))
