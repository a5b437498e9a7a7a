"""Math equations: compared with a stack machine, and properties of the sampler."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from mechanisms.modular.module_pools import OperationPoolConfig
from tasks.math_equations import (
    MATH_OPERATIONS,
    MathEquations,
    MathEquationsConfig,
    apply_operation,
    results,
)
from tests.tasks.batches import full_batch

CONTRACT_EXAMPLES = {
    "": lambda folder: MathEquations(MathEquationsConfig(n_points=101, n_id=31, n_ood=31))
}

PAPER = (3, 5, 7, 10, 15)
FEW = {"n_points": 300, "n_id": 60, "n_ood": 50}

# The independent solver: symbols in the paper's order, each with what it does to two floats.
SYMBOLS = {
    "x+y": lambda x, y: x + y,
    "x-y": lambda x, y: x - y,
    "x*y": lambda x, y: x * y,
    "x*x": lambda x, _: x**2,
    "y*y": lambda _, y: y**2,
    "(x+y)*x": lambda x, y: x**2 + x * y,
    "min": min,
    "max": max,
    "(x+y)-x": lambda _, y: y,
    "x+2y": lambda x, y: x + y + y,
    "sin x": lambda x, _: math.sin(x),
    "sin y": lambda _, y: math.sin(y),
    "cos x": lambda x, _: math.cos(x),
    "cos y": lambda _, y: math.cos(y),
    "cos(x+y)": lambda x, y: math.cos(x) * math.cos(y) - math.sin(x) * math.sin(y),
}


def solve(tokens):
    """Evaluate reverse Polish notation and return every intermediate result."""
    stack, actual = [], []
    for token in tokens:
        if token in SYMBOLS:
            second, first = stack.pop(), stack.pop()
            stack.append(SYMBOLS[token](first, second))
            actual.append(stack[-1])
        else:
            stack.append(float(token))
    assert stack == actual[-1:]
    return actual


def tokens_of(variables, symbols):
    """Decode an equation from its features."""
    numbers = [variable[0].item() for variable in variables]
    chosen = [symbols[v[1 : 1 + len(symbols)].argmax().item()] for v in variables[2:-1]]
    tokens = [numbers[0], numbers[1], chosen[0]]
    for symbol in chosen[1:]:
        tokens += [numbers[0], symbol]
    return tokens


def points_of(batch):
    return [tuple(pair) for pair in batch.inputs[:, :2, 0].tolist()]


def test_the_papers_example():
    assert solve([".1", ".04", "x+y", ".1", "x*y"]) == pytest.approx([0.14, 0.014])
    names = [[MATH_OPERATIONS.index("add"), MATH_OPERATIONS.index("multiply")]]
    actual = results(np.array(names), np.array([[0.1, 0.04]]))
    assert actual[0].tolist() == pytest.approx([0.14, 0.014])


def test_each_operation_by_hand():
    expected = {
        "add": 0.25,
        "subtract": 0.75,
        "multiply": -0.125,
        "square_first": 0.25,
        "square_second": 0.0625,
        "add_multiply": 0.125,
        "minimum": -0.25,
        "maximum": 0.5,
        "add_subtract": -0.25,
        "add_double": 0.0,
        "sin_first": 0.479426,
        "sin_second": -0.247404,
        "cos_first": 0.877583,
        "cos_second": 0.968912,
        "cos_sum": 0.968912,
    }
    assert tuple(expected) == MATH_OPERATIONS
    for (name, value), operation in zip(expected.items(), SYMBOLS.values(), strict=True):
        actual = apply_operation(name, np.array([0.5]), np.array([-0.25]))
        assert actual.tolist() == pytest.approx([value], abs=1e-6)
        assert actual.tolist() == pytest.approx([operation(0.5, -0.25)])
    with pytest.raises(ValueError, match=r"name must be one of add, .*, got 'ad'; nearest: 'add'"):
        apply_operation("ad", np.zeros(1), np.zeros(1))


@pytest.mark.parametrize("split", MathEquations.SPLITS)
@pytest.mark.parametrize(
    "changes",
    [
        {"n_operators": 15, "n_points": 600, "n_id": 60, "n_ood": 60},
        {"n_operators": 3, "length": 4, "variable_id": False, **FEW},
        {"n_operators": 6, "length": 3, "operators": "drawn", "seed": 3, **FEW, "n_id": 300},
    ],
    ids=["paper", "long", "drawn"],
)
def test_answers_are_those_of_the_tokens(split, changes):
    task = MathEquations(MathEquationsConfig(**changes))
    symbols = [tuple(SYMBOLS)[MATH_OPERATIONS.index(name)] for name in task.operations]
    batch = task.batch(split, 0, 300)
    for i, variables in enumerate(batch.inputs):
        tokens = tokens_of(variables, symbols)
        actual = solve(tokens)
        result = batch.latents["result"][i].tolist()
        assert result == pytest.approx(actual, rel=1e-6, abs=1e-6)
        assert batch.targets[i].tolist() == result[-1:]
        chosen = [token for token in tokens if token in SYMBOLS]
        operator = [symbols.index(symbol) for symbol in chosen]
        assert batch.latents["operator"][i].tolist() == operator
        assert batch.latents["operation"][i].tolist() == [list(SYMBOLS).index(s) for s in chosen]
        number = 0
        for digit in operator:
            number = number * len(symbols) + digit
        assert batch.latents["task"][i] == number
        assert (number in task.held_out) == (split == "ood")


def test_features_by_hand():
    config = MathEquationsConfig(n_operators=3, constant=-2, **FEW)
    task = MathEquations(config)
    assert (task.n_variables, task.n_features, task.deciding) == (5, 9, (2, 3))
    assert task.operations == ("add", "subtract", "multiply")
    batch = task.batch("train", 0, 6)
    for i in range(6):
        (x1, x2), (first, second) = points_of(batch)[i], batch.latents["operator"][i].tolist()
        expected = [
            [x1, 0, 0, 0, 1, 0, 0, 0, 0],
            [x2, 0, 0, 0, 0, 1, 0, 0, 0],
            [0, first == 0, first == 1, first == 2, 0, 0, 1, 0, 0],
            [0, second == 0, second == 1, second == 2, 0, 0, 0, 1, 0],
            [-2, 0, 0, 0, 0, 0, 0, 0, 1],
        ]
        assert batch.inputs[i].tolist() == expected
    assert batch.inputs.dtype == batch.targets.dtype == torch.float32
    assert batch.latents["result"].dtype == torch.float32
    assert batch.targets.shape == batch.mask.shape == (6, 1)
    assert batch.mask.all()
    # How equations are shown does not change which ones there are.
    bare = MathEquations(MathEquationsConfig(n_operators=3, variable_id=False, **FEW))
    assert bare.n_features == 4
    shown = bare.batch("train", 0, 6)
    assert torch.equal(shown.inputs[:, :-1], batch.inputs[:, :-1, :4])
    assert torch.equal(shown.targets, batch.targets)
    assert (shown.inputs[:, -1] == torch.tensor([1.0, 0, 0, 0])).all()


@pytest.mark.parametrize("n_operators", PAPER)
def test_two_operators_hold_out_a_permutation_matrix(n_operators):
    task = MathEquations(MathEquationsConfig(n_operators=n_operators))
    first, second = np.divmod(task.held_out, n_operators)
    assert sorted(first) == sorted(second) == list(range(n_operators))
    everything = set(range(n_operators**2))
    actual = {split: set(full_batch(task, split).latents["task"].tolist()) for split in task.splits}
    assert actual["ood"] == set(task.held_out)
    assert actual["train"] == actual["id"] == everything - actual["ood"]
    for position in range(2):
        known = Counter(task.combinations[sorted(actual["train"]), position].tolist())
        assert known == dict.fromkeys(range(n_operators), n_operators - 1)


@pytest.mark.parametrize("n_operators", PAPER)
def test_new_tasks_are_functions_that_no_known_combination_computes(n_operators):
    config = MathEquationsConfig(n_operators=n_operators)
    task = MathEquations(replace(config, ood_tasks="new"))
    symbols = [list(SYMBOLS)[MATH_OPERATIONS.index(name)] for name in task.operations]
    points = np.random.default_rng(1).uniform(-1, 1, (6, 2)).tolist()

    def function(number):
        first, second = (symbols[operator] for operator in task.combinations[number])
        return [solve([x, y, first, x, second])[-1] for x, y in points]

    known = [function(number) for number in task.tasks("train")]
    new = [
        number
        for number in task.held_out
        if not any(function(number) == pytest.approx(one, abs=1e-9) for one in known)
    ]
    assert task.tasks("ood").tolist() == new
    assert set(full_batch(task, "ood").latents["task"].tolist()) == set(new)
    others = MathEquations(config)
    assert others.tasks("ood").tolist() == others.held_out.tolist() == task.held_out.tolist()
    for split in ("train", "id"):
        assert np.array_equal(task.tasks(split), others.tasks(split))
        served = (one.batch(split, 0, 50).inputs for one in (task, others))
        assert torch.equal(*served)


def test_tasks_are_called_by_their_operators():
    task = MathEquations(MathEquationsConfig(n_operators=3, **FEW))
    first, second = task.operations[:2]
    assert task.task_names[:2] == (f"{first}, {first}", f"{first}, {second}")
    batch = task.batch("id", 0, 20)
    for number, operator in zip(batch.latents["task"], batch.latents["operator"], strict=True):
        assert task.task_names[number].split(", ") == [task.operations[index] for index in operator]


@pytest.mark.parametrize("length", [3, 4, 5])
def test_longer_chains_hold_out_one_task_per_operator(length):
    task = MathEquations(MathEquationsConfig(n_operators=4, length=length, seed=1))
    held_out = task.combinations[task.held_out]
    assert len(held_out) == 4
    for position in range(length):
        assert sorted(held_out[:, position]) == [0, 1, 2, 3]
    others = {
        tuple(MathEquations(MathEquationsConfig(n_operators=4, length=length, seed=seed)).held_out)
        for seed in range(20)
    }
    assert len(others) > 15


def test_single_operators_are_not_held_out():
    task = MathEquations(MathEquationsConfig(n_operators=4, length=1, n_points=90, n_id=30))
    assert task.splits == ("train", "id")
    assert len(task.held_out) == 0
    assert (task.n_variables, task.deciding) == (4, (2,))
    assert [task.size(split) for split in task.splits] == [90, 30]
    batch = full_batch(task, "train")
    assert Counter(batch.latents["task"].tolist()).keys() == {0, 1, 2, 3}
    for variables, answer in zip(batch.inputs, batch.targets, strict=True):
        x, y, symbol = tokens_of(variables, tuple(SYMBOLS)[:4])
        assert answer.item() == pytest.approx(SYMBOLS[symbol](x, y), abs=1e-6)
    with pytest.raises(ValueError, match="split must be one of train, id, got 'ood'"):
        task.batch("ood", 0, 1)


def test_every_permutation_matrix_is_held_out_by_some_seed():
    actual = Counter(
        tuple(MathEquations(MathEquationsConfig(n_operators=3, seed=seed)).held_out)
        for seed in range(300)
    )
    assert len(actual) == 6
    chi_squared = sum((n - 50) ** 2 / 50 for n in actual.values())
    assert chi_squared < 5 + 5 * 10**0.5


@pytest.mark.parametrize("seed", range(3))
def test_which_held_out_tasks_have_answers_that_train_has(seed):
    # Of the first five operations only the square of x1 forgets what came before it.
    task = MathEquations(MathEquationsConfig(seed=seed))
    points = np.random.default_rng(0).uniform(-1, 1, (40, 2))
    answers = [
        results(np.tile(combination, (40, 1)), points)[:, -1] for combination in task.combinations
    ]
    known = np.delete(answers, task.held_out, axis=0)
    same = [np.isclose(known, answers[task_id]).all(1).any() for task_id in task.held_out]
    last = [task.operations[operator] for operator in task.combinations[task.held_out, -1]]
    assert [name for name, is_same in zip(last, same, strict=True) if is_same] == ["square_second"]


def test_sizes_are_the_papers():
    for n_operators in PAPER:
        task = MathEquations(MathEquationsConfig(n_operators=n_operators))
        sizes = [len(full_batch(task, split)) for split in task.splits]
        assert sizes == [2_500 * n_operators, 100 * n_operators, 1_000 * n_operators]
    # |S|^L C / (|S| L)
    for n_operators, length, expected in ((3, 3, [3_000, 600, 6_000]), (4, 1, [1_000, 200, 0]),
                                          (2, 5, [3_200, 640, 6_400])):  # fmt: skip
        config = MathEquationsConfig(n_operators=n_operators, length=length, n_points=1_000)
        assert [config.size(split) for split in MathEquations.SPLITS] == expected
    odd = MathEquations(MathEquationsConfig(n_operators=3, n_points=101, n_id=21, n_ood=3))
    assert [odd.size(split) for split in odd.splits] == [151, 31, 4]
    with pytest.raises(
        ValueError, match=r"split must be one of train, id, ood, got 'iid'; nearest: 'id'"
    ):
        odd.size("iid")


@pytest.mark.parametrize("changes", [{}, {"n_operators": 7, "length": 3, "n_points": 501}])
def test_points_are_shared_out_evenly(changes):
    task = MathEquations(MathEquationsConfig(**changes))
    for split in task.splits:
        number = full_batch(task, split).latents["task"]
        tasks = len(task.held_out)
        if split != "ood":
            tasks = len(task.combinations) - tasks
        # Of `train`, an epoch is; of the others, every prefix.
        for prefix in (len(number),) if split == "train" else (7, 100, len(number)):
            counts = number[:prefix].bincount()
            counts = counts[counts > 0]
            assert len(counts) == min(prefix, tasks)
            assert counts.max() - counts.min() <= 1


def test_the_smallest_splits_have_a_point_for_every_task():
    # 60 and 4 of 64 tasks; each n stands for 16 n / 3 points.
    least = {"n_operators": 4, "length": 3, "n_points": 12, "n_id": 12, "n_ood": 1}
    task = MathEquations(MathEquationsConfig(**least))
    numbers = {
        split: sorted(full_batch(task, split).latents["task"].tolist()) for split in task.splits
    }
    known = {*range(64)} - {*task.held_out}
    assert {*numbers["train"]} == {*numbers["id"]} == known
    assert {*numbers["ood"]} == {*task.held_out}
    for name, number in {"n_points": 12, "n_id": 12, "n_ood": 1}.items():
        with pytest.raises(
            ValueError, match=f"{name} must be .* from {number} .* got {number - 1}"
        ):
            MathEquationsConfig(**(least | {name: number - 1}))


def test_points_are_uniform_and_none_occurs_twice():
    task = MathEquations(MathEquationsConfig(n_operators=15))
    points = [pair for split in task.splits for pair in points_of(full_batch(task, split))]
    assert len(set(points)) == len(points) == 54_000
    values = np.array(points)
    assert values.min() >= -1
    assert values.max() < 1
    cells = np.histogram2d(*values.T, bins=10, range=[(-1, 1), (-1, 1)])[0]
    chi_squared = ((cells - 540) ** 2 / 540).sum()
    assert abs(chi_squared - 99) < 5 * 198**0.5


def test_train_is_a_stream_of_epochs():
    task = MathEquations(MathEquationsConfig(**FEW))
    size = task.size("train")
    epochs = [points_of(task.batch("train", index, size)) for index in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    # The stream is cut into batches of any size, across the ends of epochs.
    cut = [task.batch("train", index, 40) for index in range(2 * size // 40 + 1)]
    joined = [point for batch in cut for point in points_of(batch)]
    assert joined[: 2 * size] == epochs[0] + epochs[1]


@pytest.mark.parametrize("split", ["id", "ood"])
def test_evaluation_comes_in_one_order_and_starts_again(split):
    task = MathEquations(MathEquationsConfig(**FEW))
    size = task.size(split)
    once, twice = task.batch(split, 0, size), task.batch(split, 0, 2 * size)
    assert torch.equal(twice.inputs, torch.cat([once.inputs, once.inputs]))
    assert torch.equal(task.batch(split, 1, 10).inputs, once.inputs[10:20])


def test_batches_do_not_depend_on_what_was_asked_for_before():
    config = MathEquationsConfig(operators="drawn", **FEW)
    first_task, second_task = MathEquations(config), MathEquations(config)
    for split in first_task.splits:
        first_task.batch(split, 0, 8)
    for split in reversed(first_task.splits):
        first, second = first_task.batch(split, 5, 8), second_task.batch(split, 5, 8)
        assert torch.equal(first.inputs, second.inputs)
        assert torch.equal(first.targets, second.targets)
    far = first_task.batch("train", 2**41, 2**10)
    assert torch.equal(far.inputs, second_task.batch("train", 2**41, 2**10).inputs)
    changed = MathEquations(MathEquationsConfig(**FEW, operators="drawn", seed=1))
    assert not set(points_of(full_batch(first_task, "train"))) & set(
        points_of(full_batch(changed, "train"))
    )


def test_drawn_operators():
    drawn = [
        MathEquations(MathEquationsConfig(operators="drawn", seed=seed)).operations
        for seed in range(300)
    ]
    for names in drawn:
        assert sorted(set(names), key=MATH_OPERATIONS.index) == list(names)
    # Each of the 15 is among the five in a third of the cases.
    share = Counter(name for names in drawn for name in names)
    assert set(share) == set(MATH_OPERATIONS)
    assert all(abs(count - 100) < 5 * (300 * 2 / 9) ** 0.5 for count in share.values())
    task = MathEquations(MathEquationsConfig(n_operators=15, operators="drawn"))
    assert task.operations == MATH_OPERATIONS


def test_score_and_baseline():
    task = MathEquations(MathEquationsConfig(**FEW))
    batch = task.batch("id", 0, 3)
    off = torch.tensor([[0.0], [0.5], [-2.0]])
    scores = task.score(batch.targets + off, batch)
    assert scores["squared_error"].tolist() == pytest.approx([0, 0.25, 4], abs=1e-5)
    assert scores["absolute_error"].tolist() == pytest.approx([0, 0.5, 2], abs=1e-6)
    with pytest.raises(ValueError, match=r"output must have shape \(3, 1\), got \(3,\)"):
        task.score(torch.zeros(3), batch)

    known = full_batch(task, "train").targets
    assert task.baseline("train") == pytest.approx(known.var(unbiased=False).item())
    for split in ("id", "ood"):
        tested = full_batch(task, split)
        answers = known.mean().expand(len(tested), 1)
        expected = task.score(answers, tested)["squared_error"].mean().item()
        assert task.baseline(split) == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"split must be one of .*, got 'valid'"):
        task.baseline("valid")


def test_a_pool_of_true_operations_gives_the_answers():
    task = MathEquations(MathEquationsConfig(n_operators=15))
    pool = OperationPoolConfig(names=task.operations).build(15, 2)
    batch = task.batch("ood", 0, 100)
    x, y = batch.inputs[:, 0, 0], batch.inputs[:, 1, 0]
    for position in range(2):
        x = pool.selected(torch.stack([x, y], -1)[:, None], batch.latents["operator"][:, position])
        y = batch.inputs[:, 0, 0]
        assert torch.allclose(x, batch.latents["result"][:, position], atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_operators": 1}, "n_operators must be an integer from 2 to 15, got 1"),
        ({"n_operators": 16}, "n_operators must be .*, got 16"),
        ({"length": 6}, "length must be an integer from 1 to 5, got 6"),
        ({"n_points": 7}, "n_points must be an integer from 8 to 1000000, got 7"),
        ({"n_id": True}, "n_id must be .*, got True"),
        ({"n_ood": 1}, "n_ood must be an integer from 2 to .*, got 1"),
        ({"length": 5, "n_id": 24}, "n_id must be an integer from 25 to 80000, got 24"),
        ({"length": 5, "n_operators": 15}, "n_points must be .* from 75 to 987, got 5000"),
        ({"operators": "last"}, "operators must be one of first, drawn, got 'last'"),
        ({"ood_tasks": "all"}, "ood_tasks must be one of held_out, new, got 'all'"),
        ({"variable_id": 1}, "variable_id must be True or False, got 1"),
        ({"constant": float("nan")}, "constant must be a number from -100 to 100, got nan"),
        ({"constant": True}, "constant must be .*, got True"),
        ({"constant": "1"}, "constant must be .*, got '1'"),
        ({"seed": -1}, "seed must be .*, got -1"),
    ],
)
def test_a_bad_config_says_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        MathEquationsConfig(**arguments)


def test_operations_without_new_combinations_are_refused():
    few = {"n_operators": 2, "operators": "drawn", "seed": 7, **FEW}
    assert MathEquations(MathEquationsConfig(**few)).operations == ("add_subtract", "cos_second")
    message = "no held-out combination of add_subtract, cos_second is a new function; ood_tasks"
    with pytest.raises(ValueError, match=message):
        MathEquations(MathEquationsConfig(**few, ood_tasks="new"))


def test_bad_arguments_of_batch():
    task = MathEquations(MathEquationsConfig(**FEW))
    with pytest.raises(
        ValueError, match=r"split must be one of train, .*, got 'trian'; nearest: 'train'"
    ):
        task.batch("trian", 0, 1)
    with pytest.raises(ValueError, match=r"index must be .*, got -1"):
        task.batch("train", -1, 1)
    with pytest.raises(ValueError, match=r"size must be .*, got 0"):
        task.batch("id", 0, 0)


def test_the_number_of_points_does_not_change_which_tasks_are_held_out():
    few, many = (
        MathEquations(MathEquationsConfig(n_points=n, operators="drawn", seed=3))
        for n in (150, 20_000)
    )
    assert few.held_out.tolist() == many.held_out.tolist()
    assert few.operations == many.operations


# Counterfactuals


@pytest.mark.parametrize("name", ["operator", "point"])
def test_answers_follow_from_the_variables_that_are_set(name):
    task = MathEquations(MathEquationsConfig(n_operators=15, length=3, **FEW))
    base, source = task.batch("id", 0, 30), task.batch("id", 1, 30)
    exchanged = torch.arange(base.latents[name].shape[1]) == 1
    given = torch.where(exchanged, source.latents[name], base.latents[name])
    wanted = task.counterfactual(base, {name: given})
    for i in range(30):
        expected = solve(tokens_of(wanted.inputs[i], list(SYMBOLS)))
        assert wanted.latents["result"][i].tolist() == pytest.approx(expected, abs=1e-5)
        assert wanted.targets[i].tolist() == pytest.approx(expected[-1:], abs=1e-5)
        combination = task.combinations[wanted.latents["task"][i]].tolist()
        assert combination == wanted.latents["operator"][i].tolist()
        assert wanted.latents["operation"][i].tolist() == task._operations[combination].tolist()
    assert (wanted.inputs != base.inputs).any()
    assert torch.equal(wanted.latents[name], given)


def test_a_result_that_is_set_is_the_next_operand():
    task = MathEquations(MathEquationsConfig(n_operators=3, length=3, **FEW))
    base = task.batch("id", 0, 40)
    result = base.latents["result"].clone()
    result[:, 1] = 0.5
    wanted = task.counterfactual(base, {"result": result})
    assert torch.equal(wanted.inputs, base.inputs)
    assert torch.equal(wanted.latents["result"][:, :2], result[:, :2])
    x = base.latents["point"][:, 0]
    last = torch.stack([0.5 + x, 0.5 - x, 0.5 * x], 1)
    expected = last.gather(1, base.latents["operator"][:, 2:])
    torch.testing.assert_close(wanted.targets, expected)
    assert (wanted.targets != base.targets).any()
    result[:, 2] = -4.0
    assert (task.counterfactual(base, {"result": result}).targets == -4).all()


def test_results_are_rounded_once():
    task = MathEquations(MathEquationsConfig(n_operators=15, length=3, **FEW))
    batch = full_batch(task, "id")
    for i in range(len(batch)):
        expected = solve(tokens_of(batch.inputs[i], list(SYMBOLS)))
        # Half of a unit in the last of 24 binary digits, and what doubles leave.
        actual = batch.latents["result"][i].tolist()
        assert actual == pytest.approx(expected, rel=2**-24 + 1e-10, abs=1e-14)
