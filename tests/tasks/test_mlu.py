"""MLU: compared with Python's parser."""

import ast
import re

import numpy as np
import pytest
import torch

from tasks.mlu import (
    MLU,
    MLU_CHARACTERS,
    MLU_OPERATORS,
    MLUConfig,
    MLULines,
    MLULinesConfig,
)

CONTRACT_EXAMPLES = {
    "": lambda folder: MLU(MLUConfig(low=-20, high=20)),
    "fixed lines": lambda folder: MLULines(MLULinesConfig(low=-20, high=20)),
}

SMALL = {"low": -5, "high": 4}
LINE = re.compile(r"([xy])=(-?\d+),([xy])=(-?\d+),([xy][-+*][xy])")


def evaluate(line):
    """Return the answer to a line and its variables, with Python's parser."""
    first, a, second, b, expression = LINE.fullmatch(line).groups()
    assert {first, second} == {"x", "y"}
    values = {first: int(a), second: int(b)}
    node = ast.parse(expression, mode="eval").body
    left, right = values[node.left.id], values[node.right.id]
    if isinstance(node.op, ast.Mult):
        return left * right, values
    return left + (right if isinstance(node.op, ast.Add) else -right), values


def lines(task, split, size):
    batch = task.batch(split, 0, size)
    return [task.text(batch, i) for i in range(size)]


@pytest.fixture(scope="module")
def paper():
    return MLU(MLUConfig())


@pytest.fixture(scope="module")
def small():
    return MLU(MLUConfig(**SMALL))


def test_the_papers_example():
    assert evaluate("y=691,x=-999,y*x") == (-690309, {"y": 691, "x": -999})


@pytest.mark.parametrize("split", MLU.SPLITS)
@pytest.mark.parametrize(
    "numbers",
    [
        {},
        SMALL,
        {"low": 0, "high": 2, "ood_share": 0.5},
        {"low": 95, "high": 105},
        {"low": 9000, "high": 10_000},
    ],
)
def test_lines_are_read_back_and_answered(split, numbers):
    task = MLU(MLUConfig(**numbers))
    batch = task.batch(split, 1, 400)
    source, given = batch.inputs
    assert (source.dtype, given.dtype, batch.targets.dtype) == (torch.int64,) * 3
    names = {name: values.tolist() for name, values in batch.latents.items()}
    for i in range(400):
        line = task.text(batch, i)
        result, values = evaluate(line)
        assert all(task.config.low <= number < task.config.high for number in values.values())
        answer = str(result)
        n = len(answer)
        assert [MLU_CHARACTERS[token] for token in source[i, : len(line)]] == list(line)
        assert not source[i, len(line) :].any()
        assert [MLU_CHARACTERS[token] for token in batch.targets[i, : n + 1]] == [*answer, "<eos>"]
        assert not batch.targets[i, n + 1 :].any()
        assert [MLU_CHARACTERS[token] for token in given[i, : n + 1]] == ["<bos>", *answer]
        assert not given[i, n + 1 :].any()
        assert batch.mask[i].tolist() == [True] * (n + 1) + [False] * (given.shape[1] - n - 1)
        assert task.decode(batch.targets[i]) == answer
        assert (names["x"][i], names["y"][i], names["result"][i]) == (
            *(values[variable] for variable in "xy"),
            result,
        )
        operands = "".join("xy"[names[side][i]] for side in ("left", "right"))
        assert line[-3:] == operands[0] + MLU_OPERATORS[names["operator"][i]] + operands[1]
        assert line[0] == "xy"[names["first"][i]]
        assert names["length"][i] == n


@pytest.mark.parametrize(
    ("numbers", "widths"),
    [
        ({}, (len("x=-1000,y=-1000,x*y"), len("1000000") + 1)),
        ({"low": -999}, (len("x=-999,y=-999,x*y"), len("-998001") + 1)),
        ({"low": 0, "high": 2}, (len("x=1,y=1,x-y"), len("-1") + 1)),
        (SMALL, (len("x=-5,y=-5,x*y"), len("-20") + 1)),
    ],
)
def test_widths_are_those_of_the_longest(numbers, widths):
    """Computed by hand; with few numbers, the longest line and answer occur."""
    task = MLU(MLUConfig(**{"ood_share": 0.5, **numbers}))
    batches = [task.batch(split, 0, 20_000) for split in task.splits]
    assert {(batch.inputs[0].shape[1], batch.targets.shape[1]) for batch in batches} == {widths}
    if "high" in numbers:
        assert any(batch.inputs[0][:, -1].any() for batch in batches)
        assert any(batch.mask[:, -1].any() for batch in batches)


