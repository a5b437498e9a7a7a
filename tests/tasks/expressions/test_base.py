"""Tests of all expression tasks: graphs, batches, streams."""

import hashlib
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from string import ascii_lowercase

import networkx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.common import Key
from tasks.expressions.arithmetic import Arithmetic, ArithmeticConfig, describe_arithmetic
from tasks.expressions.base import dataflow
from tasks.expressions.listops import ListOps, ListOpsConfig
from tasks.expressions.table_lookup import TableLookup, TableLookupConfig
from tasks.finite import Stream, allot, balanced_order, small
from tests.tasks.expressions.expression_reference import reduce

ROOT = Path(__file__).parents[3]
FEW = {"n_id": 40, "n_valid": 30, "n_ood": 30}
SHALLOW = {"n_train": 120, "train_depth": 2, "valid_depths": (3, 3), "ood_depths": (4, 5), **FEW}
TASKS = [
    TableLookup(TableLookupConfig(n_compositions=300, **FEW)),
    Arithmetic(ArithmeticConfig(**SHALLOW)),
    ListOps(ListOpsConfig(**SHALLOW), cache=None),
]
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)


def fingerprint(batch):
    digest = hashlib.sha256()
    for tensor in (batch.inputs, batch.targets, batch.mask, *batch.latents.values()):
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


# Text


@each_task
def test_examples_can_be_given_as_text(task):
    batch = task.batch("valid", 0, 5)
    again = task.examples_of([task.text(batch, example) for example in range(5)])
    assert torch.equal(again.targets, batch.targets)
    for name in ("length", "depth", "root"):
        assert torch.equal(again.latents[name], batch.latents[name])
    width = again.inputs.shape[1]
    assert torch.equal(again.inputs, batch.inputs[:, :width])
    assert (batch.inputs[:, width:] == -1).all()


def test_the_papers_listops_expression_by_hand():
    text = "[SM [MED [MIN 1 7 4 [MAX 2 4 0 8 9 ] ] 7 ] 5 [MED 8 5 8 ] 0 7 ]"
    task = ListOps(ListOpsConfig(**SHALLOW), cache=None)
    batch = task.examples_of([text])
    assert task.text(batch, 0) == text
    # The sum of 4 (of 1 and 7), 5, 8, 0 and 7; the minimum, 1, does not depend on the maximum.
    assert batch.targets.tolist() == [[4]]
    assert (batch.latents["nesting_depth"].tolist(), batch.latents["depth"].tolist()) == ([4], [3])


def test_texts_that_are_no_expressions_get_a_clear_error():
    lookup, arithmetic, _ = TASKS
    with pytest.raises(ValueError, match="texts must be at least one expression, got"):
        arithmetic.examples_of([])
    with pytest.raises(ValueError, match=r"texts must consist of 000 .* k, got 'z'"):
        lookup.examples_of(["101 z"])
    with pytest.raises(ValueError, match="texts must have at most 49 tokens, got 53"):
        arithmetic.examples_of(["(1+" * 13 + "1" + ")" * 13])

    with pytest.raises(ValueError, match=r"texts must be well-formed expressions, got '\(3\+'"):
        arithmetic.examples_of(["(3+4)", "(3+"])


@pytest.mark.parametrize(
    ("number", "texts"),
    [
        (0, ["a", "101 a 001", "101 001", "a 101", "a b"]),
        (1, ["", "()", "(3)", "34", "+", "3+4", "(3+", "(3+4))", "((3+4)", "(3+4*5)", "(3+4)5"]),
        (2, ["]", "1 2 ]", "1 2", "[SM 1 2", "[SM ]", "[SM 1 ]", "[MAX 1 2 3 4 5 6 ]"]),
        (2, ["[SM [MIN 1 2 ] ]", "[SM 1 2 ] ]", "[SM 1 2 ] 3"]),
    ],
)
def test_ill_formed_expressions_are_refused(number, texts):
    for text in texts:
        with pytest.raises(ValueError, match="texts must be well-formed expressions") as caught:
            TASKS[number].examples_of([TASKS[number].answers[0], text])
        assert repr(text) in str(caught.value)


