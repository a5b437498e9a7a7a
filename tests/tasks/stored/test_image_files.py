"""Images in their authors' files, which the tests write."""

import gzip
import struct

import numpy as np
import pytest
import torch
from scipy.io import savemat

from tasks.stored.image_files import read_image_files
from tasks.stored.images import Images, ImagesConfig
from tests.tasks.batches import full_batch

N = {"train": 20, "test": 10}
NAMES = ["plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def pictures(name, split):
    """Distinct random images [image, height, width(, 3)] and labels, each of ten classes."""
    generator = np.random.default_rng([*name.encode(), *split.encode()])
    shape = (28, 28) if name == "fashion_mnist" else (32, 32, 3)
    labels = generator.permutation(np.arange(N[split]) % 10)
    return generator.integers(0, 256, (N[split], *shape), np.uint8), labels


def idx(array):
    header = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(
        f">{array.ndim}I", *array.shape
    )
    return header + array.astype(np.uint8).tobytes()


def write_fashion_mnist(folder, compress=False):
    for split, word in (("train", "train"), ("test", "t10k")):
        pixels, labels = pictures("fashion_mnist", split)
        for kind, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            data, name = idx(array), f"{word}-{kind}-ubyte"
            if compress:
                data, name = gzip.compress(data), f"{name}.gz"
            (folder / name).write_bytes(data)


def write_svhn(folder):
    for split in N:
        pixels, labels = pictures("svhn", split)
        digits = np.where(labels == 0, 10, labels).astype(np.uint8)[:, None]
        savemat(folder / f"{split}_32x32.mat", {"X": np.moveaxis(pixels, 0, -1), "y": digits})


def write_cifar10(folder):
    for split in N:
        pixels, labels = pictures("cifar10", split)
        planes = np.moveaxis(pixels, -1, 1).reshape(len(pixels), -1)
        records = np.concatenate([labels[:, None].astype(np.uint8), planes], 1)
        if split == "test":
            records.tofile(folder / "test_batch.bin")
        else:
            for number, part in enumerate(np.split(records, 5), 1):
                part.tofile(folder / f"data_batch_{number}.bin")
    (folder / "batches.meta.txt").write_text("\n".join(NAMES) + "\n\n")


WRITE = {"fashion_mnist": write_fashion_mnist, "svhn": write_svhn, "cifar10": write_cifar10}


@pytest.fixture
def folder(tmp_path):
    for name, write in WRITE.items():
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("name", WRITE)
def test_images_and_labels_are_the_stored_ones(folder, name):
    task = Images(ImagesConfig(sources=(name,), folder=str(folder), n_valid=4))
    assert task.classes == (tuple(NAMES) if name == "cifar10" else tuple("0123456789"),)
    for split in task.SPLITS:
        batch = full_batch(task, split)
        rows = batch.latents["row"].numpy()
        pixels, labels = pictures(name, "test" if split == "test" else "train")
        assert batch.targets[:, 0].tolist() == labels[rows].tolist()
        shown = (batch.inputs[0] * 255).round().byte().numpy()
        if name == "fashion_mnist":
            assert np.array_equal(shown[:, :, 2:30, 2:30], pixels[rows][:, None].repeat(3, 1))
            assert not shown[:, :, :2].any()
        else:
            assert np.array_equal(np.moveaxis(shown, 1, -1), pixels[rows])
    rows = [set(full_batch(task, split).latents["row"].tolist()) for split in ("train", "valid")]
    assert rows[0] | rows[1] == set(range(20))
    assert not rows[0] & rows[1]


def test_compressed_files_have_the_same_images(tmp_path, folder):
    other = tmp_path / "compressed"
    other.mkdir()
    write_fashion_mnist(other, compress=True)
    for split in N:
        for mine, theirs in zip(
            read_image_files(other).splits[split],
            read_image_files(folder / "fashion_mnist").splits[split],
            strict=True,
        ):
            assert np.array_equal(mine, theirs)


def test_several_data_sets_from_files(folder):
    task = Images(ImagesConfig(sources=tuple(WRITE), folder=str(folder), n_valid=4))
    assert task.n_classes == (10, 10, 10)
    assert torch.bincount(full_batch(task, "test").inputs[1]).tolist() == [10, 10, 10]


def test_other_files_are_not_read(tmp_path):
    assert read_image_files(tmp_path) is None
    # The pickles of CIFAR-10's Python version.
    (tmp_path / "data_batch_1").write_bytes(b"\x80\x02}q\x01.")
    assert read_image_files(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "file", "change", "message"),
    [
        ("fashion_mnist", "t10k-labels-idx1-ubyte", None, "must have the file t10k-labels-idx1"),
        ("fashion_mnist", "train-images-idx3-ubyte", b"abc", "must be an idx file of bytes with 3"),
        ("fashion_mnist", "train-images-idx3-ubyte", "cut", "must have .20, 28, 28. values, got"),
        (
            "fashion_mnist",
            "train-labels-idx1-ubyte",
            "few",
            "label for each image of train, got 20",
        ),
        ("svhn", "test_32x32.mat", None, "must have the file test_32x32.mat"),
        ("svhn", "test_32x32.mat", b"abc" * 200, "must be a .mat file of version 5, got"),
        ("svhn", "test_32x32.mat", "floats", "must have X .*, got .*'X': .3, 4."),
        ("cifar10", "data_batch_3.bin", None, "must have the file data_batch_3.bin"),
        ("cifar10", "data_batch_3.bin", "cut", "must have 3073 bytes for each image, got 12287"),
        ("cifar10", "batches.meta.txt", b"plane", "must name 10 classes, got 1"),
    ],
)
def test_bad_files_are_errors(folder, name, file, change, message):
    path = folder / name / file
    data = path.read_bytes()
    if change is None:
        path.unlink()
    elif change == "cut":
        path.write_bytes(data[:-5])
    elif change == "few":
        path.write_bytes(idx(np.zeros(19)))
    elif change == "floats":
        savemat(path, {"X": np.zeros((3, 4)), "y": np.zeros(3)})
    else:
        path.write_bytes(change)
    task = Images(ImagesConfig(sources=(name,), folder=str(folder), n_valid=4))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        task.batch("train", 0, 1)
