"""Planted ranking: the right answer to a question affirms all that the question asks for.

Designed for attention between two texts that adds, subtracts or deletes (Tay et al. 2019, "CoDA"):
the sign of every pair of words is known.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from tasks.batch import Batch
from tasks.common import require_choice, require_int
from tasks.planted_texts import AFFIRMS, DENIES, MISSES, PlantedTexts, PlantedTextsConfig


@dataclass(frozen=True, kw_only=True)
class PlantedRankingConfig(PlantedTextsConfig):
    """Settings of planted ranking.

    Attributes:
        n_answers: answers to each question, of which one is right, 2 to 100.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> task = PlantedRanking(PlantedRankingConfig(n_answers=3))
        >>> task.batch("ood", 0, 6).targets[:, 0]  # the right answer is the first of each question
        tensor([1, 0, 0, 1, 0, 0])
    """

    n_answers: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("n_answers", self.n_answers, 2, 100)


class PlantedRanking(PlantedTexts):
    """Questions with answers, one of which is right; see `PlantedTexts`.

    The right answer affirms all that is asked for; of the others, half deny one of it, and half
    have another concept in its place. So the right answer is the one with the largest
    sum over i, j of sign_ij.

    The last question of a batch whose size is no multiple of n_answers has fewer answers: it is too
    easy to rank, and to be left out of a ranking.

    Splits: `train` and `id` ask for the same sets of concepts, `ood` for those held out.

    A batch has inputs, a tuple of question [batch, pos_a] and answer [batch, pos_b], int64 word ids
    below `vocabulary_size`, padded with 0; targets [batch, 1] int64, 1 if the answer is right; mask
    [batch, 1], all True; and the latents (int64)
    `sign` [batch, pos_a, pos_b];
    `question` [batch]: the number of the question within the batch, in which the answers to a
    question follow one another, the right one first;
    `kind` [batch]: 0 right, 1 denies an asked concept, 2 has another concept in its place;
    `combination` [batch]: the row in `combinations(split)`;
    `length_a`, `length_b` [batch]: numbers of words.

    Example:
        >>> PlantedRanking(PlantedRankingConfig()).batch("ood", 0, 100)
    """

    def __init__(self, config: PlantedRankingConfig) -> None:
        super().__init__(config)
        self.config = config

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each label."""
        return ("wrong", "right")

    def chance(self, split: str) -> float:
        """Return the accuracy of calling every answer wrong.

        Raises:
            ValueError: `split` is unknown.
        """
        require_choice("split", split, self.SPLITS)
        return 1 - 1 / self.config.n_answers

    def _draw(
        self, split: str, size: int, generator: np.random.Generator
    ) -> Batch[tuple[Tensor, Tensor]]:
        n = self.config.n_answers
        row, is_wrong = np.divmod(np.arange(size), n)
        # Wrong answers are of both kinds, each with probability 1/2.
        wrong = generator.integers(DENIES, MISSES, size=size, endpoint=True)
        kind = np.where(is_wrong, wrong, AFFIRMS)
        inputs, latents = self._draw_texts(split, row, kind, generator)
        targets = torch.from_numpy(kind == AFFIRMS).long()[:, None]
        return Batch(
            inputs=inputs,
            targets=targets,
            mask=torch.ones_like(targets, dtype=torch.bool),
            latents={"question": torch.from_numpy(row), **latents},
        )

    def groups(self, batch: Batch[Any]) -> dict[str, Bool[Tensor, " batch"]]:
        """Return the mask of the right answers, and of both kinds of wrong ones."""
        kind = batch.latents["kind"]
        return {name: kind == number for number, name in enumerate(("right", "denied", "missing"))}
