from dataclasses import dataclass
from typing import Literal

import pytest

from studies.settings import from_plain, override, setting_names


@dataclass(frozen=True)
class Inner:
    steps: int = 10
    rate: float = 0.1
    clip: float | None = None
    fast: bool = False

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")


@dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    seeds: tuple[int, ...] = (0,)
    names: tuple[str, ...] = ("a",)
    kind: Literal["x", "y"] = "x"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("inner.steps=7", Outer(inner=Inner(steps=7))),
        ("inner.rate=3e-4", Outer(inner=Inner(rate=3e-4))),
        ("inner.rate=1", Outer(inner=Inner(rate=1.0))),
        ("inner.clip=0.5", Outer(inner=Inner(clip=0.5))),
        ("inner.clip=none", Outer()),
        ("inner.fast=true", Outer(inner=Inner(fast=True))),
        ("seeds=3,4", Outer(seeds=(3, 4))),
        ("names=b,c", Outer(names=("b", "c"))),
        ("kind=y", Outer(kind="y")),
    ],
)
def test_settings_are_read_by_their_types(setting, expected):
    changed = override(Outer(), [setting])
    assert changed == expected
    assert type(changed.inner.rate) is float


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("inner.step=7", r"unknown setting 'inner.step'; nearest are .*inner.steps"),
        ("inner=7", "unknown setting 'inner'"),
        ("seeds.x=7", "unknown setting 'seeds.x'"),
        ("inner.steps", "a setting looks like key=value, got 'inner.steps'"),
        ("inner.steps=many", "inner.steps must be of type int, got 'many'"),
        ("inner.steps=1.5", "inner.steps must be of type int, got '1.5'"),
        ("inner.fast=1", "inner.fast must be of type bool, got '1'"),
        ("inner.steps=0", "steps must be at least 1, got 0"),
    ],
)
def test_wrong_settings_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        override(Outer(), [setting])


def test_names_are_listed_with_dots():
    assert setting_names(Outer())[:3] == ["inner.steps", "inner.rate", "inner.clip"]


def test_stored_configs_come_back():
    stored = {"inner": {"steps": 3, "clip": None}, "seeds": [1, 2]}
    assert from_plain(Outer, stored) == Outer(inner=Inner(steps=3), seeds=(1, 2))
    with pytest.raises(ValueError, match="Inner has no setting pace"):
        from_plain(Outer, {"inner": {"pace": 3}})
