"""An interpreter of AlgoLisp, the language of small programs over numbers, arrays and strings.

Polosukhin, Skidanov 2018, "Neural Program Search"; names and meanings of the primitives are those
of the published data (github.com/nearai/program_synthesis). A program is a nested list: the name of
a function and its arguments. Nothing is evaluated by Python, and steps, depth and sizes of values
are limited, so that what a model writes can be run.
"""

import math
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Tree = str | int | float | list["Tree"]
"""A program: a symbol, a number, or a list of a function and its arguments."""

Value = Any
"""A number, boolean, string, array (list), dict or function."""

Steps = Generator[Any, Any, Any]
"""A computation: it yields computations whose values it needs, and returns its own."""

_TOKEN = re.compile(r'"[^"]*"|[()\[\]]|[^\s()\[\]]+')
_NUMBER = re.compile(r"-?\d{1,30}")
_LONGEST_RANGE = 1000
_MOST_BITS = 4096


class ProgramError(ValueError):
    """A program is not well formed, or fails on its arguments.

    Example:
        >>> try:
        ...     read_program("( +")
        ... except tasks.ProgramError:
        ...     print("not well formed")
        not well formed
    """


@dataclass(frozen=True)
class Function:
    """A function as a value.

    Attributes:
        arity: number of arguments; None if any number is allowed.
        call: arguments -> the computation of its value.
    """

    arity: int | None
    call: Callable[..., Steps]


@dataclass(frozen=True)
class _Primitive:
    """A primitive: the kinds of its arguments, and the value or the computation of it."""

    kinds: tuple[str, ...]
    compute: Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Definition:
    """A function that comes with a problem.

    Attributes:
        name: the name by which programs call it.
        arguments: names of its arguments.
        tree: its program, which may call it.
    """

    name: str
    arguments: tuple[str, ...]
    tree: Tree


def run_program(
    tree: Tree,
    arguments: Mapping[str, Value],
    *,
    functions: Sequence[Definition] = (),
    max_steps: int = 20_000,
    max_size: int = 2_000,
    max_depth: int = 1_000,
) -> Value:
    """Run a program and return its value.

    Args:
        tree: the program.
        arguments: values of its arguments by name; they win over primitives of the same name.
        functions: further functions.
        max_steps: most evaluations and calls.
        max_size: most items of an array or dict, and letters of a string; numbers have at most
            4,096 bits.
        max_depth: most evaluations inside one another.

    Raises:
        ProgramError: a symbol is unknown, arguments are of the wrong number or kind, an operation
            is undefined (head of an empty array, division by zero), a limit is exceeded, or the
            value is a function.

    Example:
        >>> run_program(["reduce", ["filter", "a", "is_prime"], "0", "+"], {"a": [2, 3, 4]})
        5
    """
    machine = _Machine(functions, max_steps=max_steps, max_size=max_size, max_depth=max_depth)
    return machine.run(tree, arguments)


def read_program(text: str) -> Tree:
    """Return the program that a text stands for, with round or square brackets around lists.

    The outermost brackets may be missing. Spaces within quotes belong to a symbol.

    Raises:
        ProgramError: the text is empty, or brackets do not match.

    Example:
        >>> read_program("reduce ( filter a is_prime ) 0 +")
        ['reduce', ['filter', 'a', 'is_prime'], '0', '+']
    """
    open_lists: list[list[Tree]] = [[]]
    for token in _TOKEN.findall(text):
        if token in "([":
            open_lists.append([])
        elif token in ")]":
            done = open_lists.pop()
            if not open_lists:
                raise ProgramError(f"brackets must match, got one closed too many in {text!r:.200}")
            open_lists[-1].append(done)
        else:
            open_lists[-1].append(token)
    if len(open_lists) > 1:
        raise ProgramError(
            f"brackets must match, got {len(open_lists) - 1} still open in {text!r:.200}"
        )
    (items,) = open_lists
    if not items:
        raise ProgramError("a program must have a symbol, got none")
    return items[0] if len(items) == 1 else items


