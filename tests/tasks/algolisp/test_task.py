"""Generated AlgoLisp: descriptions are understood by a reader of their words."""

import math
from collections import Counter

import pytest
import torch

from tasks.algolisp.interpreter import run_program
from tasks.algolisp.task import AlgoLisp, AlgoLispConfig

CONTRACT_EXAMPLES = {"": lambda folder: AlgoLisp(AlgoLispConfig(n_tests=2))}


def is_prime(n):
    return n > 1 and not any(n % d == 0 for d in range(2, n))


SOURCES = {
    ("the elements of a", "the numbers in a"): lambda a, b: a,
    ("the first b elements of a", "the first b numbers in a"): lambda a, b: a[:b],
    ("the integers from 0 to b", "the numbers below b"): lambda a, b: list(range(b)),
}
SELECTIONS = {
    ("that are prime", "which are prime numbers"): lambda x, b: is_prime(x),
    ("that are not prime", "which are no prime numbers"): lambda x, b: not is_prime(x),
    ("that are even", "which are divisible by two"): lambda x, b: x % 2 == 0,
    ("that are odd", "which are not divisible by two"): lambda x, b: x % 2 == 1,
    ("that are greater than b", "which are bigger than b"): lambda x, b: x > b,
    ("that are less than b", "which are smaller than b"): lambda x, b: x < b,
}
TRANSFORMATIONS = {
    ("squared", "multiplied by themselves"): lambda x, b: x**2,
    ("doubled", "multiplied by two"): lambda x, b: 2 * x,
    ("halved", "divided by two"): lambda x, b: math.floor(x / 2),
    ("increased by b", "plus b"): lambda x, b: x + b,
    ("subtracted from b", "taken away from b"): lambda x, b: b - x,
    ("modulo 10", "reduced modulo 10"): lambda x, b: x % 10,
}
AGGREGATIONS = {
    ("all of", "the list of"): list,
    ("the sum of", "the total of"): sum,
    ("the largest of", "the maximum of"): lambda x: max([0, *x]),
    ("the smallest of", "the minimum of"): lambda x: min([10**9, *x]),
    ("the number of", "how many there are of"): len,
    ("in ascending order", "in sorted order"): sorted,
    ("in reverse order", "from last to first"): lambda x: x[::-1],
}


def function_of(text, table):
    """The function whose text begins a text, and the rest of it."""
    found = [
        (phrase, function)
        for phrases, function in table.items()
        for phrase in phrases
        if f"{text} ".startswith(f"{phrase} ")
    ]
    phrase, function = max(found, key=lambda one: len(one[0]), default=("", None))
    return function, text[len(phrase) :].strip()


def solve(text, a, b):
    """The answer to a description, from its words alone."""
    _, _, request = text.partition(" , ")
    verb, _, rest = request.partition(" ")
    assert verb in ("find", "compute", "return")
    aggregate, rest = function_of(rest, AGGREGATIONS)
    source, rest = function_of(rest, SOURCES)
    numbers = source(a, b)
    while rest:
        select, after = function_of(rest, SELECTIONS)
        transform, otherwise = function_of(rest, TRANSFORMATIONS)
        assert (select is None) != (transform is None), rest
        if select:
            numbers, rest = [x for x in numbers if select(x, b)], after
        else:
            numbers, rest = [transform(x, b) for x in numbers], otherwise
        rest = rest.removeprefix(",").strip()
    return aggregate(numbers)


@pytest.mark.parametrize("split", AlgoLisp.SPLITS)
def test_programs_do_what_the_text_says(split):
    task = AlgoLisp(AlgoLispConfig())
    batch = task.batch(split, 3, 100)
    for i in range(100):
        program, text = (" ".join(filter(None, words)) for words in task.words(batch, i))
        problem = task.problem(batch, i)
        assert len(problem.tests) == 10
        for arguments, expected in problem.tests:
            assert solve(text, **arguments) == expected
            assert run_program(task.program(batch, i), arguments) == expected
        assert problem.is_solved_by(task.decode(batch.targets[i]))
        assert task.decode(batch.targets[i]) == program.removesuffix(" <eos>")
        assert text.startswith(("given an array a", "you have numbers a", "for a and b"))