def test_splits_are_disjoint_and_together_all_lines(small):
    """9 numbers make 45 pairs, 4 of them held out, and 81 (x, y) in 24 forms."""
    actual = {split: set(lines(small, split, 60_000)) for split in small.splits}
    every = {
        f"{a}={m},{b}={n},{left}{sign}{right}"
        for a, b in ("xy", "yx")
        for m in range(-5, 4)
        for n in range(-5, 4)
        for sign in MLU_OPERATORS
        for left in "xy"
        for right in "xy"
    }
    assert len(every) == 81 * 24
    assert sum(map(len, actual.values())) == len(every)
    assert set.union(*actual.values()) == every

    def pairs(split):
        return {frozenset(evaluate(line)[1].values()) for line in actual[split]}

    assert len(pairs("ood")) == small.config.n_ood == 4
    assert pairs("train") == pairs("id")
    assert not pairs("train") & pairs("ood")
    assert len(pairs("train")) == 41
    assert len(actual["train"]) == 23 * len(actual["id"])


def test_fixed_lines_are_one_for_each_pair_and_operator_split_at_random():
    """9 numbers make 81 (x, y), each with 3 operators; 24 of the 243 lines are for tests."""
    task = MLULines(MLULinesConfig(**SMALL))
    actual = {split: set(lines(task, split, 20_000)) for split in task.splits}
    assert {split: len(found) for split, found in actual.items()} == {"train": 219, "id": 24}
    every = actual["train"] | actual["id"]
    questions = {(*sorted(line.split(",")[:2]), line[-2]) for line in every}
    assert len(every) == len(questions) == 243
    # Orders and operands are random: four ways to name the operands, two to begin.
    counts = [sum(line[-3::2] == operands for line in every) for operands in ("xx", "xy", "yx")]
    assert all(abs(count - 243 / 4) < 5 * (243 * 3 / 16) ** 0.5 for count in counts)
    assert abs(sum(line[0] == "x" for line in every) - 243 / 2) < 5 * (243 / 4) ** 0.5
    for line in every:
        evaluate(line)


def test_the_papers_fixed_lines_are_twelve_millions():
    config = MLULinesConfig()
    assert (config.n_lines, config.n_test) == (12_000_000, 1_200_000)


def test_fixed_lines_are_answered_as_others_are():
    task = MLULines(MLULinesConfig(low=-100, high=100))
    batch = task.batch("id", 0, 200)
    for example in range(200):
        answer, values = evaluate(task.text(batch, example))
        assert task.decode(batch.targets[example]) == str(answer)
        numbers = {name: batch.latents[name][example].item() for name in "xy"}
        assert numbers == values


@pytest.mark.parametrize("split", MLU.SPLITS)
def test_everything_is_drawn_evenly_and_independently(paper, split):
    batch = paper.batch(split, 0, 40_000)
    form = torch.stack([batch.latents[name] for name in ("first", "left", "right")], 1)
    number = 3 * (form * torch.tensor([4, 2, 1])).sum(1) + batch.latents["operator"]
    counts = number.bincount(minlength=24)
    assert ((counts - 40_000 / 24).abs() < 5 * (40_000 / 24) ** 0.5).all()
    for name in "xy":
        values = batch.latents[name].double()
        assert abs(values.mean() + 0.5) < 5 * (2000 / 12**0.5) / 200
        assert (values.min(), values.max()) == (-1000, 999)
    products = torch.corrcoef(torch.stack([batch.latents[name].double() for name in "xy"]))
    assert abs(products[0, 1]) < 5 / 200


def test_the_papers_sizes_hold_out_a_tenth_of_pairs(paper):
    assert paper.config.n_pairs == 2000 * 2001 // 2
    assert paper.config.n_ood == 200_100
    pairs = []
    for split in ("train", "ood"):
        latents = paper.batch(split, 0, 50_000).latents
        places = torch.stack([latents["x"], latents["y"]], 1).sort(1).values
        pairs.append(set(map(tuple, places.tolist())))
    assert not pairs[0] & pairs[1]


def test_batches_depend_on_the_config_and_their_number_alone(paper):
    late = paper.batch("train", 2**40, 5)
    again = MLU(MLUConfig()).batch("train", 2**40, 5)
    other = MLU(MLUConfig(seed=1)).batch("train", 2**40, 5)
    assert torch.equal(late.inputs[0], again.inputs[0])
    assert not torch.equal(late.inputs[0], other.inputs[0])


@pytest.mark.parametrize("split", MLU.SPLITS)
def test_words_are_those_of_line_and_answer(small, split):
    batch = small.batch(split, 2, 40)
    for example in range(40):
        written, line = small.words(batch, example)
        assert (len(written), len(line)) == (batch.targets.shape[1], batch.inputs[0].shape[1])
        answer, _ = evaluate("".join(line))
        assert "".join(written) == f"{answer}<eos>"
        padding = written[written.index("<eos>") + 1 :] + line[len("".join(line)) :]
        assert set(padding) <= {""}


