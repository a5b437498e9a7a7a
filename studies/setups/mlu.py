"""Setup: arithmetic lines, answered by an encoder-decoder (Tay et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

import mechanisms
import probes
import tasks
from studies import engine
from studies.engine.setup import References
from studies.setups.quasi_transformer import QuasiTransformerSetup
from tasks import MLU_CHARACTERS, MLU_OPERATORS, Batch, MLUConfig, MLULinesConfig

_PAD, _BEGIN, _END = (MLU_CHARACTERS.index(mark) for mark in ("<pad>", "<bos>", "<eos>"))

UNIVERSAL, ADAPTIVE = "universal", "adaptive_universal"
"""Universal transformers (Dehghani et al. 2019) as in tensor2tensor, with softmax attention."""


@dataclass(frozen=True, kw_only=True)
class MluSetup(QuasiTransformerSetup):
    """An encoder-decoder with the same attention mechanism throughout, or a universal transformer.

    An answer is right if every character is right; for this, teacher forcing and greedy decoding
    agree.

    Args:
        task: the lines.
        n_steps: steps of a universal transformer, in the encoder and in the decoder.
        max_steps: the most steps of a column of an adaptive universal transformer.
        ponder_weight: weight in the loss of its ponder cost, the mean over the characters of the
            encoder plus that of the decoder. (tensor2tensor counts padding too, of which its
            batches of lines of similar length have little.)
        one_embedding: see `mechanisms.EncoderDecoderConfig`.

    Raises:
        ValueError: ponder_weight is negative.
    """

    task: MLUConfig | MLULinesConfig
    n_steps: int = 8
    max_steps: int = 4
    ponder_weight: float = 0.01
    one_embedding: bool = False

    shown: ClassVar = "cross"
    reported: ClassVar = engine.reported("tay_2019", "coda_arithmetic")

    def __post_init__(self):
        super().__post_init__()
        if self.ponder_weight < 0:
            raise ValueError(f"ponder_weight must be at least 0, got {self.ponder_weight}")

    def models(self) -> tuple[str, ...]:
        return (*super().models(), UNIVERSAL, ADAPTIVE)

    def sampler(self) -> Any:
        is_fixed = isinstance(self.task, MLULinesConfig)
        return engine.cached(tasks.MLULines if is_fixed else tasks.MLU, self.task)

    @property
    def splits(self) -> dict[str, Any]:
        held_out = {"ood": "out"} if isinstance(self.task, MLUConfig) else {}
        return {"id": "in"} | held_out

    def build(self, generator: torch.Generator) -> mechanisms.EncoderDecoder:
        is_universal = self.model in (UNIVERSAL, ADAPTIVE)
        mechanism = replace(self, model="softmax") if is_universal else self
        blocks = mechanism.blocks
        attention = decoder_attention = blocks["attention"]
        if isinstance(attention, mechanisms.CodaAttentionConfig):
            decoder_attention = replace(attention, composition=_by_row(attention.composition))
        config = mechanisms.EncoderDecoderConfig(
            d_input=len(MLU_CHARACTERS),
            d_output=len(MLU_CHARACTERS),
            n_layers=self.n_layers,
            decoder_attention=decoder_attention,
            one_embedding=self.one_embedding,
            begin=_BEGIN,
            end=_END,
            padding=_PAD,
            shared=False,
            **blocks,
        )
        if is_universal:
            config = replace(
                config,
                n_layers=self.n_steps if self.model == UNIVERSAL else self.max_steps,
                shared=True,
                positions_each_step=True,
                step_signal="learned",
            )
        if self.model == ADAPTIVE:
            config = replace(config, halting=mechanisms.HaltingConfig(rule="tensor2tensor"))
        return mechanisms.EncoderDecoder(config, generator=generator)

    def answer(self, model: nn.Module, batch: Batch[Any]) -> Tensor:
        return engine.answer(model, batch).argmax(-1)

    def loss(self, model: nn.Module, batch: Batch[Any], step: int) -> Tensor:
        if self.model != ADAPTIVE:
            return super().loss(model, batch, step)
        network = cast(mechanisms.EncoderDecoder, model)
        logits, (of_encoder, of_decoder) = network.forward_with_cost(*batch.inputs)
        loss = engine.cross_entropy(logits.float(), batch, smoothing=self.label_smoothing)
        cost = of_encoder[batch.inputs[0] != _PAD].mean() + of_decoder[batch.mask].mean()
        return loss + self.ponder_weight * cost

    def inapplicable(self) -> frozenset[str]:
        of_others = {"n_layers", "n_steps", "max_steps", "ponder_weight"}
        if self.model == UNIVERSAL:
            of_others -= {"n_steps"}
        elif self.model == ADAPTIVE:
            of_others -= {"max_steps", "ponder_weight"}
        else:
            of_others -= {"n_layers"}
        return super().inapplicable() | of_others

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
