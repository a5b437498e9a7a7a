"""Image classification: compared with the stored arrays."""

import json
import shutil
from collections import Counter
from pathlib import Path

import datasets
import huggingface_hub.utils
import numpy as np
import pytest
import torch
from PIL import Image

from tasks.stored import opening
from tasks.stored.images import Images, ImagesConfig
from tasks.triangles import Triangles, TrianglesConfig
from tests.tasks.batches import full_batch

CONTRACT_EXAMPLES = {
    "": lambda folder: Images(
        ImagesConfig(
            sources=("triangles",), triangles=TrianglesConfig(n_train=101, n_valid=31, n_test=31)
        )
    )
}

FEW = TrianglesConfig(n_train=20, n_valid=7, n_test=6)
SIZES = {"cifar10": (30, 12), "fashion_mnist": (24, 8), "animals": (21, 9), "triangles": (20, 6)}
SHAPES = {"cifar10": (32, 32, 3), "fashion_mnist": (28, 28), "animals": (32, 64, 3)}
CONFIG = {"sources": tuple(SIZES), "n_valid": 5, "triangles": FEW}


def pictures(name, split):
    """Return distinct random images and their classes."""
    generator = np.random.default_rng([*name.encode(), *split.encode()])
    n = SIZES[name][split == "test"]
    n_classes = 3 if name == "animals" else 10
    pixels = generator.integers(0, 256, (n, *SHAPES[name]), np.uint8)
    return pixels, np.sort(generator.integers(n_classes, size=n))


