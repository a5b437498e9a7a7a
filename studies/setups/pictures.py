"""Pictures in patches: Sort-of-CLEVR, triangles, stored images (Mittal et al. 2021)."""

from __future__ import annotations

import functools
import tempfile
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

import mechanisms
import tasks
from studies.engine import ALL, Selection
from studies.engine.setup import Role
from studies.setups.pairing import PairingSetup
from tasks import ImagesConfig, SortOfClevrConfig, TrianglesConfig

if TYPE_CHECKING:
    from tasks import Batch

# With ~, so that the settings, and with them the names of run folders, are the same everywhere.
BUNDLED_IMAGES = "~/.cache/modscope/images"
"""Where `digits`, which come with scikit-learn, are written when they are first asked for."""

_TYPES = tuple(tasks.SORT_OF_CLEVR_QUESTIONS)

PAPER_SORT_OF_CLEVR = {
    0: (0.986, 0.844, 0.649),
    1: (0.987, 0.868, 0.664),
    2: (0.988, 0.882, 0.669),
    3: (0.989, 0.898, 0.671),
    4: (0.986, 0.849, 0.648),
}
"""Table 1: accuracy of unary, binary and ternary questions, by `PairingSetup.paired`."""

PAPER_TRIANGLES = {0: 0.938, 1: 0.956, 2: 0.967, 4: 0.970}
"""Table 3: accuracy."""

PAPER_SOURCES = ("cifar10", "fashion_mnist", "svhn", "triangles")
PAPER_IMAGES = {
    0: (0.772, 0.894, 0.850, 0.968),
    1: (0.775, 0.899, 0.850, 0.970),
    2: (0.779, 0.899, 0.860, 0.972),
    3: (0.780, 0.899, 0.852, 0.971),
    4: (0.776, 0.900, 0.860, 0.969),
}
"""Table 2: accuracy of each of its data sets."""


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
        """Both have pictures of their own."""
        return {"valid": "in", "test": "in"}

    @abstractmethod
    def sampler(self) -> tasks.SortOfClevr | tasks.Triangles | tasks.Images:
        """The task; kept, since it makes its examples once."""

    def size(self, split: str) -> int:
        """Number of examples: of pictures, or of pairs of a picture and a question."""
        return self.sampler().size(split)

    @property
    @abstractmethod
    def ends(self) -> Mapping[str, Any]:
        """What the model reads and answers: see `mechanisms.PatchTransformerConfig`."""

    def build(self, generator: torch.Generator) -> mechanisms.PatchTransformer:
        """All blocks have the same weights."""
        config = mechanisms.PatchTransformerConfig(
            **self.ends,
            patch_size=self.patch_size,
            d_model=self.d_model,
            n_layers=self.n_layers,
            attention=self.attention,
            feed_forward=self.feed_forward,
            dropout=self.dropout,
        )
        return mechanisms.PatchTransformer(config, generator=generator)


@dataclass(frozen=True, kw_only=True)
class SortOfClevrSetup(PictureSetup):
    """A picture, and a question about it."""

    task: SortOfClevrConfig

    def sampler(self) -> tasks.SortOfClevr:
        """The task."""
        return _sort_of_clevr(self.task)

    @property
    def ends(self) -> Mapping[str, Any]:
        """The question is given with the picture."""
        answers = len(tasks.SORT_OF_CLEVR_ANSWERS)
        return {"image_size": 75, "n_channels": 3, "d_output": answers, "d_condition": 18}

    def groups(self, batch: Batch[Any]) -> dict[str, Bool[Tensor, " batch"]]:
        """The question types, and the subtypes of each."""
        kinds, subkinds = batch.latents["question_type"], batch.latents["subtype"]
        found = {name: kinds == kind for kind, name in enumerate(_TYPES)}
        for name, subtypes in tasks.SORT_OF_CLEVR_QUESTIONS.items():
            asked = {f"{name}: {one}": subkinds == number for number, one in enumerate(subtypes)}
            found |= {one: found[name] & is_asked for one, is_asked in asked.items()}
        return found

    def cluster(self, batch: Batch[Any]) -> Int[Tensor, " batch"]:
        """The picture that a question is about."""
        return batch.latents["image"]

    def references(self, split: str) -> dict[str, dict[str, dict[str, float]]]:
        """The most frequent answer to each question, without the picture."""
        known = self.sampler().chance(split)
        # Every question type is asked equally often.
        return {"chance": {"accuracy": {ALL: sum(known.values()) / len(known)} | known}}

    def paper(self) -> dict[str, dict[str, dict[str, float]]]:
        """Accuracy of each type."""
        known = PAPER_SORT_OF_CLEVR.get(self.paired, ())
        return {"accuracy": {"test": dict(zip(_TYPES, known, strict=False))}}


