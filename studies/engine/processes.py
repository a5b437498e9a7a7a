"""Several processes that train one model together, under `accelerate launch` or `torchrun`."""

from __future__ import annotations

import os
from typing import Any, cast

import torch
from torch import Tensor, nn


class Processes:
    """The processes that train one model together; most often there is one: the `first`."""

    def __init__(self, device: torch.device):
        self._accelerator, self.first = None, True
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import Accelerator

            self._accelerator = Accelerator(cpu=device.type == "cpu")
            self.first = self._accelerator.is_main_process

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model, with gradients shared between the processes."""
        return model if self._accelerator is None else self._accelerator.prepare_model(model)

    def share(self, batch: Any) -> Any:
        """This process's part of a batch: every n-th example."""
        if self._accelerator is None:
            return batch
        return batch[self._accelerator.process_index :: self._accelerator.num_processes]

    def mean(self, value: Tensor) -> float:
        """The mean of a scalar over the processes."""
        if self._accelerator is not None:
            value = cast(Tensor, self._accelerator.reduce(value, reduction="mean"))
        return float(value)


def process_device(device: str) -> tuple[int, str]:
    """This process's rank among them, 0 where it runs alone, and its own device."""
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    return int(os.environ.get("RANK", "0")), device
