"""The interpreter of AlgoLisp, against Python functions written by hand for each program."""

import itertools
import math
import random
from functools import reduce

import pytest

from tasks.algolisp.interpreter import (
    PRIMITIVES,
    Definition,
    ProgramError,
    read_program,
    run_program,
    write_program,
)


def is_prime(n):
    return n > 1 and not any(n % d == 0 for d in range(2, n))


def fibonacci(n):
    return 1 if n < 2 else fibonacci(n - 2) + fibonacci(n - 1)


FIBONACCI = "( lambda1 ( if ( < arg1 2 ) 1 ( + ( self ( - arg1 2 ) ) ( self ( - arg1 1 ) ) ) ) )"
PROGRAMS = {
    "reduce a 0 +": lambda a, b: sum(a),
    "reduce ( map a square ) 0 +": lambda a, b: sum(x**2 for x in a),
    "filter a is_prime": lambda a, b: [x for x in a if is_prime(x)],
    "filter a ( combine ! is_prime )": lambda a, b: [x for x in a if not is_prime(x)],
    "reduce ( filter a ( partial0 b < ) ) 0 max": lambda a, b: max([0, *(x for x in a if b < x)]),
    "map a ( partial0 b - )": lambda a, b: [b - x for x in a],
    "map a ( partial1 b - )": lambda a, b: [x - b for x in a],
    "map a ( partial1 2 / )": lambda a, b: [math.floor(x / 2) for x in a],
    "map a ( combine ( partial0 1 + ) ( partial0 b * ) )": lambda a, b: [1 + b * x for x in a],
    "map ( range 0 b ) ( lambda1 ( * arg1 ( + arg1 b ) ) )": lambda a, b: [
        x * (x + b) for x in range(b)
    ],
    "reduce a 7 ( lambda2 ( - arg2 arg1 ) )": lambda a, b: reduce(lambda x, y: y - x, a, 7),
    # The inner arguments hide the outer ones, and what they do not hide is seen.
    "map a ( lambda1 ( reduce a arg1 ( lambda2 ( + arg1 ( * b arg2 ) ) ) ) )": lambda a, b: [
        x + b * sum(a) for x in a
    ],
    f"invoke1 {FIBONACCI} b": lambda a, b: fibonacci(b),
    "if ( && ( > ( len a ) 3 ) ( ! ( is_sorted a ) ) ) ( head ( sort a ) ) -1": lambda a, b: (
        min(a) if len(a) > 3 and a != sorted(a) else -1
    ),
    "reverse ( slice a 1 b )": lambda a, b: list(reversed(a[1:b])),
    "append ( tail ( append a b ) ) ( len a )": lambda a, b: [*[*a, b][1:], len(a)],
    "contains a b": lambda a, b: b in a,
    "== ( % b 3 ) ( abs ( - 0 1 ) )": lambda a, b: b % 3 == 1,
    "|| ( <= b 2 ) ( >= b 8 )": lambda a, b: b <= 2 or b >= 8,
    "!= ( min b 4 ) ( floor ( sqrt ( pow b 2 ) ) )": lambda a, b: b > 4,
    "reduce ( digits ( * ( + b 7 ) 123 ) ) 0 +": lambda a, b: sum(map(int, str((b + 7) * 123))),
    "reduce a inf min": lambda a, b: min(a, default=math.inf),
    "dict-keys ( reduce a ( dict-new int int ) ( partial2 1 dict-insert ) )": lambda a, b: sorted(
        set(a)
    ),
    "deref ( append a 5 ) ( - ( len ( append a 5 ) ) 1 )": lambda a, b: 5,
    "map ( map a ( partial1 b > ) ) !": lambda a, b: [not x > b for x in a],
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_compute_what_python_does(program):
    generator = random.Random(program)
    for _ in range(30):
        a = [generator.randint(0, 40) for _ in range(generator.randint(0, 9))]
        b = generator.randint(1, 9)
        found = run_program(read_program(program), {"a": list(a), "b": b})
        expected = PROGRAMS[program](a, b)
        assert found == expected
        assert type(found) is type(expected)


TEXTS = {
    "strlen s": 5,
    "str_index 1 s": "b",
    'str_concat s "z"': "ab cdz",
    'str_split s " "': ["ab", "cd"],
    'reduce ( str_split s " " ) "" str_max': "cd",
    'str_min s "a"': "a",
    '== s ""': False,
    '< s "b"': True,
}


@pytest.mark.parametrize("program", TEXTS)
def test_strings(program):
    assert run_program(read_program(program), {"s": "ab cd"}) == TEXTS[program]


def test_every_primitive_is_in_a_program():
    used = {token for text in (*PROGRAMS, *TEXTS) for token in text.split()}
    assert set(PRIMITIVES) - used == {"array-new", "int-deref"}
    arguments = {"a": [4, 5, 6]}
    assert run_program(["append", ["array-new", "int"], ["int-deref", "a", "1"]], arguments) == [5]


def test_an_argument_wins_over_a_primitive_of_its_name():
    assert run_program(["+", "min", "1"], {"min": 4}) == 5


def test_functions_of_a_problem_can_call_themselves():
    factorial = ["if", ["<", "n", "2"], "1", ["*", "n", ["factorial", ["-", "n", "1"]]]]
    functions = [Definition(name="factorial", arguments=("n",), tree=factorial)]
    for n in range(1, 8):
        found = run_program(["factorial", "x"], {"x": n}, functions=functions)
        assert found == math.factorial(n)
    # They do not see the arguments of the program.
    with pytest.raises(ProgramError, match="unknown symbol 'x'"):
        run_program(
            ["f", "x"], {"x": 1}, functions=[Definition(name="f", arguments=("n",), tree="x")]
        )


def test_trees_of_json_may_have_numbers_and_nothing_else():
    assert run_program(["+", 2, ["*", 1.5, "4"]], {}) == 8
    for tree in (None, True, ["+", 1, None], [[], "a"]):
        with pytest.raises(ProgramError):
            run_program(tree, {"a": 1})


def test_equal_values_are_of_one_kind():
    assert run_program(["==", "true", "1"], {}) is False
    assert run_program(["==", "a", "b"], {"a": [1, 2], "b": [1, 2]}) is True


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("reduce a 0 plus", "unknown symbol 'plus'"),
        ("head a", "head is undefined for an empty array"),
        ("/ 1 0", "/ is undefined for"),
        ("% b 0", "% is undefined for"),
        ("deref a 3", "the index of an item must be from 0 to -1, got 3"),
        ("sqrt ( - 0 4 )", "sqrt is undefined for -4"),
        ("pow ( - 0 8 ) ( sqrt 2 )", "pow must give real numbers"),
        ("pow 0 ( - 0 1 )", "pow is undefined for"),
        ("floor inf", "floor is undefined for"),
        ("+ a b", r"\+ needs a number, got \[\]"),
        ("+ true 1", r"\+ needs a number, got True"),
        ("if b 1 2", "if needs a boolean, got 4"),
        ("if true 1", "if must have 3 arguments, got 2"),
        ("filter ( range 0 3 ) square", "filter needs a boolean, got 0"),
        ("map ( range 0 3 ) +", "a function must have 2 arguments, got 1"),
        ("map b square", "map needs a array, got 4"),
        ("partial1 1 square", "partial1 needs a function of at least 2 arguments, got one of 1"),
        ("b 1", "b needs a function, got 4"),
        ("len a a", "len must have 1 arguments, got 2"),
        ("square", "the value of a program must not be a function"),
        ("lambda1 arg1", "the value of a program must not be a function"),
        ("== square square", "== needs a value, got a function"),
        ("( ( a ) )", "a list must start with the name of a function"),
        ("range 0 1001", "range must have at most 1000 items, got 1001"),
        ('sort ( append ( append a 1 ) "z" )', "sort is undefined for"),
        ("arg1", "unknown symbol 'arg1'"),
        ("__import__", "unknown symbol '__import__'"),
    ],
)
def test_what_is_undefined_is_an_error(program, message):
    with pytest.raises(ProgramError, match=message):
        run_program(read_program(program), {"a": [], "b": 4})


