"""Word-level vocabularies: splitting, learning and encoding."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from jaxtyping import Int

PAD, UNKNOWN = 0, 1
SPECIAL_TOKENS = ("<pad>", "<unknown>")

_WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case; each punctuation mark is a word."""
    return _WORD.findall(text.lower())


def word_spans(text: str) -> list[tuple[int, int]]:
    """Return where each word of `words_of` begins and ends in a text that is in lower case."""
    return [match.span() for match in _WORD.finditer(text)]


def learn_words(texts: Iterable[str], *, min_count: int, size: int) -> tuple[str, ...]:
    """Return a vocabulary: `SPECIAL_TOKENS`, then words by descending frequency.

    Args:
        texts: the training texts.
        min_count: the least frequency of a word.
        size: the greatest size of the vocabulary, with `SPECIAL_TOKENS`.
    """
    counts = Counter(chain.from_iterable(map(words_of, texts)))
    frequent = (word for word, count in counts.items() if count >= min_count)
    ordered = sorted(frequent, key=lambda word: (-counts[word], word))
    return (*SPECIAL_TOKENS, *ordered)[:size]


def encode_words(
    texts: Sequence[str], ids: dict[str, int], max_length: int
) -> Int[np.ndarray, "text pos"]:
    """Return the ids of each text's first words, padded; an empty text is one unknown word."""
    rows = [
        [ids.get(word, UNKNOWN) for word in words_of(text)[:max_length]] or [UNKNOWN]
        for text in texts
    ]
    lengths = np.array([len(row) for row in rows])
    padded = np.full((len(rows), lengths.max()), PAD, np.int32)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = list(chain.from_iterable(rows))
    return padded
