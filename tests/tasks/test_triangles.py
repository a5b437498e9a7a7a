"""Triangles: compared with a solver that reads the images, and properties of the sampler."""

import math

import pytest
import torch

from tasks.triangles import Triangles, TrianglesConfig
from tests.tasks.batches import full_batch

CONTRACT_EXAMPLES = {
    "": lambda folder: Triangles(TrianglesConfig(n_train=101, n_valid=31, n_test=31))
}

FEW = {"n_train": 400, "n_valid": 61, "n_test": 60}


def clusters_of(picture):
    """Cluster the points of an image that are at most 6 pixels apart."""
    clusters = []
    for row, column in picture.nonzero().tolist():
        near = [
            cluster
            for cluster in clusters
            if any(math.dist(p, (column, row)) <= 6 for p in cluster)
        ]
        clusters = [cluster for cluster in clusters if cluster not in near]
        clusters.append([(column, row), *(point for cluster in near for point in cluster)])
    return clusters


def apexes(first, second):
    """Return the two third corners of equilateral triangles on a side."""
    (x1, y1), (x2, y2) = first, second
    middle = ((x1 + x2) / 2, (y1 + y2) / 2)
    height = math.sqrt(3) / 2
    return [
        (middle[0] - sign * height * (y2 - y1), middle[1] + sign * height * (x2 - x1))
        for sign in (1, -1)
    ]


def misses(corners):
    """Yield the distance of each corner from completing an equilateral triangle."""
    for third in range(3):
        first, second = (corners[i] for i in range(3) if i != third)
        yield min(math.dist(corners[third], apex) for apex in apexes(first, second))


@pytest.mark.parametrize("changes", [{}, {"image_size": 96, "seed": 3}])
@pytest.mark.parametrize("split", Triangles.SPLITS)
def test_the_picture_tells_the_answer(split, changes):
    task = Triangles(TrianglesConfig(**FEW, **changes))
    batch = task.batch(split, 0, 60)
    size = task.config.image_size
    assert batch.inputs.shape == (60, 1, size, size)
    assert batch.inputs.dtype == torch.float32
    assert set(batch.inputs.unique().tolist()) == {0, 1}
    for i in range(60):
        clusters = clusters_of(batch.inputs[i, 0])
        assert [len(cluster) for cluster in clusters] == [8, 8, 8]
        corners = [
            (sum(x for x, _ in cluster) / 8, sum(y for _, y in cluster) / 8) for cluster in clusters
        ]
        missed = list(misses(corners))
        assert (max(missed) < 1) == batch.targets[i].item()
        sides = [math.dist(corners[j - 1], corners[j]) for j in range(3)]
        assert min(sides) >= 12

        latents = {name: values[i].tolist() for name, values in batch.latents.items()}
        assert sorted(latents["corners"]) == sorted(map(list, corners))
        assert sorted(map(sorted, latents["points"])) == sorted(
            sorted(map(list, cluster)) for cluster in clusters
        )
        assert latents["equilateral"] == batch.targets[i].item()
        first, second, third = latents["corners"]
        assert latents["side"] == pytest.approx(
            [math.dist(first, second), math.dist(second, third), math.dist(third, first)]
        )
        # The distance is the same whichever corner is asked.
        assert missed == pytest.approx([latents["defect"]] * 3, abs=1e-4)


def test_classes_are_apart_and_balanced():
    task = Triangles(TrianglesConfig(n_train=6_000, n_valid=2_001, n_test=2))
    batch = full_batch(task, "train")
    equilateral = batch.latents["equilateral"]
    assert equilateral.sum() == 3_000
    defect, side = batch.latents["defect"], batch.latents["side"]
    assert defect[equilateral].max() <= math.sqrt(0.5)
    assert defect[~equilateral].min() > 1
    longer = side.amax(1) - side.amin(1)
    assert longer[equilateral].max() < math.sqrt(2)
    assert longer[~equilateral].min() > 1
    # Corners reach the pictures' border but for what their clusters need.
    assert (batch.latents["corners"].amin(), batch.latents["corners"].amax()) == (2, 61)
    assert (batch.latents["points"].amin(), batch.latents["points"].amax()) == (0, 63)

    targets = full_batch(task, "valid").targets[:, 0]
    for prefix in (1, 2, 7, 100, 2_001):
        assert abs(2 * targets[:prefix].sum() - prefix) <= 1
    assert task.chance == 0.5
    assert [task.size(split) for split in task.splits] == [6_000, 2_001, 2]


