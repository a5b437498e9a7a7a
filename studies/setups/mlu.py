"""Lines of arithmetic, and the encoder and decoder that answer them (Tay et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import mechanisms
import probes
import tasks
from studies import engine
from studies.engine.setup import References
from studies.setups.quasi_attention import QuasiSetup
from tasks import MLU_CHARACTERS, MLU_OPERATORS, Batch, MLUConfig

_PAD, _BEGIN, _END = (MLU_CHARACTERS.index(mark) for mark in ("<pad>", "<bos>", "<eos>"))


@dataclass(frozen=True, kw_only=True)
class MluSetup(QuasiSetup):
    """An encoder and a decoder, all of whose attention is of one kind.

    An answer is right if every character is; teacher-forced output decides it as greedy one does.

    Args:
        task: which lines.
        d_mlp: hidden units of the feed-forward layers.
        n_layers: of the encoder, and again of the decoder.
    """

    task: MLUConfig
    d_mlp: int
    n_layers: int

    kind: ClassVar = tasks.MLU
    shown: ClassVar = "cross"
    reported: ClassVar = engine.reported("tay_2019", "mlu")

    def build(self, generator: torch.Generator) -> mechanisms.EncoderDecoder:
        config = mechanisms.EncoderDecoderConfig(
            d_input=len(MLU_CHARACTERS),
            d_output=len(MLU_CHARACTERS),
            d_model=self.d_model,
            n_layers=self.n_layers,
            attention=self.attention(),
            feed_forward=mechanisms.FeedForwardConfig(d_mlp=self.d_mlp),
            begin=_BEGIN,
            end=_END,
            padding=_PAD,
            shared=False,
        )
        return mechanisms.EncoderDecoder(config, generator=generator)

    def answer(self, model: nn.Module, batch: Batch[Any]) -> Tensor:
        return engine.answer(model, batch).argmax(-1)

    def groups(self, batch: Batch[Any]) -> dict[str, Tensor]:
        """By operator, and by whether both operands are one variable, which may cancel out."""
        latents = batch.latents
        found = {sign: latents["operator"] == n for n, sign in enumerate(MLU_OPERATORS)}
        same = latents["left"] == latents["right"]
        return found | {"one variable": same, "two variables": ~same}

    def references(self, split: str) -> References:
        """The share of a group's most frequent answer, about: of 10,000 lines."""
        batch = self.sampler().batch("train", 0, 10_000)
        result = batch.latents["result"]
        every = {engine.ALL: result} | {name: result[of] for name, of in self.groups(batch).items()}
        counts = {name: some.unique(return_counts=True)[1] for name, some in every.items()}
        share = {name: some.max().item() / some.sum().item() for name, some in counts.items()}
        return {"chance": {"accuracy": share}}

    def places(self, batch: Batch[Any]) -> dict[str, probes.AttentionPlace]:
        """Self-attention, a decoder's to the left alone, and what is between both; no padding."""
        line, given = (part != _PAD for part in batch.inputs)
        asked = batch.mask[:, :, None]
        pairs = {
            "encoder": ("encoder_blocks.*.attn.", line[:, :, None] & line[:, None]),
            "decoder": ("decoder_blocks.*.attn.", (asked & given[:, None]).tril()),
            "cross": ("decoder_blocks.*.cross_attn.", asked & line[:, None]),
        }
        return {name: probes.AttentionPlace(*place) for name, place in pairs.items()}