def test_table_lookup_is_written_in_its_direction():
    backward = TableLookup(TableLookupConfig(direction="backward", n_compositions=300, **FEW))
    assert backward.examples_of(["b a 101"]).latents["depth"].tolist() == [2]
    with pytest.raises(ValueError, match="well-formed expressions, got '101 a b'"):
        backward.examples_of(["101 a b"])


# Graphs


def test_a_graph_by_hand():
    ids = ["0123456789+*()".index(token) for token in "(3+(4*5))"]
    batch = describe_arithmetic(np.array([ids])).take(torch.tensor([0]), "cpu")
    latents = batch.latents
    assert latents["node"][0].tolist() == [1, 0, 1, 3, 2, 3, 4, 3, 1]
    assert latents["node_token"][0, :5].tolist() == [1, 2, 4, 5, 6]
    assert latents["root"].tolist() == [2]
    graph = dataflow(latents, 0)
    assert dict(graph.nodes(data=True)) == {
        1: {"value": 3, "depth": 0},
        2: {"value": 3, "depth": 2},
        4: {"value": 4, "depth": 0},
        5: {"value": 0, "depth": 1},
        6: {"value": 5, "depth": 0},
    }
    assert set(graph.edges) == {(1, 2), (5, 2), (4, 5), (6, 5)}
    assert all(used for *_, used in graph.edges(data="used"))


@each_task
@pytest.mark.parametrize("split", TableLookup.SPLITS)
def test_graphs_are_trees_that_carry_the_answer(task, split):
    batch = task.batch(split, 0, 30)
    for i in range(30):
        graph, root = dataflow(batch.latents, i), batch.latents["root"][i].item()
        assert networkx.is_arborescence(graph.reverse())
        assert graph.out_degree(root) == 0
        assert graph.nodes[root]["value"] == batch.targets[i].item()
        for node in graph:
            above = [graph.nodes[argument]["depth"] for argument in graph.predecessors(node)]
            assert graph.nodes[node]["depth"] == (1 + max(above) if above else 0)
        used = [(a, b) for a, b, is_used in graph.edges(data="used") if is_used]
        # What is used hangs together, down to the answer.
        assert all(b == root or (b, *graph.successors(b)) in used for _, b in used)
        deep = networkx.dag_longest_path_length(graph.edge_subgraph(used)) if used else 0
        assert deep == batch.latents["depth"][i]
        for name in ("value", "depth"):
            stored = batch.latents[f"node_{name}"][i].tolist()
            tokens = batch.latents["node_token"][i].tolist()
            kept = {t: v for t, v in zip(tokens, stored, strict=True) if t >= 0}
            assert kept == dict(graph.nodes(data=name))


# Batches


@each_task
def test_batches_are_pure_functions(task):
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    fresh = (
        type(task)(task.config, cache=None)
        if isinstance(task, ListOps)
        else type(task)(task.config)
    )
    for split in task.splits:
        late = fingerprint(fresh.batch(split, 9, 16))
        assert fingerprint(fresh.batch(split, 0, 16)) == fingerprint(task.batch(split, 0, 16))
        assert fingerprint(task.batch(split, 9, 16)) == late
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()  # noqa: NPY002
    assert before[2] == random.getstate()


