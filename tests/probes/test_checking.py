"""Arguments are checked against annotations."""

import inspect
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor

import probes
from probes.capturing.hooking import HookedModel
from probes.checking import checked

MANY = list(range(100_000))


@checked
def example(
    data: xr.Dataset,
    tests: Mapping[str, xr.Dataset] | None = None,
    *,
    cells: Sequence[str] = ("layer",),
    kind: Literal["a", "b"] = "a",
    labels: Int[Tensor, "example"] | None = None,
    values: Int[np.ndarray, "example"] | None = None,
    answer: Callable[[Any], Tensor] = lambda output: output,
    model: HookedModel | None = None,
    share: float = 0.5,
    n: int = 1,
) -> int:
    """Return n."""
    return n


DATA = xr.Dataset()


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"tests": {"ood": DATA}, "cells": ["layer"]},
        {"n": np.int64(3), "share": np.float32(0.5)},
        {"share": 1},
        # Probes themselves check choices, shapes and numbers, and convert what is like an array.
        {"kind": "c", "labels": torch.zeros(2, 2), "values": [1, 2]},
    ],
)
def test_what_is_allowed_passes(arguments):
    assert example(DATA, **arguments) == arguments.get("n", 1)


def test_a_string_is_no_sequence_of_names():
    message = r"cells of example must be Sequence\[str\], got str 'layer'; .* is \('layer',\)"
    with pytest.raises(TypeError, match=message):
        example(DATA, cells="layer")

    @checked
    def names_or_name(hooks: str | Sequence[str], labels: Sequence[str] | int = 1) -> int:
        return 1

    assert names_or_name("a") == names_or_name(("a", "b"), ["c"]) == 1
    with pytest.raises(TypeError, match=r"labels of names_or_name must be .*, got str 'abc'"):
        names_or_name("a", "abc")


def test_checks_leave_the_random_state_alone_and_end_alike():
    random.seed(3)
    expected = random.getstate()
    example(DATA, cells=["layer"] * 5)
    for position in range(5):
        cells: list[Any] = ["layer"] * 5
        cells[position] = 1
        outcomes = set()
        for _ in range(20):
            try:
                outcomes.add(example(DATA, cells=cells))
            except TypeError as error:
                outcomes.add(str(error))
            assert random.getstate() == expected
        assert len(outcomes) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"data": MANY},
            r"^data of example must be Dataset, got list \[0, 1, 2, 3, 4, 5, \.\.\.\]$",
        ),
        ({"data": np.zeros((10, 5))}, r"got ndarray of shape \(10, 5\) and dtype float64$"),
        (
            {"tests": {"ood": [1]}},
            r"must be Mapping\[str, Dataset\] \| None, got dict \{'ood': \[1\]\}$",
        ),
        ({"cells": MANY}, r"^cells of example must be Sequence\[str\], got list"),
        ({"labels": [1, 2]}, r"^labels of example must be Tensor \| None, got list \[1, 2\]$"),
        ({"answer": "argmax"}, r"^answer of example must be Callable.*, got str 'argmax'$"),
        (
            {"model": torch.nn.Linear(2, 2)},
            r"\(HookedModel: hook_dict, hooks, run_with_hooks\), got Linear; probes.hooked",
        ),
        ({"n": "many"}, "^n of example must be int, got str 'many'$"),
        ({"n": 1.5}, "^n of example must be int, got float 1.5$"),
        ({"size": 3}, "^example: got an unexpected keyword argument 'size'$"),
    ],
)
def test_what_is_not_allowed_is_named(arguments, message):
    with pytest.raises(TypeError, match=message):
        example(**{"data": DATA, **arguments})


def test_a_missing_argument_is_named():
    with pytest.raises(TypeError, match=r"^example: missing a required argument: 'data'$"):
        example()


def test_functions_stay_what_they_are():
    assert pickle.loads(pickle.dumps(probes.decode)) is probes.decode
    assert [*inspect.signature(example).parameters][:2] == ["data", "tests"]