def write_program(tree: Tree) -> list[str]:
    """Return the words of a program, with round brackets around inner lists.

    Example:
        >>> " ".join(write_program(["len", ["sort", "a"]]))
        'len ( sort a )'
    """
    return list(_words(tree)) if isinstance(tree, list) else [str(tree)]


def _words(tree: Sequence[Any]) -> Iterator[str]:
    for item in tree:
        if isinstance(item, list):
            yield from ("(", *_words(item), ")")
        else:
            yield str(item)


class _Machine:
    """One run of a program, with its counts."""

    def __init__(
        self, functions: Sequence[Definition], *, max_steps: int, max_size: int, max_depth: int
    ) -> None:
        self._max_steps, self._max_size, self._max_depth = max_steps, max_size, max_depth
        self._n_steps = 0
        self._functions = {
            name: self._function(name, primitive) for name, primitive in PRIMITIVES.items()
        }
        for definition in functions:
            self._functions[definition.name] = self._closure(
                definition.arguments, definition.tree, {}
            )

    def run(self, tree: Tree, arguments: Mapping[str, Value]) -> Value:
        """Return the value of a program, which runs on a stack of its own."""
        stack, value = [self._evaluate(tree, dict(arguments))], None
        while stack:
            self._n_steps += 1
            if self._n_steps > self._max_steps:
                raise ProgramError(f"a program must end within {self._max_steps} steps")
            if len(stack) > self._max_depth:
                raise ProgramError(f"evaluations must not be nested {self._max_depth} deep")
            try:
                stack.append(stack[-1].send(value))
                value = None
            except StopIteration as done:
                stack.pop()
                value = done.value
        if isinstance(value, Function):
            raise ProgramError("the value of a program must not be a function")
        return value

    def _evaluate(self, tree: Tree, scope: Mapping[str, Value]) -> Steps:
        if not isinstance(tree, list):
            return self._symbol(tree, scope)
        name, trees = (tree[0], tree[1:]) if tree else (None, [])
        if not isinstance(name, str):
            raise ProgramError(f"a list must start with the name of a function, got {tree!r:.100}")
        if name == "if":
            _require_number_of_arguments(name, 3, len(trees))
            condition = yield self._evaluate(trees[0], scope)
            _require_kind(name, "boolean", condition)
            return (yield self._evaluate(trees[1] if condition else trees[2], scope))
        if name in ("lambda1", "lambda2"):
            _require_number_of_arguments(name, 1, len(trees))
            return self._closure(("arg1", "arg2")[: int(name[-1])], trees[0], scope)
        function = self._symbol(name, scope)
        _require_kind(name, "function", function)
        _require_number_of_arguments(name, function.arity, len(trees))
        values = []
        for each in trees:
            values.append((yield self._evaluate(each, scope)))
        return (yield function.call(*values))

    def _symbol(self, symbol: str | int | float, scope: Mapping[str, Value]) -> Value:
        if not isinstance(symbol, str):
            _require_kind("a program", "number", symbol)
            return symbol
        if symbol in scope:
            return scope[symbol]
        if symbol in self._functions:
            return self._functions[symbol]
        if symbol in _CONSTANTS:
            return _CONSTANTS[symbol]
        if _NUMBER.fullmatch(symbol):
            return int(symbol)
        if len(symbol) > 1 and symbol[0] == symbol[-1] == '"':
            return symbol[1:-1]
        raise ProgramError(f"unknown symbol {symbol!r:.50}")

    def _closure(self, names: Sequence[str], body: Tree, scope: Mapping[str, Value]) -> Function:
        """A function with a body, which can call itself as `self`."""

        def call(*values: Value) -> Steps:
            inner = {**scope, **dict(zip(names, values, strict=True)), "self": function}
            return (yield self._evaluate(body, inner))

        function = Function(len(names), call)
        return function

    def _function(self, name: str, primitive: _Primitive) -> Function:
        """A primitive as a function that checks its arguments and its value."""

        def call(*values: Value) -> Steps:
            for kind, value in zip(primitive.kinds, values, strict=True):
                _require_kind(name, kind, value)
            try:
                value = primitive.compute(*values)
            except ProgramError:
                raise
            except (ArithmeticError, TypeError, ValueError) as error:
                raise ProgramError(f"{name} is undefined for {values!r:.100}: {error}") from error
            if isinstance(value, Generator):
                value = yield value
            return self._checked(name, value)

        return Function(len(primitive.kinds), call)

    def _checked(self, name: str, value: Value) -> Value:
        if isinstance(value, list | str | dict) and len(value) > self._max_size:
            raise ProgramError(f"{name} must have at most {self._max_size} items, got {len(value)}")
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise ProgramError(f"{name} must give numbers of at most {_MOST_BITS} bits")
        if isinstance(value, complex):
            raise ProgramError(f"{name} must give real numbers, got {value}")
        return value


