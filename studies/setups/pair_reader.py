"""What setups of pairs of texts share: decomposable attention, which aligns them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

import mechanisms
import probes
from studies.setups.quasi_attention import QuasiSetup
from tasks import Batch


@dataclass(frozen=True, kw_only=True)
class PairReaderSetup(QuasiSetup):
    """Decomposable attention: align two sequences, compare token by token, aggregate.

    Args:
        alignment: `heads`, where A attends to B and B to A with multi-head attention; or
            `networks`, the paper's base model for pairs, which aligns both with one matrix or with
            its softmax over rows and over columns.
        projection: F of `networks`: `linear`, with which CoDA can subtract, or `two_layers`, see
            `mechanisms.DecomposableAttentionConfig`.
        dropout: dropout probability of the input of every layer.

    Raises:
        ValueError: with `networks`, a model other than softmax attention or CoDA.
    """

    alignment: Literal["heads", "networks"] = "heads"
    projection: Literal["linear", "two_layers"] = "linear"
    dropout: float = 0.0

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
        headed, task = self.alignment == "heads", self.sampler()
        config = mechanisms.DecomposableAttentionConfig(
            d_input=task.vocabulary_size,
            d_output=len(task.classes),
            d_model=self.d_model,
            composition=None if headed else self.composition,
            projection=self.projection,
            attention=self.attention() if headed else None,
            padding=0,
            dropout=self.dropout,
        )
        return mechanisms.DecomposableAttention(config, generator=generator)

    def places(self, batch: Batch[Any]) -> dict[str, probes.AttentionPlace]:
        """`a`: A attends to B; with heads also `b`: B attends to A. With the planted signs."""
        sign: Tensor | None = batch.latents.get("sign")
        a, b = batch.inputs
        valid = (a != 0)[:, :, None] & (b != 0)[:, None]
        if self.alignment == "networks":
            return {"a": probes.AttentionPlace("", valid, sign)}
        turned = None if sign is None else sign.mT
        return {
            "a": probes.AttentionPlace("align_a.", valid, sign),
            "b": probes.AttentionPlace("align_b.", valid.mT, turned),
        }
