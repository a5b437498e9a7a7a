"""Slices of examples in the inputs of a model."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from probes import Quantity, capture, hooked, interchange
from probes.capturing.inputs import take_rows

N = 30


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.same = nn.Identity()

    def forward(self, x, k):
        return self.same(x) * torch.as_tensor(k)[: len(x), None]


def patched(k):
    base, source = torch.randn(2, N, 4, generator=torch.Generator().manual_seed(0))
    return interchange(
        hooked(Scaled()), {"x": base, "k": k}, {"x": source, "k": k},
        hooks={"all": "same.hook_out"}, where=torch.ones(1, 1, dtype=torch.bool), batch_size=10,
        metrics={"sum": lambda output, rows: output.sum(1)}, resamples=1,
    )["value"]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "got"),
    [(np.array, r"'k': ndarray of shape (30,) and dtype float64"), (list, "'k': list [0.0, 1.0,")],
)
def test_rows_of_examples_that_are_no_tensors_are_refused_not_left_whole(kind, got):
    rows = np.arange(float(N))
    with pytest.raises(
        TypeError, match=rf"each of the 30 examples must be tensors, got {re.escape(got)}"
    ):
        patched(kind(rows.tolist()))
    assert patched(torch.from_numpy(rows).float()).shape == (2, 1)


def test_other_values_are_the_same_for_all_examples():
    x, table, steps = torch.zeros(3, 2), np.zeros((5, 2)), (0, 1, 2)
    taken = take_rows((x, table, steps, np.array(3.0)), slice(2))
    assert len(taken[0]) == 2
    assert taken[1] is table
    assert taken[2] is steps


def test_inputs_without_tensors_are_described():
    batch = SimpleNamespace(inputs={"x": np.zeros((3, 4)), "k": 2}, latents={})
    expected = "inputs must be tensors .* got no tensor but 'x': ndarray of shape .*, 'k': int 2"
    with pytest.raises(ValueError, match=expected):
        capture(hooked(Scaled()), [batch], {"x": Quantity("same.hook_out", ("example", "d"))})