# Kinds


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_KINDS: dict[str, Callable[[Value], bool]] = {
    "number": _is_number,
    "boolean": lambda value: isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "dict": lambda value: isinstance(value, dict),
    "function": lambda value: isinstance(value, Function),
    "value": lambda value: not isinstance(value, Function),
    "key": lambda value: _is_number(value) or isinstance(value, str),
    "type": lambda value: value is int or value is str,
}


def _require_kind(name: str, kind: str, value: Value) -> None:
    if not _KINDS[kind](value):
        shown = "a function" if isinstance(value, Function) else f"{value!r:.50}"
        raise ProgramError(f"{name} needs a {kind}, got {shown}")


def _require_number_of_arguments(name: str, arity: int | None, n: int) -> None:
    if arity is not None and arity != n:
        raise ProgramError(f"{name} must have {arity} arguments, got {n}")


# Primitives


def _called(function: Function, *values: Value) -> Steps:
    _require_number_of_arguments("a function", function.arity, len(values))
    return function.call(*values)


def _map(array: list[Value], function: Function) -> Steps:
    mapped = []
    for item in array:
        mapped.append((yield _called(function, item)))
    return mapped


def _filter(array: list[Value], function: Function) -> Steps:
    kept = []
    for item in array:
        keep = yield _called(function, item)
        _require_kind("filter", "boolean", keep)
        if keep:
            kept.append(item)
    return kept


def _reduce(array: list[Value], value: Value, function: Function) -> Steps:
    for item in array:
        value = yield _called(function, value, item)
    return value


def _combine(outer: Function, inner: Function) -> Function:
    def call(*values: Value) -> Steps:
        value = yield _called(inner, *values)
        return (yield _called(outer, value))

    return Function(inner.arity, call)


def _partial(place: int) -> Callable[[Value, Function], Function]:
    def fix(value: Value, function: Function) -> Function:
        if function.arity is not None and function.arity <= place:
            raise ProgramError(
                f"partial{place} needs a function of at least {place + 1} arguments, got one of "
                f"{function.arity}"
            )

        def call(*values: Value) -> Steps:
            return _called(function, *values[:place], value, *values[place:])

        return Function(None if function.arity is None else function.arity - 1, call)

    return fix


def _divide(x: float, y: float) -> float:
    return x // y if isinstance(x, int) else x / y


def _power(x: float, y: float) -> float:
    if isinstance(x, int) and x.bit_length() * abs(y) > _MOST_BITS:
        raise ProgramError(f"pow must give numbers of at most {_MOST_BITS} bits")
    return x**y


def _root(x: float) -> float:
    if x < 0:
        raise ProgramError(f"sqrt is undefined for {x}")
    return math.sqrt(x)


def _range(low: float, high: float) -> list[int]:
    if not -math.inf < high - low <= _LONGEST_RANGE:
        raise ProgramError(f"range must have at most {_LONGEST_RANGE} items, got {high - low}")
    return list(range(int(low), int(high)))


