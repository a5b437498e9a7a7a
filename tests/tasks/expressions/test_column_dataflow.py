"""Dataflow over the columns of a model, and batches with all depths."""

from collections import Counter

import numpy as np
import pytest
import torch

from tasks import Batch, TableLookup, TableLookupConfig, column_dataflow, spread_over_depths
from tasks.expressions.arithmetic import describe_arithmetic
from tasks.expressions.listops import describe_listops
from tasks.expressions.table_lookup import look_up


def lookup_example(direction):
    """Return the examples `101 c a`, possibly mirrored, and `010 b`."""
    tables = np.stack([np.random.default_rng(i).permutation(8) for i in range(3)])
    written = [[5, 10, 8, -1], [2, 9, -1, -1]]
    if direction == "backward":
        written = [[8, 10, 5, -1], [9, 2, -1, -1]]
    return look_up(np.array(written), tables, direction)


def arithmetic_example():
    """Return the examples `(3+(4*5))` and `7`."""
    plus, times, opening, closing = range(10, 14)
    return describe_arithmetic(
        np.array([[opening, 3, plus, opening, 4, times, 5, closing, closing], [7] + [-1] * 8])
    )


def listops_example():
    """Return `[MIN 7 [SM 1 2 ] 3 ]`, whose minimum is its first 3, and `[MAX 4 1 ]`."""
    total, minimum, maximum, _, closing = range(10, 15)
    return describe_listops(
        np.array(
            [
                [minimum, 7, total, 1, 2, closing, 3, closing],
                [maximum, 4, 1, closing, -1, -1, -1, -1],
            ]
        )
    )


TRUTHS = {
    "forward": (
        lookup_example("forward"),
        "last",
        {(1, 2), (2, 3), (3, 4)},
        [-1, 0, 1, 2, 3, -1],
        [[1], [2], [3], [4]],
    ),
    "backward": (
        lookup_example("backward"),
        "last",
        {(3, 2), (2, 1), (1, 4)},
        [-1, 2, 1, 0, 3, -1],
        [[1], [2], [3], [4]],
    ),
    "backward, read at the first mark": (
        lookup_example("backward"),
        "first",
        {(3, 2), (2, 1), (1, 0)},
        [3, 2, 1, 0, -1, -1],
        [[0], [1], [2], [3]],
    ),
    "arithmetic": (
        arithmetic_example(),
        "last",
        {(2, 3), (5, 6), (7, 6), (6, 3), (3, 10)},
        [-1, -1, 0, 2, -1, 0, 1, 0, -1, -1, 3],
        [[1, 3, 9], [2], [4, 6, 8], [5], [7], [10]],
    ),
    "listops": (
        listops_example(),
        "last",
        {(2, 1), (4, 3), (5, 3), (3, 1), (7, 1), (1, 9)},
        [-1, 2, 0, 1, 0, 0, -1, 0, -1, 3],
        [[1, 8], [2], [3, 6], [4], [5], [7], [9]],
    ),
}
"""Examples and readout column; edges, levels and groups of columns of the first example, with the
begin token in column 0."""


def truth_of(name):
    examples, readout, *_ = TRUTHS[name]
    return column_dataflow(examples.take(torch.arange(2), "cpu"), readout=readout)


@pytest.mark.parametrize("name", TRUTHS)
def test_the_true_dataflow_is_that_of_expressions_worked_out_by_hand(name):
    truth = truth_of(name)
    _, _, expected, level, groups = TRUTHS[name]
    edges = truth["edges"].to_numpy()
    assert {tuple(edge) for edge in edges[0].tolist() if edge != [-1, -1]} == expected
    assert truth["level"][0].to_numpy().tolist() == level
    # The readout edge comes last, from the root.
    (last,) = (edge for edge in expected if edge[1] == level.index(max(level)))
    assert (int(truth["root"][0]), int(truth["readout"][0])) == last
    actual = {}
    for column, group in enumerate(truth["group"][0].to_numpy().tolist()):
        actual.setdefault(group, []).append(column)
    actual.pop(-1)
    assert sorted(actual.values()) == groups
    # Padding of an edge stays padding, and is not used; the edge to what is read out is.
    padding = (edges == -1).any(-1)
    assert padding[1].any()
    assert (edges[padding] == -1).all()
    assert not truth["used"].to_numpy()[padding].any()
    assert bool(truth["used"][:, -1].all())


