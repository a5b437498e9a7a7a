"""Batches and small settings that tests of several tasks share."""

FEW_NESTED = {
    "n_train": 101,
    "train_depth": 2,
    "valid_depths": (3, 3),
    "ood_depths": (4, 4),
    "n_id": 31,
    "n_valid": 31,
    "n_ood": 31,
}
"""Settings of arithmetic and ListOps with few, shallow expressions."""


def full_batch(task, split):
    """Return all examples of a split."""
    return task.batch(split, 0, task.size(split))
