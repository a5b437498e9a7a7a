"""The ESBN tasks: compared with a solver that reads the images, and properties of the sampler."""

from collections import Counter, defaultdict

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib import image

from tasks.esbn import ESBN, ESBN_CHARACTERS, ESBN_RELATIONS, ESBNConfig

CONTRACT_EXAMPLES = {"": lambda folder: ESBN(ESBNConfig(rule="rmts", n_withheld=50))}

PAPER = [(rule, m) for rule in ESBN_RELATIONS for m in (0, 50, 85, 95)] + [("same_different", 98)]
SIZES = {
    "same_different": (2, 2),
    "rmts": (6, 2),
    "distribution_of_three": (9, 4),
    "identity_rules": (9, 4),
}
# How often a solver can be right that does not see the first row, or pair.
WITHOUT_FIRST = {"rmts": 1 / 2, "distribution_of_three": 1 / 2, "identity_rules": 2 / 3}


def seen(task, batch):
    """Return the characters of the images, by comparing pixels."""
    names = {
        picture.numpy().tobytes(): character
        for picture, character in zip(task.pictures, ESBN_CHARACTERS, strict=True)
    }
    return [[names[picture.numpy().tobytes()] for picture in images] for images in batch.inputs]


def form(row):
    """Return the pattern of equal items of a row: ABA is (0, 1, 0)."""
    return tuple(row.index(item) for item in row)


def solve(rule, row):
    """Return the relation's name and the correct answers."""
    if rule == "same_different":
        return ("same", [1]) if row[0] == row[1] else ("different", [0])
    if rule == "rmts":
        pairs = [row[i] == row[i + 1] for i in (0, 2, 4)]
        return "same" if pairs[0] else "different", [i for i in (0, 1) if pairs[1 + i] == pairs[0]]
    first, begun, candidates = row[:3], row[3:5], row[5:]
    if rule == "distribution_of_three":
        assert len(set(first)) == 3
        answers = [i for i, item in enumerate(candidates) if {*begun, item} == {*first}]
        complete = [*begun, candidates[answers[0]]]
        return "".join("ABC"[first.index(item)] for item in complete), answers
    answers = [i for i, item in enumerate(candidates) if form([*begun, item]) == form(first)]
    assert not set(begun) & set(first)
    return "".join("ABC"[i] for i in form(first)), answers


@pytest.mark.parametrize(("rule", "m"), PAPER)
def test_answers_are_those_of_the_pictures(rule, m):
    task = ESBN(ESBNConfig(rule=rule, n_withheld=m))
    assert (task.n_images, task.n_answers) == SIZES[rule]
    assert task.splits == (("train", "id", "ood") if m else ("train", "id"))
    for split in task.splits:
        batch = task.batch(split, 3, 150)
        assert batch.inputs.shape == (150, task.n_images, 1, 32, 32)
        assert batch.inputs.dtype == torch.float32
        assert batch.targets.shape == batch.mask.shape == (150, 1)
        assert batch.mask.all()
        rows = seen(task, batch)
        for i, row in enumerate(rows):
            relation, answers = solve(rule, row)
            if rule.endswith(("three", "rules")):
                assert len(set(row[5:])) == 4
            assert answers == batch.targets[i].tolist() == [batch.latents["answer"][i]]
            assert relation == task.relations[batch.latents["relation"][i]]
            assert row == [ESBN_CHARACTERS[j] for j in batch.latents["objects"][i]]
        shown = {ESBN_CHARACTERS.index(character) for row in rows for character in row}
        assert shown <= set(task.objects(split).tolist())
        assert len(shown) > 0.8 * len(task.objects(split))


