"""Scores of answers that several tasks share."""

from abc import ABC, abstractmethod
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tasks.batch import Batch
from tasks.common import require_shape


def score_sequence(output: Int[Tensor, "batch pos"], batch: Batch[Any]) -> dict[str, Tensor]:
    """Return whether each output sequence, which ends with an end token, is correct.

    Args:
        output: [batch, pos], token ids from the first target on, decoded greedily or the argmax of
            teacher-forced logits. It may be shorter or longer than the targets; what follows the
            position of their end token is not read.
        batch: the batch that was answered; its mask is True up to the end token.

    Returns:
        `correct` [batch]: 1 where all masked tokens and the end token are right, else 0: the same
        for greedy and for teacher-forced output;
        `token_correct` [batch]: the share of these tokens that is right, which can differ between
        the two.

    Raises:
        ValueError: `output` has another shape or is not of integers.
    """
    n, width = batch.targets.shape
    if output.ndim != 2 or len(output) != n or output.is_floating_point():
        raise ValueError(
            f"output must be integers of shape ({n}, pos), got {output.dtype} of shape "
            f"{tuple(output.shape)}"
        )
    missing = max(0, width - output.shape[1])
    answers = torch.nn.functional.pad(output, (0, missing), value=-1)[:, :width]
    right = (answers == batch.targets) & batch.mask
    token_correct = right.sum(1) / batch.mask.sum(1)
    return {"correct": (token_correct == 1).float(), "token_correct": token_correct}


def is_correct(
    logits: Float[Tensor, "batch 1 class"], batch: Batch[Any], n_classes: int
) -> Float[Tensor, " batch"]:
    """Return 1 where the most probable class is the target, else 0, [batch].

    Args:
        logits: [batch, 1, n_classes].
        batch: the batch that was answered, with targets [batch, 1].
        n_classes: number of classes.

    Raises:
        ValueError: `logits` has another shape.
    """
    require_shape("logits", logits, (len(batch), 1, n_classes))
    return (logits.argmax(-1) == batch.targets)[:, 0].float()


class LabelledAnswers(ABC):
    """A task whose answer is one of a few labels."""

    @property
    @abstractmethod
    def classes(self) -> tuple[str, ...]:
        """The name of each label."""

    @final
    def score(
        self, logits: Float[Tensor, "batch 1 class"], batch: Batch[Any]
    ) -> dict[str, Float[Tensor, " batch"]]:
        """Return `correct` [batch]: 1 where the most probable label is the target, else 0.

        Args:
            logits: [batch, 1, class].
            batch: the batch that was answered.

        Raises:
            ValueError: `logits` has another shape.
        """
        return {"correct": is_correct(logits, batch, len(self.classes))}