LOOP = "invoke1 ( lambda1 ( self arg1 ) ) 1"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (LOOP, "evaluations must not be nested 1000 deep"),
        (
            "reduce ( range 0 1000 ) 1 ( lambda2 ( reduce ( range 0 1000 ) arg1 + ) )",
            "end within 20000 steps",
        ),
        ("reduce ( range 0 1000 ) 2 ( lambda2 ( * arg1 arg1 ) )", "at most 4096 bits"),
        ("pow 10 1000000000", "at most 4096 bits"),
        ("pow 10 ( pow 10 9 )", "at most 4096 bits"),
        (
            'reduce ( range 0 100 ) "ab" ( lambda2 ( str_concat arg1 arg1 ) )',
            "str_concat must have at most 2000 items, got 2048",
        ),
        ("is_prime ( + ( pow 10 9 ) 7 )", r"is_prime needs a number below 10\^9"),
    ],
)
def test_programs_without_end_or_size_are_stopped(program, message):
    with pytest.raises(ProgramError, match=message):
        run_program(read_program(program), {})


def test_recursion_may_be_deeper_than_that_of_python():
    count = "invoke1 ( lambda1 ( if ( < arg1 1 ) 0 ( + 1 ( self ( - arg1 1 ) ) ) ) ) n"
    assert run_program(read_program(count), {"n": 110}) == 110
    limits = {"max_depth": 10**6, "max_steps": 10**6}
    assert run_program(read_program(count), {"n": 3000}, **limits) == 3000


TREES = ["a", ["len", "a"], ["reduce", ["filter", "a", ["f", ["g", "b"]]], "0", "+"]]


@pytest.mark.parametrize("tree", TREES)
def test_programs_are_read_as_they_are_written(tree):
    text = " ".join(write_program(tree))
    assert read_program(text) == tree
    assert read_program(text.replace("(", "[").replace(")", "]")) == tree
    if isinstance(tree, list):
        assert read_program(f"[ {text} ]") == tree
    assert read_program('f " " "z"') == ["f", '" "', '"z"']


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must have a symbol"),
        ("( a", "got 1 still open"),
        ("a ) b", "got one closed too many"),
        ("( )", "must start with the name of a function"),
    ],
)
def test_other_texts_are_no_programs(text, message):
    with pytest.raises(ProgramError, match=message):
        run_program(read_program(text), {})


def test_any_tokens_give_a_value_or_an_error_of_the_program():
    """Whatever a model writes ends soon, and fails with no other error."""
    generator = random.Random(0)
    names = [*PRIMITIVES, "if", "lambda1", "lambda2", "arg1", "self", "a", "b", "1", "inf", "true"]
    n_values = 0
    for _, length in itertools.product(range(400), (2, 4, 7)):

        def tree(depth, length=length):
            if depth == 0 or generator.random() < 0.3:
                return generator.choice(names)
            return [generator.choice(names), *(tree(depth - 1) for _ in range(length % 4))]

        try:
            run_program(tree(4), {"a": [3, 1, 2], "b": 4})
            n_values += 1
        except ProgramError:
            continue
    assert n_values > 20