def test_another_process_makes_the_same_batches():
    script = (
        "from tests.tasks.expressions.test_base import TASKS, fingerprint\n"
        "for task in TASKS:\n"
        "    print(fingerprint(task.batch('train', 3, 16)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.split() == [fingerprint(task.batch("train", 3, 16)) for task in TASKS]


@each_task
def test_dtypes_shapes_and_padding(task):
    for split in task.splits:
        batch = task.batch(split, 1, 7)
        width = batch.inputs.shape[1]
        n_nodes = batch.latents["node_token"].shape[1]
        shapes = {name: tuple(value.shape[1:]) for name, value in batch.latents.items()}
        assert shapes.pop("nesting_depth", ()) == ()
        assert shapes == {
            **{"length": (), "depth": (), "root": (), "node": (width,)},
            **{"node_token": (n_nodes,), "node_symbol": (n_nodes,)},
            **{"node_value": (n_nodes,), "node_depth": (n_nodes,)},
            **{"edges": (n_nodes - 1, 2), "edge_used": (n_nodes - 1,)},
        }
        types = {name: value.dtype for name, value in batch.latents.items()}
        assert types.pop("edge_used") == torch.bool
        assert {batch.inputs.dtype, batch.targets.dtype, *types.values()} == {torch.int64}
        assert batch.targets.shape == batch.mask.shape == (7, 1)
        inside = torch.arange(width) < batch.latents["length"][:, None]
        assert torch.equal(batch.inputs >= 0, inside)
        assert torch.equal(batch.latents["node"] >= 0, inside)


@each_task
def test_train_is_a_stream_of_epochs(task):
    size = task.size("train")
    epochs = [task.batch("train", index, size) for index in (0, 1)]
    texts = [[task.text(batch, i) for i in range(size)] for batch in epochs]
    assert Counter(texts[0]) == Counter(texts[1])
    assert texts[0] != texts[1]
    # The stream is cut into batches of any size, across the ends of epochs.
    cut = [task.batch("train", index, 50) for index in range(2 * size // 50 + 1)]
    joined = [task.text(batch, i) for batch in cut for i in range(50)]
    assert joined[: 2 * size] == texts[0] + texts[1]


@each_task
@pytest.mark.parametrize("split", ["id", "valid", "ood"])
def test_evaluation_comes_in_one_order_and_starts_again(task, split):
    size = task.size(split)
    once = task.batch(split, 0, size)
    twice = task.batch(split, 0, 2 * size)
    assert torch.equal(twice.inputs, torch.cat([once.inputs, once.inputs]))
    assert torch.equal(task.batch(split, 1, 10).inputs, once.inputs[10:20])


@each_task
def test_score(task):
    batch = task.batch("id", 0, 3)
    guess = batch.targets.clone()
    guess[1] = (guess[1] + 1) % len(task.answers)
    logits = torch.nn.functional.one_hot(guess, len(task.answers)).float()
    assert task.score(logits, batch)["accuracy"].tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match=r"must have shape \(3, 1, .*\), got \(3, 19\)"):
        task.score(torch.zeros(3, 19), batch)
    assert task.chance == pytest.approx(1 / len(task.answers))


@each_task
def test_bad_arguments_of_batch(task):
    with pytest.raises(
        ValueError, match=r"split must be one of train, .*, got 'trian'; nearest: 'train'"
    ):
        task.batch("trian", 0, 1)
    with pytest.raises(ValueError, match=r"split must be one of train, id, valid, ood, got 'zzz'$"):
        task.size("zzz")
    with pytest.raises(ValueError, match=r"index must be .*, got -1"):
        task.batch("train", -1, 1)
    with pytest.raises(ValueError, match=r"size must be .*, got 0"):
        task.batch("id", 0, 0)


def test_far_into_the_stream():
    task = TASKS[0]
    batch = task.batch("train", 2**40, 2**10)
    assert fingerprint(batch) == fingerprint(task.batch("train", 2**40, 2**10))


# Streams and orders


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 13))
def test_a_stream_lets_groups_take_turns_in_epochs(sizes, batch_size):
    ends = np.cumsum(sizes)
    groups = [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    stream = Stream(groups, Key(TableLookupConfig()))
    rows = np.concatenate([stream.rows(index, batch_size) for index in range(60)])
    for number, members in enumerate(groups):
        group_rows = rows[number :: len(groups)]
        for start in range(0, len(group_rows) - len(members) + 1, len(members)):
            epoch = group_rows[start : start + len(members)]
            assert sorted(epoch) == members.tolist()
    # Going back gives the same, whatever is kept.
    assert np.array_equal(stream.rows(0, batch_size), rows[:batch_size])


def test_epochs_differ_and_are_uniform():
    stream = Stream([np.arange(4)], Key(TableLookupConfig()))
    orders = Counter(tuple(stream.rows(index, 4)) for index in range(2400))
    assert len(orders) == 24
    chi_squared = sum((n - 100) ** 2 / 100 for n in orders.values())
    assert chi_squared < 23 + 5 * 46**0.5


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(0, 99))
def test_every_prefix_is_balanced(label_list, seed):
    labels = np.array(label_list)
    order = balanced_order(labels, np.random.default_rng(seed))
    assert sorted(order) == list(range(len(labels)))
    for prefix in range(1, len(labels) + 1):
        for label in set(label_list):
            expected = prefix * label_list.count(label) / len(label_list)
            # Each label is at most half an example off, and all others round as well.
            assert abs((labels[order[:prefix]] == label).sum() - expected) <= 2


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.data())
def test_allot_is_the_most_equal_share(room, data):
    total = data.draw(st.integers(0, sum(room)))
    shares = allot(total, room)
    assert sum(shares) == total
    assert all(0 <= share <= limit for share, limit in zip(shares, room, strict=True))
    # Nobody with room left has two less than another: none could be given more at its cost.
    for i, limit in enumerate(room):
        assert shares[i] == limit or shares[i] >= max(shares) - 1


