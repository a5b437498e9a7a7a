"""Sort-of-CLEVR: compared with a solver that reads the images."""

import math
from collections import Counter

import pytest
import torch

from tasks.sort_of_clevr import SortOfClevr, SortOfClevrConfig
from tasks.sort_of_clevr_scenes import (
    SORT_OF_CLEVR_ANSWERS,
    SORT_OF_CLEVR_COLOURS,
    SORT_OF_CLEVR_QUESTIONS,
)
from tests.tasks.batches import full_batch

CONTRACT_EXAMPLES = {
    "": lambda folder: SortOfClevr(SortOfClevrConfig(n_train=4, n_valid=2, n_test=2))
}

FEW = {"n_train": 40, "n_valid": 7, "n_test": 20}
SHADES = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "orange": (255, 156, 0),
    "grey": (128, 128, 128),
    "yellow": (255, 255, 0),
}


def undrawn(task, split):
    """Return the latents of a split without rendering its images, which takes much memory."""
    return {name: values.long() for name, values in task._examples(split).latents.items()}


def objects_of(image):
    """Find the centre (x, y) and the shape of every colour in the pixels."""
    pixels = (image * 255).round().int().permute(1, 2, 0)
    actual, drawn = {}, 0
    for colour, shade in SHADES.items():
        rows, columns = (pixels == torch.tensor(shade)).all(-1).nonzero().double().T
        drawn += len(rows)
        # A square has 11 x 11 pixels, a circle as wide has about pi / 4 of them: 95.
        shape = {121: "rectangle", 97: "circle"}[len(rows)]
        actual[colour] = (columns.mean().item(), rows.mean().item()), shape
    assert (pixels == 255).all(-1).sum() == 75 * 75 - drawn
    return actual


def question_of(vector):
    """Decode a question: type, subtype and colours."""
    parts = [part.tolist() for part in vector.split([6, 6, 3, 3])]
    assert [sum(part) for part in parts] in ([1, 0, 1, 1], [1, 1, 1, 1])
    question_type = list(SORT_OF_CLEVR_QUESTIONS)[parts[2].index(1)]
    subtype = SORT_OF_CLEVR_QUESTIONS[question_type][parts[3].index(1)]
    colours = [list(SHADES)[part.index(1)] for part in parts[:2] if 1 in part]
    assert len(colours) == (2 if question_type == "ternary" else 1)
    return question_type, subtype, colours


def angle(corner, first, second):
    """Return the angle at a corner in degrees, by the law of cosines."""
    a, b, c = math.dist(corner, first), math.dist(corner, second), math.dist(first, second)
    return math.degrees(math.acos(max(-1, min(1, (a**2 + b**2 - c**2) / (2 * a * b)))))


def solve(objects, subtype, colours):
    """Return the answer and the colours of the objects that it describes or counts."""
    middle, shape = objects[colours[0]]
    others = {name: at for name, (at, _) in objects.items() if name not in colours}
    if subtype == "shape":
        return shape, []
    if subtype in ("left", "above"):
        return ("yes" if middle[subtype == "above"] < 37 else "no"), []
    if subtype in ("closest", "furthest"):
        ordered = sorted(others, key=lambda name: math.dist(others[name], middle))
        other = ordered[0 if subtype == "closest" else -1]
        return objects[other][1], [other]
    if subtype == "same":
        same = [name for name in objects if objects[name][1] == shape]
        return str(len(same)), same

    end = objects[colours[1]][0]
    counted = []
    for name, at in others.items():
        angles = [angle(at, middle, end), angle(middle, at, end), angle(end, at, middle)]
        # Twice the triangle's area over its base is how far the object is from the line.
        height = math.dist(middle, at) * math.sin(math.radians(angles[1]))
        if subtype == "between":
            inside = all(sorted([a, b, x])[1] == x for a, b, x in zip(middle, end, at, strict=True))
        elif subtype == "line":
            inside = height <= 5 + 1e-6
        else:
            inside = max(angles) > 90 + 1e-6 and height > 1e-4
        if inside:
            counted.append(name)
    return str(len(counted)) if counted else "no", counted


