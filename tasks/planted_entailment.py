"""Planted entailment: does one text follow from another, contradict it, or neither?

Designed for attention between two texts that adds, subtracts or deletes (Tay et al. 2019, "CoDA"):
the sign of every pair of words is known.
"""

import numpy as np
import torch
from torch import Tensor

from tasks.batch import Batch
from tasks.common import require_choice
from tasks.planted_texts import AFFIRMS, MISSES, PlantedTexts, PlantedTextsConfig


class PlantedEntailment(PlantedTexts):
    """Hypotheses with premises that affirm, deny or miss what they state; see `PlantedTexts`.

    The hypothesis is the question there, the premise the answer. Of as many words that count,

        label = entailment if sum over i, j of sign_ij = n_asked, contradiction if it is n_asked - 2
        (one is denied), neutral if it is n_asked - 1 (one is missing).

    All labels are equally frequent. Neither text alone tells the label, but for the trace of the
    held-out sets that `PlantedTexts` describes.

    Splits: `train` and `id` have the same sets of stated concepts, `ood` those held out.

    A batch has inputs, a tuple of hypothesis [batch, pos_a] and premise [batch, pos_b], int64 word
    ids below `vocabulary_size`, padded with 0; targets [batch, 1] int64, indices into `classes`;
    mask [batch, 1], all True; and the latents (int64)
    `sign` [batch, pos_a, pos_b];
    `kind` [batch]: the label;
    `combination` [batch]: the row in `combinations(split)`;
    `length_a`, `length_b` [batch]: numbers of words.

    Example:
        >>> len(PlantedEntailment(PlantedTextsConfig()).batch("ood", 0, 100))
        100
    """

    def __init__(self, config: PlantedTextsConfig) -> None:
        super().__init__(config)
        self.config = config

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each label."""
        return ("entailment", "contradiction", "neutral")

    def chance(self, split: str) -> float:
        """Return the accuracy of guessing.

        Raises:
            ValueError: `split` is unknown.
        """
        require_choice("split", split, self.SPLITS)
        return 1 / len(self.classes)

    def _draw(
        self, split: str, size: int, generator: np.random.Generator
    ) -> Batch[tuple[Tensor, Tensor]]:
        kind = generator.integers(AFFIRMS, MISSES, size=size, endpoint=True)
        inputs, latents = self._draw_texts(split, np.arange(size), kind, generator)
        targets = latents["kind"][:, None]
        return Batch(
            inputs=inputs,
            targets=targets,
            mask=torch.ones_like(targets, dtype=torch.bool),
            latents=latents,
        )
