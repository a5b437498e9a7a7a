import itertools
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

import tasks
from studies.engine import RunError, Setup
from studies.engine.examples import Examples, first_batch
from tests.studies.engine.toy import TOY, LargestConfig

STREAM = TOY.plan().setup
FINITE = TOY.plan("laptop", ["task.size=300", "n_validation=100"]).setup


def numbers(batches):
    return [int(number) for batch in batches for number in batch.latents["number"]]


def examples(setup):
    return Examples(setup, "cpu")


def test_validation_and_measures_never_share_a_batch_of_an_endless_split():
    allocated = examples(STREAM)
    draws = [
        numbers(allocated.validation("id")),
        numbers(allocated.fresh("decoding").batches("id", 50)),
        numbers(allocated.fresh("scores").batches("id", 50)),
    ]
    fresh = allocated.fresh("projection")
    draws += [numbers(fresh.batches("id", 50)) for _ in range(3)]
    for first, second in itertools.combinations(draws, 2):
        assert not set(first) & set(second)


def test_a_measure_always_gets_the_same_examples():
    first, again = (list(examples(STREAM).fresh("decoding").batches("ood", 100)) for _ in range(2))
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(first, again, strict=True))


def test_measures_never_get_the_validation_examples_of_the_selecting_split():
    allocated = examples(FINITE)
    validation = numbers(allocated.validation("id"))
    assert validation == list(range(100))
    fresh = allocated.fresh("decoding")
    fit, test, remaining = (numbers(fresh.batches("id", n)) for n in (70, 100, None))
    assert (fit, test) == (list(range(100, 170)), list(range(170, 270)))
    assert remaining == list(range(270, 300))
    message = "split 'id' has 300 examples, all used by checkpoint selection and decoding"
    with pytest.raises(RunError, match=message):
        fresh.batches("id", 1)


def test_measures_get_all_examples_of_a_split_that_does_not_select():
    fresh = examples(FINITE).fresh("decoding")
    assert numbers(fresh.batches("ood", 1000)) == list(range(300))
    with pytest.raises(RunError, match="all used by decoding"):
        fresh.batches("ood", 1)


def test_batches_have_at_most_as_many_examples_as_the_setup_runs_at_once():
    fresh = examples(FINITE).fresh("decoding")
    sizes = [len(batch) for batch in fresh.batches("id", 150)]
    assert sum(sizes) == 150
    assert max(sizes) <= FINITE.evaluation_batch_size
    assert [len(b) for b in examples(STREAM).fresh("x").batches("id", 130)] == [64, 64, 2]


@pytest.mark.parametrize("split", ["train", "valid"])
def test_measures_cannot_draw_from_other_splits(split):
    message = f"split must be one of id, ood in a measure, got '{split}'"
    with pytest.raises(ValueError, match=message):
        examples(STREAM).fresh("decoding").batches(split, 10)


def test_an_endless_split_cannot_be_drawn_completely():
    with pytest.raises(ValueError, match="n must be a number for the endless split 'id', got None"):
        examples(STREAM).fresh("decoding").batches("id")


def test_seeds_have_different_training_examples_and_seed_0_the_first_batches():
    task = STREAM.sampler()
    batches = {}
    for seed in (0, 1):
        setup = TOY.plan("laptop", [f"seed={seed}"]).cells[0]
        batches[seed] = examples(setup).train(3, 16).inputs
    assert torch.equal(batches[0], task.batch("train", 3, 16).inputs)
    assert not torch.equal(batches[0], batches[1])


def test_the_ranges_of_batches_of_measures_are_disjoint():
    starts = [first_batch(name) for name in ("scores", "costs", "decoding", "a", "b")]
    gaps = [abs(a - b) for a, b in itertools.combinations(starts, 2)]
    assert min(gaps) >= 2**20
    assert min(starts) >= 2**20
    assert max(starts) < 2**40


def test_examples_of_a_finite_split_are_those_of_the_task():
    fresh = examples(FINITE).fresh("decoding")
    all_examples = FINITE.sampler().batch("id", 0, 300)
    assert FINITE.task == LargestConfig(size=300)
    batches = list(fresh.batches("id", 130))
    assert torch.equal(torch.cat([b.inputs for b in batches]), all_examples.inputs[100:230])


@dataclass(frozen=True, kw_only=True)
class WithoutKind(Setup):
    task: tasks.MLUConfig | tasks.ScanConfig

    def build(self, generator):
        return torch.nn.Identity()


class ScanSetup(WithoutKind):
    task_type = partial(tasks.Scan, trimmed=True)


class MLUSetup(WithoutKind):
    task_type = tasks.MLU


def test_the_sampler_is_an_instance_of_the_setups_kind():
    settings = {"model": "none", "training": STREAM.training}
    finite = ScanSetup(task=tasks.ScanConfig(split="simple"), **settings)
    assert finite.sampler() is replace(finite, seed=1).sampler()
    assert isinstance(finite.sampler(), tasks.Scan)
    assert finite.size("id") == 4182
    endless = MLUSetup(task=tasks.MLUConfig(), **settings)
    assert isinstance(endless.sampler(), tasks.MLU)
    assert endless.size("id") is None
    with pytest.raises(TypeError, match="must define `task_type` or override `sampler`"):
        WithoutKind(task=tasks.MLUConfig(), **settings).sampler()
