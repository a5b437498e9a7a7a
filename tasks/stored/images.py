"""Image classification, several data sets at once: Mittal et al. 2021, "Compositional Attention".

One network learns to classify CIFAR-10, Fashion-MNIST, SVHN and equilateral triangles; with every
image it is told which data set it is from. Any other data set of images can join them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from tasks.batch import Batch
from tasks.common import Key, require_int
from tasks.finite import ExampleSet, balanced_order, small
from tasks.finite_task import FiniteTask
from tasks.stored.bundled import BUNDLED_IMAGES, write_digits
from tasks.stored.opening import Table, open_stored, require_splits
from tasks.triangles import Triangles, TrianglesConfig

if TYPE_CHECKING:
    from PIL.Image import Image

_HUB = {
    "cifar10": ("uoft-cs/cifar10", "plain_text"),
    "fashion_mnist": ("zalando-datasets/fashion_mnist", "fashion_mnist"),
    "svhn": ("ufldl-stanford/svhn", "cropped_digits"),
}
_TRIANGLES = "triangles"
_ROWS = 1000  # that are read at a time


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """Which images they are. The default data sets are the paper's.

    Attributes:
        sources: the data sets, each once: "cifar10", "fashion_mnist", "svhn"; "triangles", which
            are drawn; or, in `folder`, any other one.
        folder: where each data set has a folder of its name, with what `save_to_disk` wrote,
            parquet files or images as SPLIT/CLASS/FILE; its splits are `train` and `test`.
            `BUNDLED_IMAGES`: has "digits", scikit-learn's, written there when first asked for.
            None: Hugging Face's cache, or its hub.
        image_size: height and width in pixels, 8 to 256. Larger images are shrunk, their sides in
            proportion, by averaging; smaller ones are put on a black ground.
        n_valid: how many images of each stored data set's `train` are held out for `valid`.
        triangles: which triangles, if they are among the sources; they have a `valid` of their own.
        seed: chooses what is held out, and the order, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.
    """

    sources: tuple[str, ...] = (*_HUB, _TRIANGLES)
    folder: str | None = None
    image_size: int = 32
    n_valid: int = 2_000
    triangles: TrianglesConfig = field(default_factory=TrianglesConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.folder is not None and (not isinstance(self.folder, str) or not self.folder):
            raise ValueError(f"folder={self.folder!r}: allowed are None and the path of a folder")
        names = isinstance(self.sources, tuple) and all(
            isinstance(one, str) and one and Path(one).name == one for one in self.sources
        )
        if not names or not self.sources or len(set(self.sources)) < len(self.sources):
            raise ValueError(
                f"sources={self.sources!r}: allowed is a tuple of different names, without slashes"
            )
        known = (*_HUB, _TRIANGLES)
        if self.folder is None and (others := [one for one in self.sources if one not in known]):
            raise ValueError(
                f"sources={self.sources!r} without folder: allowed are {', '.join(known)}; "
                f"to read {', '.join(others)}, set folder"
            )
        require_int("image_size", self.image_size, 8, 256)
        require_int("n_valid", self.n_valid, 1, 10**6)
        require_int("seed", self.seed, 0, 2**32 - 1)


class Images(FiniteTask[tuple[Tensor, Tensor]]):
    """Images of several data sets.

    Splits: `train`; `valid`, held out from the data sets' training images; `test`, their test
    images. In `train` the data sets take turns, so each occurs equally often, however large it is;
    every prefix of `valid` and `test` has them in proportion.

    A batch holds inputs, a tuple of image [batch, 3, height, width] float32 from 0 to 1 and
    data set [batch] int64, an index into the config's `sources`; targets [batch, 1] int64, the
    class, counted from 0 in each data set; mask [batch, 1], all True; and the latents (int64)
    `dataset` [batch]: the index once more;
    `label` [batch]: the class;
    `row` [batch]: which row of the stored split, or which of the triangles, the image is.

    The images of a split are kept in memory, a byte per colour and pixel: 700 MB for the paper's
    `train`.
    """

    SPLITS: ClassVar = ("train", "valid", "test")

    def __init__(self, config: ImagesConfig) -> None:
        # How large images are, and what else there is, does not change what is held out.
        super().__init__(key=Key(_Choice(config.seed)))
        self.config = config

    @cached_property
    def classes(self) -> tuple[tuple[str, ...], ...]:
        """The names of each data set's classes.

        Raises:
            FileNotFoundError: a data set is not there; says what to fetch and where to put it.
            ValueError: a data set is not of images and classes.
        """
        return tuple(source.classes for source in self._sources)

    @property
    def n_classes(self) -> tuple[int, ...]:
        """The number of each data set's classes. Raises as `classes` does."""
        return tuple(len(names) for names in self.classes)

    def chance(self, split: str) -> dict[str, float]:
        """Return, for each data set, the share of the class that a split has most often.

        Raises:
            ValueError: `split` is unknown.
        """
        latents = self._examples(split).latents
        found = {}
        for number, name in enumerate(self.config.sources):
            counts = latents["label"][latents["dataset"] == number].long().bincount()
            found[name] = (counts.max() / counts.sum()).item()
        return found

    def groups(self, batch: Batch[tuple[Tensor, Tensor]]) -> dict[str, Bool[Tensor, " batch"]]:
        """Return which images are of which data set, by the names of the config's `sources`."""
        dataset = batch.latents["dataset"]
        return {name: dataset == number for number, name in enumerate(self.config.sources)}

    def score(
        self, logits: Float[Tensor, "batch 1 class"], batch: Batch[tuple[Tensor, Tensor]]
    ) -> dict[str, Float[Tensor, " batch"]]:
        """Return whether the most probable class is right.

        Args:
            logits: [batch, 1, class], with as many classes as the data set that has most of them.
            batch: the batch that they answer.

        Returns:
            `correct` [batch]: 1 where it is right, else 0.

        Raises:
            ValueError: `logits` has another shape.
        """
        expected = (len(batch), 1, max(self.n_classes))
        if tuple(logits.shape) != expected:
            raise ValueError(f"logits of shape {tuple(logits.shape)}: allowed is {expected}")
        return {"correct": (logits.argmax(-1) == batch.targets)[:, 0].float()}

    @cached_property
    def _sources(self) -> "list[_Stored | _Drawn]":
        config = self.config
        return [
            _Drawn(config.triangles)
            if name == _TRIANGLES
            else _Stored(name, config.folder, config.n_valid, self._key)
            for name in config.sources
        ]

    def _make(self, split: str) -> ExampleSet[tuple[Tensor, Tensor]]:
        labels = [source.labels(split) for source in self._sources]
        dataset = np.repeat(np.arange(len(labels)), [len(some) for some in labels])
        order = np.arange(len(dataset))
        if split != "train":
            order = balanced_order(dataset, self._key.generator(f"/order/{split}"))

        size = self.config.image_size
        pixels = np.zeros((len(dataset), 3, size, size), np.uint8)
        images = chain.from_iterable(source.images(split) for source in self._sources)
        for here, image in zip(pixels, images, strict=True):
            _paint(image, here)

        shown, label = small(dataset[order]), small(np.concatenate(labels)[order])
        row = np.concatenate([source.rows(split) for source in self._sources])[order]
        return ExampleSet(
            inputs=(torch.from_numpy(order), shown),
            targets=label,
            latents={"dataset": shown, "label": label, "row": torch.from_numpy(row)},
            show=partial(_show, torch.from_numpy(pixels)),
        )

    def _groups(self, train: ExampleSet[tuple[Tensor, Tensor]]) -> list[Int[np.ndarray, " member"]]:
        dataset = train.inputs[1].numpy()
        return [np.flatnonzero(dataset == number) for number in range(len(self.config.sources))]