def _item(array: Sequence[Value], index: float) -> Value:
    if index != int(index) or not 0 <= index < len(array):
        raise ProgramError(f"the index of an item must be from 0 to {len(array) - 1}, got {index}")
    return array[int(index)]


def _head(array: list[Value]) -> Value:
    if not array:
        raise ProgramError("head is undefined for an empty array")
    return array[0]


def _is_prime(x: float) -> bool:
    if x <= 1:
        return False
    if x >= 10**9:
        raise ProgramError(f"is_prime needs a number below 10^9, got {x}")
    return all(x % divisor for divisor in range(2, int(1 + math.sqrt(x))))


def _digits(x: float) -> list[int]:
    return [int(digit) for digit in str(abs(int(x)))]


def _split(text: str, delimiter: str) -> list[str]:
    if not delimiter:
        raise ProgramError("str_split needs a delimiter, got an empty string")
    return [part for part in text.split(delimiter) if part]


def _equal(x: Value, y: Value) -> bool:
    return isinstance(x, bool) == isinstance(y, bool) and x == y


def _primitives(kinds: str, **computations: Callable[..., Any]) -> dict[str, _Primitive]:
    """Primitives that take arguments of the same kinds, by name."""
    return {name: _Primitive(tuple(kinds.split()), one) for name, one in computations.items()}


_CONSTANTS: dict[str, Value] = {"true": True, "false": False, "inf": math.inf}
_CONSTANTS |= {"int": int, "string": str}

PRIMITIVES: dict[str, _Primitive] = {
    **_primitives(
        "number number",
        **{"+": lambda x, y: x + y, "-": lambda x, y: x - y, "*": lambda x, y: x * y},
        **{"/": _divide, "%": lambda x, y: x % y, "pow": _power, "range": _range},
        **{"min": min, "max": max},
    ),
    **_primitives(
        "number",
        sqrt=_root,
        # Towards 0, as in the published code.
        floor=int,
        square=lambda x: x * x,
        abs=abs,
        is_prime=_is_prime,
        digits=_digits,
    ),
    **_primitives("boolean", **{"!": lambda x: not x}),
    **_primitives("boolean boolean", **{"||": lambda x, y: x or y, "&&": lambda x, y: x and y}),
    **_primitives(
        "value value",
        **{"<": lambda x, y: x < y, ">": lambda x, y: x > y, "<=": lambda x, y: x <= y},
        **{">=": lambda x, y: x >= y, "==": _equal, "!=": lambda x, y: not _equal(x, y)},
    ),
    **_primitives("array function", map=_map, filter=_filter),
    **_primitives("array value function", reduce=_reduce),
    **_primitives("function value", invoke1=_called),
    **_primitives("function function", combine=_combine),
    **_primitives(
        "value function", partial0=_partial(0), partial1=_partial(1), partial2=_partial(2)
    ),
    **_primitives(
        "array",
        len=len,
        head=_head,
        tail=lambda array: array[1:],
        sort=sorted,
        reverse=lambda array: array[::-1],
        is_sorted=lambda array: array == sorted(array),
    ),
    **_primitives("array number", **{"deref": _item, "int-deref": _item}),
    **_primitives(
        "array number number",
        slice=lambda array, low, high: array[max(0, int(low)) : int(high)],
    ),
    **_primitives(
        "array value",
        append=lambda array, item: [*array, item],
        contains=lambda array, item: any(_equal(item, other) for other in array),
    ),
    **_primitives("type", **{"array-new": lambda kind: []}),
    **_primitives("type type", **{"dict-new": lambda keys, values: {}}),
    **_primitives("dict key value", **{"dict-insert": lambda d, key, value: {**d, key: value}}),
    **_primitives("dict", **{"dict-keys": sorted}),
    **_primitives("string", strlen=len),
    **_primitives("number string", str_index=lambda index, text: _item(text, index)),
    **_primitives(
        "string string",
        str_concat=lambda x, y: x + y,
        str_split=_split,
        str_min=min,
        str_max=max,
    ),
}
"""The primitives by name; `if`, `lambda1` and `lambda2` are forms of the language."""