@pytest.mark.parametrize("rule", ESBN_RELATIONS)
def test_answers_and_relations_are_balanced(rule):
    task = ESBN(ESBNConfig(rule=rule, n_withheld=50))
    n_pairs = len(set(task.relations)) * task.n_answers
    if rule == "same_different":
        n_pairs = 2
    pairs = Counter()
    for index in range(n_pairs):
        latents = task.batch("ood", index, 36).latents
        pairs.update(zip(latents["relation"].tolist(), latents["answer"].tolist(), strict=True))
        assert set(latents["answer"].bincount().tolist()) == {36 // task.n_answers}
    assert len(pairs) == n_pairs
    assert set(pairs.values()) == {36}


@pytest.mark.parametrize(("rule", "best"), WITHOUT_FIRST.items())
def test_the_first_row_is_needed(rule, best):
    task = ESBN(ESBNConfig(rule=rule))
    n_first = 2 if rule == "rmts" else 3
    latents = task.batch("train", 0, 144 * 100).latents
    answers = defaultdict(Counter)
    for row, answer in zip(latents["objects"].tolist(), latents["answer"].tolist(), strict=True):
        answers[form(row[n_first:])][answer] += 1
    right = sum(max(actual.values()) for actual in answers.values())
    assert right / (144 * 100) == pytest.approx(best, abs=0.02)


def test_candidates_and_places_tell_nothing_alone():
    # Every image alone is an object drawn with equal chances, whatever the answer is.
    task = ESBN(ESBNConfig(rule="identity_rules", n_withheld=90))
    latents = task.batch("train", 0, 24_000).latents
    objects, answer = latents["objects"], latents["answer"]
    for place in range(9):
        for answer_id in range(4):
            counts = objects[answer == answer_id, place].bincount(minlength=100)[
                task.objects("train")
            ]
            assert len(counts) == 10
            expected = counts.sum() / 10
            assert ((counts - expected) ** 2 / expected).sum() < 9 + 6 * 18**0.5


def test_withheld_objects_are_never_shown_and_grow_with_m():
    before = set()
    for m in (5, 50, 85, 95):
        task = ESBN(ESBNConfig(rule="rmts", n_withheld=m, seed=2))
        withheld, shown = (set(task.objects(split).tolist()) for split in ("ood", "train"))
        assert before < withheld
        assert shown | withheld == set(range(100))
        assert not shown & withheld
        assert set(task.objects("id").tolist()) == shown
        assert len(withheld) == m
        before = withheld
    other = ESBN(ESBNConfig(rule="rmts", n_withheld=95, seed=3))
    assert set(other.objects("ood").tolist()) != before
    with pytest.raises(ValueError, match=r"split must be one of train, id, got 'ood'"):
        ESBN(ESBNConfig(rule="rmts")).objects("ood")


def test_two_objects_make_four_problems():
    task = ESBN(ESBNConfig(rule="same_different", n_withheld=98))
    a, b = task.objects("train").tolist()
    rows = Counter(map(tuple, task.batch("train", 0, 400).latents["objects"].tolist()))
    assert set(rows) == {(a, a), (b, b), (a, b), (b, a)}
    assert rows[a, a] + rows[b, b] == 200


def test_streams_differ():
    task = ESBN(ESBNConfig(rule="rmts", n_withheld=50))
    other = ESBN(ESBNConfig(rule="rmts", n_withheld=50, seed=1))
    first = task.batch("train", 0, 32).latents["objects"]
    again = ESBN(task.config).batch("train", 0, 32).latents["objects"]
    assert torch.equal(first, again)
    for different in (
        task.batch("id", 0, 32),
        task.batch("train", 1, 32),
        other.batch("id", 0, 32),
    ):
        assert not torch.equal(first, different.latents["objects"])
    last = task.batch("train", 2**41, 3)
    assert len(last) == 3


def test_pictures_are_all_there_and_unlike():
    pictures = ESBN(ESBNConfig(rule="rmts")).pictures
    assert pictures.shape == (100, 1, 32, 32)
    assert pictures.min() == 0
    assert pictures.max() == 1
    ink = pictures.sum((1, 2, 3))
    assert ink.min() > 50
    # None reaches the edge, so none is cut off.
    frame = torch.ones(32, 32, dtype=torch.bool)
    frame[1:-1, 1:-1] = False
    assert (pictures[:, 0, frame] == 0).all()
    flat = pictures.flatten(1)
    squared = torch.cdist(flat, flat).square().fill_diagonal_(torch.inf)
    assert squared.min() > 30  # as if 30 pixels were black instead of white
    # Nor are they alike when one is moved by up to two pixels.
    padded = torch.nn.functional.pad(pictures[:, 0], (2, 2, 2, 2))
    norm = flat.norm(dim=1)
    for y in range(5):
        for x in range(5):
            moved = padded[:, y : y + 32, x : x + 32].flatten(1)
            alike = flat @ moved.T / (norm[:, None] * norm)
            assert alike.fill_diagonal_(0).max() < 0.7


def test_characters_are_in_the_font_and_drawn():
    path = f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf"
    font = matplotlib.ft2font.FT2Font(path)
    assert len(set(ESBN_CHARACTERS)) == 100
    assert all(font.get_char_index(ord(character)) for character in ESBN_CHARACTERS)
    pictures = ESBN(ESBNConfig(rule="rmts")).pictures[:, 0]
    square = pictures[ESBN_CHARACTERS.index("□")]
    rows = square.any(1).nonzero().flatten()
    # A frame around nothing, in the middle of the picture.
    assert abs(rows[0] + rows[-1] - 31) <= 1
    assert torch.allclose(square, square.T, atol=0.3)
    inner = square[rows[0] + 3 : rows[-1] - 2, rows[0] + 3 : rows[-1] - 2]
    assert inner.numel() > 100
    assert not inner.any()
    seven = pictures[ESBN_CHARACTERS.index("7")]
    top, bottom = seven.any(1).nonzero().flatten()[[1, -2]]
    assert seven[top].sum() > 3 * seven[bottom].sum() > 0


def test_a_sheet_of_objects_and_problems(tmp_path):
    """Save an image of the objects and of some problems for inspection."""
    pictures = ESBN(ESBNConfig(rule="rmts")).pictures[:, 0]
    rows = [torch.cat([*pictures[i : i + 10]], 1) for i in range(0, 100, 10)]
    for rule in ESBN_RELATIONS:
        for images in ESBN(ESBNConfig(rule=rule)).batch("train", 0, 3).inputs[:, :, 0]:
            row = torch.cat([*images], 1)
            rows.append(torch.nn.functional.pad(row, (0, 320 - row.shape[1]), value=0.5))
    image.imsave(tmp_path / "esbn.png", 1 - torch.cat(rows).numpy(), cmap="gray", vmin=0, vmax=1)
    read = image.imread(tmp_path / "esbn.png")[..., 0]
    assert read.shape == (22 * 32, 320)
    assert np.allclose(read[:32, :32], 1 - pictures[0].numpy(), atol=0.01)


def test_score():
    task = ESBN(ESBNConfig(rule="identity_rules"))
    assert task.chance == 1 / 4
    batch = task.batch("id", 0, 8)
    logits = torch.nn.functional.one_hot(batch.targets, 4).float()
    assert task.score(logits, batch)["accuracy"].tolist() == [1] * 8
    assert task.score(logits.roll(1, -1), batch)["accuracy"].tolist() == [0] * 8
    with pytest.raises(ValueError, match=r"logits must have shape \(8, 1, 4\), got \(8, 4\)"):
        task.score(logits[:, 0], batch)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "rmt"}, r"rule must be one of same_different, .*, got 'rmt'; nearest: 'rmts'"),
        (
            {"n_withheld": 96},
            r"n_withheld must be 0 or an integer from 5 to 95, .*'rmts' .*, got 96",
        ),
        ({"n_withheld": 4}, r"n_withheld must be 0 or an integer from 5 .*, got 4"),
        ({"n_withheld": False}, r"n_withheld must be .*, got False"),
        ({"n_withheld": -1}, r"n_withheld must be .*, got -1"),
        (
            {"rule": "same_different", "n_withheld": 99},
            r"n_withheld must be .* from 2 to 98, .* got 99",
        ),
        (
            {"rule": "identity_rules", "n_withheld": 97},
            r"n_withheld must be .* from 4 to 96, .* got 97",
        ),
        ({"seed": 2**32}, r"seed must be .*, got 4294967296"),
    ],
)
def test_a_bad_config_says_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        ESBNConfig(**{"rule": "rmts"} | arguments)


