"""Setup: an encoder-decoder with the same attention mechanism throughout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

import mechanisms
import probes
from studies import engine
from studies.setups.quasi_transformer import QuasiTransformerSetup
from tasks import Batch


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderSetup(QuasiTransformerSetup):
    """An encoder-decoder from a sequence to a sequence, by default with tensor2tensor's parts.

    An answer is right if every token is right; for this, teacher forcing and greedy decoding agree.

    Args:
        one_embedding: see `mechanisms.EncoderDecoderConfig`.
    """

    one_embedding: bool = False

    shown: ClassVar = "cross"
    padding: ClassVar[int] = 0
    """The id of padding, in source and target."""
    begin: ClassVar[int] = 1
    """The target id before the first token."""
    end: ClassVar[int] = 2
    """The target id after the last token."""

    def architecture(
        self, n_source: int, n_target: int, mechanism: QuasiTransformerSetup | None = None
    ) -> mechanisms.EncoderDecoderConfig:
        """The config of the model.

        Args:
            n_source: number of source ids.
            n_target: number of target ids.
            mechanism: the setup whose attention it has; None for this one.
        """
        blocks = (mechanism or self).blocks
        attention = decoder_attention = blocks["attention"]
        if isinstance(attention, mechanisms.CodaAttentionConfig):
            decoder_attention = replace(attention, composition=_by_row(attention.composition))
        return mechanisms.EncoderDecoderConfig(
            d_input=n_source,
            d_output=n_target,
            n_layers=self.n_layers,
            decoder_attention=decoder_attention,
            one_embedding=self.one_embedding,
            begin=self.begin,
            end=self.end,
            padding=self.padding,
            shared=False,
            **blocks,
        )

    def answer(self, model: nn.Module, batch: Batch[Any]) -> Tensor:
        return engine.answer(model, batch).argmax(-1)

    def places(self, batch: Batch[Any]) -> dict[str, probes.AttentionPlace]:
        """Encoder, causal decoder and cross-attention, with masks that leave out padding."""
        source, target = (tokens != self.padding for tokens in batch.inputs)
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
