"""Tiny networks of modules, and what their paths give when each is computed by itself."""

import itertools

import torch
from torch import Tensor, nn

ADD = lambda r, x: r + x  # noqa: E731
MULTIPLY = lambda r, x: r * x  # noqa: E731
SINE = lambda r, x: torch.sin(3 * r)  # noqa: E731
HIGHER = lambda r, x: torch.maximum(r, 0.5 * x)  # noqa: E731
OPERATIONS = (ADD, MULTIPLY, SINE, HIGHER)


class Operations:
    """Modules are functions of the result so far, first the second number, and the first number."""

    def __init__(self, functions, n_layers: int = 2) -> None:
        self.functions = functions
        self.n_layers, self.n_modules, self.bytes_per_result = n_layers, len(functions), 8

    def begin(self, inputs: Tensor) -> Tensor:
        return inputs[:, None, 1:]

    def advance(self, inputs: Tensor, layer: int, partial: Tensor) -> Tensor:
        x = inputs[:, None, :1].expand_as(partial)
        return torch.stack([function(partial, x) for function in self.functions], dim=2)


class Random(nn.Module):
    """Modules tanh(A r + b x + c), different in each layer, of results of two numbers.

    It writes down the size of all that it was asked for, and drops out in training.
    """

    def __init__(self, n_layers: int, n_modules: int, seed: int = 0) -> None:
        super().__init__()
        self.n_layers, self.n_modules, self.bytes_per_result = n_layers, n_modules, 1000
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(n_layers, n_modules, 2, 4, generator=generator, dtype=torch.double)
        self.weight = nn.Parameter(drawn)
        self.dropout = nn.Dropout(0.5)
        self.asked: list[int] = []
        self.applied = 0

    def begin(self, inputs: Tensor) -> Tensor:
        return inputs[:, None]

    def advance(self, inputs: Tensor, layer: int, partial: Tensor) -> Tensor:
        weight = self.weight[layer]
        result = torch.einsum("bps,mts->bpmt", partial, weight[..., :2])
        result = result + inputs[:, None, None, :1] * weight[..., 2] + weight[..., 3]
        self.asked.append(result[..., 0].numel())
        return self.dropout(result.tanh())


def brute_force(model: Random, inputs: Tensor, targets: Tensor) -> dict[tuple[int, ...], Tensor]:
    """The losses of each path, which runs alone through the network: [example] by path."""
    losses = {}
    weight = model.weight.detach()
    for path in itertools.product(range(model.n_modules), repeat=model.n_layers):
        rows = []
        for x, target in zip(inputs, targets, strict=True):
            result = x
            for layer, module in enumerate(path):
                w = weight[layer, module]
                result = torch.tanh(w[:, :2] @ result + w[:, 2] * x[0] + w[:, 3])
            rows.append(((result - target) ** 2).sum())
        losses[path] = torch.stack(rows)
    return losses
