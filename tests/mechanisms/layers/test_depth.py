import pytest
import torch
from torch import nn
from transformer_lens.hook_points import HookPoint

from mechanisms.layers.depth import add_steps, stack_blocks


class Doubling(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.hook_out = HookPoint()


def test_separate_blocks_have_their_own_weights_and_hook_points():
    core, blocks = stack_blocks(Doubling, 3, shared=False)
    assert core is None
    assert len({id(block.weight) for block in blocks}) == 3
    assert all(isinstance(block.hook_out, HookPoint) for block in blocks)


def test_shared_weights_live_once_and_hook_points_in_each_step():
    core, blocks = stack_blocks(Doubling, 3, shared=True)
    assert [name for name, _ in core.named_parameters()] == ["weight"]
    assert not any(isinstance(module, HookPoint) for module in core.modules())
    assert not list(blocks.parameters())
    assert len({id(block.hook_out) for block in blocks}) == 3


def test_only_missing_steps_are_added():
    _, blocks = stack_blocks(Doubling, 2, shared=True)
    assert not add_steps(blocks, 1, n_layers=2, shared=True)
    assert add_steps(blocks, 5, n_layers=2, shared=True)
    assert not add_steps(blocks, 5, n_layers=2, shared=True)
    assert len(blocks) == 5
    assert isinstance(blocks[4].hook_out, HookPoint)


def test_invalid_numbers_of_steps_are_refused():
    _, blocks = stack_blocks(Doubling, 2, shared=False)
    assert not add_steps(blocks, 2, n_layers=2, shared=False)
    with pytest.raises(ValueError, match="n_steps must be 2 with shared=False, got 3"):
        add_steps(blocks, 3, n_layers=2, shared=False)
    with pytest.raises(ValueError, match="n_steps must be at least 1 with shared=True, got 0"):
        add_steps(blocks, 0, n_layers=2, shared=True)
