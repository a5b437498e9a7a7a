import pytest
import torch
from torch.autograd import gradcheck

from mechanisms.layers.perceptrons import perceptrons


def arguments(rows, modules=3, operands=2, width=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, operands), (modules, operands, width), (modules, width), (modules, width))
    return [
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes
    ]


def literal(x, W_in, b_in, W_out):
    hidden = torch.relu(torch.einsum("ro,moh->rmh", x, W_in) + b_in)
    return (hidden * W_out).sum(-1)


@pytest.mark.parametrize("elements", [1, 31, 10**6])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_outputs_and_gradients_are_those_of_the_formula(rows, elements, monkeypatch):
    monkeypatch.setattr("mechanisms.chunking.CPU_ELEMENTS", elements)
    ours, theirs = arguments(rows), arguments(rows)
    gradient = torch.randn(rows, 3, dtype=torch.float64)
    out, expected = perceptrons(*ours), literal(*theirs)
    assert torch.allclose(out, expected)
    out.backward(gradient)
    expected.backward(gradient)
    for argument, reference in zip(ours, theirs, strict=True):
        assert torch.allclose(argument.grad, reference.grad)


def test_gradients_by_finite_differences():
    assert gradcheck(perceptrons, arguments(4))


def test_outputs_in_half_precision_under_autocast_are_close():
    values = arguments(6, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = perceptrons(*values)
        out.float().sum().backward()
    assert torch.allclose(out.float(), literal(*values), atol=0.2)
    assert all(value.grad is not None for value in values)
