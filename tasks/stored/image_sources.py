"""Where the images of a data set come from: files, tables, or a generator."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from jaxtyping import Int

from tasks.batch import Batch
from tasks.common import Key, require_int
from tasks.stored.bundled import BUNDLED_IMAGES, write_digits
from tasks.stored.image_files import ImageFiles, read_image_files
from tasks.stored.opening import Table, open_stored, require_splits
from tasks.triangles import Triangles, TrianglesConfig

if TYPE_CHECKING:
    from PIL.Image import Image

HUB = {
    "cifar10": ("uoft-cs/cifar10", "plain_text"),
    "fashion_mnist": ("zalando-datasets/fashion_mnist", "fashion_mnist"),
    "svhn": ("ufldl-stanford/svhn", "cropped_digits"),
}
_ROWS = 1000  # rows that are read at a time


class Source(Protocol):
    """A data set of images."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each class."""
        ...

    def rows(self, split: str) -> Int[np.ndarray, " row"]:
        """Return the numbers of the images of a split in the stored one, ascending."""
        ...

    def labels(self, split: str) -> Int[np.ndarray, " row"]:
        """Return the class of each row."""
        ...

    def images(self, split: str) -> "Iterator[Image]":
        """Yield the image of each row."""
        ...


def open_images(name: str, folder: str | None, n_valid: int, key: Key) -> Source:
    """Open a stored data set.

    Raises:
        FileNotFoundError: it is missing; says what to fetch and where to put it.
        ValueError: it has another format.
    """
    path = None if folder is None else Path(folder).expanduser() / name
    if path is not None and folder == BUNDLED_IMAGES and name == "digits":
        write_digits(path)
    files = read_image_files(path) if path is not None and path.is_dir() else None
    if files is not None:
        return _Arrays(name, files, n_valid, key)
    return _Tables(name, path, n_valid, key)


class _Stored(ABC):
    """A stored data set, whose `train` is divided into `train` and `valid`."""

    def __init__(self, name: str, n_valid: int, key: Key) -> None:
        self._name = name
        self._n_valid = n_valid
        self._key = key

    @abstractmethod
    def _stored_labels(self, split: str) -> Int[np.ndarray, " row"]:
        """Return the class of each row of the stored split."""

    def rows(self, split: str) -> Int[np.ndarray, " row"]:
        """Return the rows of the stored split that belong to a split, ascending."""
        n = len(self._stored_labels(split))
        if split == "test":
            return np.arange(n)
        require_int("n_valid", self._n_valid, 1, n - 1)
        order = self._key.generator(f"/valid/{self._name}").permutation(n)
        return np.sort(order[: self._n_valid] if split == "valid" else order[self._n_valid :])

    def labels(self, split: str) -> Int[np.ndarray, " row"]:
        """Return the class of each row."""
        return self._stored_labels(split)[self.rows(split)]


class _Arrays(_Stored):
    """Images in arrays."""

    def __init__(self, name: str, files: ImageFiles, n_valid: int, key: Key) -> None:
        super().__init__(name, n_valid, key)
        self.classes = files.classes
        self._splits = files.splits

    def images(self, split: str) -> "Iterator[Image]":
        """Yield the image of each row."""
        from PIL import Image

        for row in self.rows(split):
            pixels = self._splits[_stored_split(split)].pixels[row]
            yield Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)

    def _stored_labels(self, split: str) -> Int[np.ndarray, " row"]:
        return self._splits[_stored_split(split)].labels


class _Tables(_Stored):
    """Images in the tables of `datasets`."""

    def __init__(self, name: str, path: Path | None, n_valid: int, key: Key) -> None:
        super().__init__(name, n_valid, key)
        hub, subset = HUB.get(name, (None, None))
        self._tables: Mapping[str, Table] = open_stored(
            name,
            folder=path,
            setting="folder",
            place=f"FOLDER/{name}",
            hub=hub,
            subset=subset,
        )
        require_splits(name, self._tables, ("train", "test"))
        self._image, self._label = self._columns()
        self.classes: tuple[str, ...] = tuple(self._tables["train"].features[self._label].names)
        self._labels: dict[str, np.ndarray] = {}

    def images(self, split: str) -> "Iterator[Image]":
        """Yield the image of each row."""
        import datasets

        decoder = datasets.Image(mode="RGB")
        table = self._tables[_stored_split(split)].select_columns(self._image)
        # Only the images of the split are decoded.
        table = table.cast_column(self._image, datasets.Image(decode=False))
        encoded = (image for rows in table.iter(_ROWS) for image in rows[self._image])
        in_split = np.zeros(len(self._stored_labels(split)), bool)
        in_split[self.rows(split)] = True
        for image, is_member in zip(encoded, in_split, strict=True):
            if is_member:
                yield decoder.decode_example(image)

    def _stored_labels(self, split: str) -> Int[np.ndarray, " row"]:
        stored = _stored_split(split)
        if stored not in self._labels:
            table = self._tables[stored].select_columns(self._label)
            labels = np.concatenate([rows[self._label] for rows in table.iter(_ROWS)])
            if labels.min() < 0:
                raise ValueError(
                    f"{self._name} must have a class in each row of {stored}, got {labels.min()}"
                )
            self._labels[stored] = labels
        return self._labels[stored]

    def _columns(self) -> tuple[str, str]:
        """Return the names of the image column and of the class column."""
        import datasets

        features = [self._tables[split].features or {} for split in ("train", "test")]
        images, labels = (
            [name for name, feature in features[0].items() if isinstance(feature, type_)]
            for type_ in (datasets.Image, datasets.ClassLabel)
        )
        if "label" in labels:
            labels = ["label"]
        if len(images) != 1 or len(labels) != 1:
            raise ValueError(
                f"{self._name} must have one column of type Image, and one of type ClassLabel or "
                f"one of them named label, got {features[0]}"
            )
        train, test = (columns.get(labels[0]) for columns in features)
        if train != test:
            raise ValueError(
                f"{self._name} must have the same classes in train and test, got {train} and {test}"
            )
        return images[0], labels[0]


class Generated:
    """The triangles."""

    classes = ("other", "equilateral")

    def __init__(self, config: TrianglesConfig) -> None:
        self._task = Triangles(config)

    def rows(self, split: str) -> Int[np.ndarray, " row"]:
        """Return the numbers of the triangles of a split."""
        return np.arange(self._task.size(split))

    def labels(self, split: str) -> Int[np.ndarray, " row"]:
        """Return the class of each triangle."""
        return np.concatenate([batch.targets[:, 0].numpy() for batch in self._batches(split)])

    def images(self, split: str) -> "Iterator[Image]":
        """Yield the image of each triangle."""
        from PIL import Image

        for batch in self._batches(split):
            for pixels in (batch.inputs[:, 0] * 255).byte().numpy():
                yield Image.fromarray(pixels)

    def _batches(self, split: str) -> Iterator[Batch]:
        """Yield each triangle of a split once."""
        size = self._task.size(split)
        for index in range(-(-size // _ROWS)):
            yield self._task.batch(split, index, _ROWS)[: size - index * _ROWS]


def _stored_split(split: str) -> str:
    return "test" if split == "test" else "train"