@pytest.mark.parametrize("split", SortOfClevr.SPLITS)
def test_answers_are_those_of_the_pictures(split):
    task = SortOfClevr(SortOfClevrConfig(**FEW))
    batch = task.batch(split, 1, 200)
    images, questions = batch.inputs
    assert images.shape == (200, 3, 75, 75)
    assert questions.shape == (200, 18)
    assert images.dtype == questions.dtype == torch.float32
    for i in range(200):
        objects = objects_of(images[i])
        question_type, subtype, colours = question_of(questions[i])
        answer, actual = solve(objects, subtype, colours)
        assert SORT_OF_CLEVR_ANSWERS[batch.targets[i]] == answer, (subtype, colours, objects)

        latents = {name: values[i].tolist() for name, values in batch.latents.items()}
        named = list(SORT_OF_CLEVR_QUESTIONS)[latents["question_type"]]
        assert named == question_type
        assert SORT_OF_CLEVR_QUESTIONS[named][latents["subtype"]] == subtype
        asked = [
            SORT_OF_CLEVR_COLOURS[colour_id] for colour_id in latents["colours"] if colour_id >= 0
        ]
        assert asked == colours
        concerned = [name in (*colours, *actual) for name in SORT_OF_CLEVR_COLOURS]
        assert latents["objects_concerned"] == concerned
        for colour, at, shape in zip(
            SORT_OF_CLEVR_COLOURS, latents["positions"], latents["shapes"], strict=True
        ):
            assert objects[colour] == (tuple(at), ("rectangle", "circle")[shape])


def test_the_solver_by_hand():
    objects = {
        "red": ((10, 10), "circle"),
        "green": ((40, 10), "rectangle"),
        "blue": ((25, 14), "circle"),
        "orange": ((25, 60), "rectangle"),
        "grey": ((10, 50), "circle"),
        "yellow": ((60, 10), "rectangle"),
    }
    expected = {
        ("left", "red"): "yes",
        ("above", "orange"): "no",
        ("closest", "red"): "circle",
        ("furthest", "red"): "rectangle",
        ("same", "green"): "3",
        ("between", "red", "green"): "no",
        ("between", "grey", "green"): "2",
        ("line", "red", "green"): "2",  # blue is 4 pixels away, yellow none
        ("obtuse", "red", "green"): "1",  # blue; grey makes a right angle, yellow none
    }
    for (subtype, *colours), answer in expected.items():
        assert solve(objects, subtype, colours)[0] == answer, subtype


def test_each_picture_has_ten_different_questions_of_each_type():
    task = SortOfClevr(SortOfClevrConfig(**FEW))
    assert [task.size(split) for split in task.splits] == [1200, 210, 600]
    for split in task.splits:
        batch = full_batch(task, split)
        image, question_type = batch.latents["image"], batch.latents["question_type"]
        pairs = Counter(zip(image.tolist(), question_type.tolist(), strict=True))
        assert pairs == {(i, t): 10 for i in range(task.config.size(split)) for t in range(3)}
        asked = {(i, str(q)) for i, q in zip(image.tolist(), batch.inputs[1].tolist(), strict=True)}
        assert len(asked) == len(image)
        if split != "train":
            for prefix in (1, 5, 30, 100, len(image)):
                counts = question_type[:prefix].bincount(minlength=3)
                assert counts.max() - counts.min() <= 1
    assert batch.mask.shape == batch.targets.shape == (600, 1)


