"""Whether a model's initial weights are drawn as in the authors' code, by their spread.

A rule resets a layer of torch, as the authors' code does with its layers; each weight and bias of
the model is compared with that of a layer that has as many inputs and outputs.
"""

import math
from collections.abc import Callable

import torch
from torch import nn

Rule = Callable[[str, nn.Linear | nn.Embedding, bool], None]
"""(weight, a new layer, whether a linear map scores the retrievals) -> None: resets the layer."""


def is_drawn_as(rule: Rule, model: nn.Module) -> bool:
    """Whether all weights `W_X` and biases `b_X` are spread like those of a reset layer."""
    linear_scorer = any(path.endswith("W_score") for path, _ in model.named_parameters())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return all(
            _is_part_drawn_as(rule, dict(part.named_parameters(recurse=False)), linear_scorer)
            for part in model.modules()
            if not isinstance(part, nn.LayerNorm)
        )


def _is_part_drawn_as(rule: Rule, drawn: dict[str, torch.Tensor], linear_scorer: bool) -> bool:
    for name in [name for name in drawn if name.startswith("W_")]:
        layer = _layer(name, drawn[name])
        rule(name, layer, linear_scorer)
        bias = drawn.pop(f"b_{name[2:]}", None)
        if bias is not None and not _is_spread_like(bias, layer.bias):  # pyright: ignore[reportArgumentType]
            return False
        if not _is_spread_like(drawn.pop(name), layer.weight):
            return False
    # The bias of a tied read-out is left.
    return not any(bias.any() for bias in drawn.values())


def _layer(name: str, weight: torch.Tensor) -> nn.Linear | nn.Embedding:
    """The authors' layer of a weight; all heads, or all searches or retrievals, share one."""
    if name.startswith("W_E"):
        return nn.Embedding(weight.shape[0], weight.shape[1])
    if name == "W_score":
        return nn.Linear(len(weight), 1)
    if name == "W_O":
        heads, width, outputs = weight.shape
        return nn.Linear(heads * width, outputs)
    heads, inputs, width = (1, *weight.shape)[-3:]
    return nn.Linear(inputs, heads * width)


def _is_spread_like(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether both have about the same deviation and both are uniform, or normal, or 0."""
    ours, theirs = ours.detach().flatten(), theirs.detach().flatten()
    if not theirs.any():
        return not ours.any()
    spread, other = (values.square().mean().sqrt().item() for values in (ours, theirs))
    # Four standard errors of the difference of two deviations, those of normal numbers.
    error = 4 * (0.5 / len(ours) + 0.5 / len(theirs)) ** 0.5
    if not spread or abs(math.log(spread / other)) > error:
        return False
    # Of enough numbers the largest is at 1.73 deviations if they are uniform, at 2.27 if normal and
    # truncated as in flax, and beyond 3 if normal.
    bounds = [values.abs().max().item() / other for values in (ours, theirs)]
    return len(ours) < 2000 or all(bound > 3 for bound in bounds) or max(bounds) < 1.9


# Rules


def tensor2tensor(name: str, layer: nn.Linear | nn.Embedding, _linear_scorer: bool) -> None:
    """`uniform_unit_scaling`, gain 1: layers/common_layers.py, layers/modalities.py."""
    if isinstance(layer, nn.Embedding):
        nn.init.normal_(layer.weight, std=layer.embedding_dim**-0.5)
        return
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)


def scan(name: str, layer: nn.Linear | nn.Embedding, _linear_scorer: bool) -> None:
    """SCAN/layers/transformer; its baseline and models/: RobertCsordas/transformer_generalization.

    Keys and values are one layer there, but its halves are drawn one by one.
    """
    if name in ("W_Q", "W_K", "W_V", "W_O", "W_out", "W_U"):
        nn.init.xavier_uniform_(layer.weight)
    if name == "W_in":
        nn.init.xavier_uniform_(layer.weight, gain=nn.init.calculate_gain("relu"))


def fairseq(name: str, layer: nn.Linear | nn.Embedding, linear_scorer: bool) -> None:
    """fairseq/modules of sarthmit/Compositional-Attention: *_attention.py, transformer_layer.py."""
    if isinstance(layer, nn.Embedding):
        nn.init.normal_(layer.weight, std=layer.embedding_dim**-0.5)
    if name in ("W_Q", "W_K", "W_V"):
        nn.init.xavier_uniform_(layer.weight, gain=1 / math.sqrt(2))
    if name in ("W_value_query", "W_value_key", "W_score"):
        nn.init.xavier_uniform_(layer.weight, gain=1 if linear_scorer else 1 / math.sqrt(2))
    if name == "W_O":
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)  # pyright: ignore[reportArgumentType]
