"""Hooks at which an intervention does nothing, because nothing reads their value."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from probes.capturing.hooking import HookedModel, evaluating
from probes.capturing.inputs import Inputs, call, take_rows

_SPOILS = (math.nan, 0.0, math.inf, -math.inf, None)
"""Values with which an activation is filled; None rolls it, by which an argmax moves.

Weights of 0 let NaN through; comparisons, sizes and branches change with one of the others.
"""


def check_read(
    model: HookedModel, inputs: Inputs, sites: Iterable[Collection[str]], batch_size: int
) -> None:
    """Check that what is read from hooks reaches the output, in the first batch.

    A hook that is read passes, whether or not its value makes a difference there.

    Args:
        model: the model.
        inputs: its inputs.
        sites: hooks that are changed together, of which one must be read.
        batch_size: size of the first batch.

    Raises:
        ValueError: nothing downstream reads what the hooks of a site show, such as attention
            weights that a module only returns.
    """
    batch = take_rows(inputs, slice(batch_size))
    with evaluating(model):
        output = call(model, batch)
        for site in sites:
            if not any(_reaches(model, batch, site, output, value) for value in _SPOILS):
                raise ValueError(
                    "hooks of interventions must have values that are read downstream, got "
                    f"{', '.join(map(repr, sorted(site)))}, which nothing reads, like the "
                    "attention weights that some modules return: they can be captured, but not "
                    "intervened on"
                )


def _reaches(
    model: HookedModel, batch: Inputs, site: Collection[str], output: Any, value: float | None
) -> bool:
    """Whether the output is another one if the activations of hooks are spoiled."""
    try:
        spoiled = call(model, batch, dict.fromkeys(site, partial(_spoil, value=value)))
    except Exception:
        # What fails at such a value has read it, or did not fire, of which others tell.
        return True
    leaves, others = tree_leaves(output), tree_leaves(spoiled)
    return len(leaves) != len(others) or not all(map(_equal, leaves, others))


def _spoil(activation: Tensor, step: int, value: float | None) -> Tensor:
    if value is None:
        return activation.roll(1, -1)
    return torch.full_like(activation, value if activation.is_floating_point() else value > 0)


def _equal(first: Any, second: Any) -> bool:
    # An output with NaN equals none, and says nothing about hooks.
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return first is second or first == second
