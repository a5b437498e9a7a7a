"""Batches: indexing, concatenation and representation."""

import numpy as np
import pytest
import torch

from tasks import Batch


def batch_of(n, *, several=False, start=0):
    numbers = torch.arange(start, start + n)
    inputs = numbers[:, None].repeat(1, 3)
    return Batch(
        inputs=(inputs, -inputs) if several else inputs,
        targets=numbers[:, None],
        mask=torch.ones(n, 1, dtype=torch.bool),
        latents={"number": numbers},
    )


@pytest.mark.parametrize("several", [False, True])
def test_examples_are_taken_by_their_numbers_in_order(several):
    taken = batch_of(5, several=several).take([4, 0, 0])
    assert len(taken) == 3
    assert taken.targets[:, 0].tolist() == taken.latents["number"].tolist() == [4, 0, 0]
    first = taken.inputs[0] if several else taken.inputs
    assert first[:, 0].tolist() == [4, 0, 0]
    if several:
        assert taken.inputs[1][:, 0].tolist() == [-4, 0, 0]
    assert batch_of(5).take(torch.tensor([2])).targets.item() == 2
    with pytest.raises(IndexError):
        batch_of(5).take([5])


@pytest.mark.parametrize("several", [False, True])
def test_parts_put_together_are_the_whole(several):
    whole = batch_of(7, several=several)
    again = Batch.cat(list(whole.parts(3)))
    assert torch.equal(again.targets, whole.targets)
    assert torch.equal(again.latents["number"], whole.latents["number"])
    if several:
        assert all(torch.equal(*pair) for pair in zip(again.inputs, whole.inputs, strict=True))
    else:
        assert torch.equal(again.inputs, whole.inputs)
    with pytest.raises(ValueError, match="batches must not be empty"):
        Batch.cat([])


def test_a_batch_is_shown_by_its_shapes():
    assert repr(batch_of(2)) == (
        "Batch(inputs [2, 3] int64, targets [2, 1] int64, mask [2, 1] bool, "
        "latents: number [2] int64)"
    )
    shown = repr(batch_of(2, several=True)[:0])
    assert "inputs [0, 3] int64 and [0, 3] int64" in shown


@pytest.mark.parametrize("number", [1, np.int64(1), torch.tensor(1)])
def test_a_single_number_is_no_batch(number):
    with pytest.raises(TypeError, match=r"got 1: write batch\[1 : 2\] for a batch"):
        batch_of(3)[number]


@pytest.mark.parametrize("mask", [torch.tensor([False, True]), [False, True]])
def test_a_mask_is_not_taken_for_indices(mask):
    with pytest.raises(TypeError, match=r"indices, got a mask: write batch\[mask\]"):
        batch_of(2).take(mask)
    assert batch_of(2)[torch.as_tensor(mask)].targets.tolist() == [[1]]
    assert len(batch_of(2).take([])) == 0


@pytest.mark.parametrize("size", [0, -1])
def test_parts_have_at_least_one_example(size):
    with pytest.raises(ValueError, match=f"size must be at least 1, got {size}"):
        list(batch_of(3).parts(size))
