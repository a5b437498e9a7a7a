"""From one text to another, as others have stored them: translation, programs from descriptions.

IWSLT'15 (Cettolo et al. 2015), English and Vietnamese, and AlgoLisp (Polosukhin, Skidanov 2018),
benchmarks of Tay et al. 2019, "CoDA"; and any other data set of the same form. Tokens are pairs of
bytes, as in `Text`, of one vocabulary for both sides.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tasks.answers import score_sequence
from tasks.batch import Batch
from tasks.common import Key, require_choice, require_int
from tasks.finite import ExampleSet
from tasks.finite_task import FiniteTask
from tasks.stored.labelled_files import names_wanted, read_json_lines, read_lines, split_files
from tasks.stored.text import _learn as learn_byte_pairs

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PAD, _BOS, _EOS = range(3)
_N_MARKS = 3
_N_BYTES = 256
_FILES = {
    "train": ("train",),
    "valid": ("dev", "valid", "validation", "tst2012"),
    "test": ("test", "tst2013"),
}


@dataclass(frozen=True, kw_only=True)
class SequencesConfig:
    """Which texts they are, and how they are cut.

    Attributes:
        path: of a folder with files whose names have train, dev (or tst2012) and test (or tst2013)
            in them: a .jsonl file for each split, or two files with as many lines, one for each
            side.
        source: of .jsonl files, the field with what is read (AlgoLisp: "text"); of other files,
            how their names end (IWSLT'15: "en" or "vi").
        target: the same for what is to be written (AlgoLisp: "short_tree").
        vocabulary_size: number of tokens with the three marks, 259 to 65,536; there are fewer if
            the texts have no more pairs that occur twice.
        max_length: tokens of a text and its end, 1 to 10^4; where either side is longer, the
            example is left out.
        seed: chooses the order, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.
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
                raise ValueError(f"{name}={value!r}: allowed is a text that is not empty")
        if self.source == self.target:
            raise ValueError(f"target={self.target!r}: allowed is another one than source")
        require_int("vocabulary_size", self.vocabulary_size, _N_BYTES + _N_MARKS, 2**16)
        require_int("max_length", self.max_length, 1, 10**4)
        require_int("seed", self.seed, 0, 2**32 - 1)


class Sequences(FiniteTask[tuple[Tensor, Tensor]]):
    """Texts, and what is to be written when they are read.

    Splits: `train`, `valid` and `test`, as the data set has them; the vocabulary follows from both
    sides of `train`. Of .jsonl, a field may be a text, or nested lists of words, which is written
    with spaces between them and with parentheses around the lists within.

    A batch holds (token ids int64, 0 behind the end; widths are those of the split's longest)
    inputs: the source [batch, source_pos]; and, for teacher forcing, the mark 1 and the target
    [batch, target_pos];
    targets [batch, target_pos]: the target and the mark 2, which ends it;
    mask [batch, target_pos]: True for both;
    latents, each [batch] int64: `source_length` and `target_length`, tokens; `row`: the number of
    the line in the file.

    The files are read when a split is first asked for.

    Raises, when they are first read:
        FileNotFoundError: they are not there; says what to fetch and where to put it.
        ValueError: they are stored in another way, or all examples of a split are too long.
    """

    SPLITS: ClassVar = ("train", "valid", "test")

    def __init__(self, config: SequencesConfig) -> None:
        super().__init__(key=Key(_Order(config.seed)))
        self.config = config

    @property
    def vocabulary_size(self) -> int:
        """The number of ids, of either side: at most that of the config."""
        return _N_MARKS + self._tokenizer.get_vocab_size()

    def n_left_out(self, split: str) -> int:
        """Return how many examples of a split are too long.

        Raises:
            ValueError: `split` is unknown.
        """
        return len(self._texts(split)[0]) - self.size(split)

    def decode(self, ids: Int[Tensor, " pos"]) -> str:
        """Return what tokens up to the first mark 2 say.

        Args:
            ids: below `vocabulary_size`; padding and the mark 1 are passed over.
        """
        plain = ids.tolist()
        end = plain.index(_EOS) if _EOS in plain else len(plain)
        return self._tokenizer.decode([one - _N_MARKS for one in plain[:end] if one > _EOS])

    def score(
        self, output: Int[Tensor, "batch pos"], batch: Batch[tuple[Tensor, Tensor]]
    ) -> dict[str, Tensor]:
        """Return how right the answers are.

        Args:
            output: [batch, pos], ids from the first token on, whether decoded greedily or the
                argmax of teacher-forced logits. It may be shorter or longer than the targets; what
                follows the place of their end is not read.
            batch: the batch that they answer.

        Returns:
            `correct` [batch]: 1 where all tokens and the end are right, else 0: either kind of
            output gives the same;
            `token_correct` [batch]: the share of these that is right, in which the kinds differ.

        Raises:
            ValueError: `output` has another shape, or holds no whole numbers.
        """
        return score_sequence(output, batch)

    @cached_property
    def _files(self) -> dict[str, tuple[Path, ...]]:
        """The file of each split, or those of its two sides."""
        config = self.config
        folder = Path(config.path).expanduser()
        if folder.is_dir():
            if found := split_files(folder, ".jsonl", _FILES):
                return {split: (file,) for split, file in found.items()}
            sides = [
                split_files(folder, f".{one}", _FILES) for one in (config.source, config.target)
            ]
            if sides[0] and sides[1]:
                return {split: (sides[0][split], sides[1][split]) for split in self.SPLITS}
        raise FileNotFoundError(
            f"path={config.path!r}: there are neither .jsonl files nor some that end with "
            f".{config.source} and .{config.target}. For translation, fetch for example IWSLT'15 "
            "from https://nlp.stanford.edu/projects/nmt (train, tst2012 and tst2013, each .en and "
            ".vi), for AlgoLisp metaset3.train.jsonl, .dev.jsonl and .test.jsonl from "
            "https://github.com/nearai/program_synthesis, unpacked; and put there "
            f"{names_wanted('.jsonl (or two)', _FILES)}"
        )

    def _texts(self, split: str) -> tuple[list[str], list[str]]:
        require_choice("split", split, self.SPLITS)
        return self._read[split]

    @cached_property
    def _read(self) -> dict[str, tuple[list[str], list[str]]]:
        names = (self.config.source, self.config.target)
        found = {}
        for split, files in self._files.items():
            if len(files) == 1:
                rows = [_fields(place, row, names) for place, row in read_json_lines(files[0])]
                found[split] = ([row[0] for row in rows], [row[1] for row in rows])
                continue
            source, target = ([line for _, line in read_lines(file)] for file in files)
            if len(source) != len(target):
                raise ValueError(
                    f"{files[0]} has {len(source)} lines, {files[1]} has {len(target)}: allowed "
                    "are as many"
                )
            found[split] = (source, target)
        return found

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        text = "\n".join(line for side in self._texts("train") for line in side)
        return learn_byte_pairs(text.encode(), self.config.vocabulary_size - _N_MARKS)

    def _make(self, split: str) -> ExampleSet[tuple[Tensor, Tensor]]:
        sides = [
            [
                [one + _N_MARKS for one in encoding.ids]
                for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            ]
            for texts in self._texts(split)
        ]
        lengths = np.array([[len(tokens) for tokens in side] for side in sides])
        rows = np.flatnonzero((lengths < self.config.max_length).all(0))
        if not len(rows):
            raise ValueError(
                f"max_length={self.config.max_length!r}: allowed is a number that leaves some of "
                f"{split}, of which no example is shorter than {lengths.max(0).min() + 1}"
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


@dataclass(frozen=True)
class _Order:
    seed: int


def _fields(place: str, row: dict[str, Any], names: tuple[str, str]) -> list[str]:
    for name in names:
        if name not in row:
            raise ValueError(f"{place} has the fields {', '.join(row)}: {name!r} lacks")
    return [
        " ".join(_words(row[name])) if isinstance(row[name], list) else str(row[name])
        for name in names
    ]


def _words(nested: list[Any]) -> Iterator[str]:
    """Return the words of nested lists, the lists within in parentheses."""
    for one in nested:
        if isinstance(one, list):
            yield from ("(", *_words(one), ")")
        else:
            yield str(one)


def _padded(rows: list[list[int]], width: int) -> Int[Tensor, "n width"]:
    made = torch.full((len(rows), width), _PAD, dtype=torch.int32)
    for row, tokens in zip(made.numpy(), rows, strict=True):
        row[: len(tokens)] = tokens
    return made
