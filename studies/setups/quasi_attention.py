"""What both tasks of the quasi-attention study share: how the model attends, and where."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import xarray as xr
from jaxtyping import Bool, Int
from torch import Tensor, nn

import mechanisms
import probes
from mechanisms.quasi_attention import Centring, Composition
from studies.engine import Setup
from studies.engine.setup import Scores
from tasks import Batch

PAIRS = ("example", "query_pos", "key_pos")
"""Dims of what is known of every pair of tokens."""


@dataclass(frozen=True, kw_only=True)
class QuasiSetup(Setup):
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
        """The variants of attention, and CoDA."""
        return (*mechanisms.ATTENTION_VARIANTS, "coda")

    def check(self) -> None:
        """Also that nothing is centred over what a model lacks."""
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
            affinity=self.affinity,
            gate=self.gate,
            affinity_centring=self.affinity_centring,
            gate_centring=self.gate_centring,
            doubled=self.doubled,
        )

    def attention(self) -> mechanisms.AttentionConfig | mechanisms.CodaAttentionConfig:
        """The attention with heads."""
        n_heads, d_head = self.n_heads, self.d_model // self.n_heads
        if (composition := self.composition) is None:
            return mechanisms.AttentionConfig.named(self.model, n_heads=n_heads, d_head=d_head)
        return mechanisms.CodaAttentionConfig(
            n_heads=n_heads, d_head=d_head, composition=composition
        )

    def inapplicable(self) -> frozenset[str]:
        """How weights are composed means something to CoDA alone."""
        names = ("affinity", "gate", "affinity_centring", "gate_centring", "doubled")
        return frozenset() if self.model == "coda" else frozenset(names)

    def scores(self, output: Any, batch: Batch[Any], split: str) -> Scores:
        """Whether the whole answer is right."""
        right = self.sampler().score(output, batch)["correct"]  # pyright: ignore[reportAttributeAccessIssue]
        return {"accuracy": (right, torch.ones_like(right))}

    @abstractmethod
    def places(self) -> dict[str, str]:
        """Where the model attends, and the start of its hooks' names there, perhaps a glob."""

    @abstractmethod
    def pairs(self, batch: Batch[Any]) -> dict[str, Bool[Tensor, "batch query_pos key_pos"]]:
        """The pairs of query and key at each place that are no padding, nor hidden by a mask."""

    @abstractmethod
    def signs(self, batch: Batch[Any]) -> dict[str, Int[Tensor, "batch query_pos key_pos"]]:
        """The planted signs at each place; none where nobody knows them."""

    @abstractmethod
    def words(self, batch: Batch[Any], example: int) -> tuple[list[str], list[str]]:
        """What the queries and keys of `shown` are, one word for each, "" for padding."""

    def captured(
        self, model: nn.Module, batches: Sequence[Batch[Any]], *hooks: str
    ) -> dict[str, xr.Dataset]:
        """What hooks say at each place: [example, layer, head, query_pos, key_pos].

        With `valid` [example, query_pos, key_pos], and `sign`, if signs are planted.
        """
        found = {}
        for place, start in self.places().items():
            dims = ("example", "head", "query_pos", "key_pos")
            wanted = {hook: probes.Quantity(f"{start}hook_{hook}", dims=dims) for hook in hooks}
            data = probes.capture(model, batches, wanted)[list(hooks)]  # pyright: ignore[reportArgumentType]
            data = data if "layer" in data.dims else data.expand_dims(layer=[0])
            for name, of_pairs in (("valid", self.pairs), ("sign", self.signs)):
                known = [of_pairs(batch) for batch in batches]
                if place in known[0]:
                    data[name] = (PAIRS, torch.cat([one[place] for one in known]).cpu().numpy())
            found[place] = data.assign_coords(head=range(data.sizes["head"]))
        return found
