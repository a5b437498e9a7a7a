"""Texts as numbers of words."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from jaxtyping import Int

PAD, UNKNOWN = 0, 1
MARKS = ("<pad>", "<unknown>")

_WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, and each punctuation mark as one."""
    return _WORD.findall(text.lower())


def learn_words(texts: Iterable[str], *, min_count: int, size: int) -> tuple[str, ...]:
    """Return a vocabulary: `MARKS`, then words from the most frequent on.

    Args:
        texts: where they are from.
        min_count: how often a word occurs at least.
        size: how many there are at most, `MARKS` among them.
    """
    counts = Counter(chain.from_iterable(map(words_of, texts)))
    known = (word for word, count in counts.items() if count >= min_count)
    ordered = sorted(known, key=lambda word: (-counts[word], word))
    return (*MARKS, *ordered)[:size]


def encode_words(
    texts: Sequence[str], ids: dict[str, int], max_length: int
) -> Int[np.ndarray, "text pos"]:
    """Return the ids of each text's first words, padded; a text without words is an unknown one."""
    rows = [
        [ids.get(word, UNKNOWN) for word in words_of(text)[:max_length]] or [UNKNOWN]
        for text in texts
    ]
    lengths = np.array([len(row) for row in rows])
    made = np.full((len(rows), lengths.max()), PAD, np.int32)
    made[np.arange(made.shape[1]) < lengths[:, None]] = list(chain.from_iterable(rows))
    return made
