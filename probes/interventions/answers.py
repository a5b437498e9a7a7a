"""Answers that are compared with outcomes."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Int
from torch import Tensor


def check_outcomes(outcomes: Mapping[str, Tensor], examples: int) -> None:
    """Check that there are outcomes, each for this number of examples.

    Raises:
        ValueError: there is none, or one has another number of examples.
    """
    if not outcomes:
        raise ValueError("outcomes must name at least one outcome, got an empty mapping")
    for name, outcome in outcomes.items():
        if outcome.ndim == 0 or len(outcome) != examples:
            raise ValueError(
                f"outcomes[{name!r}] must have {examples} examples, "
                f"got shape {tuple(outcome.shape)}"
            )


def hits_of(
    answers: Int[Tensor, "example ..."], outcomes: Mapping[str, Tensor]
) -> Int[np.ndarray, "outcome example"]:
    """Whether each answer is the outcome, in all its entries; -1 in an outcome matches anything.

    Raises:
        ValueError: an outcome has another shape than the answers.
    """
    for name, outcome in outcomes.items():
        if outcome.shape != answers.shape:
            raise ValueError(
                f"outcomes[{name!r}] must have the shape of the answers, "
                f"{tuple(answers.shape)}, got {tuple(outcome.shape)}"
            )
    candidates = [outcome.cpu() for outcome in outcomes.values()]
    equal = [(answers == candidate) | (candidate == -1) for candidate in candidates]
    return np.stack(
        [matches.reshape(len(matches), -1).all(dim=1).numpy() for matches in equal]
    ).astype(np.int8)
