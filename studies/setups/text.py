"""A text, token by token, and the causal transformers that predict it."""

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
from studies.engine import ALL, Metric, Selection, kept, reported
from studies.engine.setup import Role, Scores
from studies.setups.pairing import HeadsSetup, PairingSetup

if TYPE_CHECKING:
    from torch import Tensor

    from mechanisms.transformer import HeadedConfig
    from tasks import Batch

Positions = Literal["relative", "rotary"]


def perplexity_in_words(value: float) -> str:
    """A perplexity with four digits, or as a whole number."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


@dataclass(frozen=True, kw_only=True)
class TextSetup(HeadsSetup):
    """A causal transformer over the tokens of a text; the loss on `valid` chooses checkpoints.

    Args:
        task: the text, and how it is cut into windows, which are the examples. Its `length` bounds
            the distances that are told apart, up to 64.
    """

    task: tasks.TextConfig

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
    at_once: ClassVar = 16

    @property
    def splits(self) -> Mapping[str, Role]:
        return {"valid": "in", "test": "in"}

    def sampler(self) -> tasks.Text:
        return kept(tasks.Text, self.task)

    def size(self, split: str) -> int:
        """Number of windows."""
        return self.sampler().size(split)

    def prepare(self) -> None:
        """Write the text that comes with Python, or miss another one; encode it once."""
        _ = self.sampler().vocabulary_size

    def scores(self, output: Tensor, batch: Batch[Any], split: str) -> Scores:
        return self.sampler().figures(output.float(), batch, split)

    def references(self, split: str) -> dict[str, dict[str, dict[str, float]]]:
        """What predicting how often each token occurs in training gives."""
        known = self.sampler().baseline_figures(split)
        return {"frequencies": {metric: {ALL: value} for metric, value in known.items()}}

    def config(
        self, attention: HeadedConfig, *, d_mlp: int, biased: bool, shared: bool
    ) -> mechanisms.TransformerConfig:
        """The transformer.

        Args:
            attention: of every block.
            d_mlp: width of feed-forward layers.
            biased: whether it has T5's bias; else attention has positions of its own.
            shared: whether all blocks have the same weights.
        """
        size = self.sampler().vocabulary_size
        return mechanisms.TransformerConfig(
            d_input=size,
            d_output=size,
            d_model=self.d_model,
            n_layers=self.n_layers,
            attention=attention,
            feed_forward=mechanisms.FeedForwardConfig(d_mlp=d_mlp, dropout=self.dropout),
            inputs="tokens",
            positions="relative" if biased else "none",
            max_distance=max(2, min(64, self.task.length)) if biased else None,
            causal=True,
            shared=shared,
        )


@dataclass(frozen=True, kw_only=True)
class LanguageSetup(TextSetup):
    """As many parameters as softmax attention with relative positions and the same sizes has.

    Args:
        model: the attention; see `models`.
        positions: `relative`, T5's bias, or what Transformer-XL's attention has of its own; or
            `rotary`.
        d_mlp: of softmax attention with relative positions; see `own_d_mlp`.
    """

    positions: Positions = "relative"

    def models(self) -> tuple[str, ...]:
        """The mechanisms that positions of this kind can be given to."""
        either = (*mechanisms.ATTENTION_VARIANTS, "coda")
        return (
            either if self.positions == "rotary" else (*either, "compositional", "transformer_xl")
        )

    @property
    def attention(self) -> HeadedConfig:
        """That of every block.

        CoDA's gate is centred by row: it would start nearly closed, and is causal that way.
        Compositional attention has half as many retrievals as searches.
        """
        n_heads, d_head, rotary = self.n_heads, self.d_head, self.positions == "rotary"
        match self.model:
            case "coda":
                by_row = mechanisms.QuasiAttentionConfig(gate_centring="row")
                return mechanisms.CodaAttentionConfig(
                    n_heads=n_heads, d_head=d_head, composition=by_row, rotary=rotary
                )
            case "compositional":
                return mechanisms.CompositionalAttentionConfig(
                    n_searches=n_heads, n_retrievals=max(1, n_heads // 2), d_head=d_head
                )
            case "transformer_xl":
                return mechanisms.RelativeAttentionConfig(n_heads=n_heads, d_head=d_head)
            case _:
                return mechanisms.AttentionConfig.named(
                    self.model, n_heads=n_heads, d_head=d_head, rotary=rotary
                )

    def build(self, generator: torch.Generator) -> mechanisms.Transformer:
        """A transformer whose blocks have weights of their own."""
        return mechanisms.Transformer(self._with_d_mlp(self.own_d_mlp()), generator=generator)

    def own_d_mlp(self) -> int:
        """The d_mlp with which its number of parameters is nearest to `reference_parameters`.

        Raises:
            ValueError: it has more parameters even with d_mlp=1.
        """
        asked = self.reference_parameters()
        least, next_ = (_parameters_of(self._with_d_mlp(d_mlp)) for d_mlp in (1, 2))
        d_mlp = 1 + round((asked - least) / (next_ - least))
        if d_mlp < 1:
            raise ValueError(
                f"d_mlp must leave room for the {least} parameters that {self.model} attention "
                f"needs with d_mlp=1, got {self.d_mlp}, which gives softmax attention {asked}"
            )
        return d_mlp

    def reference_parameters(self) -> int:
        """How many parameters softmax attention with relative positions has."""
        reference = replace(self, model="softmax", positions="relative")
        return _parameters_of(reference._with_d_mlp(self.d_mlp))

    def _with_d_mlp(self, d_mlp: int) -> mechanisms.TransformerConfig:
        biased = self.positions == "relative" and self.model != "transformer_xl"
        return self.config(self.attention, d_mlp=d_mlp, biased=biased, shared=False)


@dataclass(frozen=True, kw_only=True)
class TextPairingSetup(TextSetup, PairingSetup):
    """The text of Mittal et al. 2021, with T5's bias."""

    at_once: ClassVar = 8
    reported: ClassVar = reported("mittal_2021", "text")

    def build(self, generator: torch.Generator) -> mechanisms.Transformer:
        """A transformer whose blocks share their weights."""
        config = self.config(self.attention, d_mlp=self.d_mlp, biased=True, shared=True)
        return mechanisms.Transformer(config, generator=generator)


@functools.lru_cache(maxsize=64)
def _parameters_of(config: mechanisms.TransformerConfig) -> int:
    # No memory is taken for them.
    with torch.device("meta"):
        return probes.count_parameters(mechanisms.Transformer(config))