@dataclass(frozen=True)
class _Choice:
    """What decides on the images that are held out."""

    seed: int


class _Stored:
    """A data set that others made."""

    def __init__(self, name: str, folder: str | None, n_valid: int, key: Key) -> None:
        self._name = name
        self._n_valid = n_valid
        self._key = key
        place = None if folder is None else Path(folder).expanduser() / name
        if place is not None and folder == BUNDLED_IMAGES and name == "digits":
            write_digits(place)
        hub, subset = _HUB.get(name, (None, None))
        self._tables: Mapping[str, Table] = open_stored(
            name,
            folder=place,
            setting="folder",
            place=f"FOLDER/{name}",
            hub=hub,
            subset=subset,
        )
        require_splits(name, self._tables, ("train", "test"))
        self._image, self._label = self._columns()
        self.classes: tuple[str, ...] = tuple(self._tables["train"].features[self._label].names)
        self._numbers: dict[str, np.ndarray] = {}

    def rows(self, split: str) -> Int[np.ndarray, " row"]:
        """Return which rows of the stored split it has, in ascending order."""
        n = len(self._every_label(split))
        if split == "test":
            return np.arange(n)
        require_int("n_valid", self._n_valid, 1, n - 1)
        order = self._key.generator(f"/valid/{self._name}").permutation(n)
        chosen = order[: self._n_valid] if split == "valid" else order[self._n_valid :]
        return np.sort(chosen)

    def labels(self, split: str) -> Int[np.ndarray, " row"]:
        """Return the class of each row."""
        return self._every_label(split)[self.rows(split)]

    def images(self, split: str) -> "Iterator[Image]":
        """Return the image of each row."""
        import datasets

        kind = datasets.Image(mode="RGB")
        table = self._tables[_stored_split(split)].select_columns(self._image)
        # What is not wanted is not decoded.
        table = table.cast_column(self._image, datasets.Image(decode=False))
        encoded = (one for rows in table.iter(_ROWS) for one in rows[self._image])
        wanted = np.zeros(len(self._every_label(split)), bool)
        wanted[self.rows(split)] = True
        for one, is_wanted in zip(encoded, wanted, strict=True):
            if is_wanted:
                yield kind.decode_example(one)

    def _every_label(self, split: str) -> Int[np.ndarray, " row"]:
        """The class of each row of the stored split."""
        theirs = _stored_split(split)
        if theirs not in self._numbers:
            table = self._tables[theirs].select_columns(self._label)
            found = np.concatenate([rows[self._label] for rows in table.iter(_ROWS)])
            if found.min() < 0:
                raise ValueError(f"{self._name} has rows of {theirs} without a class")
            self._numbers[theirs] = found
        return self._numbers[theirs]

    def _columns(self) -> tuple[str, str]:
        """Return the names of the columns with the images and with their classes."""
        import datasets

        features = [self._tables[split].features or {} for split in ("train", "test")]
        images, labels = (
            [name for name, feature in features[0].items() if isinstance(feature, kind)]
            for kind in (datasets.Image, datasets.ClassLabel)
        )
        if "label" in labels:
            labels = ["label"]
        if len(images) != 1 or len(labels) != 1:
            raise ValueError(
                f"{self._name} has the columns {features[0]}: allowed are one of the type Image, "
                "and one of the type ClassLabel, or one of them named label"
            )
        theirs = [one.get(labels[0]) for one in features]
        if theirs[0] != theirs[1]:
            raise ValueError(
                f"{self._name} has other classes in train, {theirs[0]}, than in test, {theirs[1]}: "
                "allowed are the same"
            )
        return images[0], labels[0]