@dataclass(frozen=True, kw_only=True)
class TrianglesSetup(PictureSetup):
    """Is the triangle equilateral?"""

    task: TrianglesConfig

    def sampler(self) -> tasks.Triangles:
        """The task."""
        return _triangles(self.task)

    @property
    def ends(self) -> Mapping[str, Any]:
        """Two answers."""
        return {"image_size": self.task.image_size, "n_channels": 1, "d_output": 2}

    def groups(self, batch: Batch[Any]) -> dict[str, Bool[Tensor, " batch"]]:
        """Whether it is equilateral."""
        equilateral = batch.latents["equilateral"]
        return {"equilateral": equilateral, "other": ~equilateral}

    def references(self, split: str) -> dict[str, dict[str, dict[str, float]]]:
        """A half; what the longest side alone tells is more."""
        return {"chance": {"accuracy": {ALL: self.sampler().chance}}}

    def paper(self) -> dict[str, dict[str, dict[str, float]]]:
        """Accuracy."""
        known = {ALL: PAPER_TRIANGLES[self.paired]} if self.paired in PAPER_TRIANGLES else {}
        return {"accuracy": {"test": known}}


@dataclass(frozen=True, kw_only=True)
class ImagesSetup(PictureSetup):
    """Images of several data sets, with a read-out for each."""

    task: ImagesConfig

    def sampler(self) -> tasks.Images:
        """The task."""
        return _images(self.task)

    def prepare(self) -> None:
        """Write the digits, or miss other images."""
        _ = self.sampler().classes

    @property
    def ends(self) -> Mapping[str, Any]:
        """As many read-outs as data sets."""
        n_classes = self.sampler().n_classes
        return {"image_size": self.task.image_size, "n_channels": 3, "d_output": n_classes}

    def groups(self, batch: Batch[Any]) -> dict[str, Bool[Tensor, " batch"]]:
        """The data sets."""
        dataset = batch.latents["dataset"]
        return {name: dataset == number for number, name in enumerate(self.task.sources)}

    def references(self, split: str) -> dict[str, dict[str, dict[str, float]]]:
        """The most frequent class of each data set."""
        return {"chance": {"accuracy": self.sampler().chance(split)}}

    def paper(self) -> dict[str, dict[str, dict[str, float]]]:
        """Accuracy of each data set, if they are the paper's."""
        theirs = self.task.sources == PAPER_SOURCES
        known = PAPER_IMAGES.get(self.paired, ()) if theirs else ()
        return {"accuracy": {"test": dict(zip(PAPER_SOURCES, known, strict=False))}}


_sort_of_clevr = functools.lru_cache(maxsize=4)(tasks.SortOfClevr)
_triangles = functools.lru_cache(maxsize=4)(tasks.Triangles)


@functools.lru_cache(maxsize=4)
def _images(config: ImagesConfig) -> tasks.Images:
    if config.folder == BUNDLED_IMAGES:
        _write_digits(Path(BUNDLED_IMAGES).expanduser() / "digits")
    return tasks.Images(config)


def _write_digits(place: Path) -> None:
    """Write scikit-learn's handwritten digits, 8 x 8 pixels, the last 297 of them as `test`."""
    if place.exists():
        return
    import datasets
    from sklearn.datasets import load_digits

    found = cast(Any, load_digits())
    names = [str(name) for name in found.target_names]
    kinds = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
    )
    images = (found.images * (255 / 16)).astype(np.uint8)
    parts = datasets.DatasetDict()
    for split, rows in (("train", slice(None, 1500)), ("test", slice(1500, None))):
        columns = {"image": list(images[rows]), "label": found.target[rows].tolist()}
        parts[split] = datasets.Dataset.from_dict(columns, features=kinds)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as part:
        written = Path(part) / place.name
        shown = not datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        parts.save_to_disk(str(written))
        if shown:
            datasets.enable_progress_bars()
        # Where it fails another process was faster.
        with suppress(OSError):
            written.rename(place)