def test_small_keeps_values():
    for values in (np.array([-1, 127]), np.array([-1, 128]), np.array([], int), np.array([True])):
        assert small(values).tolist() == values.tolist()
    assert small(np.array([127])).dtype == torch.int8
    assert small(np.array([128])).dtype == torch.int16
    with pytest.raises(ValueError, match=r"values must fit into 16 bits, got .* 40000"):
        small(np.array([40_000]))


# Counterfactuals


def with_other_symbols(task, batch, seed=0):
    """Symbols in which about half of a batch's are others of the same kind, at random."""
    symbol = batch.latents["node_symbol"]
    generator = torch.Generator().manual_seed(seed)
    n_literals = len(task.answers)
    is_operator = [name not in (*task.answers, *"()]") for name in task.vocabulary]
    operators = torch.tensor(is_operator).nonzero()[:, 0]
    literals = torch.randint(n_literals, symbol.shape, generator=generator)
    chosen = torch.randint(len(operators), symbol.shape, generator=generator)
    other = torch.where(symbol < n_literals, literals, operators[chosen])
    is_kept = (symbol < 0) | (torch.rand(symbol.shape, generator=generator) < 0.5)
    return torch.where(is_kept, symbol, other)


@each_task
@pytest.mark.parametrize("split", ["train", "ood"])
def test_expressions_with_other_symbols_are_those_that_are_read_from_their_text(task, split):
    batch = task.batch(split, 0, 200)
    symbol = with_other_symbols(task, batch)
    wanted = task.counterfactual(batch, {"node_symbol": symbol})
    width = wanted.inputs.shape[1]
    assert (wanted.inputs != batch.inputs).any(1).float().mean() > 0.5
    again = task.examples_of([task.text(wanted, i) for i in range(200)])
    assert torch.equal(again.targets, wanted.targets)
    assert torch.equal(again.inputs, wanted.inputs[:, : again.inputs.shape[1]])
    for name, values in again.latents.items():
        cut = wanted.latents[name]
        if values.ndim > 1:
            cut = cut[:, : values.shape[1]]
        assert torch.equal(values, cut), name
    assert torch.equal(wanted.latents["node_symbol"], symbol)
    assert width == batch.inputs.shape[1]