def test_what_a_minimum_ignores_is_not_used():
    truth = truth_of("listops")
    edges, used = truth["edges"].to_numpy()[0], truth["used"].to_numpy()[0]
    unused = {tuple(edge) for edge in edges[~used].tolist() if edge != [-1, -1]}
    assert unused == {(2, 1), (7, 1)}


@pytest.mark.parametrize(
    ("name", "spans", "values"),
    [
        ("backward", [-1, 3, 2, 1, -1, -1], None),
        (
            "arithmetic",
            [-1, -1, 1, 9, -1, 1, 5, 1, -1, -1, -1],
            [-1, -1, 3, 3, -1, 4, 0, 5, -1, -1, 3],
        ),
        # The marks hold no value but for the one that is read out: the minimum of 7, 3 and 3.
        (
            "listops",
            [-1, 8, 1, 4, 1, 1, -1, 1, -1, -1],
            [-1, 3, 7, 3, 1, 2, -1, 3, -1, 3],
        ),
    ],
)
def test_columns_have_the_values_and_lengths_of_their_expressions(name, spans, values):
    truth = truth_of(name)
    assert truth["span"][0].to_numpy().tolist() == spans
    if values is not None:
        assert truth["value"][0].to_numpy().tolist() == values
    assert int(truth["value"][0, truth["readout"][0]]) == int(truth["target"][0])


def test_columns_are_valid_from_mark_to_mark():
    truth = truth_of("backward, read at the first mark")
    assert truth["valid"].to_numpy().tolist() == [[True] * 5 + [False], [True] * 4 + [False] * 2]
    assert truth["depth"].to_numpy().tolist() == [2, 1]
    # The answers, worked out by the tables themselves: token 5 is the value 101, 8 the table a.
    a, _, c = (np.random.default_rng(i).permutation(8) for i in range(3))
    assert int(truth["target"][0]) == a[c[5]]


def test_a_readout_is_the_first_or_the_last_mark():
    with pytest.raises(ValueError, match="readout must be 'first' or 'last', got 'middle'"):
        column_dataflow(lookup_example("forward").take(torch.arange(2), "cpu"), readout="middle")


def test_examples_of_splits_of_other_widths_are_as_many_of_each_depth():
    config = TableLookupConfig(
        n_compositions=400,
        train_depth=3,
        valid_depths=(4, 4),
        ood_depths=(5, 6),
        n_id=40,
        n_valid=30,
        n_ood=60,
    )
    task = TableLookup(config)
    parts = [task.batch(split, 0, 30) for split in ("id", "valid", "ood")]
    assert len({part.inputs.shape[1] for part in parts}) > 1
    batch = spread_over_depths(parts, 25)
    counts = Counter(batch.latents["depth"].tolist())
    available = Counter(torch.cat([part.latents["depth"] for part in parts]).tolist())
    assert counts == {depth: min(5, n) for depth, n in available.items()}
    # They are the examples of the splits, beside their own latents.
    again = look_up(batch.inputs.numpy(), task.tables, "forward")
    assert torch.equal(again.targets.long(), batch.targets[:, 0])
    for name in ("depth", "length", "edges", "edge_used", "root"):
        assert torch.equal(again.latents[name].to(batch.latents[name]), batch.latents[name])
    # Of a depth there is at least one, though fewer are asked for than depths.
    assert set(spread_over_depths(parts, 1).latents["depth"].tolist()) == set(available)
    with pytest.raises(ValueError, match="batches must not be empty"):
        spread_over_depths([], 4)


def test_a_batch_gives_some_of_its_examples_by_number_or_by_mask():
    batch = TableLookup(TableLookupConfig(n_compositions=400)).batch("id", 0, 6)
    chosen = torch.tensor([4, 1])
    few = batch[chosen]
    assert isinstance(few, Batch)
    assert torch.equal(few.inputs, batch.inputs[chosen])
    assert torch.equal(few.latents["depth"], batch.latents["depth"][chosen])
    assert len(batch[batch.latents["depth"] > 100]) == 0