class _Drawn:
    """The triangles."""

    classes = ("other", "equilateral")

    def __init__(self, config: TrianglesConfig) -> None:
        self._task = Triangles(config)

    def rows(self, split: str) -> Int[np.ndarray, " row"]:
        """Return the numbers of the triangles of a split."""
        return np.arange(self._task.size(split))

    def labels(self, split: str) -> Int[np.ndarray, " row"]:
        """Return the class of each."""
        return np.concatenate([batch.targets[:, 0].numpy() for batch in self._batches(split)])

    def images(self, split: str) -> "Iterator[Image]":
        """Return the picture of each."""
        from PIL import Image

        for batch in self._batches(split):
            for picture in (batch.inputs[:, 0] * 255).byte().numpy():
                yield Image.fromarray(picture)

    def _batches(self, split: str) -> Iterator[Batch]:
        """Return each triangle once; of `train`, the first epoch."""
        size = self._task.size(split)
        for index in range(-(-size // _ROWS)):
            yield self._task.batch(split, index, _ROWS)[: size - index * _ROWS]


def _stored_split(split: str) -> str:
    return "test" if split == "test" else "train"


def _paint(image: "Image", pixels: UInt8[np.ndarray, "3 height width"]) -> None:
    """Put an image into the middle of a black square; shrink it if it is larger."""
    from PIL.Image import Resampling

    size = pixels.shape[-1]
    image = image.convert("RGB")
    image.thumbnail((size, size), Resampling.BOX, reducing_gap=None)
    left, top = (size - image.width) // 2, (size - image.height) // 2
    pixels[:, top : top + image.height, left : left + image.width] = np.moveaxis(
        np.asarray(image), -1, 0
    )


def _show(
    pixels: UInt8[Tensor, "image 3 height width"], inputs: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Look images up, and make numbers from 0 to 1 of their bytes."""
    place, dataset = inputs
    chosen = pixels.index_select(0, place.cpu()).to(place.device)
    return chosen.float().div_(255), dataset
