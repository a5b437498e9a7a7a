"""What both tasks of the quasi-attention study share: how the model attends, and where."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import mechanisms
import probes
from mechanisms.quasi_attention import Centring, Composition
from studies import engine
from studies.engine.setup import Scores
from tasks import Batch

COMPOSITION = ("affinity", "gate", "affinity_centring", "gate_centring", "doubled")
"""The settings of how CoDA composes its weights."""


@dataclass(frozen=True, kw_only=True)
class QuasiSetup(engine.Setup):
    """A model that attends by softmax, linear attention, HYLA, or by CoDA (Tay et al. 2019).

    Args:
        model: one of `mechanisms.ATTENTION_VARIANTS`, or `coda`.
        d_model: width of the residual streams, or of all layers.
        n_heads: each is d_model / n_heads wide.
        affinity: CoDA's composition function of the affinity E.
        gate: its composition function of the dissimilarity N.
        affinity_centring: over what E is centred.
        gate_centring: over what N is centred.
        doubled: whether the gate is doubled.

    Attributes:
        shown: the place whose matrices are drawn.

    Raises:
        ValueError: a value is not allowed.
    """

    d_model: int
    n_heads: int
    affinity: Composition = "tanh"
    gate: Composition = "sigmoid"
    affinity_centring: Centring = "none"
    gate_centring: Centring = "none"
    doubled: bool = False

    shown: ClassVar[str]

    def __post_init__(self):
        super().__post_init__()
        if self.n_heads < 1 or self.d_model % self.n_heads:
            raise ValueError(f"n_heads must divide d_model = {self.d_model}, got {self.n_heads}")

    def models(self) -> tuple[str, ...]:
        return (*mechanisms.ATTENTION_VARIANTS, "coda")

    def check(self) -> None:
        super().check()
        composition = self.composition
        if composition is not None and composition.centres_matrix and not self.may_centre_matrix:
            raise ValueError(
                "affinity_centring and gate_centring must be one of none, row: attention with "
                "heads has no matrix of all its queries, or would show a decoder's what comes later"
            )

    @property
    def may_centre_matrix(self) -> bool:
        """Whether E and N can be centred over all queries."""
        return False

    @property
    def composition(self) -> mechanisms.QuasiAttentionConfig | None:
        """How CoDA composes its weights; None for the others."""
        if self.model != "coda":
            return None
        return mechanisms.QuasiAttentionConfig(
            **{name: getattr(self, name) for name in COMPOSITION}
        )

    def attention(self) -> mechanisms.AttentionConfig | mechanisms.CodaAttentionConfig:
        """The attention with heads."""
        sizes: Any = {"n_heads": self.n_heads, "d_head": self.d_model // self.n_heads}
        if self.composition is None:
            return mechanisms.AttentionConfig.named(self.model, **sizes)
        return mechanisms.CodaAttentionConfig(composition=self.composition, **sizes)

    def inapplicable(self) -> frozenset[str]:
        return frozenset() if self.model == "coda" else frozenset(COMPOSITION)

    def scores(self, output: Any, batch: Batch[Any], split: str) -> Scores:
        right = self.sampler().score(output, batch)["correct"]  # pyright: ignore[reportAttributeAccessIssue]
        return {"accuracy": (right, torch.ones_like(right))}

    @abstractmethod
    def places(self, batch: Batch[Any]) -> dict[str, probes.AttentionPlace]:
        """Where the model attends."""
