"""Texts that others have labelled: IMDb (Maas et al. 2011) and SST (Socher et al. 2013).

What do the reviewers think of a film? IMDb has whole reviews, good or bad; SST single sentences, in
two classes or in five.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Int
from torch import Tensor

from tasks.common import require_choice, require_int
from tasks.stored.labelled_files import Example, Format, read_labelled
from tasks.stored.labelled_task import LabelledTask
from tasks.stored.words import PAD

_FORMATS = {
    "imdb": Format(
        texts=(("text",),),
        label=("label",),
        classes=("neg", "pos"),
        suffix=".jsonl",
        files={"train": ("train",), "test": ("test",)},
        stored={"train": "train", "test": "test"},
        hub="stanfordnlp/imdb",
        origin="https://ai.stanford.edu/~amaas/data/sentiment",
        layout="its folders train and test",
    ),
    "sst2": Format(
        texts=(("sentence", "text"),),
        label=("label",),
        classes=("0", "1"),
        suffix=".tsv",
        files={"train": ("train",), "test": ("dev", "valid", "validation")},
        stored={"train": "train", "test": "validation"},
        hub="stanfordnlp/sst2",
        origin="https://gluebenchmark.com (SST-2)",
    ),
    "sst5": Format(
        texts=(("text", "sentence"),),
        label=("label",),
        classes=("0", "1", "2", "3", "4"),
        suffix=".jsonl",
        files={"train": ("train",), "valid": ("dev", "valid", "validation"), "test": ("test",)},
        stored={"train": "train", "valid": "validation", "test": "test"},
        hub="SetFit/sst5",
        origin="https://huggingface.co/datasets/SetFit/sst5",
    ),
}


@dataclass(frozen=True, kw_only=True)
class ClassificationConfig:
    """Which texts they are, and which words are known.

    Attributes:
        name: the data set.
        path: of a folder with IMDb's SPLIT/CLASS/FILE, with files for each split that have train,
            dev or test in their names ("sst2" .tsv, the others .jsonl), with what Hugging Face's
            `save_to_disk` wrote, or with parquet files. None: Hugging Face's cache, or its hub.
        n_valid: how many texts of `train` are held out for `valid`; "sst5" has a `valid` of its
            own. 1 to 10^6.
        min_count: how often a word occurs in `train` at least to be known, 1 to 10^6.
        vocabulary_size: how many words are known at most, the most frequent, with one each for
            padding and for unknown words, 3 to 10^6.
        max_length: words of a text that are read, 1 to 10^5.
        seed: chooses what is held out, and the order, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.
    """

    name: Literal["imdb", "sst2", "sst5"]
    path: str | None = None
    n_valid: int = 1_000
    min_count: int = 2
    vocabulary_size: int = 30_000
    max_length: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        require_choice("name", self.name, tuple(_FORMATS))
        if self.path is not None and (not isinstance(self.path, str) or not self.path):
            raise ValueError(f"path={self.path!r}: allowed are None and the path of a folder")
        require_int("n_valid", self.n_valid, 1, 10**6)
        require_int("min_count", self.min_count, 1, 10**6)
        require_int("vocabulary_size", self.vocabulary_size, 3, 10**6)
        require_int("max_length", self.max_length, 1, 10**5)
        require_int("seed", self.seed, 0, 2**32 - 1)


class Classification(LabelledTask[Tensor]):
    """Texts with a label; those without one are left out.

    Splits: `train`; `valid`, held out of it where the data set has none; `test`, of "sst2" the
    development set of GLUE, whose test is not public. The prefixes of `valid` and `test` are
    balanced over labels.

    A batch holds inputs [batch, pos] int64: ids of words in `vocabulary`, 1 for an unknown one, 0
    behind the end (as wide as the split's longest, at most `max_length`); targets [batch, 1] int64,
    indices into `classes`; mask [batch, 1], all True; and the latents, each [batch] int64, `label`;
    `length`, words that are read; `row`, the number of the row in what is stored (of files in
    folders of their classes: in the order of these and of the files' names).

    Words are in lower case, and punctuation marks are words. What is stored is read when a split is
    first asked for.

    Raises, when it is first read:
        FileNotFoundError: the data set is not there; says what to fetch and where to put it.
        ValueError: it is stored in another way, or `n_valid` leaves nothing in `train`.
    """

    def __init__(self, config: ClassificationConfig) -> None:
        super().__init__(
            classes=_FORMATS[config.name].classes,
            min_count=config.min_count,
            vocabulary_size=config.vocabulary_size,
            max_length=config.max_length,
            seed=config.seed,
        )
        self.config = config

    def _read(self) -> dict[str, list[Example]]:
        config, format_ = self.config, _FORMATS[self.config.name]
        path = None if config.path is None else Path(config.path).expanduser()
        if path is not None and all((path / "train" / name).is_dir() for name in self.classes):
            rows = {split: _read_folders(path / split, self.classes) for split in format_.files}
        else:
            rows = read_labelled(config.name, path, format_)
        if "valid" not in rows:
            train = rows["train"]
            require_int("n_valid", config.n_valid, 1, len(train) - 1)
            order = self._key.generator("/valid").permutation(len(train))
            rows["valid"] = [train[one] for one in np.sort(order[: config.n_valid])]
            rows["train"] = [train[one] for one in np.sort(order[config.n_valid :])]
        return rows

    def _arrange(
        self, texts: list[Int[Tensor, "example pos"]], examples: list[Example]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        (words,) = texts
        return words, {"length": (words != PAD).sum(1)}


def _read_folders(folder: Path, classes: tuple[str, ...]) -> list[Example]:
    """Return the texts of files in folders of their classes.

    Raises:
        ValueError: there are none.
    """
    files = [
        (file, label)
        for label, name in enumerate(classes)
        for file in sorted((folder / name).glob("*.txt"))
    ]
    if not files:
        raise ValueError(f"{folder} has no texts: allowed is CLASS/FILE.txt for {classes}")
    return [
        Example((file.read_text(encoding="utf-8"),), label, None, row)
        for row, (file, label) in enumerate(files)
    ]