def test_score(small):
    batch = small.batch("id", 0, 50)
    ids = np.random.default_rng(0).integers(3, 13, batch.targets.shape)
    wrong = torch.from_numpy(ids)
    assert (small.score(batch.targets, batch)["correct"] == 1).all()
    # What is behind the end is not read, whether it is there or not.
    garbage = torch.where(batch.mask, batch.targets, wrong)
    for output in (garbage, torch.cat([garbage, wrong], 1)):
        assert (small.score(output, batch)["token_correct"] == 1).all()
    scores = small.score(wrong, batch)
    for i in range(50):
        n = int(batch.mask[i].sum())
        same = [a == b for a, b in zip(wrong[i, :n], batch.targets[i, :n], strict=True)]
        assert scores["token_correct"][i] == pytest.approx(sum(same) / n)
        assert scores["correct"][i] == all(same)
    # A short answer lacks what it does not say, the end too.
    short = small.score(batch.targets[:, :1], batch)
    assert (short["correct"] == 0).all()
    with pytest.raises(
        ValueError, match=r"output must be integers of shape \(50, pos\), got torch.float32"
    ):
        small.score(torch.zeros(50, 3), batch)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"low": -10_000}, r"low must be an integer from -9999 to 9998, got -10000"),
        ({"low": 5, "high": 6}, r"high must be an integer from 7 to 4005, got 6"),
        ({"low": -4000, "high": 4000}, r"high must be an integer from -3998 to 0, got 4000"),
        ({"ood_share": 0}, r"ood_share must leave .* got 0, which holds out 0"),
        ({"low": 0, "high": 2, "ood_share": 0.1}, r"holds out 0 of the 3 pairs"),
        ({"ood_share": True}, r"ood_share must be .*, got True"),
        ({"seed": -1}, r"seed must be .*, got -1"),
    ],
)
def test_a_bad_config_says_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        MLUConfig(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"low": 5, "high": 6}, r"high must be an integer from 7 to 4005, got 6"),
        ({"test_share": 0}, r"test_share must leave .* got 0, which holds out 0"),
    ],
)
def test_a_bad_config_of_fixed_lines_says_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        MLULinesConfig(**arguments)


def test_an_unknown_split_is_an_error(small):
    with pytest.raises(ValueError, match=r"split must be one of train, id, ood, got 'test'"):
        small.batch("test", 0, 1)


# Counterfactuals


@pytest.mark.parametrize("name", ["x", "y", "operator", "left", "right", "first"])
def test_answers_follow_from_the_lines_that_are_set(paper, name):
    base, source = (paper.batch("id", index, 200) for index in (0, 1))
    wanted = paper.counterfactual(base, {name: source.latents[name]})
    for i in range(200):
        line = paper.text(wanted, i)
        answer, values = evaluate(line)
        for variable in "xy":
            assert wanted.latents[variable][i] == values[variable]
        assert wanted.latents["result"][i] == answer
        assert paper.decode(wanted.targets[i]) == str(answer)
        assert wanted.mask[i].sum() == len(str(answer)) + 1 == wanted.latents["length"][i] + 1
        assert paper.decode(wanted.inputs[1][i]) == str(answer)
        assert wanted.inputs[1][i, 0] == MLU_CHARACTERS.index("<bos>")
        assert line[0] == "xy"[wanted.latents["first"][i]]
        operands = [wanted.latents[side][i] for side in ("left", "right")]
        symbol = MLU_OPERATORS[wanted.latents["operator"][i]]
        assert line.endswith(f",{'xy'[operands[0]]}{symbol}{'xy'[operands[1]]}")
    assert torch.equal(wanted.latents[name], source.latents[name])
    assert (wanted.inputs[0] != base.inputs[0]).any(1).float().mean() > 0.4


def test_a_result_is_set_while_the_line_stays(paper):
    base = paper.batch("id", 0, 4)
    result = torch.tensor([0, -7, 998_001, 15])
    wanted = paper.counterfactual(base, {"result": result})
    assert torch.equal(wanted.inputs[0], base.inputs[0])
    assert [paper.decode(answer) for answer in wanted.targets] == ["0", "-7", "998001", "15"]
    assert [paper.decode(answer) for answer in wanted.inputs[1]] == ["0", "-7", "998001", "15"]
    assert wanted.mask.sum(1).tolist() == [2, 3, 7, 3]
    with pytest.raises(ValueError, match=r"integers from -999000 to 1000000 .* got 1000001"):
        paper.counterfactual(base, {"result": result + 1_000_001})
