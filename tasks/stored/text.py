"""Language modelling: predict the next token of a text, of WikiText-103 or of one's own.

One of the benchmarks of Mittal et al. 2021, "Compositional Attention". WikiText-103: Merity et al.
2016, "Pointer Sentinel Mixture Models". Tokens are pairs of bytes, merged again and again where the
training text has them often (Sennrich et al. 2016): every text has a code, and can be had back from
it to the last byte.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tasks.batch import Batch
from tasks.cache import load_arrays, save_arrays
from tasks.common import Key, require_choice, require_int
from tasks.expressions.listops import DEFAULT_CACHE
from tasks.finite import Stream
from tasks.stored.bundled import PYTHON_HELP, write_python_help
from tasks.stored.opening import how_to_fetch, open_stored, require_splits

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_HUB = "Salesforce/wikitext"
_STORED = {"train": "train", "valid": "validation", "test": "test"}  # what Hugging Face calls them
_FILES = (".txt", ".raw", ".tokens")
_N_BYTES = 256
_SPACE = re.compile(rb"\s")
_BLOCK = 2**16  # bytes that are encoded at a time; tokens do not cross the end of a block
_BLOCKS = 64  # blocks that are encoded side by side
_CACHE_VERSION = 1  # to be raised when the same text gives other tokens


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Which text it is, and how it is cut.

    Attributes:
        name: which WikiText; the small one has the same articles in `valid` and `test`.
        path: of any other text, or of a WikiText that lies in a folder: a file, whose end is held
            out; a folder with three files (.txt, .raw, .tokens) that have train, valid and test
            in their names; or one with a data set (`save_to_disk`, parquet) with the column
            `text`. `PYTHON_HELP`: what Python's `help()` says of its language, half a megabyte,
            written there when it is first asked for. None: Hugging Face's cache, or its hub.
        held_out: share of a single file that is `valid`, and share that is `test`, above 0,
            below 0.5.
        vocabulary_size: number of tokens with the one that begins a text, 258 to 65,536; there are
            fewer if the text has no more pairs that occur twice.
        length: tokens that a model sees at once, 1 to 65,536.
        seed: chooses the windows of `train` and their order, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.
    """

    name: Literal["wikitext-103-raw-v1", "wikitext-2-raw-v1"] = "wikitext-103-raw-v1"
    path: str | None = None
    held_out: float = 0.05
    vocabulary_size: int = 16_384
    length: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        require_choice("name", self.name, ("wikitext-103-raw-v1", "wikitext-2-raw-v1"))
        if self.path is not None and (not isinstance(self.path, str) or not self.path):
            raise ValueError(f"path={self.path!r}: allowed are None and the path of a file, folder")
        number = isinstance(self.held_out, int | float) and not isinstance(self.held_out, bool)
        if not number or not 0 < self.held_out < 0.5:
            raise ValueError(
                f"held_out={self.held_out!r}: allowed is a number between 0 and 0.5, both excluded"
            )
        require_int("vocabulary_size", self.vocabulary_size, _N_BYTES + 2, 2**16)
        require_int("length", self.length, 1, 2**16)
        require_int("seed", self.seed, 0, 2**32 - 1)


