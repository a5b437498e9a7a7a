"""Contracts of every task that `tasks` exports."""

import inspect
import os
import subprocess
import sys
from functools import partial

import networkx
import pytest
import torch

import tasks
from tasks import checking
from tests.contracts.examples import CAUSAL_TASKS, TASKS


def inputs_of(batch):
    """The inputs of a batch as a tuple."""
    return batch.inputs if isinstance(batch.inputs, tuple) else (batch.inputs,)


SERVER = """
import os, sys
from tasks import checking
for folder in sys.stdin:
    if not os.fork():
        checking.answer(folder.strip())
        os._exit(0)
    print(os.wait()[1], flush=True)
"""


@pytest.fixture(scope="module")
def server():
    """A process that has imported torch, which takes a second, and is forked for each task."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=os.environ | {"PYTHONHASHSEED": "5"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process


@pytest.mark.parametrize("example", TASKS)
def test_every_task_keeps_the_rules_of_a_task(example, tmp_path, server, monkeypatch):
    def answer_elsewhere(folder):
        print(folder, file=server.stdin, flush=True)
        status = server.stdout.readline().strip()
        return None if status == "0" else f"status {status}"

    monkeypatch.setattr(checking, "answer_elsewhere", answer_elsewhere)
    task = example(tmp_path)
    has_files = any(tmp_path.iterdir())
    tasks.check(task, build=None if has_files else partial(example, tmp_path))


@pytest.mark.parametrize("example", TASKS)
def test_whatever_is_asked_of_an_unknown_split_is_an_error(example, tmp_path):
    task = example(tmp_path)
    for asked in (task, getattr(task, "config", None)):
        for name, method in inspect.getmembers(asked, inspect.ismethod):
            if not name.startswith("_") and [*inspect.signature(method).parameters] == ["split"]:
                with pytest.raises(ValueError, match=r"split must be one of .*, got 'tests'"):
                    method("tests")


def variables_of(batch):
    """Everything in a batch by name, as tuples of tensors."""
    answers = {"inputs": inputs_of(batch), "targets": (batch.targets,), "mask": (batch.mask,)}
    return answers | {name: (values,) for name, values in batch.latents.items()}


def changes(batch, other):
    """The names of what differs between two batches."""
    variables, others = variables_of(batch), variables_of(other)
    assert variables.keys() == others.keys()
    return {
        name
        for name, values in variables.items()
        if not all(map(torch.equal, values, others[name]))
    }


def nodes_with(graph, attribute):
    return {name for name, has in graph.nodes(data=attribute) if has}


def causal_examples(example, folder):
    """A causal task, and two batches that agree in latents which have effects but cannot be set."""
    task = example(folder)
    graph = task.causal_graph
    base, source = (task.batch("train", index, 100) for index in (0, 1))
    fixed = nodes_with(graph, "exogenous") - nodes_with(graph, "can_be_set")
    alike = [
        (base.latents[name][:, None] == source.latents[name])[..., None].flatten(2).all(2)
        for name in fixed
        if graph.out_degree(name)
    ]
    if alike:
        differs = base.inputs[:, None] != source.inputs
        pairs = (torch.stack(alike).all(0) & differs.any(2)).nonzero()
        assert len(pairs) > 20
        base, source = base.take(pairs[:, 0]), source.take(pairs[:, 1])
    return task, base, source


@pytest.mark.parametrize("example", CAUSAL_TASKS)
def test_what_can_be_set_has_effects(example, tmp_path):
    task, base, source = causal_examples(example, tmp_path)
    graph = task.causal_graph
    settable = nodes_with(graph, "can_be_set")
    assert settable
    assert settable <= base.latents.keys()
    assert {name for name in graph if not graph.in_degree(name)} <= nodes_with(graph, "exogenous")
    for name in settable:
        effects = networkx.descendants(graph, name)
        assert effects & {"inputs", "targets"}
        wanted = task.counterfactual(base, {name: source.latents[name]})
        assert changes(wanted, base) <= effects | {name, "mask"}
        is_same = torch.equal(source.latents[name], base.latents[name])
        assert is_same or changes(wanted, base) & {"inputs", "targets"}
        assert torch.equal(wanted.latents[name], source.latents[name]) or graph.in_degree(name)


@pytest.mark.parametrize("example", CAUSAL_TASKS)
def test_setting_nothing_changes_nothing(example, tmp_path):
    task, base, _ = causal_examples(example, tmp_path)
    settable = nodes_with(task.causal_graph, "can_be_set")
    for latents in ({}, {name: base.latents[name].clone() for name in settable}):
        assert not changes(task.counterfactual(base, latents), base)


@pytest.mark.parametrize("example", CAUSAL_TASKS)
def test_what_cannot_be_set_is_refused_with_what_can(example, tmp_path):
    task, base, _ = causal_examples(example, tmp_path)
    graph = task.causal_graph
    settable = [name for name in graph if graph.nodes[name]["can_be_set"]]
    refused = [name for name in graph if name not in settable and name in base.latents]
    for name in ("nothing", "inputs", *refused):
        with pytest.raises(ValueError, match=f"{', '.join(settable)}, got '{name}'"):
            task.counterfactual(base, {name: base.targets})
    for name in settable:
        values, argument = base.latents[name], rf"latents\['{name}'\] must"
        with pytest.raises(ValueError, match=f"{argument} have shape"):
            task.counterfactual(base, {name: values[:-1]})
        with pytest.raises(ValueError, match=f"{argument} be a tensor of {values.dtype}, got"):
            task.counterfactual(base, {name: values.to(torch.float16)})
        if values.dtype == torch.bool:
            continue
        far = values - (float("nan") if values.is_floating_point() else 10_000_000)
        with pytest.raises(ValueError, match=rf"{argument} be .* got (-|nan).* in example 0"):
            task.counterfactual(base, {name: far})
