"""Contracts of every task that `tasks` exports."""

import pytest
import torch

from tests.contracts.examples import TASKS


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
