"""Random halves of the examples of each task: one to choose a path, one to score it."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor
from transformer_lens.utilities.statistics import derive_generator

from probes.oracle.problem import check_integers


@dataclass(frozen=True)
class Halves:
    """Random halves of the examples of a task: a path is chosen on one and scored on the other.

    The scored half has one more of an odd number of examples.
    """

    task: int
    choosing: Int[Tensor, " row"]
    scored: Int[Tensor, " row"]


def split_tasks(
    task: Int[Tensor, " example"], examples: int, seed: int, device: torch.device
) -> list[Halves]:
    """Split the examples of each task into halves, in the order of task ids.

    Raises:
        TypeError: `task` does not hold integers.
        ValueError: `task` has another shape, or a task has fewer than 2 examples.
    """
    check_integers("task", task)
    if task.shape != (examples,):
        raise ValueError(f"task must be [example], {(examples,)}, got {tuple(task.shape)}")
    result = []
    for task_id in task.unique().tolist():
        rows = (task == task_id).nonzero()[:, 0].cpu()
        if len(rows) < 2:
            raise ValueError(f"task must have at least 2 examples per task, got 1 of {task_id}")
        generator = derive_generator(seed, "halves", task_id)
        rows = rows[torch.randperm(len(rows), generator=generator)].to(device)
        result.append(Halves(task_id, rows[: len(rows) // 2], rows[len(rows) // 2 :]))
    return result
