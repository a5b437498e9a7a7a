"""Initial weights of whole models as in the code of papers."""

from __future__ import annotations

import torch
from torch import nn

from mechanisms.initialization import redraw_uniformly, redraw_xavier


def redraw_as_tensor2tensor(
    model: nn.Module, *, embedding_std: float, generator: torch.Generator | None = None
) -> None:
    """Draw all weights anew as tensor2tensor does, with `uniform_unit_scaling` and gain 1.

    All matrices have Xavier's uniform rule, and embeddings are normal. Biases, of which the
    attention of tensor2tensor has none, stay as they are (0, but for that of halting units), as do
    signals of steps.
    """
    redraw_xavier(model, generator=generator)
    # The weights of halting units, which are vectors.
    redraw_xavier(model, {"w": 1.0}, generator=generator)
    _redraw_embeddings(model, embedding_std, generator)


def redraw_as_scan(
    model: nn.Module, *, embedding_std: float, generator: torch.Generator | None = None
) -> None:
    """Draw all weights anew as the encoder-decoders of Mittal et al. 2021 for SCAN (their code).

    Xavier's uniform rule for queries, keys, values, output and feed-forward layers, with gain
    sqrt(2) for the first of these; embeddings are normal; the others, with all biases, are as in
    torch's linear layers.
    """
    redraw_uniformly(model, generator=generator)
    names = ("W_Q", "W_K", "W_V", "W_O", "W_out", "W_U")
    # The feed-forward layer continues with a relu.
    redraw_xavier(model, dict.fromkeys(names, 1.0) | {"W_in": 2**0.5}, generator=generator)
    _redraw_embeddings(model, embedding_std, generator)


@torch.no_grad()
def redraw_as_fairseq(
    model: nn.Module, *, embedding_std: float, generator: torch.Generator | None = None
) -> None:
    """Draw all weights anew as the language models of Mittal et al. 2021 (their fork of fairseq).

    Xavier's uniform rule in attention, with gain 1 / sqrt(2) for queries, keys, values, value
    queries and value keys (1 for value queries of a linear scorer, and for the scorer); embeddings
    are normal; the output has no bias at first, and the others, with the biases and the whole
    feed-forward layer, are as in torch's linear layers.
    """
    redraw_uniformly(model, generator=generator)
    gains = dict.fromkeys(("W_Q", "W_K", "W_V", "W_value_query", "W_value_key"), 2**-0.5)
    parameters = [(path.rpartition(".")[2], weight) for path, weight in model.named_parameters()]
    if any(name == "W_score" for name, _ in parameters):
        gains |= {"W_value_query": 1.0, "W_score": 1.0}
    redraw_xavier(model, gains | {"W_O": 1.0}, generator=generator)
    for name, weight in parameters:
        if name == "b_O":
            weight.zero_()
    _redraw_embeddings(model, embedding_std, generator)


def _redraw_embeddings(model: nn.Module, std: float, generator: torch.Generator | None) -> None:
    for path, weight in model.named_parameters():
        if path.rpartition(".")[2].startswith("W_E"):
            nn.init.normal_(weight, std=std, generator=generator)