def test_latents_are_the_parts_of_the_program():
    task = AlgoLisp(AlgoLispConfig())
    batch = task.batch("train", 0, 500)
    latents = batch.latents
    signs = {"squared": "square", "doubled": "*", "halved": "/", "increased": "+"}
    for i in range(500):
        words = task.decode(batch.targets[i]).split()
        assert latents["length"][i] == len(words)
        used = {
            name
            for name, is_in in zip(task.PRIMITIVE_NAMES, latents["primitives"][i], strict=True)
            if is_in
        }
        assert used == set(words) & set(task.PRIMITIVE_NAMES)
        number = latents["selection"][i], latents["transformation"][i]
        assert (number[0] > 0) == ("filter" in words)
        assert (number[1] > 0) == ("map" in words)
        if sign := signs.get(task.PARTS["transformation"][number[1]]):
            assert sign in words
        if number[0] and number[1]:
            first = "map" if words.index("filter") < words.index("map") else "filter"
            assert (first == "map") == bool(latents["order"][i])
        else:
            assert latents["order"][i] == 0


def test_equal_texts_have_equal_programs_and_words_are_in_the_vocabulary():
    task = AlgoLisp(AlgoLispConfig())
    programs = {}
    seen = Counter()
    for split in task.splits:
        batch = task.batch(split, 0, 2000)
        for i in range(2000):
            program, text = (" ".join(words).strip() for words in task.words(batch, i))
            assert programs.setdefault(text, program) == program
        seen.update(batch.inputs[0].flatten().tolist())
        seen.update(batch.targets.flatten().tolist())
    assert set(seen) | {1} == set(range(len(task.vocabulary)))
    assert len(set(task.vocabulary)) == len(task.vocabulary)


def test_batches_have_the_shapes_of_teacher_forcing():
    task = AlgoLisp(AlgoLispConfig())
    batch = task.batch("train", 0, 4000)
    source, given = batch.inputs
    assert torch.equal(batch.mask, batch.targets > 0)
    # No column is never used, and no text is cut off.
    assert batch.mask.any(0).all()
    assert (source > 0).any(0).all()
    for row, length in enumerate(batch.latents["length"].tolist()):
        assert given[row, 0] == 1
        assert torch.equal(given[row, 1 : length + 1], batch.targets[row, :length])
        assert batch.targets[row, length] == 2
        assert not given[row, length + 1 :].any()


@pytest.mark.parametrize("held_out", [0.25, 0.6])
def test_compositions_are_held_out(held_out):
    task = AlgoLisp(AlgoLispConfig(held_out=held_out))
    pairs = {split: set(map(tuple, task.pairs(split).tolist())) for split in task.splits}
    assert pairs["train"] == pairs["id"]
    assert not pairs["train"] & pairs["ood"]
    assert len(pairs["ood"]) == round(held_out * 36)
    assert len(pairs["train"] | pairs["ood"]) == 49
    for split in task.splits:
        latents = task.batch(split, 0, 3000).latents
        names = (latents[name].tolist() for name in ("selection", "transformation"))
        assert set(zip(*names, strict=True)) == pairs[split]
    # Every part is known with another one, and alone.
    for side in range(2):
        known = {pair[side] for pair in pairs["train"] if all(pair)}
        alone = {pair[side] for pair in pairs["train"] if not pair[1 - side]}
        assert known == set(range(1, 7))
        assert alone == set(range(7))


def test_tests_tell_most_programs_apart():
    """A program of other parts rarely passes all tests of a problem."""
    task = AlgoLisp(AlgoLispConfig())
    batch = task.batch("id", 0, 150)
    texts = [task.decode(row) for row in batch.targets]
    wrong = sum(
        task.problem(batch, i).is_solved_by(texts[i - 1])
        for i in range(150)
        if texts[i] != texts[i - 1]
    )
    assert wrong <= 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"held_out": 0.0}, "held_out must leave items on both sides"),
        ({"held_out": 1.5}, "held_out must be a number from 0 to 1, got 1.5"),
        ({"n_tests": 0}, "n_tests must be an integer from 1 to 100, got 0"),
        ({"seed": -1}, "seed must be .*, got -1"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        AlgoLispConfig(**changes)


def test_too_many_compositions_cannot_be_held_out():
    with pytest.raises(ValueError, match=r"got 0\.95: 34 pairs, of which"):
        AlgoLisp(AlgoLispConfig(held_out=0.95))
