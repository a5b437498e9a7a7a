"""Images in the files that their authors publish: idx, .mat and CIFAR's binary version."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, UInt8

_IDX = {"train": "train", "test": "t10k"}
_MAT = {"train": "train_32x32.mat", "test": "test_32x32.mat"}
_CIFAR = {"train": [f"data_batch_{n}.bin" for n in range(1, 6)], "test": ["test_batch.bin"]}
_CIFAR_SIZE, _CIFAR_NAMES = 32, "batches.meta.txt"
_BYTES, _GZIP = 0x08, b"\x1f\x8b"


class ImageArrays(NamedTuple):
    """All images of a split, with one channel or three, and their classes."""

    pixels: UInt8[np.ndarray, "image height width channel"]
    labels: Int[np.ndarray, " image"]


class ImageFiles(NamedTuple):
    """The names of the classes, and the images of `train` and `test`."""

    classes: tuple[str, ...]
    splits: dict[str, ImageArrays]


def read_image_files(folder: Path) -> ImageFiles | None:
    """Read all images of a folder, if it has one of three layouts.

    - MNIST and Fashion-MNIST: `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, and the same
      with `t10k`, each also as .gz (LeCun et al. 1998; Xiao et al. 2017);
    - SVHN: `train_32x32.mat` and `test_32x32.mat` (Netzer et al. 2011), where label 10 is digit 0;
    - CIFAR-10: `data_batch_1.bin` to `data_batch_5.bin`, `test_batch.bin` and `batches.meta.txt`
      (Krizhevsky 2009, its binary version; the others are pickles, which are not read).

    Args:
        folder: the folder of the files.

    Returns:
        Classes and images; None if the folder has none of these files. Where the files do not name
        classes, these are digits.

    Raises:
        FileNotFoundError: some of the files of a layout are missing.
        ValueError: a file has other contents.

    Example:
        `read_image_files(Path("~/fashion_mnist").expanduser())`
    """
    layouts: dict[str, tuple[list[str], Callable[[Path, str], ImageArrays]]] = {
        "idx": ([f"{name}-images-idx3-ubyte" for name in _IDX.values()], _read_idx),
        "mat": (list(_MAT.values()), _read_mat),
        "cifar": ([file for files in _CIFAR.values() for file in files], _read_cifar),
    }
    for layout, (files, read) in layouts.items():
        if not any(_path(folder, file) for file in files):
            continue
        splits = {split: read(folder, split) for split in ("train", "test")}
        n_classes = 1 + max(int(split.labels.max()) for split in splits.values())
        classes = tuple(map(str, range(n_classes)))
        if layout == "cifar":
            names = _require(folder, _CIFAR_NAMES).read_text(encoding="utf-8").split()
            if len(names) < n_classes:
                raise ValueError(
                    f"{folder / _CIFAR_NAMES} must name {n_classes} classes, got {len(names)}"
                )
            classes = tuple(names)
        return ImageFiles(classes, splits)
    return None


def _read_idx(folder: Path, split: str) -> ImageArrays:
    images, labels = (
        _idx_array(_require(folder, f"{_IDX[split]}-{name}-ubyte"), n_dims)
        for name, n_dims in (("images-idx3", 3), ("labels-idx1", 1))
    )
    return _checked(images[..., None], labels.astype(np.int64), folder, split)


def _idx_array(file: Path, n_dims: int) -> UInt8[np.ndarray, "..."]:
    """The array of an idx file: two zeros, the type, the number of dims, the dims, the values."""
    data = file.read_bytes()
    if data.startswith(_GZIP):
        data = gzip.decompress(data)
    start = 4 + 4 * n_dims
    if len(data) < start or data[:4] != bytes((0, 0, _BYTES, n_dims)):
        raise ValueError(
            f"{file} must be an idx file of bytes with {n_dims} dims, got {data[:4].hex()!r} as "
            "its first bytes"
        )
    shape = tuple(np.frombuffer(data, ">u4", n_dims, offset=4).tolist())
    if len(data) - start != np.prod(shape):
        raise ValueError(f"{file} must have {shape} values, got {len(data) - start}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _read_mat(folder: Path, split: str) -> ImageArrays:
    from scipy.io import loadmat

    file = _require(folder, _MAT[split])
    try:
        arrays = loadmat(str(file), variable_names=["X", "y"])
    except Exception as error:  # scipy raises many kinds
        raise ValueError(f"{file} must be a .mat file of version 5, got {error}") from error
    if set(arrays) < {"X", "y"} or arrays["X"].ndim != 4 or arrays["X"].dtype != np.uint8:
        shapes = {name: np.shape(array) for name, array in arrays.items() if name in "Xy"}
        raise ValueError(
            f"{file} must have X [height, width, channel, image] of bytes and y, got {shapes}"
        )
    labels = arrays["y"].ravel().astype(np.int64) % 10
    return _checked(np.moveaxis(arrays["X"], -1, 0), labels, folder, split)


def _read_cifar(folder: Path, split: str) -> ImageArrays:
    n_bytes, rows = 1 + 3 * _CIFAR_SIZE**2, []
    for name in _CIFAR[split]:
        data = np.fromfile(file := _require(folder, name), np.uint8)
        if len(data) % n_bytes or not len(data):
            raise ValueError(
                f"{file} must have {n_bytes} bytes for each image, got {len(data)} bytes"
            )
        rows.append(data.reshape(-1, n_bytes))
    records = np.concatenate(rows)
    pixels = records[:, 1:].reshape(-1, 3, _CIFAR_SIZE, _CIFAR_SIZE)
    labels = records[:, 0].astype(np.int64)
    return _checked(np.moveaxis(pixels, 1, -1), labels, folder, split)


def _checked(
    pixels: UInt8[np.ndarray, "image height width channel"],
    labels: Int[np.ndarray, " label"],
    folder: Path,
    split: str,
) -> ImageArrays:
    if len(pixels) != len(labels) or not len(labels):
        raise ValueError(
            f"{folder} must have a label for each image of {split}, got {len(pixels)} images and "
            f"{len(labels)} labels"
        )
    return ImageArrays(pixels, labels)


def _path(folder: Path, name: str) -> Path | None:
    """The file of this name, or with .gz after it; None if there is none."""
    candidates = (folder / name, folder / f"{name}.gz")
    return next((path for path in candidates if path.is_file()), None)


def _require(folder: Path, name: str) -> Path:
    path = _path(folder, name)
    if path is None:
        raise FileNotFoundError(f"{folder} must have the file {name}, got {_listed(folder)}")
    return path


def _listed(folder: Path) -> str:
    return ", ".join(sorted(path.name for path in folder.iterdir())[:10])
