"""Contracts of every task that `tasks` exports."""

import networkx
import pytest
import torch

from tasks import Batch
from tests.contracts.examples import CAUSAL_TASKS, TASKS


def inputs_of(batch):
    """The inputs of a batch as a tuple."""
    return batch.inputs if isinstance(batch.inputs, tuple) else (batch.inputs,)


@pytest.mark.parametrize("example", TASKS)
def test_batches_are_pure_functions_and_name_their_latents(example, tmp_path):
    task = example(tmp_path)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for split in task.splits:
        first, second = task.batch(split, 3, 5), task.batch(split, 3, 5)
        other = task.batch(split, 4, 5)
        assert all(map(torch.equal, inputs_of(first), inputs_of(second)))
        assert torch.equal(first.targets, second.targets)
        assert not all(map(torch.equal, inputs_of(first), inputs_of(other)))
        assert len(first) == 5
        assert first.mask.dtype == torch.bool
        assert first.latents
        for name, latent in first.latents.items():
            assert latent.shape[0] == 5, name
            assert torch.equal(latent, second.latents[name])
        assert [len(part) for part in first.parts(2)] == [2, 2, 1]
        inputs_of_parts = zip(*map(inputs_of, first.parts(2)), strict=True)
        assert all(map(torch.equal, map(torch.cat, inputs_of_parts), inputs_of(first)))
        sliced = first[1:3]
        for sliced_input, full_input in zip(inputs_of(sliced), inputs_of(first), strict=True):
            assert torch.equal(sliced_input, full_input[1:3])
        assert all(
            torch.equal(sliced.latents[name], first.latents[name][1:3]) for name in sliced.latents
        )
    assert torch.equal(torch.get_rng_state(), before)


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
def test_causal_graphs_are_acyclic_and_what_can_be_set_has_effects(example, tmp_path):
    task, base, source = causal_examples(example, tmp_path)
    graph = task.causal_graph
    assert networkx.is_directed_acyclic_graph(graph)
    assert set(graph) == base.latents.keys() | {"inputs", "targets"}
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
def test_exogenous_latents_of_another_example_give_this_example(example, tmp_path):
    task, base, source = causal_examples(example, tmp_path)
    kept = Batch.cat([base]), Batch.cat([source])
    graph = task.causal_graph
    exogenous = nodes_with(graph, "exogenous")
    names = exogenous & nodes_with(graph, "can_be_set")
    wanted = task.counterfactual(base, {name: source.latents[name] for name in names})
    # What cannot be set and has no effects describes the base, such as the number of its image.
    labels = {name for name in exogenous - names if not graph.out_degree(name)}
    assert changes(wanted, source) <= labels
    assert not changes(base, kept[0])
    assert not changes(source, kept[1])


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
