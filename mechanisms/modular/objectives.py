"""What a modular network is trained on: a sampled path, or all of them."""

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
    """Mean squared error along one path for each example, drawn if the network is in training.

    The straight-through gradient (Jang et al. 2017) takes each module's result into account.

    Args:
        network: with any kind of selection.
        inputs: the variables.
        targets: the right answers.
        temperature: of the Gumbel softmax; None for the network's own.
    """
    return (network(inputs, temperature=temperature) - targets).square().mean()


def all_paths_loss(
    network: ModularNetwork,
    inputs: Float[Tensor, "batch variable d_input"],
    targets: Float[Tensor, "batch 1"],
    *,
    entropy: float = 0.0,
) -> Float[Tensor, ""]:
    """Expected squared error of a path that is drawn: every path's, weighted by its probability.

    The exact objective of which `sampled_path_loss` with hard selection is a sample. It costs
    n_modules + n_modules^2 + ... + n_modules^n_layers module applications for each example.

    Args:
        network: whose slots, if it has any, are still drawn.
        inputs: the variables.
        targets: the right answers.
        entropy: weight of the paths' mean entropy (nats), which is subtracted: a positive one
            rewards trying many paths.
    """
    answers, probabilities = network.all_paths(inputs)
    paths = probabilities[:, 0]
    for layer in range(1, network.n_layers):
        paths = (paths[:, :, None] * probabilities[:, layer, None]).flatten(1)
    loss = (paths * (answers - targets).square()).sum(-1).mean()
    if entropy:
        # Layers choose independently of one another, given the input.
        loss = loss - entropy * torch.special.entr(probabilities).sum((1, 2)).mean()
    return loss
