"""What studies of language modelling share: a text at hand, a causal transformer, how it fares."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

import mechanisms
from studies.runs import write_atomically
from tasks import Batch, Text, TextConfig

if TYPE_CHECKING:
    from mechanisms.transformer import HeadedConfig

Positions = Literal["relative", "rotary"]

# With ~, so that the settings, and with them the names of run folders, are the same everywhere.
PYTHON_HELP = "~/.cache/modscope/python_help.txt"
"""A text that comes with Python; written when it is first asked for."""


def text_of(config: TextConfig) -> Text:
    """The text; raises as `tasks.Text` does."""
    if config.path == PYTHON_HELP:
        write_python_help(Path(PYTHON_HELP).expanduser())
    return Text(config)


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
    positions: Positions = "relative",
    shared: bool = True,
    dropout: float = 0.0,
) -> mechanisms.TransformerConfig:
    """A causal transformer over the tokens of a text.

    Args:
        config: of the text, whose `length` bounds the distances that are told apart, up to 64.
        vocabulary_size: of the text.
        attention: for example `mechanisms.AttentionConfig`.
        d_model, d_mlp, n_layers: sizes.
        positions: `relative`, T5's bias, or what `mechanisms.RelativeAttentionConfig` has of its
            own; `rotary`, those of an attention with `rotary=True`.
        shared: whether all blocks have the same weights.
        dropout: of the hidden activations of feed-forward layers.

    Raises:
        ValueError: `positions` is unknown, or is not `rotary` just where the attention is.
    """
    if positions not in get_args(Positions):
        raise ValueError(
            f"positions must be one of {', '.join(get_args(Positions))}, got {positions!r}"
        )
    can_rotate = isinstance(attention, mechanisms.AttentionConfig | mechanisms.CodaAttentionConfig)
    rotates = can_rotate and attention.rotary
    if rotates != (positions == "rotary"):
        raise ValueError(
            f"positions must be {'rotary' if rotates else 'relative'} with {attention}, "
            f"got {positions!r}"
        )
    biased = not rotates and not isinstance(attention, mechanisms.RelativeAttentionConfig)
    return mechanisms.TransformerConfig(
        d_input=vocabulary_size,
        d_output=vocabulary_size,
        d_model=d_model,
        n_layers=n_layers,
        attention=attention,
        feed_forward=mechanisms.FeedForwardConfig(d_mlp=d_mlp, dropout=dropout),
        inputs="tokens",
        positions="relative" if biased else "none",
        max_distance=max(2, min(64, config.length)) if biased else None,
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
    words = _n_words(task, split) / task.n_bytes(split)
    return {
        "accuracy": (right, tokens),
        "log_likelihood": (-loss, tokens),
        "bits_per_byte": (loss / torch.tensor(2.0).log(), n_bytes),
        "perplexity": (loss, n_bytes * words),
    }


def unigram_scores(task: Text, split: str) -> dict[str, float]:
    """How a split is predicted by how often each token occurs in training.

    Returns:
        `log_likelihood`, `bits_per_byte` and `perplexity`, as `windows_scored` has them.
    """
    mean = task.baseline(split)
    total = mean * task.n_tokens(split)
    return {
        "log_likelihood": -mean,
        "bits_per_byte": total / math.log(2) / task.n_bytes(split),
        "perplexity": math.exp(total / _n_words(task, split)),
    }


def _n_words(task: Text, split: str) -> int:
    """Words, the ends of lines included."""
    return task.n_words(split) + task.n_lines(split)
