"""What studies of language modelling share: a text at hand, a causal transformer, how it fares."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

import mechanisms
from studies.runs import write_atomically
from tasks import Batch, Text, TextConfig

if TYPE_CHECKING:
    from mechanisms.transformer import HeadedConfig


def write_python_help(path: Path) -> None:
    """Write the texts of Python's `help()` on its language: half a megabyte, mostly English.

    A file that is there stays; another version of Python has other texts.
    """
    from pydoc_data.topics import topics

    if not path.exists():
        text = "\n".join(topics[name] for name in sorted(topics))
        write_atomically(path, lambda place: place.write_text(text))


def language_model(
    config: TextConfig,
    *,
    vocabulary_size: int,
    attention: HeadedConfig,
    d_model: int,
    d_mlp: int,
    n_layers: int,
    shared: bool = True,
    dropout: float = 0.0,
) -> mechanisms.TransformerConfig:
    """A causal transformer over the tokens of a text, with T5's relative positions.

    Args:
        config: of the text, whose `length` bounds the distances that are told apart, up to 64.
        vocabulary_size: of the text.
        attention: for example `mechanisms.AttentionConfig`.
        d_model, d_mlp, n_layers: sizes.
        shared: whether all blocks have the same weights.
        dropout: of the hidden activations of feed-forward layers.
    """
    return mechanisms.TransformerConfig(
        d_input=vocabulary_size,
        d_output=vocabulary_size,
        d_model=d_model,
        n_layers=n_layers,
        attention=attention,
        feed_forward=mechanisms.FeedForwardConfig(d_mlp=d_mlp, dropout=dropout),
        inputs="tokens",
        positions="relative",
        max_distance=max(2, min(64, config.length)),
        causal=True,
        shared=shared,
    )


def windows_scored(
    task: Text, split: str, logits: Float[Tensor, "batch pos token"], batch: Batch
) -> dict[str, tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]]:
    """Sums over each window of a batch, to be divided by one another over all windows.

    Returns:
        `accuracy`: right tokens, and tokens; `log_likelihood`: of the targets in nats, and tokens;
        `bits_per_byte`: the loss in bits, and bytes; `perplexity`, whose logarithm they give: the
        loss in nats, and words, the ends of lines included, as WikiText's perplexities have it (of
        the split's words a window has a share by its bytes).
    """
    found = task.score(logits, batch)
    loss, right = found["loss"].sum(1), found["correct"].sum(1)
    tokens = batch.mask.sum(1).float()
    n_bytes = (batch.latents["n_bytes"] * batch.mask).sum(1).float()
    words = (task.n_words(split) + task.n_lines(split)) / task.n_bytes(split)
    return {
        "accuracy": (right, tokens),
        "log_likelihood": (-loss, tokens),
        "bits_per_byte": (loss / torch.tensor(2.0).log(), n_bytes),
        "perplexity": (loss, n_bytes * words),
    }
