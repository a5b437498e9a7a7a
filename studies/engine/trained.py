"""What a measure receives: a trained model, its untrained version, and unseen examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import xarray as xr
from torch import nn

from studies.engine.examples import Fresh
from studies.engine.setup import Setup
from tasks import Batch


@dataclass(frozen=True)
class Trained:
    """The argument of a measure: a trained model, its untrained version, and unseen examples.

    Attributes:
        setup: the settings of the cell.
        model: the model at its tested checkpoint, or at one along training; in evaluation mode.
        step: the training step of that checkpoint.
        device: the device of the models.
    """

    setup: Any
    model: Any
    step: int
    device: str
    _fresh: Fresh

    @property
    def task(self) -> Any:
        """The setup's task, for its labels, solvers and scores."""
        return self.setup.sampler()

    @property
    def seed(self) -> int:
        """The seed of the cell, for random numbers of a measure."""
        return self.setup.seed

    @cached_property
    def untrained(self) -> Any:
        """The model of the same seed before training, in evaluation mode."""
        return initial_model(self.setup, self.device).eval()

    def batches(self, split: str, n: int | None = None) -> Iterator[Batch[Any]]:
        """The next `n` examples of a split, in evaluation batches; see `Fresh.batches`.

        They were not used by training, checkpoint selection or earlier calls, nor, in an endless
        split, by other measures.
        """
        return self._fresh.batches(split, n)

    def batch(self, split: str, n: int | None = None) -> Batch[Any]:
        """The next `n` examples of a split in a single batch; see `batches`."""
        return Batch.cat(list(self.batches(split, n)))


Measure = Callable[[Trained], "xr.Dataset | xr.DataTree | None"]
"""An analysis of a trained model; returns None if it does not apply to the model."""


def initial_model(setup: Setup, device: str) -> nn.Module:
    """The untrained model of a setup, as it is tested."""
    return setup.build_tested(torch.Generator().manual_seed(setup.seed)).to(device)
