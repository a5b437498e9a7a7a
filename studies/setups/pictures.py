"""Setups: Sort-of-CLEVR, triangles, stored images, ESBN's relations (Mittal et al. 2021)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import mechanisms
import tasks
from studies import engine
from studies.engine import ALL, Selection
from studies.engine.setup import References, Role
from studies.setups.pairing import NORM_EPSILON, PairingSetup

if TYPE_CHECKING:
    import torch
    from jaxtyping import Int
    from torch import Tensor

    from tasks import Batch

QUESTION_TYPES = tuple(tasks.SORT_OF_CLEVR_QUESTIONS)
PAPER_SOURCES = ("cifar10", "fashion_mnist", "svhn", "triangles")

ESBN_WINDOWS = {"rmts": (2, 2, 2)}
"""Sizes of the groups of images that are normalised together; all images of other rules are."""


@dataclass(frozen=True, kw_only=True)
class PictureSetup(PairingSetup):
    """A transformer with shared blocks over image patches, read out at a class token.

    Args:
        patch_size: height and width of a patch.
        dropout: rate for hidden activations and outputs of feed-forward layers.
    """

    patch_size: int

    selection: ClassVar = Selection("valid", "accuracy")

    @property
    def splits(self) -> Mapping[str, Role]:
        return {"valid": "in", "test": "in"}

    @property
    @abstractmethod
    def ends(self) -> Mapping[str, Any]:
        """Sizes of inputs and outputs: arguments of `mechanisms.PatchTransformerConfig`."""

    @property
    def feed_forward(self) -> mechanisms.FeedForwardConfig:
        return replace(super().feed_forward, output_dropout=self.dropout)

    def build(self, generator: torch.Generator) -> mechanisms.PatchTransformer:
        config = mechanisms.PatchTransformerConfig(
            **self.ends,
            **self.blocks,
            patch_size=self.patch_size,
            positions="fast_sinusoidal",
            final_norm=False,
            norm_epsilon=NORM_EPSILON,
            initialization="uniform",
        )
        return mechanisms.PatchTransformer(config, generator=generator)


@dataclass(frozen=True, kw_only=True)
class SortOfClevrSetup(PictureSetup):
    """Questions about a picture; the question is beside every token."""

    task: tasks.SortOfClevrConfig

    task_type: ClassVar = tasks.SortOfClevr
    reported: ClassVar = engine.reported("mittal_2021", "sort_of_clevr")

    @property
    def ends(self) -> Mapping[str, Any]:
        answers = len(tasks.SORT_OF_CLEVR_ANSWERS)
        question = {"d_condition": 18, "condition": "beside"}
        return {"image_size": 75, "n_channels": 3, "d_output": answers} | question

    def cluster(self, batch: Batch[Any]) -> Int[Tensor, " batch"]:
        """The picture of each question: questions about one picture are not independent."""
        return batch.latents["image"]

    def references(self, split: str) -> References:
        """The most frequent answer to each question, without the picture."""
        by_type = self.sampler().chance(split)
        # Every question type is asked equally often.
        return {"chance": {"accuracy": {ALL: sum(by_type.values()) / len(by_type)} | by_type}}


@dataclass(frozen=True, kw_only=True)
class TrianglesSetup(PictureSetup):
    """Classification of triangles: equilateral or not."""

    task: tasks.TrianglesConfig

    task_type: ClassVar = tasks.Triangles
    reported: ClassVar = engine.reported("mittal_2021", "triangles")

    @property
    def ends(self) -> Mapping[str, Any]:
        size = self.task.image_size
        return {"image_size": size, "n_channels": 1, "d_output": 2, "embedding": "mlp"}

    def references(self, split: str) -> References:
        """One half; a classifier of the longest side alone gets more."""
        return {"chance": {"accuracy": {ALL: self.sampler().chance}}}


@dataclass(frozen=True, kw_only=True)
class ImagesSetup(PictureSetup):
    """Image classification on several data sets, with a class token and a read-out for each."""

    task: tasks.ImagesConfig

    task_type: ClassVar = tasks.Images
    reported: ClassVar = engine.reported("mittal_2021", "images")

    def prepare(self) -> None:
        """Write bundled images, and fail now if other images are missing."""
        _ = self.sampler().classes

    @property
    def ends(self) -> Mapping[str, Any]:
        n_classes = self.sampler().n_classes
        image = {"image_size": self.task.image_size, "n_channels": 3, "embedding": "mlp"}
        return image | {"d_output": n_classes, "d_readout": 128}

    def references(self, split: str) -> References:
        """The most frequent class of each data set."""
        return {"chance": {"accuracy": self.sampler().chance(split)}}


@dataclass(frozen=True, kw_only=True)
class EsbnSetup(PairingSetup):
    """A transformer over separately encoded images, with one answer about their relation.

    Args:
        task: the rule, and the number of objects withheld from training.
    """

    task: tasks.ESBNConfig

    task_type: ClassVar = tasks.ESBN
    selection: ClassVar = Selection("id", "accuracy")

    @property
    def splits(self) -> Mapping[str, Role]:
        """Training objects (`id`), and withheld ones (`ood`) if there are any."""
        return {"id": "in", "ood": "out"} if self.task.n_withheld else {"id": "in"}

    def build(self, generator: torch.Generator) -> mechanisms.RelationClassifier:
        n_answers, windows = self.sampler().n_answers, ESBN_WINDOWS.get(self.task.rule)
        config = mechanisms.RelationClassifierConfig(
            **self.blocks, d_output=n_answers, windows=windows
        )
        return mechanisms.RelationClassifier(config, generator=generator)

    def references(self, split: str) -> References:
        return {"chance": {"accuracy": {ALL: self.sampler().chance}}}
