"""What a measure receives: a trained model, its untrained version, and unseen examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xarray as xr
from torch import nn

from studies.engine.checkpoints import kept_checkpoints, load_mean_weights
from studies.engine.examples import Fresh
from studies.engine.folders import RunError
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
        folder: the folder of the run, with the weights that were kept; None without one.
    """

    setup: Any
    model: Any
    step: int
    device: str
    _fresh: Fresh
    folder: Path | None = None

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

    def averaged(self, n: int) -> Any:
        """The model with the mean of the weights at the last `n` steps of `training.keep_at`.

        Raises:
            RunError: fewer were kept.
        """
        kept = {} if self.folder is None else kept_checkpoints(self.folder)
        steps = [step for step in kept if step in self.setup.training.keep_at]
        if not 1 <= n <= len(steps):
            raise RunError(
                f"the mean of {n} checkpoints needs as many in training.keep_at, got {len(steps)}"
            )
        model = initial_model(self.setup, self.device)
        load_mean_weights(model, [kept[step] for step in steps[-n:]], device=self.device)
        return model.eval()

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
