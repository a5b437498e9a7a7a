"""SCAN: compared with an interpreter of its grammar and with the published sizes."""

from collections import Counter
from itertools import product

import pytest
import torch

from tasks.scan import Scan, ScanConfig
from tasks.scan_grammar import SCAN_ACTIONS, SCAN_LATENTS, SCAN_WORDS
from tests.tasks.batches import full_batch

CONTRACT_EXAMPLES = {"": lambda folder: Scan(ScanConfig(split="length"))}

PUBLISHED = {
    "simple": (16_728, 4_182),
    "length": (16_990, 3_920),
    "add_jump": (14_670, 7_706),
    "add_turn_left": (21_890, 1_208),
    "template_jump_around_right": (18_528, 1_173),
    "template_around_right": (15_225, 4_476),
    "template_opposite_right": (15_225, 4_476),
    "template_right": (15_225, 4_476),
}
VERBS = ("walk", "look", "run", "jump")
HOLDING_OUT = [split for split in PUBLISHED if split != "simple"]


def interpret(command):
    """Return the actions of a command by the published rules; invalid commands raise."""
    for conjunction in (" and ", " after "):
        if conjunction in command:
            first, second = command.split(conjunction)
            first, second = interpret(first), interpret(second)
            return first + second if conjunction == " and " else second + first
    *rest, last = command.split()
    if last in ("twice", "thrice"):
        return interpret(" ".join(rest)) * {"twice": 2, "thrice": 3}[last]
    if not rest:
        return {"walk": ["I_WALK"], "look": ["I_LOOK"], "run": ["I_RUN"], "jump": ["I_JUMP"]}[last]
    turn = {"left": ["I_TURN_LEFT"], "right": ["I_TURN_RIGHT"]}[last]
    act = [] if rest[0] == "turn" else interpret(rest[0])
    match rest[1:]:
        case []:
            return turn + act
        case ["opposite"]:
            return turn + turn + act
        case ["around"]:
            return (turn + act) * 4
    raise ValueError(command)


def grammar():
    """Derive all commands: C -> S and S | S after S | S; S -> V twice | V thrice | V; ..."""
    directed = [f"{verb}{{}} {side}" for verb in (*VERBS, "turn") for side in ("left", "right")]
    v = [*VERBS] + [
        form.format(manner) for manner in ("", " opposite", " around") for form in directed
    ]
    s = [phrase + times for phrase in v for times in ("", " twice", " thrice")]
    return s + [f"{a} {link} {b}" for a in s for link in ("and", "after") for b in s]


def texts(task, split):
    words = full_batch(task, split).inputs[0].tolist()
    return [" ".join(SCAN_WORDS[i] for i in row if i) for row in words]


@pytest.fixture(scope="module")
def simple():
    return Scan(ScanConfig(split="simple"))


def test_the_papers_examples():
    assert interpret("jump opposite left after walk around left") == (
        ["I_TURN_LEFT", "I_WALK"] * 4 + ["I_TURN_LEFT", "I_TURN_LEFT", "I_JUMP"]
    )
    assert interpret("turn opposite right thrice") == ["I_TURN_RIGHT"] * 6
    assert interpret("look thrice and jump left") == [*["I_LOOK"] * 3, "I_TURN_LEFT", "I_JUMP"]


def test_all_commands_are_those_of_the_grammar_and_mean_what_they_should(simple):
    seen = []
    for split in simple.splits:
        batch = full_batch(simple, split)
        texts_ = texts(simple, split)
        seen += texts_
        for text, answer in zip(texts_, batch.targets.tolist(), strict=True):
            expected = [*interpret(text), "<eos>"]
            expected += ["<pad>"] * (49 - len(expected))
            assert [SCAN_ACTIONS[i] for i in answer] == expected
    assert len(seen) == 20_910
    assert sorted(seen) == sorted(grammar())


