"""Counterfactuals of a small model that can be calculated by hand; rows of tables."""

import numpy as np
import pytest
import torch

from tasks import Batch, CausalTask, FuzzyLogic, FuzzyLogicConfig
from tasks.causal import FINITE, Variable, integers, numbers
from tasks.rows import find_rows


class Sums(CausalTask):
    """`left` and `right` make `total`; running sums of `steps`; the target is total + last sum."""

    def __init__(self):
        self.calls = []

    @property
    def _variables(self):
        return {
            "left": Variable(allowed=integers(0, 9)),
            "right": Variable(allowed=integers(0, 9)),
            "fixed": Variable(),
            "total": Variable(causes=("left", "right"), compute=self.add, allowed=integers(0, 99)),
            "parity": Variable(causes=("total",), compute=lambda total: total % 2),
            "steps": Variable(allowed=integers(0, 9)),
            "sums": Variable(
                causes=("steps",), compute=self.run, allowed=integers(0, 99), within=True
            ),
            "inputs": Variable(
                causes=("left", "right", "steps"),
                compute=lambda *causes: torch.stack(causes[:2], 1),
            ),
            "targets": Variable(
                causes=("total", "sums"), compute=lambda total, sums: (total + sums[:, -1])[:, None]
            ),
            "mask": Variable(causes=("targets",), compute=lambda targets: targets < 50),
        }

    def add(self, left, right):
        self.calls.append(len(left))
        return left + right

    def run(self, steps, entries=None):
        sums = torch.zeros_like(steps)
        before = torch.zeros_like(steps[:, 0])
        for i, step in enumerate(steps.T):
            before = before + step
            if entries is not None:
                before = torch.where(entries.is_set[:, i], entries.values[:, i], before)
            sums[:, i] = before
        return sums


@pytest.fixture
def base():
    return Sums()._completed(
        {
            "left": torch.tensor([1, 2, 3]),
            "right": torch.tensor([4, 5, 6]),
            "fixed": torch.tensor([7, 7, 7]),
            "steps": torch.tensor([[1, 1, 1], [0, 2, 0], [3, 0, 3]]),
        }
    )


def test_what_follows_from_the_exogenous_latents(base):
    assert base.latents["total"].tolist() == [5, 7, 9]
    assert base.latents["sums"].tolist() == [[1, 2, 3], [0, 2, 2], [3, 3, 6]]
    assert base.targets.tolist() == [[8], [9], [15]]
    assert base.mask.all()
    assert base.inputs.tolist() == [[1, 4], [2, 5], [3, 6]]


def test_a_cause_changes_its_effects_in_the_examples_where_it_is_set(base):
    task = Sums()
    wanted = task.counterfactual(base, {"left": torch.tensor([1, 9, 3])})
    assert wanted.latents["total"].tolist() == [5, 14, 9]
    assert wanted.latents["parity"].tolist() == [1, 0, 1]
    assert wanted.inputs.tolist() == [[1, 4], [9, 5], [3, 6]]
    assert wanted.targets.tolist() == [[8], [16], [15]]
    assert torch.equal(wanted.latents["sums"], base.latents["sums"])
    assert task.calls == [1]  # nothing else is computed


def test_a_set_effect_no_longer_follows_and_an_equal_entry_does(base):
    latents = {"left": torch.tensor([9, 9, 3]), "total": torch.tensor([60, 7, 50])}
    wanted = Sums().counterfactual(base, latents)
    assert wanted.latents["total"].tolist() == [60, 14, 50]
    assert wanted.targets.tolist() == [[63], [16], [56]]
    assert wanted.mask.tolist() == [[False], [True], [False]]
    # What an earlier counterfactual has set stays, unless its causes change.
    again = Sums().counterfactual(wanted, {"right": torch.tensor([4, 5, 0])})
    assert again.latents["total"].tolist() == [60, 14, 3]
    assert again.mask.tolist() == [[False], [True], [True]]
    steps = wanted.latents["steps"].clone()
    steps[:, 0] = 0
    again = Sums().counterfactual(wanted, {"steps": steps})
    assert again.latents["total"].tolist() == [60, 14, 50]
    assert again.targets.tolist() == [[62], [16], [53]]


