"""Several processes that train one model together, under `accelerate launch` or `torchrun`."""

from __future__ import annotations

import os
from typing import Any, cast

import torch
from torch import Tensor, nn


class Processes:
    """The processes that train one model together; most often there is one."""

    def __init__(self, device: torch.device):
        self._accelerator = None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import Accelerator

            self._accelerator = Accelerator(cpu=device.type == "cpu")

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self._accelerator is None or self._accelerator.is_main_process

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model, with gradients shared between the processes."""
        return model if self._accelerator is None else self._accelerator.prepare_model(model)

    def share(self, batch: Any) -> Any:
        """This process's part of a batch: every n-th example."""
        if self._accelerator is None:
            return batch
        mine = slice(self._accelerator.process_index, None, self._accelerator.num_processes)
        return batch[mine]

    def mean(self, value: Tensor) -> float:
        """The mean of a scalar over the processes."""
        if self._accelerator is not None:
            value = cast(Tensor, self._accelerator.reduce(value, reduction="mean"))
        return float(value)


def process_device(device: str) -> tuple[int, str]:
    """This process's rank under `accelerate launch` or `torchrun`, and its own device.

    (0, device) in a process that runs alone.
    """
    rank = int(os.environ.get("RANK", "0"))
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    return rank, device