@pytest.mark.parametrize("split", ["train", "id", "ood"])
def test_inputs_targets_mask_and_latents(split):
    task = Scan(ScanConfig(split="add_turn_left"))
    batch = task.batch(split, 1, 300)
    commands, given = batch.inputs
    assert commands.shape == (300, 9)
    width = {"ood": 1 + 3 + 24}.get(split, 49)  # `turn left thrice` and the longest
    assert given.shape == batch.targets.shape == batch.mask.shape == (300, width)
    names = {name: values.tolist() for name, values in batch.latents.items()}
    for i in range(300):
        text = task.text(batch, i)
        actions = interpret(text)
        n = len(actions)
        assert [SCAN_WORDS[token] for token in commands[i, : len(text.split())]] == text.split()
        assert not commands[i, len(text.split()) :].any()
        # The model is given what comes before each target; padding does not count.
        assert [SCAN_ACTIONS[token] for token in given[i, : n + 1]] == ["<bos>", *actions]
        assert not given[i, n + 1 :].any()
        assert batch.mask[i].tolist() == [True] * (n + 1) + [False] * (width - 1 - n)
        assert task.decode(batch.targets[i]) == " ".join(actions)
        assert names["length"][i] == n

        link = SCAN_LATENTS["conjunction"][names["conjunction"][i]]
        phrases = text.split(f" {link} ")
        assert len(phrases) == 1 + (link != "none")
        for place in (1, 2):
            described = {
                latent: names[f"{latent}_{place}"][i] for latent in ("verb", "direction", "manner")
            }
            times = names[f"times_{place}"][i]
            if place > len(phrases):
                assert {*described.values(), times} == {-1}
                continue
            written = [
                SCAN_LATENTS[latent][described[latent]]
                for latent in ("verb", "manner", "direction")
            ]
            written += [("once", "twice", "thrice")[times - 1]]
            assert [x for x in written if x not in ("none", "once")] == phrases[place - 1].split()


@pytest.mark.parametrize("split", HOLDING_OUT)
def test_the_sizes_are_those_of_the_published_sets(split):
    task = Scan(ScanConfig(split=split, n_id=0))
    assert task.splits == ("train", "ood")
    assert (task.size("train"), task.size("ood")) == PUBLISHED[split]
    with pytest.raises(ValueError, match=r"split must be one of train, ood, got 'id'"):
        task.batch("id", 0, 1)


def test_simple_holds_out_a_fifth(simple):
    assert simple.splits == ("train", "id")
    assert (simple.size("train"), simple.size("id")) == PUBLISHED["simple"]
    assert not set(texts(simple, "train")) & set(texts(simple, "id"))


HELD_OUT = {
    "length": lambda text: len(interpret(text)) > 22,
    "add_jump": lambda text: "jump" in text and text != "jump",
    "add_turn_left": lambda text: "turn left" in text and text != "turn left",
    "template_jump_around_right": lambda text: "jump around right" in text,
    "template_around_right": lambda text: "around right" in text,
    "template_opposite_right": lambda text: "opposite right" in text,
    "template_right": lambda text: any(f"{verb} right" in text for verb in VERBS),
}
LEFT_OUT = {
    "template_jump_around_right": "turn around right",
    "template_around_right": "turn around right",
    "template_opposite_right": "turn opposite right",
    "template_right": "turn right",
}


@pytest.mark.parametrize("split", HOLDING_OUT)
def test_what_is_held_out(split):
    task = Scan(ScanConfig(split=split, seed=3))
    train, known, held_out = (texts(task, side) for side in ("train", "id", "ood"))
    assert len(set(known)) == len(known) == 500
    assert len(set(held_out)) == len(held_out)
    assert not set(train) & set(known)
    rest = [text for text in grammar() if LEFT_OUT.get(split, "nothing") not in text]
    assert set(held_out) == set(filter(HELD_OUT[split], rest))
    assert set(train) | set(known) == set(rest) - set(held_out)
    repeated = {text: n for text, n in Counter(train).items() if n > 1}
    primitive = {"add_jump": "jump", "add_turn_left": "turn left"}.get(split)
    assert list(repeated) == ([primitive] if primitive else [])
    if primitive:
        assert repeated[primitive] / len(train) == pytest.approx(0.1, abs=1e-4)
    # Every word of what is held out is known.
    assert set(" ".join(held_out).split()) <= set(" ".join(train).split())


@pytest.mark.parametrize(("cutoff", "n"), [(22, 16_990), (24, 17_326), (30, 19_758), (40, 20_782)])
def test_cutoff(cutoff, n):
    task = Scan(ScanConfig(split="length", cutoff=cutoff, n_id=0))
    lengths = [len(interpret(text)) for text in grammar()]
    assert task.size("train") == n == sum(length <= cutoff for length in lengths)
    train, ood = (task.batch(split, 0, 100) for split in ("train", "ood"))
    assert train.targets.shape == (100, cutoff + 1)
    assert ood.targets.shape == (100, 49)
    assert train.latents["length"].max() <= cutoff < ood.latents["length"].min()


def test_primitive_share():
    task = Scan(ScanConfig(split="add_jump", n_id=0, primitive_share=0.5))
    assert Counter(texts(task, "train"))["jump"] == 13_203
    once = Scan(ScanConfig(split="add_jump", n_id=0, primitive_share=0))
    assert Counter(texts(once, "train"))["jump"] == 1


