"""Image classification, several data sets at once: Mittal et al. 2021, "Compositional Attention".

One network learns to classify CIFAR-10, Fashion-MNIST, SVHN and equilateral triangles; the data set
of an image is part of the input. Other data sets of images can be added.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from tasks.answers import is_correct
from tasks.batch import Batch
from tasks.common import Key, SeedConfig, require_bool, require_int, require_path
from tasks.finite import ExampleSet, balanced_order, small
from tasks.finite_task import FiniteTask
from tasks.stored.image_sources import HUB, Generated, Source, open_images
from tasks.triangles import TrianglesConfig

if TYPE_CHECKING:
    from PIL.Image import Image

_TRIANGLES = "triangles"


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """Settings of image classification. The default data sets are the paper's.

    Attributes:
        sources: the data sets, each once: "cifar10", "fashion_mnist", "svhn"; "triangles", which
            are generated; or any other data set in `folder`.
        folder: has a folder for each data set, by its name, with its authors' files (idx of
            Fashion-MNIST, .mat of SVHN, the binary version of CIFAR-10; see `read_image_files`),
            the output of `save_to_disk`, parquet files or images as SPLIT/CLASS/FILE; the splits
            are `train` and `test`.
            `BUNDLED_IMAGES` has scikit-learn's "digits", written there on first use. None: Hugging
            Face's cache, or its hub.
        image_size: height and width in pixels, 8 to 256. Larger images are downsampled by
            averaging, with their aspect ratio; smaller ones are centred on black.
        n_valid: number of images of each stored data set's `train` that are held out for `valid`.
        augmented: whether the images of `train`, but for triangles, are shifted by up to an eighth
            of their size (a random crop after padding, black) and flipped left to right with
            probability 1/2, as in the paper.
        triangles: settings of the triangles, which have their own `valid`.
        seed: seeds the order and what is held out, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> triangles = TrianglesConfig(n_train=10, n_valid=2, n_test=2)
        >>> task = Images(ImagesConfig(sources=("triangles",), triangles=triangles))
        >>> image, dataset = task.batch("test", 0, 2).inputs
        >>> image.shape, dataset
        (torch.Size([2, 3, 32, 32]), tensor([0, 0]))
    """

    sources: tuple[str, ...] = (*HUB, _TRIANGLES)
    folder: str | None = None
    image_size: int = 32
    n_valid: int = 2_000
    augmented: bool = False
    triangles: TrianglesConfig = field(default_factory=TrianglesConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        require_path("folder", self.folder)
        are_names = isinstance(self.sources, tuple) and all(
            isinstance(name, str) and name and Path(name).name == name for name in self.sources
        )
        if not are_names or not self.sources or len(set(self.sources)) < len(self.sources):
            raise ValueError(
                f"sources must be a tuple of different names without slashes, got {self.sources!r}"
            )
        known = (*HUB, _TRIANGLES)
        if self.folder is None and (others := [name for name in self.sources if name not in known]):
            raise ValueError(
                f"sources must be of {', '.join(known)} if folder is None, got {self.sources!r}; "
                f"to read {', '.join(others)}, set folder"
            )
        require_int("image_size", self.image_size, 8, 256)
        require_int("n_valid", self.n_valid, 1, 10**6)
        require_bool("augmented", self.augmented)
        require_int("seed", self.seed, 0, 2**32 - 1)


class Images(FiniteTask[tuple[Tensor, Tensor]]):
    """Classification of the images of several data sets.

    Splits: `train`; `valid`, held out from the data sets' training images; `test`, their test
    images. In `train` the data sets take turns, so each occurs equally often, whatever its size;
    every prefix of `valid` and `test` has them in proportion.

    A batch has inputs, a tuple of image [batch, 3, height, width] float32 from 0 to 1 and
    data set [batch] int64, an index into the config's `sources`; targets [batch, 1] int64, the
    class, counted from 0 in each data set; mask [batch, 1], all True; and the latents (int64)
    `dataset` [batch]: the index of the data set;
    `label` [batch]: the class;
    `row` [batch]: the number of the image in the stored split or among the triangles.

    The images of a split are kept in memory, a byte per pixel and channel: 700 MB for the paper's
    `train`.

    Example:
        >>> Images(ImagesConfig(sources=("digits",), folder=BUNDLED_IMAGES)).batch("test", 0, 32)
    """

    SPLITS: ClassVar = ("train", "valid", "test")

    def __init__(self, config: ImagesConfig) -> None:
        # What is held out does not depend on the image size or on other sources.
        augment = self._shift_and_flip if config.augmented else None
        super().__init__(key=Key(SeedConfig(config.seed)), augment=augment)
        self.config = config

    @cached_property
    def classes(self) -> tuple[tuple[str, ...], ...]:
        """The names of each data set's classes.

        Raises:
            FileNotFoundError: a data set is missing; says what to fetch and where to put it.
            ValueError: a data set does not have images and classes.
        """
        return tuple(source.classes for source in self._sources)

    @property
    def n_classes(self) -> tuple[int, ...]:
        """The number of each data set's classes. Raises as `classes` does."""
        return tuple(len(names) for names in self.classes)

    def chance(self, split: str) -> dict[str, float]:
        """Return, for each data set, the accuracy of predicting its most frequent class.

        Raises:
            ValueError: `split` is unknown.
        """
        latents = self._examples(split).latents
        chance = {}
        for index, name in enumerate(self.config.sources):
            counts = latents["label"][latents["dataset"] == index].long().bincount()
            chance[name] = (counts.max() / counts.sum()).item()
        return chance

    def groups(self, batch: Batch[tuple[Tensor, Tensor]]) -> dict[str, Bool[Tensor, " batch"]]:
        """Return, for each of the config's `sources`, the mask of its images."""
        dataset = batch.latents["dataset"]
        return {name: dataset == index for index, name in enumerate(self.config.sources)}

    def score(
        self, logits: Float[Tensor, "batch 1 class"], batch: Batch[tuple[Tensor, Tensor]]
    ) -> dict[str, Float[Tensor, " batch"]]:
        """Return `correct` [batch]: 1 where the most probable class is the target, else 0.

        Args:
            logits: [batch, 1, class], with the largest number of classes of any data set.
            batch: the batch that was answered.

        Raises:
            ValueError: `logits` has another shape.
        """
        return {"correct": is_correct(logits, batch, max(self.n_classes))}

    @cached_property
    def _sources(self) -> "list[Source]":
        config = self.config
        return [
            Generated(config.triangles)
            if name == _TRIANGLES
            else open_images(name, config.folder, config.n_valid, self._key)
            for name in config.sources
        ]

    def _make(self, split: str) -> ExampleSet[tuple[Tensor, Tensor]]:
        labels = [source.labels(split) for source in self._sources]
        dataset = np.repeat(np.arange(len(labels)), [len(of_source) for of_source in labels])
        order = np.arange(len(dataset))
        if split != "train":
            order = balanced_order(dataset, self._key.generator(f"/order/{split}"))

        size = self.config.image_size
        pixels = np.zeros((len(dataset), 3, size, size), np.uint8)
        images = chain.from_iterable(source.images(split) for source in self._sources)
        for canvas, image in zip(pixels, images, strict=True):
            _paint(image, canvas)

        dataset, label = small(dataset[order]), small(np.concatenate(labels)[order])
        row = np.concatenate([source.rows(split) for source in self._sources])[order]
        return ExampleSet(
            inputs=(torch.from_numpy(order), dataset),
            targets=label,
            latents={"dataset": dataset, "label": label, "row": torch.from_numpy(row)},
            show=partial(_look_up, torch.from_numpy(pixels)),
        )

    def _shift_and_flip(
        self, batch: Batch[tuple[Tensor, Tensor]], index: int
    ) -> Batch[tuple[Tensor, Tensor]]:
        """Augment a batch; the random choices follow from its index."""
        images, dataset = batch.inputs
        size, n = self.config.image_size, len(batch)
        margin = size // 8
        generator = self._key.generator(f"/augment/{index}")
        shift = torch.from_numpy(generator.integers(0, 2 * margin, (2, n, 1), endpoint=True))
        flips = torch.from_numpy(generator.random((n, 1)) < 0.5)
        shift, flips = shift.to(images.device), flips.to(images.device)
        if _TRIANGLES in self.config.sources:
            kept = (dataset == self.config.sources.index(_TRIANGLES))[:, None]
            shift, flips = shift.masked_fill(kept, margin), flips & ~kept
        place = torch.arange(size, device=images.device)
        rows, columns = shift + torch.stack([place.expand(n, -1), place.expand(n, -1)])
        columns = torch.where(flips, columns.flip(1), columns)
        padded = torch.nn.functional.pad(images, (margin,) * 4)
        example = torch.arange(n, device=images.device)[:, None, None]
        # Indices around the channels put these last.
        moved = padded[example, :, rows[:, :, None], columns[:, None]].movedim(-1, 1)
        return replace(batch, inputs=(moved.contiguous(), dataset))

    def _groups(self, train: ExampleSet[tuple[Tensor, Tensor]]) -> list[Int[np.ndarray, " member"]]:
        dataset = train.inputs[1].numpy()
        return [np.flatnonzero(dataset == index) for index in range(len(self.config.sources))]


def _paint(image: "Image", pixels: UInt8[np.ndarray, "3 height width"]) -> None:
    """Paint an image in the centre of a black square, downsampled if it is larger."""
    from PIL.Image import Resampling

    size = pixels.shape[-1]
    image = image.convert("RGB")
    image.thumbnail((size, size), Resampling.BOX, reducing_gap=None)
    left, top = (size - image.width) // 2, (size - image.height) // 2
    pixels[:, top : top + image.height, left : left + image.width] = np.moveaxis(
        np.asarray(image), -1, 0
    )


def _look_up(
    pixels: UInt8[Tensor, "image 3 height width"], inputs: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the images with the given indices, as floats from 0 to 1."""
    index, dataset = inputs
    # On the CPU: a GPU multiplies by the rounded reciprocal, so its last bits would be others.
    images = pixels.index_select(0, index.cpu()).float().div_(255)
    return images.to(index.device), dataset