def test_the_longest_side_tells_as_much_as_is_said():
    batch = full_batch(Triangles(TrianglesConfig(n_train=8_000)), "train")
    longest, equilateral = batch.latents["side"].amax(1), batch.latents["equilateral"]
    right = max(
        ((longest < threshold) == equilateral).float().mean() for threshold in range(20, 70)
    )
    assert right == pytest.approx(0.76, abs=0.02)


def test_points_lie_anywhere_around_their_corner():
    batch = full_batch(Triangles(TrianglesConfig(n_train=5_000, n_valid=2, n_test=2)), "train")
    offsets = batch.latents["points"] - batch.latents["corners"][:, :, None]
    counts = torch.zeros(5, 5)
    counts.index_put_(tuple((offsets + 2).view(-1, 2).T), torch.ones(()), accumulate=True)
    assert counts[2, 2] == 0
    # Each of the 12 opposite pairs is taken by a third of the 15,000 clusters.
    others = counts[counts > 0]
    assert len(others) == 24
    assert ((others - 5_000).abs() < 5 * (15_000 * 2 / 9) ** 0.5).all()


def test_no_triangle_occurs_twice():
    task = Triangles(TrianglesConfig(n_train=8_000, n_valid=2_000, n_test=2_000))
    seen = [
        frozenset(map(tuple, corners))
        for split in task.splits
        for corners in full_batch(task, split).latents["corners"].tolist()
    ]
    assert len(set(seen)) == 12_000


def test_test_pictures_do_not_depend_on_the_number_of_others():
    few, many = (
        full_batch(Triangles(TrianglesConfig(n_train=n, n_valid=n, n_test=60)), "test")
        for n in (100, 30_000)
    )
    assert torch.equal(few.inputs, many.inputs)
    changed = full_batch(
        Triangles(TrianglesConfig(n_train=100, n_valid=100, n_test=60, seed=1)), "test"
    )
    assert not torch.equal(few.inputs, changed.inputs)


def test_train_is_a_stream_of_epochs():
    task = Triangles(TrianglesConfig(**FEW))

    def seen(index):
        return [
            str(points) for points in task.batch("train", index, 400).latents["points"].tolist()
        ]

    assert sorted(seen(0)) == sorted(seen(1))
    assert seen(0) != seen(1)
    twice = task.batch("valid", 0, 122).inputs
    assert torch.equal(twice[:61], twice[61:])


def test_score():
    task = Triangles(TrianglesConfig(**FEW))
    batch = task.batch("test", 0, 4)
    right = torch.nn.functional.one_hot(batch.targets[:, 0], 2).float()
    assert task.score(right, batch)["correct"].tolist() == [1, 1, 1, 1]
    right[1] = -right[1]
    assert task.score(right, batch)["correct"].tolist() == [1, 0, 1, 1]
    with pytest.raises(ValueError, match=r"output must have shape \(4, 2\), got \(4,\)"):
        task.score(torch.zeros(4), batch)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_train": 1}, "n_train must be an integer from 2 to 100000, got 1"),
        ({"n_valid": 10**6}, "n_valid must be .*, got 1000000"),
        ({"n_test": True}, "n_test must be .*, got True"),
        ({"image_size": 47}, "image_size must be an integer from 48 to 256, got 47"),
        ({"seed": -1}, "seed must be .*, got -1"),
    ],
)
def test_a_bad_config_says_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        TrianglesConfig(**arguments)


