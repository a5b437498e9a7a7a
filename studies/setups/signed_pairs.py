"""Setup: pairs of sequences with planted signs, read by decomposable attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

import mechanisms
import probes
import tasks
from studies import engine
from studies.engine.setup import References
from studies.setups.quasi_attention import QuasiSetup
from tasks import Batch, SignedPairsConfig


@dataclass(frozen=True, kw_only=True)
class SignedPairsSetup(QuasiSetup):
    """Decomposable attention: align two sequences, compare token by token, aggregate.

    Args:
        task: the pairs.
        alignment: `heads`, where A attends to B and B to A with multi-head attention; or
            `networks`, the paper's base model for pairs, which aligns both with one matrix or with
            its softmax over rows and over columns.
        projection: F of `networks`: `linear`, with which CoDA can subtract, or `two_layers`, see
            `mechanisms.DecomposableAttentionConfig`.

    Raises:
        ValueError: with `networks`, a model other than softmax attention or CoDA.
    """

    task: SignedPairsConfig
    alignment: Literal["heads", "networks"] = "heads"
    projection: Literal["linear", "two_layers"] = "linear"

    task_type: ClassVar = tasks.SignedPairs
    shown: ClassVar = "a"

    def __post_init__(self):
        super().__post_init__()
        if self.alignment == "networks" and self.model not in ("softmax", "coda"):
            raise ValueError(
                f"with alignment networks, model must be softmax or coda, got {self.model!r}"
            )

    @property
    def may_centre_matrix(self) -> bool:
        return self.alignment == "networks"

    def inapplicable(self) -> frozenset[str]:
        of_other = {"n_heads", "scaled"} if self.alignment == "networks" else {"projection"}
        return super().inapplicable() | of_other

    def build(self, generator: torch.Generator) -> mechanisms.DecomposableAttention:
        headed = self.alignment == "heads"
        config = mechanisms.DecomposableAttentionConfig(
            d_input=self.sampler().vocabulary_size,
            d_output=2,
            d_model=self.d_model,
            composition=None if headed else self.composition,
            projection=self.projection,
            attention=self.attention() if headed else None,
            padding=0,
        )
        return mechanisms.DecomposableAttention(config, generator=generator)

    def groups(self, batch: Batch[Any]) -> dict[str, Tensor]:
        """By the absolute value of the signed sum."""
        size = batch.latents["total"].abs()
        small, large = size <= 3, size > 8
        return {"sum 1-3": small, "sum 4-8": ~small & ~large, "sum above 8": large}

    def references(self, split: str) -> References:
        names = (engine.ALL, *self.groups(self.sampler().batch("train", 0, 1)))
        return {"chance": {"accuracy": dict.fromkeys(names, 0.5)}}

    def places(self, batch: Batch[Any]) -> dict[str, probes.AttentionPlace]:
        """`a`: A attends to B; with heads also `b`: B attends to A."""
        sign = batch.latents["sign"]
        valid = torch.ones_like(sign, dtype=torch.bool)
        if self.alignment == "networks":
            return {"a": probes.AttentionPlace("", valid, sign)}
        return {
            "a": probes.AttentionPlace("align_a.", valid, sign),
            "b": probes.AttentionPlace("align_b.", valid.mT, sign.mT),
        }
