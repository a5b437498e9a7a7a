"""Pictures: Sort-of-CLEVR, triangles, stored images, ESBN's relations (Mittal et al. 2021)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import mechanisms
import tasks
from studies import engine
from studies.engine import ALL, Selection
from studies.engine.setup import References, Role
from studies.setups.pairing import PairingSetup

if TYPE_CHECKING:
    import torch
    from jaxtyping import Int
    from torch import Tensor

    from tasks import Batch

QUESTION_TYPES = tuple(tasks.SORT_OF_CLEVR_QUESTIONS)
PAPER_SOURCES = ("cifar10", "fashion_mnist", "svhn", "triangles")

ESBN_WINDOWS = {
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
class PictureSetup(PairingSetup):
    """A transformer with shared blocks over patches, which answers at a class token.

    Args:
        patch_size: height and width of a patch.
    """

    patch_size: int

    selection: ClassVar = Selection("valid", "accuracy")

    @property
    def splits(self) -> Mapping[str, Role]:
        return {"valid": "in", "test": "in"}

    @property
    @abstractmethod
    def ends(self) -> Mapping[str, Any]:
        """What the model reads and answers: see `mechanisms.PatchTransformerConfig`."""

    def build(self, generator: torch.Generator) -> mechanisms.PatchTransformer:
        config = mechanisms.PatchTransformerConfig(
            **self.ends, **self.blocks, patch_size=self.patch_size, dropout=self.dropout
        )
        return mechanisms.PatchTransformer(config, generator=generator)


@dataclass(frozen=True, kw_only=True)
class SortOfClevrSetup(PictureSetup):
    """A picture, and a question about it, which is given with every patch."""

    task: tasks.SortOfClevrConfig

    kind: ClassVar = tasks.SortOfClevr
    reported: ClassVar = engine.reported("mittal_2021", "sort_of_clevr")

    @property
    def ends(self) -> Mapping[str, Any]:
        answers = len(tasks.SORT_OF_CLEVR_ANSWERS)
        return {"image_size": 75, "n_channels": 3, "d_output": answers, "d_condition": 18}

    def cluster(self, batch: Batch[Any]) -> Int[Tensor, " batch"]:
        """The picture that a question is about."""
        return batch.latents["image"]

    def references(self, split: str) -> References:
        """The most frequent answer to each question, without the picture."""
        known = self.sampler().chance(split)
        # Every question type is asked equally often.
        return {"chance": {"accuracy": {ALL: sum(known.values()) / len(known)} | known}}


@dataclass(frozen=True, kw_only=True)
class TrianglesSetup(PictureSetup):
    """Is the triangle equilateral?"""

    task: tasks.TrianglesConfig

    kind: ClassVar = tasks.Triangles
    reported: ClassVar = engine.reported("mittal_2021", "triangles")

    @property
    def ends(self) -> Mapping[str, Any]:
        return {"image_size": self.task.image_size, "n_channels": 1, "d_output": 2}

    def references(self, split: str) -> References:
        """A half; what the longest side alone tells is more."""
        return {"chance": {"accuracy": {ALL: self.sampler().chance}}}


@dataclass(frozen=True, kw_only=True)
class ImagesSetup(PictureSetup):
    """Images of several data sets, with a read-out for each."""

    task: tasks.ImagesConfig

    kind: ClassVar = tasks.Images
    reported: ClassVar = engine.reported("mittal_2021", "images")

    def prepare(self) -> None:
        """Write the digits, or miss other images."""
        _ = self.sampler().classes

    @property
    def ends(self) -> Mapping[str, Any]:
        n_classes = self.sampler().n_classes
        return {"image_size": self.task.image_size, "n_channels": 3, "d_output": n_classes}

    def references(self, split: str) -> References:
        """The most frequent class of each data set."""
        return {"chance": {"accuracy": self.sampler().chance(split)}}


@dataclass(frozen=True, kw_only=True)
class EsbnSetup(PairingSetup):
    """Images encoded one by one, and a transformer over their codes, with one answer about all.

    Args:
        task: the rule, and how many objects training does not show.
    """

    task: tasks.ESBNConfig

    kind: ClassVar = tasks.ESBN
    selection: ClassVar = Selection("id", "accuracy")

    @property
    def splits(self) -> Mapping[str, Role]:
        """Objects of training, and, if any are withheld, these."""
        return {"id": "in", "ood": "out"} if self.task.n_withheld else {"id": "in"}

    def build(self, generator: torch.Generator) -> mechanisms.RelationClassifier:
        n_answers, windows = self.sampler().n_answers, ESBN_WINDOWS[self.task.rule]
        config = mechanisms.RelationClassifierConfig(
            **self.blocks, d_output=n_answers, windows=windows
        )
        return mechanisms.RelationClassifier(config, generator=generator)

    def references(self, split: str) -> References:
        return {"chance": {"accuracy": {ALL: self.sampler().chance}}}