def test_train_is_a_stream_of_epochs_and_the_rest_comes_in_one_order():
    task = Scan(ScanConfig(split="length"))
    size = task.size("train")
    first, second = (task.batch("train", index, size).latents["command"] for index in (0, 1))
    assert not torch.equal(first, second)
    assert torch.equal(first.sort().values, second.sort().values)
    once, twice = task.batch("ood", 0, 3_920), task.batch("ood", 0, 7_840)
    assert torch.equal(twice.targets, torch.cat([once.targets, once.targets]))
    # Every prefix is balanced over the number of actions.
    share = once.latents["length"].bincount() / 3_920
    actual = once.latents["length"][:500].bincount(minlength=len(share)) / 500
    assert (share - actual).abs().max() < 0.005


def test_the_seed_chooses_and_a_larger_id_begins_with_a_smaller_one():
    config = {"split": "add_jump"}
    few, many = (set(texts(Scan(ScanConfig(**config, n_id=n)), "id")) for n in (50, 100))
    other = set(texts(Scan(ScanConfig(**config, n_id=50, seed=1)), "id"))
    assert few < many
    assert len(few & other) < 10


def test_score_by_hand(simple):
    batch = simple.batch("id", 0, 4)
    perfect = {"correct": [1.0] * 4, "token_correct": [1.0] * 4}
    answers = batch.targets.clone()
    assert {name: x.tolist() for name, x in simple.score(answers, batch).items()} == perfect
    # What follows <eos> does not count, and what is missing there is not missed.
    answers[~batch.mask] = 5
    wider = torch.nn.functional.pad(answers, (0, 7), value=3)
    longest = int(batch.mask.sum(1).max())
    for same in (answers, wider, answers[:, :longest]):
        assert {name: x.tolist() for name, x in simple.score(same, batch).items()} == perfect

    end = batch.latents["length"]
    late = batch.targets.clone()
    late[torch.arange(4), end] = 3  # goes on where it should end
    scores = simple.score(late, batch)
    assert scores["correct"].tolist() == [0] * 4
    assert scores["token_correct"].tolist() == pytest.approx((end / (end + 1)).tolist())
    cut = simple.score(batch.targets[:, :1], batch)
    assert cut["token_correct"].tolist() == pytest.approx((1 / (end + 1)).tolist())

    with pytest.raises(ValueError, match=r"output must be .* of shape \(4, 49, 9\)"):
        simple.score(torch.zeros(4, 49, 9, dtype=torch.long), batch)
    with pytest.raises(ValueError, match=r"integers of shape \(4, pos\), got torch.float32"):
        simple.score(torch.zeros(4, 49), batch)


def test_a_trimmed_batch_lacks_padding_alone(simple):
    whole = simple.batch("id", 3, 40)
    trimmed = Scan(simple.config, trimmed=True).batch("id", 3, 40)
    (command, actions), (short_command, short_actions) = whole.inputs, trimmed.inputs
    for wide, narrow in (
        (command, short_command),
        (actions, short_actions),
        (whole.targets, trimmed.targets),
        (whole.mask, trimmed.mask),
    ):
        width = narrow.shape[1]
        assert torch.equal(narrow, wide[:, :width])
        assert not wide[:, width:].any()
    # Nothing is left to be cut: of the longest ones the last column counts.
    assert (short_command[:, -1] != 0).any()
    assert trimmed.mask[:, -1].any()
    assert short_actions.shape == trimmed.targets.shape == trimmed.mask.shape
    assert trimmed.targets.shape[1] < whole.targets.shape[1]
    assert [simple.text(trimmed, row) for row in range(40)] == [
        simple.text(whole, row) for row in range(40)
    ]


def test_decode(simple):
    ids = torch.tensor([1, 3, 0, 7, 2, 3, 3])
    assert simple.decode(ids) == "I_WALK I_TURN_LEFT"
    assert simple.decode(torch.tensor([2, 0])) == ""


def test_the_parse_is_unique(simple):
    names = [f"{of}_{i}" for of, i in product(("verb", "direction", "manner", "times"), (1, 2))]
    rows = torch.cat(
        [
            torch.stack([full_batch(simple, split).latents[x] for x in [*names, "conjunction"]], 1)
            for split in simple.splits
        ]
    )
    assert len(rows.unique(dim=0)) == 20_910


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"split": "addjump"},
            r"split must be one of simple, .*, got 'addjump'; nearest: 'add_jump'",
        ),
        ({"cutoff": 48}, r"cutoff must be an integer from 1 to 47, got 48"),
        ({"split": "simple", "n_id": 0}, r"n_id must be an integer from 1 to 20909, got 0"),
        ({"n_id": 16_990}, r"n_id must be an integer from 0 to 16989, got 16990"),
        ({"cutoff": 1}, r"n_id must be an integer from 0 to 5, got 500"),
        ({"n_id": 1.0}, r"n_id must be .*, got 1.0"),
        ({"primitive_share": 1}, r"primitive_share must be a number from 0 to 0.9, got 1"),
        ({"primitive_share": True}, r"primitive_share must be .*, got True"),
        ({"seed": -1}, r"seed must be .*, got -1"),
    ],
)
def test_a_bad_config_says_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        ScanConfig(**{"split": "length"} | arguments)


