"""Combinations that are held out, while training keeps each of their parts."""

import numpy as np
from jaxtyping import Int

_TRIES = 1000


def require_cover(share: float, n_left: int, size: int, n_parts: int, parts: str) -> None:
    """Raise a ValueError unless `n_left` combinations of `size` parts can have all parts."""
    if n_left * size < n_parts:
        raise ValueError(
            f"held_out must leave all {n_parts} {parts} in training, got {share!r}, which leaves "
            f"{n_left} sets of {size}"
        )


def hold_out(
    combinations: Int[np.ndarray, "combination *part"],
    n: int,
    generator: np.random.Generator,
) -> tuple[Int[np.ndarray, " train"], Int[np.ndarray, " ood"]]:
    """Draw the rows that are held out, again where training would lack a part of them.

    Args:
        combinations: the parts of each, as integers.
        n: number of combinations to hold out.

    Returns:
        The rows of training and those held out, in random order.

    Raises:
        ValueError: no random draw leaves all parts in training.
    """
    n_parts = len(np.unique(combinations))
    for _ in range(_TRIES):
        held_out, train = np.split(generator.permutation(len(combinations)), [n])
        if len(np.unique(combinations[train])) == n_parts:
            return train, held_out
    raise ValueError(
        f"held_out must leave all {n_parts} parts of the combinations in training, got "
        f"{n / len(combinations):g}: none of {_TRIES:,} random splits does so"
    )
