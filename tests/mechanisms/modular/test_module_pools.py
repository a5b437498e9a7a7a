import math

import pytest
import torch
from torch.nn.functional import relu

from mechanisms import MlpPoolConfig, OperationPoolConfig
from mechanisms.modular.module_pools import OPERATIONS


def one_by_one(pool, operands):
    """The results of the modules, computed one by one: [..., module]."""
    results = []
    for module in range(len(pool.b_out)):
        x = operands[..., min(module, operands.shape[-2] - 1), :]
        x = relu(x @ pool.W_in[module] + pool.b_in[module])
        for weight, bias in zip(pool.W_hidden, pool.b_hidden, strict=True):
            x = relu(x @ weight[module] + bias[module])
        results.append(x @ pool.W_out[module] + pool.b_out[module])
    return torch.stack(results, dim=-1)


@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("shape", [(6, 1, 2), (6, 4, 2), (6, 5, 1, 2), (6, 5, 4, 2)])
def test_stacked_modules_are_separate_networks(depth, shape):
    generator = torch.Generator().manual_seed(0)
    pool = MlpPoolConfig(d_mlp=9, depth=depth).build(4, 2, generator=generator)
    with torch.no_grad():
        pool.b_out += torch.randn(4, generator=generator)
    operands = torch.randn(shape, generator=generator)
    expected = one_by_one(pool, operands)
    assert torch.allclose(pool(operands), expected, atol=1e-5)
    if len(shape) == 3:
        index = torch.tensor([0, 3, 3, 1, 2, 0])
        results = pool.selected(operands, index)
        assert torch.allclose(results, expected[torch.arange(6), index], atol=1e-5)


def test_operations_are_those_of_the_paper():
    x, y = 0.3, -0.7
    expected = [
        x + y,
        x - y,
        x * y,
        x * x,
        y * y,
        (x + y) * x,
        min(x, y),
        max(x, y),
        y,
        x + 2 * y,
        math.sin(x),
        math.sin(y),
        math.cos(x),
        math.cos(y),
        math.cos(x + y),
    ]
    pool = OperationPoolConfig(names=tuple(OPERATIONS)).build(15, 2)
    operands = torch.tensor([[[x, y]]])
    assert torch.allclose(pool(operands), torch.tensor([expected]), atol=1e-6)
    assert pool.selected(operands, torch.tensor([9])).item() == pytest.approx(expected[9])


def test_invalid_settings_are_refused():
    with pytest.raises(ValueError, match=r"depth must be at least 2, got 1"):
        MlpPoolConfig(depth=1)
    with pytest.raises(ValueError, match=r"names must be among add, .*got \('divide',\)"):
        OperationPoolConfig(names=("divide",))
    with pytest.raises(ValueError, match=r"n_modules must be 1, got 2"):
        OperationPoolConfig(names=("add",)).build(2, 2)
    with pytest.raises(ValueError, match=r"d_operands must be 2 for operations, got 3"):
        OperationPoolConfig(names=("add",)).build(1, 3)
