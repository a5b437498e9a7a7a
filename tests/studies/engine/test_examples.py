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
    return [int(one) for batch in batches for one in batch.latents["number"]]


def examples(setup):
    return Examples(setup, "cpu")


def test_no_two_uses_of_a_stream_share_a_batch():
    drawn = examples(STREAM)
    uses = [
        numbers(drawn.validation("id")),
        numbers(drawn.fresh("decoding").batches("id", 50)),
        numbers(drawn.fresh("scores").batches("id", 50)),
    ]
    fresh = drawn.fresh("projection")
    uses += [numbers(fresh.batches("id", 50)) for _ in range(3)]
    for one, other in itertools.combinations(uses, 2):
        assert not set(one) & set(other)


def test_the_same_use_gets_the_same_examples():
    first, again = (list(examples(STREAM).fresh("decoding").batches("ood", 100)) for _ in range(2))
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(first, again, strict=True))


def test_what_chooses_is_given_to_no_measure_of_a_split_with_an_end():
    drawn = examples(FINITE)
    chosen = numbers(drawn.validation("id"))
    assert chosen == list(range(100))
    fresh = drawn.fresh("decoding")
    fit, test, rest = (numbers(fresh.batches("id", n)) for n in (70, 100, None))
    assert (fit, test) == (list(range(100, 170)), list(range(170, 270)))
    assert rest == list(range(270, 300))
    with pytest.raises(RunError, match=r"split 'id' has 300 examples, of which the choice"):
        fresh.batches("id", 1)


def test_a_split_that_chooses_nothing_is_whole():
    fresh = examples(FINITE).fresh("decoding")
    assert numbers(fresh.batches("ood", 1000)) == list(range(300))
    with pytest.raises(RunError, match="decoding have used all"):
        fresh.batches("ood", 1)


def test_batches_are_at_most_as_large_as_the_setup_runs_at_once():
    fresh = examples(FINITE).fresh("decoding")
    sizes = [len(batch) for batch in fresh.batches("id", 150)]
    assert sum(sizes) == 150
    assert max(sizes) <= FINITE.at_once
    assert [len(b) for b in examples(STREAM).fresh("x").batches("id", 130)] == [64, 64, 2]


@pytest.mark.parametrize("split", ["train", "valid"])
def test_measures_have_no_other_splits(split):
    with pytest.raises(ValueError, match=f"measures draw from id, ood, got split '{split}'"):
        examples(STREAM).fresh("decoding").batches(split, 10)


def test_all_of_a_stream_cannot_be_had():
    with pytest.raises(ValueError, match="n must be given: split 'id' has no end"):
        examples(STREAM).fresh("decoding").batches("id")


def test_seeds_see_other_training_examples_and_seed_0_the_first_ones():
    task = STREAM.sampler()
    batches = {}
    for seed in (0, 1):
        setup = TOY.plan("laptop", [f"seed={seed}"]).cells[0]
        batches[seed] = examples(setup).train(3, 16).inputs
    assert torch.equal(batches[0], task.batch("train", 3, 16).inputs)
    assert not torch.equal(batches[0], batches[1])


def test_uses_have_room():
    firsts = [first_batch(name) for name in ("scores", "costs", "decoding", "a", "b")]
    gaps = [abs(a - b) for a, b in itertools.combinations(firsts, 2)]
    assert min(gaps) >= 2**20
    assert min(firsts) >= 2**20
    assert max(firsts) < 2**40


def test_finite_examples_are_what_the_task_gives():
    fresh = examples(FINITE).fresh("decoding")
    whole = FINITE.sampler().batch("id", 0, 300)
    assert FINITE.task == LargestConfig(size=300)
    batches = list(fresh.batches("id", 130))
    assert torch.equal(torch.cat([b.inputs for b in batches]), whole.inputs[100:230])


@dataclass(frozen=True, kw_only=True)
class Standard(Setup):
    task: tasks.MLUConfig | tasks.ScanConfig

    def build(self, generator):
        return torch.nn.Identity()


class Scanning(Standard):
    kind = partial(tasks.Scan, trimmed=True)


class Calculating(Standard):
    kind = tasks.MLU


def test_examples_are_drawn_from_the_task_of_a_setups_kind():
    settings = {"model": "none", "training": STREAM.training}
    finite = Scanning(task=tasks.ScanConfig(split="simple"), **settings)
    assert finite.sampler() is replace(finite, seed=1).sampler()
    assert isinstance(finite.sampler(), tasks.Scan)
    assert finite.size("id") == 4182
    endless = Calculating(task=tasks.MLUConfig(), **settings)
    assert isinstance(endless.sampler(), tasks.MLU)
    assert endless.size("id") is None
    with pytest.raises(TypeError, match=r"Standard must have a `kind`, or a sampler of its own"):
        Standard(task=tasks.MLUConfig(), **settings).sampler()
