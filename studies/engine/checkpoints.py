"""The checkpoints of a training run, as safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from studies.engine.folders import RunError, write_atomically

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class Checkpoints:
    """What a run needs to go on: weights, moments and the log, in one file; and kept weights.

    Args:
        folder: where they lie.
        identity: what they must have been written with.
    """

    def __init__(self, folder: Path, identity: str):
        self._folder = folder
        self._identity = identity

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
        """Put the last state into a model and its optimizer; gives the log, empty if none.

        Raises:
            RunError: the checkpoint is damaged or of another identity.
        """
        path = self._folder / "last.safetensors"
        if not path.exists():
            return []
        device = next(model.parameters()).device
        tensors, metadata = _read(path, device)
        if metadata.get("identity") != self._identity:
            raise RunError(
                f"{path} is a checkpoint of another config ({metadata.get('identity')}, "
                f"not {self._identity})"
            )
        load_weights(model, path, device=device)
        for name, parameter in model.named_parameters():
            if f"step/{name}" in tensors:
                optimizer.state[parameter] = {
                    key: tensors[f"{key}/{name}"].clone() for key in _MOMENTS
                }
        log = json.loads(metadata["log"])
        # The log file may be ahead of the checkpoint by the line that the kill cut off.
        self._write_log(log)
        return log

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        log: list[dict[str, float]],
        *,
        best: bool,
    ) -> None:
        """Write the whole state, and if they are the `best` the weights."""
        weights = _weights(model)
        moments = {
            f"{key}/{name}": optimizer.state[parameter][key]
            for name, parameter in model.named_parameters()
            # What is not trained, or was not used so far, has none.
            if parameter in optimizer.state
            for key in _MOMENTS
        }
        metadata = {"identity": self._identity, "log": json.dumps(log)}
        # The best weights go first: a kill in between repeats the steps, and finds them again.
        if best:
            self._write("best", weights, metadata)
        self._write("last", weights | moments, metadata)
        self._write_log(log)

    def keep(self, model: nn.Module, step: int) -> None:
        """Write the weights after a step, for measures along training."""
        self._write(f"step-{step}", _weights(model), {"identity": self._identity})

    def _write(self, name: str, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        path = self._folder / f"{name}.safetensors"
        write_atomically(path, lambda place: save_file(tensors, place, metadata))

    def _write_log(self, log: list[dict[str, float]]) -> None:
        text = "".join(json.dumps(entry) + "\n" for entry in log)
        write_atomically(self._folder / "log.jsonl", lambda place: place.write_text(text))


def read_log(folder: Path) -> list[dict[str, float]]:
    """The log of the last checkpoint of a run folder, empty if there is none.

    Raises:
        RunError: the checkpoint is damaged.
    """
    path = folder / "last.safetensors"
    if not path.exists():
        return []
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads((file.metadata() or {}).get("log", "[]"))
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path} is damaged or no safetensors file: {error}") from error


def load_weights(model: nn.Module, path: Path, *, device: torch.device | str = "cpu") -> None:
    """Put the weights of a checkpoint (`best.safetensors`, say) into `model`.

    Raises:
        RunError: the file is missing, damaged, or does not fit the model.
    """
    tensors, _ = _read(path, device)
    weights = {name[len("model/") :]: t for name, t in tensors.items() if name.startswith("model/")}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise RunError(f"{path} does not fit the model: {error}") from error


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"model/{name}": tensor.detach().contiguous() for name, tensor in model.state_dict().items()
    }


def _read(path: Path, device: torch.device | str) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except FileNotFoundError as error:
        raise RunError(f"there is no checkpoint {path}") from error
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path} is damaged or no safetensors file: {error}") from error
