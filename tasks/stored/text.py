"""Language modelling: predict the next token of WikiText-103 or of any other text.

One of the benchmarks of Mittal et al. 2021, "Compositional Attention". WikiText-103: Merity et al.
2016, "Pointer Sentinel Mixture Models". Tokens are byte pairs (Sennrich et al. 2016), which encode
every text without loss, or words; both are learned from the training text.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tasks.batch import Batch
from tasks.cache import DEFAULT_CACHE, load_arrays, save_arrays
from tasks.common import Key, require_choice, require_int, require_path, require_shape
from tasks.finite import Stream
from tasks.stored.bundled import (
    PACKAGE_DOCS,
    PYTHON_HELP,
    write_package_docs,
    write_python_help,
)
from tasks.stored.opening import how_to_fetch, open_stored, require_splits
from tasks.stored.tokens import (
    LINE_END,
    blocks_of,
    encode_text,
    learn_byte_pairs,
    learn_word_tokens,
    word_end,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_HUB = "Salesforce/wikitext"
_STORED = {"train": "train", "valid": "validation", "test": "test"}  # names on the hub
_FILES = (".txt", ".raw", ".tokens")
_NAMES = tuple(f"wikitext-{size}{kind}-v1" for kind in ("-raw", "") for size in (103, 2))
_N_BYTES = 256
_CACHE_VERSION = 1  # to be increased when the same text gives other tokens


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Settings of language modelling.

    Attributes:
        name: the version of WikiText: of 103 or 2 million words, with the same `valid` and `test`;
            `raw`, or with rare words replaced by `<unk>` and the spacing of published word-level
            perplexities (`wikitext-103-v1`).
        path: a file, whose end is held out; a folder with three files (.txt, .raw, .tokens) that
            have train, valid and test in their names; or a folder with a data set (`save_to_disk`,
            parquet) with the column `text`. `PYTHON_HELP`: the topics of Python's `help()`, half a
            megabyte; `PACKAGE_DOCS`: the documentation of four scientific packages, 12 megabytes;
            they are written there on first use. None: WikiText from Hugging Face's cache or hub.
        held_out: share of a single file for each of `valid` and `test`, above 0 and below 0.5.
        tokens: `byte_pairs`, or `words`: what white space separates, and line ends.
        vocabulary_size: number of tokens with the start token, at most 2^24 and at least 258, with
            words 3; smaller if fewer byte pairs occur twice, or there are fewer words. Other words
            are one token, `<unk>`.
        length: tokens of a window, 1 to 65,536.
        context: the first tokens of a window of `valid` and `test` that only give context, 0 to
            length - 1; each token is a target once, after as much context, or all that there is.
        seed: seeds the windows of `train` and their order, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> _ = Path("notes.txt").write_text("to be or not to be\\n" * 100)
        >>> config = TextConfig(path="notes.txt", tokens="words", vocabulary_size=10, length=8)
        >>> task = Text(config, cache=None)
        >>> task.vocabulary_size  # four words, the line end, `<unk>` and the start token
        7
        >>> task.batch("train", 0, 4).inputs.shape  # [batch, length]
        torch.Size([4, 8])
    """

    name: Literal[
        "wikitext-103-raw-v1", "wikitext-2-raw-v1", "wikitext-103-v1", "wikitext-2-v1"
    ] = "wikitext-103-raw-v1"
    path: str | None = None
    held_out: float = 0.05
    tokens: Literal["byte_pairs", "words"] = "byte_pairs"
    vocabulary_size: int = 16_384
    length: int = 256
    context: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        require_choice("name", self.name, _NAMES)
        require_choice("tokens", self.tokens, ("byte_pairs", "words"))
        require_path("path", self.path)
        is_number = isinstance(self.held_out, int | float) and not isinstance(self.held_out, bool)
        if not is_number or not 0 < self.held_out < 0.5:
            raise ValueError(
                f"held_out must be a number above 0 and below 0.5, got {self.held_out!r}"
            )
        least = 3 if self.tokens == "words" else _N_BYTES + 2
        require_int("vocabulary_size", self.vocabulary_size, least, 2**24)
        require_int("length", self.length, 1, 2**16)
        require_int("context", self.context, 0, self.length - 1)
        require_int("seed", self.seed, 0, 2**32 - 1)


