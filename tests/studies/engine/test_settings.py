import functools
import json
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest

from studies.engine import settings


@dataclass(frozen=True)
class Inner:
    """A nested config.

    Args:
        rate: the rate,
            per step.
        kind: the kind.
    """

    rate: float = 0.1
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Outer:
    """A config.

    Args:
        inner: the nested config.
        sizes: several numbers.
        limit: the upper limit.
        flag, name: a switch, and a name.

    Raises:
        ValueError: limit is 13.
    """

    inner: Inner = Inner()
    sizes: tuple[int, ...] = (1, 2)
    limit: int | None = None
    flag: bool = False
    name: str = "x"

    def __post_init__(self):
        if self.limit == 13:
            raise ValueError("limit must not be 13")


def test_settings_are_accessed_by_dotted_paths():
    assert settings.get(Outer(), "inner.rate") == 0.1
    changed = settings.put(Outer(), {"inner.rate": 0.5, "inner.kind": "b", "limit": 4})
    assert changed == Outer(inner=Inner(0.5, "b"), limit=4)
    assert settings.put(Outer(), {"inner": Inner(2.0), "name": "y"}) == Outer(Inner(2.0), name="y")
    assert settings.put(Outer(), {}) == Outer()


def test_a_group_and_one_of_its_settings_can_be_put_together():
    changed = settings.put(Outer(), {"inner": Inner(0.5, "b"), "inner.rate": 0.7})
    assert changed.inner == Inner(0.7, "b")


@pytest.mark.parametrize(
    ("path", "text", "values"),
    [
        ("inner.rate", "0.5", (0.5,)),
        ("inner.rate", "1", (1.0,)),
        ("inner.rate", "1e-3,3e-3", (0.001, 0.003)),
        ("inner.kind", "b,a", ("b", "a")),
        ("sizes", "3,4", ((3, 4),)),
        ("limit", "none,7", (None, 7)),
        ("flag", "True", (True,)),
        ("name", "one,two", ("one", "two")),
    ],
)
def test_text_becomes_values_of_the_settings_type(path, text, values):
    parsed = settings.parse(Outer(), path, text)
    assert parsed == values
    assert list(map(type, parsed)) == list(map(type, values))


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("inner.rat", "1", "unknown setting 'inner.rat'; nearest: inner.rate"),
        ("router.rate", "1", "unknown setting 'router.rate'; nearest: inner.rate$"),
        ("inner", "1", "inner is a group of settings: inner.rate, inner.kind"),
        ("limit", "1.5", "limit must be of type int, got '1.5'"),
        ("flag", "3", "flag must be of type bool, got '3'"),
        ("inner.kind", "c", "inner.kind must be one of a, b, got 'c'"),
    ],
)
def test_wrong_text_is_refused(path, text, message):
    with pytest.raises(ValueError, match=message):
        settings.parse(Outer(), path, text)


def test_changed_configs_are_validated():
    with pytest.raises(ValueError, match="limit must not be 13"):
        settings.put(Outer(), {"limit": 13})


def test_settings_are_documented_by_docstrings():
    documentation = {name: text for name, _, text in settings.describe(Outer())}
    assert documentation == {
        "inner.rate": "the rate, per step.",
        "inner.kind": "the kind.",
        "sizes": "several numbers.",
        "limit": "the upper limit.",
        "flag": "a switch, and a name.",
        "name": "a switch, and a name.",
    }


def test_json_values_of_configs_include_their_class():
    @dataclass(frozen=True)
    class Other:
        rate: float = 0.1
        kind: str = "a"

    assert settings.plain(Inner()) != settings.plain(Other())
    assert settings.plain({"a": (1, Inner())})["a"][1]["rate"] == 0.1


class Called:
    """An object that is called like a function."""

    def __call__(self):
        return 1


def test_json_values_say_what_is_called_and_with_what_not_where_it_is():
    held = settings.plain(functools.partial(sorted, [3, np.int64(1)], reverse=True))
    assert held == {"partial": "sorted", "args": [[3, 1]], "keywords": {"reverse": True}}
    assert json.loads(json.dumps(held)) == held
    assert settings.plain(Called()) == "Called"


def test_changes_take_the_place_of_those_of_the_same_settings():
    changes = ["training.n_steps=5", "seed=0,1", "seed=2", "training.n=3"]
    assert settings.replaced(changes, ["seed=7", "width=4"]) == [
        "training.n_steps=5",
        "training.n=3",
        "seed=7",
        "width=4",
    ]
    assert settings.replaced([], ["seed=7"]) == ["seed=7"]
    assert settings.replaced(changes, []) == changes
