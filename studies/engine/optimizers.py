"""Optimizers: AdamW, and Muon for the weight matrices between hidden layers.

torch's own `torch.optim.Muon` takes matrices alone; here the weights of heads, experts and modules
are tensors [head, d_model, d_head] and the like, and weights of several models are stacked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from studies.engine.training_config import TrainingConfig

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration, chosen by its authors for a fast start: it ends with
singular values of about 0.7 to 1.2."""

MOMENTUM = 0.95

OUTER = ("embed", "unembed")
"""Modules whose matrices map to or from tokens and answers, not between hidden layers."""


def make_optimizers(
    parameters: Mapping[str, Tensor], config: TrainingConfig, *, n_leading: int = 0
) -> list[torch.optim.Optimizer]:
    """The optimizers of a config for parameters by name.

    Args:
        parameters: the parameters.
        config: with the names of the optimizer and of the decayed parameters.
        n_leading: dimensions of each parameter before those that it has in a single model.
    """
    matrices = hidden_matrices(parameters, n_leading) if config.optimizer == "muon" else []
    others = {name: p for name, p in parameters.items() if name not in matrices}
    decayed = [p for p in others.values() if p.ndim - n_leading > 1 or config.decayed == "all"]
    undecayed = [
        p for p in others.values() if p.ndim - n_leading <= 1 and config.decayed == "matrices"
    ]
    adamw = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": undecayed, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(0.9, config.beta2),
        eps=config.epsilon,
        fused=next(iter(parameters.values())).device.type in ("cpu", "cuda"),
    )
    if not matrices:
        return [adamw]
    return [
        adamw,
        Muon(
            [parameters[name] for name in matrices],
            [_pattern(name, parameters[name].ndim - n_leading) for name in matrices],
            weight_decay=config.weight_decay,
        ),
    ]


def hidden_matrices(parameters: Mapping[str, Tensor], n_leading: int = 0) -> list[str]:
    """The names of the weight matrices between hidden layers: `W_*`, except embedding and readout.

    Per-head biases and tables of positions have two dimensions, too, but are no linear maps.
    """
    return [
        name
        for name, parameter in parameters.items()
        if name.rpartition(".")[2].startswith("W_")
        and not set(name.split(".")) & set(OUTER)
        and parameter.ndim - n_leading > 1
    ]


class Muon(torch.optim.Optimizer):
    """Momentum whose steps are orthogonalised (Jordan et al. 2024; Liu et al. 2025).

    The step of a matrix is its Nesterov momentum with all singular values set to about 1, times
    0.2 sqrt(max(rows, columns)), which gives it the size of AdamW's steps: one learning rate and
    weight decay serve both (Liu et al. 2025, Section 2.2).

    Args:
        parameters: the parameters.
        patterns: for each the einops pattern, such as "head i o -> i (head o)", that makes one
            matrix of the weights of all heads; None if its last two dimensions are a matrix.
        weight_decay: decoupled weight decay.

    Example:
        `Muon([model.mlp.W_in], [None], weight_decay=0.1)`
    """

    def __init__(
        self, parameters: Sequence[Tensor], patterns: Sequence[str | None], *, weight_decay: float
    ):
        self._patterns = list(patterns)
        super().__init__(parameters, {"lr": 0.0, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters that have a gradient, at the learning rate of their group."""
        (group,) = self.param_groups
        moved = [
            (parameter, pattern)
            for parameter, pattern in zip(group["params"], self._patterns, strict=True)
            if parameter.grad is not None
        ]
        matrices = [_as_matrix(self._direction(p), pattern) for p, pattern in moved]
        for (parameter, pattern), matrix in zip(moved, orthogonalized_alike(matrices), strict=True):
            size = 0.2 * max(matrix.shape[-2:]) ** 0.5
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(_as_heads(matrix, pattern, parameter), alpha=-group["lr"] * size)

    def _direction(self, parameter: Tensor) -> Tensor:
        """Nesterov momentum of the gradients."""
        gradient, state = cast(Tensor, parameter.grad), self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(state["momentum"], MOMENTUM)


def orthogonalized(
    matrices: Float[Tensor, "... rows columns"], n_iterations: int = 5
) -> Float[Tensor, "... rows columns"]:
    """Matrices with the same singular vectors and singular values of about 1.

    A Newton-Schulz iteration of odd polynomials, after scaling to a Frobenius norm of 1.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(n_iterations):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if is_tall else x


def orthogonalized_alike(matrices: Sequence[Tensor]) -> list[Tensor]:
    """`orthogonalized` of several tensors; those of one shape in one batched product."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    # A matrix and the transposed of another one have the same iteration.
    upright = [matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT for matrix in matrices]
    for number, matrix in enumerate(upright):
        by_shape.setdefault(tuple(matrix.shape), []).append(number)
    results: dict[int, Tensor] = {}
    for numbers in by_shape.values():
        alike = orthogonalized(torch.stack([upright[number] for number in numbers]))
        results |= dict(zip(numbers, alike, strict=True))
    return [
        results[number] if matrix is upright[number] else results[number].mT
        for number, matrix in enumerate(matrices)
    ]


def _pattern(name: str, n_dims: int) -> str | None:
    """The pattern that makes one matrix of the weights of all heads, for `Muon`."""
    if n_dims == 3 and name.endswith(("W_Q", "W_K", "W_V")):
        return "... head i o -> ... i (head o)"
    return "... head i o -> ... (head i) o" if n_dims == 3 and name.endswith("W_O") else None


def _as_matrix(weights: Tensor, pattern: str | None) -> Tensor:
    return weights if pattern is None else rearrange(weights, pattern)


def _as_heads(matrix: Tensor, pattern: str | None, like: Tensor) -> Tensor:
    if pattern is None:
        return matrix
    heads, joined = pattern.split(" -> ")
    return rearrange(matrix, f"{joined} -> {heads}", head=like.shape[-3])
