"""Every task's batches on the device, its counterfactuals and its groups."""

import pytest
import torch

import tasks
from studies.engine.setup import GroupingTask
from tasks.batch import Batch
from tests.contracts.examples import TASKS
from tests.tasks.raven import raven_reference as reference

every_task = pytest.mark.parametrize("example", TASKS)


def tensors_of(batch):
    """All tensors of a batch by name."""
    inputs = batch.inputs if isinstance(batch.inputs, tuple) else (batch.inputs,)
    named = {f"inputs[{i}]": x for i, x in enumerate(inputs)}
    return named | {"targets": batch.targets, "mask": batch.mask} | batch.latents


def assert_equal(first, second):
    names, others = tensors_of(first), tensors_of(second)
    assert names.keys() == others.keys()
    for name, x in names.items():
        assert torch.equal(x.cpu(), others[name].cpu()), name


def assert_on(device, batch):
    assert isinstance(batch, Batch)
    assert {name for name, x in tensors_of(batch).items() if x.device.type != device} == set()


@every_task
def test_batches_are_on_the_device_and_can_be_made_again(example, device, tmp_path):
    task = example(tmp_path)
    for split in task.splits:
        batch = task.batch(split, 1, 40, device)
        assert_on(device, batch)
        assert_equal(task.batch(split, 1, 40, device), batch)
        here = task.batch(split, 1, 40)
        for name, x in tensors_of(here).items():
            other = tensors_of(batch)[name]
            assert (other.dtype, other.shape) == (x.dtype, x.shape), name
        # Raven's batches are drawn on a CUDA device, from another stream, as it documents.
        if not (device == "cuda" and isinstance(task, tasks.Raven)):
            assert_equal(batch, here)


@every_task
def test_what_a_task_computes_of_a_batch_is_on_the_device(example, device, tmp_path):
    task = example(tmp_path)
    split = task.splits[-1]
    base, other = (task.batch(split, index, 40, device) for index in (0, 1))
    assert_on(device, Batch.cat([base, other]).take(range(50)))
    if isinstance(task, GroupingTask):
        for name, members in task.groups(base).items():
            assert members.device.type == device, name
            assert torch.equal(members.cpu(), task.groups(base.to("cpu"))[name]), name
    if isinstance(task, tasks.CausalTask):
        assert_equal(task.counterfactual(base, {}), base)
        graph = task.causal_graph
        free = [
            name
            for name, has in graph.nodes(data="exogenous")
            if has and graph.nodes[name]["can_be_set"] and not graph.in_degree(name)
        ]
        for name in free:
            wanted = task.counterfactual(base, {name: base.latents[name].clone()})
            assert_on(device, wanted)
            assert_equal(wanted, base)


def test_ravens_drawn_on_the_device_obey_their_rules_and_are_distributed_as_on_the_cpu(device):
    task = tasks.Raven(tasks.RavenConfig(n_features=2, seed=4))
    n, grids = 20_000, 50
    for split in ("train", "ood"):
        there, here = task.batch(split, 0, n, device), task.batch(split, 1, n)
        allowed = task.combinations(split)
        drawn = there.latents["rule"].sort(1).values.cpu().unique(dim=0)
        assert torch.equal(drawn, allowed)
        for name in ("combination", "permutation", "response_rule"):
            shares = [
                torch.bincount(batch.latents[name].flatten().cpu(), minlength=64) / n
                for batch in (there, here)
            ]
            # Five standard errors of the difference of two shares.
            assert (shares[0] - shares[1]).abs().max() < 5 * (3 / n) ** 0.5, name
        first = there[:grids].to("cpu").latents
        for grid, rules in zip(first["values"].tolist(), first["rule"].tolist(), strict=True):
            for feature, rule in enumerate(rules):
                assert reference.obeys(rule, [[panel[feature] for panel in row] for row in grid], 8)
    again = tasks.Raven(task.config)
    assert_equal(again.batch("train", 0, 100, device), task.batch("train", 0, 100, device))
    other = task.batch("train", 1, 100, device).latents["values"]
    assert not torch.equal(other, task.batch("train", 0, 100, device).latents["values"])


def test_ravens_are_scored_and_changed_on_the_device(device):
    task = tasks.Raven(tasks.RavenConfig(n_features=2))
    base, source = (task.batch("id", index, 30, device) for index in (0, 1))
    logits = torch.nn.functional.one_hot(base.targets, 8).float()
    assert task.score(logits, base)["accuracy"].device.type == device
    assert task.score(logits, base)["accuracy"].mean() == 1
    latents = {name: source.latents[name] for name in ("rule", "values", "permutation")}
    wanted = task.counterfactual(base, latents)
    assert_on(device, wanted)
    assert_equal(wanted, source)
