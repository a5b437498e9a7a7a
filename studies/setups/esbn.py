"""Relations between images, some of them of objects that training lacks (Mittal et al. 2021)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor

import mechanisms
import tasks
from studies.engine import ALL, Selection
from studies.engine.setup import Role
from studies.setups.pairing import PairingSetup
from tasks import ESBNConfig

if TYPE_CHECKING:
    from tasks import Batch

WINDOWS = {
    "same_different": None,
    "rmts": (2, 2, 2),
    "distribution_of_three": (3, 6),
    "identity_rules": (3, 6),
}
"""Images of a problem that are normalised together, None: all; pairs, or a row and the rest.

It makes `rmts` easy: of two images that are the same, nothing is left; all six together it is hard
to learn at all.
"""


@dataclass(frozen=True, kw_only=True)
class EsbnSetup(PairingSetup):
    """Images encoded one by one, and a transformer over their codes.

    Args:
        task: the rule, and how many objects training does not show.
    """

    task: ESBNConfig

    selection: ClassVar = Selection("id", "accuracy")

    @property
    def splits(self) -> Mapping[str, Role]:
        """Objects of training, and, if any are withheld, these."""
        return {"id": "in", "ood": "out"} if self.task.n_withheld else {"id": "in"}

    def sampler(self) -> tasks.ESBN:
        """The task."""
        return _sampler(self.task)

    def build(self, generator: torch.Generator) -> mechanisms.RelationClassifier:
        """One answer about all images."""
        config = mechanisms.RelationClassifierConfig(
            d_output=self.sampler().n_answers,
            attention=self.attention,
            feed_forward=self.feed_forward,
            d_model=self.d_model,
            n_layers=self.n_layers,
            windows=WINDOWS[self.task.rule],
        )
        return mechanisms.RelationClassifier(config, generator=generator)

    def groups(self, batch: Batch[Any]) -> dict[str, Bool[Tensor, " batch"]]:
        """The relations."""
        relation = batch.latents["relation"]
        return {name: relation == number for number, name in enumerate(self.sampler().relations)}

    def references(self, split: str) -> dict[str, dict[str, dict[str, float]]]:
        """One over the number of answers."""
        return {"chance": {"accuracy": {ALL: self.sampler().chance}}}


_sampler = functools.lru_cache(maxsize=32)(tasks.ESBN)
