"""Data-parallel training of one model, under `accelerate launch` or `torchrun`."""

from __future__ import annotations

import os
from typing import Any, cast

import torch
from torch import Tensor, nn

from studies.engine.folders import RunError

DEVICES = ("cpu", "cuda", "mps")
"""The kinds of devices."""


class Processes:
    """The processes that train one model together; usually only this one.

    Attributes:
        first: whether this is the main process, which writes files.
        several: whether there is more than one.
    """

    def __init__(self, device: torch.device):
        self._accelerator, self.first = None, True
        self.several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if self.several:
            from accelerate import Accelerator

            self._accelerator = Accelerator(cpu=device.type == "cpu")
            self.first = self._accelerator.is_main_process

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model, wrapped so that gradients are averaged over the processes."""
        return model if self._accelerator is None else self._accelerator.prepare_model(model)

    def share(self, batch: Any) -> Any:
        """This process's share of a batch: every n-th example."""
        if self._accelerator is None:
            return batch
        return batch[self._accelerator.process_index :: self._accelerator.num_processes]

    def mean(self, value: Tensor) -> float:
        """The mean of a scalar over the processes."""
        if self._accelerator is not None:
            value = cast(Tensor, self._accelerator.reduce(value, reduction="mean"))
        return float(value)


def process_device(device: str) -> tuple[int, str]:
    """This process's rank, 0 if it runs alone, and its device.

    Raises:
        ValueError: there is no such kind of device.
    """
    kind, _, number = device.partition(":")
    is_numbered = kind == "cuda" and number.isdigit()
    if kind not in DEVICES or (":" in device and not is_numbered):
        raise ValueError(f"device must be {', '.join(DEVICES)} or cuda:N, got {device!r}")
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    return int(os.environ.get("RANK", "0")), device


def check_available(device: str) -> None:
    """Check that this machine has a device.

    Raises:
        RunError: it does not.
    """
    kind, _, number = device.partition(":")
    count = {"cuda": torch.cuda.device_count, "mps": torch.mps.device_count}.get(kind, lambda: 1)()
    if count <= int(number or 0):
        raise RunError(
            f"device must be available here, got {device!r}, of which torch {torch.__version__} "
            f"finds {count}"
        )
