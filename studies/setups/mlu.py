"""Setup: arithmetic lines, answered by an encoder-decoder (Tay et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

import mechanisms
import probes
import tasks
from studies import engine
from studies.engine.setup import References
from studies.setups.quasi_attention import QuasiSetup
from tasks import MLU_CHARACTERS, MLU_OPERATORS, Batch, MLUConfig, MLULinesConfig

_PAD, _BEGIN, _END = (MLU_CHARACTERS.index(mark) for mark in ("<pad>", "<bos>", "<eos>"))


@dataclass(frozen=True, kw_only=True)
class MluSetup(QuasiSetup):
    """An encoder-decoder with the same attention mechanism throughout.

    An answer is right if every character is right; for this, teacher forcing and greedy decoding
    agree.

    Args:
        task: the lines.
        d_mlp: hidden units of the feed-forward layers.
        n_layers: layers of the encoder, and of the decoder.
        activation: activation of the feed-forward layers.
        one_embedding: see `mechanisms.EncoderDecoderConfig`.
        dropout: dropout rate of the embeddings and of what each part of a block adds.
        attention_dropout: that of pairs of characters.
        mlp_dropout: that of hidden units of the feed-forward layers.
        label_smoothing: probability that the loss expects of all wrong characters together.

    Raises:
        ValueError: label_smoothing is outside [0, 1).
    """

    task: MLUConfig | MLULinesConfig
    d_mlp: int
    n_layers: int
    activation: Literal["gelu", "relu"] = "gelu"
    one_embedding: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    mlp_dropout: float = 0.0
    label_smoothing: float = 0.0

    shown: ClassVar = "cross"
    reported: ClassVar = engine.reported("tay_2019", "coda_arithmetic")

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}")

    def sampler(self) -> Any:
        is_fixed = isinstance(self.task, MLULinesConfig)
        return engine.cached(tasks.MLULines if is_fixed else tasks.MLU, self.task)

    @property
    def splits(self) -> dict[str, Any]:
        held_out = {"ood": "out"} if isinstance(self.task, MLUConfig) else {}
        return {"id": "in"} | held_out

    @property
    def may_centre_matrix(self) -> bool:
        return True

    def build(self, generator: torch.Generator) -> mechanisms.EncoderDecoder:
        attention = decoder_attention = self.attention(self.attention_dropout)
        if isinstance(attention, mechanisms.CodaAttentionConfig):
            decoder_attention = replace(attention, composition=_by_row(attention.composition))
        config = mechanisms.EncoderDecoderConfig(
            d_input=len(MLU_CHARACTERS),
            d_output=len(MLU_CHARACTERS),
            d_model=self.d_model,
            n_layers=self.n_layers,
            attention=attention,
            decoder_attention=decoder_attention,
            feed_forward=mechanisms.FeedForwardConfig(
                d_mlp=self.d_mlp, activation=self.activation, dropout=self.mlp_dropout
            ),
            one_embedding=self.one_embedding,
            dropout=self.dropout,
            begin=_BEGIN,
            end=_END,
            padding=_PAD,
            shared=False,
        )
        return mechanisms.EncoderDecoder(config, generator=generator)

    def answer(self, model: nn.Module, batch: Batch[Any]) -> Tensor:
        return engine.answer(model, batch).argmax(-1)

    def loss(self, model: nn.Module, batch: Batch[Any], step: int) -> Tensor:
        logits = engine.answer(model, batch).float()
        return engine.cross_entropy(logits, batch, smoothing=self.label_smoothing)

    def groups(self, batch: Batch[Any]) -> dict[str, Tensor]:
        """By operator, and by whether both operands are the same variable, which may cancel out."""
        latents = batch.latents
        by_operator = {sign: latents["operator"] == n for n, sign in enumerate(MLU_OPERATORS)}
        same = latents["left"] == latents["right"]
        return by_operator | {"one variable": same, "two variables": ~same}

    def references(self, split: str) -> References:
        """The share of each group's most frequent answer, estimated from 10,000 training lines."""
        batch = self.sampler().batch("train", 0, 10_000)
        result = batch.latents["result"]
        members = self.groups(batch).items()
        results = {engine.ALL: result} | {name: result[mask] for name, mask in members}
        counts = {name: group.unique(return_counts=True)[1] for name, group in results.items()}
        share = {name: group.max().item() / group.sum().item() for name, group in counts.items()}
        return {"chance": {"accuracy": share}}

    def places(self, batch: Batch[Any]) -> dict[str, probes.AttentionPlace]:
        """Encoder, causal decoder and cross-attention, with masks that leave out padding."""
        source, target = (tokens != _PAD for tokens in batch.inputs)
        query = batch.mask[:, :, None]
        hooks_and_masks = {
            "encoder": ("encoder_blocks.*.attn.", source[:, :, None] & source[:, None]),
            "decoder": ("decoder_blocks.*.attn.", (query & target[:, None]).tril()),
            "cross": ("decoder_blocks.*.cross_attn.", query & source[:, None]),
        }
        return {name: probes.AttentionPlace(*args) for name, args in hooks_and_masks.items()}


def _by_row(composition: mechanisms.QuasiAttentionConfig) -> mechanisms.QuasiAttentionConfig:
    """The composition of a decoder, with means over rows instead of the matrix."""
    names = ("affinity_centring", "gate_centring")
    return replace(
        composition, **{name: "row" for name in names if getattr(composition, name) == "matrix"}
    )