def stored(name, image, classes=10):
    def table(split):
        pixels, labels = pictures(name, split)
        columns = {image: [Image.fromarray(array) for array in pixels], "label": labels.tolist()}
        features = {image: datasets.Image(), "label": datasets.ClassLabel(num_classes=classes)}
        return datasets.Dataset.from_dict(columns, datasets.Features(features))

    return datasets.DatasetDict({split: table(split) for split in ("train", "test")})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Store data sets in each of the formats."""
    folder = tmp_path_factory.mktemp("images")
    stored("cifar10", "img").save_to_disk(folder / "cifar10")
    (folder / "fashion_mnist").mkdir()
    for split, table in stored("fashion_mnist", "image").items():
        table.to_parquet(folder / "fashion_mnist" / f"{split}-00000-of-00001.parquet")
    for split in ("train", "test"):
        for number, (pixels, label) in enumerate(zip(*pictures("animals", split), strict=True)):
            path = folder / "animals" / split / ("ant", "bee", "cow")[label] / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Provide an empty cache of Hugging Face and no network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(opening, "_hub_responds", lambda: False)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def task(folder):
    return Images(ImagesConfig(folder=str(folder), **CONFIG))


def stored_split(split):
    return "test" if split == "test" else "train"


def expected(name, split):
    """Return the expected images of a split, [n, 3, 32, 32], by slicing."""
    if name == "triangles":
        triangles = Triangles(FEW)
        every = triangles.batch(split, 0, triangles.size(split))
        drawn = 255 * every.inputs.double().numpy()
        quarters = [drawn[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)]
        return np.repeat(sum(quarters) / 4, 3, 1), every.targets[:, 0].numpy()
    pixels, labels = pictures(name, stored_split(split))
    pixels = pixels.astype(float)
    shown = np.zeros((len(pixels), 3, 32, 32))
    if name == "cifar10":
        shown = np.moveaxis(pixels, -1, 1)
    elif name == "fashion_mnist":
        shown[:, :, 2:30, 2:30] = pixels[:, None]
    else:  # twice as wide as high: shrunk to 16 x 32, with black above and below
        halves = [pixels[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
        shown[:, :, 8:24] = np.moveaxis(sum(halves) / 4, -1, 1)
    return shown, labels


# Images


@pytest.mark.parametrize("split", Images.SPLITS)
@pytest.mark.parametrize("name", SIZES)
def test_images_and_classes_are_the_stored_ones(task, name, split):
    batch = full_batch(task, split)
    of_source = batch.latents["dataset"] == tuple(SIZES).index(name)
    assert of_source.any()
    images, labels = expected(name, split)
    rows = batch.latents["row"][of_source]
    shown, dataset = batch.inputs
    assert (shown.dtype, dataset.dtype) == (torch.float32, torch.int64)
    # Averages are rounded to bytes, once for each direction.
    step = 1.001 if name in ("animals", "triangles") else 0.001
    assert np.abs(255 * shown[of_source].double().numpy() - images[rows]).max() <= step
    assert batch.targets[of_source, 0].tolist() == labels[rows].tolist()
    assert torch.equal(dataset, batch.latents["dataset"])
    assert torch.equal(batch.targets[:, 0], batch.latents["label"])
    assert batch.mask.all()


def test_classes_are_named(task):
    digits = tuple("0123456789")
    assert task.classes == (digits, digits, ("ant", "bee", "cow"), ("other", "equilateral"))
    assert task.n_classes == (10, 10, 3, 2)
    assert (full_batch(task, "test").inputs[0].amax((1, 2, 3)) <= 1).all()


@pytest.mark.parametrize("size", [8, 16, 48])
def test_other_sizes(folder, size):
    config = ImagesConfig(folder=str(folder), image_size=size, sources=("cifar10",), n_valid=5)
    batch = full_batch(Images(config), "test")
    images = pictures("cifar10", "test")[0][batch.latents["row"]]
    actual = 255 * batch.inputs[0].permute(0, 2, 3, 1).double().numpy()
    if size == 48:
        assert np.allclose(actual[:, 8:40, 8:40], images)
        assert actual.sum() == pytest.approx(images.sum(dtype=float))
    else:
        side = 32 // size
        averages = images.reshape(-1, size, side, size, side, 3).mean((2, 4))
        assert np.abs(actual - averages).max() <= 1.001


# Splits and order


def rows_of(batch, number):
    return batch.latents["row"][batch.latents["dataset"] == number].tolist()


def test_valid_is_held_out_of_train(task):
    train, valid, test = (full_batch(task, split) for split in task.splits)
    for number, (name, (n_train, n_test)) in enumerate(SIZES.items()):
        assert sorted(rows_of(test, number)) == list(range(n_test))
        if name == "triangles":
            assert sorted(rows_of(valid, number)) == list(range(7))
            continue
        size = n_train - 5
        stream = task.batch("train", 0, len(SIZES) * size)
        assert len(rows_of(valid, number)) == 5
        assert sorted(rows_of(stream, number) + rows_of(valid, number)) == list(range(n_train))
    assert len(train) == sum(n for n, _ in SIZES.values()) - 3 * 5


def test_data_sets_take_turns_in_train(task):
    for index in range(3):
        batch = task.batch("train", index, 40)
        assert Counter(batch.latents["dataset"].tolist()) == dict.fromkeys(range(4), 10)
    # A small one comes round again, in another order.
    small = rows_of(task.batch("train", 0, 4 * 2 * 16), 2)
    assert sorted(small[:16]) == sorted(small[16:])
    assert small[:16] != small[16:]


@pytest.mark.parametrize("split", ["valid", "test"])
def test_prefixes_have_all_data_sets_in_proportion(task, split):
    dataset = full_batch(task, split).latents["dataset"]
    share = dataset.bincount() / len(dataset)
    for n in range(1, len(dataset)):
        counts = dataset[:n].bincount(minlength=4)
        assert ((counts - n * share).abs() <= 1.5).all()


def test_what_is_held_out_depends_on_the_seed_alone(folder, task):
    def held_out(**arguments):
        other = Images(ImagesConfig(folder=str(folder), **CONFIG | arguments))
        return sorted(rows_of(full_batch(other, "valid"), other.config.sources.index("cifar10")))

    rows = sorted(rows_of(full_batch(task, "valid"), 0))
    assert held_out(image_size=16) == held_out(sources=("animals", "cifar10")) == rows
    assert set(held_out(n_valid=6)) > set(rows)
    assert held_out(seed=1) != rows


# Scores


def test_scores_and_chance(task):
    batch = full_batch(task, "test")
    logits = torch.zeros(len(batch), 1, 10)
    wrong = torch.arange(len(batch)) % 3 == 0
    predicted = torch.where(wrong, (batch.targets[:, 0] + 1) % 10, batch.targets[:, 0])
    logits[torch.arange(len(batch)), 0, predicted] = 1
    assert torch.equal(task.score(logits, batch)["correct"], (~wrong).float())
    with pytest.raises(ValueError, match=r"logits must have shape \(35, 1, 10\), got \(35, 10\)"):
        task.score(logits[:, 0], batch)
    chance = task.chance("test")
    assert chance["triangles"] == 0.5
    labels = pictures("animals", "test")[1].tolist()
    assert chance["animals"] == pytest.approx(max(Counter(labels).values()) / len(labels))


# Missing data


def error_of(kind, **arguments):
    with pytest.raises(kind) as caught:
        Images(ImagesConfig(**arguments)).batch("train", 0, 1)
    return str(caught.value)


def test_a_missing_data_set_says_what_to_fetch(tmp_path):
    fetch = "datasets.load_dataset('ufldl-stanford/svhn', 'cropped_digits').save_to_disk("
    message = error_of(FileNotFoundError, sources=("svhn",))
    assert f"{fetch}'FOLDER/svhn')" in message
    assert "set folder to it" in message
    message = error_of(FileNotFoundError, sources=("svhn",), folder=str(tmp_path))
    assert f"{fetch}'{tmp_path}/svhn')" in message
    message = error_of(FileNotFoundError, sources=("zoo",), folder=str(tmp_path))
    assert f"there is no zoo in {tmp_path}/zoo: put there" in message


def test_what_was_loaded_once_is_read_without_a_network(cache, folder, task, monkeypatch):
    """With a cache as after a download."""
    parquet = stored("cifar10", "img")["train"], stored("cifar10", "img")["test"]
    source = cache.parent / "source"
    source.mkdir()
    for split, table in zip(("train", "test"), parquet, strict=True):
        table.to_parquet(source / f"{split}-00000-of-00001.parquet")
    loaded = datasets.load_dataset(str(source))
    made = Path(loaded["train"].cache_files[0]["filename"]).parent
    kept = cache / "uoft-cs___cifar10" / "plain_text" / "0.0.0" / made.name
    shutil.copytree(made, kept)
    for file in kept.glob("source-*"):
        file.rename(file.with_name(file.name.replace("source", "cifar10")))
    info = json.loads((kept / "dataset_info.json").read_text())
    info |= {"config_name": "plain_text", "dataset_name": "cifar10"}
    (kept / "dataset_info.json").write_text(json.dumps(info))

    monkeypatch.setattr(opening, "_hub_responds", None)  # nobody may ask
    cached = Images(ImagesConfig(sources=("cifar10",), n_valid=5))
    local = Images(ImagesConfig(sources=("cifar10",), n_valid=5, folder=str(folder)))
    for split in cached.splits:
        first, second = cached.batch(split, 0, 9), local.batch(split, 0, 9)
        assert torch.equal(first.inputs[0], second.inputs[0])
        assert torch.equal(first.targets, second.targets)


def test_the_hub_is_asked_if_it_answers(monkeypatch):
    asked = []

    def load(*arguments):
        asked.append(arguments)
        return stored("fashion_mnist", "image")

    monkeypatch.setattr(opening, "_hub_responds", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert Images(ImagesConfig(sources=("fashion_mnist",), n_valid=5)).size("train") == 19
    assert asked == [("zalando-datasets/fashion_mnist", "fashion_mnist")]


@pytest.mark.parametrize("answers", [True, False])
def test_one_request_tells_whether_the_hub_responds(monkeypatch, answers):
    class Session:
        def head(self, url, timeout):
            requests.append((url, timeout))
            if not answers:
                raise ConnectionError

    requests = []
    monkeypatch.undo()
    monkeypatch.setattr(huggingface_hub.utils, "get_session", Session)
    assert opening._hub_responds() is answers
    ((url, timeout),) = requests
    assert url.startswith("http")
    assert timeout <= 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["train"], "must have the output of save_to_disk of a DatasetDict"),
        (lambda d: datasets.DatasetDict(train=d["train"]), "must have the splits test, got train"),
        (lambda d: d.remove_columns("img"), "must have one column of type Image"),
        (lambda d: d.cast_column("label", datasets.Value("int64")), "one of type ClassLabel"),
        (lambda d: d.map(lambda row: {"more": row["img"]}), "must have one column of type Image"),
        (
            lambda d: datasets.DatasetDict(
                train=d["train"],
                test=d["test"].cast_column("label", datasets.ClassLabel(num_classes=11)),
            ),
            "must have the same classes in train and test",
        ),
        (
            lambda d: d.map(lambda _: {"label": -1}),
            "odd must have a class in each row of train, got -1",
        ),
    ],
    ids=["a split", "no test", "no image", "no class", "two images", "other classes", "unlabelled"],
)
def test_data_sets_of_another_format_are_errors(tmp_path, change, message):
    made = stored("cifar10", "img")
    change(made).save_to_disk(tmp_path / "odd")
    assert message in error_of(ValueError, sources=("odd",), folder=str(tmp_path), n_valid=5)


def test_holding_out_everything(folder):
    message = error_of(ValueError, sources=("animals",), folder=str(folder), n_valid=21)
    assert message == "n_valid must be an integer from 1 to 20, got 21"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sources": ()}, r"sources must be a tuple of different names .*, got \(\)"),
        ({"sources": "svhn"}, r"sources must be a tuple .*, got 'svhn'"),
        ({"sources": ("svhn", "svhn")}, "sources must be a tuple of different names"),
        ({"sources": ("a/b",), "folder": "x"}, "without slashes"),
        ({"sources": ("svhn", "zoo")}, "to read zoo, set folder"),
        ({"folder": ""}, "folder must be .*, got ''"),
        ({"image_size": 7}, "image_size must be an integer from 8 to 256, got 7"),
        ({"n_valid": 0}, "n_valid must be .*, got 0"),
        ({"seed": -1}, "seed must be .*, got -1"),
    ],
)
def test_a_bad_config_says_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        ImagesConfig(**arguments)


def test_groups_are_the_data_sets(task):
    batch = task.batch("test", 0, 20)
    groups = task.groups(batch)
    assert tuple(groups) == task.config.sources
    for row, dataset in enumerate(batch.latents["dataset"].tolist()):
        named = [name for name, member in groups.items() if member[row]]
        assert named == [task.config.sources[dataset]]


# Augmentation


def crops_of(image):
    """All crops of an image after padding by 4, and their mirror images, as bytes."""
    padded = np.pad(image, ((0, 0), (4, 4), (4, 4)))
    crops = {}
    for top in range(9):
        for left in range(9):
            crop = padded[:, top : top + 32, left : left + 32]
            crops[crop.tobytes()] = (top, left, False)
            crops[np.ascontiguousarray(crop[:, :, ::-1]).tobytes()] = (top, left, True)
    return crops


def test_augmented_images_are_shifted_and_flipped_at_random(folder):
    config = {**CONFIG, "sources": ("cifar10", "triangles")}
    plain = Images(ImagesConfig(folder=str(folder), **config))
    task = Images(ImagesConfig(folder=str(folder), augmented=True, **config))
    seen, n = Counter(), 0
    for index in range(20):
        batch, original = task.batch("train", index, 32), plain.batch("train", index, 32)
        assert torch.equal(batch.targets, original.targets)
        assert torch.equal(batch.inputs[1], original.inputs[1])
        triples = zip(batch.inputs[0], original.inputs[0], batch.inputs[1], strict=True)
        for image, before, dataset in triples:
            if dataset == 1:
                assert torch.equal(image, before)
            else:
                seen[crops_of(before.numpy())[image.numpy().tobytes()]] += 1
                n += 1
    tops, lefts, flips = ({change[i] for change in seen} for i in range(3))
    assert tops == lefts == set(range(9))
    assert flips == {False, True}
    assert 0.4 < sum(count for (_, _, flip), count in seen.items() if flip) / n < 0.6
    # A pure function of the config and the arguments.
    again = Images(ImagesConfig(folder=str(folder), augmented=True, **config))
    assert torch.equal(again.batch("train", 7, 32).inputs[0], task.batch("train", 7, 32).inputs[0])
    for split in ("valid", "test"):
        assert torch.equal(task.batch(split, 0, 9).inputs[0], plain.batch(split, 0, 9).inputs[0])