def test_objects_are_spread_and_questions_evenly_drawn():
    latents = undrawn(SortOfClevr(SortOfClevrConfig(n_train=3_000)), "train")
    layouts, shapes = latents["positions"][:30_000:10], latents["shapes"][:30_000:10]
    assert latents["image"][:30_000:10].tolist() == list(range(3_000))
    assert (layouts.amin(), layouts.amax()) == (5, 69)
    apart = (layouts[:, :, None] - layouts[:, None]).abs().amax(-1)
    assert apart[:, ~torch.eye(6, dtype=torch.bool)].min() == 11
    squared = ((layouts[:, :, None] - layouts[:, None]) ** 2).sum(-1).sort(-1).values
    assert (squared[..., 1] < squared[..., 2]).all()
    assert (squared[..., 4] < squared[..., 5]).all()
    # Neither colour nor shape is tied to a place, nor the colours' shapes to one another.
    assert (layouts.float().mean(0) - 37).abs().max() < 5 * 22 / 3_000**0.5
    spread = 5 * (0.25 / 3_000) ** 0.5
    assert (shapes.float().mean(0) - 0.5).abs().max() < spread
    same = (shapes[:, :, None] == shapes[:, None]).float().mean(0)
    assert (same[~torch.eye(6, dtype=torch.bool)] - 0.5).abs().max() < spread

    for question_type, n_questions in enumerate((18, 18, 90)):
        chosen = latents["question_type"] == question_type
        pairs = latents["colours"][chosen]
        questions = Counter(
            map(tuple, torch.cat([latents["subtype"][chosen, None], pairs], 1).tolist())
        )
        assert len(questions) == n_questions
        mean = 30_000 / n_questions
        assert all(abs(count - mean) < 5 * mean**0.5 for count in questions.values())


def test_yellow_can_be_left_out_of_ternary_questions():
    every, public = (
        full_batch(SortOfClevr(SortOfClevrConfig(**FEW, omit_yellow=omit)), "test")
        for omit in (False, True)
    )
    yellow = SORT_OF_CLEVR_COLOURS.index("yellow")
    for batch, expected in ((every, {0, 1, 2}), (public, {0, 1})):
        named = (batch.latents["colours"] == yellow).any(1)
        assert set(batch.latents["question_type"][named].tolist()) == expected
    # The pictures stay as they are.
    shown = {str(latents) for latents in every.latents["positions"].tolist()}
    assert shown == {str(latents) for latents in public.latents["positions"].tolist()}


def test_a_smaller_split_is_the_beginning_of_a_larger_one():
    small, large = (
        undrawn(SortOfClevr(SortOfClevrConfig(n_train=n)), "train") for n in (10, 4_000)
    )

    def seen(latents):
        names = ("image", "positions", "shapes", "question_type", "subtype", "colours")
        chosen = latents["image"] < 10
        return {str([latents[name][i].tolist() for name in names]) for i in chosen.nonzero()}

    assert seen(small) == seen(large)
    assert len(seen(small)) == 300


def test_splits_have_pictures_of_their_own():
    task = SortOfClevr(SortOfClevrConfig(**FEW))
    layouts = [
        {str(positions) for positions in full_batch(task, split).latents["positions"].tolist()}
        for split in task.splits
    ]
    assert [len(of_split) for of_split in layouts] == [40, 7, 20]
    assert len(set.union(*layouts)) == 67
    changed = SortOfClevr(SortOfClevrConfig(**FEW, seed=1))
    others = {str(p) for p in full_batch(changed, "train").latents["positions"].tolist()}
    assert not others & set.union(*layouts)


