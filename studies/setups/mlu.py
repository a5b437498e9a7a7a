"""Setup: arithmetic lines, answered by an encoder-decoder (Tay et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

import mechanisms
import tasks
from studies import engine
from studies.engine.setup import References
from studies.setups.encoder_decoder import EncoderDecoderSetup
from tasks import MLU_CHARACTERS, MLU_OPERATORS, Batch, MLUConfig, MLULinesConfig

UNIVERSAL, ADAPTIVE = "universal", "adaptive_universal"
"""Universal transformers (Dehghani et al. 2019) as in tensor2tensor, with softmax attention."""


@dataclass(frozen=True, kw_only=True)
class MluSetup(EncoderDecoderSetup):
    """Lines of arithmetic, answered by an encoder-decoder or a universal transformer.

    Args:
        task: the lines.
        n_steps: steps of a universal transformer, in the encoder and in the decoder.
        max_steps: the most steps of a column of an adaptive universal transformer.
        ponder_weight: weight in the loss of its ponder cost, the mean over the characters of the
            encoder plus that of the decoder. (tensor2tensor counts padding too, of which its
            batches of lines of similar length have little.)

    Raises:
        ValueError: ponder_weight is negative.
    """

    task: MLUConfig | MLULinesConfig
    n_steps: int = 8
    max_steps: int = 4
    ponder_weight: float = 0.01

    padding: ClassVar = MLU_CHARACTERS.index("<pad>")
    begin: ClassVar = MLU_CHARACTERS.index("<bos>")
    end: ClassVar = MLU_CHARACTERS.index("<eos>")
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
        n_ids = len(MLU_CHARACTERS)
        config = self.architecture(n_ids, n_ids, mechanism)
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

    def loss(self, model: nn.Module, batch: Batch[Any], step: int) -> Tensor:
        if self.model != ADAPTIVE:
            return super().loss(model, batch, step)
        network = cast(mechanisms.EncoderDecoder, model)
        logits, (of_encoder, of_decoder) = network.forward_with_cost(*batch.inputs)
        loss = engine.cross_entropy(logits.float(), batch, smoothing=self.label_smoothing)
        cost = of_encoder[batch.inputs[0] != self.padding].mean() + of_decoder[batch.mask].mean()
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
