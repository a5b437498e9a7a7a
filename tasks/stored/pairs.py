"""Pairs of sentences that others have labelled, for classification and for ranking.

SNLI (Bowman et al. 2015), MNLI (Williams et al. 2018) and SciTail (Khot et al. 2018): does the
second sentence follow from the first? TrecQA (Wang et al. 2007) and WikiQA (Yang et al. 2015): does
a sentence answer a question? There, the answers to one question are ranked.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tasks.common import require_choice, require_int
from tasks.stored.labelled_files import Example, Format, read_labelled
from tasks.stored.labelled_task import LabelledTask
from tasks.stored.words import PAD

_THREE = {"train": ("train",), "valid": ("dev", "valid", "validation"), "test": ("test",)}
_STORED = {"train": "train", "valid": "validation", "test": "test"}
_ENTAILMENT = ("entailment", "neutral", "contradiction")

_FORMATS = {
    "snli": Format(
        texts=(("sentence1", "premise"), ("sentence2", "hypothesis")),
        label=("gold_label", "label"),
        classes=_ENTAILMENT,
        suffix=".jsonl",
        files=_THREE,
        stored=_STORED,
        hub="stanfordnlp/snli",
        origin="https://nlp.stanford.edu/projects/snli",
    ),
    "mnli": Format(
        texts=(("sentence1", "premise"), ("sentence2", "hypothesis")),
        label=("gold_label", "label"),
        classes=_ENTAILMENT,
        suffix=".jsonl",
        files={"train": ("train",), "valid": ("dev_matched",), "test": ("dev_mismatched",)},
        stored={
            "train": "train",
            "valid": "validation_matched",
            "test": "validation_mismatched",
        },
        hub="nyu-mll/multi_nli",
        origin="https://cims.nyu.edu/~sbowman/multinli",
    ),
    "scitail": Format(
        texts=(("premise",), ("hypothesis",)),
        label=("label",),
        classes=("entails", "neutral"),
        columns=("premise", "hypothesis", "label"),
        suffix=".tsv",
        files=_THREE,
        stored=_STORED,
        hub="allenai/scitail",
        subset="tsv_format",
        origin="https://allenai.org/data/scitail (its folder tsv_format)",
    ),
    "trecqa": Format(
        texts=(("question",), ("answer",)),
        label=("label",),
        classes=("0", "1"),
        group=("question",),
        columns=("question", "answer", "label"),
        suffix=".tsv",
        files=_THREE,
        stored=_STORED,
        hub=None,
        origin="any of its copies, as lines of question, answer and label (0 or 1) between tabs",
    ),
    "wikiqa": Format(
        texts=(("Question", "question"), ("Sentence", "answer")),
        label=("Label", "label"),
        classes=("0", "1"),
        group=("QuestionID", "question_id"),
        suffix=".tsv",
        files=_THREE,
        stored=_STORED,
        hub="microsoft/wiki_qa",
        origin="https://www.microsoft.com/en-us/download/details.aspx?id=52419",
    ),
}


@dataclass(frozen=True, kw_only=True)
class PairsConfig:
    """Which pairs they are, and which words are known.

    Attributes:
        name: the data set.
        path: of a folder with its authors' files (SNLI and MNLI .jsonl, the others .tsv), one for
            each split with train, dev or test in its name; or with what Hugging Face's
            `save_to_disk` wrote, or parquet files. None: Hugging Face's cache, or its hub, which
            lacks "trecqa".
        min_count: how often a word occurs in `train` at least to be known, 1 to 10^6.
        vocabulary_size: how many words are known at most, the most frequent, with one each for
            padding and for unknown words, 3 to 10^6.
        max_length: words of a sentence that are read, 1 to 10^4.
        seed: chooses the order, 0 to 2^32 - 1.

    Raises:
        ValueError: an argument is out of its range.
    """

    name: Literal["snli", "mnli", "scitail", "trecqa", "wikiqa"]
    path: str | None = None
    min_count: int = 2
    vocabulary_size: int = 30_000
    max_length: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        require_choice("name", self.name, tuple(_FORMATS))
        if self.path is not None and (not isinstance(self.path, str) or not self.path):
            raise ValueError(f"path={self.path!r}: allowed are None and the path of a folder")
        if self.path is None and _FORMATS[self.name].hub is None:
            raise ValueError(f"path=None: to read {self.name}, set it to the path of a folder")
        require_int("min_count", self.min_count, 1, 10**6)
        require_int("vocabulary_size", self.vocabulary_size, 3, 10**6)
        require_int("max_length", self.max_length, 1, 10**4)
        require_int("seed", self.seed, 0, 2**32 - 1)


class Pairs(LabelledTask[tuple[Tensor, Tensor]]):
    """Pairs of sentences with a label; those without one ("-" in SNLI) are left out.

    Splits: `train`, `valid` and `test`, as the data set has them; the tests of MNLI are not public,
    so there `valid` and `test` are the matched and the mismatched one of its development sets. The
    prefixes of `valid` and `test` are balanced over labels.

    A batch holds inputs, a tuple of the sentences A [batch, pos_a] and B [batch, pos_b], int64: ids
    of words in `vocabulary`, 1 for an unknown one, 0 behind the end (widths are those of the
    split's longest, at most `max_length`); targets [batch, 1] int64, indices into `classes`; mask
    [batch, 1], all True; and the latents, each [batch] int64,
    `label`; `length_a` and `length_b`, words that are read;
    `row`: the number of the row in what is stored;
    and of "trecqa" and "wikiqa" `question`: the same number for all answers to one question.

    Words are in lower case, and punctuation marks are words. What is stored is read when a split is
    first asked for.

    Raises, when it is first read:
        FileNotFoundError: the data set is not there; says what to fetch and where to put it.
        ValueError: it is stored in another way.
    """

    def __init__(self, config: PairsConfig) -> None:
        super().__init__(
            classes=_FORMATS[config.name].classes,
            min_count=config.min_count,
            vocabulary_size=config.vocabulary_size,
            max_length=config.max_length,
            seed=config.seed,
        )
        self.config = config

    def _read(self) -> dict[str, list[Example]]:
        path = None if self.config.path is None else Path(self.config.path).expanduser()
        return read_labelled(self.config.name, path, _FORMATS[self.config.name])

    def _arrange(
        self, texts: list[Int[Tensor, "example pos"]], examples: list[Example]
    ) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
        a, b = texts
        latents = {"length_a": (a != PAD).sum(1), "length_b": (b != PAD).sum(1)}
        if _FORMATS[self.config.name].group:
            names = np.array([example.group for example in examples])
            latents["question"] = torch.from_numpy(np.unique(names, return_inverse=True)[1])
        return (a, b), latents


def score_ranking(
    scores: Float[Tensor, " answer"],
    relevant: Bool[Tensor, " answer"] | Int[Tensor, " answer"],
    question: Int[Tensor, " answer"],
) -> dict[str, Float[Tensor, " question"]]:
    """Return how well the answers to each question are ranked; the means are MAP and MRR.

    Args:
        scores: of all answers to all questions; the higher, the further in front. Of equal scores,
            wrong answers come first, so that saying nothing gains nothing.
        relevant: whether an answer is right.
        question: which question it belongs to, any whole numbers.

    Returns:
        For each question that has a right answer, in ascending order of their numbers,
        `average_precision`: the mean, over its right answers, of the share of right ones among
        those down to them; `reciprocal_rank`: 1 over the place of the first right one.

    Raises:
        ValueError: the arguments are not three vectors of one length, or no answer is right.
    """
    shapes = [tuple(one.shape) for one in (scores, relevant, question)]
    if len(set(shapes)) > 1 or len(shapes[0]) != 1:
        raise ValueError(
            f"scores, relevant and question of shapes {shapes}: allowed are vectors of one length"
        )
    right = relevant.bool().cpu().numpy()
    if not right.any():
        raise ValueError("relevant has no right answer: allowed are questions of which some has")
    group = question.cpu().numpy()
    order = np.lexsort((right, -scores.double().cpu().numpy(), group))
    _, start, number = np.unique(group[order], return_index=True, return_inverse=True)
    right = right[order]
    rank = np.arange(len(right)) - start[number] + 1
    before = np.cumsum(right) - right
    hits = np.cumsum(right) - before[start][number]
    count = np.bincount(number, weights=right)
    precision = np.bincount(number, weights=np.where(right, hits / rank, 0))
    reciprocal = np.zeros(len(start))
    np.maximum.at(reciprocal, number, np.where(right, 1 / rank, 0))
    has = count > 0
    return {
        "average_precision": torch.from_numpy(precision[has] / count[has]),
        "reciprocal_rank": torch.from_numpy(reciprocal[has]),
    }
