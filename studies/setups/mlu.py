"""Setup: arithmetic lines, answered by an encoder-decoder (Tay et al. 2019)."""

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
    """An encoder-decoder with the same attention mechanism throughout.

    An answer is right if every character is right; for this, teacher forcing and greedy decoding
    agree.

    Args:
        task: the lines.
        d_mlp: hidden units of the feed-forward layers.
        n_layers: layers of the encoder, and of the decoder.
    """

    task: MLUConfig
    d_mlp: int
    n_layers: int

    task_type: ClassVar = tasks.MLU
    shown: ClassVar = "cross"
    reported: ClassVar = engine.reported("tay_2019", "coda_arithmetic")

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