class Text:
    """Windows of a text, and the next token at each of their positions.

    Splits: `train`, `valid` and `test`, as the data set has them; a single file is cut into them
    one after the other, between words. The vocabulary follows from `train`.

    Each split is one sequence: a token that begins it (`start`), then the text. In `valid` and
    `test`, windows follow one another, so each token of the text is a target exactly once; the last
    window is filled up with `start`, masked. In `train` every epoch has windows that begin
    elsewhere, in another order: they do not overlap, and leave out less than two lengths in all.

    Losses compare between vocabularies per byte or per word: the sum over a split over
    `n_bytes(split)` or `n_words(split)`.

    Args:
        config: which text it is.
        cache: folder where the vocabulary and the tokens are kept, in a file named by a hash of the
            text and the vocabulary's size; a damaged file is made again. None: they are made anew
            in every process.
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
        """The number of tokens, at most that of the config."""
        return self.start + 1

    @cached_property
    def start(self) -> int:
        """The token that begins every split; the last one of the vocabulary."""
        return self._tokenizer.get_vocab_size()

    def size(self, split: str) -> int:
        """Return the number of windows of a split: of one epoch of `train`.

        Raises:
            FileNotFoundError: the text is not there; says what to put where.
            ValueError: `split` is unknown, or the text is none, or too short for one window.
        """
        n_targets, length = self.n_tokens(split), self.config.length
        if split != "train":
            return -(-n_targets // length)
        if n_targets < 2 * length - 1:  # else some offsets would leave no window
            raise ValueError(
                f"length={length}: allowed is at most {(n_targets + 1) // 2} for the "
                f"{n_targets} tokens of the training text"
            )
        return (n_targets - length + 1) // length

    def n_tokens(self, split: str) -> int:
        """Return how many tokens a split's text has. Raises as `size` does."""
        return len(self._sequence(split)) - 1

    def n_bytes(self, split: str) -> int:
        """Return how many bytes a split's text has in UTF-8. Raises as `size` does."""
        counts = np.bincount(self._sequence(split), minlength=self.vocabulary_size)
        return int(counts @ self._token_bytes)

    def n_words(self, split: str) -> int:
        """Return how many words, separated by white space, a split's text has.

        Where perplexities of WikiText are given per word, the end of each line counts as a word
        too: add `n_lines`. Raises as `size` does.
        """
        return self._count("words", split)

    def n_lines(self, split: str) -> int:
        """Return how many line ends a split's text has. Raises as `size` does."""
        return self._count("lines", split)

    def batch(self, split: str, index: int, size: int, device: str | torch.device = "cpu") -> Batch:
        """Return batch number `index` of a split: always the same one for the same arguments.

        It holds the windows from index * size to (index + 1) * size; after the last one of `valid`
        or `test` comes the first one again.

        Args:
            split: one of `splits`.
            index: 0 to 2^40.
            size: number of windows, 1 to 2^22.
            device: where the batch shall be.

        Returns:
            A batch with
            inputs [batch, pos] int64: tokens;
            targets [batch, pos] int64: the token that comes after each of them;
            mask [batch, pos]: False behind the end of the text;
            latents (int64) `position` [batch]: how many tokens of the text come before the first
            target; `n_bytes` [batch, pos]: bytes of each target, 0 where it does not count.

        Raises:
            FileNotFoundError: the text is not there; says what to put where.
            ValueError: `split` is unknown, `index` or `size` is out of range, or the text is none
                or too short.
        """
        require_choice("split", split, self.SPLITS)
        require_int("index", index, 0, 2**40)
        require_int("size", size, 1, 2**22)
        sequence, length = self._sequence(split), self.config.length
        number = np.arange(index * size, (index + 1) * size)
        if split == "train":
            epochs, epoch = np.unique(number // self.size(split), return_inverse=True)
            offsets = [
                self._key.generator(f"/offset/{one}").integers(length) for one in epochs.tolist()
            ]
            first = self._stream.rows(index, size) * length + np.array(offsets)[epoch]
        else:
            first = number % self.size(split) * length
        place = first[:, None] + np.arange(length + 1)
        window = sequence[np.minimum(place, len(sequence) - 1)].astype(np.int64)
        window[place >= len(sequence)] = self.start
        inputs, targets = window[:, :-1].copy(), window[:, 1:].copy()
        batch = Batch(
            inputs=torch.from_numpy(inputs),
            targets=torch.from_numpy(targets),
            mask=torch.from_numpy(place[:, 1:] < len(sequence)),
            latents={
                "position": torch.from_numpy(first),
                "n_bytes": torch.from_numpy(self._token_bytes[targets]),
            },
        )
        return batch if torch.device(device).type == "cpu" else batch.to(device)

    def score(
        self, logits: Float[Tensor, "batch pos token"], batch: Batch
    ) -> dict[str, Float[Tensor, "batch pos"]]:
        """Return how well the targets are predicted.

        Args:
            logits: [batch, pos, vocabulary_size].
            batch: the batch that they answer.

        Returns:
            `loss` [batch, pos], in nats, and `correct` [batch, pos], 1 where the most probable
            token is the target, else 0; both are 0 where the mask is False.

        Raises:
            ValueError: `logits` has another shape.
        """
        expected = (*batch.targets.shape, self.vocabulary_size)
        if tuple(logits.shape) != expected:
            raise ValueError(f"logits of shape {tuple(logits.shape)}: allowed is {expected}")
        loss = nn.functional.cross_entropy(logits.mT, batch.targets, reduction="none")
        correct = (logits.argmax(-1) == batch.targets) & batch.mask
        return {"loss": loss.where(batch.mask, 0), "correct": correct.float()}

    def figures(
        self, logits: Float[Tensor, "batch pos token"], batch: Batch, split: str
    ) -> dict[str, tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]]:
        """Return what the usual figures of merit are ratios of: two numbers of each window.

        Of some windows together a figure is the sum of the first numbers over that of the second
        ones. Words are counted with the ends of lines, as WikiText's perplexities have it; of a
        split's words a window has a share by its bytes.

        Args:
            logits: [batch, pos, vocabulary_size].
            batch: the batch that they answer.
            split: which split it is from.

        Returns:
            `loss`, nats per token; `accuracy`, the share of tokens that are the most probable one;
            `bits_per_byte`; and, in nats, the logarithms of `perplexity`, that per word, and of
            `token_perplexity`.

        Raises:
            ValueError: `logits` has another shape, or `split` is unknown.
        """
        found = self.score(logits, batch)
        loss, right = found["loss"].sum(1), found["correct"].sum(1)
        tokens = batch.mask.sum(1).float()
        n_bytes = (batch.latents["n_bytes"] * batch.mask).sum(1).float()
        return {
            "loss": (loss, tokens),
            "accuracy": (right, tokens),
            "bits_per_byte": (loss / math.log(2), n_bytes),
            "perplexity": (loss, n_bytes * (self._words_and_lines(split) / self.n_bytes(split))),
            "token_perplexity": (loss, tokens),
        }

    def baseline_figures(self, split: str) -> dict[str, float]:
        """Return the figures of `figures`, but the accuracy, of what `baseline` predicts.

        Of the perplexities, themselves. Raises as `size` does.
        """
        mean = self.baseline(split)
        total = mean * self.n_tokens(split)
        return {
            "loss": mean,
            "bits_per_byte": total / math.log(2) / self.n_bytes(split),
            "perplexity": math.exp(total / self._words_and_lines(split)),
            "token_perplexity": math.exp(mean),
        }

    def baseline(self, split: str) -> float:
        """Return the mean loss, in nats per token, of predicting how often each occurs in `train`.

        Each token counts once more than it occurs. Raises as `size` does.
        """
        known, asked = (
            np.bincount(self._sequence(one)[1:], minlength=self.vocabulary_size)
            for one in ("train", split)
        )
        return float(asked @ -np.log((known + 1) / (known + 1).sum()) / asked.sum())

    def decode(self, ids: Iterable[int] | Int[Tensor, " token"]) -> str:
        """Return what tokens say; `start` says nothing, a part of a character U+FFFD.

        Raises:
            ValueError: a token is not in the vocabulary.
        """
        plain = [int(one) for one in ids]
        for one in plain:
            require_int("ids", one, 0, self.start)
        return self._tokenizer.decode([one for one in plain if one != self.start])

    @cached_property
    def _stream(self) -> Stream:
        return Stream([np.arange(self.size("train"))], self._key)

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        from tokenizers import Tokenizer

        return Tokenizer.from_buffer(self._arrays["tokenizer"].tobytes())

    @cached_property
    def _token_bytes(self) -> Int[np.ndarray, " token"]:
        """How many bytes each token has: in the vocabulary, a character stands for a byte."""
        known = self._tokenizer.get_vocab()
        lengths = np.zeros(self.vocabulary_size, np.int64)  # `start` has none
        lengths[list(known.values())] = [len(one) for one in known]
        return lengths

    def _sequence(self, split: str) -> Int[np.ndarray, " token"]:
        """The tokens of a split, the first one `start`."""
        require_choice("split", split, self.SPLITS)
        return self._arrays[split]

    def _words_and_lines(self, split: str) -> int:
        return self.n_words(split) + self.n_lines(split)

    def _count(self, what: str, split: str) -> int:
        require_choice("split", split, self.SPLITS)
        return int(self._arrays[what][self.SPLITS.index(split)])

    @cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        """What is cached: `tokenizer`, each split's tokens, counts of `words` and `lines`."""
        texts = self._read()
        for split, text in texts.items():
            if not text:
                raise ValueError(f"the text of {split} is empty: {self.config}")
        if self._cache is None:
            return self._encode(texts)
        digest = hashlib.sha256(f"{self.config.vocabulary_size}".encode())
        for text in texts.values():
            digest.update(hashlib.sha256(text).digest())
        path = self._cache / f"text-{digest.hexdigest()[:16]}-v{_CACHE_VERSION}.npz"
        arrays = load_arrays(path)
        if arrays is None:
            arrays = self._encode(texts)
            save_arrays(arrays, path)
        return arrays

    def _encode(self, texts: dict[str, bytes]) -> dict[str, np.ndarray]:
        tokenizer = _learn(texts["train"], self.config.vocabulary_size - 1)
        start = tokenizer.get_vocab_size()
        arrays: dict[str, np.ndarray] = {
            split: np.concatenate([np.array([start], np.uint16), *_codes(text, tokenizer)])
            for split, text in texts.items()
        }
        arrays["tokenizer"] = np.frombuffer(tokenizer.to_str().encode(), np.uint8)
        words = [sum(len(block.split()) for block in _blocks(texts[one])) for one in self.SPLITS]
        arrays["words"] = np.array(words)
        arrays["lines"] = np.array([texts[one].count(b"\n") for one in self.SPLITS])
        return arrays

    def _read(self) -> dict[str, bytes]:
        """Return the text of each split."""
        path = None if self.config.path is None else Path(self.config.path).expanduser()
        if path is not None and self.config.path == PYTHON_HELP:
            write_python_help(path)
        if path is not None and path.is_file():
            text = path.read_bytes()
            ends = [
                _word_end(text, round(len(text) * (1 - self.config.held_out * parts)))
                for parts in (2, 1)
            ]
            pieces = (text[: ends[0]], text[ends[0] : ends[1]], text[ends[1] :])
            return dict(zip(self.SPLITS, pieces, strict=True))
        if path is not None and (files := _plain_files(path)):
            return {split: file.read_bytes() for split, file in files.items()}
        name = self.config.name
        if path is not None and not path.exists():
            raise FileNotFoundError(
                f"path={self.config.path!r}: there is nothing. Put there a text file, a folder "
                f"with three of them ({', '.join(_FILES)}) with train, valid and test in their "
                f"names, or a data set; for {name}, {how_to_fetch(_HUB, name, str(path))}"
            )
        stored = open_stored(
            name, folder=path, setting="path", place="FOLDER", hub=_HUB, subset=name
        )
        require_splits(name if path is None else str(path), stored, _STORED.values())
        return {
            split: b"".join(
                # Hugging Face's copy has lines without an end where they are empty.
                (line.removesuffix("\n") + "\n").encode()
                for rows in stored[theirs].iter(batch_size=1000)
                for line in rows["text"]
            )
            for split, theirs in _STORED.items()
        }