def test_train_is_a_stream_of_epochs():
    task = SortOfClevr(SortOfClevrConfig(n_train=3, n_valid=1, n_test=1))
    epochs = [
        [str(question.nonzero().tolist()) for question in task.batch("train", index, 90).inputs[1]]
        for index in (0, 1)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    twice = task.batch("valid", 0, 60).inputs
    assert all(torch.equal(part[:30], part[30:]) for part in twice)


def test_chance_is_that_of_the_most_frequent_answers():
    task = SortOfClevr(SortOfClevrConfig(n_train=50, n_valid=20, n_test=1))

    def read(split):
        batch = full_batch(task, split)
        for vector, target in zip(batch.inputs[1], batch.targets[:, 0].tolist(), strict=True):
            yield *question_of(vector)[:2], target

    frequent = {}
    for question_type, subtype, target in read("train"):
        frequent.setdefault((question_type, subtype), Counter())[target] += 1
    right = Counter()
    for question_type, subtype, target in read("valid"):
        best = frequent[question_type, subtype].most_common(1)[0][0]
        right[question_type] += target == best
    assert task.chance("valid") == {name: right[name] / 200 for name in SORT_OF_CLEVR_QUESTIONS}
    with pytest.raises(ValueError, match=r"split must be one of .*, got 'tests'; nearest: 'test'"):
        task.chance("tests")


def test_score():
    task = SortOfClevr(SortOfClevrConfig(**FEW))
    batch = task.batch("test", 0, 5)
    right = torch.nn.functional.one_hot(batch.targets[:, 0], 10).float()
    assert task.score(right, batch)["correct"].tolist() == [1, 1, 1, 1, 1]
    right[3] = -right[3]
    assert task.score(right, batch)["correct"].tolist() == [1, 1, 1, 0, 1]
    with pytest.raises(ValueError, match=r"output must have shape \(5, 10\), got \(5, 1, 10\)"):
        task.score(right[:, None], batch)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_train": 0}, "n_train must be an integer from 1 to 100000, got 0"),
        ({"n_valid": 10**6}, "n_valid must be .*, got 1000000"),
        ({"n_test": True}, "n_test must be .*, got True"),
        ({"omit_yellow": 1}, "omit_yellow must be True or False, got 1"),
        ({"seed": -1}, "seed must be .*, got -1"),
    ],
)
def test_a_bad_config_says_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        SortOfClevrConfig(**arguments)


def test_pictures_can_be_looked_at(tmp_path):
    from matplotlib.figure import Figure

    batch = SortOfClevr(SortOfClevrConfig(**FEW)).batch("test", 0, 18)
    figure = Figure(figsize=(15, 8), layout="constrained")
    for i, axes in enumerate(figure.subplots(3, 6).flat):
        _, subtype, colours = question_of(batch.inputs[1][i])
        axes.imshow(batch.inputs[0][i].permute(1, 2, 0).numpy())
        answer = SORT_OF_CLEVR_ANSWERS[batch.targets[i]]
        axes.set(title=f"{subtype} {' '.join(colours)}: {answer}", xticks=[], yticks=[])
    path = tmp_path / "sort_of_clevr.png"
    figure.savefig(path, dpi=70)
    assert path.stat().st_size > 10_000


def test_groups_are_the_types_of_questions_and_their_subtypes():
    task = SortOfClevr(SortOfClevrConfig(n_train=2, n_valid=2, n_test=4))
    batch = task.batch("test", 0, 120)
    groups = task.groups(batch)
    names = [
        f"{question_type}: {subtype}"
        for question_type, subtypes in SORT_OF_CLEVR_QUESTIONS.items()
        for subtype in subtypes
    ]
    assert list(groups) == [*SORT_OF_CLEVR_QUESTIONS, *names]
    types, subtypes = batch.latents["question_type"].tolist(), batch.latents["subtype"].tolist()
    for row, (type_id, subtype_id) in enumerate(zip(types, subtypes, strict=True)):
        name = list(SORT_OF_CLEVR_QUESTIONS)[type_id]
        expected = {name, f"{name}: {SORT_OF_CLEVR_QUESTIONS[name][subtype_id]}"}
        assert {group for group, member in groups.items() if member[row]} == expected