# Counterfactuals


@pytest.mark.parametrize("name", ["conjunction", "verb_1", "direction_2", "manner_1", "times_2"])
def test_actions_follow_from_the_phrases_that_are_set(simple, name):
    base, source = (simple.batch("id", index, 300) for index in (0, 1))
    wanted = simple.counterfactual(base, {name: source.latents[name]})
    is_command = wanted.latents["command"] >= 0
    assert is_command.float().mean() > 0.1
    names = {key: values.tolist() for key, values in wanted.latents.items()}
    for i in range(300):
        phrases = [text_of_phrase(names, number, i) for number in (1, 2)]
        link = SCAN_LATENTS["conjunction"][names["conjunction"][i]]
        text = phrases[0] if link == "none" else f"{phrases[0]} {link} {phrases[1]}"
        if text not in GRAMMAR:
            assert not is_command[i]
            assert names["length"][i] == 0
            assert not wanted.mask[i].any()
            assert torch.equal(wanted.targets[i], base.targets[i])
            assert simple.text(wanted, i) == simple.text(base, i)
            continue
        assert is_command[i]
        assert simple.text(wanted, i) == text
        actions = interpret(text)
        expected = [SCAN_ACTIONS.index(action) for action in actions]
        n = len(actions)
        assert names["length"][i] == n
        assert wanted.targets[i].tolist() == expected + [2] + [0] * (48 - n)
        assert wanted.inputs[1][i].tolist() == [1] + expected + [0] * (48 - n)
        assert wanted.mask[i].tolist() == [True] * (n + 1) + [False] * (48 - n)
        if name == "conjunction" and link == "none":
            assert {names[f"{part}_2"][i] for part in ("verb", "times")} == {-1}


def text_of_phrase(names, number, i):
    """The words of a phrase by its latents, whether or not the grammar has them."""
    parts = []
    for part in ("verb", "manner", "direction"):
        index = names[f"{part}_{number}"][i]
        parts.append("?" if index < 0 else SCAN_LATENTS[part][index])
    parts.append(("?", "none", "twice", "thrice")[max(0, names[f"times_{number}"][i])])
    return " ".join(part for part in parts if part != "none")


GRAMMAR = set(grammar())


def test_commands_that_are_longer_than_the_batch_have_no_answer():
    task = Scan(ScanConfig(split="length", cutoff=4))
    base = task.batch("train", 0, 200)
    thrice = torch.full_like(base.latents["times_1"], 3)
    wanted = task.counterfactual(base, {"times_1": thrice})
    length = torch.tensor([len(interpret(task.text(wanted, i))) for i in range(200)])
    assert torch.equal(wanted.latents["length"], length)
    assert wanted.targets.shape == base.targets.shape == (200, 5)
    assert torch.equal(wanted.mask.any(1), length <= 4)
    assert torch.equal(wanted.mask.sum(1)[length <= 4], length[length <= 4] + 1)
    assert 0 < (length <= 4).sum() < 200
    trimmed = Scan(ScanConfig(split="simple"), trimmed=True)
    base = trimmed.counterfactual(trimmed.batch("id", 0, 1), {})
    assert trimmed.text(base, 0)
    shown, width = (part.shape[1] for part in base.inputs)
    longer = {name: torch.tensor([index]) for name, index in LONGEST.items()}
    wanted = trimmed.counterfactual(base, longer)
    assert wanted.latents["length"].item() == 48
    assert not wanted.mask.any()
    assert [part.shape[1] for part in wanted.inputs] == [shown, width]
    # More words than the batch has room for, though the answer fits.
    batches = (trimmed.batch("id", index, 1) for index in range(1000))
    base = next(b for b in batches if b.inputs[0].shape[1] == 4 and b.targets.shape[1] > 6)
    wordy = {name: torch.tensor([index]) for name, index in WORDY.items()}
    wanted = trimmed.counterfactual(base, wordy)
    assert wanted.latents["length"].item() == 5
    assert not wanted.mask.any()


WORDY = {  # walk and walk left twice
    **{"conjunction": 1, "verb_1": 0, "direction_1": 0, "manner_1": 0, "times_1": 1},
    **{"verb_2": 0, "direction_2": 1, "manner_2": 0, "times_2": 2},
}
LONGEST = {
    **{"conjunction": 1, "verb_1": 0, "direction_1": 1, "manner_1": 2, "times_1": 3},
    **{"verb_2": 0, "direction_2": 1, "manner_2": 2, "times_2": 3},
}