def test_bad_arguments_of_batch():
    task = ESBN(ESBNConfig(rule="rmts"))
    with pytest.raises(
        ValueError, match=r"split must be one of train, id, got 'trian'; nearest: 'train'"
    ):
        task.batch("trian", 0, 1)
    with pytest.raises(ValueError, match=r"index must be .*, got -1"):
        task.batch("train", -1, 1)
    with pytest.raises(ValueError, match=r"size must be .*, got 0"):
        task.batch("id", 0, 0)


@pytest.mark.parametrize("rule", ESBN_RELATIONS)
def test_groups_are_the_relations(rule):
    task = ESBN(ESBNConfig(rule=rule))
    batch = task.batch("id", 0, 30)
    groups = task.groups(batch)
    assert list(groups) == list(dict.fromkeys(task.relations))
    for row, relation in enumerate(batch.latents["relation"].tolist()):
        named = [name for name, member in groups.items() if member[row]]
        assert named == [task.relations[relation]]


# Counterfactuals


@pytest.mark.parametrize("rule", ESBN_RELATIONS)
def test_pictures_follow_from_what_is_set(rule):
    task = ESBN(ESBNConfig(rule=rule))
    base, source = (task.batch("train", index, 144) for index in (0, 1))
    names = ["relation", "answer", "variant", "letters"]
    if rule == "same_different":
        names.remove("answer")
    for name in names:
        given = source.latents[name]
        if name == "letters":  # another object for the letter B
            given = base.latents[name].clone()
            given[:, 1] = source.latents[name][:, 1]
        wanted = task.counterfactual(base, {name: given})
        clear = [len({*row}) == len(row) for row in wanted.latents["letters"].tolist()]
        assert wanted.mask[:, 0].tolist() == clear
        assert (name == "letters") == (not all(clear))
        for i, row in enumerate(seen(task, wanted)):
            if clear[i]:
                relation, answers = solve(rule, row)
                assert answers == wanted.targets[i].tolist()
                assert relation == task.relations[wanted.latents["relation"][i]]
            assert row == [ESBN_CHARACTERS[j] for j in wanted.latents["objects"][i]]
        assert torch.equal(wanted.latents[name], given)
        has_several = len({*base.latents["variant"].tolist()}) > 1
        if name != "variant" or has_several:
            assert (wanted.inputs != base.inputs).any()


def test_letters_keep_their_objects_also_where_they_were_not_shown():
    task = ESBN(ESBNConfig(rule="same_different"))
    base = task.batch("train", 0, 50)
    wanted = task.counterfactual(base, {"relation": torch.zeros(50, dtype=torch.long)})
    assert torch.equal(wanted.latents["objects"], base.latents["letters"])
    assert (wanted.targets == 0).all()
    with pytest.raises(ValueError, match="got 'answer', which follows from relation"):
        task.counterfactual(base, {"answer": base.latents["answer"]})
