"""Labelled texts, such as film reviews: IMDb (Maas et al. 2011) and SST (Socher et al. 2013).

IMDb has whole reviews, positive or negative; SST has single sentences in two or five classes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Int
from torch import Tensor

from tasks.batch import Batch
from tasks.common import require_int
from tasks.stored.labelled_files import (
    OWN,
    THREE_FILES,
    THREE_STORED,
    Example,
    Format,
    own_format,
    read_labelled,
)
from tasks.stored.labelled_task import LabelledConfig, LabelledTask
from tasks.stored.published import read_json_lines, tab_reader, tree_reader
from tasks.stored.words import PAD

_TREEBANK = "https://nlp.stanford.edu/sentiment (its trees, trainDevTestTrees_PTB)"

_FORMATS = {
    "imdb": Format(
        texts=(("text",),),
        label=("label",),
        classes=("neg", "pos"),
        readers={".jsonl": read_json_lines},
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
        readers={".tsv": tab_reader((), ("label",))},
        files={"train": ("train",), "test": ("dev", "valid", "validation")},
        stored={"train": "train", "test": "validation"},
        hub="stanfordnlp/sst2",
        origin="https://gluebenchmark.com (SST-2)",
    ),
    "sst5": Format(
        texts=(("text", "sentence"),),
        label=("label",),
        classes=("0", "1", "2", "3", "4"),
        readers={
            ".txt": tree_reader(tuple((name,) for name in "01234")),
            ".jsonl": read_json_lines,
        },
        files=THREE_FILES,
        stored=THREE_STORED,
        hub="SetFit/sst5",
        origin=_TREEBANK,
    ),
    "sst2_trees": Format(
        texts=(("text",),),
        label=("label",),
        classes=("0", "1"),
        readers={".txt": tree_reader((("0", "1"), ("3", "4")))},
        files=THREE_FILES,
        stored=THREE_STORED,
        hub=None,
        origin=_TREEBANK,
    ),
    OWN: own_format(1),
}


@dataclass(frozen=True, kw_only=True)
class ClassificationConfig(LabelledConfig):
    """Settings of a data set of single texts.

    Attributes:
        name: the data set: "sst2" is GLUE's, with phrases; "sst5" and "sst2_trees" have the whole
            sentences of the treebank, the latter without those that are neutral; or "own".
        path: a folder with IMDb's SPLIT/CLASS/FILE, with files named after the splits (train, dev,
            test; .tsv for "sst2", the trees in .txt for "sst5", or .jsonl; for "own" .jsonl, .tsv
            or .csv), with the output of Hugging Face's `save_to_disk`, or with parquet files.
            None: Hugging Face's cache, or its hub, which does not have "sst2_trees".
        columns: names of the columns of the text and of the label, in place of those of the data
            set; required with "own". A .tsv file without a header has these columns in this order.
        n_valid: number of texts of `train` that are held out for `valid`, 1 to 10^6; used with
            "imdb" and "sst2", which have no `valid` split.
        max_length: words of a text that are read, 1 to 10^5.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> config = ClassificationConfig(
        ...     name="own", path="reviews", columns=("text", "label"), labels=("bad", "good")
        ... )
        >>> Classification(config).classes
        ('bad', 'good')
    """

    FORMATS: ClassVar = _FORMATS
    MAX_LENGTH: ClassVar = 10**5
    N_COLUMNS: ClassVar = (2, 2)

    name: Literal["imdb", "sst2", "sst5", "sst2_trees", "own"]
    n_valid: int = 1_000
    max_length: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("n_valid", self.n_valid, 1, 10**6)


class Classification(LabelledTask[Tensor]):
    """Texts with a label; rows without a label are left out.

    Splits: `train`; `valid`, held out of `train` where the data set has none; `test`, which for
    "sst2" is GLUE's development set, since its test labels are not public. The prefixes of `valid`
    and `test` are balanced over labels.

    A batch has inputs [batch, pos] int64: ids of words in `vocabulary`, 1 for an unknown word,
    padded with 0 (as wide as the split's longest text, at most `max_length`); targets [batch, 1]
    int64, indices into `classes`; mask [batch, 1], all True; and the latents, each [batch] int64,
    `label`; `length`, number of words; `row`, the number of the row in the stored data (files in
    class folders are numbered in the order of classes and file names).

    Words are in lower case, and punctuation marks are words. The data is read on first use.

    Raises:
        FileNotFoundError: on first use, if the data set is missing: says what to fetch and where to
            put it.
        ValueError: on first use, if the data has an unknown format, or `n_valid` leaves nothing in
            `train`.

    Example:
        >>> columns = {"columns": ("text", "label"), "labels": ("bad", "good")}
        >>> task = Classification(ClassificationConfig(name="own", path="reviews", **columns))
        >>> batch = task.batch("test", 0, 2)
        >>> batch.inputs.shape, sorted(batch.targets[:, 0].tolist())  # balanced over labels
        (torch.Size([2, 4]), [0, 1])
    """

    def __init__(self, config: ClassificationConfig) -> None:
        super().__init__(config)
        self.config = config

    def _read(self) -> dict[str, list[Example]]:
        config, format_ = self.config, self.config.format
        path = None if config.path is None else Path(config.path).expanduser()
        if path is not None and all((path / "train" / name).is_dir() for name in self.classes):
            rows = {split: _read_folders(path / split, self.classes) for split in format_.files}
        else:
            rows = read_labelled(config.name, path, format_)
        if "valid" not in rows:
            train = rows["train"]
            require_int("n_valid", config.n_valid, 1, len(train) - 1)
            order = self._key.generator("/valid").permutation(len(train))
            rows["valid"] = [train[row] for row in np.sort(order[: config.n_valid])]
            rows["train"] = [train[row] for row in np.sort(order[config.n_valid :])]
        return rows

    def _arrange(
        self, texts: list[Int[Tensor, "example pos"]], examples: list[Example]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        (words,) = texts
        return words, {"length": (words != PAD).sum(1)}

    def words(self, batch: Batch[Any], example: int) -> list[str]:
        """Return the words of a text, without padding."""
        return self._words(batch.inputs[example])


def _read_folders(folder: Path, classes: tuple[str, ...]) -> list[Example]:
    """Return the texts of a folder with one subfolder of files per class.

    Raises:
        ValueError: there are no texts.
    """
    files = [
        (file, label)
        for label, name in enumerate(classes)
        for file in sorted((folder / name).glob("*.txt"))
    ]
    if not files:
        raise ValueError(f"{folder} must have texts CLASS/FILE.txt for {classes}, got none")
    return [
        Example((file.read_text(encoding="utf-8"),), label, None, row)
        for row, (file, label) in enumerate(files)
    ]