def test_entries_follow_from_set_entries_of_the_same_latent(base):
    sums = torch.tensor([[1, 9, 3], [0, 2, 2], [0, 3, 7]])
    wanted = Sums().counterfactual(base, {"sums": sums})
    assert wanted.latents["sums"].tolist() == [[1, 9, 10], [0, 2, 2], [0, 0, 7]]
    assert wanted.targets.tolist() == [[15], [9], [16]]
    assert torch.equal(wanted.inputs, base.inputs)


def test_the_graph_is_that_of_the_declaration():
    graph = Sums().causal_graph
    assert set(graph.edges) == {
        *{("left", "total"), ("right", "total"), ("total", "parity"), ("steps", "sums")},
        *{("left", "inputs"), ("right", "inputs"), ("steps", "inputs")},
        *{("total", "targets"), ("sums", "targets")},
    }
    can_be_set = {name for name, can in graph.nodes(data="can_be_set") if can}
    assert can_be_set == {"left", "right", "total", "steps", "sums"}
    exogenous = {name for name, is_so in graph.nodes(data="exogenous") if is_so}
    assert exogenous == {"left", "right", "fixed", "steps"}


@pytest.mark.parametrize(
    ("latents", "message"),
    [
        (
            {"lift": [0, 0, 0]},
            "one of left, right, .* sums, got 'lift'; nearest: 'left'",
        ),
        ({"parity": [0, 0, 0]}, "of left, .* sums, got 'parity', which follows from total"),
        ({"targets": [0, 0, 0]}, "of left, .* sums, got 'targets', which follows from total, sums"),
        ({"fixed": [0, 0, 0]}, "one of left, .* sums, got 'fixed'"),
        (
            {"left": [1.0, 2, 3]},
            r"latents\['left'\] must be a tensor of .*int64, got .*float32",
        ),
        ({"left": [1, 2]}, r"latents\['left'\] must have shape \(3,\), got \(2,\)"),
        ({"left": [1, 2, 10]}, r"integers from 0 to 9 where .* got 10 in example 2"),
    ],
)
def test_errors_say_what_can_be_set(base, latents, message):
    with pytest.raises(ValueError, match=message):
        Sums().counterfactual(
            base, {name: torch.tensor(values) for name, values in latents.items()}
        )


def test_a_batch_of_another_task_is_refused(base):
    with pytest.raises(ValueError, match="latents of FuzzyLogic, got one without combination, "):
        FuzzyLogic(FuzzyLogicConfig()).counterfactual(base, {})


def test_a_list_is_no_tensor(base):
    with pytest.raises(ValueError, match=r"latents\['left'\] must be a tensor of .*, got list"):
        Sums().counterfactual(base, {"left": [1, 2, 3]})  # pyright: ignore[reportArgumentType]


def test_values_that_are_kept_may_be_out_of_range(base):
    far = Batch(base.inputs, base.targets, base.mask, base.latents | {"left": torch.full((3,), 77)})
    wanted = Sums().counterfactual(far, {"left": torch.tensor([77, 77, 0])})
    assert wanted.latents["left"].tolist() == [77, 77, 0]


def test_numbers_that_are_none_are_refused():
    values = torch.tensor([0.5, torch.nan, torch.inf, -0.1])
    assert numbers(0, 1).permits(values, values).tolist() == [True, False, False, False]
    assert FINITE.permits(values, values).tolist() == [True, False, False, True]


def test_rows_are_found_in_the_table_that_has_them():
    tables = np.array([[3, 1], [0, 2], [-1, 5]]), np.array([[2, 0], [3, 2]])
    rows = np.array([[3, 2], [0, 2], [9, 9], [3, 1], [2, 0], [-1, 5], [-9, 0], [1, 3]])
    assert find_rows(rows, tables).tolist() == [1, 1, -1, 0, 0, 2, -1, -1]
