"""Labelled pairs of sentences: natural language inference and answer ranking.

SNLI (Bowman et al. 2015), MNLI (Williams et al. 2018), SciTail (Khot et al. 2018) and Dialogue NLI
(Welleck et al. 2019): does the second sentence follow from the first? TrecQA (Wang et al. 2007),
WikiQA (Yang et al. 2015) and the Ubuntu dialogue corpus (Lowe et al. 2015): does a sentence answer
a question, or continue a dialogue? The answers to each question are ranked.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tasks.batch import Batch
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
from tasks.stored.published import (
    read_json_lines,
    read_trec_qa,
    read_ubuntu,
    read_ubuntu_turns,
    tab_reader,
)
from tasks.stored.words import PAD

_RECALL_AT = (1, 2, 5)
_ENTAILMENT = ("entailment", "neutral", "contradiction")
_TREC_QA = ("question", "answer", "label")
_SCITAIL = ("premise", "hypothesis", "label")

_FORMATS = {
    "snli": Format(
        texts=(("sentence1", "premise"), ("sentence2", "hypothesis")),
        label=("gold_label", "label"),
        classes=_ENTAILMENT,
        readers={".jsonl": read_json_lines},
        files=THREE_FILES,
        stored=THREE_STORED,
        hub="stanfordnlp/snli",
        origin="https://nlp.stanford.edu/projects/snli",
    ),
    "mnli": Format(
        texts=(("sentence1", "premise"), ("sentence2", "hypothesis")),
        label=("gold_label", "label"),
        classes=_ENTAILMENT,
        readers={".jsonl": read_json_lines},
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
        readers={".tsv": tab_reader(_SCITAIL, ("label",))},
        files=THREE_FILES,
        stored=THREE_STORED,
        hub="allenai/scitail",
        subset="tsv_format",
        origin="https://allenai.org/data/scitail (its folder tsv_format)",
    ),
    "dnli": Format(
        texts=(("sentence1",), ("sentence2",)),
        label=("label",),
        classes=("positive", "neutral", "negative"),
        readers={".jsonl": read_json_lines},
        # Beside these there is dialogue_nli_verified_test.
        files={"train": ("nli_train",), "valid": ("nli_dev",), "test": ("nli_test",)},
        stored=THREE_STORED,
        hub=None,
        origin="https://wellecks.com/dialogue_nli",
    ),
    "trecqa": Format(
        texts=(("question",), ("answer",)),
        label=("label",),
        classes=("0", "1"),
        group=("id", "question"),
        readers={".xml": read_trec_qa, ".tsv": tab_reader(_TREC_QA, ("label",))},
        files=THREE_FILES,
        stored=THREE_STORED,
        hub=None,
        origin="any of its copies, with Wang et al.'s <QApairs> (.xml) or as lines of question, "
        "answer and label, 0 or 1, between tabs (.tsv)",
    ),
    "wikiqa": Format(
        texts=(("Question", "question"), ("Sentence", "answer")),
        label=("Label", "label"),
        classes=("0", "1"),
        group=("QuestionID", "question_id"),
        readers={".tsv": tab_reader((), ("Label", "label"))},
        files=THREE_FILES,
        stored=THREE_STORED,
        hub="microsoft/wiki_qa",
        origin="https://www.microsoft.com/en-us/download/details.aspx?id=52419",
    ),
    "ubuntu": Format(
        texts=(("context",), ("response",)),
        label=("label",),
        classes=("0", "1"),
        group=("group",),
        readers={".csv": read_ubuntu, ".txt": read_ubuntu_turns},
        files=THREE_FILES,
        stored=THREE_STORED,
        hub=None,
        origin="https://github.com/rkadlec/ubuntu-ranking-dataset-creator (version 2.0, .csv), or "
        "the first version as lines of label, turns and response between tabs (.txt)",
    ),
    OWN: own_format(2),
}


@dataclass(frozen=True, kw_only=True)
class PairsConfig(LabelledConfig):
    """Settings of a data set of sentence pairs.

    Attributes:
        name: the data set, or "own".
        path: a folder with its authors' files, one for each split with train, dev or test in its
            name: SNLI, MNLI and Dialogue NLI .jsonl, SciTail and WikiQA .tsv, TrecQA .xml or .tsv,
            Ubuntu .csv or .txt, "own" .jsonl, .tsv or .csv; or with the output of Hugging Face's
            `save_to_disk`, or with parquet files. None: Hugging Face's cache, or its hub, which
            does not have "dnli", "trecqa" and "ubuntu".
        columns: names of the columns of sentence A, sentence B, the label and, where answers are
            ranked, the question, in place of those of the data set; required with "own". A .tsv
            file without a header has these columns in this order.
        max_length: words of a sentence that are read, 1 to 10^4.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> task = Pairs(PairsConfig(name="snli", path="snli_1.0"))
        >>> task.classes
        ('entailment', 'neutral', 'contradiction')
    """

    FORMATS: ClassVar = _FORMATS
    MAX_LENGTH: ClassVar = 10**4
    N_COLUMNS: ClassVar = (3, 4)

    name: Literal["snli", "mnli", "scitail", "dnli", "trecqa", "wikiqa", "ubuntu", "own"]
    max_length: int = 64


class Pairs(LabelledTask[tuple[Tensor, Tensor]]):
    """Pairs of sentences with a label; pairs without a label ("-" in SNLI) are left out.

    Splits: `train`, `valid` and `test`, as in the data set; for MNLI, whose test labels are not
    public, `valid` and `test` are the matched and the mismatched development set. The prefixes of
    `valid` and `test` are balanced over labels; where answers are ranked, the questions are in
    random order instead, each with all its answers one after another.

    A batch has inputs, a tuple of the sentences A [batch, pos_a] and B [batch, pos_b], int64: ids
    of words in `vocabulary`, 1 for an unknown word, padded with 0 (as wide as the split's longest
    sentence, at most `max_length`); targets [batch, 1] int64, indices into `classes`; mask
    [batch, 1], all True; and the latents, each [batch] int64,
    `label`; `length_a` and `length_b`, numbers of words;
    `row`: the number of the row in the stored data;
    and where answers are ranked `question`: the same number for all answers to one question.

    Words are in lower case, and punctuation marks are words. The data is read on first use.

    Raises:
        FileNotFoundError: on first use, if the data set is missing: says what to fetch and where to
            put it.
        ValueError: on first use, if the data has an unknown format.

    Example:
        >>> task = Pairs(PairsConfig(name="snli", path="snli_1.0"))
        >>> premise, hypothesis = task.batch("train", 0, 32).inputs
        >>> premise.shape, hypothesis.shape  # padded to the longest of all
        (torch.Size([32, 4]), torch.Size([32, 3]))
    """

    def __init__(self, config: PairsConfig) -> None:
        super().__init__(config)
        self.config = config

    def _read(self) -> dict[str, list[Example]]:
        path = None if self.config.path is None else Path(self.config.path).expanduser()
        return read_labelled(self.config.name, path, self.config.format)

    def _arrange(
        self, texts: list[Int[Tensor, "example pos"]], examples: list[Example]
    ) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
        a, b = texts
        latents = {"length_a": (a != PAD).sum(1), "length_b": (b != PAD).sum(1)}
        if self.config.format.group:
            questions = np.array([example.group for example in examples])
            latents["question"] = torch.from_numpy(np.unique(questions, return_inverse=True)[1])
        return (a, b), latents

    def words(self, batch: Batch[Any], example: int) -> tuple[list[str], list[str]]:
        """Return the words of both sentences of an example, without padding."""
        a, b = (self._words(text[example]) for text in batch.inputs)
        return a, b


def score_ranking(
    scores: Float[Tensor, " answer"],
    relevant: Bool[Tensor, " answer"] | Int[Tensor, " answer"],
    question: Int[Tensor, " answer"],
) -> dict[str, Float[Tensor, " question"]]:
    """Return average precision, reciprocal rank and recall of each question.

    Their means over questions are MAP, MRR and R@k.

    Args:
        scores: scores of all answers to all questions; higher scores rank first. Among ties, wrong
            answers rank first, so constant scores gain nothing.
        relevant: whether each answer is right.
        question: the question of each answer, any integers.

    Returns:
        For each question that has a right answer, in ascending order of the question numbers,
        `average_precision`: the mean, over its right answers, of the precision at their ranks;
        `reciprocal_rank`: 1 over the rank of the first right answer;
        `recall_at_1`, `recall_at_2`, `recall_at_5`: the share of its right answers that are among
        the first so many.

    Raises:
        ValueError: the arguments are not three vectors of one length, or no answer is right.

    Example:
        >>> score_ranking(logits[:, 0, 1], batch.targets[:, 0], batch.latents["question"])
    """
    shapes = [tuple(vector.shape) for vector in (scores, relevant, question)]
    if len(set(shapes)) > 1 or len(shapes[0]) != 1:
        raise ValueError(
            f"scores, relevant and question must be vectors of one length, got shapes {shapes}"
        )
    right = relevant.bool().cpu().numpy()
    if not right.any():
        raise ValueError("relevant must be True for some answer, got no relevant answer")
    group = question.cpu().numpy()
    order = np.lexsort((right, -scores.double().cpu().numpy(), group))
    _, start, group_index = np.unique(group[order], return_index=True, return_inverse=True)
    right = right[order]
    rank = np.arange(len(right)) - start[group_index] + 1
    n_before = np.cumsum(right) - right
    hits = np.cumsum(right) - n_before[start][group_index]
    n_right = np.bincount(group_index, weights=right)
    precision = np.bincount(group_index, weights=np.where(right, hits / rank, 0))
    reciprocal = np.zeros(len(start))
    np.maximum.at(reciprocal, group_index, np.where(right, 1 / rank, 0))
    has_right = n_right > 0
    values = {"average_precision": precision / n_right.clip(1), "reciprocal_rank": reciprocal}
    for k in _RECALL_AT:
        found = np.bincount(group_index, weights=right & (rank <= k))
        values[f"recall_at_{k}"] = found / n_right.clip(1)
    return {name: torch.from_numpy(value[has_right]) for name, value in values.items()}