class Text:
    """Windows of a text, with the next token at each position.

    Splits: `train`, `valid` and `test`, as in the data set; a single file is cut into them in this
    order, between words. The vocabulary is learned from `train`.

    Each split is one sequence: the start token (`start`), then the text. In `valid` and `test`,
    windows are consecutive, so each token of the text is a target exactly once (with `context`,
    windows overlap, and targets that are only context are masked); the last window is padded with
    `start`, masked. In `train` every epoch has a new random offset and order of the
    windows, which do not overlap; fewer than two windows' tokens are left out.

    Losses are comparable between vocabularies per byte or per word: the sum over a split divided by
    `n_bytes(split)` or `n_words(split)`.

    Args:
        config: the settings.
        cache: folder of the cached vocabulary and tokens, in a file named by a hash of the text and
            the vocabulary's size; a damaged file is replaced. None: they are recomputed in every
            process.

    Example:
        >>> Text(TextConfig(path=PYTHON_HELP, vocabulary_size=2000)).batch("train", 0, 8)
    """

    SPLITS: ClassVar = ("train", "valid", "test")

    def __init__(self, config: TextConfig, *, cache: Path | None = DEFAULT_CACHE) -> None:
        self.config = config
        self._cache = cache
        self._key = Key(_Windows(config.length, config.seed))

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits."""
        return self.SPLITS

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens, at most that of the config."""
        return self.start + 1

    @cached_property
    def start(self) -> int:
        """The start token of every split; the last id of the vocabulary."""
        return self._tokenizer.get_vocab_size()

    def size(self, split: str) -> int:
        """Return the number of windows of a split; for `train`, of one epoch.

        Raises:
            FileNotFoundError: the text is missing; says what to put where.
            ValueError: `split` is unknown, or the text is not UTF-8 or too short for a window.
        """
        n_targets, length = self.n_tokens(split), self.config.length
        if split != "train":
            return -(-n_targets // (length - self.config.context))
        if n_targets < 2 * length - 1:  # some offsets would leave no window
            raise ValueError(
                f"length must be at most {(n_targets + 1) // 2} for the {n_targets} tokens of the "
                f"training text, got {length}"
            )
        return (n_targets - length + 1) // length

    def n_tokens(self, split: str) -> int:
        """Return the number of tokens of a split's text. Raises as `size` does."""
        return len(self._sequence(split)) - 1

    def n_bytes(self, split: str) -> int:
        """Return the number of bytes of a split's text in UTF-8. Raises as `size` does.

        With words: of the words, `<unk>` for unknown ones, with one byte each for what separates
        them, and of the line ends.
        """
        counts = np.bincount(self._sequence(split), minlength=self.vocabulary_size)
        return int(counts @ self._token_bytes)

    def n_words(self, split: str) -> int:
        """Return the number of words, separated by white space, of a split's text.

        Published perplexities of WikiText per word count each line end as a word: add `n_lines`.
        Raises as `size` does.
        """
        return self._count("words", split)

    def n_lines(self, split: str) -> int:
        """Return the number of line ends of a split's text. Raises as `size` does."""
        return self._count("lines", split)

    def batch(self, split: str, index: int, size: int, device: str | torch.device = "cpu") -> Batch:
        """Return batch `index` of a split, a pure function of text, config and arguments.

        It has the windows from index * size to (index + 1) * size; `valid` and `test` start again
        at their end.

        Args:
            split: one of `splits`.
            index: 0 to 2^41.
            size: number of windows, 1 to 2^21.
            device: the device of the batch.

        Returns:
            A batch with
            inputs [batch, pos] int64: tokens;
            targets [batch, pos] int64: the next token of each input token;
            mask [batch, pos]: False after the end of the text, and for targets that are context;
            latents (int64) `position` [batch]: the position of the first target in the text;
            `n_bytes` [batch, pos]: bytes of each target, 0 where it is masked.

        Raises:
            FileNotFoundError: the text is missing; says what to put where.
            ValueError: `split` is unknown, `index` or `size` is out of range, or the text is not
                UTF-8 or too short.
        """
        require_choice("split", split, self.SPLITS)
        require_int("index", index, 0, 2**41)
        require_int("size", size, 1, 2**21)
        sequence, length, context = self._sequence(split), self.config.length, self.config.context
        number = np.arange(index * size, (index + 1) * size)
        if split == "train":
            epochs, epoch_index = np.unique(number // self.size(split), return_inverse=True)
            offsets = [
                self._key.generator(f"/offset/{epoch}").integers(length)
                for epoch in epochs.tolist()
            ]
            first = self._stream.rows(index, size) * length + np.array(offsets)[epoch_index]
            counted, n_counted = first, length
        else:
            n_counted = length - context
            counted = number % self.size(split) * n_counted
            first = np.maximum(counted - context, 0)
        position = first[:, None] + np.arange(length + 1)
        window = sequence[np.minimum(position, len(sequence) - 1)].astype(np.int64)
        window[position >= len(sequence)] = self.start
        inputs, targets = window[:, :-1].copy(), window[:, 1:].copy()
        # The target of the input at position p is token p of the text, which `start` precedes.
        turn = position[:, :-1] - counted[:, None]
        mask = (turn >= 0) & (turn < n_counted) & (position[:, 1:] < len(sequence))
        batch = Batch(
            inputs=torch.from_numpy(inputs),
            targets=torch.from_numpy(targets),
            mask=torch.from_numpy(mask),
            latents={
                "position": torch.from_numpy(first),
                "n_bytes": torch.from_numpy(np.where(mask, self._token_bytes[targets], 0)),
            },
        )
        return batch if torch.device(device).type == "cpu" else batch.to(device)

    def score(
        self, logits: Float[Tensor, "batch pos token"], batch: Batch
    ) -> dict[str, Float[Tensor, "batch pos"]]:
        """Return loss and accuracy of each prediction.

        Args:
            logits: [batch, pos, vocabulary_size].
            batch: the batch that was answered.

        Returns:
            `loss` [batch, pos], in nats, and `correct` [batch, pos], 1 where the most probable
            token is the target, else 0; both are 0 where the mask is False.

        Raises:
            ValueError: `logits` has another shape.
        """
        require_shape("logits", logits, (*batch.targets.shape, self.vocabulary_size))
        loss = nn.functional.cross_entropy(logits.mT, batch.targets, reduction="none")
        correct = (logits.argmax(-1) == batch.targets) & batch.mask
        return {"loss": loss.where(batch.mask, 0), "correct": correct.float()}

    def figures(
        self, logits: Float[Tensor, "batch pos token"], batch: Batch, split: str
    ) -> dict[str, tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]]:
        """Return the numerator and the denominator of each metric, for each window.

        The metric of several windows is the sum of the numerators over the sum of the denominators.
        Words are counted with line ends, as in WikiText's published perplexities; a window has a
        share of the split's words in proportion to its bytes.

        Args:
            logits: [batch, pos, vocabulary_size].
            batch: the batch that was answered.
            split: the split of the batch.

        Returns:
            `loss`, nats per token; `accuracy`, the share of tokens that are predicted correctly;
            `bits_per_byte`; and, in nats, the logarithms of `perplexity`, which is per word, and of
            `token_perplexity`.

        Raises:
            ValueError: `logits` has another shape, or `split` is unknown.
        """
        scores = self.score(logits, batch)
        loss, n_correct = scores["loss"].sum(1), scores["correct"].sum(1)
        n_tokens = batch.mask.sum(1).float()
        n_bytes = (batch.latents["n_bytes"] * batch.mask).sum(1).float()
        return {
            "loss": (loss, n_tokens),
            "accuracy": (n_correct, n_tokens),
            "bits_per_byte": (loss / math.log(2), n_bytes),
            "perplexity": (loss, n_bytes * (self._words_and_lines(split) / self.n_bytes(split))),
            "token_perplexity": (loss, n_tokens),
        }

    def baseline_figures(self, split: str) -> dict[str, float]:
        """Return the metrics of `figures` but the accuracy, for the predictions of `baseline`.

        Perplexities are not logarithms. Raises as `size` does.
        """
        loss = self.baseline(split)
        total = loss * self.n_tokens(split)
        return {
            "loss": loss,
            "bits_per_byte": total / math.log(2) / self.n_bytes(split),
            "perplexity": math.exp(total / self._words_and_lines(split)),
            "token_perplexity": math.exp(loss),
        }

    def baseline(self, split: str) -> float:
        """Return the mean loss, in nats per token, of predicting the token frequencies of `train`.

        Frequencies are smoothed by adding 1 to each count. Raises as `size` does.
        """
        train_counts, counts = (
            np.bincount(self._sequence(name)[1:], minlength=self.vocabulary_size)
            for name in ("train", split)
        )
        probabilities = (train_counts + 1) / (train_counts + 1).sum()
        return float(counts @ -np.log(probabilities) / counts.sum())

    def decode(self, ids: Iterable[int] | Int[Tensor, " token"]) -> str:
        """Return the text of tokens; `start` is skipped, incomplete characters become U+FFFD.

        Words are separated by spaces, from line ends, too.

        Raises:
            ValueError: a token is not in the vocabulary.
        """
        tokens = [int(token) for token in ids]
        for token in tokens:
            require_int("ids", token, 0, self.start)
        known = [token for token in tokens if token != self.start]
        return self._tokenizer.decode(known, skip_special_tokens=False)

    @cached_property
    def _stream(self) -> Stream:
        return Stream([np.arange(self.size("train"))], self._key)

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        from tokenizers import Tokenizer

        return Tokenizer.from_buffer(self._arrays["tokenizer"].tobytes())

    @cached_property
    def _token_bytes(self) -> Int[np.ndarray, " token"]:
        """The number of bytes of each token."""
        ids = self._tokenizer.get_vocab()
        n_bytes = np.zeros(self.vocabulary_size, np.int64)  # `start` has none
        if self.config.tokens == "words":
            sizes = [len(token.encode()) + (token != LINE_END) for token in ids]
        else:  # in the vocabulary, a character stands for a byte
            sizes = [len(token) for token in ids]
        n_bytes[list(ids.values())] = sizes
        return n_bytes

    def _sequence(self, split: str) -> Int[np.ndarray, " token"]:
        """Return the tokens of a split, beginning with `start`."""
        require_choice("split", split, self.SPLITS)
        return self._arrays[split]

    def _words_and_lines(self, split: str) -> int:
        return self.n_words(split) + self.n_lines(split)

    def _count(self, unit: str, split: str) -> int:
        require_choice("split", split, self.SPLITS)
        return int(self._arrays[unit][self.SPLITS.index(split)])

    @cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        """The cached arrays: `tokenizer`, each split's tokens, counts of `words` and `lines`."""
        texts = self._read()
        for split, text in texts.items():
            if not text:
                raise ValueError(f"the text of {split} must not be empty, got {self.config}")
        if self._cache is None:
            return self._encode(texts)
        kind = "" if self.config.tokens == "byte_pairs" else self.config.tokens
        digest = hashlib.sha256(f"{kind}{self.config.vocabulary_size}".encode())
        for text in texts.values():
            digest.update(hashlib.sha256(text).digest())
        path = self._cache / f"text-{digest.hexdigest()[:16]}-v{_CACHE_VERSION}.npz"
        arrays = load_arrays(path)
        if arrays is None:
            arrays = self._encode(texts)
            save_arrays(arrays, path)
        return arrays

    def _encode(self, texts: dict[str, bytes]) -> dict[str, np.ndarray]:
        learn = learn_word_tokens if self.config.tokens == "words" else learn_byte_pairs
        tokenizer = learn(texts["train"], self.config.vocabulary_size - 1)
        start = tokenizer.get_vocab_size()
        arrays: dict[str, np.ndarray] = {
            split: encode_text(text, tokenizer, start=start) for split, text in texts.items()
        }
        arrays["tokenizer"] = np.frombuffer(tokenizer.to_str().encode(), np.uint8)
        words = [
            sum(len(block.split()) for block in blocks_of(texts[split])) for split in self.SPLITS
        ]
        arrays["words"] = np.array(words)
        arrays["lines"] = np.array([texts[split].count(b"\n") for split in self.SPLITS])
        return arrays

    def _read(self) -> dict[str, bytes]:
        """Return the text of each split."""
        path = None if self.config.path is None else Path(self.config.path).expanduser()
        writers = {PYTHON_HELP: write_python_help, PACKAGE_DOCS: write_package_docs}
        if path is not None and self.config.path in writers:
            writers[str(self.config.path)](path)
        if path is not None and path.is_file():
            text = path.read_bytes()
            ends = [
                word_end(text, round(len(text) * (1 - self.config.held_out * n_parts)))
                for n_parts in (2, 1)
            ]
            parts = (text[: ends[0]], text[ends[0] : ends[1]], text[ends[1] :])
            return dict(zip(self.SPLITS, parts, strict=True))
        if path is not None and (files := _plain_files(path)):
            return {split: file.read_bytes() for split, file in files.items()}
        name = self.config.name
        if path is not None and not path.exists():
            raise FileNotFoundError(
                f"path must exist, got {self.config.path!r}. Put there a text file, a folder with "
                f"three text files ({', '.join(_FILES)}) with train, valid and test in their "
                f"names, or a data set; for {name}, {how_to_fetch(_HUB, name, str(path))}"
            )
        stored = open_stored(
            name, folder=path, setting="path", place="FOLDER", hub=_HUB, subset=name
        )
        require_splits(name if path is None else str(path), stored, _STORED.values())
        return {
            split: b"".join(
                # On the hub, empty lines have no line end.
                (line.removesuffix("\n") + "\n").encode()
                for rows in stored[stored_split].iter(batch_size=1000)
                for line in rows["text"]
            )
            for split, stored_split in _STORED.items()
        }


@dataclass(frozen=True)
class _Windows:
    """The settings that determine the windows of `train`."""

    length: int
    seed: int


def _plain_files(folder: Path) -> dict[str, Path] | None:
    """Return the file of each split, or None if the folder has no such files.

    Raises:
        ValueError: a split has no file, or several.
    """
    if not folder.is_dir():
        return None
    files = sorted(file for file in folder.iterdir() if file.suffix in _FILES)
    if not files:
        return None
    file_of_split = {}
    for split in Text.SPLITS:
        matches = [file for file in files if split in file.name]
        if len(matches) != 1:
            raise ValueError(
                f"{folder} must have one text with {split!r} in its name, got {len(matches)} of "
                f"{', '.join(file.name for file in files)}"
            )
        file_of_split[split] = matches[0]
    return file_of_split
