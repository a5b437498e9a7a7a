"""What the tasks share: how right an answer is."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tasks.batch import Batch


def score_sequence(output: Int[Tensor, "batch pos"], batch: Batch[Any]) -> dict[str, Tensor]:
    """Return how right sequences are that end with a mark.

    Args:
        output: [batch, pos], ids from the first one on, whether decoded greedily or the argmax of
            teacher-forced logits. It may be shorter or longer than the targets; what follows the
            place of their end is not read.
        batch: the batch that they answer; its mask ends with the mark.

    Returns:
        `correct` [batch]: 1 where all that counts is right, else 0;
        `token_correct` [batch]: the share that is right.

    Raises:
        ValueError: `output` has another shape, or holds no whole numbers.
    """
    n, width = batch.targets.shape
    if output.ndim != 2 or len(output) != n or output.is_floating_point():
        raise ValueError(
            f"output of shape {tuple(output.shape)} and {output.dtype}: allowed are whole "
            f"numbers, ({n}, any)"
        )
    missing = max(0, width - output.shape[1])
    answers = torch.nn.functional.pad(output, (0, missing), value=-1)[:, :width]
    right = (answers == batch.targets) & batch.mask
    token_correct = right.sum(1) / batch.mask.sum(1)
    return {"correct": (token_correct == 1).float(), "token_correct": token_correct}


def score_class(
    logits: Float[Tensor, "batch 1 class"], batch: Batch[Any], n_classes: int
) -> dict[str, Float[Tensor, " batch"]]:
    """Return whether the most probable class is right.

    Args:
        logits: [batch, 1, n_classes].
        batch: the batch that they answer, with targets [batch, 1].
        n_classes: how many there are.

    Returns:
        `correct` [batch]: 1 where it is right, else 0.

    Raises:
        ValueError: `logits` has another shape.
    """
    expected = (len(batch), 1, n_classes)
    if tuple(logits.shape) != expected:
        raise ValueError(f"logits of shape {tuple(logits.shape)}: allowed is {expected}")
    return {"correct": (logits.argmax(-1) == batch.targets)[:, 0].float()}