def test_pictures_can_be_looked_at(tmp_path):
    from matplotlib.image import imsave

    batch = Triangles(TrianglesConfig(**FEW)).batch("test", 0, 12)
    framed = torch.nn.functional.pad(batch.inputs[:, 0], (1, 1, 1, 1), value=0.5)
    sheet = torch.cat([torch.cat(list(row), 1) for row in framed.split(6)])
    path = tmp_path / "triangles.png"
    imsave(path, sheet.repeat_interleave(3, 0).repeat_interleave(3, 1).numpy(), cmap="gray")
    assert path.stat().st_size > 1_000


def test_groups_are_the_classes():
    task = Triangles(TrianglesConfig(n_train=2, n_valid=2, n_test=20, image_size=48))
    batch = task.batch("test", 0, 20)
    groups = task.groups(batch)
    assert list(groups) == ["equilateral", "other"]
    assert torch.equal(groups["equilateral"], batch.targets[:, 0] == 1)
    assert torch.equal(groups["other"], batch.targets[:, 0] == 0)


# Counterfactuals


def test_the_picture_follows_from_the_corners_that_are_set():
    task = Triangles(TrianglesConfig(**FEW))
    base, source = task.batch("train", 0, 150), task.batch("train", 1, 150)
    corners = base.latents["corners"].clone()
    corners[:, 2] = source.latents["corners"][:, 2]
    corners[:50] = source.latents["corners"][:50]
    corners[50:55, 2] = (corners[50:55, 1] - 3).clamp(min=2)
    # Some of the equilateral ones become neither equilateral nor clearly not.
    corners[100:] = base.latents["corners"][100:]
    corners[100:, 2, 0] = (corners[100:, 2, 0] - 1).clamp(min=2)
    wanted = task.counterfactual(base, {"corners": corners})
    unclear, between = set(), 0
    for i in range(150):
        triangle = corners[i].tolist()
        missed = max(misses(triangle))
        sides = [math.dist(triangle[j - 1], triangle[j]) for j in range(3)]
        clear = missed < 0.5**0.5 + 1e-6 or (missed > 1 and max(sides) - min(sides) > 1)
        assert wanted.mask[i].item() == (clear and min(sides) >= 12)
        unclear.add(wanted.mask[i].item())
        between += 0.71 < missed <= 1
        if not wanted.mask[i]:
            continue
        assert wanted.targets[i].item() == (missed < 1) == wanted.latents["equilateral"][i].item()
        assert wanted.latents["defect"][i].item() == pytest.approx(missed, abs=1e-5)
        assert sorted(wanted.latents["side"][i].tolist()) == pytest.approx(sorted(sides))
        clusters = clusters_of(wanted.inputs[i, 0])
        centres = [[sum(axis) / 8 for axis in zip(*cluster, strict=True)] for cluster in clusters]
        assert sorted(centres) == sorted(triangle)
    assert unclear == {True, False}
    assert between > 3
    # The clusters are moved as they are.
    moved = (corners - base.latents["corners"])[:, :, None]
    assert torch.equal(wanted.latents["points"] - moved, base.latents["points"])


def test_the_answer_is_set_while_the_picture_stays():
    task = Triangles(TrianglesConfig(**FEW))
    base = task.batch("train", 0, 60)
    wanted = task.counterfactual(base, {"equilateral": ~base.latents["equilateral"]})
    assert torch.equal(wanted.targets, 1 - base.targets)
    assert torch.equal(wanted.inputs, base.inputs)
    wanted = task.counterfactual(base, {"defect": torch.full((60,), 0.5)})
    assert (wanted.targets == 1).all()
    assert wanted.latents["equilateral"].all()
    assert torch.equal(wanted.inputs, base.inputs)
    wanted = task.counterfactual(base, {"offsets": base.latents["offsets"].flip(1)})
    assert torch.equal(wanted.targets, base.targets)
    assert (wanted.inputs != base.inputs).any()
