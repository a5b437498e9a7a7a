"""Beam search: the most probable sequences that a model of the next token can write."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

NextToken = Callable[[Tensor, Tensor], Tensor]
"""Maps the row of the batch that each prefix belongs to [prefix] and prefixes [prefix, pos] to the
logits of the next token [prefix, token]."""


@torch.no_grad()
def beam_search(
    next_token: NextToken,
    n_rows: int,
    *,
    begin: int,
    end: int,
    padding: int,
    max_length: int,
    width: int = 4,
    length_penalty: float = 0.6,
    device: torch.device | str = "cpu",
) -> tuple[Int[Tensor, "row width max_length"], Float[Tensor, "row width"]]:
    """Decode the best sequences of each row of a batch, found by beam search.

    In each round every prefix is continued by every token, and the `width` best ones are kept;
    those that have ended stay as they are and compete on. The score is the log-probability over the
    length penalty of Wu et al. 2016, ((5 + length) / 6)^length_penalty, with `end` in the length.
    Width 1 is greedy decoding.

    Args:
        next_token: the model; it is called with the prefixes that have not ended.
        n_rows: number of rows of the batch.
        begin, end, padding: ids of the first and the last token, and of what follows the last one.
        max_length: most tokens of a sequence, with `end`; a longer one is cut off.
        width: number of prefixes that are kept for each row, at least 1.
        length_penalty: exponent, 0 or more; 0 for plain log-probabilities.
        device: device of the prefixes.

    Returns:
        The sequences without `begin`, best first, and their scores; -inf where there are fewer
        sequences than `width`.

    Raises:
        ValueError: max_length or width is less than 1, or length_penalty is negative.

    Example:
        >>> beam_search(lambda rows, prefix: model(prefix)[:, -1], 8, begin=1, end=2, padding=0,
        ...     max_length=20)

    Source:
        Wu et al. 2016, "Google's Neural Machine Translation System", equation 14, without coverage.
    """
    for name, value in (("max_length", max_length), ("width", width)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if length_penalty < 0:
        raise ValueError(f"length_penalty must be at least 0, got {length_penalty}")
    sequences = torch.full((n_rows, width, max_length + 1), padding, device=device)
    sequences[..., 0] = begin
    # A row starts with a single prefix: copies of it would fill the beam with the same sequence.
    log_probs = torch.full((n_rows, width), -torch.inf, device=device)
    log_probs[:, 0] = 0
    lengths = torch.zeros((n_rows, width), dtype=torch.long, device=device)
    has_ended = torch.zeros_like(lengths, dtype=torch.bool)
    for length in range(1, max_length + 1):
        is_open = ~has_ended & log_probs.isfinite()
        if not is_open.any():
            break
        rows, _ = is_open.nonzero(as_tuple=True)
        found = next_token(rows, sequences[is_open][:, :length]).log_softmax(-1)
        n_tokens = found.shape[-1]
        # What has ended is continued by one token that adds nothing, which padding replaces.
        further = log_probs.new_full((n_rows, width, n_tokens), -torch.inf)
        further[..., 0] = torch.where(has_ended, 0.0, -torch.inf)
        further[is_open] = found.to(further)
        log_probs = (log_probs[..., None] + further).flatten(1)
        lengths = lengths + ~has_ended
        scores = log_probs / _penalty(lengths, length_penalty).repeat_interleave(n_tokens, 1)
        best = scores.topk(width, dim=1).indices
        prefix, token = best // n_tokens, best % n_tokens
        log_probs, lengths, ended = (
            values.gather(1, index)
            for values, index in ((log_probs, best), (lengths, prefix), (has_ended, prefix))
        )
        sequences = sequences.gather(1, prefix[..., None].expand(-1, -1, max_length + 1))
        sequences[..., length] = torch.where(ended, padding, token)
        has_ended = ended | (token == end)
    return sequences[..., 1:], log_probs / _penalty(lengths, length_penalty)


def _penalty(lengths: Int[Tensor, "row width"], exponent: float) -> Float[Tensor, "row width"]:
    return ((5 + lengths) / 6) ** exponent
