"""Sequence to sequence from stored texts: translation, programs from descriptions.

IWSLT'15 (Cettolo et al. 2015), English and Vietnamese, and AlgoLisp (Polosukhin, Skidanov 2018),
benchmarks of Tay et al. 2019, "CoDA"; and any other data set of the same format. Tokens are byte
pairs, as in `Text`, of one vocabulary for source and target.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tasks.algolisp.interpreter import write_program
from tasks.answers import score_sequence
from tasks.batch import Batch
from tasks.common import Key, SeedConfig, require_choice, require_int
from tasks.finite import ExampleSet
from tasks.finite_task import FiniteTask
from tasks.stored.labelled_files import describe_files, split_files
from tasks.stored.published import read_json_lines, read_lines
from tasks.stored.tokens import learn_byte_pairs

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PAD, _BOS, _EOS = range(3)
_N_SPECIAL = 3
_N_BYTES = 256
SPLIT_FILES = {
    "train": ("train",),
    "valid": ("dev", "valid", "validation", "tst2012"),
    "test": ("test", "tst2013"),
}
"""What the names of the files of each split contain."""


@dataclass(frozen=True, kw_only=True)
class SequencesConfig:
    """Settings of a sequence-to-sequence data set.

    Attributes:
        path: a folder with files whose names contain train, dev (or tst2012) and test (or tst2013):
            a .jsonl file for each split, or two files of equal numbers of lines, one for each side.
        source: of .jsonl files, the field of the source (AlgoLisp: "text"); of other files, their
            suffix (IWSLT'15: "en" or "vi").
        target: the same for the target (AlgoLisp: "short_tree").
        vocabulary_size: number of tokens with the three special ones, 259 to 65,536; smaller if
            fewer byte pairs occur twice.
        max_length: tokens of a text with its end token, 1 to 10^4; examples with a longer source or
            target are left out.
        seed: seeds the order, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> config = SequencesConfig(path="algolisp", source="text", target="short_tree")
        >>> task = Sequences(config)
        >>> task.decode(task.batch("test", 0, 1).targets[0])
        'reduce a 0 +'
    """

    path: str
    source: str
    target: str
    vocabulary_size: int = 8_192
    max_length: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("path", "source", "target"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name} must be a non-empty string, got {value!r}")
        if self.source == self.target:
            raise ValueError(f"target must differ from source, got {self.target!r}")
        require_int("vocabulary_size", self.vocabulary_size, _N_BYTES + _N_SPECIAL, 2**16)
        require_int("max_length", self.max_length, 1, 10**4)
        require_int("seed", self.seed, 0, 2**32 - 1)


class Sequences(FiniteTask[tuple[Tensor, Tensor]]):
    """Sequence to sequence: source texts with target texts.

    Splits: `train`, `valid` and `test`, as in the data set; the vocabulary is learned from sources
    and targets of `train`. A field of a .jsonl file may be a string or nested lists of words, which
    are joined by spaces, with parentheses around inner lists.

    A batch has (token ids int64, padded with 0 to the greatest length of the split)
    inputs: the source [batch, source_pos]; and, for teacher forcing, the begin token 1 and the
    target [batch, target_pos];
    targets [batch, target_pos]: the target and the end token 2;
    mask [batch, target_pos]: True for the target and the end token;
    latents, each [batch] int64: `source_length` and `target_length`, numbers of tokens; `row`: the
    number of the line in the file.

    The files are read on first use.

    Raises:
        FileNotFoundError: on first use, if the files are missing: says what to fetch and where to
            put it.
        ValueError: on first use, if the files have another format, or all examples of a split are
            too long.

    Example:
        >>> config = SequencesConfig(path="algolisp", source="text", target="short_tree")
        >>> source, target = Sequences(config).batch("test", 0, 1).inputs
        >>> target[0, 0]  # the target begins with the begin token
        tensor(1)
    """

    SPLITS: ClassVar = ("train", "valid", "test")

    def __init__(self, config: SequencesConfig) -> None:
        super().__init__(key=Key(SeedConfig(config.seed)))
        self.config = config

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids of source and target, at most that of the config."""
        return _N_SPECIAL + self._tokenizer.get_vocab_size()

    def n_left_out(self, split: str) -> int:
        """Return the number of examples of a split that are too long.

        Raises:
            ValueError: `split` is unknown.
        """
        return len(self._texts(split)[0]) - self.size(split)

    def decode(self, ids: Int[Tensor, " pos"]) -> str:
        """Return the text of the tokens before the first end token.

        Args:
            ids: below `vocabulary_size`; padding and begin tokens are skipped.
        """
        tokens = ids.tolist()
        end = tokens.index(_EOS) if _EOS in tokens else len(tokens)
        return self._tokenizer.decode(
            [token - _N_SPECIAL for token in tokens[:end] if token > _EOS]
        )

    def words(
        self, batch: Batch[tuple[Tensor, Tensor]], example: int
    ) -> tuple[list[str], list[str]]:
        """Return the tokens of the target and the source of one example, "" for padding.

        They label the queries and the keys of attention from the target to the source. `<eos>`
        ends the target.
        """

        def word(token: int) -> str:
            if token < _N_SPECIAL:
                return "<eos>" if token == _EOS else ""
            return self._tokenizer.decode([token - _N_SPECIAL])

        sides = (batch.targets, batch.inputs[0])
        target, source = ([word(token) for token in ids[example].tolist()] for ids in sides)
        return target, source

    score = staticmethod(score_sequence)

    @cached_property
    def _files(self) -> dict[str, tuple[Path, ...]]:
        """The file of each split, or its source and its target file."""
        config = self.config
        folder = Path(config.path).expanduser()
        if folder.is_dir():
            if files := split_files(folder, ".jsonl", SPLIT_FILES):
                return {split: (file,) for split, file in files.items()}
            sides = [
                split_files(folder, f".{suffix}", SPLIT_FILES)
                for suffix in (config.source, config.target)
            ]
            if sides[0] and sides[1]:
                return {split: (sides[0][split], sides[1][split]) for split in self.SPLITS}
        raise FileNotFoundError(
            f"path must be a folder with .jsonl files or files that end with .{config.source} and "
            f".{config.target}, got {config.path!r}. For translation, fetch for example IWSLT'15 "
            "from https://nlp.stanford.edu/projects/nmt (train, tst2012 and tst2013, each .en and "
            ".vi), for AlgoLisp metaset3.train.jsonl, .dev.jsonl and .test.jsonl from "
            "https://github.com/nearai/program_synthesis, unpacked; and put there "
            f"{describe_files('.jsonl (or two)', SPLIT_FILES)}"
        )

    def _texts(self, split: str) -> tuple[list[str], list[str]]:
        require_choice("split", split, self.SPLITS)
        return self._read[split]

    @cached_property
    def _read(self) -> dict[str, tuple[list[str], list[str]]]:
        names = (self.config.source, self.config.target)
        texts = {}
        for split, files in self._files.items():
            if len(files) == 1:
                rows = [
                    _fields(location, row, names) for location, row in read_json_lines(files[0])
                ]
                texts[split] = ([row[0] for row in rows], [row[1] for row in rows])
                continue
            source, target = ([line for _, line in read_lines(file)] for file in files)
            if len(source) != len(target):
                raise ValueError(
                    f"{files[0]} and {files[1]} must have equally many lines, got {len(source)} "
                    f"and {len(target)}"
                )
            texts[split] = (source, target)
        return texts

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        text = "\n".join(line for side in self._texts("train") for line in side)
        return learn_byte_pairs(text.encode(), self.config.vocabulary_size - _N_SPECIAL)

    def _make(self, split: str) -> ExampleSet[tuple[Tensor, Tensor]]:
        sides = [
            [
                [token + _N_SPECIAL for token in encoding.ids]
                for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            ]
            for texts in self._texts(split)
        ]
        lengths = np.array([[len(tokens) for tokens in side] for side in sides])
        rows = np.flatnonzero((lengths < self.config.max_length).all(0))
        if not len(rows):
            raise ValueError(
                f"max_length must be at least {lengths.max(0).min() + 1}, the length of the "
                f"shortest example of {split}, got {self.config.max_length!r}"
            )
        if split != "train":
            rows = self._key.generator(f"/order/{split}").permutation(rows)
        source, target = ([side[row] for row in rows] for side in sides)
        width = lengths[1, rows].max() + 1
        targets = _padded([[*tokens, _EOS] for tokens in target], width)
        return ExampleSet(
            inputs=(
                _padded(source, max(1, lengths[0, rows].max())),
                _padded([[_BOS, *tokens] for tokens in target], width),
            ),
            targets=targets,
            mask=targets != _PAD,
            latents={
                "source_length": torch.from_numpy(lengths[0, rows]),
                "target_length": torch.from_numpy(lengths[1, rows]),
                "row": torch.from_numpy(rows),
            },
        )

    def _groups(self, train: ExampleSet[tuple[Tensor, Tensor]]) -> list[Int[np.ndarray, " member"]]:
        return [np.arange(len(train))]


def _fields(location: str, row: dict[str, Any], names: tuple[str, str]) -> list[str]:
    for name in names:
        if name not in row:
            raise ValueError(
                f"{location} must have the field {name!r}, got the fields {', '.join(row)}"
            )
    return [
        " ".join(write_program(row[name])) if isinstance(row[name], list) else str(row[name])
        for name in names
    ]


def _padded(rows: list[list[int]], width: int) -> Int[Tensor, "n width"]:
    padded = torch.full((len(rows), width), _PAD, dtype=torch.int32)
    for row, tokens in zip(padded.numpy(), rows, strict=True):
        row[: len(tokens)] = tokens
    return padded