def test_batches_of_one_type_take_turns_and_an_epoch_has_each_question_once():
    task = SortOfClevr(SortOfClevrConfig(by_type=True, **FEW))
    batches = [task.batch("train", index, 16) for index in range(3 * 25)]
    types = [batch.latents["question_type"].unique().tolist() for batch in batches]
    assert types == [[index % 3] for index in range(3 * 25)]
    plain = full_batch(SortOfClevr(SortOfClevrConfig(**FEW)), "train")
    fields = ("image", "question_type", "subtype", "colours")

    def questions(batch):
        columns = [batch.latents[field].tolist() for field in fields]
        return [tuple(map(str, row)) for row in zip(*columns, strict=True)]

    drawn = [question for batch in batches for question in questions(batch)]
    assert sorted(drawn) == sorted(questions(plain))
    assert drawn[:1200] != sorted(drawn)
    # The other splits do not change.
    ours, others = (SortOfClevr(SortOfClevrConfig(by_type=flag, **FEW)) for flag in (True, False))
    assert questions(full_batch(ours, "valid")) == questions(full_batch(others, "valid"))


# Counterfactuals


@pytest.mark.parametrize("name", ["question_type", "subtype", "colours", "positions", "shapes"])
def test_answers_follow_from_what_is_set(name):
    task = SortOfClevr(SortOfClevrConfig(**FEW))
    base, source = task.batch("test", 0, 150), task.batch("test", 1, 150)
    given = source.latents[name]
    if name == "positions":  # of one object; in some images it is too near to another
        moved = torch.arange(6)[:, None] == 1
        given = torch.where(moved, given, base.latents[name])
    wanted = task.counterfactual(base, {name: given})
    defined = wanted.mask[:, 0]
    assert defined.float().mean() > 0.3
    # With an equal type or shape nothing changes.
    assert (wanted.targets != base.targets)[defined].any()
    is_ternary = wanted.latents["question_type"] == 2
    second = wanted.latents["colours"][:, 1]
    is_question = torch.where(is_ternary, second >= 0, second < 0)
    assert torch.equal(defined, is_question & ~overlaps(wanted.latents["positions"]))
    assert defined.all() == (name in ("subtype", "shapes"))
    for i in defined.nonzero()[:, 0].tolist():
        objects = objects_of(wanted.inputs[0][i])
        question_type, subtype, colours = question_of(wanted.inputs[1][i])
        answer, relevant = solve(objects, subtype, colours)
        assert SORT_OF_CLEVR_ANSWERS[wanted.targets[i]] == answer
        named = {SORT_OF_CLEVR_COLOURS.index(colour) for colour in (*colours, *relevant)}
        concerned = wanted.latents["objects_concerned"][i].nonzero()[:, 0].tolist()
        assert named == {*concerned}
        assert question_type == [*SORT_OF_CLEVR_QUESTIONS][wanted.latents["question_type"][i]]
    assert torch.equal(wanted.latents["image"], base.latents["image"])


def overlaps(positions):
    """Whether squares of two objects overlap, or another object is not the only closest one."""
    bad = []
    for scene in positions.tolist():
        pairs = [(a, b) for i, a in enumerate(scene) for b in scene[:i]]
        near = any(max(abs(a[0] - b[0]), abs(a[1] - b[1])) <= 10 for a, b in pairs)
        ties = False
        for a in scene:
            far = sorted((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2 for b in scene if b is not a)
            ties |= far[0] == far[1] or far[-1] == far[-2]
        bad.append(near or ties)
    return torch.tensor(bad)


def test_a_question_without_a_second_colour_shows_none():
    task = SortOfClevr(SortOfClevrConfig(**FEW))
    base = task.batch("test", 0, 60)
    unary = {"question_type": torch.zeros(60, dtype=torch.long)}
    wanted = task.counterfactual(base, unary)
    assert (wanted.latents["colours"][:, 1] == -1).all()
    assert wanted.mask.all()
    assert not wanted.inputs[1][:, 6:12].any()
    back = task.counterfactual(wanted, {"question_type": base.latents["question_type"]})
    assert torch.equal(back.mask[:, 0], base.latents["question_type"] < 2)