@dataclass(frozen=True)
class _Windows:
    """What decides on the windows of `train`."""

    length: int
    seed: int


def _plain_files(folder: Path) -> dict[str, Path] | None:
    """Return the file of each split, or None if the folder has no such files.

    Raises:
        ValueError: for a split there is none, or there are several.
    """
    if not folder.is_dir():
        return None
    files = sorted(file for file in folder.iterdir() if file.suffix in _FILES)
    if not files:
        return None
    found = {}
    for split in Text.SPLITS:
        mine = [file for file in files if split in file.name]
        if len(mine) != 1:
            raise ValueError(
                f"{folder} has the texts {', '.join(file.name for file in files)}: allowed is one "
                f"with {split!r} in its name, there are {len(mine)}"
            )
        found[split] = mine[0]
    return found


def _word_end(text: bytes, place: int) -> int:
    """Return where the first white space from `place` on stands, or else where the text ends."""
    found = _SPACE.search(text, place)
    return found.start() if found else len(text)


def _blocks(text: bytes) -> Iterator[str]:
    """Cut a text into pieces that end where words end."""
    begin = 0
    while begin < len(text):
        end = _word_end(text, begin + _BLOCK)
        try:
            yield text[begin:end].decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"the text is not UTF-8 from byte {begin} on: {error}") from error
        begin = end


def _learn(text: bytes, size: int) -> "Tokenizer":
    """Return a vocabulary of at most `size` tokens that fits a text."""
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
    tokenizer.train_from_iterator(_blocks(text), trainer)
    return tokenizer


def _codes(text: bytes, tokenizer: "Tokenizer") -> Iterator[Int[np.ndarray, " token"]]:
    blocks = _blocks(text)
    while some := list(islice(blocks, _BLOCKS)):
        for encoding in tokenizer.encode_batch_fast(some, add_special_tokens=False):
            yield np.array(encoding.ids, np.uint16)
