"""Training objectives of modular networks: one sampled path, or all paths."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from mechanisms.modular.network import ModularNetwork


def sampled_path_loss(
    network: ModularNetwork,
    inputs: Float[Tensor, "batch variable d_input"],
    targets: Float[Tensor, "batch 1"],
    *,
    temperature: float | None = None,
) -> Float[Tensor, ""]:
    """Mean squared error along one path for each example, sampled in training mode.

    The straight-through gradient (Jang et al. 2017) takes every module's result into account.

    Args:
        network: a network with any selection.
        inputs: the variables.
        targets: the correct answers.
        temperature: temperature of the Gumbel softmax; None for that of the network's config.

    Example:
        >>> sampled_path_loss(network, inputs, targets).backward()
        >>> network.router.W_Q.grad.shape  # the straight-through gradient reaches the router
        torch.Size([2, 16, 8])
    """
    return (network(inputs, temperature=temperature) - targets).square().mean()


def all_paths_loss(
    network: ModularNetwork,
    inputs: Float[Tensor, "batch variable d_input"],
    targets: Float[Tensor, "batch 1"],
    *,
    entropy: float = 0.0,
) -> Float[Tensor, ""]:
    """Expected squared error over all paths, each weighted by its probability.

    `sampled_path_loss` with hard selection is a sample of this loss. It costs n_modules +
    n_modules^2 + ... + n_modules^n_layers module applications for each example.

    Args:
        network: a network; its operand slots, if it has any, are still sampled.
        inputs: the variables.
        targets: the correct answers.
        entropy: weight of the mean entropy of the paths (nats), which is subtracted: a positive
            weight rewards exploring many paths.

    Example:
        >>> loss = all_paths_loss(network, inputs, targets)
        >>> bool(all_paths_loss(network, inputs, targets, entropy=0.1) < loss)  # of the paths
        True
    """
    answers, probabilities = network.all_paths(inputs)
    paths = probabilities[:, 0]
    for layer in range(1, network.n_layers):
        paths = (paths[:, :, None] * probabilities[:, layer, None]).flatten(1)
    loss = (paths * (answers - targets).square()).sum(-1).mean()
    if entropy:
        # Small probabilities are rounded to 0, where the slope of the entropy is infinite.
        kept = probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny)
        # Given the input, the choices of the layers are independent.
        loss = loss - entropy * torch.special.entr(kept).sum((1, 2)).mean()
    return loss