@each_task
def test_values_that_are_set_change_what_is_above_them(task):
    batch = task.batch("ood", 0, 60)
    latents = batch.latents
    generator = torch.Generator().manual_seed(1)
    shape, n_values = latents["node_value"].shape, len(task.answers)
    chosen = torch.rand(shape, generator=generator) < 0.2
    values = torch.randint(n_values, shape, generator=generator)
    given = torch.where(chosen & (latents["node_token"] >= 0), values, latents["node_value"])
    wanted = task.counterfactual(batch, {"node_value": given})
    assert torch.equal(wanted.inputs, batch.inputs)
    assert torch.equal(wanted.latents["node_symbol"], latents["node_symbol"])
    is_set = given != latents["node_value"]
    for i in range(len(batch)):
        graph = dataflow(latents, i)
        number = {token: j for j, token in enumerate(latents["node_token"][i].tolist())}
        value = {}
        for token in networkx.topological_sort(graph):
            arguments = sorted(graph.predecessors(token))
            if is_set[i, number[token]] or not arguments:
                value[token] = given[i, number[token]].item()
                continue
            symbol = task.vocabulary[batch.inputs[i, token]]
            value[token] = operate(task, symbol, [value[argument] for argument in arguments])
        for token, number_of_token in number.items():
            if token >= 0:
                assert wanted.latents["node_value"][i, number_of_token] == value[token]
        assert wanted.targets[i, 0] == value[latents["root"][i].item()]
    assert (wanted.targets != batch.targets).float().mean() > 0.2


def operate(task, symbol, values):
    """The result of an operation, by the reference."""
    if isinstance(task, TableLookup):
        return task.tables[ascii_lowercase.index(symbol), values[0]]
    if isinstance(task, Arithmetic):
        return eval(f"{values[0]} {symbol} {values[1]}") % 10
    return reduce(symbol[1:], values)[0]


def test_pruning_follows_a_value_that_is_set():
    task = ListOps(ListOpsConfig(**SHALLOW), cache=None)
    batch = task.examples_of(["[MIN [MAX 1 2 ] [SM 3 [SM 1 1 ] ] ]"])
    names = dict(zip(task.words(batch, 0), range(12), strict=False))
    assert names["[MIN"] == 0
    given = batch.latents["node_value"].clone()
    # Nodes: MIN, MAX, 1, 2, SM, 3, SM, 1, 1
    assert given[0, :9].tolist() == [2, 2, 1, 2, 5, 3, 2, 1, 1]
    assert (batch.latents["depth"], batch.latents["nesting_depth"]) == (2, 3)
    given[0, 6] = 7
    wanted = task.counterfactual(batch, {"node_value": given})
    assert wanted.latents["node_value"][0, :9].tolist() == [0, 2, 1, 2, 0, 3, 7, 1, 1]
    assert wanted.targets.item() == 0
    # Edges of MAX, 1, 2, SM, 3, SM, 1, 1 to what is above them.
    used = [False, False, False, True, True, True, True, True]
    assert wanted.latents["edge_used"][0, :8].tolist() == used
    assert (wanted.latents["depth"], wanted.latents["nesting_depth"]) == (3, 3)


@each_task
def test_symbols_and_values_that_do_not_fit_are_refused(task):
    batch = task.batch("ood", 0, 20)
    symbol, value = (batch.latents[name] for name in ("node_symbol", "node_value"))
    is_literal = batch.latents["node_depth"] == 0
    for wrong in (
        torch.where(is_literal, len(task.answers), symbol),  # an operator for a literal
        torch.where(~is_literal & (symbol >= 0), 0, symbol),
        torch.where(symbol < 0, 0, symbol),  # padding
        torch.where(is_literal, symbol, len(task.vocabulary)),
    ):
        with pytest.raises(ValueError, match="must be literals for literals and operators for"):
            task.counterfactual(batch, {"node_symbol": wrong})
    for wrong in (torch.where(value < 0, 0, value), torch.full_like(value, len(task.answers))):
        with pytest.raises(
            ValueError, match=rf"integers from 0 to {len(task.answers) - 1} at nodes"
        ):
            task.counterfactual(batch, {"node_value": wrong})
