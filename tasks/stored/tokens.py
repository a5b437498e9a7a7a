"""Tokens of a text: byte pairs (Sennrich et al. 2016) or words, learned from the text."""

import re
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNKNOWN_WORD, LINE_END = "<unk>", "\n"
_SPACE = re.compile(rb"\s")
_BLOCK = 2**16  # bytes that are encoded at a time; no token crosses the end of a block
_BLOCKS = 64  # blocks that are encoded in parallel


def word_end(text: bytes, position: int) -> int:
    """Return the position of the next white space, or of the end of the text."""
    space = _SPACE.search(text, position)
    return space.start() if space else len(text)


def blocks_of(text: bytes) -> Iterator[str]:
    """Split a text into blocks that end between words.

    Raises:
        ValueError: the text is not UTF-8.
    """
    begin = 0
    while begin < len(text):
        end = word_end(text, begin + _BLOCK)
        try:
            yield text[begin:end].decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"the text must be UTF-8, got from byte {begin} on: {error}"
            ) from error
        begin = end


def learn_byte_pairs(text: bytes, size: int) -> "Tokenizer":
    """Learn a byte pair encoding with at most `size` tokens from a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(blocks_of(text), trainer)
    return tokenizer


def learn_word_tokens(text: bytes, size: int) -> "Tokenizer":
    """Return a vocabulary of the most frequent words of a text, at most `size` with others.

    Words are what white space separates; each line end is a word, too. Words that are not in the
    vocabulary are `UNKNOWN_WORD`, which always is.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN_WORD))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[^\S\n]+"), "removed"),
            pre_tokenizers.Split(LINE_END, "isolated"),
        ]
    )
    trainer = trainers.WordLevelTrainer(
        vocab_size=size, min_frequency=1, show_progress=False, special_tokens=[UNKNOWN_WORD]
    )
    tokenizer.train_from_iterator(blocks_of(text), trainer)
    return tokenizer


def encode_text(text: bytes, tokenizer: "Tokenizer", *, start: int) -> Int[np.ndarray, " token"]:
    """Return the start token and the tokens of a text, in the smallest type that holds them."""
    dtype = np.min_scalar_type(max(start, tokenizer.get_vocab_size() - 1))
    parts, blocks = [np.array([start], dtype)], blocks_of(text)
    while group := list(islice(blocks, _BLOCKS)):
        encodings = tokenizer.encode_batch_fast(group, add_special_tokens=False)
        parts += [np.array(encoding.ids, dtype) for encoding in encodings]
    return np.concatenate(parts)
