"""Answers that are spans of a text: the most probable one, and how close it is to the right ones.

Exact match and F1 are those of SQuAD (Rajpurkar et al. 2016, "SQuAD: 100,000+ Questions for Machine
Comprehension of Text", section 6.1).
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def best_spans(
    logits: Float[Tensor, "batch 2 pos"], longest: int
) -> tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]:
    """Return the first and the last position of the most probable span of each text.

    It maximises the product of the probabilities of its start and of its end (Tay et al. 2018,
    "Densely Connected Attention Propagation for Reading Comprehension", section 3.4).

    Args:
        logits: those of the start and of the end, -inf at padding.
        longest: the greatest length of a span, at least 1.
    """
    start, end = logits.float().unbind(1)
    scores = start[:, :, None] + end[:, None]
    ones = torch.ones(scores.shape[1:], dtype=torch.bool, device=logits.device)
    is_span = ones.triu() & ones.tril(longest - 1)
    best = scores.masked_fill(~is_span, -torch.inf).flatten(1).argmax(1)
    width = logits.shape[2]
    return best // width, best % width


def normalized(answer: str) -> str:
    """Return an answer in lower case, without punctuation, articles and superfluous space."""
    answer = answer.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", answer).split())


def score_answer(answer: str, golds: Sequence[str]) -> tuple[float, float]:
    """Return the exact match (0 or 1) and the F1 of an answer, with the best of the right answers.

    Both compare `normalized` answers; F1 is that of their words, which may repeat.

    Args:
        answer: the answer.
        golds: the right answers, at least one.

    Example:
        >>> score_answer("The cat sat.", ["cat"])
        (0.0, 0.6666666666666666)
    """
    answer, golds = normalized(answer), [normalized(gold) for gold in golds]
    return float(answer in golds), max(_f1(answer.split(), gold.split()) for gold in golds)


def _f1(answer: list[str], gold: list[str]) -> float:
    if not answer or not gold:
        return float(answer == gold)
    n_common = (Counter(answer) & Counter(gold)).total()
    return 2 * n_common / (len(answer) + len(gold))
